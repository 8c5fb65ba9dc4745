//! Schema of site files, with text positions for errors.

use crate::cxl::{CxlMemoryEntry, CxlSwitchEntry};
use crate::device::DeviceModel;
use crate::iommu::IommuEntry;
use crate::unit;
use millstream_quantity::{Bytes, BytesPerSecond, Hertz, Metres, Seconds};
use serde::Deserialize;
use serde::de::{self, Deserializer};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::PathBuf;
use toml::Spanned;

/// A site file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SiteFile {
    /// Name of the site.
    #[serde(default)]
    pub name: String,
    /// One sentence about the site.
    #[serde(default)]
    pub description: String,
    /// Hosts.
    #[serde(default)]
    pub host: Vec<Spanned<Host>>,
    /// Network switches.
    #[serde(default)]
    pub switch: Vec<Spanned<Switch>>,
    /// Links between adapters and switches.
    #[serde(default)]
    pub link: Vec<Spanned<Link>>,
    /// Tori of adapters.
    #[serde(default)]
    pub torus: Vec<Spanned<Torus>>,
    /// Fat trees of identical switches.
    #[serde(default, rename = "fat-tree")]
    pub fat_tree: Vec<FatTree>,
    /// Dragonflies of identical switches.
    #[serde(default)]
    pub dragonfly: Vec<Dragonfly>,
    /// Links that carry nothing.
    #[serde(default, rename = "failed-link")]
    pub failed_link: Vec<FailedLink>,
    /// Cards that nodes reach over the network.
    #[serde(default)]
    pub card: Vec<NetworkCard>,
    /// Event builders of the site.
    #[serde(default, rename = "event-builder")]
    pub event_builder: Vec<EventBuilder>,
    /// Devices of one's own, by id; they take precedence over the shipped library.
    #[serde(default)]
    pub device: BTreeMap<String, DeviceModel>,
}

/// A card that nodes reach over the network; it may be in any host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkCard {
    /// Name of the card.
    pub name: Spanned<String>,
    /// Address of its server: `host:port`.
    pub address: Spanned<String>,
    /// Size of its memory.
    #[serde(default, deserialize_with = "unit::optional")]
    pub memory: Option<Bytes>,
    /// Number of its memory banks.
    pub banks: Option<NonZeroU32>,
    /// Comment for users.
    #[serde(default)]
    pub note: String,
}

/// An event builder of the site.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventBuilder {
    /// Name of the event builder.
    pub name: Spanned<String>,
    /// Its configuration, relative to the site file.
    pub configuration: PathBuf,
    /// Address of run control: `host:port`.
    pub control: Spanned<String>,
    /// Ranks as a job.
    #[serde(default = "one")]
    pub ranks: NonZeroU32,
}

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

/// A host, or `count` identical hosts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Name; with `count`, the hosts are `name0`, `name1` and so on.
    pub name: Spanned<String>,
    /// Number of identical hosts.
    pub count: Option<NonZeroU32>,
    /// IOMMU, if it is on.
    pub iommu: Option<IommuEntry>,
    /// Sockets `socket0`, `socket1` and so on.
    #[serde(default)]
    pub socket: Vec<Spanned<Socket>>,
    /// PCIe switches.
    #[serde(default, rename = "pcie-switch")]
    pub pcie_switch: Vec<Spanned<PcieDevice>>,
    /// Network adapters.
    #[serde(default)]
    pub adapter: Vec<Spanned<PcieDevice>>,
    /// Accelerator cards.
    #[serde(default)]
    pub card: Vec<Spanned<PcieDevice>>,
    /// Solid-state disks.
    #[serde(default)]
    pub ssd: Vec<Spanned<PcieDevice>>,
    /// CXL switches.
    #[serde(default, rename = "cxl-switch")]
    pub cxl_switch: Vec<CxlSwitchEntry>,
    /// Memory devices behind CXL links.
    #[serde(default, rename = "cxl-memory")]
    pub cxl_memory: Vec<CxlMemoryEntry>,
    /// Links between cards beside the PCIe tree.
    #[serde(default, rename = "card-link")]
    pub card_link: Vec<CardLink>,
}

/// Links between two cards of a host beside the PCIe tree.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardLink {
    /// A card of the host.
    pub from: Spanned<String>,
    /// Another card of the host.
    pub to: Spanned<String>,
    /// Generation of the links.
    pub kind: CardLinkKind,
    /// Number of links between the two cards.
    pub links: Spanned<NonZeroU32>,
}

