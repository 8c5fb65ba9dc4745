//! `millstream bench stencil`: the stencil kernel against the same computation in C, numba and numpy.

pub mod jobs;
mod peer_program;
mod region_kernel;
mod wasm;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use millstream_shm::{Mapping, Memfd};
use millstream_stencil::{Element, Jacobi, Plane, reference};

use crate::{Benchmark, Figure, Table, median};
use peer_program::PeerProgram;

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "stencil",
    title: "Stencil kernel",
    measures: "Grid points per second of the five-point Jacobi kernel in one process, of C programs (OpenMP loop, \
               non-temporal stores, wavefronts of several sweeps) with float32 and, where not named, with all cores, of numba \
               and numpy, and of the WebAssembly example kernel. All programs compute the same bits, which the benchmark checks \
               first.",
    baseline: "the fastest C wavefront with as many threads; for the WebAssembly kernel the native kernel",
    values: "medians over the rounds",
    command: "make bench-card",
};

/// The benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum StencilError {
    /// The memory for the grids cannot be allocated.
    #[error("cannot allocate a grid: {0}")]
    Memory(#[from] std::io::Error),
    /// A program cannot be started.
    #[error("cannot start {}: {cause}", program.display())]
    Start {
        /// The program.
        program: OsString,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// gcc rejected the C program.
    #[error("gcc cannot compile stencil.c: {0}")]
    Compile(String),
    /// A source file cannot be written.
    #[error("cannot write {}: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// A program answered a request with something else than a number.
    #[error("the {program} program answered {answer:?}")]
    Answer {
        /// The program.
        program: &'static str,
        /// Its answer; empty if the program has exited.
        answer: String,
    },
    /// A program computes another result.
    #[error("the result of {method} differs from the reference")]
    Different {
        /// The method of the program.
        method: String,
    },
}

/// Options of the benchmark.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rows and columns of the grid.
    pub side: usize,
    /// Interleaved rounds.
    pub rounds: usize,
    /// The folder for sources and compiled programs.
    pub folder: PathBuf,
    /// A Python interpreter with numpy and numba, if there is one.
    pub python: Option<PathBuf>,
}

/// Rows, columns and sweeps of the comparison of results.
const CHECK: (usize, usize, usize) = (301, 477, 35);

/// Methods of the C program, their sweeps per measurement, and the names of their figures.
const C_METHODS: [(&str, usize, &str); 5] = [
    ("loop", 6, "C, OpenMP loop"),
    ("nontemporal", 6, "C, non-temporal stores"),
    ("wavefront8", 32, "C, wavefront over 8 sweeps"),
    ("wavefront12", 36, "C, wavefront over 12 sweeps"),
    ("wavefront16", 32, "C, wavefront over 16 sweeps"),
];

/// Methods of the Python program and their sweeps per measurement.
const PYTHON_SWEEPS: [(&str, usize); 2] = [("numba", 6), ("numpy", 1)];

/// Measures all figures.
///
/// # Errors
/// The first error of a program or of a kernel.
pub fn run(options: &Options) -> Result<Table, Box<dyn std::error::Error>> {
    let mut table = run_kernel(options)?;
    match wasm::compile(&options.folder) {
        Ok(image) => wasm::measure(&mut table, &image, options.rounds)?,
        Err(why) => table.not_measured("WebAssembly", &why.to_string()),
    }
    Ok(table)
}

