//! `millstream bench model`: how fast the model is.
//!
//! SimGrid runs the same all-to-all in a program of its own (crates/model/peer), compiled here.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use millstream_bench::{Figure, Table, median};
use millstream_model::engine::{Picos, Queue, Rate};
use millstream_model::speed::{Binary, Quaternary, hold, relay};
use millstream_model::{Parameters, calibrate, figures, flow, table, tool};

const PEER: &str = include_str!("../../../model/peer/all_to_all.cpp");
const RATE: f64 = 12.5e9;
const MESSAGE: u64 = 1_000_000;
/// Messages of each pair beside SimGrid.
const BESIDE: u32 = 16;

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

fn simgrid(program: &Path, hosts: u32, messages: u32) -> Result<f64, Box<dyn Error>> {
    let output = Command::new(program)
        .args([
            hosts.to_string(),
            messages.to_string(),
            MESSAGE.to_string(),
            RATE.to_string(),
            "1e-6".to_owned(),
        ])
        .output()?;
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

pub(crate) fn run(out: &Path, rounds: usize) -> Result<Table, Box<dyn Error>> {
    let mut table = Table::new("the model", "beside");
    let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
    const OPERATIONS: u64 = 2_000_000;
    for pending in [1_000usize, 100_000] {
        let mut speeds = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..rounds {
            let times = [
                timed(|| hold(&mut Queue::new(), pending, OPERATIONS)).0,
                timed(|| hold(&mut Binary::default(), pending, OPERATIONS)).0,
                timed(|| hold(&mut Quaternary::default(), pending, OPERATIONS)).0,
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
                let (time, events) = timed(|| relay(packets, 500_000));
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
    let torus = figures::torus(&parameters);
    let (time, result) = timed(|| tool::torus::all_to_all(&torus, 1 << 20));
    table.push(Figure::alone("torus of 64, all-to-all of 1 MiB", time, "s"));
    table.push(Figure::alone("its packet events", result.events as f64 / time * 1e-6, "M/s"));
    let rows = table::calibration();
    table.push(Figure::alone(
        "all calibration rows",
        timed(|| calibrate::residuals(&rows, &parameters)).0,
        "s",
    ));
    for hosts in [32u32, 128, 500] {
        let (time, _) = timed(|| flow::all_to_all(hosts, 16, MESSAGE, Rate(RATE), Picos::from_nanos(1000.0)));
        let messages = f64::from(hosts * (hosts - 1) * 16);
        table.push(Figure::alone(format!("flows, {hosts} hosts × 16"), messages / time * 1e-6, "M/s"));
    }
    super::event_builder::cost(&mut table)?;
    match compile(out) {
        Err(why) => println!("SimGrid is not beside the flow level: {why}"),
        Ok(program) => {
            // SimGrid takes minutes for more flows at once than these.
            for hosts in [16u32, 32] {
                let (mut ours, mut theirs, mut ends) = (Vec::new(), Vec::new(), (0.0, 0.0));
                for _ in 0..rounds {
                    let latency = Picos::from_nanos(1000.0);
                    let (time, end) = timed(|| flow::all_to_all(hosts, BESIDE, MESSAGE, Rate(RATE), latency));
                    ours.push(time);
                    ends.0 = end.seconds();
                    let (time, end) = timed(|| simgrid(&program, hosts, BESIDE));
                    theirs.push(time);
                    ends.1 = end?;
                }
                let messages = f64::from(hosts * (hosts - 1) * BESIDE);
                let speed = |times: &[f64]| messages / middle(times) * 1e-6;
                table.push(Figure::against(
                    format!("flows, {hosts} hosts × {BESIDE}, beside SimGrid"),
                    speed(&ours),
                    "M/s",
                    speed(&theirs),
                ));
                table.push(Figure::against(
                    format!("its virtual time, {hosts} hosts"),
                    ends.0 * 1e3,
                    "ms",
                    ends.1 * 1e3,
                ));
            }
        }
    }
    Ok(table)
}
