//! Builds data paths from a site and parameters.

use crate::benchmarks::apenet;
use crate::benchmarks::hbm::HbmTiming;
use crate::benchmarks::osu::{self, Mpi, MpiLibrary};
use crate::benchmarks::perftest;
use crate::benchmarks::torus::{Torus, TorusHop};
use crate::component::completer::CompleterTiming;
use crate::component::pcie;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::{
    Adapter, AddressTranslation, DataPath, IB_HEADERS, NetworkHop, PathEnd, PeerCard, PeerRoute,
    ROCE_V2_HEADERS, TargetMemory, Verb, overhead,
};
use millstream_site::schema::{PcieLink, Protocol};
use millstream_site::validate::{CardMemory, LinkEnd, Parent};
use millstream_site::{Device, DeviceId, DeviceKind, Host, HostId, NetworkLink, Site, SocketId};

/// A data path that a site does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// No host or card has this name.
    #[error("{0:?}: the site has no host or host.card of this name")]
    Unknown(String),
    /// Both names are on one host.
    #[error("{0:?} and {1:?} are on one host: name two hosts")]
    SameHost(String, String),
    /// No link connects the hosts.
    #[error("no network link connects {0:?} and {1:?}")]
    NoLink(String, String),
}

/// Memory at one end of a path.
#[derive(Clone, Copy, Debug)]
struct MemoryLocation {
    host: HostId,
    card: Option<DeviceId>,
}

/// Library id of APEnet+ adapters, whose latency is published as a total.
const APENET: &str = "apenet";
/// Library id of EXTOLL adapters, whose latency is published as a total.
const EXTOLL: &str = "extoll";
/// Library id of the root port of a booster node without processor.
const EXTOLL_ROOT_PORT: &str = "extoll-root-port";

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

/// A link, or two links over one switch, between two hosts.
struct HostLink<'a> {
    link: &'a NetworkLink,
    adapters: [DeviceId; 2],
    switch: Option<usize>,
}

fn host_link(site: &Site, from: HostId, to: HostId) -> Option<HostLink<'_>> {
    let ends = |link: &NetworkLink, host: HostId| match (link.from, link.to) {
        (LinkEnd::Adapter(a, d), other) if a == host => Some((d, other)),
        (other, LinkEnd::Adapter(b, d)) if b == host => Some((d, other)),
        _ => None,
    };
    site.links.iter().find_map(|link| {
        let (mine, other) = ends(link, from)?;
        match other {
            LinkEnd::Adapter(host, device) if host == to => {
                Some(HostLink { link, adapters: [mine, device], switch: None })
            }
            LinkEnd::Adapter(..) => None,
            LinkEnd::Switch(switch) => site.links.iter().find_map(|second| {
                let (theirs, other) = ends(second, to)?;
                (other == LinkEnd::Switch(switch)).then_some(HostLink {
                    link,
                    adapters: [mine, theirs],
                    switch: Some(switch),
                })
            }),
        }
    })
}

/// HBM timing from the parameters, for a port of the card's clock and width.
#[must_use]
pub fn hbm(p: &Parameters, memory: Option<&CardMemory>) -> HbmTiming {
    let rate = memory.map_or(14.4e9, |m| m.clock * f64::from(m.width));
    HbmTiming {
        rate: BytesPerSecond(rate),
        row_cycle: p.nanos("hbm.row.cycle"),
        banks: p.count("hbm.banks"),
        activate_interval: p.nanos("hbm.activate.interval"),
        reorder_window: p.count("hbm.reorder.window"),
        refresh_interval: p.nanos("hbm.refresh.interval"),
        refresh_cycle: p.nanos("hbm.refresh.cycle"),
        switch_round_trip: p.nanos("hbm.switch.round-trip"),
    }
}

/// A value of a device. Devices that lack it have a shipped default of their kind: a test looks up all of them.
fn fact(p: &Parameters, id: &str, kind: &str, value: &str) -> f64 {
    p.device(id, value).unwrap_or_else(|| p.get(&format!("{kind}.{value}")))
}

fn nanos(p: &Parameters, id: &str, kind: &str, value: &str) -> Picos {
    Picos::from_nanos(fact(p, id, kind, value))
}

/// Timing of a host's root complex and memory, by the processor's library id.
#[must_use]
pub fn host_completer(p: &Parameters, processor: &str) -> CompleterTiming {
    CompleterTiming {
        read_latency: nanos(p, processor, "processor", "read.latency"),
        write_latency: nanos(p, processor, "processor", "write.latency"),
        max_reads: 256,
        rate: BytesPerSecond::gigabytes(60.0),
        request_gap: Picos::ZERO,
        max_completion: 256,
        short_read_completion: p.count("pcie.completion.short"),
    }
}

