//! This process's memory and receive queues for requests that arrive as packets.
//!
//! The requests are executed by the code of the local transport, with this process as initiator and target. So keys,
//! receive queues and completion queues have one set of rules (`transfer`, `remote_memory`, `remote_qp`, `keys`). The send
//! queue's lock is held; an owner that withdraws memory waits for it. Operations are announced in the entry as well, for
//! owners that must not wait for that lock.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_lockfree::RobustGuard;
use millstream_proto::{DeliveryError, NakReason};
use millstream_quantity::{Qpn, Srqn};
use millstream_shm::write_combining;

use crate::adapter::LocalAdapter;
use crate::ipc::{Message, Op, srq_event};
use crate::peer::Peer;
use crate::qp::Qp;
use crate::qp::datagram::{Elements, Piece};
use crate::qp::keys::{AccessRight, RemoteKeys, RemoteMr};
use crate::qp::remote_memory::{RemoteRange, atomic_word, check_access, store_word};
use crate::qp::remote_qp::{Receive, RemoteQp, ResponderStatus, SrqLimit};
use crate::qp::transfer::{ExecError, scatter};
use crate::qp::xrc::{MAX_CACHED, SharedQueueEntry};
use crate::send_wr::SendWr;
use crate::types::{
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, Sge, WC_OP_RECV, WC_WR_FLUSH_ERR,
    total_len,
};
use millstream_lockfree::cq_ring::PushError;
use millstream_lockfree::cqe::Cqe;

/// Memory and receive queues of a responder.
#[derive(Debug)]
pub(super) struct ResponderMemory {
    /// The queue pair itself.
    own: ResponderScope,
    /// Shared receive queues that requests of an XRC connection have named.
    queues: HashMap<Srqn, ResponderScope>,
    /// Number of the queue that the current request names; zero for the queue pair itself.
    selected: Srqn,
    adapter: &'static LocalAdapter,
    /// The receive of the current message, and its queue.
    receive: Option<(QueueId, Receive, Elements)>,
    /// The completion of a shared queue's receive was lost.
    keeps_record: bool,
}

/// Number and generation of a shared receive queue; zero for the queue pair itself.
type QueueId = (Srqn, u32);

/// Receive queue and memory keys of the queue pair, or of a shared receive queue of its XRC domain. That
/// queue may belong to another process.
#[derive(Debug)]
struct ResponderScope {
    target: RemoteQp,
    keys: RemoteKeys,
    queue: Option<SharedQueueEntry>,
    peer: Arc<Peer>,
    /// Makes pollers of the queue's completions receive packets, if this process owns the queue.
    _wired: Option<Box<dyn Debug + Send + Sync>>,
}

impl ResponderScope {
    fn queue_id(&self) -> QueueId {
        self.queue.as_ref().map_or_else(QueueId::default, |queue| (queue.number(), queue.generation()))
    }
}

/// Excludes senders of this host to the queue, and the owner that withdraws memory.
#[inline]
fn lease(queue: &Option<SharedQueueEntry>, me: u32) -> Result<Option<RobustGuard<'_>>, NakReason> {
    let Some(queue) = queue else { return Ok(None) };
    let lease = queue.delivery.lock(me).ok_or(NakReason::RemoteOperational)?;
    // A queue that was withdrawn earlier is seen here. Later, its owner waits for the lock.
    fence(Ordering::SeqCst);
    if queue.is_same() { Ok(Some(lease)) } else { Err(NakReason::InvalidRequest) }
}

impl ResponderMemory {
    /// The responder's memory of one of this process's queue pairs.
    pub(super) fn new(qp: &Qp) -> Option<Self> {
        let peer = qp.adapter.peer_of(qp.qpn).ok()?;
        let target = RemoteQp::bind(&peer, qp.qpn)?;
        let own = ResponderScope { target, keys: RemoteKeys::default(), queue: None, peer, _wired: None };
        Some(Self {
            own,
            queues: HashMap::new(),
            selected: Srqn::default(),
            adapter: qp.adapter,
            receive: None,
            keeps_record: false,
        })
    }

    /// This process.
    pub(super) fn own_process(&self) -> &Arc<Peer> {
        &self.own.peer
    }

