//! The soft device by other people's programs and by a lean loop of our own, beside memcpy and UCX's own shared memory in the same run.

pub mod raw_verbs;

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use crate::memcpy::{Kind, memcpy, memcpy_beside_poller, memcpy_told};
use crate::tools::{Pair, PairError};
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
/// Of UCX on its own shared memory, beside WRITEs and beside SENDs.
const UCX_BANDWIDTH: [(&str, &str); 3] = [
    ("ucp_put_bw", "UCX put, its own"),
    ("ucp_am_bw", "UCX active message, its own"),
    ("tag_bw", "UCX tag message, its own"),
];
const BASELINE_TIME: Duration = Duration::from_millis(200);

/// Columns of the tools' rows, as they print them.
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
    /// The lean loop: GB/s; millions of requests a second; µs a request.
    pub(super) const LEAN_BANDWIDTH: usize = 2;
    pub(super) const LEAN_RATE: usize = 3;
    pub(super) const LEAN_LATENCY: usize = 4;
}

/// What is measured, and with what.
struct Bench<'a> {
    /// The program `millstream`, for the loops of our own.
    program: &'a Path,
    library_dir: &'a Path,
    rounds: usize,
    table: Table,
}

/// All figures of `rounds` interleaved rounds, as medians. `program` is `millstream`.
///
/// # Errors
/// [`VerbsError`] if a tool fails or a baseline cannot be measured.
pub fn run(program: &Path, library_dir: &Path, rounds: usize) -> Result<Table, VerbsError> {
    let title = "soft device by perftest, by a lean loop of our own, and under UCX (medians, interleaved; bandwidth \
                 beside memcpy of the same size and kind of memory, latency and rate beside UCX's own shared memory)";
    let mut bench = Bench { program, library_dir, rounds, table: Table::new(title, "baseline") };
    for (size, name) in SIZES {
        bench.bandwidth(size, name)?;
    }
    for (size, name) in SIZES {
        bench.lean_bandwidth(size, name)?;
    }
    for (size, name) in &SIZES[..3] {
        bench.unmappable(*size, name)?;
    }
    bench.small()?;
    Ok(bench.table)
}