/// Largest rate of a card's completions to a peer, where it is known to be below the memory's rate.
fn peer_read_rate(p: &Parameters, id: &str, link_rate: BytesPerSecond) -> BytesPerSecond {
    match id {
        "fermi" => p.gigabytes("apenet.gpu.read.rate"),
        "xeon-phi" => {
            BytesPerSecond(link_rate.0 * p.get("extoll.payload.efficiency") * p.get("extoll.mic.efficiency"))
        }
        _ => p.device(id, "peer.read.rate").map_or(BytesPerSecond(f64::INFINITY), BytesPerSecond::gigabytes),
    }
}

fn card_timing(p: &Parameters, id: &str, memory: &CardMemory, payload: u32) -> (CompleterTiming, u64) {
    let name = |what: &str| format!("{id}.{what}");
    let hbm = hbm(p, Some(memory));
    // A U280 pseudo channel has 64 bit at 1.8 GT/s; its port can be slower.
    let behind = if id == "u280" { 14.4e9 * hbm.refresh_share() } else { f64::INFINITY };
    // The memory clock scales the memory's part of the latencies, not the bridge's.
    let at_450 = p.get("hbm.switch.round-trip");
    let memory_part = at_450 * 450e6 / memory.clock;
    let bridge = p.get(&name("write.latency")) - at_450;
    let timing = CompleterTiming {
        read_latency: Picos::from_nanos(p.get(&name("bridge.latency")) + memory_part),
        write_latency: Picos::from_nanos(bridge + memory_part),
        max_reads: p.count(&name("reads")),
        // The slower of the port and the memory behind it, which runs at its own clock and refreshes.
        rate: BytesPerSecond((hbm.rate.0 * p.get("hbm.port.efficiency")).min(behind)),
        request_gap: Picos::ZERO,
        max_completion: payload,
        short_read_completion: payload,
    };
    (timing, u64::from(p.count(&name("writes")) * payload))
}

/// Timing of an adapter and of software on a processor, by their library ids.
#[must_use]
pub fn adapter(p: &Parameters, id: &str, processor: &str) -> Adapter {
    let time = |value: &str| nanos(p, id, "connectx", value);
    let count = |value: &str| fact(p, id, "connectx", value).round().max(1.0) as u32;
    Adapter {
        post_time: nanos(p, processor, "processor", "post"),
        poll_time: nanos(p, processor, "processor", "poll"),
        tx_latency: time("tx.latency"),
        rx_latency: time("rx.latency"),
        gather_latency: time("gather.latency"),
        message_gap: time("message.gap"),
        long_message_gap: time("long.message.gap"),
        read_gap: time("read.gap"),
        response_gap: time("response.gap"),
        dma_read_window: count("read.window"),
        outstanding_reads: count("outstanding.reads"),
        rx_buffer: fact(p, id, "connectx", "buffer") as u64,
        tx_unit: count("tx.unit"),
        rx_unit: count("rx.unit"),
        max_inline: count("inline"),
        inline_rate: BytesPerSecond::gigabytes(fact(p, id, "connectx", "inline.rate")),
        translation: None,
    }
}

/// Timing of APEnet+ adapters: DMA engines with one packet each, a translation table, a receive buffer.
fn apenet_adapter(p: &Parameters, rx_buffer: u64) -> Adapter {
    let software = p.get("apenet.translate.software") / p.get("apenet.processor.utilization");
    Adapter {
        dma_read_window: p.count("apenet.engines") * apenet::PACKET,
        rx_buffer,
        translation: Some(AddressTranslation {
            hit: p.nanos("apenet.translate.hardware"),
            miss: Picos::from_nanos(software),
            // Without table entries, the embedded processor translates every packet.
            entries: p.get("apenet.translate.entries").round() as u32,
            page: p.count("apenet.translate.page"),
        }),
        ..fpga_adapter(p)
    }
}

/// Timing of FPGA adapters. Only a total latency is published; [`split_residual_latency`] distributes it.
fn fpga_adapter(p: &Parameters) -> Adapter {
    Adapter {
        tx_latency: Picos::ZERO,
        rx_latency: Picos::ZERO,
        gather_latency: Picos::ZERO,
        read_gap: p.nanos("connectx.message.gap"),
        response_gap: Picos::ZERO,
        tx_unit: 1,
        rx_unit: u32::MAX,
        max_inline: 0,
        ..adapter(p, "connectx", "processor")
    }
}

