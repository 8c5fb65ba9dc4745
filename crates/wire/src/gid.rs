//! The global identifier that stands for an IP address (annex A17, 17.4.1).

use core::net::{IpAddr, Ipv6Addr};

/// An address as GIDs and global route headers hold it: IPv4 as a mapped address.
#[must_use]
pub const fn gid(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}
