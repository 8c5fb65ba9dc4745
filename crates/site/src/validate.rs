//! Resolves names to indices, and validates what the schema cannot.

use crate::cxl::{self, CxlMemory, CxlSwitch};
use crate::device::{DeviceModel, Kind as LibraryKind, Library};
use crate::disk;
use crate::error::SiteError;
use crate::event_builder::{self, EventBuilder};
use crate::fabric;
use crate::iommu::{self, Iommu};
use crate::lanes;
use crate::network_card::{self, NetworkCard};
use crate::schema::{self, Memory, Mtu, PcieLink, Protocol, Signalling, SiteFile, data_rate};
use millstream_quantity::{Bytes, BytesPerSecond, Metres, Seconds};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use toml::Spanned;

/// Index of a host in [`Site::hosts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub usize);

/// Index of a socket in [`Host::sockets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub usize);

/// Index of a device in [`Host::devices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub usize);

/// Parent of a device in its PCIe tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// A root port of a socket.
    Socket(SocketId),
    /// A downstream port of a PCIe or CXL switch.
    Switch(DeviceId),
}

/// Device type.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceKind {
    /// PCIe switch, with its port-to-port latency.
    Switch(Option<Seconds>),
    /// Network adapter.
    Adapter,
    /// Accelerator card, with its memory.
    Card(Option<CardMemory>),
    /// Solid-state disk.
    Ssd,
    /// Memory device behind a CXL link, which `pcie` describes, too.
    CxlMemory(CxlMemory),
    /// CXL switch; its upstream link is as that of CXL memory.
    CxlSwitch(CxlSwitch),
}

/// Memory of a card.
#[derive(Clone, Debug, PartialEq)]
pub struct CardMemory {
    /// Memory technology, for example `HBM2`.
    pub kind: String,
    /// Total size.
    pub size: Bytes,
    /// Number of channels.
    pub channels: u32,
    /// Port width of one channel in bytes.
    pub width: u32,
    /// Clock of that port in hertz.
    pub clock: f64,
}

/// A device of a PCIe tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Name within the host.
    pub name: String,
    /// Device model.
    pub model: String,
    /// Id of the device in the device library.
    pub id: String,
    /// Device type.
    pub kind: DeviceKind,
    /// Parent in the PCIe tree.
    pub parent: Parent,
    /// PCIe link to the parent.
    pub pcie: PcieLink,
    /// Whether it translates addresses by ATS.
    pub ats: bool,
    /// Commands outstanding on a disk; none: as many as it needs for its rates.
    pub queue_depth: Option<u32>,
    /// Bytes of a command by which a builder unit stores its events on a disk; none: it stores none there.
    pub write_block: Option<Bytes>,
}

/// A processor socket.
#[derive(Clone, Debug, PartialEq)]
pub struct Socket {
    /// Processor model.
    pub processor: String,
    /// Id of the processor in the device library.
    pub id: String,
    /// Number of cores.
    pub cores: u32,
    /// Nominal clock in hertz.
    pub clock: f64,
    /// Memory of the socket.
    pub memory: Option<Bytes>,
    /// Bandwidth of that memory.
    pub memory_bandwidth: Option<BytesPerSecond>,
}

/// A host with its PCIe trees.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// Name, with a number if the file has a count.
    pub name: String,
    /// Name in the file, common to all hosts of a count.
    pub group: String,
    /// Sockets.
    pub sockets: Vec<Socket>,
    /// IOMMU, if it is on.
    pub iommu: Option<Iommu>,
    /// Devices; parents precede their children.
    pub devices: Vec<Device>,
    /// Links between cards beside the PCIe tree.
    pub card_links: Vec<CardLink>,
}

/// Links between two cards.
#[derive(Clone, Debug, PartialEq)]
pub struct CardLink {
    /// The two cards.
    pub ends: [DeviceId; 2],
    /// Payload rate of one direction of all links together.
    pub rate: BytesPerSecond,
    /// What they are, for example `12 links NVLink3`.
    pub what: String,
}

/// One end of a network link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkEnd {
    /// A port of an adapter.
    Adapter(HostId, DeviceId),
    /// A port of a switch, by its index in [`Site::switches`].
    Switch(usize),
}

