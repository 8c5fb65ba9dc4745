//! CSV files with the columns benchmark, bytes, value, unit; for disks also queue-depth.

use super::{Measured, Measurement};
use crate::measure::Benchmark;
use crate::ssd::Access;

/// Whether the first line is a header of comma-separated columns.
pub(super) fn is_table(text: &str) -> bool {
    text.lines().next().is_some_and(|line| line.split(',').any(|column| column.trim() == "benchmark"))
}

/// Factor of a unit to seconds (true) or bytes per second (false).
fn unit(text: &str) -> Option<(f64, bool)> {
    Some(match text {
        "s" => (1.0, true),
        "us" => (1e-6, true),
        "ns" => (1e-9, true),
        "GB/s" => (1e9, false),
        "MB/s" => (1e6, false),
        "MiB/s" => (1_048_576.0, false),
        "Gb/s" => (0.125e9, false),
        _ => return None,
    })
}

fn is_time(benchmark: Benchmark) -> bool {
    use crate::benchmarks::{mlc::MlcTest, osu::OsuTest};
    matches!(
        benchmark,
        Benchmark::Latency(_)
            | Benchmark::Osu(OsuTest::Latency)
            | Benchmark::DmaLatency
            | Benchmark::Mlc(MlcTest::IdleLatency)
    )
}

pub(super) fn parse(text: &str) -> Result<Vec<Measurement>, (usize, String)> {
    let mut reader =
        csv::ReaderBuilder::new().flexible(true).trim(csv::Trim::All).from_reader(text.as_bytes());
    let header = reader.headers().map_err(|error| (1, error.to_string()))?.clone();
    let column = |name: &str| {
        header
            .iter()
            .position(|known| known == name)
            .ok_or_else(|| (1, format!("column {name:?} is missing")))
    };
    let [benchmark, bytes, value, unit_column] =
        [column("benchmark")?, column("bytes")?, column("value")?, column("unit")?];
    let queue_depth = header.iter().position(|known| known == "queue-depth");
    let mut found = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| (1, error.to_string()))?;
        let line = record.position().map_or(1, |position| position.line() as usize);
        let field = |i: usize| record.get(i).unwrap_or_default();
        let number = |name: &str, i: usize| {
            field(i)
                .parse::<f64>()
                .map_err(|_| (line, format!("column {name:?}: {:?} is no number", field(i))))
        };
        let name = field(benchmark);
        let outstanding = || -> Result<u32, (usize, String)> {
            let column = queue_depth
                .ok_or_else(|| (1, format!("column \"queue-depth\" is missing: {name} needs it")))?;
            let depth = field(column).parse().ok().filter(|depth| (1..=65_536).contains(depth));
            depth.ok_or_else(|| {
                let text = field(column);
                (line, format!("column \"queue-depth\": {text:?}: must be 1 to 65536 commands outstanding"))
            })
        };
        let what = match name {
            "disk_read" => Measured::Disk { access: Access::Read, outstanding: outstanding()? },
            "disk_write" => Measured::Disk { access: Access::Write, outstanding: outstanding()? },
            _ => Measured::Benchmark(name.parse().map_err(|error: String| (line, error))?),
        };
        let text = field(unit_column);
        let (factor, seconds) = unit(text).ok_or_else(|| {
            (line, format!("column \"unit\": {text:?}: one of s, us, ns, GB/s, MB/s, MiB/s, Gb/s"))
        })?;
        let wants_seconds = matches!(&what, Measured::Benchmark(benchmark) if is_time(*benchmark));
        if seconds != wants_seconds {
            let kind = if wants_seconds { "a time" } else { "a rate" };
            return Err((line, format!("column \"unit\": {text:?}: {name} is {kind}")));
        }
        let size = field(bytes)
            .parse()
            .map_err(|_| (line, format!("column \"bytes\": {:?} is no positive integer", field(bytes))))?;
        found.push(Measurement { line, what, size, value: number("value", value)? * factor });
    }
    Ok(found)
}
