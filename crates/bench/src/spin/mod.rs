//! `millstream bench spin`: spin updates of the over-relaxed spin glass, against C, and what the network adds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use millstream_application::TorusApplication as _;
use millstream_spin::glass::{GlassOptions, GlassReport, GlassRun};
use millstream_spin::{Lattice, Reference};

use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "spin",
    title: "Spin glass",
    measures: "Time of a spin update by over-relaxation on a cube of float32 spins: in one process with threads, of C programs \
               (OpenMP loop, wavefronts of several sweeps; two threads where not named) with the same data layout, and on 1 to 8 nodes as threads. All \
               programs compute the same bits, which the benchmark checks first. The time of all nodes in communication is the \
               sum over the nodes of the elapsed time in packing, puts and unpacking. With more nodes than cores it contains the \
               time in which other nodes had the core.",
    baseline: "the fastest C wavefront with as many threads; for several nodes one node with two threads",
    values: "medians over the rounds",
    command: "make bench-apps",
};

/// The benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum SpinError {
    /// A program cannot be started.
    #[error("cannot start {program}: {cause}")]
    Start {
        /// The program.
        program: String,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// gcc rejected the C program.
    #[error("gcc cannot compile spin.c: {0}")]
    Compile(String),
    /// A file cannot be written.
    #[error("cannot write {}: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// A program printed something else than seconds and a checksum.
    #[error("the C program printed {0:?}")]
    Answer(String),
    /// A program computes another result.
    #[error("the result of {0} differs from the reference")]
    Different(String),
    /// The application failed.
    #[error(transparent)]
    Application(#[from] millstream_application::ApplicationError),
}

/// Options of the benchmark.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sites along each axis.
    pub side: usize,
    /// Sweeps of a measurement.
    pub sweeps: u64,
    /// Interleaved rounds.
    pub rounds: usize,
    /// Folder for the C program.
    pub folder: PathBuf,
}

/// Methods of the C program, and the names of their figures.
const C_METHODS: [(&str, &str); 5] = [
    ("loop", "C, OpenMP loop"),
    ("wavefront1", "C, wavefront over 1 sweep"),
    ("wavefront2", "C, wavefront over 2 sweeps"),
    ("wavefront4", "C, wavefront over 4 sweeps"),
    ("wavefront8", "C, wavefront over 8 sweeps"),
];

/// Threads of the C programs. All methods run with the first number, only wavefronts with the second.
const C_THREADS: [usize; 2] = [2, 1];

/// Shapes, threads a node and sweeps between exchanges. The first one is the kernel's best.
const SHAPES: [(&str, usize, usize); 7] = [
    ("1x1x1", 2, 8),
    ("1x1x1", 2, 4),
    ("1x1x1", 1, 8),
    ("1x1x2", 1, 4),
    ("1x2x2", 1, 4),
    ("1x2x4", 1, 4),
    ("2x2x2", 1, 4),
];

/// Measures all figures.
///
/// # Errors
/// The first error of a program.
pub fn run(options: &Options) -> Result<Table, SpinError> {
    let program = compile(&options.folder)?;
    check(&program, &options.folder)?;
    let mut times = vec![Vec::new(); SHAPES.len() + c_programs().count()];
    let mut adds = vec![Vec::new(); SHAPES.len()];
    let updates = options.sweeps as f64 * (options.side as f64).powi(3);
    for round in 0..=options.rounds {
        let mut measured = Vec::new();
        let mut network = Vec::new();
        for (dimensions, threads, depth) in SHAPES {
            let report = ours(dimensions, [options.side; 3], options.sweeps, threads, depth)?;
            measured.push(report.ps_per_update);
            // Time of all nodes in packing, puts and unpacking. It contains the time in which other nodes had the core.
            let seconds: f64 = report.nodes.iter().map(|node| node.communicate_s).sum();
            network.push(seconds * 1e12 / updates);
        }
        for (method, _, threads) in c_programs() {
            let (seconds, _) = run_c(&program, method, threads, [options.side; 3], options.sweeps, None)?;
            measured.push(seconds * 1e12 / updates);
        }
        // The first round is a warm-up.
        if round > 0 {
            times.iter_mut().zip(measured).for_each(|(times, time)| times.push(time));
            adds.iter_mut().zip(network).for_each(|(adds, add)| adds.push(add));
        }
    }
    Ok(table(options, &times, &adds))
}

/// Method, figure and threads of the C programs that are measured.
fn c_programs() -> impl Iterator<Item = (&'static str, &'static str, usize)> {
    C_THREADS.into_iter().flat_map(|threads| {
        let methods = C_METHODS.into_iter().filter(move |(method, _)| threads > 1 || *method != "loop");
        methods.map(move |(method, name)| (method, name, threads))
    })
}