/// A full-duplex network link.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkLink {
    /// One end.
    pub from: LinkEnd,
    /// The other end.
    pub to: LinkEnd,
    /// Data rate per direction after line code, in bytes per second.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub mtu: Mtu,
    /// Cable length.
    pub length: Option<Metres>,
    /// Headers of its packets.
    pub protocol: Protocol,
    /// Receive buffer from which credits are issued, if the file has it.
    pub buffer: Option<Bytes>,
    /// Torus dimension of the link.
    pub dimension: Option<u8>,
    /// Share of packets that the link loses.
    pub loss: f64,
    /// Whether the link carries nothing.
    pub failed: bool,
}

/// A network switch.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkSwitch {
    /// Name of the switch.
    pub name: String,
    /// Switch model.
    pub model: String,
    /// Id of the switch in the device library; that of any switch without a model.
    pub id: String,
    /// Number of ports.
    pub ports: u32,
    /// Port-to-port latency.
    pub latency: Seconds,
    /// Fabric that the switch belongs to, by its index in [`Site::fabrics`].
    pub fabric: Option<usize>,
}

/// A fat tree or dragonfly.
#[derive(Clone, Debug, PartialEq)]
pub struct Fabric {
    /// Name of the fabric.
    pub name: String,
    /// What it is, in a few words.
    pub shape: String,
}

/// A torus.
#[derive(Clone, Debug, PartialEq)]
pub struct Torus {
    /// Name of the torus.
    pub name: String,
    /// Nodes per dimension.
    pub dimensions: Vec<u32>,
    /// Adapters; the first dimension varies fastest.
    pub nodes: Vec<(HostId, DeviceId)>,
    /// Where the nodes' processes listen; empty if the file does not say.
    pub addresses: Vec<String>,
    /// Data rate per link direction after line code.
    pub rate: BytesPerSecond,
}

/// A valid site: all names are resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Site {
    /// Name of the site.
    pub name: String,
    /// One sentence about the site.
    pub description: String,
    /// All hosts.
    pub hosts: Vec<Host>,
    /// Network switches.
    pub switches: Vec<NetworkSwitch>,
    /// All links, including those of tori.
    pub links: Vec<NetworkLink>,
    /// Tori.
    pub tori: Vec<Torus>,
    /// Fat trees and dragonflies; their switches and links are among those of the site.
    pub fabrics: Vec<Fabric>,
    /// Cards that nodes reach over the network.
    pub cards: Vec<NetworkCard>,
    /// Event builders.
    pub event_builders: Vec<EventBuilder>,
    /// Devices that the file defines, by id.
    pub devices: BTreeMap<String, DeviceModel>,
}

impl Site {
    /// Host and device of a path `host.device`.
    #[must_use]
    pub fn device(&self, path: &str) -> Option<(HostId, DeviceId)> {
        let (host, device) = path.split_once('.')?;
        let host = self.hosts.iter().position(|h| h.name == host)?;
        let device = self.hosts[host].devices.iter().position(|d| d.name == device)?;
        Some((HostId(host), DeviceId(device)))
    }
}

pub(crate) struct Validator<'a> {
    file: &'a str,
    text: &'a str,
    library: Library,
}

