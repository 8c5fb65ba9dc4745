//! What concurrent flows share: directions of links, PCIe ports, memory, disks.

use super::Routing;
use crate::component::{cxl, pcie};
use crate::explain::Flow;
use crate::parameters::Parameters;
use crate::path::route::{Network, Route};
use crate::path::{
    IB_HEADERS, PathError, PeerRoute, Place, ROCE_V2_HEADERS, Verb, ancestors, cxl_timing, fact,
    is_redirected, locate, negotiated_link, pcie_efficiency, peer_route, socket_rate, torus_path,
};
use crate::ssd::{Access, CommandQueue};
use millstream_site::schema::Protocol;
use millstream_site::validate::link_end_name;
use millstream_site::{DeviceId, DeviceKind, HostId, Site, SocketId};
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Network { link: usize, forward: bool },
    Torus { torus: usize, node: usize, dimension: usize, positive: bool },
    Pcie { host: usize, device: usize, up: bool },
    Peer { host: usize, from: usize, to: usize },
    Sockets { host: usize, from: usize, to: usize },
    Memory { host: usize, socket: usize },
    CardMemory { host: usize, device: usize },
    CardLink { host: usize, link: usize, forward: bool },
    Cxl { host: usize, device: usize, is_write: bool },
    CxlMemory { host: usize, device: usize },
    Disk { host: usize, device: usize, read: bool },
}

/// Resources of the flows so far.
pub(super) struct Resources<'a> {
    site: &'a Site,
    p: &'a Parameters,
    index: HashMap<Key, usize>,
    pub(super) capacities: Vec<f64>,
    pub(super) names: Vec<String>,
    /// Message size of the flow whose routes are looked up: the block size of disks.
    block: u64,
    /// Rates without any loss: no interval ends above them.
    line_rates: Vec<f64>,
}

/// A resource that flows share.
struct Shared {
    name: String,
    capacity: f64,
    /// Rate without any loss.
    line_rate: f64,
}

impl Shared {
    /// A resource without a known loss.
    fn new(name: String, capacity: f64) -> Shared {
        Shared { name, capacity, line_rate: capacity }
    }
}

/// Resources of a flow.
pub(super) struct FlowRoutes {
    /// Resources of each route.
    pub(super) routes: Vec<Vec<usize>>,
    /// Ends of its network path, which packets cross; none within a host.
    pub(super) ends: Option<(String, String)>,
}

