//! Unreliable datagrams: one queue pair, many receivers, no acknowledgements (IBTA volume 1, 9.8.2).
//!
//! A receiving queue pair has many initiators at once. Each delivers under a lock in the receiver's entry; an owner that
//! withdraws memory waits for that lock. A datagram that the receiver cannot take is dropped.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;

use super::keys::{AccessRight, LocalKeys, RemoteKeys};
use super::remote_qp::{RemoteQp, ResponderStatus, SrqLimit};
use super::transfer::{self, ExecError, local_address, protection};
use super::wire_transport::WireDatagrams;
use super::{Qp, QpType};
use crate::caps::MAX_SGE;
use crate::ipc::{Message, Op};
use crate::multicast;
use crate::path;
use crate::peer::Peer;
use crate::qp_table::Packet as ArrivedPacket;
use crate::send_wr::{SendWr, UdDestination};
use crate::types::{
    SEND_SOLICITED, Sge, WC_FLAG_GRH, WC_FLAG_WITH_IMM, WC_OP_RECV, WR_SEND_WITH_IMM, total_len,
};
use millstream_lockfree::CancelGuard;
use millstream_lockfree::cq_ring::PushError;
use millstream_lockfree::cqe::Cqe;
use millstream_quantity::{Psn, Qkey, Qpn};

/// Longest datagram: the port's MTU, bytes.
pub(super) const MAX_DATAGRAM: u64 = 4096;

/// The transport of a datagram queue pair.
#[derive(Debug)]
pub(super) struct DatagramTransport {
    receivers: Receivers,
    /// Receivers on other hosts are reached by packets, unless that is forbidden or there is no port.
    wire: Option<Box<WireDatagrams>>,
}

/// Receivers on this host that a queue pair has sent to, by number.
#[derive(Debug, Default)]
struct Receivers(HashMap<Qpn, Receiver>);

/// Most receivers that are cached. Beyond that the cache is cleared; finding a receiver again is cheap.
const MAX_CACHED: usize = 1024;

#[derive(Debug)]
struct Receiver {
    // Order matters: references into the peer's arena are dropped before the peer.
    target: RemoteQp,
    keys: RemoteKeys,
    peer: Arc<Peer>,
}

impl Receivers {
    fn find(&mut self, qp: &Qp, to: &UdDestination) -> Option<&mut Receiver> {
        let known = self.0.get(&to.qpn).is_some_and(|r| r.peer.alive() && r.target.is_same());
        if !known {
            self.0.remove(&to.qpn);
            if self.0.len() >= MAX_CACHED {
                self.0.clear();
            }
            let peer = qp.adapter.peer_of(to.qpn).ok()?;
            let target = RemoteQp::bind(&peer, to.qpn)?;
            self.0.insert(to.qpn, Receiver { target, keys: RemoteKeys::default(), peer });
        }
        self.0.get_mut(&to.qpn)
    }

    /// Takes out the receivers whose process has exited.
    fn take_dead(&mut self) -> Vec<Receiver> {
        self.0.extract_if(|_, receiver| !receiver.peer.alive()).map(|(_, receiver)| receiver).collect()
    }
}

/// A contiguous piece of a message in local memory.
pub(super) type Piece = (*const u8, u32);
/// The pieces of a message.
pub(super) type Pieces = ArrayVec<Piece, { MAX_SGE as usize }>;
/// The elements of one receive.
pub(super) type Elements = ArrayVec<Sge, { MAX_SGE as usize }>;

impl DatagramTransport {
    /// Sets up the transport of a queue pair in its transition to RTR.
    pub(super) fn new(qp: &Qp, wire: bool) -> Self {
        let mut wire = if wire { WireDatagrams::new(qp).map(Box::new) } else { None };
        if path::is_wire()
            && let Some(wire) = &mut wire
        {
            wire.start_polling(qp);
        }
        Self { receivers: Receivers::default(), wire }
    }

