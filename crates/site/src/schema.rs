//! The file as it is written: words with their places in the text, for errors that point at the line.

use crate::unit::{Frequency, Length, Rate, Size, Time};
use serde::Deserialize;
use serde::de::{self, Deserializer};
use std::num::NonZeroU32;
use toml::Spanned;

/// A site file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SiteFile {
    /// What people call the site.
    #[serde(default)]
    pub name: String,
    /// A sentence about it.
    #[serde(default)]
    pub description: String,
    /// Kinds of host.
    #[serde(default)]
    pub host: Vec<Spanned<Host>>,
    /// Network switches.
    #[serde(default)]
    pub switch: Vec<Spanned<Switch>>,
    /// Cables between adapters and switches.
    #[serde(default)]
    pub link: Vec<Spanned<Link>>,
    /// Tori of adapters with six links each.
    #[serde(default)]
    pub torus: Vec<Spanned<Torus>>,
    /// Cards that nodes reach over the network.
    #[serde(default)]
    pub card: Vec<NetworkCard>,
}

/// A card that nodes reach over the network, whatever host it is in, if any.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkCard {
    /// Its name.
    pub name: Spanned<String>,
    /// Where it listens: `host:port`.
    pub address: Spanned<String>,
    /// Anything that people should know.
    #[serde(default)]
    pub note: String,
}

/// A host, or `count` alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Its name; with `count`, names are `name0`, `name1` and so on.
    pub name: Spanned<String>,
    /// How many alike; names get numbers if given.
    pub count: Option<NonZeroU32>,
    /// Sockets, `socket0`, `socket1` and so on.
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
}

/// A processor socket with its memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Socket {
    /// The processor as sold.
    pub processor: String,
    /// Cores.
    pub cores: NonZeroU32,
    /// Nominal clock.
    pub clock: Frequency,
    /// Memory of this socket.
    pub memory: Option<Size>,
    /// Bandwidth of that memory.
    #[serde(rename = "memory-bandwidth")]
    pub memory_bandwidth: Option<Rate>,
}

/// Something in a PCIe tree: a switch, an adapter or a card.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieDevice {
    /// Its name within the host.
    pub name: Spanned<String>,
    /// The part as sold.
    pub model: String,
    /// The socket or PCIe switch above it.
    pub parent: Spanned<String>,
    /// The connection to its parent.
    pub pcie: PcieLink,
    /// Latency from port to port, for switches.
    pub latency: Option<Time>,
    /// Memory that others can reach, for cards.
    pub memory: Option<Memory>,
    /// Whether the adapter or card is alone, without a host processor behind it.
    #[serde(default)]
    pub standalone: bool,
}

/// A card's memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// For example `HBM2` or `GDDR5`.
    pub kind: String,
    /// All of it.
    pub size: Size,
    /// Independent channels.
    pub channels: NonZeroU32,
    /// Data path of one channel's port, in bits.
    pub width: Width,
    /// Clock of that port.
    pub clock: Frequency,
}

/// A data path's width in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width(pub u32);

impl<'de> Deserialize<'de> for Width {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bits = u32::deserialize(deserializer)?;
        if bits.is_power_of_two() && (8..=4096).contains(&bits) {
            Ok(Self(bits))
        } else {
            Err(de::Error::custom(format!("width of {bits} bits: a power of two from 8 to 4096")))
        }
    }
}

/// A PCIe link: generation and lanes, with the payload sizes that were negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieLink {
    /// 1 to 5.
    pub generation: Generation,
    /// 1, 2, 4, 8, 12, 16 or 32.
    pub lanes: PcieLanes,
    /// Largest payload of a packet, in bytes.
    #[serde(default = "PayloadSize::usual_payload", rename = "max-payload")]
    pub max_payload: PayloadSize,
    /// Largest read request, in bytes.
    #[serde(default = "PayloadSize::usual_request", rename = "max-read-request")]
    pub max_read_request: PayloadSize,
}

/// Generation of PCI Express.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Generation(pub u8);

impl<'de> Deserialize<'de> for Generation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u8::deserialize(deserializer)? {
            generation @ 1..=5 => Ok(Self(generation)),
            other => Err(de::Error::custom(format!("PCIe generation {other}: 1 to 5"))),
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
            other => Err(de::Error::custom(format!("PCIe link of {other} lanes: 1, 2, 4, 8, 12, 16 or 32"))),
        }
    }
}

