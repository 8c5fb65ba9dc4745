//! From a site and parameters to what the tools take.

use crate::engine::{Picos, Rate};
use crate::parameters::Parameters;
use crate::part::memory::Timing;
use crate::part::pcie;
use crate::tool::hbm::Hbm;
use crate::tool::verbs::{Adapter, Card, Setup, Side, Target, Via};
use millstream_site::check::{CardMemory, End, Parent};
use millstream_site::{DeviceId, DeviceKind, HostId, Site, Wire};

/// A flow that a site cannot carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// The site has no such host or card.
    #[error("{0:?} is no host and no host.card of this site")]
    Unknown(String),
    /// The two are the same host.
    #[error("{0:?} and {1:?} are one host: the model's flows go from host to host")]
    SameHost(String, String),
    /// No link leads from one host to the other.
    #[error("no link leads from {0:?} to {1:?}")]
    NoLink(String, String),
}

/// Memory at one end of a flow.
#[derive(Clone, Copy, Debug)]
struct Place {
    host: HostId,
    card: Option<DeviceId>,
}

fn place(site: &Site, name: &str) -> Result<Place, SetupError> {
    let unknown = || SetupError::Unknown(name.to_owned());
    match site.hosts.iter().position(|host| host.name == name) {
        Some(host) => Ok(Place { host: HostId(host), card: None }),
        None => {
            let (host, card) = site.device(name).ok_or_else(unknown)?;
            let is_card = matches!(site.hosts[host.0].devices[card.0].kind, DeviceKind::Card(_));
            if is_card { Ok(Place { host, card: Some(card) }) } else { Err(unknown()) }
        }
    }
}

/// The name under which a processor's parameters are.
fn family(processor: &str) -> &'static str {
    let name = processor.to_lowercase();
    let known = [("epyc", "rome"), ("rome", "rome"), ("skylake", "skylake-sp"), ("v4", "broadwell-ep")];
    known.into_iter().find(|(word, _)| name.contains(word)).map_or("skylake-sp", |(_, family)| family)
}

/// The link, or the two links over one switch, between two hosts.
struct Hop<'a> {
    wire: &'a Wire,
    adapters: [DeviceId; 2],
    switch: Option<usize>,
}

fn hop(site: &Site, from: HostId, to: HostId) -> Option<Hop<'_>> {
    let ends = |wire: &Wire, host: HostId| match (wire.from, wire.to) {
        (End::Adapter(a, d), other) if a == host => Some((d, other)),
        (other, End::Adapter(b, d)) if b == host => Some((d, other)),
        _ => None,
    };
    site.wires.iter().find_map(|wire| {
        let (mine, other) = ends(wire, from)?;
        match other {
            End::Adapter(host, device) if host == to => {
                Some(Hop { wire, adapters: [mine, device], switch: None })
            }
            End::Adapter(..) => None,
            End::Switch(switch) => site.wires.iter().find_map(|second| {
                let (theirs, other) = ends(second, to)?;
                (other == End::Switch(switch)).then_some(Hop {
                    wire,
                    adapters: [mine, theirs],
                    switch: Some(switch),
                })
            }),
        }
    })
}

/// HBM as parameters have it, at a port of that clock and width.
#[must_use]
pub fn hbm(p: &Parameters, memory: Option<&CardMemory>) -> Hbm {
    let rate = memory.map_or(14.4e9, |m| m.clock * f64::from(m.width));
    Hbm {
        rate: Rate(rate),
        row_cycle: p.nanos("hbm.row.cycle"),
        banks: p.count("hbm.banks"),
        refresh_interval: p.nanos("hbm.refresh.interval"),
        refresh_cycle: p.nanos("hbm.refresh.cycle"),
        turnaround: p.nanos("hbm.port.turnaround"),
    }
}

/// A host's root complex and memory.
#[must_use]
pub fn host_memory(p: &Parameters) -> Timing {
    Timing {
        read_latency: p.nanos("cpu.read.latency"),
        write_latency: p.nanos("cpu.write.latency"),
        reads: 256,
        rate: Rate::gigabytes(60.0),
        gap: Picos::ZERO,
        completion: 256,
        short_completion: p.count("pcie.completion.short"),
    }
}

fn card_timing(p: &Parameters, model: &str, memory: &CardMemory, payload: u32) -> (Timing, u64) {
    let name = |what: &str| format!("{}.{what}", if model.contains("U280") { "u280" } else { "gpu" });
    let hbm = hbm(p, Some(memory));
    // A U280's port can be slower than its pseudo channel of 64 bit at 1.8 GT/s.
    let behind = if model.contains("U280") { 14.4e9 * hbm.refresh_share() } else { f64::INFINITY };
    // The memory's own clock scales its part of the latencies, the bridge's does not.
    let at_450 = p.get("hbm.port.turnaround");
    let memory_part = at_450 * 450e6 / memory.clock;
    let bridge = p.get(&name("write.round")) - at_450;
    let timing = Timing {
        read_latency: Picos::from_nanos(p.get(&name("bridge.latency")) + memory_part),
        write_latency: Picos::from_nanos(bridge + memory_part),
        reads: p.count(&name("reads")),
        // The port or the memory behind it, which runs at its own clock and has refresh to do.
        rate: Rate((hbm.rate.0 * p.get("hbm.port.share")).min(behind)),
        gap: Picos::ZERO,
        completion: payload,
        short_completion: payload,
    };
    (timing, u64::from(p.count(&name("writes")) * payload))
}

