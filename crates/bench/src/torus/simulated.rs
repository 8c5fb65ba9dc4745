//! Figures without a network: the detection of deaths in virtual time, and tori as machines on one thread.

use std::process::Command;

use millstream_health::{PeerState, PeerWatch, Timers};

use super::{Options, Outcome};
use crate::{Figure, Table, median};

const DEATHS: u64 = 1000;
/// Steps of the virtual clock in a millisecond.
const STEPS: u64 = 10;

/// Deaths of a host at 1,000 instants, spread over all phases of its register's writer and reader.
pub(super) fn detection(table: &mut Table) {
    let timers = Timers::default();
    let times: Vec<f64> = (0..DEATHS).map(|death| detection_time(&timers, death)).collect();
    let (shortest, longest) =
        (times.iter().copied().fold(f64::INFINITY, f64::min), times.iter().copied().fold(0.0, f64::max));
    let read = timers.read as f64;
    let upper = f64::from(timers.misses + 1) * read;
    let lower = f64::from(timers.misses) * read - timers.write as f64;
    let within = times.iter().filter(|&&time| time > lower - 1e-9 && time <= upper + 1e-9).count();
    table.push(Figure::with_baseline("deaths detected within the bound", within as f64, "", DEATHS as f64));
    table.push(Figure::with_baseline("longest detection; baseline upper bound", longest, "ms", upper));
    table.push(Figure::with_baseline("shortest detection; baseline lower bound", shortest, "ms", lower));
    table.push(Figure::without_baseline("median detection", median(&times).unwrap_or(f64::NAN), "ms"));
}

/// Time from a death to its detection (ms).
fn detection_time(timers: &Timers, death: u64) -> f64 {
    let (write, read) = (timers.write * STEPS, timers.read * STEPS);
    // Irrational steps reach all pairs of phases.
    let phase = |factor: f64, period: u64| ((death as f64 * factor).fract() * period as f64) as u64;
    let (written, looked) = (phase(0.618_033_988_75, write), phase(0.754_877_666_25, read));
    let dies = 10 * read + phase(0.569_840_290_998, read);
    let mut watch = PeerWatch::new(timers.misses);
    let mut sequence = 0;
    for now in 0.. {
        if now % write == written && now < dies {
            sequence += 1;
        }
        if now % read == looked && watch.handle_read(sequence, false) == Some(PeerState::Failed) {
            return (now - dies) as f64 / STEPS as f64;
        }
    }
    f64::NAN
}

/// All nodes of growing tori on one thread.
pub(super) fn sizes(table: &mut Table, options: &Options) -> Outcome<()> {
    // Fewer bytes for more pairs of nodes, so that each run takes seconds.
    for (dimensions, bytes, rounds) in
        [("2x2x2", "65536", "20"), ("4x4x4", "16384", "2"), ("8x8x8", "4096", "1")]
    {
        let output = Command::new(&options.program)
            .args(["torus", "simulate", "--json", "--dimensions", dimensions])
            .args(["--bytes", bytes, "--rounds", rounds])
            .output()?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            return Err(format!("torus simulate {dimensions}: {text}").into());
        }
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let number = |field: &str| report[field].as_f64().ok_or_else(|| format!("no {field} in {report}"));
        let rate = number("packets_per_second")? / 1e6;
        table.push(Figure::without_baseline(format!("{dimensions} on one thread"), rate, "M packets/s"));
        let memory = number("memory_bytes_per_node")? / 1024.0;
        table.push(Figure::without_baseline(
            format!("{dimensions} on one thread, memory a node"),
            memory,
            "KiB",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detections_lie_within_the_bound_and_come_near_both_ends() {
        let timers = Timers::default();
        let times: Vec<f64> = (0..DEATHS).map(|death| detection_time(&timers, death)).collect();
        assert!(times.iter().all(|&time| time > 180.0 - 1e-9 && time <= 300.0), "{times:?}");
        assert!(times.iter().any(|&time| time > 290.0) && times.iter().any(|&time| time < 190.0));
    }
}
