//! `millstream bench model`: how fast the model is.
//!
//! SimGrid runs the same all-to-all in a program of its own (crates/model/peer), compiled here.

mod event_builder;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use millstream_model::benchmarks::torus::{Torus, all_to_all};
use millstream_model::engine::{BytesPerSecond, EventQueue, Picos};
use millstream_model::engine_bench::{BinaryHeapQueue, FourAryHeapQueue, hold, packet_rings};
use millstream_model::{Parameters, calibrate, figures, flow, rows};

use crate::{Figure, Table, median};

const PEER: &str = include_str!("../../../model/simgrid/all_to_all.cpp");
const RATE: f64 = 12.5e9;
const LATENCY: Picos = Picos(1_000_000);
const MESSAGE: u64 = 1_000_000;

/// Seconds of a piece of work.
fn timed<R>(work: impl FnOnce() -> R) -> (f64, R) {
    let start = Instant::now();
    let result = work();
    (start.elapsed().as_secs_f64(), result)
}

fn compile(out: &Path) -> Result<PathBuf, String> {
    let folder = out.join("model");
    std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let (source, program) = (folder.join("all_to_all.cpp"), folder.join("all_to_all"));
    std::fs::write(&source, PEER).map_err(|error| error.to_string())?;
    let output = Command::new("g++").args(["-O2", "-o"]).arg(&program).arg(&source).arg("-lsimgrid").output();
    let output = output.map_err(|error| format!("g++: {error}"))?;
    if output.status.success() {
        Ok(program)
    } else {
        let first = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
        Err(format!("g++ of the SimGrid program: {first} (Debian: libsimgrid-dev)"))
    }
}

/// What a simulation in a process of its own did and took.
struct Run {
    /// Of the whole process.
    seconds: f64,
    /// The simulation's events, where it counts them.
    events: f64,
    /// The last message's end in virtual time.
    end: f64,
    /// Peak of its memory.
    megabytes: f64,
}

/// Runs a program that prints events, virtual seconds and KiB.
fn run_case(program: &Path, arguments: &[String]) -> Result<Run, Box<dyn Error>> {
    let (seconds, output) = timed(|| Command::new(program).args(arguments).output());
    let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers.as_slice() {
        [events, end, kib] if output.status.success() => {
            Ok(Run { seconds, events: *events, end: *end, megabytes: kib * 1024e-6 })
        }
        _ => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(format!("{} {}: {}: {text}{said}", program.display(), arguments.join(" "), output.status)
                .into())
        }
    }
}

fn ours(program: &Path, what: &str, size: u32, messages: u32, bytes: u64) -> Result<Run, Box<dyn Error>> {
    let words = ["bench", "model-case", what].map(str::to_owned).into_iter();
    let numbers = [u64::from(size), u64::from(messages), bytes].map(|n| n.to_string());
    run_case(program, &words.chain(numbers).collect::<Vec<_>>())
}

fn simgrid(program: &Path, hosts: u32, messages: u32, manner: &str) -> Result<Run, Box<dyn Error>> {
    let numbers = [hosts.to_string(), messages.to_string(), MESSAGE.to_string(), RATE.to_string()];
    let rest = [LATENCY.seconds().to_string(), manner.to_owned()];
    run_case(program, &numbers.into_iter().chain(rest).collect::<Vec<_>>())
}

/// Simulations whose cost is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelCase {
    /// All-to-all packet by packet on a torus.
    Torus,
    /// All-to-all at flow level, all messages started at once.
    Together,
    /// All-to-all at flow level, each host's messages one after the other.
    Turns,
}

/// The work of `millstream bench model-case`.
pub fn case(what: ModelCase, size: u32, messages: u32, bytes: u64) {
    let (events, end) = match what {
        ModelCase::Torus => {
            let torus = Torus { dimensions: vec![size; 3], ..figures::torus(&Parameters::shipped()) };
            let result = all_to_all(&torus, bytes * u64::from(messages));
            (result.events, result.time)
        }
        ModelCase::Together => (0, flow::all_to_all(size, messages, bytes, BytesPerSecond(RATE), LATENCY)),
        ModelCase::Turns => {
            (0, flow::all_to_all_sequential(size, messages, bytes, BytesPerSecond(RATE), LATENCY))
        }
    };
    println!("{events} {:.9} {}", end.seconds(), peak_kib());
}

