//! Builds data paths from a site and parameters.

use crate::benchmarks::apenet;
use crate::benchmarks::hbm::HbmTiming;
use crate::benchmarks::osu::{self, Mpi, MpiLibrary};
use crate::component::completer::CompleterTiming;
use crate::component::pcie;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::route::{Network, Route, RouteLink};
use crate::path::torus::{data_path_over_torus, torus_path};
use crate::path::{
    Adapter, AddressTranslation, DataPath, IB_HEADERS, NetworkHop, PathEnd, PeerCard, PeerRoute,
    ROCE_V2_HEADERS, TargetMemory, TransportCore, Uplink, overhead,
};
use crate::path::{cxl, translation};
use millstream_site::schema::{PcieLink, Protocol};
use millstream_site::validate::{CardMemory, LinkEnd, Parent, link_end_name};
use millstream_site::{Device, DeviceId, DeviceKind, Host, HostId, NetworkLink, Site, SocketId};

/// A data path that a site does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// No host or card has this name.
    #[error("{0:?}: the site has no host or host.card of this name")]
    Unknown(String),
    /// The host has no memory.
    #[error("{host:?} has no socket, so no host memory{}", cards_instead(cards))]
    NoHostMemory {
        /// The host.
        host: String,
        /// Its cards with memory, as `host.card`.
        cards: Vec<String>,
    },
    /// The card has no memory.
    #[error("{0:?} has no memory: add `memory` to this card of the site file")]
    NoCardMemory(String),
    /// Both names are on one host.
    #[error("{0:?} and {1:?} are on one host: name two hosts, or use `millstream model flows`")]
    SameHost(String, String),
    /// A flow from a place to itself.
    #[error("{0:?}: a flow has two different ends")]
    SamePlace(String),
    /// The library has no such value for a device.
    #[error("{device} is a {model:?}, whose {value} is not known: add it to a [device.ID] of the site file")]
    NoValue {
        /// Host and name of the device.
        device: String,
        /// Its model.
        model: String,
        /// Name of the value.
        value: String,
    },
    /// No link connects the hosts.
    #[error("no network link connects {client:?} and {server:?}{}", failed_links(*failed))]
    NoLink {
        /// Client.
        client: String,
        /// Server.
        server: String,
        /// Failed links of the site.
        failed: usize,
    },
}

fn failed_links(links: usize) -> String {
    if links == 0 { String::new() } else { format!(": {links} links of the site have failed (failed-link)") }
}

fn cards_instead(cards: &[String]) -> String {
    if cards.is_empty() { String::new() } else { format!("; its cards: {}", cards.join(", ")) }
}

/// One end of a path: host memory, or a card, memory behind a CXL link or a disk of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) host: HostId,
    /// The device; none: host memory.
    pub(crate) device: Option<DeviceId>,
}

/// Library id of APEnet+ adapters, whose latency is published as a total.
pub(super) const APENET: &str = "apenet";
/// Library id of EXTOLL adapters, whose latency is published as a total.
const EXTOLL: &str = "extoll";
/// Library id of the root port of a booster node without processor.
const EXTOLL_ROOT_PORT: &str = "extoll-root-port";

/// The place that `host` or `host.device` means. Host memory, through which disks transfer, needs a socket.
pub(crate) fn locate(site: &Site, name: &str) -> Result<Place, PathError> {
    let unknown = || PathError::Unknown(name.to_owned());
    let place = match site.hosts.iter().position(|host| host.name == name) {
        Some(host) => Place { host: HostId(host), device: None },
        None => {
            let (host, device) = site.device(name).ok_or_else(unknown)?;
            Place { host, device: Some(device) }
        }
    };
    let host = &site.hosts[place.host.0];
    match place.device.map(|device| &host.devices[device.0].kind) {
        None | Some(DeviceKind::Ssd) if host.sockets.is_empty() => Err(no_host_memory(host)),
        None | Some(DeviceKind::Card(_) | DeviceKind::CxlMemory(_) | DeviceKind::Ssd) => Ok(place),
        Some(DeviceKind::Switch(_) | DeviceKind::Adapter | DeviceKind::CxlSwitch(_)) => Err(unknown()),
    }
}

