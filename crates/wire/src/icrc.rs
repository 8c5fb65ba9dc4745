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

    /// The ICRC's state after the IP and UDP headers of a packet of `len` bytes, ICRC included. The
    /// identification is IPv4's; IPv6 has none.
    #[inline]
    #[must_use]
    pub fn begin(&self, len: u16, identification: u16) -> Begun {
        let udp_len = len.saturating_add(8);
        let mut bytes = [0xff; 8 + 40 + 8];
        let (udp, ports) = match self {
            Self::V4 { addresses, ports } => {
                let ip = &mut bytes[8..28];
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&udp_len.saturating_add(20).to_be_bytes());
                ip[4..6].copy_from_slice(&identification.to_be_bytes());
                // Do not fragment, offset 0.
                ip[6..8].copy_from_slice(&[0x40, 0]);
                ip[9] = 17;
                ip[12..16].copy_from_slice(&addresses[0].octets());
                ip[16..20].copy_from_slice(&addresses[1].octets());
                (28, ports)
            }
            Self::V6 { addresses, ports } => {
                let ip = &mut bytes[8..48];
                ip[0] = 0x6f;
                ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
                ip[6] = 17;
                ip[8..24].copy_from_slice(&addresses[0].octets());
                ip[24..40].copy_from_slice(&addresses[1].octets());
                (48, ports)
            }
        };
        bytes[udp..udp + 2].copy_from_slice(&ports[0].to_be_bytes());
        bytes[udp + 2..udp + 4].copy_from_slice(&ports[1].to_be_bytes());
        bytes[udp + 4..udp + 6].copy_from_slice(&udp_len.to_be_bytes());
        Begun::over(&bytes[..udp + 8])
    }

    /// A sender's ICRC over a packet that is whole but for its last four bytes.
    #[must_use]
    pub fn icrc(&self, covered: &[u8], identification: u16) -> [u8; ICRC_LEN] {
        let len = u16::try_from(covered.len() + ICRC_LEN).unwrap_or(u16::MAX);
        self.begin(len, identification).finish(covered)
    }

    /// Whether a packet's ICRC is what it must be.
    #[must_use]
    pub fn verify<T: AsRef<[u8]>>(&self, packet: &Packet<T>, identification: u16) -> bool {
        self.icrc(packet.covered(), identification) == packet.icrc()
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
        let mut bth = [0; bth::LEN];
        bth.copy_from_slice(&covered[..bth::LEN]);
        bth[bth::VARIANT] = 0xff;
        let mut hasher = Hasher::new_with_initial(self.0);
        hasher.update(&bth);
        hasher.update(&covered[bth::LEN..]);
        hasher.finalize().to_le_bytes()
    }
}
