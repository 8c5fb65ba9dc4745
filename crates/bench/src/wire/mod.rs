//! `millstream bench wire`: the soft device between hosts, against raw UDP packets and other transports.
//!
//! Two network namespaces on one machine act as two hosts, joined by a veth pair. A veth pair passes
//! segmentation-offload buffers whole to the receiver, unless a component on the path needs single packets.
//! The figure without segmentation offload shows the difference.

mod netns;
pub mod raw_udp;

use std::io;
use std::path::{Path, PathBuf};

pub use netns::{ADDRESSES, NamespacePair, RunOutput};

use crate::tools::rows;
use crate::{Benchmark, Figure, NameFilter, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "wire",
    title: "Soft device between two hosts",
    measures: "Bandwidth of 1 MiB messages and latency of 8 bytes over RoCE v2 packets between two network namespaces, which \
               are joined by a veth pair. The programs are perftest over the soft device, iperf3, UCX over TCP and \
               libfabric over TCP. Further figures have packet loss, 64 queue pairs, and the CPU time per GB of both sides.",
    baseline: "raw UDP packets of the same payload over the same link, without ICRC",
    values: "medians over the rounds. A latency is the median of a run, of libfabric its mean: half a round trip, of READ a \
             whole one, which is compared with a whole one of raw UDP. The CPU time is the difference between runs of 3000 and \
             of 600 messages, without perftest's measurement of the clock",
    command: "make bench-wire",
};

const MIB: f64 = (1u64 << 20) as f64;
const SIZE: usize = 1 << 20;
/// Messages of a bandwidth test without packet loss.
const MESSAGES: usize = 3000;
/// Messages of a second run of the test. The difference in CPU time is that of the messages between: each run of perftest also
/// measures the clock, which takes a fifth of a second, and sets up a connection.
const FEWER_MESSAGES: usize = 600;
/// TCP port of all servers; the namespaces are new, so that it is free.
const PORT: u16 = 18_515;
/// Attempts before a figure counts as failed: connections are set up over TCP, on a busy machine.
const ATTEMPTS: usize = 2;

/// Options of the benchmark.
#[derive(Clone, Debug)]
pub struct Options {
    /// The path of `millstream`, which runs both sides of the raw UDP link.
    pub program: PathBuf,
    /// The folder of the soft device's libraries.
    pub library_dir: PathBuf,
    /// Interleaved rounds.
    pub rounds: usize,
    /// MTUs of the veth pair (bytes).
    pub mtus: Vec<u32>,
    /// Words that select figures by name; baselines are measured in any case. All figures if there are none.
    pub only: Vec<String>,
}

/// How to find the result in a tool's output.
enum Reader {
    /// From the whole text.
    Text(fn(&str) -> Option<f64>),
    /// From the words of the last line that has a result.
    LastLine(fn(&[&str]) -> Option<f64>),
}

impl Reader {
    fn read(&self, text: &str) -> Option<f64> {
        match self {
            Self::Text(read) => read(text),
            Self::LastLine(column) => {
                text.lines().rev().find_map(|line| column(&line.split_whitespace().collect::<Vec<_>>()))
            }
        }
    }
}