    /// Selects the shared receive queue of the following requests.
    pub(super) fn select(&mut self, number: Srqn) -> Result<(), NakReason> {
        let known = self.queues.get(&number).is_some_and(|scope| {
            scope.queue.as_ref().is_some_and(SharedQueueEntry::is_same) && scope.peer.alive()
        });
        if !known {
            self.queues.remove(&number);
            if self.queues.len() >= MAX_CACHED && self.receive.is_none() {
                self.queues.clear();
            }
            let scope = self.find(number).ok_or(NakReason::InvalidRequest)?;
            self.queues.insert(number, scope);
        }
        self.selected = number;
        Ok(())
    }

    fn find(&self, number: Srqn) -> Option<ResponderScope> {
        let (peer, entry) = SharedQueueEntry::find(self.adapter, number)?;
        let through = &self.own.target;
        if entry.domain.load(Ordering::Relaxed) != through.entry.domain.load(Ordering::Relaxed) {
            return None;
        }
        // Other senders use the queue while a message of several packets arrives.
        let target = through.with_receives(
            &peer,
            &entry,
            number.get(),
            through.entry.project(|entry| &entry.srq_taken),
        )?;
        let _wired = self.adapter.xrc_srqs.get(number.get()).and_then(|srq| srq.poll_network());
        Some(ResponderScope { target, keys: RemoteKeys::default(), queue: Some(entry), peer, _wired })
    }

    /// The scope of the current request.
    #[inline]
    fn scope(&mut self) -> Option<&mut ResponderScope> {
        if self.selected == Srqn::default() {
            Some(&mut self.own)
        } else {
            self.queues.get_mut(&self.selected)
        }
    }

    #[inline]
    pub(super) fn offers(&self, access: u32) -> Result<(), NakReason> {
        let offered = self.own.target.entry.access.load(Ordering::Relaxed) & access == access;
        if offered { Ok(()) } else { Err(NakReason::InvalidRequest) }
    }

    /// Runs `work` on the memory of the current request, if the queue pair allows the access.
    #[inline]
    fn with_memory<R>(
        &mut self,
        access: u32,
        work: impl FnOnce(&mut RemoteKeys, &Arc<Peer>, &RemoteQp) -> Result<R, NakReason>,
    ) -> Result<R, NakReason> {
        self.offers(access)?;
        let me = self.adapter.id.pid;
        let scope = self.scope().ok_or(NakReason::InvalidRequest)?;
        let ResponderScope { target, keys, queue, peer, .. } = scope;
        let _lease = lease(queue, me)?;
        let _announced = Announced::new(target, peer);
        work(keys, peer, target)
    }

    /// Runs `work` on a memory region or window that allows the access to `len` bytes from `at`.
    fn with_mr<R>(
        &mut self,
        access: u32,
        (key, at, len): (u32, u64, u64),
        work: impl FnOnce(&RemoteMr, &Peer) -> Result<R, ExecError>,
    ) -> Result<R, NakReason> {
        self.with_memory(access, |keys, peer, target| {
            let window = keys.find(peer, key).map_err(|_| NakReason::RemoteAccess)?;
            check_access(window, target, at, len, access).map_err(|_| NakReason::RemoteAccess)?;
            let result = work(window, peer).map_err(|_| NakReason::RemoteOperational)?;
            keys.confirm(peer, target, (key, at, len), access).map_err(|_| NakReason::RemoteAccess)?;
            Ok(result)
        })
    }

    /// Whether the peer may use `len` bytes from `at` for `access`.
    pub(super) fn check(&mut self, access: u32, key: u32, at: u64, len: u64) -> Result<(), NakReason> {
        self.with_mr(access, (key, at, len), |_, _| Ok(()))
    }

    /// Stores a packet's data.
    pub(super) fn write(&mut self, key: u32, at: u64, data: &[u8]) -> Result<(), NakReason> {
        self.with_memory(ACCESS_REMOTE_WRITE, |keys, peer, target| {
            let range = (key, at, data.len() as u64);
            let to = keys
                .resolve(peer, target, range, AccessRight::RemoteWrite)
                .map_err(|_| NakReason::RemoteAccess)?;
            // SAFETY: the slice is as long as the range.
            unsafe { to.store(0, data.as_ptr(), data.len()) }.map_err(|_| NakReason::RemoteOperational)
        })
    }

