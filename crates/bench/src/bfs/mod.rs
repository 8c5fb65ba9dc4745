//! `millstream bench bfs`: breadth-first searches of a Graph500 graph, beside networkit, igraph and SuiteSparse:GraphBLAS.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use millstream_application::run_on_threads;
use millstream_bfs::job::{EDGE_FACTOR, SEEDS};
use millstream_bfs::kronecker::Kronecker;
use millstream_bfs::{BfsError, BfsOptions, BfsReport};

use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "bfs",
    title: "Breadth-first search",
    measures: "Harmonic mean of traversed edges per second over the roots of a Graph500 graph, and kernel 1 or what a library takes \
               to build its graph: `torus bfs` with 32 and 48 bits a vertex on 1 and 2 nodes as threads, and Python libraries on \
               the same edges and roots. networkit and igraph search with one thread, GraphBLAS with two. GraphBLAS only \
               pushes: each step multiplies the frontier by the matrix, and no step pulls. igraph's time \
               contains its lists of Python. The number of edges of a root is the same for all, and all reach as many vertices. \
               The benchmark compares them.",
    baseline: "the fastest library; for 48 bits and for a second node the search with 32 bits on one node",
    values: "medians over the rounds",
    command: "make bench-apps",
};

/// Options of the benchmark.
#[derive(Clone, Debug)]
pub struct Options {
    /// Logarithm of the number of vertices.
    pub scale: u32,
    /// Searches of a round.
    pub roots: usize,
    /// Interleaved rounds.
    pub rounds: usize,
    /// Folder for the edges and the Python program.
    pub folder: PathBuf,
    /// A Python interpreter with the libraries, if there is one.
    pub python: Option<PathBuf>,
}

/// The benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum BfsBenchError {
    /// A file or the Python program cannot be used.
    #[error("{}: {cause}", path.display())]
    Program {
        /// The file or program.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The search failed.
    #[error(transparent)]
    Search(#[from] BfsError),
    /// A library reaches another number of vertices.
    #[error("{peer} reaches {found} vertices from root {root}, not {expected}")]
    Different {
        /// The library.
        peer: String,
        /// The root.
        root: u64,
        /// What it reaches.
        found: u64,
        /// What the validated search reaches.
        expected: u64,
    },
}

/// A library: its name, the module that Python imports, and the package that has it.
const PEERS: [(&str, &str, &str); 3] = [
    ("networkit", "networkit", "networkit"),
    ("igraph", "igraph", "igraph"),
    ("GraphBLAS", "graphblas", "python-graphblas"),
];

/// Ours: nodes, width of a vertex number, and the name of the figure.
const OURS: [(&str, millstream_bfs::job::Width, &str); 4] = [
    ("1x1x1", millstream_bfs::job::Width::Bits32, "32 bits, 1 node"),
    ("1x1x1", millstream_bfs::job::Width::Bits48, "48 bits, 1 node"),
    ("2x1x1", millstream_bfs::job::Width::Bits32, "32 bits, 2 nodes"),
    ("2x1x1", millstream_bfs::job::Width::Bits48, "48 bits, 2 nodes"),
];

/// What a program measured in one round.
#[derive(Clone, Debug, Default)]
struct Searches {
    build_seconds: f64,
    /// Seconds and vertices reached, by root.
    roots: BTreeMap<u64, (f64, u64)>,
}

/// Harmonic mean of the rate of all roots, in millions of edges per second.
fn rate(searches: &Searches, edges: &BTreeMap<u64, u64>) -> f64 {
    let inverse = |(root, (seconds, _)): (&u64, &(f64, u64))| {
        edges.get(root).map(|&edges| seconds / edges.max(1) as f64)
    };
    let inverses: Vec<f64> = searches.roots.iter().filter_map(inverse).collect();
    inverses.len() as f64 / inverses.iter().sum::<f64>() / 1e6
}

/// Measures all figures.
///
/// # Errors
/// The first error of a program.
pub fn run(options: &Options) -> Result<Table, BfsBenchError> {
    let mut table = Table::new(BENCHMARK, options.rounds);
    let peers = installed(options, &mut table)?;
    let reference = ours(options, 0)?;
    let edges: BTreeMap<u64, u64> = reference.roots.iter().map(|root| (root.root, root.edges)).collect();
    let (file, script) = if peers.is_empty() { Default::default() } else { write(options)? };
    let names: Vec<String> = (OURS.iter().map(|(_, _, name)| format!("torus bfs, {name}")))
        .chain(peers.iter().map(|peer| (*peer).to_owned()))
        .collect();
    let mut rates = vec![Vec::new(); names.len()];
    let mut builds = vec![Vec::new(); names.len()];
    for _ in 0..options.rounds {
        for at in 0..names.len() {
            let searches = match at.checked_sub(OURS.len()) {
                None => of_report(&ours(options, at)?),
                Some(peer) => search_with(options, peers[peer], &file, &script, &reference)?,
            };
            rates[at].push(rate(&searches, &edges));
            builds[at].push(searches.build_seconds);
        }
    }
    let value = |values: &[Vec<f64>], at: usize| median(&values[at]).unwrap_or(0.0);
    for (values, unit, what) in [(&rates, "MTEPS", "search"), (&builds, "s", "build")] {
        let best = (OURS.len()..names.len()).map(|at| value(values, at));
        let best = if unit == "s" { best.reduce(f64::min) } else { best.reduce(f64::max) };
        for (at, name) in names.iter().enumerate() {
            let label = format!("{what}, SCALE {}: {name}", options.scale);
            let baseline = if (1..OURS.len()).contains(&at) { Some(value(values, 0)) } else { best };
            table.push(match baseline {
                Some(baseline) => Figure::with_baseline(label, value(values, at), unit, baseline),
                None => Figure::without_baseline(label, value(values, at), unit),
            });
        }
    }
    Ok(table)
}

/// A run of ours, whose results passed all rules of Graph500.
fn ours(options: &Options, at: usize) -> Result<BfsReport, BfsError> {
    let (shape, width, _) = OURS[at];
    let search = BfsOptions { roots: options.roots, width, ..BfsOptions::new(options.scale) };
    // The shapes are constants.
    let torus = shape.parse().expect("valid dimensions");
    let mut reports = run_on_threads(torus, |mut node| {
        millstream_bfs::run(&mut node, &search, |_| ControlFlow::Continue(()))
    });
    reports.swap_remove(0)
}

fn of_report(report: &BfsReport) -> Searches {
    let roots = report.roots.iter().map(|root| (root.root, (root.seconds, root.reached))).collect();
    Searches { build_seconds: report.construction_seconds, roots }
}

/// The libraries that the interpreter has.
fn installed(options: &Options, table: &mut Table) -> Result<Vec<&'static str>, BfsBenchError> {
    let Some(python) = &options.python else {
        let why = "no virtual environment (`make bench-apps` makes it)";
        table.not_measured("networkit, igraph, GraphBLAS", why);
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for (name, module, package) in PEERS {
        let output = Command::new(python).args(["-c", &format!("import numpy, {module}")]).output();
        let output = output.map_err(|cause| BfsBenchError::Program { path: python.clone(), cause })?;
        if output.status.success() {
            found.push(name);
        } else {
            let python = python.display();
            table.not_measured(name, &format!("not installed: {python} -m pip install numpy {package}"));
        }
    }
    Ok(found)
}

/// Writes the edges and the Python program.
fn write(options: &Options) -> Result<(PathBuf, PathBuf), BfsBenchError> {
    let (edges, script) = (options.folder.join("edges.bin"), options.folder.join("peers.py"));
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |cause| BfsBenchError::Program { path, cause }
    };
    std::fs::create_dir_all(&options.folder).map_err(failed(&options.folder))?;
    std::fs::write(&script, include_str!("peers.py")).map_err(failed(&script))?;
    let mut out = BufWriter::new(File::create(&edges).map_err(failed(&edges))?);
    let graph = Kronecker::new(options.scale, EDGE_FACTOR, SEEDS);
    for edge in graph.part(0..graph.edges()) {
        let (a, b) = edge.ends();
        // A scale of the benchmark is below 32.
        let written = [a, b].iter().try_for_each(|&end| out.write_all(&(end as u32).to_le_bytes()));
        written.map_err(failed(&edges))?;
    }
    out.flush().map_err(failed(&edges))?;
    Ok((edges, script))
}