impl Validator<'_> {
    pub(crate) fn fail<T>(&self, span: &Range<usize>, message: impl Into<String>) -> Result<T, SiteError> {
        Err(SiteError::at(self.file, self.text, span, message.into()))
    }

    /// Id of the device that a name of the file means.
    pub(crate) fn library_id(&self, kind: LibraryKind, name: &Spanned<String>) -> Result<String, SiteError> {
        let id = self.library.find(kind, name.get_ref()).map(str::to_owned);
        id.or_else(|error| self.fail(&name.span(), error.to_string()))
    }

    /// Library id of a network switch of this model; without one, of any switch.
    pub(crate) fn switch_id(&self, model: Option<&Spanned<String>>) -> Result<String, SiteError> {
        model.map_or(Ok("network-switch".to_owned()), |model| {
            self.library_id(LibraryKind::NetworkSwitch, model)
        })
    }

    /// Lanes of a device of the library, if it has them.
    pub(crate) fn lanes(&self, id: &str) -> Option<u32> {
        self.library.get(id)?.lanes
    }

    /// Whether a device of the library has a value.
    pub(crate) fn has_value(&self, id: &str, value: &str) -> bool {
        self.library.get(id).is_some_and(|device| device.values.contains_key(value))
    }

    /// First names of the devices of a kind that have a value.
    pub(crate) fn names_with(&self, kind: LibraryKind, value: &str) -> Vec<&str> {
        let with = self
            .library
            .iter()
            .filter(|(_, device)| device.kind == kind && device.values.contains_key(value));
        with.filter_map(|(_, device)| device.names.first().map(String::as_str)).collect()
    }

    fn host(&self, host: &Spanned<schema::Host>) -> Result<Host, SiteError> {
        let span = host.span();
        let host = host.get_ref();
        let name = host.name.get_ref();
        self.name("host.name", &host.name)?;
        if host.socket.is_empty() && !host.adapter.iter().chain(&host.card).any(|d| d.get_ref().standalone) {
            return self.fail(&span, format!("host {name:?} has no socket; add [[host.socket]]"));
        }
        let sockets = host.socket.iter().map(|socket| {
            let socket = socket.get_ref();
            Ok(Socket {
                processor: socket.processor.get_ref().clone(),
                id: self.library_id(LibraryKind::Processor, &socket.processor)?,
                cores: socket.cores.get(),
                clock: socket.clock.0,
                memory: socket.memory,
                memory_bandwidth: socket.memory_bandwidth,
            })
        });
        let sockets = sockets.collect::<Result<Vec<Socket>, SiteError>>()?;
        let devices = cxl::with_cxl(self, host, &sockets, self.tree(host, sockets.len())?)?;
        lanes::check(self, host, &devices)?;
        iommu::check_ats(self, host, &devices)?;
        let iommu = iommu::iommu(self, host, &sockets)?;
        let card_links = self.card_links(host, &devices)?;
        Ok(Host { name: name.clone(), group: name.clone(), sockets, iommu, devices, card_links })
    }

    pub(crate) fn name(&self, field: &str, name: &Spanned<String>) -> Result<(), SiteError> {
        let text = name.get_ref();
        let good =
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        if good {
            Ok(())
        } else {
            self.fail(&name.span(), format!("{field} {text:?}: only letters, digits, - and _ are allowed"))
        }
    }

    /// Checks a name that differs from those of the same kind before it. The pair is the table and the plural in messages.
    pub(crate) fn new_name<'n>(
        &self,
        (table, all): (&str, &str),
        name: &Spanned<String>,
        before: impl IntoIterator<Item = &'n String>,
    ) -> Result<(), SiteError> {
        self.name(&format!("{table}.name"), name)?;
        if before.into_iter().any(|other| other == name.get_ref()) {
            return self.fail(&name.span(), format!("two {all} are named {:?}", name.get_ref()));
        }
        Ok(())
    }

    /// The host's devices in tree order: parents first.
    fn tree(&self, host: &schema::Host, sockets: usize) -> Result<Vec<Device>, SiteError> {
        #[derive(Clone, Copy, PartialEq)]
        enum Kind {
            Switch,
            Adapter,
            Card,
            Ssd,
        }
        let name = host.name.get_ref();
        let all: Vec<(Kind, &schema::PcieDevice)> =
            (host.pcie_switch.iter().map(|d| (Kind::Switch, d.get_ref())))
                .chain(host.adapter.iter().map(|d| (Kind::Adapter, d.get_ref())))
                .chain(host.card.iter().map(|d| (Kind::Card, d.get_ref())))
                .chain(host.ssd.iter().map(|d| (Kind::Ssd, d.get_ref())))
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
            // Walk up to a placed device, then place the chain downwards from it.
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
                            format!("parent {parent:?} of {:?} is not a PCIe switch", device.name.get_ref()),
                        );
                    }
                    None if device.standalone && parent == "none" => break,
                    None => {
                        return self.fail(
                            &device.parent.span(),
                            format!(
                                "parent {parent:?} of {:?}: host {name:?} has no such socket or PCIe switch",
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
                    return self.fail(&device.name.span(), "field `memory` is for cards only");
                }
                let (queue_depth, write_block) = disk::commands(self, device, kind == Kind::Ssd)?;
                let library_kind = match kind {
                    Kind::Switch => LibraryKind::PcieSwitch,
                    Kind::Adapter => LibraryKind::Adapter,
                    Kind::Card => LibraryKind::Card,
                    Kind::Ssd => LibraryKind::Ssd,
                };
                let id = self.library_id(library_kind, &device.model)?;
                let kind = match kind {
                    Kind::Switch => DeviceKind::Switch(device.latency),
                    Kind::Adapter => DeviceKind::Adapter,
                    Kind::Ssd => DeviceKind::Ssd,
                    Kind::Card => DeviceKind::Card(device.memory.as_ref().map(card_memory)),
                };
                place[i] = Some(DeviceId(placed.len()));
                placed.push(Device {
                    name: device.name.get_ref().clone(),
                    model: device.model.get_ref().clone(),
                    id,
                    kind,
                    parent,
                    pcie: device.pcie,
                    ats: device.ats.as_ref().is_some_and(|ats| *ats.get_ref()),
                    queue_depth,
                    write_block,
                });
            }
        }
        Ok(placed)
    }

    /// The link ends that a name denotes.
    pub(crate) fn ends(
        &self,
        field: &str,
        name: &Spanned<String>,
        site: &Site,
    ) -> Result<Vec<LinkEnd>, SiteError> {
        let text = name.get_ref();
        if let Some(switch) = site.switches.iter().position(|s| s.name == *text) {
            return Ok(vec![LinkEnd::Switch(switch)]);
        }
        let Some((host, device)) = text.split_once('.') else {
            return self.fail(
                &name.span(),
                format!("{field} {text:?}: the site has no such switch; an adapter is host.adapter"),
            );
        };
        let group = host.strip_suffix('*');
        let ends: Vec<LinkEnd> = (site.hosts.iter().enumerate())
            .filter(|(_, h)| group.map_or(h.name == host, |group| h.group == group))
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

    /// The protocol of a link; that of its rate if the file has none.
    pub(crate) fn protocol(
        &self,
        rate: Signalling,
        mtu: Mtu,
        given: Option<&Spanned<Protocol>>,
        at: &Range<usize>,
    ) -> Result<Protocol, SiteError> {
        let of_rate =
            if matches!(rate, Signalling::Ethernet(_)) { Protocol::RoceV2 } else { Protocol::InfiniBand };
        let protocol = given.map_or(of_rate, |given| *given.get_ref());
        let at = given.map_or(at.clone(), Spanned::span);
        if let (Signalling::Ethernet(gigabits), Protocol::InfiniBand) = (rate, protocol) {
            let message = format!("protocol = \"InfiniBand\": a link of {gigabits}GbE carries \"RoCEv2\"");
            return self.fail(&at, message);
        }
        if protocol == Protocol::RoceV2 && !matches!(mtu.0, 256 | 512 | 1024 | 2048 | 4096) {
            let message =
                format!("mtu = {}: RoCEv2 packets carry 256, 512, 1024, 2048 or 4096 B at most", mtu.0);
            return self.fail(&at, message);
        }
        Ok(protocol)
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
                return self.fail(
                    &at,
                    format!(
                        "link from {a} ends to {b} ends: both sides need the same number, or one of them 1"
                    ),
                );
            }
        };
        if let Some((end, _)) = pairs.iter().find(|(a, b)| a == b) {
            return self.fail(&at, format!("link from {} to itself", link_end_name(site, *end)));
        }
        let protocol = self.protocol(link.rate, link.mtu, link.protocol.as_ref(), &at)?;
        let rate = data_rate(link.rate, link.encoding, link.lanes);
        Ok(pairs
            .into_iter()
            .map(|(from, to)| NetworkLink {
                from,
                to,
                rate,
                mtu: link.mtu,
                length: link.length,
                protocol,
                buffer: None,
                dimension: None,
                loss: link.loss.0,
                failed: false,
            })
            .collect())
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

