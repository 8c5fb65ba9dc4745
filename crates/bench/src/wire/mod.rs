//! The device between hosts, beside bare packets and other transports on the same cable.
//!
//! Two network namespaces on one machine stand for two hosts, with a cable (veth) between them. The cable passes buffers of
//! many packets whole from one kernel's segmentation offload to the other's receive offload, as long as nothing on the
//! way must see single packets; a figure without offload is in the table for that reason.

mod netns;
pub mod raw_udp;

use std::io;
use std::path::{Path, PathBuf};

pub use netns::{ADDRESSES, Hosts, Ran};

use crate::tools::rows;
use crate::{Figure, Only, Table, median};

const MIB: f64 = (1u64 << 20) as f64;
const SIZE: usize = 1 << 20;
/// Messages of a bandwidth test without faults, for which processor time is told as well.
const MESSAGES: usize = 3000;
/// TCP port of whatever listens; the namespaces are new.
const PORT: u16 = 18_515;
/// How often a tool is run before its row counts as failed: connections are set up over TCP, on a busy machine.
const TRIES: usize = 2;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// This program, which plays both sides of the bare link.
    pub program: PathBuf,
    /// Where the device's libraries are.
    pub library_dir: PathBuf,
    /// Interleaved rounds.
    pub rounds: usize,
    /// MTUs of the cable.
    pub mtus: Vec<u32>,
    /// Only rows with one of these words in their names, and what they are held against; all if there are none.
    pub only: Vec<String>,
}

/// Where a result is in what a tool prints.
enum Reader {
    /// Anywhere.
    Text(fn(&str) -> Option<f64>),
    /// In the words of the last line that has a result.
    Words(fn(&[&str]) -> Option<f64>),
}

impl Reader {
    fn read(&self, text: &str) -> Option<f64> {
        match self {
            Self::Text(read) => read(text),
            Self::Words(column) => {
                text.lines().rev().find_map(|line| column(&line.split_whitespace().collect::<Vec<_>>()))
            }
        }
    }
}

/// A tool on both hosts, and how to read its result.
struct Tool {
    name: String,
    server: String,
    client: String,
    port: Option<u16>,
    environment: Vec<(&'static str, String)>,
    read: Reader,
    /// Bytes that it carries, if its processor time is to be told.
    carries: Option<usize>,
}

/// What a tool measured in each round.
#[derive(Default)]
struct Measured {
    values: Vec<f64>,
    processor: [Vec<f64>; 2],
}

/// Measures; every table row's baseline was taken in turns with it. Rows that could not be measured are not in the
/// table but in the list, with the reason.
///
/// # Errors
/// What setting up namespaces reports.
pub fn run(options: &Options) -> io::Result<(Table, Vec<String>)> {
    let title = "between two network namespaces, 1 MiB messages and 8 bytes (medians, interleaved; baseline: bare UDP \
                 packets of the same payload by this link, without ICRC)";
    let mut table = Table::new(title, "bare UDP");
    let mut failed = Vec::new();
    for &mtu in &options.mtus {
        let hosts = Hosts::new(mtu)?;
        let payload = if mtu >= 4096 + 64 { 4096 } else { 1024 };
        let groups = [
            ("GB/s", bandwidths(options, payload)),
            ("GB/s", under_difficulties(options, payload)),
            ("µs", latencies(options)),
        ];
        for (unit, mut tools) in groups {
            options.choose(&mut tools);
            let measured = measure(&hosts, &tools, options.rounds, &mut failed);
            enter(&mut table, mtu, unit, &tools, &measured);
        }
    }
    Ok((table, failed))
}

impl Options {
    /// Leaves the tools that are asked for, and the group's first if there are any.
    fn choose(&self, tools: &mut Vec<Tool>) {
        let wanted = |tool: &Tool| Only(&self.only).wants(&tool.name);
        if !tools.iter().any(wanted) {
            tools.clear();
        }
        let mut place = 0..;
        tools.retain(|tool| place.next() == Some(0) || wanted(tool));
    }
}

/// Bare packets are the first of each group: what the others are held against.
fn bandwidths(options: &Options, payload: usize) -> Vec<Tool> {
    let perftest = |program| Tool {
        carries: Some(MESSAGES * SIZE),
        ..perftest(&options.library_dir, program, &format!("-s {SIZE} -n {MESSAGES}"), bandwidth)
    };
    vec![
        bare(&options.program, "bandwidth", payload, "--offload"),
        bare(&options.program, "bandwidth", payload, "--offload --seal"),
        bare(&options.program, "bandwidth", payload, ""),
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
            carries: None,
        },
        ucx("ucp_put_bw", &format!("-s {SIZE} -n 1000 -w 50"), |text| {
            rows(text).last()?.0.get(4).map(|rate| rate * MIB / 1e9)
        }),
        // It has no test that streams: one message goes, then one comes.
        libfabric("libfabric tcp, 1 MiB there and back", SIZE, 500, |words| {
            words.get(5)?.parse::<f64>().ok().map(|rate| rate / 1e3)
        }),
    ]
}

