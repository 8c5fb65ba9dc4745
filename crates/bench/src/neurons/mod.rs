//! `millstream bench neurons`: synaptic events of the spiking network, beside NEST and Brian2.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use millstream_application::{ApplicationError, TorusApplication as _};
use millstream_neurons::simulation::{SimulationOptions, SimulationReport};
use millstream_neurons::{Model, Network, UNITS_PER_MV};

use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "neurons",
    title: "Spiking network",
    measures: "Time of a synaptic event. `delivery`: neurons that fire regularly whatever they get, so that NEST \
               (ignore_and_fire) and Brian2 (C++ with OpenMP) deliver the same number of spikes; connectivity and plasticity \
               rules differ. `Izhikevich`: the network with its dynamics, on 1 to 8 nodes as threads.",
    baseline: "the faster of NEST and Brian2; for several nodes two nodes",
    values: "medians over the rounds",
    command: "make bench-apps",
};

/// Options of the benchmark.
#[derive(Clone, Debug)]
pub struct Options {
    /// Columns along each axis, of 1000 neurons with 200 synapses.
    pub columns: u32,
    /// Steps of a measurement (ms).
    pub steps: u64,
    /// Interleaved rounds.
    pub rounds: usize,
    /// Folder for the Python program.
    pub folder: PathBuf,
    /// A Python interpreter with NEST and Brian2, if there is one.
    pub python: Option<PathBuf>,
}

/// The benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum NeuronsError {
    /// The Python program cannot be written or started.
    #[error("{}: {cause}", path.display())]
    Program {
        /// The file or program.
        path: PathBuf,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// The application failed.
    #[error(transparent)]
    Application(#[from] ApplicationError),
}

/// Steps between two spikes of a neuron that fires regularly.
const PERIOD: u32 = 100;
const SHAPES: [&str; 4] = ["1x1x1", "2x1x1", "2x2x1", "2x2x2"];
const PEERS: [&str; 2] = ["NEST", "Brian2"];
const MODES: [(&str, bool); 2] = [("fixed", false), ("plastic", true)];

/// Measures all figures.
///
/// # Errors
/// The first error of a program.
pub fn run(options: &Options) -> Result<Table, NeuronsError> {
    let mut table = Table::new(BENCHMARK, options.rounds);
    let peers = peers(options, &mut table)?;
    let mut names: Vec<(String, usize)> = Vec::new();
    let mut times: Vec<Vec<f64>> = Vec::new();
    let mut note = |name: String, group: usize, time: f64, round: usize| {
        let at = names.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            names.push((name, group));
            times.push(Vec::new());
            names.len() - 1
        });
        // The first round is a warm-up.
        if round > 0 {
            times[at].push(time);
        }
    };
    for round in 0..=options.rounds {
        for (group, (mode, is_plastic)) in MODES.into_iter().enumerate() {
            let report = ours(options, Model::IgnoreAndFire { period: PERIOD }, is_plastic, "2x1x1")?;
            note(format!("delivery, {mode} synapses, 2 nodes"), group, report.ns_per_event, round);
            for &peer in &peers {
                let name = format!("delivery, {mode} synapses, {peer}, 2 threads");
                match peer_time(options, peer, mode)? {
                    Ok(time) => note(name, group, time, round),
                    Err(why) if round == 0 => table.not_measured(name, &format!("warm-up: {why}")),
                    Err(why) => {
                        table.not_measured(name, &format!("round {round} of {}: {why}", options.rounds))
                    }
                }
            }
        }
        for shape in SHAPES {
            let report = ours(options, Model::Izhikevich, true, shape)?;
            note(format!("Izhikevich, plastic, {shape} nodes"), 2, report.ns_per_event, round);
        }
    }
    // A simulator that has failed in all rounds has no time.
    let medians: Vec<_> = names
        .into_iter()
        .zip(&times)
        .filter_map(|((name, group), times)| Some((name, group, median(times)?)))
        .collect();
    add_figures(&mut table, &medians);
    Ok(table)
}

/// Adds the times of a synaptic event, each with its group's baseline.
fn add_figures(table: &mut Table, medians: &[(String, usize, f64)]) {
    for (name, group, time) in medians {
        let of_group = medians.iter().filter(|(_, other, _)| other == group);
        let baselines = of_group.filter(|(other, ..)| match group {
            2 => other.contains("plastic, 2x1x1"),
            _ => PEERS.iter().any(|peer| other.contains(peer)),
        });
        let baseline = baselines.map(|&(.., time)| time).min_by(f64::total_cmp);
        table.push(match baseline {
            Some(baseline) => Figure::with_baseline(name.as_str(), *time, "ns/event", baseline),
            None => Figure::without_baseline(name.as_str(), *time, "ns/event"),
        });
    }
}

