//! From names to indices: what a file says, once it is sure that it can be so.

use crate::error::SiteError;
use crate::network_card::{self, NetworkCard};
use crate::schema::{self, Memory, Mtu, PcieLink, SiteFile, data_rate};
use crate::unit::{Length, Rate, Size, Time};
use std::collections::HashMap;
use std::ops::Range;
use toml::Spanned;

/// A host, by its place in [`Site::hosts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub usize);

/// A socket, by its place in [`Host::sockets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub usize);

/// A device of a PCIe tree, by its place in [`Host::devices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub usize);

/// What is above a device in its PCIe tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// A root port of a socket.
    Socket(SocketId),
    /// A port of a switch.
    Switch(DeviceId),
}

/// What a device is.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceKind {
    /// A PCIe switch and its latency from port to port.
    Switch(Option<Time>),
    /// A network adapter.
    Adapter,
    /// An accelerator card and its memory.
    Card(Option<CardMemory>),
}

/// Memory of a card.
#[derive(Clone, Debug, PartialEq)]
pub struct CardMemory {
    /// For example `HBM2`.
    pub kind: String,
    /// All of it.
    pub size: Size,
    /// Independent channels.
    pub channels: u32,
    /// One channel's port, in bytes.
    pub width: u32,
    /// That port's clock, in hertz.
    pub clock: f64,
}

/// A device of a PCIe tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its name within the host.
    pub name: String,
    /// The part as sold.
    pub model: String,
    /// What it is.
    pub kind: DeviceKind,
    /// What is above it.
    pub parent: Parent,
    /// The connection to its parent.
    pub pcie: PcieLink,
}

/// A processor socket.
#[derive(Clone, Debug, PartialEq)]
pub struct Socket {
    /// The processor as sold.
    pub processor: String,
    /// Cores.
    pub cores: u32,
    /// Nominal clock, in hertz.
    pub clock: f64,
    /// Memory of this socket.
    pub memory: Option<Size>,
    /// Bandwidth of that memory.
    pub memory_bandwidth: Option<Rate>,
}

/// A host with its PCIe trees.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// Its name, numbered where there are several.
    pub name: String,
    /// The name in the file.
    pub kind: String,
    /// Sockets.
    pub sockets: Vec<Socket>,
    /// Devices; parents before their children.
    pub devices: Vec<Device>,
}

/// One end of a network link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkEnd {
    /// An adapter.
    Adapter(HostId, DeviceId),
    /// A switch, by its place in [`Site::switches`].
    Switch(usize),
}

/// A network link, good for its rate in each direction.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkLink {
    /// One end.
    pub from: LinkEnd,
    /// The other.
    pub to: LinkEnd,
    /// After encoding, in bytes a second.
    pub rate: Rate,
    /// Largest payload of a packet.
    pub mtu: Mtu,
    /// Cable.
    pub length: Option<Length>,
    /// Receive buffer that credits stand for, where the file says.
    pub buffer: Option<Size>,
    /// Dimension of the torus that the link belongs to.
    pub dimension: Option<u8>,
}

/// A network switch.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkSwitch {
    /// Its name.
    pub name: String,
    /// The part as sold.
    pub model: String,
    /// Its ports.
    pub ports: u32,
    /// Latency from port to port.
    pub latency: Time,
}

/// A torus.
#[derive(Clone, Debug, PartialEq)]
pub struct Torus {
    /// Its name.
    pub name: String,
    /// Nodes along each dimension.
    pub dimensions: Vec<u32>,
    /// Adapters, first dimension fastest.
    pub nodes: Vec<(HostId, DeviceId)>,
    /// Line rate of one link's direction before encoding is what the file says; this is after it.
    pub rate: Rate,
}

/// A site in which everything that is named exists.
#[derive(Clone, Debug, PartialEq)]
pub struct Site {
    /// What people call it.
    pub name: String,
    /// A sentence about it.
    pub description: String,
    /// Hosts, one by one.
    pub hosts: Vec<Host>,
    /// Network switches.
    pub switches: Vec<NetworkSwitch>,
    /// Links, those of tori included.
    pub links: Vec<NetworkLink>,
    /// Tori.
    pub tori: Vec<Torus>,
    /// Cards that nodes reach over the network.
    pub cards: Vec<NetworkCard>,
}

impl Site {
    /// The host and device that `host.device` names.
    #[must_use]
    pub fn device(&self, path: &str) -> Option<(HostId, DeviceId)> {
        let (host, device) = path.split_once('.')?;
        let host = self.hosts.iter().position(|h| h.name == host)?;
        let device = self.hosts[host].devices.iter().position(|d| d.name == device)?;
        Some((HostId(host), DeviceId(device)))
    }
}