/// The most memory that this process has had (proc_pid_status(5), VmHWM).
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// The figures; `program` is `millstream`, which runs the simulations.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn run(program: &Path, out: &Path, rounds: usize) -> Result<Table, Box<dyn Error>> {
    let mut table = Table::new("the model", "beside");
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
        table.push(Figure::against(format!("{pending} pending, beside a binary heap"), radix, "M/s", binary));
        table.push(Figure::against(
            format!("{pending} pending, beside a four-ary heap"),
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
        // What was asked for stands beside it.
        table.push(Figure::against(
            format!("packet events, {packets} packets, goal"),
            middle(&speeds),
            "M/s",
            10.0,
        ));
    }
    let parameters = Parameters::shipped();
    let rows = rows::calibration();
    table.push(Figure::alone(
        "all calibration rows",
        timed(|| calibrate::residuals(&rows, &parameters)).0,
        "s",
    ));
    cost(&mut table, program)?;
    event_builder::cost(&mut table, program)?;
    match compile(out) {
        Err(why) => println!("SimGrid is not beside the flow level: {why}"),
        Ok(simgrid) => beside_simgrid(&mut table, program, &simgrid, rounds)?,
    }
    Ok(table)
}

/// What simulations cost by their size: time and memory of a process each.
fn cost(table: &mut Table, program: &Path) -> Result<(), Box<dyn Error>> {
    for side in [2u32, 3, 4, 5] {
        let run = ours(program, "torus", side, 1, 1 << 20)?;
        let name = format!("torus of {}, all-to-all of 1 MiB", side.pow(3));
        table.push(Figure::alone(name.clone(), run.seconds, "s"));
        table.push(Figure::alone(format!("{name}: packet events"), run.events / run.seconds * 1e-6, "M/s"));
        table.push(Figure::alone(format!("{name}: memory"), run.megabytes, "MB"));
    }
    for (what, hosts, messages) in [
        ("together", 32u32, 16u32),
        ("together", 128, 16),
        ("together", 500, 16),
        ("turns", 32, 64),
        ("turns", 128, 64),
        ("turns", 500, 8),
    ] {
        let run = ours(program, what, hosts, messages, MESSAGE)?;
        let count = f64::from(hosts) * f64::from(hosts - 1) * f64::from(messages);
        let name = format!("flows {what}, {hosts} hosts × {messages}");
        table.push(Figure::alone(name.clone(), run.seconds, "s"));
        table.push(Figure::alone(format!("{name}: messages"), count / run.seconds * 1e-6, "M/s"));
        table.push(Figure::alone(format!("{name}: memory"), run.megabytes, "MB"));
    }
    Ok(())
}

/// The flow level beside SimGrid, both as processes from start to end.
fn beside_simgrid(
    table: &mut Table,
    program: &Path,
    simgrid_program: &Path,
    rounds: usize,
) -> Result<(), Box<dyn Error>> {
    let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
    // All at once, SimGrid takes minutes for more hosts than these; in turns, 128 hosts are seconds.
    for (what, hosts, messages) in
        [("together", 16u32, 16u32), ("together", 32, 16), ("turns", 32, 64), ("turns", 128, 64)]
    {
        let (mut speed, mut memory, mut ends) = ([Vec::new(), Vec::new()], [0.0, 0.0], [0.0, 0.0]);
        let count = f64::from(hosts) * f64::from(hosts - 1) * f64::from(messages);
        for _ in 0..rounds {
            let runs = [
                ours(program, what, hosts, messages, MESSAGE)?,
                simgrid(simgrid_program, hosts, messages, what)?,
            ];
            for (i, run) in runs.into_iter().enumerate() {
                speed[i].push(count / run.seconds * 1e-6);
                (memory[i], ends[i]) = (run.megabytes, run.end * 1e3);
            }
        }
        let name = format!("beside SimGrid, {what}, {hosts} hosts × {messages}");
        table.push(Figure::against(format!("{name}: messages"), middle(&speed[0]), "M/s", middle(&speed[1])));
        table.push(Figure::against(format!("{name}: memory"), memory[0], "MB", memory[1]));
        table.push(Figure::against(format!("{name}: virtual time"), ends[0], "ms", ends[1]));
    }
    Ok(())
}