/// PCIe switches above a device, the nearest first, and the socket above them.
fn ancestors(host: &Host, mut parent: Parent) -> (Vec<DeviceId>, SocketId) {
    let mut switches = Vec::new();
    loop {
        match parent {
            Parent::Socket(socket) => return (switches, socket),
            Parent::Switch(switch) => {
                switches.push(switch);
                parent = host.devices[switch.0].parent;
            }
        }
    }
}

/// PCIe link of a device with the payload that all ports up to the socket accept: Max_Payload_Size is that of the smallest.
fn negotiated_link(host: &Host, device: &Device) -> PcieLink {
    let (switches, _) = ancestors(host, device.parent);
    let ports = switches.iter().map(|switch| host.devices[switch.0].pcie.max_payload);
    let max_payload = ports.fold(device.pcie.max_payload, std::cmp::Ord::min);
    PcieLink { max_payload, ..device.pcie }
}

fn switch_latency(p: &Parameters, host: &Host, switch: DeviceId) -> Picos {
    let device = &host.devices[switch.0];
    match device.kind {
        DeviceKind::Switch(Some(latency)) => Picos::from_seconds(latency.0),
        _ => nanos(p, &device.id, "pcie-switch", "latency"),
    }
}

/// Route between two devices of one host: over their nearest common switch, one root complex, or two sockets.
fn peer_route(p: &Parameters, host: &Host, nic: &Device, card: &Device) -> PeerRoute {
    let ((above_nic, near), (above_card, far)) = (ancestors(host, nic.parent), ancestors(host, card.parent));
    let latency = |switches: &[DeviceId]| {
        switches.iter().fold(Picos::ZERO, |sum, &switch| sum + switch_latency(p, host, switch))
    };
    if let Some(common) = above_nic.iter().position(|switch| above_card.contains(switch)) {
        let other = above_card.iter().position(|switch| *switch == above_nic[common]).unwrap_or(0);
        return PeerRoute::Switch { latency: latency(&above_nic[..=common]) + latency(&above_card[..other]) };
    }
    let on_the_way = latency(&above_nic) + latency(&above_card);
    let Some(socket) = host.sockets.get(near.0).filter(|socket| socket.id != EXTOLL_ROOT_PORT) else {
        // A booster's adapter is the root port: no processor is on the route.
        return PeerRoute::Switch { latency: p.nanos("pcie-switch.latency") + on_the_way };
    };
    let id = socket.id.as_str();
    let rate = |value: &str| fact(p, id, "processor", value);
    let (mut write, mut read) = (rate("p2p.write.rate"), rate("p2p.read.rate"));
    let mut hop = Picos::ZERO;
    if near != far {
        (write, read) = (write.min(rate("p2p.remote.write.rate")), read.min(rate("p2p.remote.read.rate")));
        hop = Picos(nanos(p, id, "processor", "socket.hop").0 / 2);
    }
    PeerRoute::RootComplex {
        write: BytesPerSecond::gigabytes(write),
        read: BytesPerSecond::gigabytes(read),
        latency: nanos(p, id, "processor", "p2p.latency") + hop + on_the_way,
    }
}

fn path_end(
    site: &Site,
    p: &Parameters,
    place: MemoryLocation,
    nic: DeviceId,
    link_rate: BytesPerSecond,
) -> Result<PathEnd, PathError> {
    let host = &site.hosts[place.host.0];
    let nic = &host.devices[nic.0];
    let mut nic_link = negotiated_link(host, nic);
    let target = match place.card {
        None => TargetMemory::Host,
        Some(id) => {
            let card = &host.devices[id.0];
            let DeviceKind::Card(Some(memory)) = &card.kind else {
                return Err(PathError::Unknown(format!("{}.{} (card without memory)", host.name, card.name)));
            };
            let route = peer_route(p, host, nic, card);
            // Packets between peers have the payload that both accept.
            let mut link = negotiated_link(host, card);
            link.max_payload = link.max_payload.min(nic_link.max_payload);
            nic_link.max_payload = link.max_payload;
            let (timing, write_window) = card_timing(p, &card.id, memory, link.max_payload.0);
            let read_rate = peer_read_rate(p, &card.id, link_rate);
            TargetMemory::Card(PeerCard { pcie: link, timing, read_rate, write_window, route })
        }
    };
    let (_, socket) = ancestors(host, nic.parent);
    let processor = host.sockets.get(socket.0).map_or("processor", |socket| socket.id.as_str());
    let memory = host_completer(p, processor);
    let read_latency = match nic.id.as_str() {
        APENET => p.nanos("apenet.read.latency"),
        _ => memory.read_latency,
    };
    // A completion is at most as large as the link's payload.
    let max_completion = memory.max_completion.min(nic_link.max_payload.0);
    let timing = match nic.id.as_str() {
        APENET => apenet_adapter(p, u64::MAX),
        EXTOLL => fpga_adapter(p),
        id => adapter(p, id, processor),
    };
    Ok(PathEnd {
        pcie: nic_link,
        target,
        host: CompleterTiming { read_latency, max_completion, ..memory },
        pcie_efficiency: p.device(&nic.id, "pcie.efficiency").unwrap_or_else(|| p.get("pcie.efficiency")),
        adapter: timing,
    })
}

