//! Socket addresses in commands.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{Errno, Result};

/// An IP address and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// Address, or the wildcard of its family.
    pub ip: IpAddr,
    /// Port in host order; zero if unspecified.
    pub port: u16,
    /// Interface index of a link-local address.
    pub scope: u32,
}

/// Length of a `struct sockaddr_in6`, the form of addresses in commands.
pub const LEN: usize = 28;
const AF_IB: u16 = 27;

impl Address {
    /// The IPv4 wildcard.
    pub const ANY: Self = Self { ip: IpAddr::V4(Ipv4Addr::UNSPECIFIED), port: 0, scope: 0 };

    /// Parses a `sockaddr_in` or `sockaddr_in6`.
    ///
    /// # Errors
    /// EAFNOSUPPORT for other families.
    pub fn parse(bytes: &[u8; LEN]) -> Result<Self> {
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        match i32::from(u16::from_ne_bytes([bytes[0], bytes[1]])) {
            libc::AF_INET => {
                let ip = Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7]);
                Ok(Self { ip: ip.into(), port, scope: 0 })
            }
            libc::AF_INET6 => {
                let mut octets = [0; 16];
                octets.copy_from_slice(&bytes[8..24]);
                let scope = u32::from_ne_bytes([bytes[24], bytes[25], bytes[26], bytes[27]]);
                Ok(Self { ip: Ipv6Addr::from(octets).into(), port, scope })
            }
            _ => Err(Errno(libc::EAFNOSUPPORT)),
        }
    }

    /// Parses an address; `None` for family zero.
    ///
    /// # Errors
    /// EAFNOSUPPORT for other families.
    pub fn parse_optional(bytes: &[u8; LEN]) -> Result<Option<Self>> {
        if bytes[..2] == [0, 0] { Ok(None) } else { Self::parse(bytes).map(Some) }
    }

    /// Encodes a `sockaddr_in` or `sockaddr_in6`, padded with zeroes.
    #[must_use]
    pub fn encode(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[2..4].copy_from_slice(&self.port.to_be_bytes());
        match self.ip {
            IpAddr::V4(ip) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                bytes[4..8].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                bytes[8..24].copy_from_slice(&ip.octets());
                bytes[24..28].copy_from_slice(&self.scope.to_ne_bytes());
            }
        }
        bytes
    }

    /// Length of the encoded address without padding.
    #[must_use]
    pub fn encoded_len(&self) -> u16 {
        if self.ip.is_ipv4() { 16 } else { LEN as u16 }
    }

    /// Whether this is the wildcard of its family.
    #[must_use]
    pub fn is_wildcard(&self) -> bool {
        self.ip.is_unspecified()
    }

    /// The GID of the address.
    #[must_use]
    pub fn gid(&self) -> [u8; 16] {
        millstream_wire::gid(self.ip).octets()
    }

    /// The multicast GID of a group address (RoCE v2: IPv4-mapped, or the IPv6 address).
    #[must_use]
    pub fn multicast_gid(&self) -> Option<[u8; 16]> {
        self.ip.is_multicast().then(|| self.gid())
    }
}

/// A `sockaddr_ib` for `gid`.
#[must_use]
pub fn encode_ib(gid: [u8; 16], pkey: u16, service: u64) -> [u8; 128] {
    let mut bytes = [0; 128];
    bytes[..2].copy_from_slice(&AF_IB.to_ne_bytes());
    bytes[2..4].copy_from_slice(&pkey.to_be_bytes());
    bytes[8..24].copy_from_slice(&gid);
    bytes[24..32].copy_from_slice(&service.to_be_bytes());
    bytes[32..40].copy_from_slice(&u64::MAX.to_be_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for (text, scope) in [("127.0.0.1", 0), ("10.1.2.3", 0), ("::1", 0), ("fe80::1", 7)] {
            let address = Address { ip: text.parse().unwrap(), port: 4791, scope };
            assert_eq!(Address::parse(&address.encode()), Ok(address));
            assert_eq!(address.encode()[2..4], [0x12, 0xb7], "network order");
        }
        assert_eq!(Address::parse_optional(&[0; LEN]), Ok(None));
        let mut infiniband = [0; LEN];
        infiniband[..2].copy_from_slice(&AF_IB.to_ne_bytes());
        assert_eq!(Address::parse(&infiniband), Err(Errno(libc::EAFNOSUPPORT)));
    }

    #[test]
    fn ipv4_gids_are_mapped_addresses() {
        let address = Address { ip: "192.0.2.1".parse().unwrap(), port: 0, scope: 0 };
        assert_eq!(address.gid(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1]);
        assert_eq!(address.multicast_gid(), None);
        let group = Address { ip: "239.1.2.3".parse().unwrap(), ..address };
        assert_eq!(group.multicast_gid(), Some(group.gid()));
    }
}
