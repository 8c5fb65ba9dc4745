//! From a site and parameters to what the tools take.

use crate::benchmarks::apenet;
use crate::benchmarks::hbm::HbmTiming;
use crate::benchmarks::osu::{self, Mpi};
use crate::benchmarks::perftest;
use crate::benchmarks::torus::{Torus, TorusHop};
use crate::component::completer::CompleterTiming;
use crate::component::pcie;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::{
    Adapter, AddressTranslation, DataPath, IB_OVERHEAD, NetworkHop, PathEnd, PeerCard, PeerRoute,
    TargetMemory, Verb,
};
use millstream_site::validate::{CardMemory, LinkEnd, Parent};
use millstream_site::{DeviceId, DeviceKind, HostId, NetworkLink, Site};

/// A flow that a site cannot carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
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
struct MemoryLocation {
    host: HostId,
    card: Option<DeviceId>,
}

/// Which adapters, with their software, a host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AdapterFamily {
    /// InfiniBand adapters of the ConnectX line; others of InfiniBand are taken for such.
    ConnectX,
    /// The torus' FPGA.
    Apenet,
    /// EXTOLL's FPGA.
    Extoll,
}

fn adapter_family(model: &str) -> AdapterFamily {
    match model.to_lowercase() {
        name if name.contains("apenet") => AdapterFamily::Apenet,
        name if name.contains("extoll") => AdapterFamily::Extoll,
        _ => AdapterFamily::ConnectX,
    }
}

fn locate(site: &Site, name: &str) -> Result<MemoryLocation, PathError> {
    let unknown = || PathError::Unknown(name.to_owned());
    match site.hosts.iter().position(|host| host.name == name) {
        Some(host) => Ok(MemoryLocation { host: HostId(host), card: None }),
        None => {
            let (host, card) = site.device(name).ok_or_else(unknown)?;
            let is_card = matches!(site.hosts[host.0].devices[card.0].kind, DeviceKind::Card(_));
            if is_card { Ok(MemoryLocation { host, card: Some(card) }) } else { Err(unknown()) }
        }
    }
}

/// The name under which a processor's parameters are.
fn processor_family(processor: &str) -> &'static str {
    let name = processor.to_lowercase();
    let known = [("epyc", "rome"), ("rome", "rome"), ("skylake", "skylake-sp"), ("v4", "broadwell-ep")];
    known.into_iter().find(|(word, _)| name.contains(word)).map_or("skylake-sp", |(_, family)| family)
}

/// The link, or the two links over one switch, between two hosts.
struct HostLink<'a> {
    wire: &'a NetworkLink,
    adapters: [DeviceId; 2],
    switch: Option<usize>,
}