/// A route through a torus: its first link and the hops of both directions.
struct TorusPath<'a> {
    link: &'a NetworkLink,
    adapters: [DeviceId; 2],
    hops: [Vec<TorusHop>; 2],
    torus: usize,
}

fn torus_path(site: &Site, from: HostId, to: HostId) -> Option<TorusPath<'_>> {
    site.tori.iter().enumerate().find_map(|(torus, t)| {
        let position = |host: HostId| t.nodes.iter().position(|(h, _)| *h == host);
        let (a, b) = (position(from)?, position(to)?);
        let routing = Torus { dimensions: t.dimensions.clone(), ..Torus::default() };
        let link = site.links.iter().find(|link| {
            link.dimension.is_some()
                && [link.from, link.to].contains(&LinkEnd::Adapter(t.nodes[a].0, t.nodes[a].1))
        })?;
        Some(TorusPath {
            link,
            adapters: [t.nodes[a].1, t.nodes[b].1],
            hops: [routing.hops(a, b), routing.hops(b, a)],
            torus,
        })
    })
}

/// The hops of a route after the first.
fn later_hops(
    site: &Site,
    torus_path: &TorusPath<'_>,
    hops: &[TorusHop],
    rate: BytesPerSecond,
    latency: Picos,
) -> Vec<NetworkHop> {
    let nodes = &site.tori[torus_path.torus].nodes;
    let buffer = torus_path.link.buffer.map_or(u64::MAX, |buffer| buffer.0 as u64);
    (hops.iter().skip(1))
        .map(|hop| {
            let host = &site.hosts[nodes[hop.node].0.0].name;
            let direction = if hop.positive { '+' } else { '-' };
            let dimension = ["x", "y", "z"][hop.dimension];
            NetworkHop { name: format!("{host} link {direction}{dimension}"), rate, latency, buffer }
        })
        .collect()
}

/// Splits the part of a published latency that other components do not explain between the two adapters.
fn split_residual_latency(path: &mut DataPath, published: Picos, measured: impl Fn(&DataPath) -> Picos) {
    let later_hops = std::mem::take(&mut path.later_hops);
    let residual = published - measured(path);
    path.later_hops = later_hops;
    for end in &mut path.ends {
        end.adapter.tx_latency = Picos(residual.0 / 2);
        end.adapter.rx_latency = Picos(residual.0 / 2);
    }
}