impl<'a> Resources<'a> {
    pub(super) fn new(site: &'a Site, p: &'a Parameters) -> Resources<'a> {
        Resources {
            site,
            p,
            index: HashMap::new(),
            capacities: Vec::new(),
            names: Vec::new(),
            block: 0,
            line_rates: Vec::new(),
        }
    }

    /// Adds a resource of one flow.
    pub(super) fn add(&mut self, name: String, capacity: f64) -> usize {
        self.push(Shared { line_rate: f64::INFINITY, ..Shared::new(name, capacity) })
    }

    fn push(&mut self, shared: Shared) -> usize {
        self.capacities.push(shared.capacity);
        self.names.push(shared.name);
        self.line_rates.push(shared.line_rate);
        self.names.len() - 1
    }

    /// Rate of a route without any loss.
    pub(super) fn line_rate(&self, route: &[usize]) -> f64 {
        route.iter().map(|&i| self.line_rates[i]).fold(f64::INFINITY, f64::min)
    }

    /// Rate of a flow over several routes without any loss: at most that of what all of them share.
    pub(super) fn line_rate_of_all(&self, routes: &[Vec<usize>]) -> f64 {
        let sum: f64 = routes.iter().map(|route| self.line_rate(route)).sum();
        let [first, others @ ..] = routes else { return sum };
        let is_common = |i: &usize| others.iter().all(|route| route.contains(i));
        let common: Vec<usize> = first.iter().copied().filter(is_common).collect();
        sum.min(self.line_rate(&common))
    }

    fn shared(&mut self, key: Key, describe: impl FnOnce(&Site, &Parameters) -> Shared) -> usize {
        if let Some(&known) = self.index.get(&key) {
            return known;
        }
        let index = self.push(describe(self.site, self.p));
        self.index.insert(key, index);
        index
    }

    fn kind(&self, place: Place) -> Option<&'a DeviceKind> {
        place.device.map(|device| &self.site.hosts[place.host.0].devices[device.0].kind)
    }

    fn is_disk(&self, place: Place) -> bool {
        self.kind(place) == Some(&DeviceKind::Ssd)
    }

    fn is_cxl(&self, place: Place) -> bool {
        matches!(self.kind(place), Some(DeviceKind::CxlMemory(_)))
    }

    /// The card that a place is.
    fn card(&self, place: Place) -> Option<DeviceId> {
        place.device.filter(|_| matches!(self.kind(place), Some(DeviceKind::Card(_))))
    }

    /// The link of a device to its parent, in one direction.
    fn pcie(&mut self, host: HostId, device: DeviceId, up: bool) -> usize {
        self.shared(Key::Pcie { host: host.0, device: device.0, up }, |site, p| {
            let host = &site.hosts[host.0];
            let device = &host.devices[device.0];
            let link = negotiated_link(host, device);
            let line_rate = pcie::payload_rate(&link).0;
            let direction = if up { "upstream" } else { "downstream" };
            let what = if matches!(device.kind, DeviceKind::Switch(_)) { " uplink" } else { "" };
            let name = format!("{}.{}{what}, PCIe {direction}", host.name, device.name);
            Shared { name, capacity: line_rate * pcie_efficiency(p, &device.id), line_rate }
        })
    }

    fn memory(&mut self, host: HostId, socket: SocketId) -> usize {
        self.shared(Key::Memory { host: host.0, socket: socket.0 }, |site, _| {
            let host = &site.hosts[host.0];
            let bandwidth = host.sockets.get(socket.0).and_then(|socket| socket.memory_bandwidth);
            let name = format!("{}.socket{} memory", host.name, socket.0);
            Shared::new(name, bandwidth.map_or(f64::INFINITY, |rate| rate.0))
        })
    }

    fn disk(&mut self, host: HostId, device: DeviceId, read: bool) -> Result<usize, PathError> {
        let found = &self.site.hosts[host.0].devices[device.0];
        let value = if read { "read.rate" } else { "write.rate" };
        let Some(rate) = self.p.device(&found.id, value) else {
            return Err(PathError::NoValue {
                device: format!("{}.{}", self.site.hosts[host.0].name, found.name),
                model: found.model.clone(),
                value: value.to_owned(),
            });
        };
        Ok(self.shared(Key::Disk { host: host.0, device: device.0, read }, |site, _| {
            let host = &site.hosts[host.0];
            let what = if read { "reads" } else { "writes" };
            let name = format!("{}.{}, {what}", host.name, host.devices[device.0].name);
            // Ranges of disks are those of data sheets.
            Shared { line_rate: f64::INFINITY, ..Shared::new(name, rate * 1e9) }
        }))
    }

    /// What the commands that a flow has outstanding on a disk reach, if the site limits their number.
    fn command_queue(
        &mut self,
        host: HostId,
        device: DeviceId,
        read: bool,
    ) -> Result<Option<usize>, PathError> {
        let host = &self.site.hosts[host.0];
        let found = &host.devices[device.0];
        let Some(depth) = found.queue_depth else { return Ok(None) };
        let access = if read { Access::Read } else { Access::Write };
        let queue = CommandQueue::new(self.p, &found.id, access).ok_or_else(|| PathError::NoValue {
            device: format!("{}.{}", host.name, found.name),
            model: found.model.clone(),
            value: CommandQueue::value_names(access),
        })?;
        let name = format!("{}.{}, queue depth {depth} at {} B", host.name, found.name, self.block);
        let rate = queue.bandwidth(self.block, depth).0;
        Ok(Some(self.add(name, rate)))
    }

    /// Links from a device up to the root complex, or below the switches of another device.
    fn climb(&mut self, host: HostId, device: DeviceId, other: Option<DeviceId>, up: bool) -> Vec<usize> {
        let tree = &self.site.hosts[host.0];
        let above = |device: DeviceId| ancestors(tree, tree.devices[device.0].parent).0;
        let direct =
            other.filter(|&other| !is_redirected(tree, &tree.devices[device.0], &tree.devices[other.0]));
        let beside = direct.map(above).unwrap_or_default();
        let below = above(device).into_iter().take_while(|switch| !beside.contains(switch));
        let devices: Vec<DeviceId> = std::iter::once(device).chain(below).collect();
        devices.into_iter().map(|device| self.pcie(host, device, up)).collect()
    }

    fn socket(&self, host: HostId, device: Option<DeviceId>) -> SocketId {
        let tree = &self.site.hosts[host.0];
        device.map_or(SocketId(0), |device| ancestors(tree, tree.devices[device.0].parent).1)
    }

    /// The links from one socket to another, which all transfers of this direction share.
    fn between_sockets(&mut self, host: HostId, from: SocketId, to: SocketId) -> Option<usize> {
        (from != to).then(|| {
            self.shared(Key::Sockets { host: host.0, from: from.0, to: to.0 }, |site, p| {
                let host = &site.hosts[host.0];
                let rate = socket_rate(p, &host.sockets[from.0].id).0;
                Shared::new(format!("{} socket{} to socket{}", host.name, from.0, to.0), rate)
            })
        })
    }

    /// Transfer between two devices of one host, or between a device and host memory.
    fn within_host(&mut self, host: HostId, from: Option<DeviceId>, to: Option<DeviceId>) -> Vec<usize> {
        let tree = &self.site.hosts[host.0];
        if let (Some(from), Some(to)) = (from, to) {
            let found =
                tree.card_links.iter().position(|link| link.ends.contains(&from) && link.ends.contains(&to));
            if let Some(link) = found {
                let forward = tree.card_links[link].ends[0] == from;
                return vec![self.shared(Key::CardLink { host: host.0, link, forward }, |site, _| {
                    let host = &site.hosts[host.0];
                    let link = &host.card_links[link];
                    let name = |device: DeviceId| host.devices[device.0].name.as_str();
                    let (from, to) = (name(from), name(to));
                    let name = format!("{}.{from} to {}.{to}, {}", host.name, host.name, link.what);
                    Shared::new(name, link.rate.0)
                })];
            }
        }
        let mut all = Vec::new();
        if let Some(from) = from {
            all.extend(self.climb(host, from, to, true));
        }
        if let Some(to) = to {
            all.extend(self.climb(host, to, from, false));
        }
        let (first, second) = (self.socket(host, from.or(to)), self.socket(host, to.or(from)));
        match (from, to) {
            (Some(a), Some(b)) => {
                all.extend(self.between_sockets(host, first, second));
                let key = Key::Peer { host: host.0, from: a.0, to: b.0 };
                all.push(self.shared(key, |site, p| {
                    let host = &site.hosts[host.0];
                    let (from, to) = (&host.devices[a.0], &host.devices[b.0]);
                    // Cards write to each other; an adapter reads what it sends.
                    let is_read = to.kind == DeviceKind::Adapter;
                    let rate = match peer_route(p, host, from, to) {
                        PeerRoute::RootComplex { read, .. } if is_read => read.0,
                        PeerRoute::RootComplex { write, .. } => write.0,
                        PeerRoute::Switch { .. } => f64::INFINITY,
                    };
                    let sockets = if first == second { "" } else { " of two sockets" };
                    let name = format!("{} root ports{sockets}, {} to {}", host.name, from.name, to.name);
                    Shared { line_rate: f64::INFINITY, ..Shared::new(name, rate) }
                }));
            }
            _ => all.push(self.memory(host, first)),
        }
        all
    }

    /// The way between a place and the root port of memory behind a CXL link: a card's, or that to host memory.
    fn beside_cxl(&mut self, place: Place, card: Option<DeviceId>, is_source: bool) -> Vec<usize> {
        match card {
            Some(card) => self.climb(place.host, card, None, is_source),
            None if place.device.is_none() => vec![self.memory(place.host, SocketId(0))],
            None => Vec::new(),
        }
    }

    /// A place's own memory or disk, and the way between an adapter and it.
    fn end(&mut self, place: Place, adapter: DeviceId, source: bool) -> Result<Vec<usize>, PathError> {
        if self.is_cxl(place) {
            let mut all = self.climb(place.host, adapter, None, !source);
            all.extend(self.media(place, source)?);
            return Ok(all);
        }
        let (from, to) = match self.card(place) {
            Some(card) if source => (Some(card), Some(adapter)),
            Some(card) => (Some(adapter), Some(card)),
            None if source => (None, Some(adapter)),
            None => (Some(adapter), None),
        };
        let mut all = self.within_host(place.host, from, to);
        all.extend(self.media(place, source)?);
        Ok(all)
    }

    /// A disk with its way to host memory, the memory of a card, or memory behind a CXL link with this link.
    fn media(&mut self, place: Place, source: bool) -> Result<Vec<usize>, PathError> {
        let Some(device) = place.device else { return Ok(Vec::new()) };
        if self.is_disk(place) {
            let (from, to) = if source { (Some(device), None) } else { (None, Some(device)) };
            let mut all = self.within_host(place.host, from, to);
            all.push(self.disk(place.host, device, source)?);
            all.extend(self.command_queue(place.host, device, source)?);
            return Ok(all);
        }
        let found = &self.site.hosts[place.host.0];
        if let DeviceKind::CxlMemory(memory) = &found.devices[device.0].kind {
            let timing = cxl_timing(self.p, found, &found.devices[device.0], memory)?;
            let name = format!("{}.{}", found.name, found.devices[device.0].name);
            let what = if source { "CXL reads" } else { "CXL writes" };
            // The link of each switch is shared by all memory below it.
            let above = ancestors(found, found.devices[device.0].parent).0;
            let ends = std::iter::once(device).chain(above);
            let mut all = Vec::new();
            for (end, hop) in ends.zip(timing.hops.iter().rev()) {
                let key = Key::Cxl { host: place.host.0, device: end.0, is_write: !source };
                all.push(self.shared(key, |_, _| {
                    let rate = |efficiency: f64| cxl::payload_rate(&hop.link, efficiency, !source).0;
                    let of = if hop.switch.is_empty() { "" } else { " uplink" };
                    let name = format!("{}.{}{of}, {what}", found.name, found.devices[end.0].name);
                    Shared { name, capacity: rate(timing.efficiency), line_rate: rate(1.0) }
                }));
            }
            let key = Key::CxlMemory { host: place.host.0, device: device.0 };
            all.push(self.shared(key, |_, _| {
                let name = format!("{name} memory");
                Shared { line_rate: f64::INFINITY, ..Shared::new(name, timing.memory_rate.0) }
            }));
            return Ok(all);
        }
        let key = Key::CardMemory { host: place.host.0, device: device.0 };
        Ok(vec![self.shared(key, |site, p| {
            let host = &site.hosts[place.host.0];
            let card = &host.devices[device.0];
            let DeviceKind::Card(memory) = &card.kind else {
                return Shared::new(String::new(), f64::INFINITY);
            };
            let rate = memory.as_ref().map_or(f64::INFINITY, |memory| {
                f64::from(memory.channels)
                    * memory.clock
                    * f64::from(memory.width)
                    * p.get("hbm.port.efficiency")
            });
            let name = format!("{}.{} memory", host.name, card.name);
            Shared { line_rate: f64::INFINITY, ..Shared::new(name, rate) }
        })])
    }

    fn network(&mut self, route: &Route) -> Vec<usize> {
        let one = |hop: &crate::path::route::RouteLink| {
            (Key::Network { link: hop.link, forward: hop.forward }, *hop)
        };
        let keys: Vec<_> = route.links.iter().map(one).collect();
        let share = match keys.first().map(|(_, hop)| hop.source(self.site)) {
            Some(millstream_site::validate::LinkEnd::Adapter(host, device)) => {
                fact(self.p, &self.site.hosts[host.0].devices[device.0].id, "connectx", "link.efficiency")
            }
            _ => 1.0,
        };
        let keys = keys.into_iter().map(|(key, hop)| {
            let index = self.shared(key, |site, _| {
                let link = &site.links[hop.link];
                let headers = match link.protocol {
                    Protocol::InfiniBand => IB_HEADERS,
                    Protocol::RoceV2 => ROCE_V2_HEADERS,
                };
                let payload = f64::from(link.mtu.0) / f64::from(link.mtu.0 + headers);
                let ends = [hop.source(site), hop.target(site)].map(|end| link_end_name(site, end));
                let line_rate = link.rate.0 * payload;
                let name = format!("{} to {}", ends[0], ends[1]);
                Shared { name, capacity: line_rate * share, line_rate }
            });
            // Other adapters use the link as well: it carries what the best of them sends.
            self.capacities[index] = self.capacities[index].max(self.line_rates[index] * share);
            index
        });
        keys.collect()
    }

    /// Resources of a flow on each of its routes.
    pub(super) fn routes(
        &mut self,
        network: &Network<'_>,
        flow: &Flow,
        routing: Routing,
    ) -> Result<FlowRoutes, PathError> {
        let (client, server) = (locate(self.site, &flow.client)?, locate(self.site, &flow.server)?);
        self.block = u64::from(flow.size);
        // Data of a READ comes from the server.
        let (from, to) = if flow.verb == Verb::Read { (server, client) } else { (client, server) };
        if from.host == to.host {
            if from == to {
                return Err(PathError::SamePlace(flow.client.clone()));
            }
            let staged = self.is_disk(from) || self.is_disk(to);
            let cards = (self.card(from), self.card(to));
            let mut all = match cards {
                // Through host memory: a card's side, and the disks' below.
                (None, None) if staged => Vec::new(),
                (card, None) if self.is_cxl(to) => self.beside_cxl(from, card, true),
                (None, card) if self.is_cxl(from) => self.beside_cxl(to, card, false),
                _ => self.within_host(from.host, cards.0, cards.1),
            };
            all.extend(self.media(from, true)?);
            all.extend(self.media(to, false)?);
            return Ok(FlowRoutes { routes: vec![all], ends: None });
        }
        // Disks transfer from and to host memory.
        let name = |place: Place, given: &str| {
            if self.is_disk(place) { self.site.hosts[place.host.0].name.clone() } else { given.to_owned() }
        };
        let ends = Some((name(client, &flow.client), name(server, &flow.server)));
        if let Some(torus) = torus_path(self.site, from.host, to.host) {
            let mut all = self.end(from, torus.adapters[0], true)?;
            for hop in &torus.hops[0] {
                let key = Key::Torus {
                    torus: torus.torus,
                    node: hop.node,
                    dimension: hop.dimension,
                    positive: hop.positive,
                };
                all.push(self.shared(key, |site, p| {
                    let host = &site.hosts[site.tori[torus.torus].nodes[hop.node].0.0].name;
                    let share = p.get("apenet.payload.efficiency") * p.get("apenet.protocol.efficiency");
                    let direction = if hop.positive { '+' } else { '-' };
                    let name = format!("{host} link {direction}{}", ["x", "y", "z"][hop.dimension]);
                    Shared { name, capacity: torus.link.rate.0 * share, line_rate: torus.link.rate.0 }
                }));
            }
            all.extend(self.end(to, torus.adapters[1], false)?);
            return Ok(FlowRoutes { routes: vec![all], ends });
        }
        let routes = match routing {
            Routing::Deterministic => network.route(from.host, to.host).into_iter().collect(),
            Routing::Adaptive => network.all_routes(from.host, to.host),
        };
        if routes.is_empty() {
            let failed = self.site.links.iter().filter(|link| link.failed).count();
            let (client, server) = (flow.client.clone(), flow.server.clone());
            return Err(PathError::NoLink { client, server, failed });
        }
        let mut all = Vec::new();
        for route in &routes {
            let mut resources = self.end(from, route.adapters[0], true)?;
            resources.extend(self.network(route));
            resources.extend(self.end(to, route.adapters[1], false)?);
            all.push(resources);
        }
        Ok(FlowRoutes { routes: all, ends })
    }
}
