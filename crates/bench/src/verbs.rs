//! The soft device, by perftest, beside memcpy of the same block size.

use std::path::PathBuf;
use std::time::Duration;

use crate::memory::memcpy;
use crate::perftest::{Perftest, PerftestError};
use crate::{Figure, Table, median};

/// The benchmark could not be run.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// A tool failed.
    #[error(transparent)]
    Perftest(#[from] PerftestError),
    /// The baseline could not be measured.
    #[error("cannot measure memcpy: {0}")]
    Memory(#[from] std::io::Error),
}

/// Bytes in what perftest calls MB.
const MIB: f64 = 1024.0 * 1024.0;

/// Perftest's bandwidth tools by block size, and latency tools for 8 bytes; `rounds` interleaved
/// rounds, medians.
///
/// # Errors
/// [`VerbsError`] if a tool fails or the baseline cannot be measured.
pub fn run(library_dir: Option<PathBuf>, rounds: usize) -> Result<Table, VerbsError> {
    let mut table = Table::new("soft device, perftest (medians, interleaved)", "memcpy");
    let sizes = [(4096usize, "4 KiB"), (65536, "64 KiB"), (1 << 20, "1 MiB"), (8 << 20, "8 MiB")];
    let tools = [("ib_write_bw", "write"), ("ib_read_bw", "read"), ("ib_send_bw", "send")];
    for (size, size_name) in sizes {
        let iterations = ((4usize << 30) / size).clamp(500, 50_000).to_string();
        let size_text = size.to_string();
        let mut baselines = Vec::new();
        let mut speeds = [const { Vec::new() }; 3];
        for _ in 0..rounds {
            baselines.push(memcpy(size, size, size, Duration::from_millis(200))?);
            for ((tool, _), speeds) in tools.iter().zip(&mut speeds) {
                let arguments = ["-s", &size_text, "-n", &iterations];
                let rows = Perftest::new(tool, &arguments, library_dir.clone()).run()?;
                speeds.push(rows[0].0[3] * MIB / 1e9);
            }
        }
        let baseline = median(&baselines).unwrap_or(0.0);
        for ((_, name), speeds) in tools.iter().zip(&speeds) {
            let value = median(speeds).unwrap_or(0.0);
            table.push(Figure::against(format!("{name} {size_name}"), value, "GB/s", baseline));
        }
    }
    for (tool, name, iterations) in [
        ("ib_write_lat", "write latency 8 B", "50000"),
        ("ib_read_lat", "read latency 8 B", "20000"),
        ("ib_send_lat", "send latency 8 B", "50000"),
    ] {
        let mut values = Vec::new();
        for _ in 0..rounds {
            let rows = Perftest::new(tool, &["-s", "8", "-n", iterations], library_dir.clone()).run()?;
            // Columns: bytes, iterations, minimum, maximum, typical (the median).
            values.push(rows[0].0[4]);
        }
        table.push(Figure::alone(name, median(&values).unwrap_or(0.0), "µs"));
    }
    let mut rates = Vec::new();
    for _ in 0..rounds {
        let arguments = ["-s", "8", "-n", "1000000", "-I", "8"];
        let rows = Perftest::new("ib_write_bw", &arguments, library_dir.clone()).run()?;
        rates.push(rows[0].0[4]);
    }
    table.push(Figure::alone("write rate 8 B inline", median(&rates).unwrap_or(0.0), "M/s"));
    Ok(table)
}
