//! HPC Challenge over the soft device and over UCX's shared memory: PTRANS and MPIFFT.

use std::path::Path;

use crate::mpi::Outcome;
use crate::mpi::ranks::{DEVICE, SHARED_MEMORY, mpirun, output};
use crate::tools::is_installed;
use crate::{Figure, Table, median};

const RANKS: usize = 2;
/// Input of HPC Challenge. All its other tests run as well, on small problems.
const INPUT: &str = include_str!("hpcc/hpccinf.txt");
/// Rows and columns of the measured matrix of PTRANS in [`INPUT`].
const MATRIX: &str = "4000";
/// HPC Challenge transposes each matrix so many times, and prints the minimum so far.
const TRANSPOSITIONS: usize = 5;

/// Names and units of the figures of a run.
const FIGURES: [(&str, &str); 2] = [("HPCC PTRANS", "GB/s"), ("HPCC MPIFFT", "Gflop/s")];

/// Adds the figures of PTRANS and MPIFFT. Returns notes.
pub(super) fn measure(
    table: &mut Table,
    library_dir: &Path,
    folder: &Path,
    rounds: usize,
) -> Outcome<Vec<String>> {
    if !is_installed("hpcc") {
        table.not_measured("HPC Challenge", "apt-get install hpcc");
        return Ok(Vec::new());
    }
    let folder = folder.join("mpi/hpcc");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("hpccinf.txt"), INPUT)?;
    // By figure, by transport, the value of each round.
    let mut values: [[Vec<f64>; 2]; 2] = Default::default();
    for _ in 0..rounds {
        for (transport, tls) in [DEVICE, SHARED_MEMORY].into_iter().enumerate() {
            let run = run(tls, library_dir, &folder)?;
            values.iter_mut().zip(run).for_each(|(values, value)| values[transport].push(value));
        }
    }
    for ((name, unit), [device, shared]) in FIGURES.iter().zip(&values) {
        let middle = |values: &[f64]| median(values).unwrap_or(0.0);
        table.push(Figure::with_baseline(*name, middle(device), unit, middle(shared)));
    }
    Ok(vec!["HPC Challenge: all residual checks passed".to_owned()])
}

/// The values of [`FIGURES`]. A failed residual check is an error.
fn run(tls: &str, library_dir: &Path, folder: &Path) -> Outcome<[f64; 2]> {
    // HPC Challenge appends to its report.
    let report = folder.join("hpccoutf.txt");
    if report.exists() {
        std::fs::remove_file(&report)?;
    }
    let mut command = mpirun(RANKS, tls, library_dir);
    // Each rank has a processor. With yields, RandomAccess takes most of the run.
    command.current_dir(folder).env("OMPI_MCA_mpi_yield_when_idle", "0").arg("hpcc");
    output(&mut command, "hpcc")?;
    let text = std::fs::read_to_string(&report)?;
    if !text.lines().any(|line| line == "Success=1") {
        return Err(format!("HPC Challenge over {tls} failed:\n{text}").into());
    }
    figures(&text).ok_or_else(|| format!("HPC Challenge printed no results:\n{text}").into())
}

/// PTRANS and MPIFFT in the report of HPC Challenge. As in its summary, PTRANS is the best of equal matrices, of which each
/// has the slowest of its transpositions.
fn figures(report: &str) -> Option<[f64; 2]> {
    // "WALL M N MB NB P Q TIME CHECK GB/s RESID"
    let rates: Option<Vec<f64>> = report
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|words| words.len() == 11 && words[..3] == ["WALL", MATRIX, MATRIX])
        .map(|words| (words[8] == "PASSED").then(|| words[9].parse().ok())?)
        .collect();
    let slowest = rates?.into_iter().skip(TRANSPOSITIONS - 1).step_by(TRANSPOSITIONS);
    let fft = report.lines().find_map(|line| line.strip_prefix("MPIFFT_Gflops=")?.parse().ok())?;
    Some([slowest.max_by(f64::total_cmp)?, fft])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_report_are_read() {
        let row = |n, rate| format!("WALL  {n}  {n}  80  80   1   2     0.03 PASSED    {rate}  0.00\n");
        let matrix = |n, rates: [f64; 5]| rates.map(|rate| row(n, rate)).concat();
        let report = [
            matrix(4000, [4.7, 4.7, 4.7, 4.7, 4.4]),
            matrix(4000, [5.1, 5.1, 5.0, 5.0, 4.8]),
            matrix(1450, [9.0; 5]),
            "MPIFFT_Gflops=6.76421\nSuccess=1\n".to_owned(),
        ];
        assert_eq!(figures(&report.concat()), Some([4.8, 6.764_21]));
        assert_eq!(figures(&report.concat().replacen("PASSED", "FAILED", 1)), None);
        assert_eq!(figures(&matrix(4000, [4.7; 5])), None);
        assert_eq!(figures("MPIFFT_Gflops=6.76421\n"), None);
    }
}