/// The figures of the native kernel and of the peer programs.
fn run_kernel(options: &Options) -> Result<Table, StencilError> {
    let side = options.side;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut table = Table::new(BENCHMARK, options.rounds);
    let mut c = PeerProgram::c(&options.folder, side, threads)?;
    let mut c_one_thread = PeerProgram::c(&options.folder, side, 1)?;
    let wavefronts = C_METHODS.into_iter().filter(|(method, ..)| method.starts_with("wavefront"));
    let python = match &options.python {
        Some(python) => Some(PeerProgram::python(python, &options.folder, side)?),
        None => None,
    };
    let (mut python, methods) =
        python.map_or((None, Vec::new()), |(program, methods)| (Some(program), methods));
    let python_methods: Vec<_> =
        PYTHON_SWEEPS.into_iter().filter(|(name, _)| methods.iter().any(|other| other == name)).collect();
    for (name, _) in PYTHON_SWEEPS.iter().filter(|(name, _)| !methods.iter().any(|other| other == name)) {
        table.not_measured(*name, "it is not installed (`make bench-card` installs it)");
    }
    check(&mut c, &mut python, &python_methods)?;

    let mut native = [
        NativeKernel::<f32>::new(side, threads, 32, usize::MAX)?,
        NativeKernel::new(side, 1, 16, usize::MAX)?,
        NativeKernel::new(side, threads, 6, 1)?,
    ];
    let mut double = NativeKernel::<f64>::new(side, threads, 16, usize::MAX)?;
    let mut rates = Vec::new();
    for round in 0..=options.rounds {
        let mut measured = Vec::new();
        measured.extend(native.iter_mut().map(NativeKernel::points_per_second));
        measured.push(double.points_per_second());
        for (method, sweeps, _) in C_METHODS {
            measured.push(rate(side, sweeps, c.run(method, sweeps)?));
        }
        for (method, sweeps, _) in wavefronts.clone() {
            measured.push(rate(side, sweeps, c_one_thread.run(method, sweeps)?));
        }
        for &(method, sweeps) in &python_methods {
            if let Some(python) = &mut python {
                measured.push(rate(side, sweeps, python.run(method, sweeps)?));
            }
        }
        rates.resize(measured.len(), Vec::new());
        // The first round is a warm-up.
        if round > 0 {
            rates.iter_mut().zip(measured).for_each(|(rates, rate)| rates.push(rate));
        }
    }

    const ONE_THREAD: &str = ", 1 thread";
    let names = [
        format!("stencil, float32, {threads} threads"),
        format!("stencil, float32{ONE_THREAD}"),
        format!("stencil, float32, {threads} threads, one sweep per pass"),
        format!("stencil, float64, {threads} threads"),
    ];
    let c_names = C_METHODS.map(|(_, _, name)| name.to_owned());
    let c_one_thread_names = wavefronts.map(|(.., name)| format!("{name}{ONE_THREAD}"));
    let python_names = python_methods.iter().map(|(name, _)| (*name).to_owned());
    let names = names.into_iter().chain(c_names).chain(c_one_thread_names).chain(python_names);
    let figures: Vec<_> =
        names.zip(&rates).map(|(name, rates)| (name, median(rates).unwrap_or(0.0) / 1e9)).collect();
    let best = |has_one_thread| {
        let wavefronts = figures.iter().filter(|(name, _)| name.contains("wavefront"));
        let alike = wavefronts.filter(|(name, _)| name.ends_with(ONE_THREAD) == has_one_thread);
        alike.map(|&(_, rate)| rate).fold(0.0, f64::max)
    };
    let [best_of_one, best_of_all] = [true, false].map(best);
    for (name, rate) in &figures {
        let best = if name.ends_with(ONE_THREAD) { best_of_one } else { best_of_all };
        let figure = format!("{name}, {side}×{side}");
        table.push(match name.contains("float64") {
            // The C programs have float32 only.
            true => Figure::without_baseline(figure, *rate, "G points/s"),
            false => Figure::with_baseline(figure, *rate, "G points/s", best),
        });
    }
    Ok(table)
}

