//! The invariant CRC at the end of each packet (annex A17, 17.3; volume 1, 7.8.1).
//!
//! The ICRC is Ethernet's CRC-32 over eight bytes of ones, the IP and UDP headers and the packet. The ones
//! stand for the local route header. Fields that routers change count as ones: IPv4 type of service, time to
//! live and checksum; IPv6 traffic class, flow label and hop limit; the UDP checksum; the byte of the base
//! transport header with the congestion bits. The ICRC is stored in little-endian order.
//!
//! The ICRC covers the IPv4 identification, which the sender of a UDP socket does not choose. The kernel sets
//! it to 0 in a datagram that forbids fragmentation. With segmentation offload it counts from 0 in the
//! segments of a buffer. A UDP receiver does not see the identification; `millstream_link::icrc` handles
//! senders that count otherwise.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crc32fast::Hasher;

use crate::{ICRC_LEN, Packet, bth};

/// Addresses and UDP ports of a flow, as far as the ICRC covers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// IPv4, with fragmentation forbidden.
    V4 {
        /// Source and destination address.
        addresses: [Ipv4Addr; 2],
        /// Source and destination port.
        ports: [u16; 2],
    },
    /// IPv6.
    V6 {
        /// Source and destination address.
        addresses: [Ipv6Addr; 2],
        /// Source and destination port.
        ports: [u16; 2],
    },
}

impl Flow {
    /// The flow from `source` to `destination`; `None` if their address families differ.
    #[must_use]
    pub fn new(source: (IpAddr, u16), destination: (IpAddr, u16)) -> Option<Self> {
        let ports = [source.1, destination.1];
        match (source.0.to_canonical(), destination.0.to_canonical()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => Some(Self::V4 { addresses: [from, to], ports }),
            (IpAddr::V6(from), IpAddr::V6(to)) => Some(Self::V6 { addresses: [from, to], ports }),
            _ => None,
        }
    }

    /// Source address.
    #[must_use]
    pub const fn source(&self) -> IpAddr {
        match self {
            Self::V4 { addresses, .. } => IpAddr::V4(addresses[0]),
            Self::V6 { addresses, .. } => IpAddr::V6(addresses[0]),
        }
    }

    /// Destination address.
    #[must_use]
    pub const fn destination(&self) -> IpAddr {
        match self {
            Self::V4 { addresses, .. } => IpAddr::V4(addresses[1]),
            Self::V6 { addresses, .. } => IpAddr::V6(addresses[1]),
        }
    }

    /// Source and destination port.
    #[must_use]
    pub const fn ports(&self) -> [u16; 2] {
        match self {
            Self::V4 { ports, .. } | Self::V6 { ports, .. } => *ports,
        }
    }

    /// Computes the CRC of the headers that all packets of the flow share.
    #[must_use]
    pub fn crc(&self) -> FlowCrc {
        // Lengths and identification are zero here: `FlowCrc::begin` adds their contribution.
        let mut bytes = [0xff; 8 + 40 + 8];
        let (udp, ports, v4) = match self {
            Self::V4 { addresses, ports } => {
                let ip = &mut bytes[8..28];
                ip[0] = 0x45;
                // Length and identification; flag "do not fragment", offset 0.
                ip[2..8].copy_from_slice(&[0, 0, 0, 0, 0x40, 0]);
                ip[9] = 17;
                ip[12..16].copy_from_slice(&addresses[0].octets());
                ip[16..20].copy_from_slice(&addresses[1].octets());
                (28, ports, true)
            }
            Self::V6 { addresses, ports } => {
                let ip = &mut bytes[8..48];
                ip[0] = 0x6f;
                ip[4..6].copy_from_slice(&[0, 0]);
                ip[6] = 17;
                ip[8..24].copy_from_slice(&addresses[0].octets());
                ip[24..40].copy_from_slice(&addresses[1].octets());
                (48, ports, false)
            }
        };
        bytes[udp..udp + 2].copy_from_slice(&ports[0].to_be_bytes());
        bytes[udp + 2..udp + 4].copy_from_slice(&ports[1].to_be_bytes());
        bytes[udp + 4..udp + 6].copy_from_slice(&[0, 0]);
        FlowCrc { crc: Digest::over(&bytes[..udp + 8]).0, v4 }
    }

    /// The ICRC of a packet; `covered` is the packet without its last four bytes.
    #[must_use]
    pub fn icrc(&self, covered: &[u8], identification: u16) -> [u8; ICRC_LEN] {
        self.crc().icrc(covered, identification)
    }

    /// Whether the ICRC of a packet is correct.
    #[must_use]
    pub fn verify<T: AsRef<[u8]>>(&self, packet: &Packet<T>, identification: u16) -> bool {
        self.icrc(packet.covered(), identification) == packet.icrc()
    }
}

