//! Output of the OSU micro-benchmarks between two ranks.

use super::{Measured, Measurement, numbers, perftest};
use crate::benchmarks::osu::OsuTest;
use crate::measure::Benchmark;

pub(super) fn parse(text: &str) -> Result<Vec<Measurement>, (usize, String)> {
    let mut found = Vec::new();
    let mut test = None;
    for (i, line) in text.lines().map(str::trim).enumerate() {
        if perftest::is_title(line) || line.starts_with("#bytes") || line.contains(": IOPS=") {
            test = None;
        }
        if let Some(title) = line.strip_prefix("# OSU MPI") {
            // Device buffers, several pairs and collectives are other benchmarks.
            test = match title.split(" Test").next().unwrap_or_default().trim() {
                "Latency" | "-CUDA Latency" => Some((OsuTest::Latency, 1e-6)),
                "Bandwidth" | "-CUDA Bandwidth" => Some((OsuTest::Bandwidth, 1e6)),
                "Bi-Directional Bandwidth" => Some((OsuTest::Bidirectional, 1e6)),
                other => {
                    return Err((
                        i + 1,
                        format!(
                            "{other:?}: only the OSU tests Latency, Bandwidth and Bi-Directional Bandwidth are modelled"
                        ),
                    ));
                }
            };
        }
        let (Some((test, factor)), Some(fields)) = (test, numbers(line)) else { continue };
        // A message of no bytes takes as long as one of one byte.
        let size = (fields[0] as u64).max(1);
        if test != OsuTest::Latency && fields[0] < 1.0 {
            continue;
        }
        found.push(Measurement {
            line: i + 1,
            what: Measured::Benchmark(Benchmark::Osu(test)),
            size,
            value: fields[1] * factor,
        });
    }
    Ok(found)
}