/// A link between cards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardLinkKind {
    /// `NVLink` generation, 1 to 5.
    pub nvlink: u8,
}

impl CardLinkKind {
    /// Rate of one direction of one link: 8 lanes of 20 Gb/s, 8 of 25, 4 of 50, 2 of 100, 2 of 200.
    #[must_use]
    pub fn rate(self) -> BytesPerSecond {
        BytesPerSecond(match self.nvlink {
            1 => 20e9,
            2..=4 => 25e9,
            _ => 50e9,
        })
    }

    /// Share of payload in the longest packets: 16 flits of data after one of header.
    #[must_use]
    pub fn payload_share(self) -> f64 {
        16.0 / 17.0
    }
}

impl<'de> Deserialize<'de> for CardLinkKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let generation = text.strip_prefix("NVLink").and_then(|digits| digits.parse().ok());
        match generation {
            Some(nvlink @ 1..=5) => Ok(Self { nvlink }),
            _ => Err(de::Error::custom(format!(
                "card-link of kind {text:?}: must be NVLink1, NVLink2, NVLink3, NVLink4 or NVLink5"
            ))),
        }
    }
}

/// A processor socket with its memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Socket {
    /// Processor model.
    pub processor: Spanned<String>,
    /// Number of cores.
    pub cores: NonZeroU32,
    /// Nominal clock.
    #[serde(deserialize_with = "unit::quantity")]
    pub clock: Hertz,
    /// Memory of the socket.
    #[serde(default, deserialize_with = "unit::optional")]
    pub memory: Option<Bytes>,
    /// Bandwidth of that memory.
    #[serde(rename = "memory-bandwidth")]
    #[serde(default, deserialize_with = "unit::optional")]
    pub memory_bandwidth: Option<BytesPerSecond>,
}

/// A device of a PCIe tree: switch, adapter or card.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieDevice {
    /// Name within the host.
    pub name: Spanned<String>,
    /// Device model: a name of the device library.
    pub model: Spanned<String>,
    /// Socket or PCIe switch above it.
    pub parent: Spanned<String>,
    /// PCIe link to the parent.
    pub pcie: PcieLink,
    /// Port-to-port latency of a switch.
    #[serde(default, deserialize_with = "unit::optional")]
    pub latency: Option<Seconds>,
    /// Memory of a card that peers can access.
    pub memory: Option<Memory>,
    /// Whether the device translates addresses by ATS.
    pub ats: Option<Spanned<bool>>,
    /// Commands outstanding on a disk.
    #[serde(rename = "queue-depth")]
    pub queue_depth: Option<Spanned<u32>>,
    /// Bytes of a command by which a builder unit stores its events on a disk.
    #[serde(default, rename = "write-block", deserialize_with = "unit::optional_spanned")]
    pub write_block: Option<Spanned<Bytes>>,
    /// Whether the device works without a host processor.
    #[serde(default)]
    pub standalone: bool,
}

/// Memory of a card.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Memory technology: `HBM2` or `GDDR5`.
    pub kind: String,
    /// Total size.
    #[serde(deserialize_with = "unit::quantity")]
    pub size: Bytes,
    /// Number of channels.
    pub channels: NonZeroU32,
    /// Port width of one channel in bits.
    pub width: Width,
    /// Clock of that port.
    #[serde(deserialize_with = "unit::quantity")]
    pub clock: Hertz,
}

/// Width of a data path in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width(pub u32);

impl<'de> Deserialize<'de> for Width {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bits = u32::deserialize(deserializer)?;
        if bits.is_power_of_two() && (8..=4096).contains(&bits) {
            Ok(Self(bits))
        } else {
            Err(de::Error::custom(format!("width of {bits} bits: must be a power of two from 8 to 4096")))
        }
    }
}

/// A PCIe link: generation, lanes and negotiated sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    /// 1 to 6.
    pub generation: Generation,
    /// 1, 2, 4, 8, 12, 16 or 32.
    pub lanes: PcieLanes,
    /// Max_Payload_Size in bytes.
    #[serde(default = "PayloadSize::default_payload", rename = "max-payload")]
    pub max_payload: PayloadSize,
    /// Max_Read_Request_Size in bytes.
    #[serde(default = "PayloadSize::default_read_request", rename = "max-read-request")]
    pub max_read_request: PayloadSize,
}