struct Check<'a> {
    file: &'a str,
    text: &'a str,
}

impl Check<'_> {
    fn fail<T>(&self, span: &Range<usize>, message: impl Into<String>) -> Result<T, SiteError> {
        Err(SiteError::at(self.file, self.text, span, message.into()))
    }

    fn host(&self, host: &Spanned<schema::Host>) -> Result<Host, SiteError> {
        let at = host.span();
        let host = host.get_ref();
        let name = host.name.get_ref();
        self.name("host.name", &host.name)?;
        if host.socket.is_empty() && !host.adapter.iter().chain(&host.card).any(|d| d.get_ref().standalone) {
            return self.fail(&at, format!("host {name:?} has no socket; add [[host.socket]]"));
        }
        let sockets: Vec<Socket> = host
            .socket
            .iter()
            .map(|socket| {
                let socket = socket.get_ref();
                Socket {
                    processor: socket.processor.clone(),
                    cores: socket.cores.get(),
                    clock: socket.clock.0,
                    memory: socket.memory,
                    memory_bandwidth: socket.memory_bandwidth,
                }
            })
            .collect();
        let devices = self.tree(host, sockets.len())?;
        Ok(Host { name: name.clone(), kind: name.clone(), sockets, devices })
    }

    fn name(&self, field: &str, name: &Spanned<String>) -> Result<(), SiteError> {
        let text = name.get_ref();
        let good =
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        if good {
            Ok(())
        } else {
            self.fail(&name.span(), format!("{field} {text:?}: letters, digits, - and _"))
        }
    }

    /// The host's devices, parents first, or what makes that impossible.
    fn tree(&self, host: &schema::Host, sockets: usize) -> Result<Vec<Device>, SiteError> {
        #[derive(Clone, Copy, PartialEq)]
        enum Kind {
            Switch,
            Adapter,
            Card,
        }
        let name = host.name.get_ref();
        let all: Vec<(Kind, &schema::PcieDevice)> =
            (host.pcie_switch.iter().map(|d| (Kind::Switch, d.get_ref())))
                .chain(host.adapter.iter().map(|d| (Kind::Adapter, d.get_ref())))
                .chain(host.card.iter().map(|d| (Kind::Card, d.get_ref())))
                .collect();
        let mut index: HashMap<&str, usize> = HashMap::new();
        for (i, (_, device)) in all.iter().enumerate() {
            self.name("device name", &device.name)?;
            let device_name = device.name.get_ref();
            if index.insert(device_name, i).is_some() {
                return self.fail(
                    &device.name.span(),
                    format!("host {name:?} has two devices named {device_name:?}"),
                );
            }
        }
        let socket_of = |parent: &str| {
            parent.strip_prefix("socket").and_then(|n| n.parse::<usize>().ok()).filter(|&n| n < sockets)
        };
        let mut placed: Vec<Device> = Vec::with_capacity(all.len());
        let mut place = vec![None; all.len()];
        for start in 0..all.len() {
            // Upwards to what is placed already; then down again.
            let mut chain = Vec::new();
            let mut here = start;
            while place[here].is_none() {
                let (_, device) = all[here];
                let parent = device.parent.get_ref().as_str();
                if chain.contains(&here) {
                    let names: Vec<&str> =
                        chain.iter().chain([&here]).map(|&i| all[i].1.name.get_ref().as_str()).collect();
                    return self.fail(
                        &device.parent.span(),
                        format!("PCIe tree of host {name:?} has a cycle: {}", names.join(" below ")),
                    );
                }
                chain.push(here);
                if socket_of(parent).is_some() {
                    break;
                }
                match index.get(parent) {
                    Some(&above) if all[above].0 == Kind::Switch => here = above,
                    Some(_) => {
                        return self.fail(
                            &device.parent.span(),
                            format!("parent {parent:?} of {:?} is no PCIe switch", device.name.get_ref()),
                        );
                    }
                    None if device.standalone && parent == "none" => break,
                    None => {
                        return self.fail(
                            &device.parent.span(),
                            format!(
                                "parent {parent:?} of {:?} is no socket and no PCIe switch of host {name:?}",
                                device.name.get_ref()
                            ),
                        );
                    }
                }
            }
            for i in chain.into_iter().rev() {
                let (kind, device) = all[i];
                let parent = device.parent.get_ref().as_str();
                let parent = match socket_of(parent) {
                    Some(socket) => Parent::Socket(SocketId(socket)),
                    None => match index.get(parent).and_then(|&above| place[above]) {
                        Some(above) => Parent::Switch(above),
                        None => Parent::Socket(SocketId(0)),
                    },
                };
                if device.pcie.max_read_request < device.pcie.max_payload {
                    return self.fail(
                        &device.name.span(),
                        format!(
                            "{:?}: max-read-request {} B is less than max-payload {} B",
                            device.name.get_ref(),
                            device.pcie.max_read_request.0,
                            device.pcie.max_payload.0
                        ),
                    );
                }
                if device.memory.is_some() && kind != Kind::Card {
                    return self.fail(&device.name.span(), "memory belongs to cards only");
                }
                let kind = match kind {
                    Kind::Switch => DeviceKind::Switch(device.latency),
                    Kind::Adapter => DeviceKind::Adapter,
                    Kind::Card => DeviceKind::Card(device.memory.as_ref().map(card_memory)),
                };
                place[i] = Some(DeviceId(placed.len()));
                placed.push(Device {
                    name: device.name.get_ref().clone(),
                    model: device.model.clone(),
                    kind,
                    parent,
                    pcie: device.pcie,
                });
            }
        }
        Ok(placed)
    }

    /// The ends that a name in a link stands for.
    fn ends(&self, field: &str, name: &Spanned<String>, site: &Site) -> Result<Vec<LinkEnd>, SiteError> {
        let text = name.get_ref();
        if let Some(switch) = site.switches.iter().position(|s| s.name == *text) {
            return Ok(vec![LinkEnd::Switch(switch)]);
        }
        let Some((host, device)) = text.split_once('.') else {
            return self.fail(&name.span(), format!("{field} {text:?} is no switch and no host.adapter"));
        };
        let kind = host.strip_suffix('*');
        let ends: Vec<LinkEnd> = (site.hosts.iter().enumerate())
            .filter(|(_, h)| kind.map_or(h.name == host, |kind| h.kind == kind))
            .filter_map(|(i, h)| {
                let d = h.devices.iter().position(|d| d.name == device && d.kind == DeviceKind::Adapter)?;
                Some(LinkEnd::Adapter(HostId(i), DeviceId(d)))
            })
            .collect();
        if ends.is_empty() {
            return self.fail(&name.span(), format!("{field} {text:?}: the site has no such adapter"));
        }
        Ok(ends)
    }

    fn link(&self, link: &Spanned<schema::Link>, site: &Site) -> Result<Vec<NetworkLink>, SiteError> {
        let at = link.span();
        let link = link.get_ref();
        let from = self.ends("link.from", &link.from, site)?;
        let to = self.ends("link.to", &link.to, site)?;
        let pairs: Vec<(LinkEnd, LinkEnd)> = match (from.len(), to.len()) {
            (a, b) if a == b => from.into_iter().zip(to).collect(),
            (_, 1) => from.into_iter().map(|end| (end, to[0])).collect(),
            (1, _) => to.into_iter().map(|end| (from[0], end)).collect(),
            (a, b) => {
                return self.fail(&at, format!("link from {a} ends to {b}: as many on both sides, or one"));
            }
        };
        if let Some((end, _)) = pairs.iter().find(|(a, b)| a == b) {
            return self.fail(&at, format!("link from {} to itself", link_end_name(site, *end)));
        }
        let rate = data_rate(link.rate, link.encoding, link.lanes);
        Ok(pairs
            .into_iter()
            .map(|(from, to)| NetworkLink {
                from,
                to,
                rate,
                mtu: link.mtu,
                length: link.length,
                buffer: None,
                dimension: None,
            })
            .collect())
    }

    fn torus(
        &self,
        torus: &Spanned<schema::Torus>,
        site: &Site,
    ) -> Result<(Torus, Vec<NetworkLink>), SiteError> {
        let torus = torus.get_ref();
        let dimensions: Vec<u32> = torus.dimensions.get_ref().iter().map(|d| d.get()).collect();
        if dimensions.is_empty() || dimensions.len() > 3 {
            return self.fail(&torus.dimensions.span(), "a torus has one to three dimensions");
        }
        let nodes: Vec<(HostId, DeviceId)> = (self
            .ends("torus.adapters", &torus.adapters, site)?
            .into_iter())
        .filter_map(|end| if let LinkEnd::Adapter(host, device) = end { Some((host, device)) } else { None })
        .collect();
        let product: u64 = dimensions.iter().map(|&d| u64::from(d)).product();
        if nodes.len() as u64 != product {
            return self.fail(
                &torus.dimensions.span(),
                format!(
                    "dimensions {dimensions:?} need {product} adapters, {:?} are {}",
                    torus.adapters.get_ref(),
                    nodes.len()
                ),
            );
        }
        let rate = data_rate(torus.rate, torus.encoding, torus.lanes);
        if torus.buffer.0 < f64::from(torus.mtu.0) * 2.0 {
            return self.fail(
                &torus.name.span(),
                format!(
                    "torus {:?}: buffer of {} B must hold two packets of {} B",
                    torus.name.get_ref(),
                    torus.buffer.0,
                    torus.mtu.0
                ),
            );
        }
        let mut wires = Vec::new();
        let mut stride = 1usize;
        for (d, &length) in dimensions.iter().enumerate() {
            let length = length as usize;
            for node in 0..nodes.len() {
                let place = node / stride % length;
                let next = node - place * stride + (place + 1) % length * stride;
                // A ring of two has one cable between its nodes, a ring of one none.
                if next == node || (length == 2 && place == 1) {
                    continue;
                }
                wires.push(NetworkLink {
                    from: LinkEnd::Adapter(nodes[node].0, nodes[node].1),
                    to: LinkEnd::Adapter(nodes[next].0, nodes[next].1),
                    rate,
                    mtu: torus.mtu,
                    length: None,
                    buffer: Some(torus.buffer),
                    dimension: Some(d as u8),
                });
            }
            stride *= length;
        }
        Ok((Torus { name: torus.name.get_ref().clone(), dimensions, nodes, rate }, wires))
    }
}