/// The adapters and their software.
#[must_use]
pub fn adapter(p: &Parameters) -> Adapter {
    Adapter {
        post: p.nanos("adapter.post"),
        poll: p.nanos("adapter.poll"),
        tx_latency: p.nanos("adapter.tx.latency"),
        rx_latency: p.nanos("adapter.rx.latency"),
        gather_latency: p.nanos("adapter.gather.latency"),
        message_gap: p.nanos("adapter.message.gap"),
        read_window: p.count("adapter.read.window"),
        outstanding_reads: p.count("adapter.outstanding.reads"),
        buffer: p.get("adapter.buffer") as u64,
        inline: 188,
    }
}

fn side(site: &Site, p: &Parameters, place: Place, adapter: DeviceId) -> Result<Side, SetupError> {
    let host = &site.hosts[place.host.0];
    let nic = &host.devices[adapter.0];
    let target = match place.card {
        None => Target::Host,
        Some(id) => {
            let card = &host.devices[id.0];
            let DeviceKind::Card(Some(memory)) = &card.kind else {
                return Err(SetupError::Unknown(format!(
                    "{}.{} (a card without memory)",
                    host.name, card.name
                )));
            };
            let via = match (nic.parent, card.parent) {
                (Parent::Switch(a), Parent::Switch(b)) if a == b => {
                    let latency = match &host.devices[a.0].kind {
                        DeviceKind::Switch(Some(latency)) => Picos::from_seconds(latency.0),
                        _ => p.nanos("pcie.switch.latency"),
                    };
                    Via::Switch { latency }
                }
                _ => {
                    let processor = host.sockets.first().map_or("", |s| s.processor.as_str());
                    let name = |what: &str| format!("cpu.{}.p2p.{what}", family(processor));
                    let read = name("read.rate");
                    // Where no published number exists, reads go as writes do.
                    let read = if p.has(&read) { read } else { name("write.rate") };
                    Via::RootComplex {
                        write: p.gigabytes(&name("write.rate")),
                        read: p.gigabytes(&read),
                        latency: p.nanos("cpu.p2p.latency"),
                    }
                }
            };
            let (timing, write_window) = card_timing(p, &card.model, memory, card.pcie.max_payload.0);
            Target::Card(Card { pcie: card.pcie, timing, write_window, via })
        }
    };
    Ok(Side { pcie: nic.pcie, target, host: host_memory(p) })
}

/// What the tools need for flows between the memories of two hosts or cards.
///
/// # Errors
/// [`SetupError`] if the site has not got them, or no way between them.
pub fn setup(site: &Site, p: &Parameters, client: &str, server: &str) -> Result<Setup, SetupError> {
    let (a, b) = (place(site, client)?, place(site, server)?);
    if a.host == b.host {
        return Err(SetupError::SameHost(client.to_owned(), server.to_owned()));
    }
    let hop =
        hop(site, a.host, b.host).ok_or_else(|| SetupError::NoLink(client.to_owned(), server.to_owned()))?;
    let metres = hop.wire.length.map_or(1.0, |length| length.0);
    let switch = hop.switch.map_or(0.0, |switch| site.switches[switch].latency.0);
    Ok(Setup {
        sides: [side(site, p, a, hop.adapters[0])?, side(site, p, b, hop.adapters[1])?],
        adapter: adapter(p),
        rate: Rate(
            hop.wire.rate.0
                * p.get("ib.flow.share")
                * if hop.wire.rate.0 > 10e9 { p.get("ib.fast.share") } else { 1.0 },
        ),
        mtu: hop.wire.mtu.0,
        // 5 ns a metre of copper or glass.
        latency: Picos::from_seconds(metres * 5e-9 + switch),
        pcie_efficiency: p.get("pcie.efficiency"),
        pcie_latency: p.nanos("pcie.link.latency"),
    })
}

/// Ceiling of a PCIe link for writes, after flow control.
#[must_use]
pub fn pcie_ceiling(setup: &Setup, side: usize) -> Rate {
    let link = &setup.sides[side].pcie;
    let raw = pcie::raw_rate(link.generation.0, link.lanes.0);
    let payload = u64::from(link.max_payload.0);
    pcie::write_ceiling(Rate(raw.0 * setup.pcie_efficiency), payload, payload)
}
