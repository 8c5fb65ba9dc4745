//! The stencil kernel beside the same loop in C, numba and numpy, in turns.

mod competitor;
pub mod jobs;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use millstream_shm::{Mapping, Memfd};
use millstream_stencil::{Element, Jacobi, Plane, reference};

use crate::{Figure, Table, median};
use competitor::Competitor;

/// The benchmark could not be run.
#[derive(Debug, thiserror::Error)]
pub enum StencilError {
    /// There is no memory for the grids.
    #[error("cannot make a grid: {0}")]
    Memory(#[from] std::io::Error),
    /// A program does not start.
    #[error("cannot start {}: {cause}", program.display())]
    Start {
        /// The program.
        program: OsString,
        /// Why.
        cause: std::io::Error,
    },
    /// The compiler refused.
    #[error("gcc: {0}")]
    Compile(String),
    /// The sources could not be laid out.
    #[error("cannot write {}: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// A program said something else than a number.
    #[error("the {program} program answered {answer:?}")]
    Answer {
        /// Which.
        program: &'static str,
        /// What it said; nothing if it ended.
        answer: String,
    },
    /// Somebody computes something else.
    #[error("{method} computes another result than the reference")]
    Different {
        /// Who.
        method: String,
    },
}

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rows and columns of the grid.
    pub side: usize,
    /// Interleaved rounds; medians are printed.
    pub rounds: usize,
    /// Where the programs are compiled.
    pub folder: PathBuf,
    /// A Python with numpy and numba, if there is one.
    pub python: Option<PathBuf>,
}

/// A grid for the comparison of results, and its sweeps.
const CHECK: (usize, usize, usize) = (301, 477, 35);

/// Methods of the C program with their sweeps a measurement, and what people call them.
const C_METHODS: [(&str, usize, &str); 5] = [
    ("loop", 6, "C, OpenMP loop"),
    ("nontemporal", 6, "C, non-temporal stores"),
    ("wavefront8", 32, "C, wavefront over 8 sweeps"),
    ("wavefront12", 36, "C, wavefront over 12 sweeps"),
    ("wavefront16", 32, "C, wavefront over 16 sweeps"),
];

/// Sweeps of a Python method a measurement.
const PYTHON_SWEEPS: [(&str, usize); 2] = [("numba", 6), ("numpy", 1)];

/// All figures, held against the best C wavefront; and a line about each thing that was not run.
///
/// # Errors
/// [`StencilError`] if a program fails or computes something else.
pub fn run(options: &Options) -> Result<(Table, Vec<String>), StencilError> {
    let side = options.side;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut notes = Vec::new();
    let mut c = Competitor::c(&options.folder, side)?;
    let python = match &options.python {
        Some(python) => Some(Competitor::python(python, &options.folder, side)?),
        None => None,
    };
    let (mut python, methods) =
        python.map_or((None, Vec::new()), |(program, methods)| (Some(program), methods));
    let python_methods: Vec<_> =
        PYTHON_SWEEPS.into_iter().filter(|(name, _)| methods.iter().any(|other| other == name)).collect();
    for (name, _) in PYTHON_SWEEPS.iter().filter(|(name, _)| !methods.iter().any(|other| other == name)) {
        notes.push(format!("{name}: not run, it is not installed (`make bench-card` installs it)"));
    }
    check(&mut c, &mut python, &python_methods)?;

    let mut native = [
        Native::<f32>::new(side, threads, 32, usize::MAX)?,
        Native::new(side, 1, 16, usize::MAX)?,
        Native::new(side, threads, 6, 1)?,
    ];
    let mut double = Native::<f64>::new(side, threads, 16, usize::MAX)?;
    let mut rates = vec![Vec::new(); native.len() + 1 + C_METHODS.len() + python_methods.len()];
    for round in 0..=options.rounds {
        let mut measured = Vec::new();
        measured.extend(native.iter_mut().map(Native::points_per_second));
        measured.push(double.points_per_second());
        for (method, sweeps, _) in C_METHODS {
            measured.push(rate(side, sweeps, c.run(method, sweeps)?));
        }
        for &(method, sweeps) in &python_methods {
            if let Some(python) = &mut python {
                measured.push(rate(side, sweeps, python.run(method, sweeps)?));
            }
        }
        // The first round warms up.
        if round > 0 {
            rates.iter_mut().zip(measured).for_each(|(rates, rate)| rates.push(rate));
        }
    }

    let names = [
        format!("stencil, float32, {threads} threads"),
        "stencil, float32, 1 thread".to_owned(),
        format!("stencil, float32, {threads} threads, every sweep through memory"),
        format!("stencil, float64, {threads} threads"),
    ];
    let c_names = C_METHODS.map(|(_, _, name)| name.to_owned());
    let python_names = python_methods.iter().map(|(name, _)| (*name).to_owned());
    let names = names.into_iter().chain(c_names).chain(python_names);
    let figures: Vec<_> =
        names.zip(&rates).map(|(name, rates)| (name, median(rates).unwrap_or(0.0) / 1e9)).collect();
    let wavefronts = figures.iter().filter(|(name, _)| name.contains("wavefront"));
    let best = wavefronts.map(|&(_, rate)| rate).fold(0.0, f64::max);
    let title =
        format!("five-point Jacobi, {side}x{side} points (medians of {} interleaved rounds)", options.rounds);
    let mut table = Table::new(&title, "C wavefront");
    for (name, rate) in figures {
        table.push(Figure::against(name, rate, "G points/s", best));
    }
    Ok((table, notes))
}