/// PCI Express generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Generation(pub u8);

impl<'de> Deserialize<'de> for Generation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u8::deserialize(deserializer)? {
            generation @ 1..=6 => Ok(Self(generation)),
            other => Err(de::Error::custom(format!("PCIe generation {other}: must be 1 to 6"))),
        }
    }
}

/// Lanes of a PCIe link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PcieLanes(pub u8);

impl<'de> Deserialize<'de> for PcieLanes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u8::deserialize(deserializer)? {
            lanes @ (1 | 2 | 4 | 8 | 12 | 16 | 32) => Ok(Self(lanes)),
            other => Err(de::Error::custom(format!(
                "PCIe link of {other} lanes: must be 1, 2, 4, 8, 12, 16 or 32"
            ))),
        }
    }
}

/// Max_Payload_Size or Max_Read_Request_Size: 128 to 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PayloadSize(pub u32);

impl PayloadSize {
    pub(crate) fn default_payload() -> Self {
        Self(256)
    }

    pub(crate) fn default_read_request() -> Self {
        Self(512)
    }
}

impl<'de> Deserialize<'de> for PayloadSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            bytes @ (128 | 256 | 512 | 1024 | 2048 | 4096) => Ok(Self(bytes)),
            other => Err(de::Error::custom(format!("{other} B: must be 128, 256, 512, 1024, 2048 or 4096"))),
        }
    }
}

/// A network switch.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// Name of the switch.
    pub name: Spanned<String>,
    /// Switch model: a name of the device library.
    pub model: Option<Spanned<String>>,
    /// Number of ports, the limit of its links.
    pub ports: NonZeroU32,
    /// Port-to-port latency.
    #[serde(deserialize_with = "unit::quantity")]
    pub latency: Seconds,
}

/// Signalling rate of a network link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Signalling {
    /// InfiniBand QDR: 10 Gb/s per lane, 8b/10b.
    Qdr,
    /// InfiniBand FDR: 14.0625 Gb/s per lane, 64b/66b.
    Fdr,
    /// InfiniBand EDR: 25.78125 Gb/s per lane, 64b/66b.
    Edr,
    /// InfiniBand HDR: 50 Gb/s per lane after line code.
    Hdr,
    /// InfiniBand NDR: 100 Gb/s per lane after line code.
    Ndr,
    /// InfiniBand XDR: 200 Gb/s per lane after line code.
    Xdr,
    /// Ethernet: data rate of the whole link in Gb/s, after line code and FEC.
    Ethernet(u16),
    /// Signalling rate of one lane, with the line code of [`Link::encoding`].
    Lane(BytesPerSecond),
}

/// Rates of Ethernet links in Gb/s (IEEE 802.3).
const ETHERNET: [u16; 8] = [10, 25, 40, 50, 100, 200, 400, 800];

impl<'de> Deserialize<'de> for Signalling {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(match text.as_str() {
            "QDR" => Self::Qdr,
            "FDR" => Self::Fdr,
            "EDR" => Self::Edr,
            "HDR" => Self::Hdr,
            "NDR" => Self::Ndr,
            "XDR" => Self::Xdr,
            other => match other.strip_suffix("GbE").map(|digits| (digits, digits.parse())) {
                Some((_, Ok(gigabits))) if ETHERNET.contains(&gigabits) => Self::Ethernet(gigabits),
                Some((digits, _)) => {
                    let known = ETHERNET.map(|gigabits| gigabits.to_string()).join(", ");
                    let message = format!(
                        "rate {other:?}: no Ethernet of {digits} Gb/s: one of {known}, each with GbE"
                    );
                    return Err(de::Error::custom(message));
                }
                None => Self::Lane(unit::parse(other).map_err(|error| {
                    de::Error::custom(format!(
                        "{error}; or one of QDR, FDR, EDR, HDR, NDR, XDR, 10GbE to 800GbE"
                    ))
                })?),
            },
        })
    }
}

/// Line code of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Encoding {
    /// 8 data bits in 10 line bits.
    #[serde(rename = "8b/10b")]
    B8b10,
    /// 64 data bits in 66 line bits.
    #[serde(rename = "64b/66b")]
    B64b66,
    /// The rate is after line code.
    #[default]
    #[serde(rename = "none")]
    None,
}

