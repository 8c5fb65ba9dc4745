//! Output of perftest's `ib_*_bw` and `ib_*_lat`.

use super::{Measured, Measurement, numbers};
use crate::measure::Benchmark;
use crate::path::Verb;

/// The benchmark of a title line such as `RDMA_Write BW Test`; an error if the model has none.
fn title(line: &str) -> Option<Result<Benchmark, String>> {
    let verb = match line.split_whitespace().next()? {
        "RDMA_Write" => Verb::Write,
        "RDMA_Read" => Verb::Read,
        "Send" => Verb::Send,
        _ => return None,
    };
    match line {
        _ if line.ends_with("Latency Test") => Some(Ok(Benchmark::Latency(verb))),
        _ if line.contains("Bidirectional") && line.ends_with("Test") => {
            Some(Err(format!("{line:?}: tests of one direction only; run it without -b")))
        }
        _ if line.contains(" BW ") && line.ends_with("Test") => Some(Ok(Benchmark::Bandwidth(verb))),
        _ => None,
    }
}

/// Whether a line is a title of perftest.
pub(super) fn is_title(line: &str) -> bool {
    title(line).is_some()
}

/// Column of the results and the factor to seconds or bytes per second, from a header line.
fn header(line: &str, benchmark: Benchmark) -> Option<(usize, f64)> {
    // Column names contain spaces: each ends with its unit or is a single word.
    let joined =
        line.replace("BW peak", "BW-peak").replace("BW average", "BW-average").replace("% percentile", "%");
    let columns: Vec<&str> = joined.split_whitespace().collect();
    let wanted = match benchmark {
        Benchmark::Latency(_) => ["t_typical", "t_avg"],
        _ => ["BW-average", "BW-average"],
    };
    let column = wanted.iter().find_map(|name| columns.iter().position(|column| column.starts_with(name)))?;
    let unit = columns[column].split_once('[')?.1.trim_end_matches(']');
    let factor = match unit {
        "usec" => 1e-6,
        "MB/sec" | "MiB/sec" => 1_048_576.0,
        "Gb/sec" => 0.125e9,
        _ => return None,
    };
    Some((column, factor))
}

pub(super) fn parse(text: &str) -> Result<Vec<Measurement>, (usize, String)> {
    let mut found = Vec::new();
    let mut benchmark = None;
    let mut column = None;
    for (i, line) in text.lines().map(str::trim).enumerate() {
        if line.starts_with("# OSU") || line.contains(": IOPS=") {
            benchmark = None;
        }
        if let Some(new) = title(line) {
            (benchmark, column) = (Some(new.map_err(|why| (i + 1, why))?), None);
        }
        let Some(benchmark) = benchmark else { continue };
        if line.starts_with("#bytes") {
            column = Some(header(line, benchmark).ok_or_else(|| {
                (
                    i + 1,
                    format!(
                        "header {line:?}: needs t_typical[usec], or BW average in MB/sec, MiB/sec or Gb/sec"
                    ),
                )
            })?);
            continue;
        }
        let Some(fields) = numbers(line) else { continue };
        let (column, factor) =
            column.ok_or_else(|| (i + 1, "a table without its header line #bytes …".to_owned()))?;
        let value = fields.get(column).ok_or_else(|| {
            (i + 1, format!("{} fields, the header has {} or more", fields.len(), column + 1))
        })?;
        found.push(Measurement {
            line: i + 1,
            what: Measured::Benchmark(benchmark),
            size: fields[0] as u64,
            value: value * factor,
        });
    }
    Ok(found)
}
