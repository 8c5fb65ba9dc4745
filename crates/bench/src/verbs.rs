//! The soft device by other people's programs, beside memcpy and UCX's own shared memory in the same run.

use std::path::Path;
use std::time::Duration;

use crate::memory::{Kind, memcpy, system_copy};
use crate::pair::{Pair, PairError};
use crate::{Figure, Table, median};

/// The benchmark could not be run.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// A tool failed.
    #[error(transparent)]
    Pair(#[from] PairError),
    /// The baseline could not be measured.
    #[error("cannot measure a plain copy: {0}")]
    Memory(#[from] std::io::Error),
}

/// Bytes in what perftest and UCX call MB.
const MIB: f64 = 1024.0 * 1024.0;

const SIZES: [(usize, &str); 4] =
    [(4096, "4 KiB"), (65536, "64 KiB"), (1 << 20, "1 MiB"), (8 << 20, "8 MiB")];
const BANDWIDTH: [(&str, &str); 3] =
    [("ib_write_bw", "write"), ("ib_read_bw", "read"), ("ib_send_bw", "send")];
const BASELINE_TIME: Duration = Duration::from_millis(200);

/// Columns of perftest's rows and of UCX's, as both print them.
mod column {
    /// Perftest's bandwidth tools: average, MB/s; millions of messages a second.
    pub(super) const BANDWIDTH: usize = 3;
    pub(super) const RATE: usize = 4;
    /// Perftest's latency tools: the median, µs.
    pub(super) const LATENCY: usize = 4;
    /// UCX: overall latency, µs; bandwidth, MB/s; messages a second.
    pub(super) const UCX_LATENCY: usize = 3;
    pub(super) const UCX_BANDWIDTH: usize = 5;
    pub(super) const UCX_RATE: usize = 7;
}

/// All figures of `rounds` interleaved rounds, as medians.
///
/// # Errors
/// [`VerbsError`] if a tool fails or a baseline cannot be measured.
pub fn run(library_dir: &Path, rounds: usize) -> Result<Table, VerbsError> {
    let title = "soft device (medians, interleaved; bandwidth beside memcpy of the same size, latency and rate \
                 beside UCX's own shared memory)";
    let mut table = Table::new(title, "baseline");
    for (size, name) in SIZES {
        bandwidth(&mut table, library_dir, size, name, rounds)?;
    }
    for (size, name) in &SIZES[..3] {
        unmappable(&mut table, library_dir, *size, name, rounds)?;
    }
    small(&mut table, library_dir, rounds)?;
    Ok(table)
}

/// Runs every pair in turn, `rounds` times; the median of one column of each one's first row.
fn medians(pairs: &[(Pair, usize)], rounds: usize) -> Result<Vec<f64>, VerbsError> {
    let mut values = vec![Vec::new(); pairs.len()];
    for _ in 0..rounds {
        for ((pair, column), values) in pairs.iter().zip(&mut values) {
            let rows = pair.run()?;
            values.extend(rows[0].0.get(*column));
        }
    }
    Ok(values.iter().map(|values| median(values).unwrap_or(0.0)).collect())
}

fn bandwidth(
    table: &mut Table,
    library_dir: &Path,
    size: usize,
    name: &str,
    rounds: usize,
) -> Result<(), VerbsError> {
    let iterations = ((4usize << 30) / size).clamp(500, 50_000).to_string();
    let size_text = size.to_string();
    let ucx = ["-t", "ucp_put_bw", "-s", &size_text, "-n", &iterations, "-w", "100", "-f"];
    let mut pairs: Vec<_> = BANDWIDTH
        .iter()
        .map(|(tool, _)| {
            let arguments = ["-s", &size_text, "-n", &iterations];
            (Pair::perftest(tool, &arguments, Some(library_dir)), column::BANDWIDTH)
        })
        .collect();
    pairs.push((Pair::ucx_verbs(&ucx, library_dir), column::UCX_BANDWIDTH));
    pairs.push((Pair::ucx_shared_memory(&ucx), column::UCX_BANDWIDTH));
    let mut baselines = Vec::new();
    let mut values = vec![Vec::new(); pairs.len()];
    for _ in 0..rounds {
        baselines.push(memcpy(Kind::Ordinary, size, size, size, BASELINE_TIME)?);
        for (value, values) in medians(&pairs, 1)?.into_iter().zip(&mut values) {
            values.push(value * MIB / 1e9);
        }
    }
    let baseline = median(&baselines).unwrap_or(0.0);
    let names =
        BANDWIDTH.iter().map(|(_, name)| *name).chain(["UCX put over this device", "UCX put, its own"]);
    for (what, values) in names.zip(&values) {
        let value = median(values).unwrap_or(0.0);
        table.push(Figure::against(format!("{what} {name}"), value, "GB/s", baseline));
    }
    Ok(())
}

/// Memory that a peer cannot map, beside the bare system call that is left then.
fn unmappable(
    table: &mut Table,
    library_dir: &Path,
    size: usize,
    name: &str,
    rounds: usize,
) -> Result<(), VerbsError> {
    let iterations = ((1usize << 30) / size).clamp(500, 20_000).to_string();
    let mut pair =
        Pair::perftest("ib_write_bw", &["-s", &size.to_string(), "-n", &iterations], Some(library_dir));
    pair.environment.push(("MILLSTREAM_MOVE", "0".to_owned()));
    let (mut values, mut baselines) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        baselines.push(system_copy(size, BASELINE_TIME)?);
        values
            .extend(medians(&[(pair.clone(), column::BANDWIDTH)], 1)?.iter().map(|value| value * MIB / 1e9));
    }
    let (value, baseline) = (median(&values).unwrap_or(0.0), median(&baselines).unwrap_or(0.0));
    table.push(Figure::against(format!("write {name} without mapping"), value, "GB/s", baseline));
    Ok(())
}

