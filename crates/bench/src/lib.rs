//! Benchmarks as commands: the same run measures each figure and its baseline.
//!
//! Machines are shared and noisy, so most figures and baselines are measured in turn, round by round, and reported
//! as medians; [`Benchmark::values`] names the others. [`BENCHMARKS`] is the list of benchmarks. A benchmark fills a [`Table`], which [`results`]
//! writes as JSON lines (`target/bench/NAME.jsonl`). [`report`] renders these files as `docs/benchmarks.md`.
//! [`tools`] runs unmodified programs, such as perftest and UCX, as server and client.

pub mod bfs;
pub mod card;
pub mod evb;
pub mod evb_load;
pub mod evb_storage;
mod event_run;
pub mod faults;
pub mod gpu;
mod memcpy;
pub mod model;
pub mod mpi;
mod netns;
pub mod neurons;
mod process_usage;
pub mod proto;
pub mod report;
pub mod results;
pub mod scale;
pub mod spin;
pub mod stencil;
mod table;
pub mod tools;
pub mod torus;
pub mod verbs;
pub mod wire;

pub use table::{Figure, NameFilter, NotMeasured, Table};

/// A benchmark: what it measures, against what, and how to run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Benchmark {
    /// The subcommand of `millstream bench`, and the name of the results file.
    pub name: &'static str,
    /// A heading.
    pub title: &'static str,
    /// Description of the figures.
    pub measures: &'static str,
    /// Description of the baseline.
    pub baseline: &'static str,
    /// How values follow from the rounds.
    pub values: &'static str,
    /// The command that runs it.
    pub command: &'static str,
}

/// All benchmarks, in the order of the report.
pub const BENCHMARKS: [Benchmark; 19] = [
    verbs::BENCHMARK,
    scale::BENCHMARK,
    wire::BENCHMARK,
    proto::BENCHMARK,
    evb::BENCHMARK,
    faults::BENCHMARK,
    evb_load::BENCHMARK,
    evb_storage::BENCHMARK,
    evb::endurance::BENCHMARK,
    card::BENCHMARK,
    gpu::BENCHMARK,
    mpi::BENCHMARK,
    stencil::BENCHMARK,
    stencil::jobs::BENCHMARK,
    spin::BENCHMARK,
    neurons::BENCHMARK,
    bfs::BENCHMARK,
    torus::BENCHMARK,
    model::BENCHMARK,
];

/// The median of some measurements; `None` if there are none.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn benchmark_names_are_unique() {
        let mut names: Vec<_> = BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), BENCHMARKS.len());
    }
}
