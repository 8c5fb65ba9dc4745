//! `millstream bench verbs`: the soft device between two processes of one host.

pub mod raw_verbs;

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use crate::memcpy::{Pages, memcpy, memcpy_beside_poller, two_thread_memcpy};
use crate::tools::{ToolError, ToolPair};
use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "verbs",
    title: "Soft device on one host",
    measures: "Bandwidth, latency and message rate of WRITE, READ, SEND and atomics between two processes. The programs are \
               perftest, UCX over the soft device, and a raw verbs program that only posts and polls. Some figures name \
               their own baseline after `vs`. Figures on unmappable memory use the kernel's copy (`process_vm_writev`, \
               `process_vm_readv`).",
    baseline: "memcpy of the same size and kind of memory for bandwidth; UCX over its own shared memory for latency and \
               rate. Some rows of SEND have a two-thread memcpy with a flag for each message.",
    values: "medians over the rounds; a latency is the mean of a run: half a round trip, of READ and FETCH_ADD a whole \
             one",
    command: "make bench-verbs",
};

/// The benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// A tool failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The baseline could not be measured.
    #[error("cannot allocate the buffers of the memcpy baseline: {0}")]
    Memory(#[from] std::io::Error),
}

/// perftest and UCX print MiB as `MB`.
const MIB: f64 = 1024.0 * 1024.0;

const SIZES: [(usize, &str); 4] =
    [(4096, "4 KiB"), (65536, "64 KiB"), (1 << 20, "1 MiB"), (8 << 20, "8 MiB")];
const BANDWIDTH: [(&str, &str); 3] =
    [("ib_write_bw", "WRITE"), ("ib_read_bw", "READ"), ("ib_send_bw", "SEND")];
/// Tests of UCX over its own shared memory.
const UCX_BANDWIDTH: [(&str, &str); 3] =
    [("ucp_put_bw", "UCX put"), ("ucp_am_bw", "UCX active message"), ("tag_bw", "UCX tag message")];
const BASELINE_TIME: Duration = Duration::from_millis(200);

/// Columns of the tools' result rows.
mod column {
    /// perftest's bandwidth programs: average [MiB/s], message rate [M/s].
    pub(super) const BANDWIDTH: usize = 3;
    pub(super) const RATE: usize = 4;
    /// perftest's latency programs: mean (µs). The median has a resolution of 0.01 µs only, and the others print means.
    pub(super) const LATENCY: usize = 5;
    /// ucx_perftest: overall latency (µs), bandwidth [MiB/s], message rate [1/s].
    pub(super) const UCX_LATENCY: usize = 3;
    pub(super) const UCX_BANDWIDTH: usize = 5;
    pub(super) const UCX_RATE: usize = 7;
    /// The raw verbs program: bandwidth (GB/s), request rate [M/s], time per request (µs).
    pub(super) const RAW_BANDWIDTH: usize = 2;
    pub(super) const RAW_RATE: usize = 3;
    pub(super) const RAW_LATENCY: usize = 4;
}

/// A run of the benchmark.
struct VerbsBench<'a> {
    /// The path of `millstream`, which is also the raw verbs program.
    program: &'a Path,
    library_dir: &'a Path,
    rounds: usize,
    table: Table,
}

/// Measures all figures in `rounds` interleaved rounds; `program` is the path of `millstream`.
///
/// # Errors
/// [`VerbsError`] if a tool fails or a baseline cannot be measured.
pub fn run(program: &Path, library_dir: &Path, rounds: usize) -> Result<Table, VerbsError> {
    let mut bench = VerbsBench { program, library_dir, rounds, table: Table::new(BENCHMARK, rounds) };
    for (size, name) in SIZES {
        bench.bandwidth(size, name)?;
    }
    for (size, name) in SIZES {
        bench.raw_bandwidth(size, name)?;
    }
    for (size, name) in &SIZES[..3] {
        bench.unmappable_bandwidth(*size, name)?;
    }
    bench.latency_and_rate()?;
    Ok(bench.table)
}