/// A size that PCIe encodes in three bits: 128 to 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PayloadSize(pub u32);

impl PayloadSize {
    fn usual_payload() -> Self {
        Self(256)
    }

    fn usual_request() -> Self {
        Self(512)
    }
}

impl<'de> Deserialize<'de> for PayloadSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u32::deserialize(deserializer)? {
            bytes @ (128 | 256 | 512 | 1024 | 2048 | 4096) => Ok(Self(bytes)),
            other => {
                Err(de::Error::custom(format!("{other} B: PCIe knows 128, 256, 512, 1024, 2048 and 4096")))
            }
        }
    }
}

/// A network switch.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// Its name.
    pub name: Spanned<String>,
    /// The part as sold.
    #[serde(default)]
    pub model: String,
    /// Ports; no more links than that may end here.
    pub ports: NonZeroU32,
    /// Latency from port to port.
    pub latency: Time,
}

/// Signalling of a network link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Signalling {
    /// InfiniBand QDR: 10 Gb/s a lane, 8b/10b.
    Qdr,
    /// InfiniBand FDR: 14.0625 Gb/s a lane, 64b/66b.
    Fdr,
    /// InfiniBand EDR: 25.78125 Gb/s a lane, 64b/66b.
    Edr,
    /// InfiniBand HDR: 50 Gb/s a lane after encoding.
    Hdr,
    /// Any other: signalling rate of one lane, encoded as [`Link::encoding`] says.
    Lane(Rate),
}

impl<'de> Deserialize<'de> for Signalling {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Ok(match text.as_str() {
            "QDR" => Self::Qdr,
            "FDR" => Self::Fdr,
            "EDR" => Self::Edr,
            "HDR" => Self::Hdr,
            other => Self::Lane(
                other
                    .parse()
                    .map_err(|error| de::Error::custom(format!("{error}; or one of QDR, FDR, EDR, HDR")))?,
            ),
        })
    }
}

/// Line code of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Encoding {
    /// 8 bits in 10.
    #[serde(rename = "8b/10b")]
    B8b10,
    /// 64 bits in 66.
    #[serde(rename = "64b/66b")]
    B64b66,
    /// The rate is given after encoding.
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
            other => Err(de::Error::custom(format!("network link of {other} lanes: 1, 2, 4, 8 or 12"))),
        }
    }
}

/// Largest packet payload of a network link.
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
            other => Err(de::Error::custom(format!("MTU of {other} B: 64 to 65536, a multiple of 4"))),
        }
    }
}

/// A cable, or one from each host of a kind: `from = "node*.hca"`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// `host.adapter` or a switch; `*` stands for each host of a count.
    pub from: Spanned<String>,
    /// The same.
    pub to: Spanned<String>,
    /// Rate of a lane.
    pub rate: Signalling,
    /// Line code, where the rate does not imply it.
    #[serde(default)]
    pub encoding: Encoding,
    /// Lanes side by side.
    #[serde(default)]
    pub lanes: Lanes,
    /// Largest payload of a packet.
    #[serde(default)]
    pub mtu: Mtu,
    /// Cable.
    pub length: Option<Length>,
}

/// A torus: one adapter of each host, links to both neighbours in each dimension.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Torus {
    /// Its name.
    pub name: Spanned<String>,
    /// `host*.adapter`; as many hosts as the dimensions' product.
    pub adapters: Spanned<String>,
    /// Nodes along each dimension.
    pub dimensions: Spanned<Vec<NonZeroU32>>,
    /// Rate of a lane.
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
    /// Receive buffer of a channel, which its credits stand for.
    pub buffer: Size,
}

/// What a signalling and its encoding bring, in bytes a second over all lanes.
#[must_use]
pub fn data_rate(rate: Signalling, encoding: Encoding, lanes: Lanes) -> Rate {
    let lane = match rate {
        Signalling::Qdr => 10e9 / 8.0 * Encoding::B8b10.efficiency(),
        Signalling::Fdr => 14.0625e9 / 8.0 * Encoding::B64b66.efficiency(),
        Signalling::Edr => 25.78125e9 / 8.0 * Encoding::B64b66.efficiency(),
        Signalling::Hdr => 50e9 / 8.0,
        Signalling::Lane(rate) => rate.0 * encoding.efficiency(),
    };
    Rate(lane * f64::from(lanes.0))
}