    /// Sets the first packet sequence number.
    pub(super) fn start(&mut self, qp: &Qp, psn: Psn) {
        if let Some(wire) = &mut self.wire {
            wire.start(qp, psn);
        }
    }

    /// Takes packets that arrived.
    pub(super) fn handle_packets(&mut self, qp: &Qp, packets: &[ArrivedPacket<'_>]) {
        if let Some(wire) = &mut self.wire {
            wire.handle_packets(qp, packets);
        }
    }

    /// Takes out what refers to processes that have exited.
    pub(super) fn take_dead(&mut self) -> impl Send + use<> {
        self.receivers.take_dead()
    }

    /// Sends a datagram. An error is the sender's; a datagram that the receiver cannot take is dropped.
    pub(super) fn execute(
        &mut self,
        local_keys: &mut LocalKeys,
        qp: &Qp,
        wr: &SendWr<'_>,
    ) -> Result<(), ExecError> {
        let mut pieces = Pieces::new();
        self::pieces(local_keys, qp, wr, &mut pieces)?;
        // SAFETY: the pieces are the application's registered (or inline) memory.
        unsafe { self.deliver(qp, wr, &pieces) };
        Ok(())
    }

    /// Delivers a datagram, or drops it.
    ///
    /// # Safety
    /// The pieces are readable memory.
    unsafe fn deliver(&mut self, qp: &Qp, wr: &SendWr<'_>, pieces: &[Piece]) {
        let Some(to) = wr.to else { return };
        // The highest bit selects the sender's own Q_Key (10.2.5).
        let qkey =
            if to.qkey.get() >> 31 == 0 { to.qkey } else { Qkey::new(qp.entry.qkey.load(Ordering::Relaxed)) };
        let to = UdDestination { qkey, ..to };
        if to.qpn == multicast::MULTICAST_QPN {
            if !path::is_wire() {
                // SAFETY: passed on.
                unsafe { deliver_to_group(&mut self.receivers, qp, wr, &to, pieces) };
            }
            // Packets go to the members on other hosts, or to all members if shared memory is not used.
            if let (Some(wire), Some(_)) = (&mut self.wire, multicast::group_of(&to.grh)) {
                let _uncancelled = CancelGuard::new();
                // SAFETY: passed on.
                unsafe { wire.send(qp, wr, &to, pieces) };
            }
            return;
        }
        if to.on_this_host {
            // SAFETY: passed on.
            unsafe { deliver_to(&mut self.receivers, qp, wr, to, pieces) };
        } else if let Some(wire) = &mut self.wire {
            let _uncancelled = CancelGuard::new();
            // SAFETY: passed on.
            unsafe { wire.send(qp, wr, &to, pieces) };
        }
    }
}

/// Delivers a copy to each member of a multicast group, including the sender's own queue pair if it is attached.
///
/// # Safety
/// The pieces are readable memory.
#[cold]
unsafe fn deliver_to_group(
    receivers: &mut Receivers,
    qp: &Qp,
    wr: &SendWr<'_>,
    to: &UdDestination,
    pieces: &[Piece],
) {
    let Some(group) = multicast::group_of(&to.grh) else { return };
    let _uncancelled = CancelGuard::new();
    for qpn in qp.adapter.multicast.members(&group) {
        if qpn != qp.qpn || !qp.blocks_loopback() {
            // SAFETY: the caller vouches for the pieces.
            unsafe { deliver_to(receivers, qp, wr, UdDestination { qpn, ..*to }, pieces) };
        }
    }
}

/// # Safety
/// The pieces are readable memory.
#[inline]
unsafe fn deliver_to(
    receivers: &mut Receivers,
    qp: &Qp,
    wr: &SendWr<'_>,
    to: UdDestination,
    pieces: &[Piece],
) {
    let Some(receiver) = receivers.find(qp, &to) else { return };
    let Receiver { target, keys, peer } = receiver;
    let entry = &target.entry;
    let Some(guard) = entry.delivery.lock(qp.adapter.id.pid) else { return };
    let right_kind = entry.kind.load(Ordering::Relaxed) == QpType::Ud as u32;
    if target.responder_status(Qpn::default()) != ResponderStatus::Ready
        || !right_kind
        || entry.qkey.load(Ordering::Relaxed) != to.qkey.get()
    {
        return;
    }
    if target.has_abandoned() {
        // The record of the abandoned receive must not be overwritten, nor its memory, which the application may use
        // already. So this datagram is dropped.
        drop(guard);
        return peer.send(Message::new(Op::RecvAbandoned, [to.qpn.get()]));
    }
    let Ok((receive, limit)) = target.take_receive(qp.owner_id()) else { return };
    target.record_receive(receive);
    let mut elements = Elements::new();
    target.read_receive(receive, &mut elements);
    let len = total_len(wr.sges);
    let mut status = 0;
    if len + to.grh.len() as u64 > total_len(&elements) {
        // The message is dropped. Its receive completes in error, so that it is not lost. The queue pair
        // stays usable (9.8.3.2 leaves this to the adapter).
        status = crate::types::WC_LOC_LEN_ERR;
    } else {
        let header: Piece = (to.grh.as_ptr(), to.grh.len() as u32);
        let message = std::iter::once(header).chain(pieces.iter().copied());
        // SAFETY: the header is ours and the caller vouches for the pieces.
        if unsafe { transfer::scatter(keys, peer, target, message, &elements) }.is_err() {
            status = crate::types::WC_LOC_PROT_ERR;
        }
    }
    let with_imm = wr.opcode == WR_SEND_WITH_IMM;
    let cqe = Cqe {
        status: status as u16,
        opcode: WC_OP_RECV as u16,
        byte_len: (len + to.grh.len() as u64) as u32,
        imm: if with_imm { wr.imm } else { 0 },
        wc_flags: WC_FLAG_GRH | if with_imm { WC_FLAG_WITH_IMM } else { 0 },
        detail: if status == 0 { qp.qpn.get() | u32::from(packet_type(&to.grh)) << 24 } else { 0 },
        ..Cqe::default()
    };
    let solicited = wr.flags & SEND_SOLICITED != 0 || status != 0;
    let completed = target.complete_receive(qp.owner_id(), receive, cqe, solicited);
    target.release_receive();
    drop(guard);
    if completed == Err(PushError::Full) {
        peer.send(Message::new(Op::CqOverrun, [to.qpn.get()]));
    }
    let signal = completed.unwrap_or(false);
    if limit == SrqLimit::Reached {
        peer.send(Message::new(Op::SrqLimit, [to.qpn.get()]));
    }
    if signal {
        peer.signal(target.cq.channel());
    }
}

/// The network header type of a datagram, for the completion (annex A17.4.5.1). `struct ibv_wc` has no field
/// for it, and Ethernet has no service level. So adapters store the type in the field `sl`, where programs
/// such as UCX read it. The value is 8 for a UDP header, plus 1 for IPv6 or 2 for IPv4; 0 for RoCE v1.
pub(super) fn packet_type(header: &[u8; 40]) -> u8 {
    match (header[0] >> 4, i32::from(header[6])) {
        (6, libc::IPPROTO_UDP) => 8 | 1,
        (6, _) => 0,
        _ => 8 | 2,
    }
}

/// Finds the local pieces of a datagram; `ExecError` is the sender's own fault.
pub(super) fn pieces(
    local: &mut LocalKeys,
    qp: &Qp,
    wr: &SendWr<'_>,
    out: &mut Pieces,
) -> Result<(), ExecError> {
    for sge in wr.sges.iter().take(out.capacity()) {
        let from = local_address(qp, local, wr.flags, sge, AccessRight::Read).map_err(protection)?;
        out.push((from.cast_const(), sge.length));
    }
    Ok(())
}