fn table(options: &Options, times: &[Vec<f64>], adds: &[Vec<f64>]) -> Table {
    let medians: Vec<f64> = times.iter().map(|times| median(times).unwrap_or(0.0)).collect();
    let (ours, c) = medians.split_at(SHAPES.len());
    let best = |wanted: usize| {
        let alike =
            c_programs().zip(c).filter(|((method, _, threads), _)| *method != "loop" && *threads == wanted);
        alike.map(|(_, &time)| time).fold(f64::INFINITY, f64::min)
    };
    let mut table = Table::new(BENCHMARK, options.rounds);
    let side = options.side;
    for (i, ((dimensions, threads, depth), &time)) in SHAPES.iter().zip(ours).enumerate() {
        let name = format!("{dimensions} nodes, {threads} threads each, {depth} sweeps together, {side}³");
        let baseline = if i < 3 { best(*threads) } else { ours[0] };
        table.push(Figure::with_baseline(name, time, "ps/update", baseline));
        if i >= 3 {
            let name = format!("{dimensions} nodes, time of all nodes in communication, {side}³");
            let add = median(&adds[i]).unwrap_or(0.0);
            table.push(Figure::with_baseline(name, add, "ps/update", ours[0]));
        }
    }
    for ((_, name, threads), &time) in c_programs().zip(c) {
        let one_thread = if threads == 1 { ", 1 thread" } else { "" };
        let name = format!("{name}{one_thread}, {side}³");
        table.push(Figure::with_baseline(name, time, "ps/update", best(threads)));
    }
    table
}

fn ours(
    dimensions: &str,
    size: [usize; 3],
    sweeps: u64,
    threads: usize,
    depth: usize,
) -> Result<GlassReport, SpinError> {
    let parameters = |error: String| millstream_application::ApplicationError::Parameters(error);
    let glass = GlassOptions {
        lattice: Lattice::new(size, 1).map_err(|error| parameters(error.to_string()))?,
        sweeps,
        depth,
        threads,
        measure_every: u64::MAX,
        checkpoint: None,
        checkpoint_every: 1,
        resume: false,
        fail_at: None,
        plane: false,
        on_card: false,
    };
    let torus = dimensions.parse().map_err(|_| parameters(format!("dimensions {dimensions}")))?;
    Ok(GlassRun::<f32>::new(&glass).run_on_threads(torus)?)
}

fn compile(folder: &Path) -> Result<PathBuf, SpinError> {
    let (source, program) = (folder.join("spin.c"), folder.join("spin"));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&source, include_str!("spin.c")));
    written.map_err(|cause| SpinError::Write { path: source.clone(), cause })?;
    // Without contraction: fused operations would round differently.
    let flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-ffp-contract=off", "-o"];
    let output = Command::new("gcc").args(flags).arg(&program).arg(&source).output();
    let output = output.map_err(|cause| SpinError::Start { program: "gcc".to_owned(), cause })?;
    if !output.status.success() {
        return Err(SpinError::Compile(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    Ok(program)
}

/// Seconds and checksum of the C program.
fn run_c(
    program: &Path,
    method: &str,
    threads: usize,
    size: [usize; 3],
    sweeps: u64,
    file: Option<&Path>,
) -> Result<(f64, u64), SpinError> {
    let mut command = Command::new(program);
    command.arg(method).args(size.map(|n| n.to_string())).arg(sweeps.to_string()).args(file);
    // Pin each OpenMP thread to its core.
    let output = command.env("OMP_PROC_BIND", "true").env("OMP_NUM_THREADS", threads.to_string()).output();
    let output =
        output.map_err(|cause| SpinError::Start { program: program.display().to_string(), cause })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.split_once(' ').map(|(seconds, sum)| (seconds.parse(), sum.trim().parse()));
    match words {
        Some((Ok(seconds), Ok(sum))) => Ok((seconds, sum)),
        _ => Err(SpinError::Answer(text)),
    }
}

/// Checks that all programs compute the same result, bit for bit.
fn check(program: &Path, folder: &Path) -> Result<(), SpinError> {
    let (size, sweeps) = ([36, 22, 40], 11);
    let parameters = |error: millstream_spin::LatticeError| {
        millstream_application::ApplicationError::Parameters(error.to_string())
    };
    let mut reference = Reference::new(Lattice::new(size, 1).map_err(parameters)?);
    let file = folder.join("spins");
    let bytes = reference.to_bytes();
    fs::write(&file, bytes).map_err(|cause| SpinError::Write { path: file.clone(), cause })?;
    (0..sweeps).for_each(|_| reference.sweep());
    let wanted = reference.checksum();
    for (method, name) in C_METHODS {
        if run_c(program, method, C_THREADS[0], size, sweeps, Some(&file))?.1 != wanted {
            return Err(SpinError::Different(name.to_owned()));
        }
    }
    for (dimensions, threads, depth) in SHAPES {
        let report = ours(dimensions, size, sweeps, threads, depth)?;
        if report.last().map(|last| last.checksum) != Some(wanted) {
            return Err(SpinError::Different(format!("{dimensions} nodes")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_compares_the_kernel_with_c() {
        let folder = std::env::temp_dir().join(format!("millstream-bench-spin-{}", std::process::id()));
        let table = run(&Options { side: 32, sweeps: 8, rounds: 1, folder: folder.clone() }).unwrap();
        fs::remove_dir_all(folder).unwrap();
        assert_eq!(table.figures().len(), c_programs().count() + SHAPES.len() + 4, "{table}");
        assert!(table.figures().iter().all(|figure| figure.value > 0.0), "{table}");
    }
}