/// The searches of a library, whose trees are as large as the validated ones.
fn search_with(
    options: &Options,
    peer: &str,
    edges: &Path,
    script: &Path,
    reference: &BfsReport,
) -> Result<Searches, BfsBenchError> {
    let Some(python) = &options.python else { return Ok(Searches::default()) };
    let roots: Vec<String> = reference.roots.iter().map(|root| root.root.to_string()).collect();
    let mut command = Command::new(python);
    command.arg(script).arg(edges).args([&options.scale.to_string(), &roots.join(","), peer]);
    let failed = |cause| BfsBenchError::Program { path: script.to_owned(), cause };
    let output = command.output().map_err(failed)?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let last = error.lines().last().unwrap_or("it printed nothing");
        return Err(failed(std::io::Error::other(format!("{peer}: {last}"))));
    }
    let mut searches = Searches::default();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let malformed = || failed(std::io::Error::other(format!("{peer} printed {line:?}")));
        match words[..] {
            ["build", seconds] => searches.build_seconds = seconds.parse().map_err(|_| malformed())?,
            [root, seconds, reached] => {
                let (Ok(root), Ok(seconds), Ok(reached)) = (root.parse(), seconds.parse(), reached.parse())
                else {
                    return Err(malformed());
                };
                searches.roots.insert(root, (seconds, reached));
            }
            _ => return Err(malformed()),
        }
    }
    for record in &reference.roots {
        let (root, expected) = (record.root, record.reached);
        let found = searches.roots.get(&root).map_or(0, |&(_, reached)| reached);
        if found != expected {
            return Err(BfsBenchError::Different { peer: peer.to_owned(), root, found, expected });
        }
    }
    Ok(searches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_measures_all_forms_and_names_missing_libraries() {
        let folder = std::env::temp_dir().join(format!("millstream-bench-bfs-{}", std::process::id()));
        let options = Options { scale: 8, roots: 3, rounds: 1, folder, python: None };
        let table = run(&options).unwrap();
        assert_eq!((table.figures().len(), table.unmeasured().len()), (2 * OURS.len(), 1), "{table}");
        assert!(table.figures().iter().all(|figure| figure.value > 0.0), "{table}");
    }

    #[test]
    fn the_rate_is_the_harmonic_mean() {
        let roots = BTreeMap::from([(3, (0.5, 9)), (4, (1.0, 9))]);
        let searches = Searches { build_seconds: 0.0, roots };
        let edges = BTreeMap::from([(3, 2_000_000), (4, 1_000_000)]);
        assert!((rate(&searches, &edges) - 1.6).abs() < 1e-12);
    }
}