/// Checks that all programs compute the same result, bit for bit.
fn check(
    c: &mut PeerProgram,
    python: &mut Option<PeerProgram>,
    python_methods: &[(&str, usize)],
) -> Result<(), StencilError> {
    let (rows, columns, sweeps) = CHECK;
    let mut cells = generated(rows, columns);
    let wanted = sum(&reference(&cells, rows, columns, sweeps));
    let mut other = cells.clone();
    let (source, destination) = (Plane::of(&mut cells, rows, columns), Plane::of(&mut other, rows, columns));
    // SAFETY: two grids of ours.
    let outcome = unsafe { Jacobi::new(2).run(source, destination, sweeps, &|| true) };
    outcome.expect("the callback never stops it");
    let mut results = vec![("the stencil kernel", sum(&other))];
    for (method, _, name) in C_METHODS {
        results.push((name, c.check(method, rows, columns, sweeps)?));
    }
    for (method, _) in python_methods {
        if let Some(python) = python {
            results.push((method, python.check(method, rows, columns, sweeps)?));
        }
    }
    match results.iter().find(|(_, sum)| *sum != wanted) {
        Some((method, _)) => Err(StencilError::Different { method: (*method).to_owned() }),
        None => Ok(()),
    }
}

/// The grid that all programs start from.
fn generated(rows: usize, columns: usize) -> Vec<f32> {
    (0..(rows * columns) as u64).map(|at| (at * 2_654_435_761 % 1_048_573) as f32 / 1024.0).collect()
}

/// A checksum over the bits of all cells.
fn sum(cells: &[f32]) -> u64 {
    let terms = (0u64..).zip(cells).map(|(at, cell)| u64::from(cell.to_bits()).wrapping_mul(2 * at + 1));
    terms.fold(0, u64::wrapping_add)
}

fn rate(side: usize, sweeps: usize, time: Duration) -> f64 {
    (side * side * sweeps) as f64 / time.as_secs_f64()
}

/// The kernel on two planes of huge pages, as in card memory.
struct NativeKernel<E> {
    jacobi: Jacobi<E>,
    planes: [Mapping; 2],
    side: usize,
    sweeps: usize,
}

impl<E: Element> NativeKernel<E> {
    fn new(
        side: usize,
        threads: usize,
        sweeps: usize,
        depth: usize,
    ) -> Result<NativeKernel<E>, StencilError> {
        let bytes = side * side * E::BYTES;
        let plane = || -> std::io::Result<Mapping> {
            let mapping = Memfd::new("millstream-bench-stencil", bytes)?.map()?;
            mapping.prefault(0, bytes)?;
            Ok(mapping)
        };
        let jacobi = Jacobi::with(threads, millstream_stencil::VectorUnit::widest(), depth);
        Ok(NativeKernel { jacobi, planes: [plane()?, plane()?], side, sweeps })
    }

    fn points_per_second(&mut self) -> f64 {
        let side = self.side;
        let plane = |mapping: &Mapping| Plane {
            base: mapping.base().cast::<E>(),
            pitch: side,
            rows: side,
            columns: side,
        };
        let start = Instant::now();
        // SAFETY: two mappings of this value, page-aligned and large enough.
        let outcome =
            unsafe { self.jacobi.run(plane(&self.planes[0]), plane(&self.planes[1]), self.sweeps, &|| true) };
        outcome.expect("the callback never stops it");
        rate(side, self.sweeps, start.elapsed())
    }
}

/// The Python interpreter of the virtual environment that the Makefile creates beside the results.
#[must_use]
pub fn python_in(folder: &Path) -> Option<PathBuf> {
    Some(folder.join("venv/bin/python")).filter(|python| python.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_compares_the_kernel_with_c() {
        let folder = std::env::temp_dir().join(format!("millstream-bench-stencil-{}", std::process::id()));
        let options = Options { side: 200, rounds: 1, folder: folder.clone(), python: None };
        let table = run_kernel(&options).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        assert_eq!((table.figures().len(), table.unmeasured().len()), (12, 2), "{table}");
        assert!(table.figures().iter().all(|figure| figure.value > 0.0), "{table}");
    }

    #[test]
    fn an_interpreter_without_numpy_offers_no_method() {
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("python");
        // Without the packages of the site, as in an empty virtual environment.
        std::fs::write(&python, "#!/bin/sh\nexec python3 -S -I \"$@\"\n").unwrap();
        std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let (_, methods) = PeerProgram::python(&python, folder.path(), 8).unwrap();
        assert_eq!(methods, Vec::<String>::new());
    }
}