impl Encoding {
    /// Data bits per line bit.
    #[must_use]
    pub fn efficiency(self) -> f64 {
        match self {
            Self::B8b10 => 0.8,
            Self::B64b66 => 64.0 / 66.0,
            Self::None => 1.0,
        }
    }
}

/// Lanes of a network link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes(pub u8);

impl Default for Lanes {
    fn default() -> Self {
        Self(4)
    }
}

impl<'de> Deserialize<'de> for Lanes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u8::deserialize(deserializer)? {
            lanes @ (1 | 2 | 4 | 8 | 12) => Ok(Self(lanes)),
            other => {
                Err(de::Error::custom(format!("network link of {other} lanes: must be 1, 2, 4, 8 or 12")))
            }
        }
    }
}

/// Largest payload of a network packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtu(pub u32);

impl Default for Mtu {
    fn default() -> Self {
        Self(4096)
    }
}

impl<'de> Deserialize<'de> for Mtu {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            bytes @ 64..=65536 if bytes % 4 == 0 => Ok(Self(bytes)),
            other => {
                Err(de::Error::custom(format!("MTU of {other} B: must be a multiple of 4 from 64 to 65536")))
            }
        }
    }
}

/// A link, or one link per host of a group: `from = "node*.hca"`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// `host.adapter` or a switch; `*` stands for each host of a group.
    pub from: Spanned<String>,
    /// `host.adapter` or a switch; `*` stands for each host of a group.
    pub to: Spanned<String>,
    /// Signalling rate of a lane.
    pub rate: Signalling,
    /// Line code, unless the rate implies it.
    #[serde(default)]
    pub encoding: Encoding,
    /// Number of lanes.
    #[serde(default)]
    pub lanes: Lanes,
    /// Largest payload of a packet.
    #[serde(default)]
    pub mtu: Mtu,
    /// Cable length.
    #[serde(default, deserialize_with = "unit::optional")]
    pub length: Option<Metres>,
    /// Headers of its packets: those of `RoCEv2` by default on Ethernet, else those of `InfiniBand`.
    pub protocol: Option<Spanned<Protocol>>,
    /// Share of packets that the link loses.
    #[serde(default)]
    pub loss: Loss,
}

/// Share of packets that a link loses: 0 to 0.1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss(pub f64);

impl<'de> Deserialize<'de> for Loss {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match f64::deserialize(deserializer)? {
            share if (0.0..=0.1).contains(&share) => Ok(Self(share)),
            other => Err(de::Error::custom(format!("loss of {other}: must be a share of packets, 0 to 0.1"))),
        }
    }
}

/// A fat tree: a folded Clos network of switches with the same number of ports.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FatTree {
    /// Name; switches are `NAME-leaf0`, `NAME-spine0` and so on.
    pub name: Spanned<String>,
    /// `host*.adapter`: each has a link to a leaf.
    pub adapters: Spanned<String>,
    /// Ports of a switch.
    pub ports: Spanned<NonZeroU32>,
    /// Levels of switches: 2 or 3.
    pub levels: Option<Spanned<u8>>,
    /// Adapters of a leaf: half of its ports by default.
    pub down: Option<Spanned<NonZeroU32>>,
    /// Spines of two levels: as many as a leaf has other ports by default; they divide these.
    pub spines: Option<Spanned<NonZeroU32>>,
    /// Switch model: a name of the device library.
    pub model: Option<Spanned<String>>,
    /// Port-to-port latency of a switch.
    #[serde(deserialize_with = "unit::quantity")]
    pub latency: Seconds,
    /// Signalling rate of a lane.
    pub rate: Signalling,
    /// Line code, unless the rate implies it.
    #[serde(default)]
    pub encoding: Encoding,
    /// Lanes of a link.
    #[serde(default)]
    pub lanes: Lanes,
    /// Largest payload of a packet.
    #[serde(default)]
    pub mtu: Mtu,
    /// Length of a cable.
    #[serde(default, deserialize_with = "unit::optional")]
    pub length: Option<Metres>,
    /// Headers of its packets: those of `RoCEv2` by default on Ethernet, else those of `InfiniBand`.
    pub protocol: Option<Spanned<Protocol>>,
    /// Share of packets that a link loses.
    #[serde(default)]
    pub loss: Loss,
}

