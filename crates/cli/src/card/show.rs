//! Text output about cards.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

use millstream_card::info::{CardInfo, RegionInfo};
use millstream_report::eprint;

/// Head of the lines of [`line`].
pub(super) const HEAD: &str =
    "card         address                memory     state    lease                regions";

/// A number of bytes with a unit.
pub(super) fn bytes(bytes: u64) -> String {
    for (unit, size) in [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
        if bytes >= size {
            let value = bytes as f64 / size as f64;
            let digits = usize::from(!bytes.is_multiple_of(size));
            return format!("{value:.digits$} {unit}");
        }
    }
    format!("{bytes} B")
}

fn lease(info: &CardInfo) -> String {
    match (info.lease.holder, info.lease.expires_in_s) {
        (0, _) => info.lease.state.to_lowercase(),
        (holder, Some(left)) => format!("client {holder:x}, {left:.1} s left"),
        (holder, None) => format!("client {holder:x}"),
    }
}

/// A card in one line.
pub(super) fn line(name: &str, address: &str, info: &CardInfo) -> String {
    let regions: Vec<_> = info
        .regions
        .iter()
        .map(|region| match &region.kernel {
            Some(kernel) => format!("{kernel} ({})", region.state.to_lowercase()),
            None => "–".to_owned(),
        })
        .collect();
    format!(
        "{name:<12} {address:<22} {:<10} {:<8} {:<20} {}",
        bytes(info.memory_bytes),
        info.state.to_lowercase(),
        lease(info),
        regions.join(", ")
    )
}

/// A card in full.
pub(super) fn whole(info: &CardInfo) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_whole(&mut out, info);
    out
}

fn write_whole(out: &mut String, info: &CardInfo) -> std::fmt::Result {
    writeln!(out, "card {}  pid {}  up {:.1} s", info.card, info.pid, info.clock_s)?;
    writeln!(
        out,
        "  memory      {} ({}) in {} banks of {}",
        bytes(info.memory_bytes),
        info.memory_kind.to_lowercase(),
        info.bank_count,
        bytes(info.bank_bytes)
    )?;
    writeln!(out, "  features    {}", info.capabilities.join(", "))?;
    writeln!(out, "  kernels     {}", info.kernels.join(", "))?;
    let end = info.lease.end_cause.as_deref().map_or(String::new(), |end| format!("; latest end: {end}"));
    writeln!(
        out,
        "  lease       {}; epoch {}, {} grants, {} clients{end}",
        lease(info),
        info.lease.epoch,
        info.lease.grants,
        info.lease.clients
    )?;
    let sensors = match (info.temperature_c, info.power_w) {
        (None, None) => "none readable".to_owned(),
        (temperature, power) => {
            let of = if info.sensors_of_host { " (of the host)" } else { "" };
            let temperature = temperature.map(|value| format!("{value:.1} °C"));
            let power = power.map(|value| format!("{value:.1} W"));
            let known: Vec<_> = temperature.into_iter().chain(power).collect();
            format!("{}{of}", known.join(", "))
        }
    };
    writeln!(out, "  sensors     {sensors}")?;
    for (index, region) in info.regions.iter().enumerate() {
        writeln!(out, "  region {index}    {}", self::region(region))?;
    }
    writeln!(
        out,
        "  DMA         {} ({} failed), {} in {:.3} s; peers: {}",
        info.dma.completed,
        info.dma.failed,
        bytes(info.dma.bytes),
        info.dma.busy_s,
        match info.dma.peers.is_empty() {
            true => "none".to_owned(),
            false => info
                .dma
                .peers
                .iter()
                .map(|(peer, state)| format!("{peer} {}", state.to_lowercase()))
                .collect::<Vec<_>>()
                .join(", "),
        }
    )?;
    let sum = |table: &[u64]| bytes(table.iter().sum());
    writeln!(
        out,
        "  RDMA        BAR4 {} written, {} read; BAR2 {} written, {} read (as clients report)",
        sum(&info.bank_rdma_written),
        sum(&info.bank_rdma_read),
        bytes(info.bar2_rdma.0),
        bytes(info.bar2_rdma.1)
    )?;
    writeln!(
        out,
        "  card        BAR4 {} written, {} read by kernels and DMA; BAR2 {} written, {} read",
        sum(&info.bank_written),
        sum(&info.bank_read),
        bytes(info.bar2.0),
        bytes(info.bar2.1)
    )?;
    writeln!(
        out,
        "  messages    {} sent, {} dropped; {} doorbells by immediate data; heartbeat {}",
        info.messages.0, info.messages.1, info.immediate_doorbells, info.heartbeat
    )
}

/// A region in one line.
pub(super) fn region(region: &RegionInfo) -> String {
    let Some(kernel) = &region.kernel else {
        return region.state.to_lowercase();
    };
    let mut text = format!(
        "{kernel}: {}, progress {}, {} runs ({} failed), {:.3} s",
        region.state.to_lowercase(),
        region.progress,
        region.runs,
        region.failed,
        region.busy_s
    );
    if let Some((cause, detail)) = &region.cause {
        text += &format!("; {cause} ({detail:#x})");
    }
    text
}

/// A progress line on standard error, if that is a terminal.
pub(super) fn progress(what: &'static str) -> impl FnMut(u64, u64) {
    let terminal = std::io::stderr().is_terminal();
    move |done, all| {
        if terminal {
            let end = if done >= all { "\n" } else { "" };
            eprint(format_args!("\r{what}: {} of {}   {end}", bytes(done), bytes(all)));
        }
    }
}