fn card_memory(memory: &Memory) -> CardMemory {
    CardMemory {
        kind: memory.kind.clone(),
        size: memory.size,
        channels: memory.channels.get(),
        width: memory.width.0 / 8,
        clock: memory.clock.0,
    }
}

/// What an end is called in messages and pictures.
#[must_use]
pub fn link_end_name(site: &Site, end: LinkEnd) -> String {
    match end {
        LinkEnd::Switch(switch) => site.switches[switch].name.clone(),
        LinkEnd::Adapter(host, device) => {
            let host = &site.hosts[host.0];
            format!("{}.{}", host.name, host.devices[device.0].name)
        }
    }
}

/// Checks a file that is well-formed by itself.
///
/// # Errors
/// [`SiteError`] says in which line what cannot be.
pub fn validate(name: &str, text: &str, file: &SiteFile) -> Result<Site, SiteError> {
    let check = Check { file: name, text };
    let mut site = Site {
        name: file.name.clone(),
        description: file.description.clone(),
        hosts: Vec::new(),
        switches: Vec::new(),
        links: Vec::new(),
        tori: Vec::new(),
        cards: Vec::new(),
    };
    for host in &file.host {
        let one = check.host(host)?;
        match host.get_ref().count {
            None => site.hosts.push(one),
            Some(count) if count.get() > 100_000 => {
                return check.fail(&host.span(), format!("count {count}: at most 100000 hosts"));
            }
            Some(count) => site
                .hosts
                .extend((0..count.get()).map(|i| Host { name: format!("{}{i}", one.kind), ..one.clone() })),
        }
    }
    let mut names: HashMap<&str, ()> = HashMap::new();
    for host in &site.hosts {
        if names.insert(&host.name, ()).is_some() {
            let at =
                file.host.iter().rev().find(|h| host.name.starts_with(h.get_ref().name.get_ref().as_str()));
            let span = at.map_or(0..0, |h| h.get_ref().name.span());
            return check.fail(&span, format!("two hosts are named {:?}", host.name));
        }
    }
    for switch in &file.switch {
        let switch = switch.get_ref();
        check.name("switch.name", &switch.name)?;
        if site.switches.iter().any(|s| s.name == *switch.name.get_ref()) {
            return check
                .fail(&switch.name.span(), format!("two switches are named {:?}", switch.name.get_ref()));
        }
        site.switches.push(NetworkSwitch {
            name: switch.name.get_ref().clone(),
            model: switch.model.clone(),
            ports: switch.ports.get(),
            latency: switch.latency,
        });
    }
    let mut used = vec![0u32; site.switches.len()];
    for link in &file.link {
        let wires = check.link(link, &site)?;
        for end in wires.iter().flat_map(|wire| [wire.from, wire.to]) {
            if let LinkEnd::Switch(switch) = end {
                used[switch] += 1;
                if used[switch] > site.switches[switch].ports {
                    let network = &site.switches[switch];
                    return check.fail(
                        &link.span(),
                        format!("switch {:?} has {} ports, and more links", network.name, network.ports),
                    );
                }
            }
        }
        site.links.extend(wires);
    }
    for torus in &file.torus {
        let (torus, wires) = check.torus(torus, &site)?;
        site.tori.push(torus);
        site.links.extend(wires);
    }
    for entry in &file.card {
        check.name("card.name", &entry.name)?;
        let fail = |at: &Spanned<String>, message| SiteError::at(name, text, &at.span(), message);
        site.cards.push(network_card::validate(entry, &site.cards, fail)?);
    }
    Ok(site)
}