fn ours(
    options: &Options,
    model: Model,
    is_plastic: bool,
    shape: &str,
) -> Result<SimulationReport, NeuronsError> {
    let simulation = SimulationOptions {
        network: Network {
            grid: [options.columns; 2],
            neurons: 1000,
            synapses: 200,
            shares: [760, 120, 80, 40],
            longest_delay: 20,
            excitatory_weight: 3 * UNITS_PER_MV,
            inhibitory_weight: -5 * UNITS_PER_MV / 2,
            is_plastic,
            model,
            seed: 1,
        },
        steps: options.steps,
        checkpoint: None,
        checkpoint_every: 1,
        resume: false,
        fail_at: None,
        raster: 0,
        on_card: false,
    };
    let torus = shape.parse().map_err(|_| ApplicationError::Parameters(format!("dimensions {shape}")))?;
    Ok(simulation.run_on_threads(torus)?)
}

/// The simulators that the interpreter has.
fn peers(options: &Options, table: &mut Table) -> Result<Vec<&'static str>, NeuronsError> {
    let Some(python) = &options.python else {
        table.not_measured("NEST, Brian2", "no virtual environment (`make bench-apps` makes it)");
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for (name, module) in PEERS.into_iter().zip(["nest", "brian2"]) {
        let output = Command::new(python).args(["-c", &format!("import {module}")]).output();
        let output = output.map_err(|cause| NeuronsError::Program { path: python.clone(), cause })?;
        if output.status.success() {
            found.push(name);
        } else {
            table.not_measured(name, &format!("`import {module}` fails in {}", python.display()));
        }
    }
    Ok(found)
}

/// Nanoseconds of a synaptic event in a simulator, or why it has none.
fn peer_time(options: &Options, peer: &str, mode: &str) -> Result<Result<f64, String>, NeuronsError> {
    let Some(python) = &options.python else { return Ok(Err("no interpreter".to_owned())) };
    let script = write(&options.folder)?;
    let neurons = options.columns * options.columns * 1000;
    let numbers = [u64::from(neurons), 200, PERIOD.into(), options.steps, 2];
    let mut command = Command::new(python);
    command.arg(script).args(numbers.map(|number| number.to_string())).args([mode, peer]);
    let output = command.output().map_err(|cause| NeuronsError::Program { path: python.clone(), cause })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find_map(|line| line.strip_prefix(peer));
    let words = line.and_then(|line| line.trim().split_once(' '));
    match words.map(|(events, seconds)| (events.parse::<f64>(), seconds.parse::<f64>())) {
        Some((Ok(events), Ok(seconds))) => Ok(Ok(seconds * 1e9 / events)),
        _ => Ok(Err(text.lines().last().unwrap_or("it printed nothing").to_owned())),
    }
}

fn write(folder: &Path) -> Result<PathBuf, NeuronsError> {
    let path = folder.join("peers.py");
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&path, include_str!("peers.py")));
    written.map_err(|cause| NeuronsError::Program { path: path.clone(), cause })?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_measures_all_shapes_and_names_missing_peers() {
        let folder = std::env::temp_dir().join(format!("millstream-bench-neurons-{}", std::process::id()));
        let options = Options { columns: 1, steps: 200, rounds: 1, folder, python: None };
        let table = run(&options).unwrap();
        assert_eq!((table.figures().len(), table.unmeasured().len()), (2 + SHAPES.len(), 1), "{table}");
        assert!(table.figures().iter().all(|figure| figure.value > 0.0), "{table}");
    }

    #[test]
    fn a_simulator_that_fails_after_the_warm_up_has_no_figure() {
        let folder = tempfile::tempdir().unwrap();
        // It answers once for each mode, and fails then.
        let script = "#!/bin/sh\n[ \"$1\" = -c ] && { [ \"$2\" = 'import nest' ]; exit; }\nfor last; do :; done\n\
                      mode=$(eval echo \\${$(($# - 1))})\ncd \"$(dirname \"$0\")\"\n\
                      mkdir \"$mode\" 2>/dev/null || { echo out of memory; exit 1; }\necho \"$last 1000 1\"\n";
        let python = folder.path().join("python");
        fs::write(&python, script).unwrap();
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&python, executable).unwrap();
        let options = Options {
            columns: 1,
            steps: 200,
            rounds: 1,
            folder: folder.path().to_owned(),
            python: Some(python),
        };
        let table = run(&options).unwrap();
        assert!(table.figures().iter().all(|figure| figure.value > 0.0), "{table}");
        assert!(!table.figures().iter().any(|figure| figure.name.contains("NEST")), "{table}");
        let reasons: Vec<_> = table.unmeasured().iter().map(|each| each.reason.as_str()).collect();
        assert_eq!(
            reasons.iter().filter(|reason| reason.ends_with("out of memory")).count(),
            2,
            "{reasons:?}"
        );
    }
}
