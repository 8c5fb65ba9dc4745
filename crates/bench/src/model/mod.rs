//! `millstream bench model`: the speed of the model's simulations.
//!
//! The program in `crates/model/simgrid` runs the same all-to-all in SimGrid; the benchmark compiles it.

mod event_builder;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Instant;

use millstream_model::benchmarks::torus::{Torus, all_to_all};
use millstream_model::engine::{BytesPerSecond, EventQueue, Picos};
use millstream_model::engine_bench::{BinaryHeapQueue, FourAryHeapQueue, hold, packet_rings};
use millstream_model::{Parameters, calibrate, figures, flow, rows};

use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "model",
    title: "Model",
    measures: "The speed of the simulation engine (operations of its event queue, packet events), time and memory of \
               simulations by size, each in a process of its own, and the flow level against SimGrid on the same all-to-all.",
    baseline: "a binary and a four-ary heap for the event queue, SimGrid for the flow level, otherwise the target value",
    values: "medians over the rounds for the event queue, packet events and messages against SimGrid; memory and \
             virtual time against SimGrid are those of the last round; one measurement for everything else",
    command: "make bench-model",
};

const SIMGRID_SOURCE: &str = include_str!("../../simgrid/all_to_all.cpp");
const RATE: f64 = 12.5e9;
const LATENCY: Picos = Picos(1_000_000);
const MESSAGE: u64 = 1_000_000;

/// Runs `work`. Returns its duration (s) and its result.
fn timed<R>(work: impl FnOnce() -> R) -> (f64, R) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64(), result)
}

/// Compiles the SimGrid program. Returns its path.
fn compile_simgrid(out: &Path) -> Result<PathBuf, String> {
    let folder = out.join("model");
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let (source, program) = (folder.join("all_to_all.cpp"), folder.join("all_to_all"));
    std::fs::write(&source, SIMGRID_SOURCE).map_err(|error| error.to_string())?;
    let output = Command::new("g++").args(["-O2", "-o"]).arg(&program).arg(&source).arg("-lsimgrid").output();
    let output = output.map_err(|error| format!("g++: {error}"))?;
    if output.status.success() {
        Ok(program)
    } else {
        let first = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
        Err(format!("g++ of the SimGrid program: {first} (Debian: libsimgrid-dev)"))
    }
}

/// The costs of one simulation, which runs in a separate process.
struct CaseRun {
    /// Run time of the process (s).
    seconds: f64,
    /// Simulation events, if it counts them.
    events: f64,
    /// End of the last message in virtual time (s).
    end: f64,
    /// Peak memory of the process [MB].
    megabytes: f64,
}

/// Runs a program that prints simulation events, virtual seconds and peak memory in KiB.
fn run_case(program: &Path, arguments: &[String]) -> Result<CaseRun, Box<dyn Error>> {
    let (seconds, output) = timed(|| Command::new(program).args(arguments).output());
    let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers.as_slice() {
        [events, end, kib] if output.status.success() => {
            Ok(CaseRun { seconds, events: *events, end: *end, megabytes: kib * 1024e-6 })
        }
        _ => {
            let errors = String::from_utf8_lossy(&output.stderr);
            Err(format!("{} {}: {}: {text}{errors}", program.display(), arguments.join(" "), output.status)
                .into())
        }
    }
}

/// Runs a case of the model by `millstream bench model-case`.
fn run_model(
    program: &Path,
    case: &str,
    size: u32,
    messages: u32,
    bytes: u64,
) -> Result<CaseRun, Box<dyn Error>> {
    let words = ["bench", "model-case", case].map(str::to_owned).into_iter();
    let numbers = [u64::from(size), u64::from(messages), bytes].map(|n| n.to_string());
    run_case(program, &words.chain(numbers).collect::<Vec<_>>())
}

/// Runs a case in SimGrid.
fn run_simgrid(program: &Path, hosts: u32, messages: u32, order: &str) -> Result<CaseRun, Box<dyn Error>> {
    let numbers = [hosts.to_string(), messages.to_string(), MESSAGE.to_string(), RATE.to_string()];
    let rest = [LATENCY.seconds().to_string(), order.to_owned()];
    run_case(program, &numbers.into_iter().chain(rest).collect::<Vec<_>>())
}

/// A simulation whose costs are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelCase {
    /// All-to-all on a torus, packet by packet.
    Torus,
    /// All-to-all at flow level, all messages started at once.
    Concurrent,
    /// All-to-all at flow level, each host's messages one after the other.
    Sequential,
}

impl FromStr for ModelCase {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "torus" => Ok(Self::Torus),
            "concurrent" => Ok(Self::Concurrent),
            "sequential" => Ok(Self::Sequential),
            _ => Err("expected torus, concurrent or sequential".to_owned()),
        }
    }
}

/// Runs one case and prints events, virtual seconds and peak memory: `millstream bench model-case`.
pub fn run_case_here(case: ModelCase, size: u32, messages: u32, bytes: u64) {
    let (events, end) = match case {
        ModelCase::Torus => {
            let torus = Torus { dimensions: vec![size; 3], ..figures::torus(&Parameters::shipped()) };
            let result = all_to_all(&torus, bytes * u64::from(messages));
            (result.events, result.time)
        }
        ModelCase::Concurrent => (0, flow::all_to_all(size, messages, bytes, BytesPerSecond(RATE), LATENCY)),
        ModelCase::Sequential => {
            (0, flow::all_to_all_sequential(size, messages, bytes, BytesPerSecond(RATE), LATENCY))
        }
    };
    println!("{events} {:.9} {}", end.seconds(), peak_kib());
}