impl Bench<'_> {
    /// Medians of a baseline and of one column of each pair's first row, all of them in turn.
    fn medians(
        &self,
        baseline: impl Fn() -> std::io::Result<f64>,
        pairs: &[(Pair, usize)],
    ) -> Result<(f64, Vec<f64>), VerbsError> {
        let mut baselines = Vec::new();
        let mut values = vec![Vec::new(); pairs.len()];
        for _ in 0..self.rounds {
            baselines.push(baseline()?);
            for ((pair, column), values) in pairs.iter().zip(&mut values) {
                values.extend(pair.run()?[0].0.get(*column));
            }
        }
        let middle = |values: &Vec<f64>| median(values).unwrap_or(0.0);
        Ok((middle(&baselines), values.iter().map(middle).collect()))
    }

    fn bandwidth(&mut self, size: usize, name: &str) -> Result<(), VerbsError> {
        let library_dir = self.library_dir;
        let iterations = ((4usize << 30) / size).clamp(500, 50_000).to_string();
        let size_text = size.to_string();
        let ucx = |test| ["-t", test, "-s", &size_text, "-n", &iterations, "-w", "100", "-f"];
        let mut pairs = Vec::from(BANDWIDTH.map(|(tool, _)| {
            let arguments = ["-s", &size_text, "-n", &iterations];
            (Pair::perftest(tool, &arguments, Some(library_dir)), column::BANDWIDTH)
        }));
        pairs.push((Pair::ucx_verbs(&ucx("ucp_put_bw"), library_dir), column::UCX_BANDWIDTH));
        for (test, _) in UCX_BANDWIDTH {
            pairs.push((Pair::ucx_shared_memory(&ucx(test)), column::UCX_BANDWIDTH));
        }
        let copy = || memcpy(Kind::Ordinary, size, size, size, BASELINE_TIME);
        let (baseline, values) = self.medians(copy, &pairs)?;
        let names = BANDWIDTH.iter().map(|(_, name)| *name).chain(["UCX put over this device"]);
        let names = names.chain(UCX_BANDWIDTH.map(|(_, name)| name));
        for (what, value) in names.zip(&values) {
            self.table.push(Figure::against(format!("{what} {name}"), value * MIB / 1e9, "GB/s", baseline));
        }
        Ok(())
    }

    fn lean(&self, arguments: &[&str], column: usize) -> (Pair, usize) {
        (Pair::lean(self.program, arguments, self.library_dir), column)
    }

    /// The same by our own loop, whose memory is landing memory.
    fn lean_bandwidth(&mut self, size: usize, name: &str) -> Result<(), VerbsError> {
        let size_text = size.to_string();
        let loops = [
            &["write"][..],
            &["read"],
            &["send"],
            &["write", "--list", "64"],
            &["read", "--list", "64"],
            &["send", "--list", "64"],
        ];
        let pairs =
            loops.map(|what| self.lean(&[what, &["--size", &size_text]].concat(), column::LEAN_BANDWIDTH));
        let [beside_poller, told] = [(); 2].map(|()| RefCell::new(Vec::new()));
        let copy = || {
            let speed = memcpy_beside_poller(Kind::Landing, size, BASELINE_TIME)?;
            beside_poller.borrow_mut().push(speed);
            told.borrow_mut().push(memcpy_told(Kind::Landing, size, BASELINE_TIME)?);
            memcpy(Kind::Landing, size, size, size, BASELINE_TIME)
        };
        let (baseline, values) = self.medians(copy, &pairs)?;
        let names = [
            "write {}, lean loop",
            "read {}, lean loop",
            "send {}, lean loop",
            "write {}, lean loop, 64 a list",
            "read {}, lean loop, 64 a list",
            "send {}, lean loop, 64 a list",
        ];
        for (what, value) in names.iter().zip(&values) {
            self.table.push(Figure::against(what.replace("{}", name), *value, "GB/s", baseline));
        }
        // Whoever receives polls, and that alone may slow a copy down; and each message is told of.
        let bounds = [(beside_poller, "while another core polls"), (told, "told of one by one")];
        for (bound, what) in bounds {
            let bound = median(&bound.borrow()).unwrap_or(0.0);
            let rows = [
                Figure::against(format!("memcpy {name} {what}"), bound, "GB/s", baseline),
                Figure::against(
                    format!("send {name}, lean loop, beside memcpy {what}"),
                    values[2],
                    "GB/s",
                    bound,
                ),
            ];
            rows.into_iter().for_each(|figure| self.table.push(figure));
        }
        Ok(())
    }

    /// Memory that a peer cannot map, beside the bare system call that is left then, between the same two processes.
    fn unmappable(&mut self, size: usize, name: &str) -> Result<(), VerbsError> {
        let size_text = size.to_string();
        let iterations = ((1usize << 30) / size).clamp(500, 20_000).to_string();
        let arguments = ["-s", &size_text, "-n", &iterations];
        let mut write = Pair::perftest("ib_write_bw", &arguments, Some(self.library_dir));
        let mut read = self.lean(&["read", "--private", "--size", &size_text], column::LEAN_BANDWIDTH).0;
        for pair in [&mut write, &mut read] {
            pair.environment.push(("MILLSTREAM_MOVE", "0".to_owned()));
        }
        let pairs = [
            (write, column::BANDWIDTH),
            (read, column::LEAN_BANDWIDTH),
            self.lean(&["system-write", "--size", &size_text], column::LEAN_BANDWIDTH),
            self.lean(&["system-read", "--size", &size_text], column::LEAN_BANDWIDTH),
        ];
        let (_, values) = self.medians(|| Ok(0.0), &pairs)?;
        for (what, value, baseline) in [
            ("write, beside process_vm_writev", values[0] * MIB / 1e9, values[2]),
            ("read, lean loop, beside process_vm_readv", values[1], values[3]),
        ] {
            let name = format!("without mapping {name} {what}");
            self.table.push(Figure::against(name, value, "GB/s", baseline));
        }
        Ok(())
    }

    /// Eight bytes: latency and rate.
    fn small(&mut self) -> Result<(), VerbsError> {
        let library_dir = self.library_dir;
        let latency = |tool, more: &[&str]| {
            let arguments = [&["-n", "100000"], more].concat();
            (Pair::perftest(tool, &arguments, Some(library_dir)), column::LATENCY)
        };
        let rate = |tool, more: &[&str]| {
            let arguments = [&["-s", "8", "-I", "8", "-n", "2000000"], more].concat();
            (Pair::perftest(tool, &arguments, Some(library_dir)), column::RATE)
        };
        let lean_rate = |more: &[&str]| self.lean(&[more, &["--inline"]].concat(), column::LEAN_RATE);
        let put = ["-t", "ucp_put_lat", "-s", "8", "-n", "500000", "-f"];
        let tag = ["-t", "tag_lat", "-s", "8", "-n", "500000", "-f"];
        let put_rate = ["-t", "ucp_put_bw", "-s", "8", "-n", "5000000", "-f"];
        let pairs = [
            (Pair::ucx_shared_memory(&put), column::UCX_LATENCY),
            (Pair::ucx_shared_memory(&tag), column::UCX_LATENCY),
            (Pair::ucx_shared_memory(&put_rate), column::UCX_RATE),
            latency("ib_write_lat", &["-s", "8"]),
            self.lean(&["latency"], column::LEAN_LATENCY),
            self.lean(&["latency-completed"], column::LEAN_LATENCY),
            latency("ib_read_lat", &["-s", "8"]),
            latency("ib_send_lat", &["-s", "8"]),
            latency("ib_atomic_lat", &[]),
            (Pair::ucx_verbs(&put, library_dir), column::UCX_LATENCY),
            (Pair::ucx_verbs(&tag, library_dir), column::UCX_LATENCY),
            rate("ib_write_bw", &[]),
            rate("ib_write_bw", &["--post_list", "64"]),
            lean_rate(&["write"]),
            lean_rate(&["write", "--list", "64"]),
            rate("ib_send_bw", &[]),
            lean_rate(&["send"]),
            lean_rate(&["send", "--list", "64"]),
            (Pair::ucx_verbs(&put_rate, library_dir), column::UCX_RATE),
        ];
        let (_, values) = self.medians(|| Ok(0.0), &pairs)?;
        let [put, tag, put_rate, write, lean, completed, read, send, atomic, ucx_put, ucx_tag, rates @ ..] =
            &values[..]
        else {
            unreachable!("one value a pair");
        };
        for (name, value, baseline) in [
            ("write latency 8 B, beside UCX put", write, put),
            ("write latency 8 B, lean loop, beside UCX put", lean, put),
            ("write latency 8 B, lean loop, every completion taken", completed, put),
            ("UCX put latency 8 B over this device", ucx_put, put),
            ("send latency 8 B, beside UCX tag", send, tag),
            ("UCX tag latency 8 B over this device", ucx_tag, tag),
        ] {
            self.table.push(Figure::against(name, *value, "µs", *baseline));
        }
        self.table.push(Figure::alone("read latency 8 B", *read, "µs"));
        self.table.push(Figure::alone("fetch-and-add latency 8 B", *atomic, "µs"));
        let baseline = put_rate / 1e6;
        let names = [
            "write rate 8 B inline",
            "write rate 8 B inline, 64 a list",
            "write rate 8 B inline, lean loop",
            "write rate 8 B inline, lean loop, 64 a list",
            "send rate 8 B inline",
            "send rate 8 B inline, lean loop",
            "send rate 8 B inline, lean loop, 64 a list",
            "UCX put rate 8 B over this device",
        ];
        for (index, (name, value)) in names.iter().zip(rates).enumerate() {
            // UCX counts messages, the others millions of them.
            let value = if index + 1 == names.len() { value / 1e6 } else { *value };
            self.table.push(Figure::against(*name, value, "M/s", baseline));
        }
        Ok(())
    }
}