/// A tool with its command lines in both namespaces, and how to read its result.
struct Tool {
    name: String,
    server: String,
    client: String,
    port: Option<u16>,
    environment: Vec<(&'static str, String)>,
    read: Reader,
    /// Whether the CPU time per byte is a figure too: its command lines have [`MESSAGES`].
    has_cpu_time: bool,
    /// Factor of the baseline: 2 if the tool measures whole round trips.
    round_trips: f64,
}

/// The results of a tool, one a round.
#[derive(Default)]
struct Measured {
    values: Vec<f64>,
    cpu_seconds: [Vec<f64>; 2],
    /// Why it was not run in further rounds.
    error: Option<io::Error>,
}

/// Measures all selected figures in turn with their baselines. The table names the tools that failed.
///
/// # Errors
/// The error of creating the namespaces.
pub fn run(options: &Options) -> io::Result<Table> {
    let mut table = Table::new(BENCHMARK, options.rounds);
    for &mtu in &options.mtus {
        let hosts = NamespacePair::new(mtu)?;
        let payload = if mtu >= 4096 + 64 { 4096 } else { 1024 };
        let groups = [
            ("GB/s", bandwidths(options, payload)),
            ("GB/s", with_loss_and_many_queue_pairs(options, payload)),
            ("µs", latencies(options)),
        ];
        for (unit, mut tools) in groups {
            options.select(&mut tools);
            let measured = measure(&hosts, &tools, options.rounds);
            add_figures(&mut table, mtu, unit, &tools, &measured);
        }
    }
    Ok(table)
}

impl Options {
    /// Keeps the selected tools, and the group's first tool, the baseline, if any is selected.
    fn select(&self, tools: &mut Vec<Tool>) {
        let wanted = |tool: &Tool| NameFilter(&self.only).selects(&tool.name);
        if !tools.iter().any(wanted) {
            tools.clear();
        }
        let mut index = 0..;
        tools.retain(|tool| index.next() == Some(0) || wanted(tool));
    }
}

/// Raw UDP is the first of each group: the baseline of the others.
fn bandwidths(options: &Options, payload: usize) -> Vec<Tool> {
    let perftest = |program| Tool {
        has_cpu_time: true,
        ..perftest(&options.library_dir, program, &format!("-s {SIZE} -n {MESSAGES}"), bandwidth)
    };
    vec![
        raw_udp(&options.program, "bandwidth", payload, "--segmentation-offload"),
        raw_udp(&options.program, "bandwidth", payload, "--segmentation-offload --icrc"),
        raw_udp(&options.program, "bandwidth", payload, ""),
        perftest("ib_write_bw"),
        perftest("ib_read_bw"),
        perftest("ib_send_bw"),
        Tool {
            name: "iperf3, TCP".into(),
            server: format!("iperf3 -s -1 -p {PORT}"),
            client: format!("iperf3 -J -t 1 -p {PORT} -c {}", ADDRESSES[0]),
            port: Some(PORT),
            environment: Vec::new(),
            read: Reader::Text(|text| {
                let end = text.find("\"sum_received\"")?;
                let rate = text[end..].split("\"bits_per_second\":").nth(1)?;
                rate.split([',', '\n', '}']).next()?.trim().parse::<f64>().ok().map(|bits| bits / 8e9)
            }),
            has_cpu_time: false,
            round_trips: 1.0,
        },
        ucx("ucp_put_bw", &format!("-s {SIZE} -n 1000 -w 50"), |text| {
            rows(text).last()?.0.get(4).map(|rate| rate * MIB / 1e9)
        }),
        // libfabric has a ping-pong test only, no streaming test.
        libfabric("libfabric tcp, 1 MiB ping-pong", SIZE, 500, |words| {
            words.get(5)?.parse::<f64>().ok().map(|rate| rate / 1e3)
        }),
    ]
}

/// Packet loss, and many queue pairs.
fn with_loss_and_many_queue_pairs(options: &Options, payload: usize) -> Vec<Tool> {
    let mut tools = vec![raw_udp(&options.program, "bandwidth", payload, "--segmentation-offload")];
    let losses = [("ib_write_bw", "0.001"), ("ib_write_bw", "0.01"), ("ib_write_bw", "0.05")];
    for (program, loss) in losses.into_iter().chain([("ib_read_bw", "0.01"), ("ib_send_bw", "0.01")]) {
        let mut tool = perftest(&options.library_dir, program, &format!("-s {SIZE} -n 300"), bandwidth);
        let percent = loss.parse::<f64>().unwrap_or(0.0) * 100.0;
        tool.name.push_str(&format!(", {percent} % packet loss per direction"));
        tool.environment.push(("MILLSTREAM_LINK", format!("drop={loss}")));
        tools.push(tool);
    }
    // The buffers of 64 queue pairs fit a processor's cache with messages of 64 KiB, but not with those of 1 MiB.
    for (program, arguments, what) in [
        ("ib_write_bw", format!("-s {SIZE} -n 50 -q 64"), " over 64 queue pairs"),
        ("ib_write_bw", "-s 65536 -n 20000".to_owned(), ", 64 KiB"),
        ("ib_send_bw", "-s 65536 -n 20000".to_owned(), ", 64 KiB"),
        ("ib_write_bw", "-s 65536 -n 500 -q 64".to_owned(), ", 64 KiB over 64 queue pairs"),
    ] {
        let mut tool = perftest(&options.library_dir, program, &arguments, bandwidth);
        tool.name.push_str(what);
        tools.push(tool);
    }
    tools
}

fn latencies(options: &Options) -> Vec<Tool> {
    let perftest = |program| {
        perftest(&options.library_dir, program, "-s 8 -n 20000", |text| rows(text).last()?.0.get(4).copied())
    };
    // A READ takes a whole round trip; the others report half of one.
    let read = || Tool { round_trips: 2.0, ..perftest("ib_read_lat") };
    let mut sleeping = read();
    sleeping.name.push_str(", sleeping responder");
    sleeping.environment.push(("MILLSTREAM_SPIN", "0".to_owned()));
    vec![
        raw_udp(&options.program, "latency", 64, ""),
        perftest("ib_write_lat"),
        perftest("ib_send_lat"),
        read(),
        sleeping,
        ucx("ucp_put_lat", "-s 8 -n 20000", |text| rows(text).last()?.0.get(1).copied()),
        libfabric("libfabric tcp, fi_pingpong", 8, 20_000, |words| words.get(6)?.parse().ok()),
    ]
}

/// Adds the figures of a group, with its first tool as the baseline.
fn add_figures(table: &mut Table, mtu: u32, unit: &str, tools: &[Tool], measured: &[Measured]) {
    let baseline = measured.first().and_then(|first| median(&first.values));
    let mut times = Vec::new();
    for (i, (tool, measured)) in tools.iter().zip(measured).enumerate() {
        let name = format!("MTU {mtu}: {}", tool.name);
        if let Some(error) = &measured.error {
            let values = measured.values.len();
            let kept =
                if values == 0 { String::new() } else { format!("median of {values} of the rounds, then ") };
            table.not_measured(&name, &format!("{kept}{error}"));
        }
        let Some(value) = median(&measured.values) else { continue };
        table.push(match baseline {
            Some(baseline) if i != 0 => Figure::with_baseline(name, value, unit, tool.round_trips * baseline),
            _ => Figure::without_baseline(name, value, unit),
        });
        // With veth the sender's system calls carry packets up to the receiver's socket.
        if !tool.has_cpu_time {
            continue;
        }
        let bytes = (MESSAGES - FEWER_MESSAGES) * SIZE;
        for (side, each) in ["server", "client"].iter().zip(&measured.cpu_seconds) {
            let Some(time) = median(each) else { continue };
            let name = format!("MTU {mtu}: {}, CPU time of the {side}", tool.name);
            times.push(Figure::without_baseline(name, time / (bytes as f64 / 1e9), "s/GB"));
        }
    }
    times.into_iter().for_each(|figure| table.push(figure));
}

/// Runs each tool once a round. A tool that fails is not run again.
fn measure(hosts: &NamespacePair, tools: &[Tool], rounds: usize) -> Vec<Measured> {
    let mut measured: Vec<Measured> = tools.iter().map(|_| Measured::default()).collect();
    for _ in 0..rounds {
        for (tool, measured) in tools.iter().zip(&mut measured) {
            if measured.error.is_some() {
                continue;
            }
            let mut outcome = tool.run(hosts);
            for _ in 1..ATTEMPTS {
                outcome = outcome.or_else(|_| tool.run(hosts));
            }
            match outcome {
                Ok((value, cpu_seconds)) => {
                    eprintln!("{}: {value:.3}", tool.name);
                    measured.values.push(value);
                    for (times, time) in measured.cpu_seconds.iter_mut().zip(cpu_seconds) {
                        times.push(time);
                    }
                }
                Err(error) => {
                    eprintln!("{}: {error}", tool.name);
                    measured.error = Some(error);
                }
            }
        }
    }
    measured
}

impl Tool {
    /// Its result, and the CPU time of server and client for the messages that a shorter run does not have.
    fn run(&self, hosts: &NamespacePair) -> io::Result<(f64, [f64; 2])> {
        let output = hosts.run([&self.server, &self.client], self.port, &self.environment)?;
        let value = self.read.read(&output.client_output).ok_or_else(|| {
            io::Error::other(format!("{} printed no result:\n{}", self.client, output.client_output))
        })?;
        if !self.has_cpu_time {
            return Ok((value, output.cpu_seconds));
        }
        let [messages, fewer] = [MESSAGES, FEWER_MESSAGES].map(|count| format!("-n {count}"));
        let shorter = [&self.server, &self.client].map(|line| line.replace(&messages, &fewer));
        let shorter = hosts.run([&shorter[0], &shorter[1]], self.port, &self.environment)?;
        Ok((value, [0, 1].map(|side| output.cpu_seconds[side] - shorter.cpu_seconds[side])))
    }
}

fn raw_udp(program: &Path, test: &str, payload: usize, flags: &str) -> Tool {
    let program = program.display();
    let words = |words: String| words.split_whitespace().collect::<Vec<_>>().join(" ");
    let [server, client] = ADDRESSES;
    let name = match flags {
        "--segmentation-offload" => "raw UDP",
        "" if test == "latency" => "raw UDP, polling",
        "" => "raw UDP without segmentation offload",
        _ => "raw UDP with ICRC",
    };
    Tool {
        name: name.into(),
        server: words(format!("{program} bench raw-udp serve --payload {payload} {flags}")),
        client: words(format!(
            "{program} bench raw-udp {test} --payload {payload} {flags} --from {client} --to {server}"
        )),
        port: None,
        environment: Vec::new(),
        read: Reader::Text(|text| text.lines().find_map(|line| line.strip_prefix("result ")?.parse().ok())),
        has_cpu_time: false,
        round_trips: 1.0,
    }
}

fn bandwidth(text: &str) -> Option<f64> {
    rows(text).last()?.0.get(3).map(|rate| rate * MIB / 1e9)
}

fn perftest(library_dir: &Path, program: &str, arguments: &str, read: fn(&str) -> Option<f64>) -> Tool {
    Tool {
        name: program.to_owned(),
        server: format!("{program} -F {arguments} -p {PORT}"),
        client: format!("{program} -F {arguments} -p {PORT} {}", ADDRESSES[0]),
        port: Some(PORT),
        environment: vec![("LD_LIBRARY_PATH", library_dir.display().to_string())],
        read: Reader::Text(read),
        has_cpu_time: false,
        round_trips: 1.0,
    }
}

fn ucx(test: &str, arguments: &str, read: fn(&str) -> Option<f64>) -> Tool {
    let name = if test.ends_with("lat") { "UCX tcp, put" } else { "UCX tcp, put_bw" };
    Tool {
        name: name.into(),
        server: format!("ucx_perftest -p {PORT}"),
        client: format!("ucx_perftest -t {test} {arguments} -f -p {PORT} {}", ADDRESSES[0]),
        port: Some(PORT),
        environment: vec![("UCX_TLS", "tcp,self".into()), ("UCX_NET_DEVICES", "wire0".into())],
        read: Reader::Text(read),
        has_cpu_time: false,
        round_trips: 1.0,
    }
}

/// `column` reads one of: bytes, sent, acknowledged, total, time, MB/s, µs per transfer, million transfers per second.
fn libfabric(name: &str, size: usize, times: usize, column: fn(&[&str]) -> Option<f64>) -> Tool {
    let arguments = format!("-p tcp -e msg -S {size} -I {times}");
    Tool {
        name: name.into(),
        server: format!("fi_pingpong {arguments} -B {PORT}"),
        client: format!("fi_pingpong {arguments} -P {PORT} {}", ADDRESSES[0]),
        port: Some(PORT),
        environment: Vec::new(),
        read: Reader::LastLine(column),
        has_cpu_time: false,
        round_trips: 1.0,
    }
}