    /// Loads the data of a READ.
    pub(super) fn read(&mut self, key: u32, at: u64, out: &mut [u8]) -> Result<(), NakReason> {
        self.with_memory(ACCESS_REMOTE_READ, |keys, peer, target| {
            let range = (key, at, out.len() as u64);
            let is_device = keys.known(key).is_some_and(RemoteMr::is_device_memory);
            let from =
                keys.resolve(peer, target, range, AccessRight::Read).map_err(|_| NakReason::RemoteAccess)?;
            if let (true, RemoteRange::Mapped(base)) = (is_device, &from) {
                // SAFETY: the range is mapped, as was checked; the memory of devices consists of whole pages.
                unsafe { write_combining::load(*base, out) };
                return Ok(());
            }
            // SAFETY: the slice is as long as the range.
            unsafe { from.load(0, out.as_mut_ptr(), out.len()) }.map_err(|_| NakReason::RemoteOperational)?;
            keys.confirm(peer, target, range, ACCESS_REMOTE_READ).map_err(|_| NakReason::RemoteAccess)
        })
    }

    /// Executes the atomic operation that `wr` describes; the value before it.
    pub(super) fn change(&mut self, wr: &SendWr<'_>) -> Result<u64, NakReason> {
        let me = self.adapter.id.pid;
        self.with_mr(ACCESS_REMOTE_ATOMIC, (wr.rkey.get(), wr.remote_addr, 8), |window, peer| {
            atomic_word(window, peer, me, wr)
        })
    }

    /// Stores eight bytes at once (annex A19).
    pub(super) fn write_word(&mut self, key: u32, at: u64, value: [u8; 8]) -> Result<(), NakReason> {
        let me = self.adapter.id.pid;
        self.with_mr(ACCESS_REMOTE_WRITE, (key, at, 8), |window, peer| {
            store_word(window, peer, me, at, value)
        })
    }

    /// Takes no more receives of shared queues: the queue pair, which fails, has the record of one whose completion was lost.
    pub(super) fn keep_record(&mut self) {
        self.keeps_record = true;
    }

    /// Takes a receive for a new message; false if there is none.
    pub(super) fn take_receive(&mut self) -> bool {
        let (adapter, keeps_record) = (self.adapter, self.keeps_record);
        let Some(scope) = self.scope() else { return false };
        if keeps_record && scope.target.shares_receives() {
            return false;
        }
        let Ok(mut guard) = lease(&scope.queue, adapter.id.pid) else { return false };
        // A sender of this host exited with a receive taken, or before it took one, and left the queue's record.
        if let Some(queue) = scope.queue.as_ref().filter(|queue| queue.taken.load(Ordering::Relaxed) != 0) {
            drop(guard);
            let (number, event) = (queue.number().get(), srq_event::RECV_ABANDONED);
            match adapter.xrc_srqs.get(number) {
                Some(own) => own.srq_event(event),
                None => scope.peer.send(Message::new(Op::XrcSrqEvent, [number, event])),
            }
            let Ok(again) = lease(&scope.queue, adapter.id.pid) else { return false };
            guard = again;
            if queue.taken.load(Ordering::Relaxed) != 0 {
                return false;
            }
        }
        let Ok((receive, limit)) = scope.target.take_receive(adapter.owner_id()) else { return false };
        let mut elements = Elements::new();
        scope.target.read_receive(receive, &mut elements);
        drop(guard);
        if limit == SrqLimit::Reached {
            scope.peer.send(scope.target.below_limit());
        }
        self.receive = Some((scope.queue_id(), receive, elements));
        true
    }

    /// Stores the part of the message at `offset` into the receive's elements.
    pub(super) fn fill(&mut self, offset: u64, data: &[u8]) -> Result<(), DeliveryError> {
        let me = self.adapter.id.pid;
        let Self { own, queues, receive, .. } = self;
        let Some((queue, _, elements)) = receive else { return Err(DeliveryError::Protection) };
        if offset + data.len() as u64 > total_len(elements) {
            return Err(DeliveryError::TooLong);
        }
        let rest = skip(elements, offset);
        let message: Piece = (data.as_ptr(), data.len() as u32);
        let scope = if *queue == QueueId::default() { Some(own) } else { queues.get_mut(&queue.0) };
        let scope = scope.filter(|scope| scope.queue_id() == *queue).ok_or(DeliveryError::Protection)?;
        let ResponderScope { target, keys, queue, peer, .. } = scope;
        let _lease = lease(queue, me).map_err(|_| DeliveryError::Protection)?;
        let _announced = Announced::new(target, peer);
        // SAFETY: the piece is a slice.
        let placed = unsafe { scatter(keys, peer, target, std::iter::once(message), &rest) };
        placed.map_err(|_| DeliveryError::Protection)
    }