impl VerbsBench<'_> {
    /// Medians of a baseline and of one column of each tool's first row, measured in turn.
    fn medians(
        &self,
        baseline: impl Fn() -> std::io::Result<f64>,
        pairs: &[(ToolPair, usize)],
    ) -> Result<(f64, Vec<f64>), VerbsError> {
        let mut baselines = Vec::new();
        let mut values = vec![Vec::new(); pairs.len()];
        for _ in 0..self.rounds {
            baselines.push(baseline()?);
            for ((pair, column), values) in pairs.iter().zip(&mut values) {
                values.push(pair.value(*column)?);
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
            (ToolPair::perftest(tool, &arguments, Some(library_dir)), column::BANDWIDTH)
        }));
        pairs.push((ToolPair::ucx_verbs(&ucx("ucp_put_bw"), library_dir), column::UCX_BANDWIDTH));
        for (test, _) in UCX_BANDWIDTH {
            pairs.push((ToolPair::ucx_shared_memory(&ucx(test)), column::UCX_BANDWIDTH));
        }
        let copy = || memcpy(Pages::Base, size, size, size, BASELINE_TIME);
        let (baseline, values) = self.medians(copy, &pairs)?;
        let names = BANDWIDTH.iter().map(|(_, operation)| format!("{operation} {name}, perftest"));
        let names = names.chain([format!("UCX put {name} over the soft device")]);
        let names =
            names.chain(UCX_BANDWIDTH.map(|(_, test)| format!("{test} {name} over UCX shared memory")));
        for (name, value) in names.zip(&values) {
            self.table.push(Figure::with_baseline(name, value * MIB / 1e9, "GB/s", baseline));
        }
        Ok(())
    }

    fn raw_verbs(&self, arguments: &[&str], column: usize) -> (ToolPair, usize) {
        (ToolPair::raw_verbs(self.program, arguments, self.library_dir), column)
    }

    /// Bandwidth of the raw verbs program, whose buffers have huge pages.
    fn raw_bandwidth(&mut self, size: usize, name: &str) -> Result<(), VerbsError> {
        let size_text = size.to_string();
        let loops = [
            &["write"][..],
            &["read"],
            &["send"],
            &["write", "--post-list", "64"],
            &["read", "--post-list", "64"],
            &["send", "--post-list", "64"],
        ];
        let pairs = loops
            .map(|what| self.raw_verbs(&[what, &["--size", &size_text]].concat(), column::RAW_BANDWIDTH));
        let [beside_poller, two_threads] = [(); 2].map(|()| RefCell::new(Vec::new()));
        let copy = || {
            let speed = memcpy_beside_poller(Pages::Huge, size, BASELINE_TIME)?;
            beside_poller.borrow_mut().push(speed);
            two_threads.borrow_mut().push(two_thread_memcpy(Pages::Huge, size, BASELINE_TIME)?);
            memcpy(Pages::Huge, size, size, size, BASELINE_TIME)
        };
        let (baseline, values) = self.medians(copy, &pairs)?;
        let names = [
            "WRITE {}, raw verbs",
            "READ {}, raw verbs",
            "SEND {}, raw verbs",
            "WRITE {}, raw verbs, post list 64",
            "READ {}, raw verbs, post list 64",
            "SEND {}, raw verbs, post list 64",
        ];
        for (what, value) in names.iter().zip(&values) {
            self.table.push(Figure::with_baseline(what.replace("{}", name), *value, "GB/s", baseline));
        }
        // A polling receiver alone may slow a copy down; a SEND also hands a flag per message to the receiver.
        let bounds = [
            (beside_poller, "memcpy", "beside a polling thread"),
            (two_threads, "two-thread memcpy", "with a flag per message"),
        ];
        for (bound, copy, how) in bounds {
            let bound = median(&bound.borrow()).unwrap_or(0.0);
            self.table.push(Figure::with_baseline(format!("{copy} {name} {how}"), bound, "GB/s", baseline));
            let name = format!("SEND {name}, raw verbs, vs {copy} {how}");
            self.table.push(Figure::with_baseline(name, values[2], "GB/s", bound));
        }
        Ok(())
    }

    /// Memory that the peer cannot map, so that the kernel copies: against the bare system call between two processes.
    fn unmappable_bandwidth(&mut self, size: usize, name: &str) -> Result<(), VerbsError> {
        let size_text = size.to_string();
        let iterations = ((1usize << 30) / size).clamp(500, 20_000).to_string();
        let arguments = ["-s", &size_text, "-n", &iterations];
        let mut write = ToolPair::perftest("ib_write_bw", &arguments, Some(self.library_dir));
        let mut read = self.raw_verbs(&["read", "--private", "--size", &size_text], column::RAW_BANDWIDTH).0;
        for pair in [&mut write, &mut read] {
            pair.environment.push(("MILLSTREAM_MOVE", "0".to_owned()));
        }
        let pairs = [
            (write, column::BANDWIDTH),
            (read, column::RAW_BANDWIDTH),
            self.raw_verbs(&["system-write", "--size", &size_text], column::RAW_BANDWIDTH),
            self.raw_verbs(&["system-read", "--size", &size_text], column::RAW_BANDWIDTH),
        ];
        let (_, values) = self.medians(|| Ok(0.0), &pairs)?;
        for (operation, how, value, baseline) in [
            ("WRITE", "perftest, vs process_vm_writev", values[0] * MIB / 1e9, values[2]),
            ("READ", "raw verbs, vs process_vm_readv", values[1], values[3]),
        ] {
            let name = format!("{operation} {name}, unmappable memory, {how}");
            self.table.push(Figure::with_baseline(name, value, "GB/s", baseline));
        }
        Ok(())
    }

    /// Latency and message rate of 8 bytes.
    fn latency_and_rate(&mut self) -> Result<(), VerbsError> {
        let library_dir = self.library_dir;
        let latency = |tool, more: &[&str]| {
            let arguments = [&["-n", "100000"], more].concat();
            (ToolPair::perftest(tool, &arguments, Some(library_dir)), column::LATENCY)
        };
        let rate = |tool, more: &[&str]| {
            let arguments = [&["-s", "8", "-I", "8", "-n", "2000000"], more].concat();
            (ToolPair::perftest(tool, &arguments, Some(library_dir)), column::RATE)
        };
        let raw_rate = |more: &[&str]| self.raw_verbs(&[more, &["--inline"]].concat(), column::RAW_RATE);
        let put = ["-t", "ucp_put_lat", "-s", "8", "-n", "500000", "-f"];
        let tag = ["-t", "tag_lat", "-s", "8", "-n", "500000", "-f"];
        let put_rate = ["-t", "ucp_put_bw", "-s", "8", "-n", "5000000", "-f"];
        let pairs = [
            (ToolPair::ucx_shared_memory(&put), column::UCX_LATENCY),
            (ToolPair::ucx_shared_memory(&tag), column::UCX_LATENCY),
            (ToolPair::ucx_shared_memory(&put_rate), column::UCX_RATE),
            latency("ib_write_lat", &["-s", "8"]),
            self.raw_verbs(&["latency"], column::RAW_LATENCY),
            self.raw_verbs(&["latency-completed"], column::RAW_LATENCY),
            latency("ib_read_lat", &["-s", "8"]),
            latency("ib_send_lat", &["-s", "8"]),
            latency("ib_atomic_lat", &[]),
            (ToolPair::ucx_verbs(&put, library_dir), column::UCX_LATENCY),
            (ToolPair::ucx_verbs(&tag, library_dir), column::UCX_LATENCY),
            rate("ib_write_bw", &[]),
            rate("ib_write_bw", &["--post_list", "64"]),
            raw_rate(&["write"]),
            raw_rate(&["write", "--post-list", "64"]),
            rate("ib_send_bw", &[]),
            raw_rate(&["send"]),
            raw_rate(&["send", "--post-list", "64"]),
            (ToolPair::ucx_verbs(&put_rate, library_dir), column::UCX_RATE),
        ];
        let (_, values) = self.medians(|| Ok(0.0), &pairs)?;
        let [put, tag, put_rate, write, raw, completed, read, send, atomic, ucx_put, ucx_tag, rates @ ..] =
            &values[..]
        else {
            unreachable!("there is one value per tool");
        };
        for (name, value, baseline) in [
            ("WRITE latency 8 B, perftest, vs UCX put", write, put),
            ("WRITE latency 8 B, raw verbs, vs UCX put", raw, put),
            ("WRITE latency 8 B, raw verbs, each completion polled, vs UCX put", completed, put),
            ("UCX put latency 8 B over the soft device", ucx_put, put),
            ("SEND latency 8 B, perftest, vs UCX tag message", send, tag),
            ("UCX tag message latency 8 B over the soft device", ucx_tag, tag),
        ] {
            self.table.push(Figure::with_baseline(name, *value, "µs", *baseline));
        }
        self.table.push(Figure::without_baseline("READ latency 8 B, perftest", *read, "µs"));
        self.table.push(Figure::without_baseline("FETCH_ADD latency 8 B, perftest", *atomic, "µs"));
        let baseline = put_rate / 1e6;
        let names = [
            "WRITE rate 8 B inline, perftest",
            "WRITE rate 8 B inline, perftest, post list 64",
            "WRITE rate 8 B inline, raw verbs",
            "WRITE rate 8 B inline, raw verbs, post list 64",
            "SEND rate 8 B inline, perftest",
            "SEND rate 8 B inline, raw verbs",
            "SEND rate 8 B inline, raw verbs, post list 64",
            "UCX put rate 8 B over the soft device",
        ];
        for (index, (name, value)) in names.iter().zip(rates).enumerate() {
            // UCX prints messages per second, the others millions of them.
            let value = if index + 1 == names.len() { value / 1e6 } else { *value };
            self.table.push(Figure::with_baseline(*name, value, "M/s", baseline));
        }
        Ok(())
    }
}
