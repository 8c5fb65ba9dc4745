//! CXL.mem: memory devices (type 3) behind a root port of a socket, directly or below CXL switches.
//!
//! Read: Compute Express Link Specification, 6.1 (physical layer: PCIe at 8 to 64 GT/s, 16 lanes at most), 4.2, 4.3 (flits of
//! 68 and of 256 bytes) and 7 (switching). Rules: flits of 256 bytes exist from CXL 3.0 on; 64 GT/s needs them. Each link has its
//! own version, lanes and flits: a switch packs messages into flits anew.

use crate::SiteError;
use crate::device::Kind as LibraryKind;
use crate::schema::{self, Generation, PayloadSize, PcieLanes, PcieLink};
use crate::unit;
use crate::validate::{Device, DeviceId, DeviceKind, Parent, Socket, SocketId, Validator};
use millstream_quantity::{Bytes, BytesPerSecond, Seconds};
use serde::Deserialize;
use serde::de::{self, Deserializer};
use std::fmt;
use toml::Spanned;

/// Value of a processor that has CXL ports: the round trip through one of them, in ns.
pub const PORT_LATENCY: &str = "cxl.port.latency";

/// A memory device in a site file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CxlMemoryEntry {
    /// Name within the host.
    pub name: Spanned<String>,
    /// Device model: a name of the device library.
    pub model: Spanned<String>,
    /// Socket or CXL switch above it.
    pub parent: Spanned<String>,
    /// Link to its parent.
    pub cxl: CxlLinkEntry,
    /// Size of its memory.
    #[serde(deserialize_with = "unit::quantity")]
    pub size: Bytes,
    /// Peak rate of its memory; that of the model by default.
    #[serde(default, deserialize_with = "unit::optional")]
    pub bandwidth: Option<BytesPerSecond>,
}

/// A CXL switch in a site file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CxlSwitchEntry {
    /// Name within the host.
    pub name: Spanned<String>,
    /// Device model: a name of the device library.
    pub model: Spanned<String>,
    /// Socket or CXL switch above it.
    pub parent: Spanned<String>,
    /// Link of its upstream port.
    pub cxl: CxlLinkEntry,
    /// Port-to-port latency; that of the model by default.
    #[serde(default, deserialize_with = "unit::optional")]
    pub latency: Option<Seconds>,
}

/// A CXL link in a site file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CxlLinkEntry {
    /// Version that both ends have.
    pub version: Spanned<CxlVersion>,
    /// PCIe generation of the physical layer, 3 to 6.
    pub generation: Spanned<Generation>,
    /// 1, 2, 4, 8 or 16.
    pub lanes: Spanned<PcieLanes>,
    /// Bytes of a flit: 256 by default from CXL 3.0 on, else 68.
    pub flit: Option<Spanned<Flit>>,
}

/// CXL version as major and minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CxlVersion(pub u8, pub u8);

/// First version with flits of 256 bytes.
const WITH_LONG_FLITS: CxlVersion = CxlVersion(3, 0);

impl fmt::Display for CxlVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

impl<'de> Deserialize<'de> for CxlVersion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(match text.as_str() {
            "1.1" => Self(1, 1),
            "2.0" => Self(2, 0),
            "3.0" => Self(3, 0),
            "3.1" => Self(3, 1),
            "3.2" => Self(3, 2),
            other => {
                let message =
                    format!("CXL version {other:?}: must be \"1.1\", \"2.0\", \"3.0\", \"3.1\" or \"3.2\"");
                return Err(de::Error::custom(message));
            }
        })
    }
}

/// Size of a flit, the unit of the link layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flit {
    /// 68 bytes: four slots of 16 bytes, protocol id, CRC.
    Bytes68,
    /// 256 bytes: 15 slots, header, credits, CRC, FEC.
    Bytes256,
}

impl Flit {
    /// Bytes on the link.
    #[must_use]
    pub fn bytes(self) -> u32 {
        match self {
            Flit::Bytes68 => 68,
            Flit::Bytes256 => 256,
        }
    }
}

impl<'de> Deserialize<'de> for Flit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            68 => Ok(Self::Bytes68),
            256 => Ok(Self::Bytes256),
            other => Err(de::Error::custom(format!("flit of {other} B: must be 68 or 256"))),
        }
    }
}

