//! GIDs of IP addresses (annex A17, 17.4.1).

use core::net::{IpAddr, Ipv6Addr};

/// The GID of an IP address; IPv4 addresses are IPv4-mapped.
#[must_use]
pub const fn gid(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}