/// Name of a link end in messages and pictures.
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

/// Validates a file that matches the schema.
///
/// # Errors
/// [`SiteError`] names the line and the error.
pub fn validate(name: &str, text: &str, file: &SiteFile) -> Result<Site, SiteError> {
    let mut library = Library::shipped().clone();
    library.replace(file.device.clone()).map_err(|message| SiteError::of_device(name, text, message))?;
    let validator = Validator { file: name, text, library };
    let mut site = Site {
        name: file.name.clone(),
        description: file.description.clone(),
        hosts: Vec::new(),
        switches: Vec::new(),
        links: Vec::new(),
        tori: Vec::new(),
        fabrics: Vec::new(),
        cards: Vec::new(),
        event_builders: Vec::new(),
        devices: (file.device.keys())
            .filter_map(|id| Some((id.clone(), validator.library.get(id)?.clone())))
            .collect(),
    };
    for host in &file.host {
        let one = validator.host(host)?;
        match host.get_ref().count {
            None => site.hosts.push(one),
            Some(count) if count.get() > 100_000 => {
                return validator.fail(&host.span(), format!("count {count}: at most 100000 hosts"));
            }
            Some(count) => site
                .hosts
                .extend((0..count.get()).map(|i| Host { name: format!("{}{i}", one.group), ..one.clone() })),
        }
    }
    let mut names: HashMap<&str, ()> = HashMap::new();
    for host in &site.hosts {
        if names.insert(&host.name, ()).is_some() {
            let at =
                file.host.iter().rev().find(|h| host.name.starts_with(h.get_ref().name.get_ref().as_str()));
            let span = at.map_or(0..0, |h| h.get_ref().name.span());
            return validator.fail(&span, format!("two hosts are named {:?}", host.name));
        }
    }
    for switch in &file.switch {
        let switch = switch.get_ref();
        let before = site.switches.iter().map(|switch| &switch.name);
        validator.new_name(("switch", "switches"), &switch.name, before)?;
        let id = validator.switch_id(switch.model.as_ref())?;
        site.switches.push(NetworkSwitch {
            name: switch.name.get_ref().clone(),
            model: switch.model.as_ref().map(|model| model.get_ref().clone()).unwrap_or_default(),
            id,
            ports: switch.ports.get(),
            latency: switch.latency,
            fabric: None,
        });
    }
    let mut used = vec![0u32; site.switches.len()];
    for link in &file.link {
        let links = validator.link(link, &site)?;
        for end in links.iter().flat_map(|link| [link.from, link.to]) {
            if let LinkEnd::Switch(switch) = end {
                used[switch] += 1;
                if used[switch] > site.switches[switch].ports {
                    let network = &site.switches[switch];
                    return validator.fail(
                        &link.span(),
                        format!("switch {:?} has {} ports, but more links", network.name, network.ports),
                    );
                }
            }
        }
        site.links.extend(links);
    }
    for torus in &file.torus {
        let before = site.tori.iter().map(|torus| &torus.name);
        validator.new_name(("torus", "tori"), &torus.get_ref().name, before)?;
        let (torus, links) = validator.torus(torus, &site)?;
        site.tori.push(torus);
        site.links.extend(links);
    }
    for tree in &file.fat_tree {
        fabric::add_fat_tree(&validator, tree, &mut site)?;
    }
    for dragonfly in &file.dragonfly {
        fabric::add_dragonfly(&validator, dragonfly, &mut site)?;
    }
    for failed in &file.failed_link {
        fabric::fail_links(&validator, failed, &mut site)?;
    }
    for entry in &file.card {
        validator.new_name(("card", "cards"), &entry.name, site.cards.iter().map(|card| &card.name))?;
        site.cards.push(network_card::validate(&validator, entry)?);
    }
    for entry in &file.event_builder {
        let before = site.event_builders.iter().map(|builder| &builder.name);
        validator.new_name(("event-builder", "event builders"), &entry.name, before)?;
        site.event_builders.push(event_builder::validate(&validator, entry)?);
    }
    Ok(site)
}