/// Ethernet's polynomial (IEEE 802.3, 3.2.9) in reflected form, without the highest power.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The contribution of each byte value to a CRC when `behind` bytes follow it. CRCs are linear: the
/// contributions of several bytes add up by XOR.
const fn changes(behind: u32) -> [u32; 256] {
    let mut table = [0; 256];
    let mut value = 1_usize;
    while value < 256 {
        let bit = value & value.wrapping_neg();
        table[value] = if bit == value {
            let (mut crc, mut steps) = (value as u32, 8 * (behind + 1));
            while steps > 0 {
                crc = (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg());
                steps -= 1;
            }
            crc
        } else {
            table[bit] ^ table[value ^ bit]
        };
        value += 1;
    }
    table
}

/// By variant byte: the correction to the initial CRC that makes the byte count as all ones. It is the
/// contribution of that byte, run backwards over the byte and the four bytes before it.
const VARIANT: [u32; 256] = {
    let mut table = [0; 256];
    let mut value = 0_usize;
    while value < 256 {
        let (mut crc, mut steps) = (value as u32 ^ 0xff, 8 * bth::VARIANT);
        while steps > 0 {
            crc = if crc >> 31 == 1 { ((crc ^ POLYNOMIAL) << 1) | 1 } else { crc << 1 };
            steps -= 1;
        }
        table[value] = crc;
        value += 1;
    }
    table
};

/// CRC contributions of a two-byte field in network order.
struct Field([[u32; 256]; 2]);

impl Field {
    const fn new(behind: u32) -> Self {
        Self([changes(behind + 1), changes(behind)])
    }

    #[inline]
    fn changes(&self, value: u16) -> u32 {
        let [high, low] = value.to_be_bytes();
        self.0[0][usize::from(high)] ^ self.0[1][usize::from(low)]
    }
}

/// The UDP length, followed by the UDP checksum.
static UDP_LENGTH: Field = Field::new(2);
/// The IPv4 length, followed by the rest of the IPv4 header and the UDP header.
static V4_LENGTH: Field = Field::new(16 + 8);
static V4_IDENTIFICATION: Field = Field::new(14 + 8);
/// The IPv6 payload length.
static V6_LENGTH: Field = Field::new(34 + 8);

/// The CRC of a flow's headers without lengths and identification; see [`Flow::crc`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowCrc {
    crc: u32,
    v4: bool,
}

impl FlowCrc {
    /// Whether the flow is IPv4, so that packets have an identification.
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        self.v4
    }

    /// The CRC state after the IP and UDP headers of a packet of `len` bytes, ICRC included. IPv6 ignores
    /// `identification`.
    #[inline]
    #[must_use]
    pub fn begin(self, len: u16, identification: u16) -> Digest {
        let udp = len.saturating_add(8);
        let ip = if self.v4 {
            V4_LENGTH.changes(udp.saturating_add(20)) ^ V4_IDENTIFICATION.changes(identification)
        } else {
            V6_LENGTH.changes(udp)
        };
        Digest(self.crc ^ ip ^ UDP_LENGTH.changes(udp))
    }

    /// The ICRC of a packet; `covered` is the packet without its last four bytes.
    #[inline]
    #[must_use]
    pub fn icrc(self, covered: &[u8], identification: u16) -> [u8; ICRC_LEN] {
        let len = u16::try_from(covered.len() + ICRC_LEN).unwrap_or(u16::MAX);
        self.begin(len, identification).finish(covered)
    }
}

/// The CRC state after IP and UDP headers as received, with any options and flags.
///
/// `headers` are the IP header and the UDP header as a raw or packet socket delivers them. `None` if they are
/// not IPv4 or IPv6 (without extension headers) and UDP.
#[must_use]
pub fn digest_headers(headers: &[u8]) -> Option<Digest> {
    let mut bytes = [0xff; 8 + 60 + 8];
    let ip_len = match headers.first()? >> 4 {
        4 => usize::from(headers[0] & 15) * 4,
        6 => 40,
        _ => return None,
    };
    if ip_len < 20 || headers.len() != ip_len + 8 {
        return None;
    }
    let covered = &mut bytes[8..8 + ip_len + 8];
    covered.copy_from_slice(headers);
    match headers[0] >> 4 {
        4 if headers[9] == 17 => {
            covered[1] = 0xff;
            covered[8] = 0xff;
            covered[10..12].fill(0xff);
        }
        6 if headers[6] == 17 => {
            covered[0] |= 0x0f;
            covered[1..4].fill(0xff);
            covered[7] = 0xff;
        }
        _ => return None,
    }
    covered[ip_len + 6..ip_len + 8].fill(0xff);
    Some(Digest::over(&bytes[..8 + ip_len + 8]))
}

/// The state of an ICRC computation after the IP and UDP headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest(u32);

impl Digest {
    #[inline]
    fn over(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(bytes);
        Self(hasher.finalize())
    }

    /// The ICRC of a packet; `covered` is the packet without its last four bytes.
    ///
    /// # Panics
    /// If `covered` is shorter than a base transport header.
    #[inline]
    #[must_use]
    pub fn finish(self, covered: &[u8]) -> [u8; ICRC_LEN] {
        assert!(covered.len() >= bth::LEN, "a packet of {} bytes", covered.len());
        let mut hasher = Hasher::new_with_initial(self.0 ^ VARIANT[usize::from(covered[bth::VARIANT])]);
        hasher.update(covered);
        hasher.finalize().to_le_bytes()
    }
}