/// Everybody computes the same, bit for bit.
fn check(
    c: &mut Competitor,
    python: &mut Option<Competitor>,
    python_methods: &[(&str, usize)],
) -> Result<(), StencilError> {
    let (rows, columns, sweeps) = CHECK;
    let mut cells = generated(rows, columns);
    let wanted = sum(&reference(&cells, rows, columns, sweeps));
    let mut other = cells.clone();
    let (source, destination) = (Plane::of(&mut cells, rows, columns), Plane::of(&mut other, rows, columns));
    // SAFETY: two grids of ours.
    let outcome = unsafe { Jacobi::new(2).run(source, destination, sweeps, &|| true) };
    outcome.expect("nobody stops it");
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

/// The grid that all programs start with.
fn generated(rows: usize, columns: usize) -> Vec<f32> {
    (0..(rows * columns) as u64).map(|at| (at * 2_654_435_761 % 1_048_573) as f32 / 1024.0).collect()
}

/// A sum over the bits, which differs if any bit does.
fn sum(cells: &[f32]) -> u64 {
    let terms = (0u64..).zip(cells).map(|(at, cell)| u64::from(cell.to_bits()).wrapping_mul(2 * at + 1));
    terms.fold(0, u64::wrapping_add)
}

fn rate(side: usize, sweeps: usize, time: Duration) -> f64 {
    (side * side * sweeps) as f64 / time.as_secs_f64()
}

/// The kernel on memory as cards have it.
struct Native<E> {
    jacobi: Jacobi<E>,
    planes: [Mapping; 2],
    side: usize,
    sweeps: usize,
}

impl<E: Element> Native<E> {
    fn new(side: usize, threads: usize, sweeps: usize, depth: usize) -> Result<Native<E>, StencilError> {
        let bytes = side * side * E::BYTES;
        let plane = || -> std::io::Result<Mapping> {
            let mapping = Memfd::new("millstream-bench-stencil", bytes)?.map()?;
            mapping.prefault(0, bytes)?;
            Ok(mapping)
        };
        let jacobi = Jacobi::with(threads, millstream_stencil::Unit::widest(), depth);
        Ok(Native { jacobi, planes: [plane()?, plane()?], side, sweeps })
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
        // SAFETY: two mappings of ours, page-aligned and long enough.
        let outcome =
            unsafe { self.jacobi.run(plane(&self.planes[0]), plane(&self.planes[1]), self.sweeps, &|| true) };
        outcome.expect("nobody stops it");
        rate(side, self.sweeps, start.elapsed())
    }
}

/// The kernel as a loop by itself would be: one thread, every sweep through memory.
pub struct OneThread(Native<f32>);

impl std::fmt::Debug for OneThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OneThread").finish_non_exhaustive()
    }
}

impl OneThread {
    /// On a grid of this side, so many sweeps a measurement.
    ///
    /// # Errors
    /// [`StencilError::Memory`].
    pub fn new(side: usize, sweeps: usize) -> Result<OneThread, StencilError> {
        Native::new(side, 1, sweeps, 1).map(OneThread)
    }

    /// Measures.
    pub fn points_per_second(&mut self) -> f64 {
        self.0.points_per_second()
    }
}

/// The Python of the virtual environment that the Makefile makes beside the benchmark's results.
#[must_use]
pub fn python_in(folder: &Path) -> Option<PathBuf> {
    Some(folder.join("venv/bin/python")).filter(|python| python.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_holds_the_kernel_against_c() {
        let folder = std::env::temp_dir().join(format!("millstream-bench-stencil-{}", std::process::id()));
        let options = Options { side: 200, rounds: 1, folder: folder.clone(), python: None };
        let (table, notes) = run(&options).unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        assert_eq!((table.figures().len(), notes.len()), (9, 2), "{table} {notes:?}");
        assert!(table.figures().iter().all(|figure| figure.value > 0.0), "{table}");
    }
}
