//! Chart of the payload rate over time, with the memcpy baseline.

use crate::axis::{Ticks, si_prefix_for};
use crate::colour::{BASELINE, GRID, MEASURED, SECONDARY, TEXT};
use crate::quantity::block;
use crate::run::{ProgressSample, RunReport};
use crate::svg::{Anchor, Font, Svg, path};

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 450.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 776.0;
const TOP: f64 = 104.0;
const BOTTOM: f64 = 394.0;
/// Maximum number of steps in the chart; more samples are merged.
const STEPS: usize = 350;

/// A time interval with its mean rate.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    /// Start and end \[s\].
    time: (f64, f64),
    /// Rate \[B/s\].
    rate: f64,
}

/// Maximum number of characters of a problem in the chart.
const PROBLEM_CHARS: usize = 90;

/// The line that says why a run failed.
fn failure(problem: &str) -> String {
    let line: String = problem.lines().next().unwrap_or_default().chars().take(PROBLEM_CHARS).collect();
    let cut = if line.len() < problem.len() { "…" } else { "" };
    format!("FAILED: {line}{cut}")
}

/// Draws the payload rate over time as SVG, 800 × 450.
pub fn draw(report: &RunReport) -> String {
    let derived = report.derived();
    let steps = steps(report);
    let memcpy = report.memcpy_baseline.map(|memcpy| memcpy.bytes_per_s.0).filter(|rate| rate.is_finite());
    let highest = steps.iter().map(|step| step.rate).chain(memcpy).fold(0.0, f64::max);
    let (scale, prefix) = si_prefix_for(highest);
    let rates = Ticks::around(0.0, highest / scale * 1.05, 5);
    let (seconds, unit) = time_unit(end(report));
    let times = Ticks::between(0.0, end(report) / seconds, 8);
    let x = |time: f64| LEFT + times.position(time / seconds) * (RIGHT - LEFT);
    let y = |rate: f64| BOTTOM - rates.position(rate / scale) * (BOTTOM - TOP);

    let mut svg = Svg::new(WIDTH, HEIGHT, &format!("{}: throughput over time", report.name));
    svg.text((24.0, 36.0), Anchor::Start, Font::bold(20.0), &format!("{}: throughput", report.name));
    let mut subtitle = format!("{} of payload in {}", report.payload_bytes, report.duration_s);
    if let Some(rate) = derived.payload_bytes_per_s {
        subtitle = format!("{rate} on average, {subtitle}");
    }
    if let Some(ratio) = derived.memcpy_ratio {
        subtitle += &format!(", {ratio:.2} × memcpy");
    }
    svg.text((24.0, 60.0), Anchor::Start, Font::new(14.0, SECONDARY), &subtitle);
    if let Some(problem) = derived.problems.first() {
        svg.text((24.0, 82.0), Anchor::Start, Font::bold(14.0), &failure(problem));
    }

    let label = Font::new(13.0, TEXT);
    for (rate, text) in rates.marks() {
        let at = y(rate * scale);
        svg.line((LEFT, at), (RIGHT, at), &[("stroke", &GRID)]);
        svg.text((LEFT - 8.0, at + 4.5), Anchor::End, label, &text);
    }
    svg.text((LEFT, TOP - 14.0), Anchor::Middle, Font::new(13.0, SECONDARY), &format!("{prefix}B/s"));
    for (time, text) in times.marks() {
        let at = x(time * seconds);
        svg.line((at, BOTTOM), (at, BOTTOM + 5.0), &[("stroke", &SECONDARY)]);
        svg.text((at, BOTTOM + 21.0), Anchor::Middle, label, &text);
    }
    let axis = format!("time since the start [{unit}]");
    svg.text(((LEFT + RIGHT) / 2.0, BOTTOM + 44.0), Anchor::Middle, Font::new(13.0, SECONDARY), &axis);

    let curve: Vec<(f64, f64)> = steps
        .iter()
        .flat_map(|step| [step.time.0, step.time.1].map(|time| (x(time), y(step.rate))))
        .collect();
    if let (Some(first), Some(last)) = (curve.first(), curve.last()) {
        let area = [(first.0, BOTTOM)].into_iter().chain(curve.clone()).chain([(last.0, BOTTOM)]);
        let area = path(area) + "Z";
        svg.element("path", &[("d", &area), ("fill", &MEASURED), ("fill-opacity", &"0.14")], None);
        svg.element(
            "path",
            &[
                ("d", &path(curve)),
                ("fill", &"none"),
                ("stroke", &MEASURED),
                ("stroke-width", &2),
                ("stroke-linejoin", &"round"),
            ],
            None,
        );
    } else {
        let middle = ((LEFT + RIGHT) / 2.0, (TOP + BOTTOM) / 2.0);
        svg.text(middle, Anchor::Middle, Font::new(14.0, SECONDARY), "no payload was transferred");
    }
    svg.line((LEFT, BOTTOM), (RIGHT, BOTTOM), &[("stroke", &SECONDARY)]);
    if let Some((memcpy, rate)) = report.memcpy_baseline.zip(memcpy) {
        let at = y(rate);
        let dashes = [
            ("stroke", &BASELINE as &dyn std::fmt::Display),
            ("stroke-width", &1.5),
            ("stroke-dasharray", &"7 5"),
        ];
        svg.line((LEFT, at), (RIGHT, at), &dashes);
        let text = format!("memcpy, blocks of {}: {}", block(memcpy.block_bytes), memcpy.bytes_per_s);
        svg.text((RIGHT, at - 7.0), Anchor::End, Font::new(13.0, BASELINE), &text);
    }
    svg.finish()
}

