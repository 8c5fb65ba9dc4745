//! Packets and bytes of the same traffic with and without monitoring; processor time of a torus without traffic.

use std::time::{Duration, Instant};

use millstream_health::Timers;
use millstream_torus::traffic::TrafficCounters;

use super::{Options, Outcome, launcher};
use crate::process_usage::{processor_seconds, run_time};
use crate::{Figure, Table};

/// Messages of 64 KiB to each neighbour: traffic for about a second.
const MESSAGES: u32 = 200;
/// Time of a torus without traffic, and before it.
const IDLE: Duration = Duration::from_secs(5);
const SETTLE: Duration = Duration::from_secs(1);

pub(super) fn measure(table: &mut Table, options: &Options) -> Outcome<()> {
    let off = traffic(options, 0)?;
    let on = traffic(options, 2)?;
    let label = |what: &str| format!("{what}, monitoring on; baseline off");
    let counts = [
        ("packets injected", on.injected, off.injected),
        ("packets over links", on.transmitted, off.transmitted),
        ("bytes in place", on.delivered_bytes, off.delivered_bytes),
        ("packets repeated", on.repeated, off.repeated),
    ];
    for (what, on, off) in counts {
        table.push(Figure::with_baseline(label(what), on as f64, "", off as f64));
    }
    let (off, on, wake_ups) = (idle(options, 0)?, idle(options, 2)?, wake_ups()?);
    let label = |what: &str| format!("8 nodes without traffic: {what}");
    let unit = "% of a core";
    table.push(Figure::without_baseline(label("node processes, monitoring off"), off[0], unit));
    for (what, used) in [("node processes, monitoring on", on[0]), ("host monitors", on[1])] {
        table.push(Figure::with_baseline(
            label(&format!("{what}; baseline bare wake-ups")),
            used,
            unit,
            wake_ups,
        ));
    }
    table.push(Figure::without_baseline(label("2 supervisors"), on[2], unit));
    Ok(())
}

/// Processor time of 8 processes that only wake up as often as watchdogs are written (% of a core). This thread stands for one.
fn wake_ups() -> Outcome<f64> {
    const WAKE_UPS: u32 = 200;
    let period = Duration::from_millis(Timers::default().write);
    let used = || std::fs::read_to_string("/proc/thread-self/schedstat").map(|times| run_time(&times));
    let (before, start) = (used()?, Instant::now());
    for _ in 0..WAKE_UPS {
        std::thread::sleep(period);
    }
    Ok(800.0 * (used()? - before) / start.elapsed().as_secs_f64())
}

/// Processor time of node processes, host monitors and supervisors of 2x2x2 without applications (% of a core).
fn idle(options: &Options, supervisors: usize) -> Outcome<[f64; 3]> {
    let torus = launcher(options, "2x2x2".parse()?, supervisors).launch()?;
    let nodes = || torus.dimensions().all();
    let processes = [
        nodes().filter_map(|node| torus.pid(node)).collect::<Vec<_>>(),
        nodes().filter_map(|node| torus.monitor_pid(node)).collect(),
        (0..supervisors).filter_map(|index| torus.supervisor_pid(index)).collect(),
    ];
    // Connections, first reports.
    std::thread::sleep(SETTLE);
    let used = || -> Outcome<[f64; 3]> {
        let mut seconds = [0.0; 3];
        for (seconds, processes) in seconds.iter_mut().zip(&processes) {
            for &process in processes {
                *seconds += processor_seconds(process)?;
            }
        }
        Ok(seconds)
    };
    let (before, start) = (used()?, Instant::now());
    std::thread::sleep(IDLE);
    let (after, time) = (used()?, start.elapsed().as_secs_f64());
    torus.finish()?;
    Ok(std::array::from_fn(|at| 100.0 * (after[at] - before[at]) / time))
}

fn traffic(options: &Options, supervisors: usize) -> Outcome<TrafficCounters> {
    let mut torus = launcher(options, "2x2x1".parse()?, supervisors).launch()?;
    let program = &options.program;
    let words = ["bench".into(), "torus-client".into(), "--traffic".into(), MESSAGES.to_string().into()];
    let command: Vec<_> = std::iter::once(program.into()).chain(words).collect();
    torus.run(&command)?;
    Ok(TrafficCounters::total(&torus.finish()?))
}
