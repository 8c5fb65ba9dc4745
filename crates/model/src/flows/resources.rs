//! What concurrent flows share: directions of links, PCIe ports, memory, disks.

use super::Routing;
use crate::component::pcie;
use crate::engine::BytesPerSecond;
use crate::explain::Flow;
use crate::parameters::Parameters;
use crate::path::route::{Network, Route};
use crate::path::{
    IB_HEADERS, PathError, PeerRoute, ROCE_V2_HEADERS, Verb, ancestors, fact, negotiated_link, peer_route,
    torus_path,
};
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
    Memory { host: usize, socket: usize },
    CardMemory { host: usize, device: usize },
    CardLink { host: usize, link: usize, forward: bool },
    Disk { host: usize, device: usize, read: bool },
}

/// Where a flow starts or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    host: HostId,
    device: Option<DeviceId>,
}

/// Resources of the flows so far.
pub(super) struct Resources<'a> {
    site: &'a Site,
    p: &'a Parameters,
    index: HashMap<Key, usize>,
    pub(super) capacities: Vec<f64>,
    pub(super) names: Vec<String>,
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
        Resources { site, p, index: HashMap::new(), capacities: Vec::new(), names: Vec::new() }
    }

    /// Adds a resource of one flow.
    pub(super) fn add(&mut self, name: String, capacity: f64) -> usize {
        self.capacities.push(capacity);
        self.names.push(name);
        self.names.len() - 1
    }

    fn shared(&mut self, key: Key, describe: impl FnOnce(&Site, &Parameters) -> (String, f64)) -> usize {
        if let Some(&known) = self.index.get(&key) {
            return known;
        }
        let (name, capacity) = describe(self.site, self.p);
        let index = self.add(name, capacity);
        self.index.insert(key, index);
        index
    }

    fn locate(&self, name: &str) -> Result<Place, PathError> {
        if let Some(host) = self.site.hosts.iter().position(|host| host.name == name) {
            return Ok(Place { host: HostId(host), device: None });
        }
        let found = self.site.device(name).filter(|(host, device)| {
            let kind = &self.site.hosts[host.0].devices[device.0].kind;
            matches!(kind, DeviceKind::Card(_) | DeviceKind::Ssd)
        });
        let (host, device) = found.ok_or_else(|| PathError::Unknown(name.to_owned()))?;
        Ok(Place { host, device: Some(device) })
    }

    fn is_disk(&self, place: Place) -> bool {
        place
            .device
            .is_some_and(|device| self.site.hosts[place.host.0].devices[device.0].kind == DeviceKind::Ssd)
    }

    /// The link of a device to its parent, in one direction.
    fn pcie(&mut self, host: HostId, device: DeviceId, up: bool) -> usize {
        self.shared(Key::Pcie { host: host.0, device: device.0, up }, |site, p| {
            let host = &site.hosts[host.0];
            let device = &host.devices[device.0];
            let link = negotiated_link(host, device);
            let raw = pcie::raw_rate(link.generation.0, link.lanes.0).0;
            let share = p.device(&device.id, "pcie.efficiency").unwrap_or_else(|| p.get("pcie.efficiency"));
            let payload = u64::from(link.max_payload.0);
            let rate = pcie::write_ceiling(BytesPerSecond(raw * share), payload, payload);
            let direction = if up { "upstream" } else { "downstream" };
            let what = if matches!(device.kind, DeviceKind::Switch(_)) { " uplink" } else { "" };
            (format!("{}.{}{what}, PCIe {direction}", host.name, device.name), rate.0)
        })
    }

    fn memory(&mut self, host: HostId, socket: SocketId) -> usize {
        self.shared(Key::Memory { host: host.0, socket: socket.0 }, |site, _| {
            let host = &site.hosts[host.0];
            let bandwidth = host.sockets.get(socket.0).and_then(|socket| socket.memory_bandwidth);
            let name = format!("{}.socket{} memory", host.name, socket.0);
            (name, bandwidth.map_or(f64::INFINITY, |rate| rate.0))
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
            (format!("{}.{}, {what}", host.name, host.devices[device.0].name), rate * 1e9)
        }))
    }

    /// Links from a device up to the root complex, or below the switches of another device.
    fn climb(&mut self, host: HostId, device: DeviceId, other: Option<DeviceId>, up: bool) -> Vec<usize> {
        let tree = &self.site.hosts[host.0];
        let above = |device: DeviceId| ancestors(tree, tree.devices[device.0].parent).0;
        let beside = other.map(above).unwrap_or_default();
        let below = above(device).into_iter().take_while(|switch| !beside.contains(switch));
        let devices: Vec<DeviceId> = std::iter::once(device).chain(below).collect();
        devices.into_iter().map(|device| self.pcie(host, device, up)).collect()
    }

    fn socket(&self, host: HostId, device: Option<DeviceId>) -> SocketId {
        let tree = &self.site.hosts[host.0];
        device.map_or(SocketId(0), |device| ancestors(tree, tree.devices[device.0].parent).1)
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
                    (format!("{}.{from} to {}.{to}, {}", host.name, host.name, link.what), link.rate.0)
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
                let key = Key::Peer { host: host.0, from: a.0, to: b.0 };
                all.push(self.shared(key, |site, p| {
                    let host = &site.hosts[host.0];
                    let (from, to) = (&host.devices[a.0], &host.devices[b.0]);
                    let rate = match peer_route(p, host, from, to) {
                        PeerRoute::RootComplex { write, .. } => write.0,
                        PeerRoute::Switch { .. } => f64::INFINITY,
                    };
                    let sockets = if first == second { "" } else { " of two sockets" };
                    (format!("{} root ports{sockets}, {} to {}", host.name, from.name, to.name), rate)
                }));
            }
            _ => all.push(self.memory(host, first)),
        }
        all
    }

    /// A place's own memory or disk, and the way between an adapter and it.
    fn end(&mut self, place: Place, adapter: DeviceId, source: bool) -> Result<Vec<usize>, PathError> {
        let (from, to) = match place.device.filter(|_| !self.is_disk(place)) {
            Some(card) if source => (Some(card), Some(adapter)),
            Some(card) => (Some(adapter), Some(card)),
            None if source => (None, Some(adapter)),
            None => (Some(adapter), None),
        };
        let mut all = self.within_host(place.host, from, to);
        all.extend(self.media(place, source)?);
        Ok(all)
    }

    /// A disk with its way to host memory, or the memory of a card.
    fn media(&mut self, place: Place, source: bool) -> Result<Vec<usize>, PathError> {
        let Some(device) = place.device else { return Ok(Vec::new()) };
        if self.is_disk(place) {
            let (from, to) = if source { (Some(device), None) } else { (None, Some(device)) };
            let mut all = self.within_host(place.host, from, to);
            all.push(self.disk(place.host, device, source)?);
            return Ok(all);
        }
        let key = Key::CardMemory { host: place.host.0, device: device.0 };
        Ok(vec![self.shared(key, |site, p| {
            let host = &site.hosts[place.host.0];
            let card = &host.devices[device.0];
            let DeviceKind::Card(memory) = &card.kind else { return (String::new(), f64::INFINITY) };
            let rate = memory.as_ref().map_or(f64::INFINITY, |memory| {
                f64::from(memory.channels)
                    * memory.clock
                    * f64::from(memory.width)
                    * p.get("hbm.port.efficiency")
            });
            (format!("{}.{} memory", host.name, card.name), rate)
        })])
    }

    fn network(&mut self, route: &Route) -> Vec<usize> {
        let one = |hop: &crate::path::route::RouteLink| {
            (Key::Network { link: hop.link, forward: hop.forward }, *hop)
        };
        let keys: Vec<_> = route.links.iter().map(one).collect();
        let first = keys.first().map(|(_, hop)| hop.source(self.site));
        let keys = keys.into_iter().map(|(key, hop)| {
            self.shared(key, |site, p| {
                let link = &site.links[hop.link];
                let headers = match link.protocol {
                    Protocol::InfiniBand => IB_HEADERS,
                    Protocol::RoceV2 => ROCE_V2_HEADERS,
                };
                let payload = f64::from(link.mtu.0) / f64::from(link.mtu.0 + headers);
                let share = match first {
                    Some(millstream_site::validate::LinkEnd::Adapter(host, device)) => {
                        fact(p, &site.hosts[host.0].devices[device.0].id, "connectx", "link.efficiency")
                    }
                    _ => 1.0,
                };
                let ends = [hop.source(site), hop.target(site)].map(|end| link_end_name(site, end));
                (format!("{} to {}", ends[0], ends[1]), link.rate.0 * payload * share)
            })
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
        let (client, server) = (self.locate(&flow.client)?, self.locate(&flow.server)?);
        // Data of a READ comes from the server.
        let (from, to) = if flow.verb == Verb::Read { (server, client) } else { (client, server) };
        if from.host == to.host {
            if from == to {
                return Err(PathError::SamePlace(flow.client.clone()));
            }
            let staged = self.is_disk(from) || self.is_disk(to);
            let card = |place: Place, this: &Self| place.device.filter(|_| !this.is_disk(place));
            let mut all = if staged {
                // Through host memory: a card's side, and the disks' below.
                match (card(from, self), card(to, self)) {
                    (None, None) => Vec::new(),
                    (from_card, to_card) => self.within_host(from.host, from_card, to_card),
                }
            } else {
                self.within_host(from.host, from.device, to.device)
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
                    (name, torus.link.rate.0 * share)
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