/// End of the time axis \[s\].
fn end(report: &RunReport) -> f64 {
    let last = report.samples.last().map_or(0.0, |sample| sample.elapsed_s.0);
    [report.duration_s.0, last].into_iter().filter(|time| time.is_finite()).fold(0.0, f64::max)
}

/// The unit for times up to `length`, with its length in seconds.
fn time_unit(length: f64) -> (f64, &'static str) {
    match length {
        _ if length >= 2.0 * 3600.0 => (3600.0, "h"),
        _ if length >= 300.0 => (60.0, "min"),
        _ if length >= 1.0 || length <= 0.0 => (1.0, "s"),
        _ if length >= 1e-3 => (1e-3, "ms"),
        _ => (1e-6, "µs"),
    }
}

/// The rate between samples. A run with fewer than two samples has one step at its average rate.
fn steps(report: &RunReport) -> Vec<Step> {
    let start = ProgressSample::default();
    let shortest = end(report) / STEPS as f64;
    let mut steps = Vec::new();
    let mut before = start;
    for sample in &report.samples {
        let length = sample.elapsed_s.0 - before.elapsed_s.0;
        if length > 0.0 && length >= shortest {
            let bytes = sample.payload_bytes.0.saturating_sub(before.payload_bytes.0);
            let rate = bytes as f64 / length;
            if rate.is_finite() {
                steps.push(Step { time: (before.elapsed_s.0, sample.elapsed_s.0), rate });
            }
            before = *sample;
        }
    }
    if steps.len() < 2 {
        let average = report.payload_bytes.per(report.duration_s);
        let whole = |rate: crate::BytesPerSecond| Step { time: (0.0, report.duration_s.0), rate: rate.0 };
        return average.map(whole).into_iter().collect();
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bytes, BytesPerSecond, MemcpyBaseline, Seconds};

    fn sample(at: f64, bytes: u64) -> ProgressSample {
        ProgressSample { elapsed_s: Seconds(at), events: 0, payload_bytes: Bytes(bytes) }
    }

    fn report(samples: Vec<ProgressSample>) -> RunReport {
        let last = samples.last().copied().unwrap_or_default();
        RunReport {
            payload_bytes: last.payload_bytes,
            duration_s: last.elapsed_s,
            memcpy_baseline: Some(MemcpyBaseline {
                block_bytes: Bytes(1 << 20),
                bytes_per_s: BytesPerSecond(12e9),
            }),
            samples,
            ..RunReport::default()
        }
    }

    #[test]
    fn steps_are_between_samples() {
        let found =
            steps(&report(vec![sample(0.0, 0), sample(0.5, 100), sample(1.5, 100), sample(2.0, 400)]));
        let expected = [((0.0, 0.5), 200.0), ((0.5, 1.5), 0.0), ((1.5, 2.0), 600.0)];
        assert_eq!(found, expected.map(|(time, rate)| Step { time, rate }));
    }

    #[test]
    fn many_samples_are_merged_with_the_same_mean() {
        let samples: Vec<ProgressSample> =
            (1..=10_000).map(|k| sample(f64::from(k) * 1e-3, 50 * k as u64)).collect();
        let found = steps(&report(samples));
        assert!((300..=STEPS).contains(&found.len()));
        assert!(found.iter().all(|step| (step.rate - 50e3).abs() < 1.0));
    }

    #[test]
    fn short_run_has_one_step() {
        let found = steps(&report(vec![sample(0.25, 1000)]));
        assert_eq!(found, [Step { time: (0.0, 0.25), rate: 4000.0 }]);
        assert!(steps(&RunReport::default()).is_empty());
    }
}