/// Eight bytes: latency and rate.
fn small(table: &mut Table, library_dir: &Path, rounds: usize) -> Result<(), VerbsError> {
    let latency = |tool, more: &[&str]| {
        let arguments = [&["-n", "100000"], more].concat();
        (Pair::perftest(tool, &arguments, Some(library_dir)), column::LATENCY)
    };
    let rate = |tool, more: &[&str]| {
        let arguments = [&["-s", "8", "-I", "8", "-n", "2000000"], more].concat();
        (Pair::perftest(tool, &arguments, Some(library_dir)), column::RATE)
    };
    let put = ["-t", "ucp_put_lat", "-s", "8", "-n", "500000", "-f"];
    let tag = ["-t", "tag_lat", "-s", "8", "-n", "500000", "-f"];
    let put_rate = ["-t", "ucp_put_bw", "-s", "8", "-n", "5000000", "-f"];
    let pairs = [
        (Pair::ucx_shared_memory(&put), column::UCX_LATENCY),
        (Pair::ucx_shared_memory(&tag), column::UCX_LATENCY),
        (Pair::ucx_shared_memory(&put_rate), column::UCX_RATE),
        latency("ib_write_lat", &["-s", "8"]),
        latency("ib_read_lat", &["-s", "8"]),
        latency("ib_send_lat", &["-s", "8"]),
        latency("ib_atomic_lat", &[]),
        (Pair::ucx_verbs(&put, library_dir), column::UCX_LATENCY),
        (Pair::ucx_verbs(&tag, library_dir), column::UCX_LATENCY),
        rate("ib_write_bw", &[]),
        rate("ib_write_bw", &["--post_list", "64"]),
        rate("ib_send_bw", &[]),
        (Pair::ucx_verbs(&put_rate, library_dir), column::UCX_RATE),
    ];
    let values = medians(&pairs, rounds)?;
    let [put, tag, put_rate, write, read, send, atomic, ucx_put, ucx_tag, rates @ ..] = &values[..] else {
        unreachable!("one value a pair");
    };
    for (name, value, baseline) in [
        ("write latency 8 B, beside UCX put", write, put),
        ("UCX put latency 8 B over this device", ucx_put, put),
        ("send latency 8 B, beside UCX tag", send, tag),
        ("UCX tag latency 8 B over this device", ucx_tag, tag),
    ] {
        table.push(Figure::against(name, *value, "µs", *baseline));
    }
    table.push(Figure::alone("read latency 8 B", *read, "µs"));
    table.push(Figure::alone("fetch-and-add latency 8 B", *atomic, "µs"));
    let baseline = put_rate / 1e6;
    let names = [
        "write rate 8 B inline",
        "write rate 8 B inline, 64 a list",
        "send rate 8 B inline",
        "UCX put rate 8 B over this device",
    ];
    for (index, (name, value)) in names.iter().zip(rates).enumerate() {
        // UCX counts messages, perftest millions of them.
        let value = if index == 3 { value / 1e6 } else { *value };
        table.push(Figure::against(*name, value, "M/s", baseline));
    }
    Ok(())
}
