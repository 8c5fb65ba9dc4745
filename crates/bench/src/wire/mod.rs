//! The device between hosts, beside bare packets and other transports on the same cable.
//!
//! Two network namespaces on one machine stand for two hosts, with a cable (veth) between them. The cable passes buffers of
//! many packets whole from one kernel's segmentation offload to the other's receive offload, as long as nothing on the
//! way must see single packets; a figure without offload is in the table for that reason.

pub mod bare;
mod hosts;

use std::io;
use std::path::{Path, PathBuf};

pub use hosts::{ADDRESSES, Hosts, Ran};

use crate::pair::rows;
use crate::{Figure, Table, median};

const MIB: f64 = (1u64 << 20) as f64;
const SIZE: usize = 1 << 20;
/// TCP port of whatever listens; the namespaces are new.
const PORT: u16 = 18_515;

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
    /// Also the device under loss, with many queue pairs, and processor time.
    pub long: bool,
}

/// A tool on both hosts, and how to read its result.
struct Tool {
    name: String,
    server: String,
    client: String,
    port: Option<u16>,
    environment: Vec<(&'static str, String)>,
    read: fn(&str) -> Option<f64>,
}

/// What a tool measured in each round.
#[derive(Default)]
struct Measured {
    values: Vec<f64>,
    processor: [Vec<f64>; 2],
}

/// Measures; every table row's baseline was taken in turns with it.
///
/// # Errors
/// What setting up namespaces reports, or running a tool.
pub fn run(options: &Options) -> io::Result<Table> {
    let title = "between two network namespaces, 1 MiB messages and 8 bytes (medians, interleaved; baseline: bare UDP \
                 packets of the same payload by this link, without ICRC)";
    let mut table = Table::new(title, "bare UDP");
    for &mtu in &options.mtus {
        let hosts = Hosts::new(mtu)?;
        let payload = if mtu >= 4096 + 64 { 4096 } else { 1024 };
        bandwidths(options, &hosts, mtu, payload, &mut table)?;
        latencies(options, &hosts, mtu, &mut table)?;
    }
    Ok(table)
}

fn bandwidths(
    options: &Options,
    hosts: &Hosts,
    mtu: u32,
    payload: usize,
    table: &mut Table,
) -> io::Result<()> {
    let name = |what: &str| format!("MTU {mtu}: {what}");
    let mut tools = vec![
        bare(&options.program, "bandwidth", payload, "--offload"),
        bare(&options.program, "bandwidth", payload, "--offload --seal"),
        bare(&options.program, "bandwidth", payload, ""),
        perftest(&options.library_dir, "ib_write_bw", &format!("-s {SIZE} -n 1000"), bandwidth),
        perftest(&options.library_dir, "ib_read_bw", &format!("-s {SIZE} -n 1000"), bandwidth),
        perftest(&options.library_dir, "ib_send_bw", &format!("-s {SIZE} -n 1000"), bandwidth),
        Tool {
            name: "iperf3, TCP".into(),
            server: format!("iperf3 -s -1 -p {PORT}"),
            client: format!("iperf3 -J -t 1 -p {PORT} -c {}", ADDRESSES[0]),
            port: Some(PORT),
            environment: Vec::new(),
            read: |text| {
                let end = text.find("\"sum_received\"")?;
                let rate = text[end..].split("\"bits_per_second\":").nth(1)?;
                rate.split([',', '\n', '}']).next()?.trim().parse::<f64>().ok().map(|bits| bits / 8e9)
            },
        },
        ucx("ucp_put_bw", &format!("-s {SIZE} -n 1000 -w 50"), |text| {
            rows(text).last()?.0.get(4).map(|rate| rate * MIB / 1e9)
        }),
    ];
    if options.long {
        for loss in ["0.001", "0.01", "0.05"] {
            let mut tool =
                perftest(&options.library_dir, "ib_write_bw", &format!("-s {SIZE} -n 300"), bandwidth);
            tool.name = format!(
                "{} with {} % of packets dropped",
                tool.name,
                loss.parse::<f64>().unwrap_or(0.0) * 100.0
            );
            tool.environment.push(("MILLSTREAM_LINK", format!("drop={loss}")));
            tools.push(tool);
        }
        let mut many =
            perftest(&options.library_dir, "ib_write_bw", &format!("-s {SIZE} -n 50 -q 64"), bandwidth);
        many.name.push_str(" over 64 queue pairs");
        tools.push(many);
    }
    let measured = measure(hosts, &tools, options.rounds)?;
    let baseline = median(&measured[0].values).unwrap_or(0.0);
    for (tool, measured) in tools.iter().zip(&measured) {
        let value = median(&measured.values).unwrap_or(0.0);
        table.push(Figure::against(name(&tool.name), value, "GB/s", baseline));
    }
    if options.long {
        // The sender's system calls carry packets up to the receiver's socket: that is how veth works.
        for (tool, measured) in tools.iter().zip(&measured).filter(|(tool, _)| tool.name.ends_with("_bw")) {
            for (side, times) in ["receiver", "sender"].iter().zip(&measured.processor) {
                let gigabytes = 1000.0 * SIZE as f64 / 1e9;
                let what = format!("{}: processor time of the {side}", tool.name);
                table.push(Figure::alone(name(&what), median(times).unwrap_or(0.0) / gigabytes, "s/GB"));
            }
        }
    }
    Ok(())
}

fn latencies(options: &Options, hosts: &Hosts, mtu: u32, table: &mut Table) -> io::Result<()> {
    let tools = [
        bare(&options.program, "latency", 64, ""),
        perftest(&options.library_dir, "ib_write_lat", "-s 8 -n 20000", |text| {
            rows(text).last()?.0.get(4).copied()
        }),
        perftest(&options.library_dir, "ib_send_lat", "-s 8 -n 20000", |text| {
            rows(text).last()?.0.get(4).copied()
        }),
        ucx("ucp_put_lat", "-s 8 -n 20000", |text| rows(text).last()?.0.get(2).copied()),
        Tool {
            name: "libfabric tcp, fi_pingpong".into(),
            server: format!("fi_pingpong -p tcp -e msg -S 8 -I 20000 -B {PORT}"),
            client: format!("fi_pingpong -p tcp -e msg -S 8 -I 20000 -P {PORT} {}", ADDRESSES[0]),
            port: Some(PORT),
            environment: Vec::new(),
            // bytes, sent, acknowledged, total, time, MB/s, µs a transfer, millions a second
            read: |text| text.lines().rev().find_map(|line| line.split_whitespace().nth(6)?.parse().ok()),
        },
    ];
    let measured = measure(hosts, &tools, options.rounds)?;
    let baseline = median(&measured[0].values).unwrap_or(0.0);
    for (tool, measured) in tools.iter().zip(&measured) {
        let value = median(&measured.values).unwrap_or(0.0);
        table.push(Figure::against(format!("MTU {mtu}: {} 8 B", tool.name), value, "µs", baseline));
    }
    Ok(())
}

/// Runs each tool once in every round.
fn measure(hosts: &Hosts, tools: &[Tool], rounds: usize) -> io::Result<Vec<Measured>> {
    let mut measured: Vec<Measured> = tools.iter().map(|_| Measured::default()).collect();
    for _ in 0..rounds {
        for (tool, measured) in tools.iter().zip(&mut measured) {
            let ran = hosts.run([&tool.server, &tool.client], tool.port, &tool.environment)?;
            let value = (tool.read)(&ran.output).ok_or_else(|| {
                io::Error::other(format!("{} printed no result:\n{}", tool.client, ran.output))
            })?;
            eprintln!("{}: {value:.3}", tool.name);
            measured.values.push(value);
            for (times, time) in measured.processor.iter_mut().zip(ran.processor) {
                times.push(time);
            }
        }
    }
    Ok(measured)
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
        read: |text| text.lines().find_map(|line| line.strip_prefix("result ")?.parse().ok()),
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
        read,
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
        read,
    }
}
