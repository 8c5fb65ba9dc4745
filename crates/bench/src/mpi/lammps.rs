//! LAMMPS over the soft device and over UCX's shared memory: the same results, and the time of communication.

use std::path::Path;
use std::process::Command;

use crate::mpi::Outcome;
use crate::mpi::ranks::{DEVICE, SHARED_MEMORY, mpirun, output};
use crate::{Figure, Table, median};

const RANKS: usize = 2;
/// Input scripts; links to the conformance client.
const INPUTS: [(&str, &str); 3] = [
    ("melt", include_str!("lammps/melt.in")),
    ("chain", include_str!("lammps/chain.in")),
    ("eam", include_str!("lammps/eam.in")),
];

/// What a run printed.
struct LammpsRun {
    /// Seconds of the time steps, and of communication among them.
    times: [f64; 2],
    /// Final positions and velocities of all atoms, as the run wrote them.
    atoms: Vec<u8>,
}

/// Adds loop and communication time of each input. Returns notes.
pub(super) fn measure(
    table: &mut Table,
    library_dir: &Path,
    folder: &Path,
    rounds: usize,
) -> Outcome<Vec<String>> {
    if Command::new("lmp").arg("-h").output().is_err() {
        table.not_measured("LAMMPS", "lmp is not installed; apt-get install lammps");
        return Ok(Vec::new());
    }
    let folder = folder.join("mpi");
    let mut notes = Vec::new();
    for (name, script) in INPUTS {
        std::fs::write(folder.join("in.lammps"), script)?;
        let mut times: [[Vec<f64>; 2]; 2] = Default::default();
        for _ in 0..rounds {
            let runs = [run(DEVICE, library_dir, &folder)?, run(SHARED_MEMORY, library_dir, &folder)?];
            if runs[0].atoms != runs[1].atoms {
                return Err(format!("LAMMPS {name}: the final atoms differ between the transports").into());
            }
            for (times, run) in times.iter_mut().zip(&runs) {
                times[0].push(run.times[0]);
                times[1].push(run.times[1]);
            }
        }
        let middle = |transport: usize, part: usize| median(&times[transport][part]).unwrap_or(0.0);
        for (part, what) in [(0, "loop"), (1, "communication")] {
            let name = format!("LAMMPS {name}, {what} time");
            table.push(Figure::with_baseline(name, middle(0, part), "s", middle(1, part)));
        }
        notes.push(format!("LAMMPS {name}: positions and velocities of all atoms are equal bit for bit"));
    }
    Ok(notes)
}

fn run(tls: &str, library_dir: &Path, folder: &Path) -> Outcome<LammpsRun> {
    let mut command = mpirun(RANKS, tls, library_dir);
    command.current_dir(folder).args(["lmp", "-in", "in.lammps", "-log", "none"]);
    let text = output(&mut command, "lammps")?;
    let times = times(&text).ok_or_else(|| format!("LAMMPS printed no times:\n{text}"))?;
    Ok(LammpsRun { times, atoms: std::fs::read(folder.join("atoms.bin"))? })
}

/// Loop time and average communication time in LAMMPS's report.
fn times(text: &str) -> Option<[f64; 2]> {
    let total =
        text.lines().find_map(|line| line.strip_prefix("Loop time of ")?.split(' ').next()?.parse().ok())?;
    // "Comm    | min | avg | max | %varavg | %total"
    let mut comm = text.lines().find(|line| line.starts_with("Comm "))?.split('|');
    Some([total, comm.nth(2)?.trim().parse().ok()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_report_are_read() {
        let report = "Loop time of 0.25 on 2 procs for 100 steps with 4000 atoms\n\
             Section |  min time  |  avg time  |  max time  |%varavg| %total\n\
             Comm    | 0.01       | 0.02       | 0.03       |   0.0 |  8.00\n";
        assert_eq!(times(report), Some([0.25, 0.02]));
        assert_eq!(times("Loop time of 0.25 on 2 procs\n"), None);
    }
}