/// Host memory of a host without sockets is named.
pub(crate) fn no_host_memory(host: &Host) -> PathError {
    let cards = host.devices.iter().filter(|device| matches!(device.kind, DeviceKind::Card(Some(_))));
    let cards = cards.map(|card| format!("{}.{}", host.name, card.name)).collect();
    PathError::NoHostMemory { host: host.name.clone(), cards }
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
pub(crate) fn fact(p: &Parameters, id: &str, kind: &str, value: &str) -> f64 {
    p.device(id, value).unwrap_or_else(|| p.get(&format!("{kind}.{value}")))
}

/// Share of a PCIe link's rate that a device reaches.
pub(crate) fn pcie_efficiency(p: &Parameters, id: &str) -> f64 {
    p.device(id, "pcie.efficiency").unwrap_or_else(|| p.get("pcie.efficiency"))
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
        rate: BytesPerSecond::gigabytes(fact(p, processor, "processor", "dma.rate")),
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

fn card_timing(
    p: &Parameters,
    host: &Host,
    card: &Device,
    memory: &CardMemory,
    payload: u32,
) -> Result<(CompleterTiming, u64), PathError> {
    let value = |what: &str| {
        p.device(&card.id, what).ok_or_else(|| PathError::NoValue {
            device: format!("{}.{}", host.name, card.name),
            model: card.model.clone(),
            value: what.to_owned(),
        })
    };
    let count = |what: &str| value(what).map(|count| count.round().max(1.0) as u32);
    let hbm = hbm(p, Some(memory));
    // A U280 pseudo channel has 64 bit at 1.8 GT/s; its port can be slower.
    let behind = if card.id == "u280" { 14.4e9 * hbm.refresh_share() } else { f64::INFINITY };
    // A stream uses one channel where channels are ranges of addresses.
    let share = p.device(&card.id, "stream.channels").unwrap_or(0.0);
    let channels = (share * f64::from(memory.channels)).max(1.0);
    // The memory clock scales the memory's part of the latencies, not the bridge's.
    let at_450 = p.get("hbm.switch.round-trip");
    let memory_part = at_450 * 450e6 / memory.clock;
    let bridge = value("write.latency")? - at_450;
    let timing = CompleterTiming {
        read_latency: Picos::from_nanos(value("bridge.latency")? + memory_part),
        write_latency: Picos::from_nanos(bridge + memory_part),
        max_reads: count("reads")?,
        // The slower of the ports and the memory behind them, which runs at its own clock and refreshes.
        rate: BytesPerSecond((hbm.rate.0 * p.get("hbm.port.efficiency")).min(behind) * channels),
        request_gap: Picos::ZERO,
        max_completion: payload,
        short_read_completion: payload,
    };
    Ok((timing, u64::from(count("writes")? * payload)))
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
        core: transport_core(p, id),
    }
}

/// Times of the core that is the adapter, for devices with the value `core.copy.rate`.
fn transport_core(p: &Parameters, id: &str) -> Option<TransportCore> {
    let time = |value: &str| p.device(id, value).map(Picos::from_nanos);
    Some(TransportCore {
        copy: BytesPerSecond::gigabytes(p.device(id, "core.copy.rate")?),
        message: time("core.message.time")?,
        packet: time("core.packet.time")?,
        acknowledgement: time("core.ack.time")?,
    })
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
pub(crate) fn ancestors(host: &Host, mut parent: Parent) -> (Vec<DeviceId>, SocketId) {
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

/// Links of PCIe switches to their parents, with the payload that their ports accept. A switch's latency is zero if a route
/// between devices includes it.
fn uplinks(p: &Parameters, host: &Host, switches: &[DeviceId], with_latency: bool) -> Vec<Uplink> {
    let uplink = |&switch: &DeviceId| {
        let device = &host.devices[switch.0];
        let latency = if with_latency { switch_latency(p, host, switch) } else { Picos::ZERO };
        Uplink { name: device.name.clone(), pcie: negotiated_link(host, device), latency }
    };
    switches.iter().map(uplink).collect()
}

/// PCIe link of a device with the payload that all ports up to the socket accept: Max_Payload_Size is that of the smallest.
pub(crate) fn negotiated_link(host: &Host, device: &Device) -> PcieLink {
    let (switches, _) = ancestors(host, device.parent);
    let ports = switches.iter().map(|switch| host.devices[switch.0].pcie.max_payload);
    let max_payload = ports.fold(device.pcie.max_payload, std::cmp::Ord::min);
    PcieLink { max_payload, ..device.pcie }
}

/// Cut-through latency of a PCIe switch.
pub(crate) fn switch_latency(p: &Parameters, host: &Host, switch: DeviceId) -> Picos {
    let device = &host.devices[switch.0];
    match device.kind {
        DeviceKind::Switch(Some(latency)) => Picos::from_seconds(latency.0),
        _ => nanos(p, &device.id, "pcie-switch", "latency"),
    }
}

/// Whether switches send transfers between two devices up to the root complex: its IOMMU translates the addresses, unless one of
/// the devices has translated them by ATS (ACS P2P request redirect).
pub(crate) fn is_redirected(host: &Host, one: &Device, other: &Device) -> bool {
    host.iommu.is_some() && !one.ats && !other.ats
}

/// Rate of one direction between two sockets, over all of their UPI or xGMI links.
pub(crate) fn socket_rate(p: &Parameters, processor: &str) -> BytesPerSecond {
    let value = |name: &str| fact(p, processor, "processor", name);
    BytesPerSecond::gigabytes(value("socket.rate") * value("socket.links").round())
}

/// Route between two devices of one host: over their nearest common switch, one root complex, or two sockets.
pub(crate) fn peer_route(p: &Parameters, host: &Host, nic: &Device, card: &Device) -> PeerRoute {
    let ((above_nic, near), (above_card, far)) = (ancestors(host, nic.parent), ancestors(host, card.parent));
    let latency = |switches: &[DeviceId]| {
        switches.iter().fold(Picos::ZERO, |sum, &switch| sum + switch_latency(p, host, switch))
    };
    let common = above_nic.iter().position(|switch| above_card.contains(switch));
    if let Some(common) = common.filter(|_| !is_redirected(host, nic, card)) {
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
        let between = socket_rate(p, id).as_gigabytes();
        write = write.min(rate("p2p.remote.write.rate")).min(between);
        read = read.min(rate("p2p.remote.read.rate")).min(between);
        hop = Picos(nanos(p, id, "processor", "socket.hop").0 / 2);
    }
    PeerRoute::RootComplex {
        write: BytesPerSecond::gigabytes(write),
        read: BytesPerSecond::gigabytes(read),
        latency: nanos(p, id, "processor", "p2p.latency") + hop + on_the_way,
    }
}

pub(super) fn path_end(
    site: &Site,
    p: &Parameters,
    place: Place,
    nic: DeviceId,
    link_rate: BytesPerSecond,
) -> Result<PathEnd, PathError> {
    let host = &site.hosts[place.host.0];
    let nic = &host.devices[nic.0];
    let mut nic_link = negotiated_link(host, nic);
    let (above, socket) = ancestors(host, nic.parent);
    // The published latency of APEnet+ reads includes the switch.
    let mut nic_uplinks = if nic.id == APENET { Vec::new() } else { uplinks(p, host, &above, true) };
    let device = place.device.map(|id| &host.devices[id.0]);
    let target = match device.map(|device| (device, &device.kind)) {
        None => TargetMemory::Host,
        Some((device, DeviceKind::CxlMemory(memory))) => {
            let max_completion = nic_link.max_payload.0;
            TargetMemory::Cxl(cxl::target(p, host, (device, memory), socket, max_completion)?)
        }
        Some((card, DeviceKind::Card(Some(memory)))) => {
            let route = peer_route(p, host, nic, card);
            let (above_card, _) = ancestors(host, card.parent);
            // Switches below the nearest common one; all without one.
            let redirected = is_redirected(host, nic, card);
            let below = |of: &[DeviceId], other: &[DeviceId]| {
                let common = of.iter().position(|switch| other.contains(switch) && !redirected);
                uplinks(p, host, &of[..common.unwrap_or(of.len())], false)
            };
            nic_uplinks = below(&above, &above_card);
            let card_uplinks = below(&above_card, &above);
            // Packets between peers have the payload that both accept.
            let mut link = negotiated_link(host, card);
            link.max_payload = link.max_payload.min(nic_link.max_payload);
            nic_link.max_payload = link.max_payload;
            let (timing, write_window) = card_timing(p, host, card, memory, link.max_payload.0)?;
            let read_rate = peer_read_rate(p, &card.id, link_rate);
            TargetMemory::Card(PeerCard {
                pcie: link,
                timing,
                read_rate,
                write_window,
                route,
                uplinks: card_uplinks,
            })
        }
        Some((device, kind)) => {
            let name = format!("{}.{}", host.name, device.name);
            let is_card = matches!(kind, DeviceKind::Card(_));
            return Err(if is_card { PathError::NoCardMemory(name) } else { PathError::Unknown(name) });
        }
    };
    let socket = host.sockets.get(socket.0);
    let processor = socket.map_or("processor", |socket| socket.id.as_str());
    let mut memory = host_completer(p, processor);
    if let Some(bandwidth) = socket.and_then(|socket| socket.memory_bandwidth) {
        memory.rate = BytesPerSecond(memory.rate.0.min(bandwidth.0));
    }
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
        uplinks: nic_uplinks,
        target,
        host: CompleterTiming { read_latency, max_completion, ..memory },
        pcie_efficiency: pcie_efficiency(p, &nic.id),
        translation: translation::of_adapter(p, host, nic, processor),
        adapter: timing,
    })
}

/// Splits the part of a published latency that other components do not explain between the two adapters.
pub(super) fn split_residual_latency(
    path: &mut DataPath,
    published: Picos,
    measured: impl Fn(&DataPath) -> Picos,
) {
    let later_hops = std::mem::take(&mut path.later_hops);
    let residual = published - measured(path);
    path.later_hops = later_hops;
    for end in &mut path.ends {
        end.adapter.tx_latency = Picos(residual.0 / 2);
        end.adapter.rx_latency = Picos(residual.0 / 2);
    }
}

/// Message size of published minimum latencies, in bytes.
pub(super) const SMALL: u32 = 8;

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
    let routes = [(a.host, b.host), (b.host, a.host)];
    let network = Network::new(site);
    let [Some(there), Some(back)] = routes.map(|(from, to)| network.route(from, to)) else {
        let failed = site.links.iter().filter(|link| link.failed).count();
        return Err(PathError::NoLink { client: client.to_owned(), server: server.to_owned(), failed });
    };
    let links: Vec<&NetworkLink> = there.links.iter().map(|hop| &site.links[hop.link]).collect();
    let link_rate = links.iter().map(|link| link.rate.0).fold(f64::INFINITY, f64::min);
    let ends = [
        path_end(site, p, a, there.adapters[0], BytesPerSecond(link_rate))?,
        path_end(site, p, b, there.adapters[1], BytesPerSecond(link_rate))?,
    ];
    let nic = &site.hosts[a.host.0].devices[there.adapters[0].0].id;
    let extoll = nic == EXTOLL;
    // With the 8b/10b line code, flow control packets take a larger share than with 64b/66b.
    let efficiency = match p.device(nic, "link.efficiency.8b10b") {
        Some(efficiency) if link_rate < 5e9 => efficiency,
        _ => fact(p, nic, "connectx", "link.efficiency"),
    };
    let headers = match links[0].protocol {
        Protocol::InfiniBand => IB_HEADERS,
        Protocol::RoceV2 => ROCE_V2_HEADERS,
    };
    let share = if extoll { p.get("extoll.payload.efficiency") } else { efficiency };
    let mut path = DataPath {
        ends,
        link_rate: BytesPerSecond(link_rate),
        rate: BytesPerSecond(link_rate * share),
        mtu: links.iter().map(|link| link.mtu.0).min().unwrap_or(4096),
        overhead: if extoll { [0; 4] } else { overhead(headers) },
        latency: Picos::ZERO,
        loss: 1.0 - links.iter().map(|link| 1.0 - link.loss).product::<f64>(),
        first_hops: None,
        later_hops: [Vec::new(), Vec::new()],
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    if is_one_line(site, &there) {
        let cables = links.iter().fold(Picos::ZERO, |sum, link| sum + cable(link));
        path.latency = cables + switch_of(site, there.links[0].target(site));
    } else {
        let [mut there, mut back] = [there, back].map(|route| network_hops(site, p, &route, share));
        path.first_hops = Some([there.remove(0), back.remove(0)]);
        path.later_hops = [there, back];
    }
    if extoll {
        // The published value is the minimum of osu_latency.
        let published = Picos::from_nanos(p.get("extoll.latency") * 1e3);
        let mpi = Mpi::new(p, MpiLibrary::default());
        split_residual_latency(&mut path, published, |path| osu::latency(path, &mpi, SMALL));
    }
    Ok(path)
}

/// Delay of a cable: 5 ns per metre of copper or fibre.
fn cable(link: &NetworkLink) -> Picos {
    Picos::from_seconds(link.length.map_or(1.0, |length| length.0) * 5e-9)
}

/// Latency of the switch at a link's end.
fn switch_of(site: &Site, end: LinkEnd) -> Picos {
    match end {
        LinkEnd::Switch(switch) => Picos::from_seconds(site.switches[switch].latency.0),
        LinkEnd::Adapter(..) => Picos::ZERO,
    }
}

/// Whether a route is one cable, or two equal ones at a switch that describes the whole network: one channel represents both.
fn is_one_line(site: &Site, route: &Route) -> bool {
    let links: Vec<&NetworkLink> = route.links.iter().map(|hop| &site.links[hop.link]).collect();
    match links.as_slice() {
        [_] => true,
        [first, second] => first.rate == second.rate && first.loss + second.loss == 0.0,
        _ => false,
    }
}

/// The links of a route as hops, each with its cable and the switch behind it.
fn network_hops(site: &Site, p: &Parameters, route: &Route, share: f64) -> Vec<NetworkHop> {
    let hop = |(i, hop): (usize, &RouteLink)| {
        let link = &site.links[hop.link];
        let (from, to) = (hop.source(site), hop.target(site));
        NetworkHop {
            name: format!("{} to {}", link_end_name(site, from), link_end_name(site, to)),
            rate: BytesPerSecond(link.rate.0 * share),
            latency: cable(link) + switch_of(site, to),
            buffer: if i == 0 { u64::MAX } else { switch_buffer(p, site, from) },
            loss: link.loss,
        }
    };
    route.links.iter().enumerate().map(hop).collect()
}

/// Payload that a switch buffers in front of an output.
pub(crate) fn switch_buffer(p: &Parameters, site: &Site, end: LinkEnd) -> u64 {
    let LinkEnd::Switch(switch) = end else { return u64::MAX };
    fact(p, &site.switches[switch].id, "network-switch", "buffer") as u64
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
    pcie::payload_rate(&path.ends[side].pcie)
}