/// A CXL link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CxlLink {
    /// Version that both ends have.
    pub version: CxlVersion,
    /// PCIe generation of the physical layer.
    pub generation: Generation,
    /// Number of lanes.
    pub lanes: PcieLanes,
    /// Size of a flit.
    pub flit: Flit,
}

impl fmt::Display for CxlLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { version, generation, lanes, flit } = self;
        write!(f, "CXL {version}, Gen{} x{}, flits of {} B", generation.0, lanes.0, flit.bytes())
    }
}

/// A CXL switch.
#[derive(Clone, Debug, PartialEq)]
pub struct CxlSwitch {
    /// Link of its upstream port.
    pub link: CxlLink,
    /// Port-to-port latency, if the file has it.
    pub latency: Option<Seconds>,
}

/// Memory behind a CXL link.
#[derive(Clone, Debug, PartialEq)]
pub struct CxlMemory {
    /// Link to its parent.
    pub link: CxlLink,
    /// Size of the memory.
    pub size: Bytes,
    /// Peak rate of the memory, if the file has it.
    pub bandwidth: Option<BytesPerSecond>,
}

fn link(validator: &Validator<'_>, about: &str, entry: &CxlLinkEntry) -> Result<CxlLink, SiteError> {
    let (version, generation) = (*entry.version.get_ref(), *entry.generation.get_ref());
    let lanes = *entry.lanes.get_ref();
    if generation < Generation(3) {
        let message = format!("{about}: cxl.generation = {}: must be 3 to 6", generation.0);
        return validator.fail(&entry.generation.span(), message);
    }
    if generation == Generation(6) && version < WITH_LONG_FLITS {
        let message = format!(
            "{about}: cxl.generation = 6: CXL {version} has no 64 GT/s; use version \"3.0\" or later"
        );
        return validator.fail(&entry.generation.span(), message);
    }
    if !matches!(lanes.0, 1 | 2 | 4 | 8 | 16) {
        let message = format!("{about}: cxl.lanes = {}: must be 1, 2, 4, 8 or 16", lanes.0);
        return validator.fail(&entry.lanes.span(), message);
    }
    let flit = match &entry.flit {
        None if version < WITH_LONG_FLITS => Flit::Bytes68,
        None => Flit::Bytes256,
        Some(given) => {
            let flit = *given.get_ref();
            if flit == Flit::Bytes256 && version < WITH_LONG_FLITS {
                let message = format!("{about}: cxl.flit = 256: CXL {version} has flits of 68 B only");
                return validator.fail(&given.span(), message);
            }
            if flit == Flit::Bytes68 && generation == Generation(6) {
                let message = format!("{about}: cxl.flit = 68: generation 6 has flits of 256 B only");
                return validator.fail(&given.span(), message);
            }
            flit
        }
    };
    Ok(CxlLink { version, generation, lanes, flit })
}

/// Devices of a host, to which CXL switches and memory are added.
struct Tree<'a, 'b> {
    validator: &'a Validator<'b>,
    sockets: &'a [Socket],
    devices: Vec<Device>,
}

impl Tree<'_, '_> {
    /// Checks the name of a new device.
    fn name(&self, field: &str, name: &Spanned<String>) -> Result<(), SiteError> {
        self.validator.name(field, name)?;
        if self.devices.iter().any(|device| device.name == *name.get_ref()) {
            let message = format!("two devices of the host are named {:?}", name.get_ref());
            return self.validator.fail(&name.span(), message);
        }
        Ok(())
    }