fn data_path_over_torus(
    site: &Site,
    p: &Parameters,
    torus_path: &TorusPath<'_>,
    a: MemoryLocation,
    b: MemoryLocation,
) -> Result<DataPath, PathError> {
    let link_rate = torus_path.link.rate;
    let apenet = site.hosts[a.host.0].devices[torus_path.adapters[0].0].id == APENET;
    let buffer = torus_path.link.buffer.map_or(u64::MAX, |buffer| buffer.0 as u64);
    let rate = BytesPerSecond(
        link_rate.0 * p.get("apenet.payload.efficiency") * p.get("apenet.protocol.efficiency"),
    );
    let hop_latency = p.nanos("apenet.hop.latency");
    let mut path = DataPath {
        ends: [
            path_end(site, p, a, torus_path.adapters[0], BytesPerSecond(link_rate.0))?,
            path_end(site, p, b, torus_path.adapters[1], BytesPerSecond(link_rate.0))?,
        ],
        link_rate: BytesPerSecond(link_rate.0),
        rate,
        mtu: torus_path.link.mtu.0,
        // The shares of the rate include headers and stuffing.
        overhead: [0; 4],
        latency: hop_latency,
        later_hops: [0, 1].map(|i| later_hops(site, torus_path, &torus_path.hops[i], rate, hop_latency)),
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    for end in &mut path.ends {
        end.adapter.rx_buffer = buffer;
    }
    if apenet {
        // Half a round trip between neighbours is published; GPU ends add their known latencies.
        let (from, to) = (a.card.is_some(), b.card.is_some());
        let both = apenet::small_latency(p, from, to) + apenet::small_latency(p, to, from);
        let published = Picos::from_nanos(both / 2.0 * 1e3);
        split_residual_latency(&mut path, published, |path| perftest::latency(path, Verb::Write, SMALL));
    }
    Ok(path)
}

/// Message size of published minimum latencies, in bytes.
const SMALL: u32 = 8;

/// Data path between the memories of two hosts or cards.
///
/// # Errors
/// [`PathError`] if the site lacks one of them, or a link between them.
pub fn data_path(site: &Site, p: &Parameters, client: &str, server: &str) -> Result<DataPath, PathError> {
    let p = &*p.with_devices(&site.devices);
    let (a, b) = (locate(site, client)?, locate(site, server)?);
    if a.host == b.host {
        return Err(PathError::SameHost(client.to_owned(), server.to_owned()));
    }
    if let Some(torus_path) = torus_path(site, a.host, b.host) {
        return data_path_over_torus(site, p, &torus_path, a, b);
    }
    let hop = host_link(site, a.host, b.host)
        .ok_or_else(|| PathError::NoLink(client.to_owned(), server.to_owned()))?;
    let metres = hop.link.length.map_or(1.0, |length| length.0);
    let switch = hop.switch.map_or(0.0, |switch| site.switches[switch].latency.0);
    let link_rate = hop.link.rate.0;
    let ends = [
        path_end(site, p, a, hop.adapters[0], BytesPerSecond(link_rate))?,
        path_end(site, p, b, hop.adapters[1], BytesPerSecond(link_rate))?,
    ];
    let nic = &site.hosts[a.host.0].devices[hop.adapters[0].0].id;
    let extoll = nic == EXTOLL;
    // With the 8b/10b line code, flow control packets take a larger share than with 64b/66b.
    let efficiency = match p.device(nic, "link.efficiency.8b10b") {
        Some(efficiency) if link_rate < 5e9 => efficiency,
        _ => fact(p, nic, "connectx", "link.efficiency"),
    };
    let headers = match hop.link.protocol {
        Protocol::InfiniBand => IB_HEADERS,
        Protocol::RoceV2 => ROCE_V2_HEADERS,
    };
    let mut path = DataPath {
        ends,
        link_rate: BytesPerSecond(link_rate),
        rate: BytesPerSecond(
            link_rate * if extoll { p.get("extoll.payload.efficiency") } else { efficiency },
        ),
        mtu: hop.link.mtu.0,
        overhead: if extoll { [0; 4] } else { overhead(headers) },
        // 5 ns per metre of copper or fibre.
        latency: Picos::from_seconds(metres * 5e-9 + switch),
        later_hops: [Vec::new(), Vec::new()],
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    if extoll {
        // The published value is the minimum of osu_latency.
        let published = Picos::from_nanos(p.get("extoll.latency") * 1e3);
        let mpi = Mpi::new(p, MpiLibrary::default());
        split_residual_latency(&mut path, published, |path| osu::latency(path, &mpi, SMALL));
    }
    Ok(path)
}

/// Bandwidth of one direction of the stencil kernel in one memory bank; none if `card` has no memory.
#[must_use]
pub fn stencil_rate(site: &Site, p: &Parameters, card: &str) -> Option<BytesPerSecond> {
    let (host, device) = site.device(card)?;
    let DeviceKind::Card(Some(memory)) = &site.hosts[host.0].devices[device.0].kind else { return None };
    let bank = hbm(p, Some(memory));
    Some(BytesPerSecond(bank.rate.0 * bank.refresh_share() * p.get("u280.stencil.efficiency")))
}

/// Upper bound of writes over the PCIe link of one end.
#[must_use]
pub fn pcie_ceiling(path: &DataPath, side: usize) -> BytesPerSecond {
    BytesPerSecond(pcie_line_rate(path, side).0 * path.ends[side].pcie_efficiency)
}

/// Payload rate of the PCIe link of one end, without DLLPs.
#[must_use]
pub fn pcie_line_rate(path: &DataPath, side: usize) -> BytesPerSecond {
    let link = &path.ends[side].pcie;
    let payload = u64::from(link.max_payload.0);
    pcie::write_ceiling(pcie::raw_rate(link.generation.0, link.lanes.0), payload, payload)
}