/// A dragonfly: groups of fully connected switches, with links between all groups.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dragonfly {
    /// Name; switches are `NAME-group0-router0` and so on.
    pub name: Spanned<String>,
    /// `host*.adapter`: each has a link to a router.
    pub adapters: Spanned<String>,
    /// Routers of a group.
    pub routers: Spanned<NonZeroU32>,
    /// Adapters of a router.
    pub hosts: Spanned<NonZeroU32>,
    /// Links of a router to other groups.
    pub global: Spanned<NonZeroU32>,
    /// Switch model: a name of the device library.
    pub model: Option<Spanned<String>>,
    /// Port-to-port latency of a router.
    #[serde(deserialize_with = "unit::quantity")]
    pub latency: Seconds,
    /// Signalling rate of a lane.
    pub rate: Signalling,
    /// Line code, unless the rate implies it.
    #[serde(default)]
    pub encoding: Encoding,
    /// Lanes of a link.
    #[serde(default)]
    pub lanes: Lanes,
    /// Largest payload of a packet.
    #[serde(default)]
    pub mtu: Mtu,
    /// Length of a cable within a group.
    #[serde(default, deserialize_with = "unit::optional")]
    pub length: Option<Metres>,
    /// Length of a cable between groups.
    #[serde(rename = "global-length")]
    #[serde(default, deserialize_with = "unit::optional")]
    pub global_length: Option<Metres>,
    /// Headers of its packets: those of `RoCEv2` by default on Ethernet, else those of `InfiniBand`.
    pub protocol: Option<Spanned<Protocol>>,
    /// Share of packets that a link loses.
    #[serde(default)]
    pub loss: Loss,
}

/// A link that carries nothing: all links between two ends.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailedLink {
    /// A switch, or `host.adapter`.
    pub from: Spanned<String>,
    /// A switch, or `host.adapter`.
    pub to: Spanned<String>,
}

/// Network protocol of a link, which sets the headers of its packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Protocol {
    /// InfiniBand within one subnet.
    #[default]
    #[serde(rename = "InfiniBand")]
    InfiniBand,
    /// `RoCE` v2 over IPv4.
    #[serde(rename = "RoCEv2")]
    RoceV2,
}

/// A torus with one adapter per node and links to both neighbours in each dimension.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Torus {
    /// Name of the torus.
    pub name: Spanned<String>,
    /// `host*.adapter`; the product of the dimensions is the number of hosts.
    pub adapters: Spanned<String>,
    /// Nodes per dimension.
    pub dimensions: Spanned<Vec<NonZeroU32>>,
    /// Where the nodes' processes listen, `host:port`, in the order of the adapters.
    #[serde(default)]
    pub addresses: Vec<Spanned<String>>,
    /// Signalling rate of a lane.
    pub rate: Signalling,
    /// Line code.
    #[serde(default)]
    pub encoding: Encoding,
    /// Lanes of a link.
    #[serde(default)]
    pub lanes: Lanes,
    /// Largest payload of a packet.
    #[serde(default)]
    pub mtu: Mtu,
    /// Receive buffer of a channel, from which credits are issued.
    #[serde(deserialize_with = "unit::quantity")]
    pub buffer: Bytes,
}

/// Data rate of a link over all lanes, after line code.
#[must_use]
pub fn data_rate(rate: Signalling, encoding: Encoding, lanes: Lanes) -> BytesPerSecond {
    let lane = match rate {
        Signalling::Qdr => 10e9 / 8.0 * Encoding::B8b10.efficiency(),
        Signalling::Fdr => 14.0625e9 / 8.0 * Encoding::B64b66.efficiency(),
        Signalling::Edr => 25.78125e9 / 8.0 * Encoding::B64b66.efficiency(),
        Signalling::Hdr => 50e9 / 8.0,
        Signalling::Ndr => 100e9 / 8.0,
        Signalling::Xdr => 200e9 / 8.0,
        // Its name is that of the whole link, whatever its lanes.
        Signalling::Ethernet(gigabits) => return BytesPerSecond(f64::from(gigabits) * 1e9 / 8.0),
        Signalling::Lane(rate) => rate.0 * encoding.efficiency(),
    };
    BytesPerSecond(lane * f64::from(lanes.0))
}
