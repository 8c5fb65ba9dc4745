//! Multicast datagrams that a queue pair would get twice. A host with several interfaces on one segment gets a copy by each of
//! them, and by another one what it has sent itself.

use std::net::IpAddr;

use millstream_link::PacketInfo;
use millstream_wire::{Psn, Qpn, gid};

use crate::gid_table::GidTable;

/// Most datagrams that are remembered: more than arrive by one interface before another one has its turn.
const PLACES: usize = 2048;

/// A datagram, and the interface by which it has arrived.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    source: IpAddr,
    qp: Qpn,
    psn: Psn,
    interface: u32,
}

/// The last datagrams, by packet sequence number.
#[derive(Debug, Default)]
pub(super) struct RepeatedDatagrams {
    /// Empty before the first datagram.
    places: Vec<Option<Arrived>>,
}

impl RepeatedDatagrams {
    /// Whether a datagram of this queue pair has arrived by another interface. Those of one interface are different ones, or
    /// the network has repeated them.
    pub(super) fn has(&mut self, info: &PacketInfo, qp: Qpn, psn: Psn) -> bool {
        if self.places.is_empty() {
            self.places.resize(PLACES, None);
        }
        let place = &mut self.places[psn.get() as usize % PLACES];
        let is_it = |other: &Arrived| (other.source, other.qp, other.psn) == (info.source, qp, psn);
        if let Some(other) = place.filter(is_it) {
            return other.interface != info.interface;
        }
        *place = Some(Arrived { source: info.source, qp, psn, interface: info.interface });
        false
    }
}

/// Whether a datagram of this host has come back by an interface that does not have its source address. Members on this host got
/// it when it was sent: through shared memory, or by the interface of its source address.
pub(super) fn has_come_back(info: &PacketInfo, table: &GidTable) -> bool {
    let source = gid(info.source).octets();
    let mut interfaces =
        table.entries().filter(|(_, entry)| entry.raw == source).map(|(_, entry)| entry.ifindex);
    let Some(first) = interfaces.next() else { return false };
    first != info.interface && !interfaces.any(|other| other == info.interface)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(source: &str, interface: u32) -> PacketInfo {
        PacketInfo {
            source: source.parse().expect("an address"),
            source_port: 50_000,
            destination: "ff0e::7".parse().expect("an address"),
            interface,
            tos: 0,
        }
    }

    #[test]
    fn a_copy_by_another_interface_is_a_repetition() {
        let mut arrived = RepeatedDatagrams::default();
        let mut has =
            |source, interface, qp, psn| arrived.has(&info(source, interface), Qpn::new(qp), Psn::new(psn));
        // A burst by one interface, then by the other one.
        assert!((0..1000).all(|psn| !has("fd09::1", 3, 5, psn)));
        assert!((0..1000).all(|psn| has("fd09::1", 4, 5, psn)));
        assert!(!has("fd09::1", 3, 5, 7), "repeated by the network or the sender");
        assert!(!has("fd09::1", 4, 6, 7) && !has("fd09::2", 4, 5, 8), "of other senders");
        assert!(!has("fd09::1", 4, 5, 1000), "first by the other one");
        assert!(has("fd09::1", 3, 5, 1000));
    }

    #[test]
    fn datagrams_of_this_host_come_by_the_interface_of_their_address() {
        let table = GidTable::current();
        let (_, own) = table.entries().next().expect("loopback at least");
        let source = std::net::Ipv6Addr::from(own.raw).to_canonical().to_string();
        assert!(!has_come_back(&info(&source, own.ifindex), &table));
        assert!(has_come_back(&info(&source, u32::MAX), &table));
        assert!(!has_come_back(&info("2001:db8::1", u32::MAX), &table), "of another host");
    }
}