    /// The CXL switch of this name, or the socket if its processor has CXL ports.
    fn parent(&self, about: &str, given: &Spanned<String>) -> Result<Parent, SiteError> {
        let (validator, sockets) = (self.validator, self.sockets);
        let parent = given.get_ref();
        let is_switch =
            |device: &Device| device.name == *parent && matches!(device.kind, DeviceKind::CxlSwitch(_));
        if let Some(switch) = self.devices.iter().position(is_switch) {
            return Ok(Parent::Switch(DeviceId(switch)));
        }
        let socket = parent.strip_prefix("socket").and_then(|digits| digits.parse::<usize>().ok());
        let Some(socket) = socket.filter(|&socket| socket < sockets.len()) else {
            let switches =
                self.devices.iter().filter(|device| matches!(device.kind, DeviceKind::CxlSwitch(_)));
            let known: Vec<String> = (0..sockets.len())
                .map(|i| format!("socket{i}"))
                .chain(switches.map(|switch| switch.name.clone()))
                .collect();
            let known = known.join(", ");
            let message =
                format!("{about}: parent {parent:?}: must be a socket or CXL switch of the host: {known}");
            return validator.fail(&given.span(), message);
        };
        if !validator.has_value(&sockets[socket].id, PORT_LATENCY) {
            let with = validator.names_with(LibraryKind::Processor, PORT_LATENCY).join(", ");
            let message = format!(
                "{about}: the processor {:?} of {parent} has no CXL ports; processors that have: {with}. A [device.ID] has them \
                 with the value {PORT_LATENCY:?}",
                sockets[socket].processor
            );
            return validator.fail(&given.span(), message);
        }
        Ok(Parent::Socket(SocketId(socket)))
    }

    fn push(
        &mut self,
        (name, model): (&Spanned<String>, &Spanned<String>),
        id: String,
        (kind, parent, link): (DeviceKind, Parent, CxlLink),
    ) {
        self.devices.push(Device {
            name: name.get_ref().clone(),
            model: model.get_ref().clone(),
            id,
            kind,
            parent,
            pcie: PcieLink {
                generation: link.generation,
                lanes: link.lanes,
                max_payload: PayloadSize::default_payload(),
                max_read_request: PayloadSize::default_read_request(),
            },
            ats: false,
            queue_depth: None,
            write_block: None,
        });
    }

    fn switch(&mut self, entry: &CxlSwitchEntry) -> Result<(), SiteError> {
        let about = format!("cxl-switch {:?}", entry.name.get_ref());
        self.name("cxl-switch.name", &entry.name)?;
        let id = self.validator.library_id(LibraryKind::CxlSwitch, &entry.model)?;
        let parent = self.parent(&about, &entry.parent)?;
        let link = link(self.validator, &about, &entry.cxl)?;
        let kind = DeviceKind::CxlSwitch(CxlSwitch { link, latency: entry.latency });
        self.push((&entry.name, &entry.model), id, (kind, parent, link));
        Ok(())
    }

    /// Adds switches, parents before their children.
    fn switches(&mut self, entries: &[CxlSwitchEntry]) -> Result<(), SiteError> {
        let mut waiting: Vec<&CxlSwitchEntry> = entries.iter().collect();
        while !waiting.is_empty() {
            let is_below_waiting = |entry: &CxlSwitchEntry| {
                waiting.iter().any(|other| other.name.get_ref() == entry.parent.get_ref())
            };
            let Some(next) = waiting.iter().position(|entry| !is_below_waiting(entry)) else {
                let names: Vec<&str> = waiting.iter().map(|entry| entry.name.get_ref().as_str()).collect();
                let message =
                    format!("CXL switches of the host are below each other in a cycle: {}", names.join(", "));
                return self.validator.fail(&waiting[0].parent.span(), message);
            };
            self.switch(waiting.remove(next))?;
        }
        Ok(())
    }

    fn memory(&mut self, entry: &CxlMemoryEntry) -> Result<(), SiteError> {
        let about = format!("cxl-memory {:?}", entry.name.get_ref());
        self.name("cxl-memory.name", &entry.name)?;
        let id = self.validator.library_id(LibraryKind::CxlMemory, &entry.model)?;
        let parent = self.parent(&about, &entry.parent)?;
        let link = link(self.validator, &about, &entry.cxl)?;
        let memory = CxlMemory { link, size: entry.size, bandwidth: entry.bandwidth };
        self.push((&entry.name, &entry.model), id, (DeviceKind::CxlMemory(memory), parent, link));
        Ok(())
    }
}

/// Devices of a host with its CXL switches and memory, after `devices`.
pub(crate) fn with_cxl(
    validator: &Validator<'_>,
    host: &schema::Host,
    sockets: &[Socket],
    devices: Vec<Device>,
) -> Result<Vec<Device>, SiteError> {
    let mut tree = Tree { validator, sockets, devices };
    tree.switches(&host.cxl_switch)?;
    for entry in &host.cxl_memory {
        tree.memory(entry)?;
    }
    Ok(tree.devices)
}
