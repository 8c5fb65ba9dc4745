//! Cards in words and lines.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

use millstream_card::net::info::{CardInfo, RegionInfo};

/// Head of the lines of [`line`].
pub(super) const HEAD: &str =
    "card         address                memory     state    lease                regions";

/// Bytes as people read them.
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
    match (info.lease.holder, info.lease.left_s) {
        (0, _) => info.lease.state.to_lowercase(),
        (holder, Some(left)) => format!("node {holder:x}, {left:.1} s left"),
        (holder, None) => format!("node {holder:x}"),
    }
}

/// One line for a card.
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

/// Everything about a card.
pub(super) fn whole(info: &CardInfo) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_whole(&mut out, info);
    out
}

fn write_whole(out: &mut String, info: &CardInfo) -> std::fmt::Result {
    writeln!(out, "card {}  process {}  up {:.1} s", info.card, info.process, info.clock_s)?;
    writeln!(
        out,
        "  memory      {} ({}) in {} banks of {}",
        bytes(info.memory_bytes),
        info.memory_kind.to_lowercase(),
        info.bank_count,
        bytes(info.bank_bytes)
    )?;
    writeln!(out, "  can         {}", info.capabilities.join(", "))?;
    writeln!(out, "  kernels     {}", info.kernels.join(", "))?;
    let end = info.lease.latest_end.as_deref().map_or(String::new(), |end| format!("; latest one: {end}"));
    writeln!(
        out,
        "  lease       {}; epoch {}, {} so far, {} nodes{end}",
        lease(info),
        info.lease.epoch,
        info.lease.leases,
        info.lease.nodes
    )?;
    let sensors = match (info.temperature_c, info.power_w) {
        (None, None) => "none that this machine shows".to_owned(),
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
        "  copies      {} ({} failed), {} in {:.3} s; peers: {}",
        info.copies.completed,
        info.copies.failed,
        bytes(info.copies.bytes),
        info.copies.busy_s,
        match info.copies.peers.is_empty() {
            true => "none".to_owned(),
            false => info
                .copies
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
        "  windows     {} written, {} read; BAR2 {} written, {} read (as nodes report)",
        sum(&info.window_written),
        sum(&info.window_read),
        bytes(info.dma_window.0),
        bytes(info.dma_window.1)
    )?;
    writeln!(
        out,
        "  banks       {} written, {} read by kernels and copies; BAR2 {} written, {} read",
        sum(&info.bank_written),
        sum(&info.bank_read),
        bytes(info.dma.0),
        bytes(info.dma.1)
    )?;
    writeln!(
        out,
        "  messages    {} sent, {} lost; {} doorbells with immediate data; heartbeat {}",
        info.messages.0, info.messages.1, info.doorbells, info.heartbeat
    )
}

/// A region in a few words.
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
            eprint!("\r{what}: {} of {}   {end}", bytes(done), bytes(all));
        }
    }
}
