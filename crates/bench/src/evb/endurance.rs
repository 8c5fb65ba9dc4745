//! `millstream bench evb-endurance`: a long run at full rate, whose memory, descriptors and rate stay as they are.

use std::error::Error;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use millstream_report::RunReport;

use super::{Case, Kernel, prepare};
use crate::process_usage::{children, descriptors, resident_kib};
use crate::{Benchmark, Figure, Table, event_run, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "evb-endurance",
    title: "Event builder for ten minutes",
    measures: "A run at full rate with two readout units and two builder units: the rate in its last tenth, and resident memory \
               and open descriptors of all processes then.",
    baseline: "the same in the second tenth of the run",
    values: "one run; memory and descriptors are medians of what was read in a tenth of the run",
    command: "make bench-endurance",
};

/// Time between two looks at the processes.
const PERIOD: Duration = Duration::from_millis(500);

/// What the processes of a run use at one time.
struct Usage {
    at: Duration,
    processes: usize,
    resident_mb: f64,
    descriptors: f64,
}

/// Measures the figures. `program` is the path of `millstream`; `packed` is the folder of the packed camera data.
///
/// # Errors
/// The first error of a file or of the run.
pub fn run(program: &Path, packed: &Path, out: &Path, seconds: f64) -> Result<Table, Box<dyn Error>> {
    let folder = prepare(packed, out)?;
    let case = Case { program, kernel: Kernel::Off, readouts: 2, builders: 2, batch: 16, joined: false };
    let probe = case.run(&folder, 20_000)?;
    let rate = probe.events as f64 / probe.duration_s.0.max(1e-6);
    // The long run may be faster than the short one, and should not be shorter than wanted.
    let replay = (1.25 * rate * seconds / 32.0).max(20_000.0) as u64;
    let (report, used) = thread::scope(|scope| {
        let run = scope.spawn(|| {
            event_run::run(program, &folder, &case.configuration(replay)).map_err(|error| error.to_string())
        });
        let (start, mut used) = (Instant::now(), Vec::new());
        while !run.is_finished() {
            used.extend(usage(start.elapsed()));
            thread::sleep(PERIOD);
        }
        (run.join().unwrap_or_else(|_| Err("the run panicked".to_owned())), used)
    });
    let report = report?;
    let mut table = Table::new(BENCHMARK, 1);
    table.push(Figure::without_baseline("duration", report.duration_s.0, "s"));
    let rates = [(0.1, 0.2), (0.9, 1.0)].map(|part| rate_between(&report, part));
    table.push(Figure::with_baseline("rate", rates[1], "GB/s", rates[0]));
    // At the start and at the end there are fewer.
    let all = used.iter().map(|usage| usage.processes).max().unwrap_or(0);
    let running: Vec<_> = used.iter().filter(|usage| usage.processes == all).collect();
    let end = running.last().map_or(0.0, |usage| usage.at.as_secs_f64());
    let mut compare =
        |what: &str, unit: &'static str, value: fn(&Usage) -> f64| -> Result<(), Box<dyn Error>> {
            let between = |(from, to): (f64, f64)| {
                let inside = running.iter().filter(|usage| {
                    let at = usage.at.as_secs_f64() / end;
                    from <= at && at <= to
                });
                median(&inside.map(|usage| value(usage)).collect::<Vec<_>>())
            };
            let (Some(early), Some(late)) = (between((0.1, 0.2)), between((0.9, 1.0))) else {
                return Err("the run is too short".into());
            };
            table.push(Figure::with_baseline(what, late, unit, early));
            Ok(())
        };
    compare("resident memory of all processes", "MB", |usage| usage.resident_mb)?;
    compare("open descriptors of all processes", "", |usage| usage.descriptors)?;
    Ok(table)
}

/// The rate between two fractions of a run (GB/s).
fn rate_between(report: &RunReport, (from, to): (f64, f64)) -> f64 {
    let duration = report.duration_s.0;
    let inside = report.samples.iter().filter(|sample| {
        let at = sample.elapsed_s.0 / duration;
        from <= at && at <= to
    });
    let inside: Vec<_> = inside.collect();
    let (Some(first), Some(last)) = (inside.first(), inside.last()) else { return 0.0 };
    let bytes = last.payload_bytes.0.saturating_sub(first.payload_bytes.0);
    bytes as f64 / (last.elapsed_s.0 - first.elapsed_s.0).max(1e-6) / 1e9
}

/// What the processes below this one use now; none if one of them ends meanwhile.
fn usage(at: Duration) -> Option<Usage> {
    let mut processes = Vec::new();
    add_descendants(std::process::id(), &mut processes);
    let mut usage = Usage { at, processes: processes.len(), resident_mb: 0.0, descriptors: 0.0 };
    for process in processes {
        usage.resident_mb += resident_kib(process).ok()? * 1024.0 / 1e6;
        usage.descriptors += descriptors(process).ok()?;
    }
    Some(usage)
}

fn add_descendants(of: u32, processes: &mut Vec<u32>) {
    for child in children(of) {
        processes.push(child);
        add_descendants(child, processes);
    }
}
