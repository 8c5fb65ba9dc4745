//! The route of packets: addresses, interface, traffic class.

use std::net::{IpAddr, Ipv6Addr};

use millstream_link::Outgoing;

/// The route of a queue pair's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qp) struct Route {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// Index of the source address's interface, where the destination does not determine it.
    pub(super) interface: u32,
    /// Type of service, or traffic class.
    pub(super) tos: u8,
}

impl Route {
    /// The route between two GIDs; None if their address families differ.
    pub(in crate::qp) fn new(
        source: &[u8; 16],
        destination: &[u8; 16],
        interface: u32,
        tos: u8,
    ) -> Option<Self> {
        let [source, destination] = [source, destination].map(|gid| Ipv6Addr::from(*gid).to_canonical());
        // Only link-local and multicast addresses leave the interface open.
        let ambiguous = match destination {
            IpAddr::V4(ip) => ip.is_multicast(),
            IpAddr::V6(ip) => ip.is_multicast() || ip.is_unicast_link_local(),
        };
        (source.is_ipv4() == destination.is_ipv4()).then_some(Self {
            source,
            destination,
            interface: if ambiguous { interface } else { 0 },
            // The two low bits are for the network: ECN-capable transport (RFC 3168).
            tos: tos & !0b11 | 0b10,
        })
    }

    /// A batch of packets of `segment` bytes each, the last one possibly shorter.
    pub(super) fn outgoing<'a>(&self, bytes: &'a mut [u8], segment: usize) -> Outgoing<'a> {
        Outgoing {
            source: self.source,
            destination: self.destination,
            interface: self.interface,
            tos: self.tos,
            segment,
            bytes,
        }
    }
}