fn host_link(site: &Site, from: HostId, to: HostId) -> Option<HostLink<'_>> {
    let ends = |wire: &NetworkLink, host: HostId| match (wire.from, wire.to) {
        (LinkEnd::Adapter(a, d), other) if a == host => Some((d, other)),
        (other, LinkEnd::Adapter(b, d)) if b == host => Some((d, other)),
        _ => None,
    };
    site.links.iter().find_map(|wire| {
        let (mine, other) = ends(wire, from)?;
        match other {
            LinkEnd::Adapter(host, device) if host == to => {
                Some(HostLink { wire, adapters: [mine, device], switch: None })
            }
            LinkEnd::Adapter(..) => None,
            LinkEnd::Switch(switch) => site.links.iter().find_map(|second| {
                let (theirs, other) = ends(second, to)?;
                (other == LinkEnd::Switch(switch)).then_some(HostLink {
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
pub fn hbm(p: &Parameters, memory: Option<&CardMemory>) -> HbmTiming {
    let rate = memory.map_or(14.4e9, |m| m.clock * f64::from(m.width));
    HbmTiming {
        rate: BytesPerSecond(rate),
        row_cycle: p.nanos("hbm.row.cycle"),
        banks: p.count("hbm.banks"),
        refresh_interval: p.nanos("hbm.refresh.interval"),
        refresh_cycle: p.nanos("hbm.refresh.cycle"),
        switch_round_trip: p.nanos("hbm.port.turnaround"),
    }
}

/// A host's root complex and memory.
#[must_use]
pub fn host_completer(p: &Parameters) -> CompleterTiming {
    CompleterTiming {
        read_latency: p.nanos("cpu.read.latency"),
        write_latency: p.nanos("cpu.write.latency"),
        reads: 256,
        rate: BytesPerSecond::gigabytes(60.0),
        gap: Picos::ZERO,
        completion: 256,
        short_completion: p.count("pcie.completion.short"),
    }
}

/// What a card's inlet answers a peer's reads with, where that is known to be less than its memory.
fn peer_read_rate(p: &Parameters, model: &str, wire: BytesPerSecond) -> BytesPerSecond {
    // Fermi: the GPUs of APEnet+'s time.
    if ["M20", "C20", "S20"].iter().any(|fermi| model.contains(fermi)) {
        p.gigabytes("apenet.gpu.read.rate")
    } else if model.contains("Phi") {
        BytesPerSecond(wire.0 * p.get("extoll.payload.share") * p.get("extoll.mic.share"))
    } else {
        BytesPerSecond(f64::INFINITY)
    }
}

fn card_timing(p: &Parameters, model: &str, memory: &CardMemory, payload: u32) -> (CompleterTiming, u64) {
    let name = |what: &str| format!("{}.{what}", if model.contains("U280") { "u280" } else { "gpu" });
    let hbm = hbm(p, Some(memory));
    // A U280's port can be slower than its pseudo channel of 64 bit at 1.8 GT/s.
    let behind = if model.contains("U280") { 14.4e9 * hbm.refresh_share() } else { f64::INFINITY };
    // The memory's own clock scales its part of the latencies, the bridge's does not.
    let at_450 = p.get("hbm.port.turnaround");
    let memory_part = at_450 * 450e6 / memory.clock;
    let bridge = p.get(&name("write.round")) - at_450;
    let timing = CompleterTiming {
        read_latency: Picos::from_nanos(p.get(&name("bridge.latency")) + memory_part),
        write_latency: Picos::from_nanos(bridge + memory_part),
        reads: p.count(&name("reads")),
        // The port or the memory behind it, which runs at its own clock and has refresh to do.
        rate: BytesPerSecond((hbm.rate.0 * p.get("hbm.port.share")).min(behind)),
        gap: Picos::ZERO,
        completion: payload,
        short_completion: payload,
    };
    (timing, u64::from(p.count(&name("writes")) * payload))
}

/// ConnectX adapters and their software.
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
        translation: None,
    }
}

/// The torus' adapters: two DMA engines with a packet each, a table for addresses, channel memory.
fn apenet_adapter(p: &Parameters, buffer: u64) -> Adapter {
    let software = p.get("apenet.translate.software") / p.get("apenet.processor.share");
    Adapter {
        tx_latency: Picos::ZERO,
        rx_latency: Picos::ZERO,
        gather_latency: Picos::ZERO,
        read_window: p.count("apenet.engines") * apenet::PACKET,
        buffer,
        inline: 0,
        translation: Some(AddressTranslation {
            hit: p.nanos("apenet.translate.hardware"),
            miss: Picos::from_nanos(software),
            // Zero entries are no table: everything is software.
            entries: p.get("apenet.translate.entries").round() as u32,
            page: p.count("apenet.translate.page"),
        }),
        ..adapter(p)
    }
}

/// EXTOLL's adapters; what is known of them is a latency, which is spread over both ends afterwards.
fn extoll_adapter(p: &Parameters) -> Adapter {
    Adapter {
        tx_latency: Picos::ZERO,
        rx_latency: Picos::ZERO,
        gather_latency: Picos::ZERO,
        inline: 0,
        ..adapter(p)
    }
}

fn path_end(
    site: &Site,
    p: &Parameters,
    place: MemoryLocation,
    adapter: DeviceId,
    wire: BytesPerSecond,
) -> Result<PathEnd, PathError> {
    let host = &site.hosts[place.host.0];
    let nic = &host.devices[adapter.0];
    let target = match place.card {
        None => TargetMemory::Host,
        Some(id) => {
            let card = &host.devices[id.0];
            let DeviceKind::Card(Some(memory)) = &card.kind else {
                return Err(PathError::Unknown(format!(
                    "{}.{} (a card without memory)",
                    host.name, card.name
                )));
            };
            let route = match (nic.parent, card.parent) {
                (Parent::Switch(a), Parent::Switch(b)) if a == b => {
                    let latency = match &host.devices[a.0].kind {
                        DeviceKind::Switch(Some(latency)) => Picos::from_seconds(latency.0),
                        _ => p.nanos("pcie.switch.latency"),
                    };
                    PeerRoute::Switch { latency }
                }
                // A booster node's adapter is the root port itself: nothing of a processor is between.
                _ if host
                    .sockets
                    .iter()
                    .all(|socket| adapter_family(&socket.processor) == AdapterFamily::Extoll) =>
                {
                    PeerRoute::Switch { latency: p.nanos("pcie.switch.latency") }
                }
                _ => {
                    let processor = host.sockets.first().map_or("", |s| s.processor.as_str());
                    let name = |what: &str| format!("cpu.{}.p2p.{what}", processor_family(processor));
                    let read = name("read.rate");
                    // Where no published number exists, reads go as writes do.
                    let read = if p.has(&read) { read } else { name("write.rate") };
                    PeerRoute::RootComplex {
                        write: p.gigabytes(&name("write.rate")),
                        read: p.gigabytes(&read),
                        latency: p.nanos("cpu.p2p.latency"),
                    }
                }
            };
            let (timing, write_window) = card_timing(p, &card.model, memory, card.pcie.max_payload.0);
            let read_rate = peer_read_rate(p, &card.model, wire);
            TargetMemory::Card(PeerCard { pcie: card.pcie, timing, read_rate, write_window, route })
        }
    };
    let memory = host_completer(p);
    let read_latency = match adapter_family(&nic.model) {
        AdapterFamily::Apenet => p.nanos("apenet.read.latency"),
        AdapterFamily::ConnectX | AdapterFamily::Extoll => memory.read_latency,
    };
    // A completion is at most as long as the link's payload.
    let completion = memory.completion.min(nic.pcie.max_payload.0);
    Ok(PathEnd { pcie: nic.pcie, target, host: CompleterTiming { read_latency, completion, ..memory } })
}

/// The way through a torus: the first link, and those after it in both directions.
struct TorusPath<'a> {
    wire: &'a NetworkLink,
    adapters: [DeviceId; 2],
    hops: [Vec<TorusHop>; 2],
    torus: usize,
}

fn torus_path(site: &Site, from: HostId, to: HostId) -> Option<TorusPath<'_>> {
    site.tori.iter().enumerate().find_map(|(torus, t)| {
        let position = |host: HostId| t.nodes.iter().position(|(h, _)| *h == host);
        let (a, b) = (position(from)?, position(to)?);
        let routing = Torus { dimensions: t.dimensions.clone(), ..Torus::default() };
        let wire = site.links.iter().find(|wire| {
            wire.dimension.is_some()
                && [wire.from, wire.to].contains(&LinkEnd::Adapter(t.nodes[a].0, t.nodes[a].1))
        })?;
        Some(TorusPath {
            wire,
            adapters: [t.nodes[a].1, t.nodes[b].1],
            hops: [routing.hops(a, b), routing.hops(b, a)],
            torus,
        })
    })
}

/// The links of a way after its first.
fn later_hops(
    site: &Site,
    torus_path: &TorusPath<'_>,
    hops: &[TorusHop],
    rate: BytesPerSecond,
    latency: Picos,
) -> Vec<NetworkHop> {
    let nodes = &site.tori[torus_path.torus].nodes;
    let buffer = torus_path.wire.buffer.map_or(u64::MAX, |buffer| buffer.0 as u64);
    (hops.iter().skip(1))
        .map(|hop| {
            let host = &site.hosts[nodes[hop.node].0.0].name;
            let direction = if hop.positive { '+' } else { '-' };
            let dimension = ["x", "y", "z"][hop.dimension];
            NetworkHop { name: format!("{host} link {direction}{dimension}"), rate, latency, buffer }
        })
        .collect()
}

/// Gives both adapters equal parts of what is left of a published latency after everything else.
fn split_residual_latency(path: &mut DataPath, published: Picos, measured: impl Fn(&DataPath) -> Picos) {
    let later_hops = std::mem::take(&mut path.later_hops);
    let residual = published - measured(path);
    path.later_hops = later_hops;
    path.adapter.tx_latency = Picos(residual.0 / 2);
    path.adapter.rx_latency = Picos(residual.0 / 2);
}

fn data_path_over_torus(
    site: &Site,
    p: &Parameters,
    torus_path: &TorusPath<'_>,
    a: MemoryLocation,
    b: MemoryLocation,
) -> Result<DataPath, PathError> {
    let wire = torus_path.wire.rate;
    let model = &site.hosts[a.host.0].devices[torus_path.adapters[0].0].model;
    let apenet = adapter_family(model) == AdapterFamily::Apenet;
    let buffer = torus_path.wire.buffer.map_or(u64::MAX, |buffer| buffer.0 as u64);
    let rate = BytesPerSecond(wire.0 * p.get("apenet.payload.share") * p.get("apenet.protocol.share"));
    let hop_latency = p.nanos("apenet.hop.latency");
    let mut path = DataPath {
        ends: [
            path_end(site, p, a, torus_path.adapters[0], BytesPerSecond(wire.0))?,
            path_end(site, p, b, torus_path.adapters[1], BytesPerSecond(wire.0))?,
        ],
        adapter: if apenet { apenet_adapter(p, buffer) } else { adapter(p) },
        rate,
        mtu: torus_path.wire.mtu.0,
        // Headers and stuffing are in the shares of the rate.
        overhead: [0; 4],
        latency: hop_latency,
        later_hops: [0, 1].map(|i| later_hops(site, torus_path, &torus_path.hops[i], rate, hop_latency)),
        pcie_efficiency: p.get("pcie.efficiency"),
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    if apenet {
        // Half a round trip between neighbours is published; a GPU at an end adds what is known of it.
        let (from, to) = (a.card.is_some(), b.card.is_some());
        let both = apenet::small_latency(p, from, to) + apenet::small_latency(p, to, from);
        let published = Picos::from_nanos(both / 2.0 * 1e3);
        split_residual_latency(&mut path, published, |path| perftest::latency(path, Verb::Write, SMALL));
    }
    Ok(path)
}

/// Bytes of a message in a published smallest latency.
const SMALL: u32 = 8;

/// What the tools need for flows between the memories of two hosts or cards.
///
/// # Errors
/// [`SetupError`] if the site has not got them, or no way between them.
pub fn data_path(site: &Site, p: &Parameters, client: &str, server: &str) -> Result<DataPath, PathError> {
    let (a, b) = (locate(site, client)?, locate(site, server)?);
    if a.host == b.host {
        return Err(PathError::SameHost(client.to_owned(), server.to_owned()));
    }
    if let Some(torus_path) = torus_path(site, a.host, b.host) {
        return data_path_over_torus(site, p, &torus_path, a, b);
    }
    let hop = host_link(site, a.host, b.host)
        .ok_or_else(|| PathError::NoLink(client.to_owned(), server.to_owned()))?;
    let metres = hop.wire.length.map_or(1.0, |length| length.0);
    let switch = hop.switch.map_or(0.0, |switch| site.switches[switch].latency.0);
    let wire = hop.wire.rate.0;
    let ends = [
        path_end(site, p, a, hop.adapters[0], BytesPerSecond(wire))?,
        path_end(site, p, b, hop.adapters[1], BytesPerSecond(wire))?,
    ];
    let extoll =
        adapter_family(&site.hosts[a.host.0].devices[hop.adapters[0].0].model) == AdapterFamily::Extoll;
    let infiniband = wire * p.get("ib.flow.share") * if wire > 10e9 { p.get("ib.fast.share") } else { 1.0 };
    let mut path = DataPath {
        ends,
        adapter: if extoll { extoll_adapter(p) } else { adapter(p) },
        rate: BytesPerSecond(if extoll { wire * p.get("extoll.payload.share") } else { infiniband }),
        mtu: hop.wire.mtu.0,
        overhead: if extoll { [0; 4] } else { IB_OVERHEAD },
        // 5 ns a metre of copper or glass.
        latency: Picos::from_seconds(metres * 5e-9 + switch),
        later_hops: [Vec::new(), Vec::new()],
        pcie_efficiency: p.get("pcie.efficiency"),
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    if extoll {
        // What is published is the smallest osu_latency.
        let published = Picos::from_nanos(p.get("extoll.latency") * 1e3);
        let mpi = Mpi::new(p);
        split_residual_latency(&mut path, published, |path| osu::latency(path, &mpi, SMALL));
    }
    Ok(path)
}

/// What one direction of the stencil gets of a bank of a card's memory; none where that is no card with memory.
#[must_use]
pub fn stencil_rate(site: &Site, p: &Parameters, card: &str) -> Option<BytesPerSecond> {
    let (host, device) = site.device(card)?;
    let DeviceKind::Card(Some(memory)) = &site.hosts[host.0].devices[device.0].kind else { return None };
    let bank = hbm(p, Some(memory));
    Some(BytesPerSecond(bank.rate.0 * bank.refresh_share() * p.get("u280.stencil.share")))
}

/// Ceiling of a PCIe link for writes, after flow control.
#[must_use]
pub fn pcie_ceiling(path: &DataPath, side: usize) -> BytesPerSecond {
    let link = &path.ends[side].pcie;
    let raw = pcie::raw_rate(link.generation.0, link.lanes.0);
    let payload = u64::from(link.max_payload.0);
    pcie::write_ceiling(BytesPerSecond(raw.0 * path.pcie_efficiency), payload, payload)
}