/// Lost packets, and many connections.
fn under_difficulties(options: &Options, payload: usize) -> Vec<Tool> {
    let mut tools = vec![bare(&options.program, "bandwidth", payload, "--offload")];
    let losses = [("ib_write_bw", "0.001"), ("ib_write_bw", "0.01"), ("ib_write_bw", "0.05")];
    for (program, loss) in losses.into_iter().chain([("ib_read_bw", "0.01"), ("ib_send_bw", "0.01")]) {
        let mut tool = perftest(&options.library_dir, program, &format!("-s {SIZE} -n 300"), bandwidth);
        let percent = loss.parse::<f64>().unwrap_or(0.0) * 100.0;
        tool.name.push_str(&format!(", each side drops {percent} % of its packets"));
        tool.environment.push(("MILLSTREAM_LINK", format!("drop={loss}")));
        tools.push(tool);
    }
    let mut many =
        perftest(&options.library_dir, "ib_write_bw", &format!("-s {SIZE} -n 50 -q 64"), bandwidth);
    many.name.push_str(" over 64 queue pairs");
    tools.push(many);
    tools
}

fn latencies(options: &Options) -> Vec<Tool> {
    let perftest = |program| {
        perftest(&options.library_dir, program, "-s 8 -n 20000", |text| rows(text).last()?.0.get(4).copied())
    };
    vec![
        bare(&options.program, "latency", 64, ""),
        perftest("ib_write_lat"),
        perftest("ib_send_lat"),
        // There and back: the others are half a round trip.
        perftest("ib_read_lat"),
        ucx("ucp_put_lat", "-s 8 -n 20000", |text| rows(text).last()?.0.get(2).copied()),
        libfabric("libfabric tcp, fi_pingpong", 8, 20_000, |words| words.get(6)?.parse().ok()),
    ]
}

/// Enters what tools measured beside what the first of them did.
fn enter(table: &mut Table, mtu: u32, unit: &str, tools: &[Tool], measured: &[Measured]) {
    let baseline = measured.first().and_then(|first| median(&first.values));
    let mut times = Vec::new();
    for (i, (tool, measured)) in tools.iter().zip(measured).enumerate() {
        let name = format!("MTU {mtu}: {}", tool.name);
        let Some(value) = median(&measured.values) else { continue };
        table.push(match baseline {
            Some(baseline) if i != 0 => Figure::against(name, value, unit, baseline),
            _ => Figure::alone(name, value, unit),
        });
        // The sender's system calls carry packets up to the receiver's socket: that is how veth works.
        let Some(bytes) = tool.carries else { continue };
        for (side, each) in ["server", "client"].iter().zip(&measured.processor) {
            let Some(time) = median(each) else { continue };
            let name = format!("MTU {mtu}: {}, processor time of the {side}", tool.name);
            times.push(Figure::alone(name, time / (bytes as f64 / 1e9), "s/GB"));
        }
    }
    times.into_iter().for_each(|figure| table.push(figure));
}

/// Runs each tool once in every round. One that failed is not run again, and named.
fn measure(hosts: &Hosts, tools: &[Tool], rounds: usize, failed: &mut Vec<String>) -> Vec<Measured> {
    let mut measured: Vec<Measured> = tools.iter().map(|_| Measured::default()).collect();
    let mut broken = vec![false; tools.len()];
    for _ in 0..rounds {
        for ((tool, measured), broken) in tools.iter().zip(&mut measured).zip(&mut broken) {
            if *broken {
                continue;
            }
            let mut outcome = tool.run(hosts);
            for _ in 1..TRIES {
                outcome = outcome.or_else(|_| tool.run(hosts));
            }
            match outcome {
                Ok((value, processor)) => {
                    eprintln!("{}: {value:.3}", tool.name);
                    measured.values.push(value);
                    for (times, time) in measured.processor.iter_mut().zip(processor) {
                        times.push(time);
                    }
                }
                Err(error) => {
                    *broken = true;
                    failed.push(format!("{}: {error}", tool.name));
                }
            }
        }
    }
    measured
}

impl Tool {
    fn run(&self, hosts: &Hosts) -> io::Result<(f64, [f64; 2])> {
        let ran = hosts.run([&self.server, &self.client], self.port, &self.environment)?;
        let value = self
            .read
            .read(&ran.output)
            .ok_or_else(|| io::Error::other(format!("{} printed no result:\n{}", self.client, ran.output)))?;
        Ok((value, ran.processor))
    }
}

fn bare(program: &Path, what: &str, payload: usize, manner: &str) -> Tool {
    let program = program.display();
    let words = |words: String| words.split_whitespace().collect::<Vec<_>>().join(" ");
    let [server, client] = ADDRESSES;
    let how = match manner {
        "--offload" => "bare UDP",
        "" if what == "latency" => "bare UDP, spinning",
        "" => "bare UDP without segmentation offload",
        _ => "bare UDP with ICRC",
    };
    Tool {
        name: how.into(),
        server: words(format!("{program} bench datagrams serve --payload {payload} {manner}")),
        client: words(format!(
            "{program} bench datagrams {what} --payload {payload} {manner} --from {client} --to {server}"
        )),
        port: None,
        environment: Vec::new(),
        read: Reader::Text(|text| text.lines().find_map(|line| line.strip_prefix("result ")?.parse().ok())),
        carries: None,
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
        carries: None,
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
        carries: None,
    }
}

/// Reads a column of: bytes, sent, acknowledged, total, time, MB/s, µs a transfer, millions a second.
fn libfabric(name: &str, size: usize, times: usize, column: fn(&[&str]) -> Option<f64>) -> Tool {
    let arguments = format!("-p tcp -e msg -S {size} -I {times}");
    Tool {
        name: name.into(),
        server: format!("fi_pingpong {arguments} -B {PORT}"),
        client: format!("fi_pingpong {arguments} -P {PORT} {}", ADDRESSES[0]),
        port: Some(PORT),
        environment: Vec::new(),
        read: Reader::Words(column),
        carries: None,
    }
}