    /// Completes the receive of the current message.
    pub(super) fn complete(&mut self, cqe: Cqe, solicited: bool) -> Result<(), PushError> {
        let Some((queue, receive, _)) = self.receive.take() else { return Ok(()) };
        let scope = if queue == QueueId::default() { Some(&self.own) } else { self.queues.get(&queue.0) };
        // A queue that was destroyed has no completions.
        let Some(scope) = scope.filter(|scope| scope.queue_id() == queue) else { return Ok(()) };
        let Ok(_lease) = lease(&scope.queue, self.adapter.id.pid) else { return Ok(()) };
        match scope.target.complete_receive(self.adapter.owner_id(), receive, cqe, solicited) {
            Ok(true) => scope.peer.signal(scope.target.cq.channel()),
            Ok(false) => {}
            Err(error) => {
                if queue != QueueId::default() && error == PushError::Full {
                    scope.peer.send(Message::new(Op::XrcSrqEvent, [queue.0.get(), srq_event::CQ_OVERRUN]));
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Whether the queue pair is in a state to take datagrams.
    pub(super) fn takes_datagrams(&self) -> bool {
        self.own.target.responder_status(Qpn::default()) == ResponderStatus::Ready
    }

    /// Whether a sender of this host exited with a receive of the queue pair taken. Its owner then takes that receive back.
    /// The caller holds the lock of the queue pair's initiators.
    pub(super) fn finds_abandoned(&self) -> bool {
        let target = &self.own.target;
        let found = target.has_abandoned();
        if found {
            self.own.peer.send(Message::new(Op::RecvAbandoned, [target.qpn().get()]));
        }
        found
    }

    /// Completes a datagram's receive. A full completion queue is reported to its owner: the sender gets no error.
    pub(super) fn complete_or_overrun(&mut self, cqe: Cqe, solicited: bool) {
        if self.complete(cqe, solicited) == Err(PushError::Full) {
            self.own.peer.send(Message::new(Op::CqOverrun, [self.own.target.qpn().get()]));
        }
    }

    /// Invalidates a memory window of this queue pair, for a SEND with invalidate.
    pub(super) fn invalidate(&mut self, key: u32) -> Result<(), NakReason> {
        let scope = self.scope().ok_or(NakReason::InvalidRequest)?;
        let qpn = scope.target.qpn();
        scope.keys.invalidate(&scope.peer, key, qpn).map_err(|_| NakReason::RemoteAccess)
    }
}

impl Drop for ResponderMemory {
    /// Flushes the receive of an incomplete message over an XRC connection: the queue pair does not own the receive.
    fn drop(&mut self) {
        if self.receive.as_ref().is_some_and(|(queue, ..)| *queue != QueueId::default()) {
            let flushed = Cqe { status: WC_WR_FLUSH_ERR as u16, opcode: WC_OP_RECV as u16, ..Cqe::default() };
            let _ = self.complete(flushed, true);
        }
    }
}

/// An operation that is announced in the entry until this is dropped.
struct Announced<'a>(&'a RemoteQp, u32);

impl<'a> Announced<'a> {
    #[inline]
    fn new(target: &'a RemoteQp, peer: &Peer) -> Self {
        let inflight = &target.entry.inflight;
        let mut last = inflight.last();
        inflight.begin(&mut last, peer.asymmetric);
        Self(target, last)
    }
}

impl Drop for Announced<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.entry.inflight.end(&mut self.1);
    }
}

/// The elements of a list behind its first `offset` bytes.
pub(super) fn skip(elements: &[Sge], mut offset: u64) -> Elements {
    let mut rest = Elements::new();
    for element in elements {
        let skipped = offset.min(u64::from(element.length));
        offset -= skipped;
        if skipped != u64::from(element.length) {
            rest.push(Sge {
                addr: element.addr.wrapping_add(skipped),
                length: element.length - skipped as u32,
                ..*element
            });
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_bytes_are_not_in_the_list() {
        let elements = [(10, 4), (100, 0), (20, 6)].map(|(addr, length)| Sge { addr, length, lkey: 1 });
        let left = |offset| skip(&elements, offset).iter().map(|e| (e.addr, e.length)).collect::<Vec<_>>();
        assert_eq!(left(0), [(10, 4), (20, 6)]);
        assert_eq!(left(3), [(13, 1), (20, 6)]);
        assert_eq!(left(4), [(20, 6)]);
        assert_eq!(left(9), [(25, 1)]);
        assert_eq!(left(10), []);
    }
}
