//! The invariant CRC at the end of each packet (annex A17, 17.3; volume 1, 7.8.1).
//!
//! It covers everything that no router changes: the CRC-32 of Ethernet over eight bytes of ones (in place of
//! InfiniBand's local route header), the IP and UDP headers and the packet, where fields that change on the way
//! count as ones: type of service, time to live and checksum of IPv4; traffic class, flow label and hop limit of
//! IPv6; UDP's checksum; and the byte of the base transport header with the congestion bits. It is stored
//! in little-endian order.
//!
//! IPv4's identification is covered. Who sends through a socket cannot choose it and must know it: it is 0 where
//! fragmentation is forbidden and each datagram is sent on its own, and counts from 0 where the kernel cuts one
//! datagram into segments. Who receives through a socket does not see it: for a sender that counts otherwise it can only ask
//! whether some identification explains the ICRC, which checks 16 of the 32 bits (`millstream_link::icrc`).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crc32fast::Hasher;

use crate::{ICRC_LEN, Packet, bth};

/// Where packets come from and go to: what of it the ICRC covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flow {
    /// Over IPv4, with fragmentation forbidden.
    V4 {
        /// Source and destination address.
        addresses: [Ipv4Addr; 2],
        /// Source and destination port.
        ports: [u16; 2],
    },
    /// Over IPv6.
    V6 {
        /// Source and destination address.
        addresses: [Ipv6Addr; 2],
        /// Source and destination port.
        ports: [u16; 2],
    },
}

impl Flow {
    /// Packets from `source` to `destination`; None if one address is IPv4 and the other one IPv6.
    #[must_use]
    pub fn new(source: (IpAddr, u16), destination: (IpAddr, u16)) -> Option<Self> {
        let ports = [source.1, destination.1];
        match (source.0.to_canonical(), destination.0.to_canonical()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => Some(Self::V4 { addresses: [from, to], ports }),
            (IpAddr::V6(from), IpAddr::V6(to)) => Some(Self::V6 { addresses: [from, to], ports }),
            _ => None,
        }
    }

    /// Where packets come from.
    #[must_use]
    pub const fn source(&self) -> IpAddr {
        match self {
            Self::V4 { addresses, .. } => IpAddr::V4(addresses[0]),
            Self::V6 { addresses, .. } => IpAddr::V6(addresses[0]),
        }
    }

    /// Where packets go to.
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

    /// The CRC of what all packets of the flow have in common.
    #[must_use]
    pub fn prepare(&self) -> Prepared {
        // Lengths and identification are zero here: `Prepared::begin` adds what they change.
        let mut bytes = [0xff; 8 + 40 + 8];
        let (udp, ports, v4) = match self {
            Self::V4 { addresses, ports } => {
                let ip = &mut bytes[8..28];
                ip[0] = 0x45;
                // Length and identification; do not fragment, offset 0.
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
        Prepared { crc: Begun::over(&bytes[..udp + 8]).0, v4 }
    }

    /// A sender's ICRC over a packet that is whole but for its last four bytes.
    #[must_use]
    pub fn icrc(&self, covered: &[u8], identification: u16) -> [u8; ICRC_LEN] {
        self.prepare().icrc(covered, identification)
    }

    /// Whether a packet's ICRC is what it must be.
    #[must_use]
    pub fn verify<T: AsRef<[u8]>>(&self, packet: &Packet<T>, identification: u16) -> bool {
        self.icrc(packet.covered(), identification) == packet.icrc()
    }
}

/// What Ethernet's polynomial (IEEE 802.3, 3.2.9) is without its highest power, the next one in the lowest bit: the
/// order in which a byte's bits are sent.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// What each value of a byte changes in a CRC, beside zero in its place, when `behind` bytes follow it. A CRC is
/// linear: what several bytes change adds up, whatever the others are.
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

/// What a CRC must have begun with for a packet with this variant byte to end as one whose variant byte is all ones:
/// the change of that byte, taken back over it and the four bytes before.
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

/// A field of two bytes in network order with `behind` bytes behind it.
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

/// UDP's length, then its checksum.
static UDP_LENGTH: Field = Field::new(2);
/// IPv4's length, then the rest of its header and UDP's.
static V4_LENGTH: Field = Field::new(16 + 8);
static V4_IDENTIFICATION: Field = Field::new(14 + 8);
/// IPv6's payload length.
static V6_LENGTH: Field = Field::new(34 + 8);

/// A flow's headers but for lengths and identification, see [`Flow::prepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    crc: u32,
    v4: bool,
}

impl Prepared {
    /// Whether the packets have an identification.
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        self.v4
    }

    /// The ICRC's state after the IP and UDP headers of a packet of `len` bytes, ICRC included. The
    /// identification is IPv4's; IPv6 has none.
    #[inline]
    #[must_use]
    pub fn begin(self, len: u16, identification: u16) -> Begun {
        let udp = len.saturating_add(8);
        let ip = if self.v4 {
            V4_LENGTH.changes(udp.saturating_add(20)) ^ V4_IDENTIFICATION.changes(identification)
        } else {
            V6_LENGTH.changes(udp)
        };
        Begun(self.crc ^ ip ^ UDP_LENGTH.changes(udp))
    }

    /// A sender's ICRC over a packet that is whole but for its last four bytes.
    #[inline]
    #[must_use]
    pub fn icrc(self, covered: &[u8], identification: u16) -> [u8; ICRC_LEN] {
        let len = u16::try_from(covered.len() + ICRC_LEN).unwrap_or(u16::MAX);
        self.begin(len, identification).finish(covered)
    }
}

/// The ICRC of a received packet's headers as they came: any options, any flags.
///
/// `headers` are the IP header and the UDP header as a raw or packet socket delivers them. None if they are not
/// IPv4 or IPv6 (without extension headers) and UDP.
#[must_use]
pub fn begin_received(headers: &[u8]) -> Option<Begun> {
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
    Some(Begun::over(&bytes[..8 + ip_len + 8]))
}

/// An ICRC to be continued over a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun(u32);

impl Begun {
    #[inline]
    fn over(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(bytes);
        Self(hasher.finalize())
    }

    /// The four bytes for a packet; `covered` is the packet without them, and at least a base transport header.
    ///
    /// # Panics
    /// If it is shorter than that.
    #[inline]
    #[must_use]
    pub fn finish(self, covered: &[u8]) -> [u8; ICRC_LEN] {
        assert!(covered.len() >= bth::LEN, "a packet of {} bytes", covered.len());
        let mut hasher = Hasher::new_with_initial(self.0 ^ VARIANT[usize::from(covered[bth::VARIANT])]);
        hasher.update(covered);
        hasher.finalize().to_le_bytes()
    }
}