/// Peak resident memory of this process [KiB] (proc_pid_status(5), VmHWM).
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Measures the figures; `program` is the path of `millstream`, which runs the simulations.
///
/// # Errors
/// The first error of a simulation.
pub fn run(program: &Path, out: &Path, rounds: usize) -> Result<Table, Box<dyn Error>> {
    let mut table = Table::new(BENCHMARK, rounds);
    let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
    const OPERATIONS: u64 = 2_000_000;
    for pending in [1_000usize, 100_000] {
        let mut speeds = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..rounds {
            let times = [
                timed(|| hold(&mut EventQueue::new(), pending, OPERATIONS)).0,
                timed(|| hold(&mut BinaryHeapQueue::default(), pending, OPERATIONS)).0,
                timed(|| hold(&mut FourAryHeapQueue::default(), pending, OPERATIONS)).0,
            ];
            for (speed, time) in speeds.iter_mut().zip(times) {
                speed.push(OPERATIONS as f64 / time * 1e-6);
            }
        }
        let [radix, binary, quaternary] = speeds.map(|speed| middle(&speed));
        table.push(Figure::with_baseline(
            format!("event queue, {pending} pending events, vs binary heap"),
            radix,
            "M/s",
            binary,
        ));
        table.push(Figure::with_baseline(
            format!("event queue, {pending} pending events, vs four-ary heap"),
            radix,
            "M/s",
            quaternary,
        ));
    }
    for packets in [1_000u64, 100_000] {
        let speeds: Vec<f64> = (0..rounds)
            .map(|_| {
                let (time, events) = timed(|| packet_rings(packets, 500_000));
                events as f64 / time * 1e-6
            })
            .collect();
        // The baseline is the target value.
        table.push(Figure::with_baseline(
            format!("packet events, {packets} packets, vs target"),
            middle(&speeds),
            "M/s",
            10.0,
        ));
    }
    let parameters = Parameters::shipped();
    let rows = rows::calibration();
    table.push(Figure::without_baseline(
        "evaluation of all calibration rows",
        timed(|| calibrate::residuals(&rows, &parameters)).0,
        "s",
    ));
    simulation_costs(&mut table, program)?;
    event_builder::cost(&mut table, program)?;
    match compile_simgrid(out) {
        Err(why) => table.not_measured("figures against SimGrid", &why),
        Ok(simgrid) => flow_level_against_simgrid(&mut table, program, &simgrid, rounds)?,
    }
    Ok(table)
}

/// Time and memory of simulations by size, each in a separate process.
fn simulation_costs(table: &mut Table, program: &Path) -> Result<(), Box<dyn Error>> {
    for side in [2u32, 3, 4, 5] {
        let run = run_model(program, "torus", side, 1, 1 << 20)?;
        let name = format!("torus of {} nodes, all-to-all of 1 MiB", side.pow(3));
        table.push(Figure::without_baseline(name.clone(), run.seconds, "s"));
        table.push(Figure::without_baseline(
            format!("{name}: packet events"),
            run.events / run.seconds * 1e-6,
            "M/s",
        ));
        table.push(Figure::without_baseline(format!("{name}: memory"), run.megabytes, "MB"));
    }
    for (order, hosts, messages) in [
        ("concurrent", 32u32, 16u32),
        ("concurrent", 128, 16),
        ("concurrent", 500, 16),
        ("sequential", 32, 64),
        ("sequential", 128, 64),
        ("sequential", 500, 8),
    ] {
        let run = run_model(program, order, hosts, messages, MESSAGE)?;
        let count = f64::from(hosts) * f64::from(hosts - 1) * f64::from(messages);
        let name = format!("flow level, {order}, {hosts} hosts × {messages} messages");
        table.push(Figure::without_baseline(name.clone(), run.seconds, "s"));
        table.push(Figure::without_baseline(format!("{name}: messages"), count / run.seconds * 1e-6, "M/s"));
        table.push(Figure::without_baseline(format!("{name}: memory"), run.megabytes, "MB"));
    }
    Ok(())
}

/// The flow level against SimGrid, each a whole process.
fn flow_level_against_simgrid(
    table: &mut Table,
    program: &Path,
    simgrid_program: &Path,
    rounds: usize,
) -> Result<(), Box<dyn Error>> {
    let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
    // With concurrent messages SimGrid takes minutes beyond 32 hosts; with sequential ones 128 hosts take seconds.
    for (order, hosts, messages) in [
        ("concurrent", 16u32, 16u32),
        ("concurrent", 32, 16),
        ("sequential", 32, 64),
        ("sequential", 128, 64),
    ] {
        let (mut speed, mut memory, mut ends) = ([Vec::new(), Vec::new()], [0.0, 0.0], [0.0, 0.0]);
        let count = f64::from(hosts) * f64::from(hosts - 1) * f64::from(messages);
        for _ in 0..rounds {
            let runs = [
                run_model(program, order, hosts, messages, MESSAGE)?,
                run_simgrid(simgrid_program, hosts, messages, order)?,
            ];
            for (i, run) in runs.into_iter().enumerate() {
                speed[i].push(count / run.seconds * 1e-6);
                (memory[i], ends[i]) = (run.megabytes, run.end * 1e3);
            }
        }
        let name = format!("flow level vs SimGrid, {order}, {hosts} hosts × {messages} messages");
        table.push(Figure::with_baseline(
            format!("{name}: messages"),
            middle(&speed[0]),
            "M/s",
            middle(&speed[1]),
        ));
        table.push(Figure::with_baseline(format!("{name}: memory"), memory[0], "MB", memory[1]));
        table.push(Figure::with_baseline(format!("{name}: virtual time"), ends[0], "ms", ends[1]));
    }
    Ok(())
}
