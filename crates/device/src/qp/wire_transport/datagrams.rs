//! UD over RoCE v2: each packet is a message, without acknowledgements (IBTA volume 1, 9.8.2).

use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::Ordering;

use millstream_link::PacketInfo;
use millstream_proto::{Datagram, DatagramDestination, DeliveryError, Mtu, UdConfig, WorkId};
use millstream_wire::icrc::Flow;
use millstream_wire::{Packet, Pkey, Psn, Qkey, UDP_PORT, bth, deth};

use super::repeated_datagrams::{RepeatedDatagrams, has_come_back};
use super::responder_memory::ResponderMemory;
use super::route::Route;
use crate::cq::PacketPolling;
use crate::gid;
use crate::gid_table::GidTable;
use crate::multicast;
use crate::qp::Qp;
use crate::qp::datagram::{Piece, packet_type};
use crate::qp_table::Packet as ArrivedPacket;
use crate::send_wr::{SendWr, UdDestination};
use crate::types::{
    SEND_SOLICITED, WC_FLAG_GRH, WC_FLAG_WITH_IMM, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_OP_RECV,
    WR_SEND_WITH_IMM, total_len,
};
use millstream_lockfree::cqe::Cqe;

/// The packet side of a UD queue pair. The transport machine builds its packets and filters arriving ones, which are
/// delivered as datagrams of this host are ([`crate::qp::datagram`]).
#[derive(Debug)]
pub(in crate::qp) struct WireDatagrams {
    machine: millstream_proto::UdQueuePair,
    memory: ResponderMemory,
    packet: Vec<u8>,
    repeated: RepeatedDatagrams,
    /// Set once packets were sent or received: pollers then receive packets.
    polling: Option<PacketPolling>,
}

fn machine(qp: &Qp, psn: Psn) -> millstream_proto::UdQueuePair {
    millstream_proto::UdQueuePair::new(UdConfig {
        local_qp: qp.qpn,
        qkey: Qkey::new(qp.entry.qkey.load(Ordering::Relaxed)),
        pkey: Pkey::DEFAULT,
        mtu: Mtu::B4096,
        send_psn: psn,
    })
}

impl WireDatagrams {
    pub(in crate::qp) fn new(qp: &Qp) -> Option<Self> {
        let memory = ResponderMemory::new(qp)?;
        Some(Self {
            machine: machine(qp, Psn::default()),
            memory,
            packet: Vec::new(),
            repeated: RepeatedDatagrams::default(),
            polling: None,
        })
    }

    /// Makes pollers receive packets from now on.
    pub(in crate::qp) fn start_polling(&mut self, qp: &Qp) {
        self.polling.get_or_insert_with(|| PacketPolling::new(vec![qp.send.cq.clone(), qp.recv.cq.clone()]));
    }

    /// Sets the first packet sequence number.
    pub(in crate::qp) fn start(&mut self, qp: &Qp, psn: Psn) {
        self.machine = machine(qp, psn);
    }

    /// Sends a datagram, or drops it.
    ///
    /// # Safety
    /// The pieces are readable memory.
    pub(in crate::qp) unsafe fn send(
        &mut self,
        qp: &Qp,
        wr: &SendWr<'_>,
        to: &UdDestination,
        pieces: &[Piece],
    ) {
        let (Some(port), Some(route)) = (qp.adapter.port.port(), route_of(&to.grh)) else { return };
        let ends = [(route.source, port.source_port()), (route.destination, UDP_PORT)];
        let Some(flow) = Flow::new(ends[0], ends[1]) else { return };
        self.start_polling(qp);
        let datagram = Datagram {
            id: WorkId(0),
            to: DatagramDestination { flow, qp: to.qpn, qkey: to.qkey },
            len: total_len(wr.sges) as u32,
            immediate: (wr.opcode == WR_SEND_WITH_IMM).then(|| wr.imm.to_ne_bytes()),
            solicited: wr.flags & SEND_SOLICITED != 0,
        };
        let len = datagram.packet_len();
        self.packet.resize(len, 0);
        let made = self.machine.packet(&datagram, &mut self.packet, |mut payload| {
            for (from, len) in pieces {
                let (to, rest) = payload.split_at_mut(*len as usize);
                // SAFETY: the caller vouches for the pieces.
                to.copy_from_slice(unsafe { std::slice::from_raw_parts(*from, *len as usize) });
                payload = rest;
            }
        });
        if made.is_ok() {
            // A datagram is dropped if the socket has no room.
            let _ = port.send_sealed(&mut [route.outgoing(&mut self.packet, len)]);
        }
    }

    /// Takes packets that arrived.
    pub(in crate::qp) fn handle_packets(&mut self, qp: &Qp, packets: &[ArrivedPacket<'_>]) {
        // Initiators of this host deliver under the same lock.
        let Some(_lease) = qp.entry.delivery.lock(qp.adapter.id.pid) else { return };
        for (info, bytes) in packets {
            if let Ok(packet) = Packet::new_checked(*bytes) {
                self.take(qp, info, &packet);
            }
        }
    }

    fn take(&mut self, qp: &Qp, info: &PacketInfo, packet: &Packet<&[u8]>) {
        let (Some(deth), header) = (packet.deth(), packet.bth()) else { return };
        // The Q_Key can change at any time.
        self.machine.set_qkey(Qkey::new(qp.entry.qkey.load(Ordering::Relaxed)));
        let of_group = header.dest_qp() == multicast::MULTICAST_QPN;
        if of_group
            && (has_come_back(info, &GidTable::current())
                || self.repeated.has(info, deth.src_qp(), header.psn()))
        {
            return;
        }
        let own = of_group && deth.src_qp() == qp.qpn;
        let wanted = self.machine.admits(packet)
            && !(own && qp.blocks_loopback() && gid::is_local(&millstream_wire::gid(info.source).octets()))
            && self.memory.takes_datagrams();
        // The memory of an abandoned receive may be the application's again, so this datagram is dropped, as one of this host
        // is.
        if !wanted || self.memory.finds_abandoned() || !self.memory.take_receive() {
            return;
        }
        self.start_polling(qp);
        let payload = packet.payload();
        let route_header = route_header(info, payload.len());
        let placed = self.memory.fill(0, &route_header).and_then(|()| self.memory.fill(40, payload));
        if let Err(fault) = placed {
            // The datagram is dropped, and its receive completes in error. The queue pair stays usable (9.8.3.2).
            let status = if fault == DeliveryError::TooLong { WC_LOC_LEN_ERR } else { WC_LOC_PROT_ERR };
            let cqe = Cqe { status: status as u16, opcode: WC_OP_RECV as u16, ..Cqe::default() };
            return self.memory.complete_or_overrun(cqe, true);
        }
        let imm = packet.imm_dt().map(|imm| u32::from_ne_bytes(imm.data()));
        let cqe = Cqe {
            opcode: WC_OP_RECV as u16,
            byte_len: (payload.len() + route_header.len()) as u32,
            imm: imm.unwrap_or(0),
            wc_flags: WC_FLAG_GRH | if imm.is_some() { WC_FLAG_WITH_IMM } else { 0 },
            detail: deth.src_qp().get() | u32::from(packet_type(&route_header)) << 24,
            ..Cqe::default()
        };
        self.memory.complete_or_overrun(cqe, header.solicited());
    }
}

/// The route that a global route header describes.
fn route_of(header: &[u8; 40]) -> Option<Route> {
    let gid = |bytes: &[u8]| -> [u8; 16] { bytes.try_into().expect("sixteen bytes") };
    if header[0] >> 4 != 6 {
        let [source, destination] = [32, 36].map(|at| {
            let bytes: [u8; 4] = header[at..at + 4].try_into().expect("four bytes");
            millstream_wire::gid(IpAddr::from(bytes)).octets()
        });
        return Route::new(&source, &destination, interface(&source, &destination), header[21]);
    }
    let first = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
    let (source, destination) = (gid(&header[8..24]), gid(&header[24..40]));
    Route::new(&source, &destination, interface(&source, &destination), (first >> 20) as u8)
}

/// The outgoing interface, where the destination does not determine it.
fn interface(source: &[u8; 16], destination: &[u8; 16]) -> u32 {
    let ambiguous = Ipv6Addr::from(*destination).is_unicast_link_local() || multicast::is_group(destination);
    if ambiguous { gid::interface_of(source).unwrap_or(0) } else { 0 }
}

/// The header in front of the receiver's data: the packet's IP header, as far as a socket reports it (annex A17.4.5.2).
fn route_header(info: &PacketInfo, len: usize) -> [u8; 40] {
    let mut header = [0; 40];
    let udp_len = (8 + bth::LEN + deth::LEN + len + millstream_wire::ICRC_LEN) as u16;
    match (info.source, info.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = &mut header[20..];
            ip[0] = 0x45;
            ip[1] = info.tos;
            ip[2..4].copy_from_slice(&(20 + udp_len).to_be_bytes());
            ip[6] = 0x40;
            ip[8] = 64;
            ip[9] = libc::IPPROTO_UDP as u8;
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..20].copy_from_slice(&destination.octets());
        }
        (source, destination) => {
            header[..4].copy_from_slice(&(6u32 << 28 | u32::from(info.tos) << 20).to_be_bytes());
            header[4..6].copy_from_slice(&udp_len.to_be_bytes());
            header[6] = libc::IPPROTO_UDP as u8;
            header[7] = 64;
            header[8..24].copy_from_slice(&millstream_wire::gid(source).octets());
            header[24..40].copy_from_slice(&millstream_wire::gid(destination).octets());
        }
    }
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_header_gives_the_route_back() {
        for (source, destination) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let info = PacketInfo {
                source: source.parse().unwrap(),
                source_port: 50000,
                destination: destination.parse().unwrap(),
                interface: 0,
                tos: 0x28,
            };
            let route = route_of(&route_header(&info, 100)).unwrap();
            assert_eq!((route.source, route.destination), (info.source, info.destination));
            assert_eq!(route.tos & !3, 0x28);
        }
    }
}
