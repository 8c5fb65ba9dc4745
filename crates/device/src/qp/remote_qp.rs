//! The peer's queue pair as its initiator sees it. The offsets of its queues are checked once.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use millstream_lockfree::{OwnerId, prefetch};
use millstream_quantity::Qpn;
use millstream_shm::MappedRef;

use super::QpType;
use super::datagram::Elements;
use super::keys::AccessRight;
use super::transfer::{ExecError, UNRESPONSIVE};
use crate::caps::{MAX_QP_WR, MAX_SGE};
use crate::ipc::{Message, Op, srq_event};
use crate::layout::{
    ARENA_LEN, QpEntry, RecvSlot, SrqRing, XrcEntry, initiator_claim, is_same_claimed, qp_state, qpn_index,
    recv_slot_len, srq_len, taken_request,
};
use crate::peer::Peer;
use crate::types::{Sge, WC_OP_RECV};
use crate::xrc_srq_table;
use millstream_lockfree::cq_ring::{CqProducer, CqRing, PushError};
use millstream_lockfree::cqe::Cqe;

/// Whether the responder can execute a request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResponderStatus {
    Ready,
    /// Not yet in a state to receive: an adapter would drop packets, and the sender retry them.
    NotReady,
    /// Destroyed, failed, connected to another queue pair, or reset since the first request.
    Gone,
}

/// A receive that was found or taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receive {
    /// The receive request, as in [`Cqe::sequence`].
    pub(super) sequence: u32,
    slot: u32,
}

/// Whether the limit of a shared receive queue was reached when a receive was taken from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SrqLimit {
    NotReached,
    /// Fewer receives than the SRQ limit: the owner must be notified.
    Reached,
}

#[derive(Debug)]
pub(super) struct RemoteQp {
    pub(super) entry: MappedRef<QpEntry>,
    qpn: Qpn,
    generation: u32,
    /// The connection that the entry had when it was bound.
    connection: u32,
    /// The revision of the entry at which it was found ready, if it was, and the access that it allowed then.
    ready_at: Cell<Option<u32>>,
    access: Cell<u32>,
    srq: Option<SharedReceives>,
    slots: Slots,
    ahead: ReadAhead,
    pub(super) cq: CqProducer<MappedRef<CqRing>>,
    pub(super) pd: u32,
    /// The protection domain of its receives: that of a shared receive queue may be another one.
    recv_pd: u32,
}

/// Receives that were copied ahead of their use. The owner of a full queue refills the cache line that the initiator
/// reads next. So each line is read once, at a time when the owner does not store into it.
#[derive(Debug, Default)]
struct ReadAhead {
    /// Sequence number of the first one.
    first: Cell<u32>,
    count: Cell<u32>,
    /// Number of elements and first element of each.
    requests: [Cell<(u32, Sge)>; READ_AHEAD],
}

/// Receives that are copied at a time. Two with one element share a cache line.
pub(super) const READ_AHEAD: usize = 8;

#[derive(Debug)]
struct Slots {
    base: NonNull<u8>,
    len: usize,
    mask: u32,
    sges: u32,
}

#[derive(Debug)]
struct SharedReceives {
    ring: MappedRef<SrqRing>,
    order: NonNull<u32>,
    /// Records the receive that an initiator has taken and not completed.
    taken: MappedRef<AtomicU32>,
    /// Number of an XRC shared receive queue, else zero.
    number: u32,
    /// Combined with the slot in completions: names the queue of an XRC domain.
    tag: u32,
    /// Owner and initiator registered for asymmetric fences.
    asymmetric: bool,
}

impl SharedReceives {
    /// Finds the queue at `at` of the peer's arena.
    fn bind(peer: &Peer, at: usize, taken: MappedRef<AtomicU32>, number: u32) -> Option<(Self, Slots)> {
        let ring: MappedRef<SrqRing> = peer.mapped(at)?;
        let (mask, sges) = (ring.mask.load(Ordering::Acquire), ring.sges.load(Ordering::Relaxed));
        let (slots_at, _) = srq_len(mask.checked_add(1)? as usize, sges.min(MAX_SGE));
        let order = peer.at(at + size_of::<SrqRing>(), (mask as usize + 1) * 4)?;
        let slots = Slots::check(peer, at + slots_at, mask, sges)?;
        let tag = if number == 0 { 0 } else { xrc_srq_table::tag(number) };
        let order = NonNull::new(order.cast())?;
        Some((Self { ring, order, taken, number, tag, asymmetric: peer.asymmetric }, slots))
    }
}

/// Finds the completion queue at `at` of the peer's arena.
fn bind_cq(peer: &Peer, at: usize) -> Option<CqProducer<MappedRef<CqRing>>> {
    let ring: MappedRef<CqRing> = peer.mapped(at)?;
    let arena = NonNull::new(peer.at(0, ARENA_LEN)?)?;
    // SAFETY: the whole arena, which `ring` keeps mapped.
    Some(unsafe { CqProducer::new(NonNull::slice_from_raw_parts(arena, ARENA_LEN), ring) })
}

// SAFETY: points into the peer's arena, where everything is atomics or raw copies.
unsafe impl Send for RemoteQp {}

impl RemoteQp {
    /// Finds the queue pair and checks the offsets of its queues. The result keeps the peer's arena mapped.
    pub(super) fn bind(peer: &Peer, qpn: Qpn) -> Option<Self> {
        let entry = peer.qp_entry(qpn_index(qpn))?;
        if entry.qpn.load(Ordering::Acquire) != qpn.get() {
            return None;
        }
        let srq_at = entry.srq.load(Ordering::Relaxed) as usize * 64;
        let pd = entry.pd.load(Ordering::Relaxed);
        let (srq, slots) = if srq_at == 0 {
            let (mask, sges) = (entry.rq_mask.load(Ordering::Relaxed), entry.rq_sges.load(Ordering::Relaxed));
            (None, Slots::check(peer, entry.rq.load(Ordering::Relaxed) as usize * 64, mask, sges)?)
        } else {
            let (srq, slots) =
                SharedReceives::bind(peer, srq_at, entry.project(|entry| &entry.srq_taken), 0)?;
            (Some(srq), slots)
        };
        let cq = bind_cq(peer, entry.recv_cq.load(Ordering::Relaxed) as usize * 64)?;
        let recv_pd = srq.as_ref().map_or(pd, |srq| srq.ring.pd.load(Ordering::Relaxed));
        Some(Self {
            qpn,
            generation: entry.generation.load(Ordering::Acquire),
            connection: entry.connection.load(Ordering::Acquire),
            ready_at: Cell::new(None),
            access: Cell::new(0),
            srq,
            slots,
            ahead: ReadAhead::default(),
            cq,
            pd,
            recv_pd,
            entry,
        })
    }

    /// The queue pair number.
    pub(super) fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// This queue pair with a shared receive queue of its XRC domain, which may be another process's. The result keeps
    /// both arenas mapped.
    ///
    /// `taken` records the receive that is taken. It is in the queue's entry if the caller completes the receive before
    /// others use the queue, else in the queue pair's.
    pub(super) fn with_receives(
        &self,
        peer: &Peer,
        entry: &XrcEntry,
        number: u32,
        taken: MappedRef<AtomicU32>,
    ) -> Option<Self> {
        let at = entry.ring.load(Ordering::Relaxed) as usize * 64;
        let pd = entry.pd.load(Ordering::Relaxed);
        let (srq, slots) = SharedReceives::bind(peer, at, taken, number)?;
        Some(Self {
            entry: self.entry.clone(),
            qpn: self.qpn,
            generation: self.generation,
            connection: self.connection,
            ready_at: Cell::new(None),
            access: Cell::new(0),
            srq: Some(srq),
            slots,
            ahead: ReadAhead::default(),
            cq: bind_cq(peer, entry.cq.load(Ordering::Relaxed) as usize * 64)?,
            pd,
            recv_pd: pd,
        })
    }

    /// The protection domain of the memory that an access is to.
    #[inline(always)]
    pub(super) fn pd_of(&self, access: AccessRight) -> u32 {
        if access == AccessRight::LocalWrite { self.recv_pd } else { self.pd }
    }

    /// The message to the owner of a shared receive queue that fell below its limit.
    #[cold]
    pub(super) fn below_limit(&self) -> Message {
        match &self.srq {
            Some(srq) if srq.number != 0 => Message::new(Op::XrcSrqEvent, [srq.number, srq_event::LIMIT]),
            _ => Message::new(Op::SrqLimit, [self.qpn.get()]),
        }
    }

    /// Whether the queue pair is still the one that was bound.
    #[inline]
    pub(super) fn is_same(&self) -> bool {
        self.entry.qpn.load(Ordering::Relaxed) == self.qpn.get()
            && self.entry.generation.load(Ordering::Relaxed) == self.generation
    }

    /// Whether the queue pair was not reset since it was bound. An unreliable connection goes on after a reset of one end: its
    /// receiver takes up any message that begins (9.8.2.2.1).
    pub(super) fn has_same_connection(&self) -> bool {
        self.entry.kind.load(Ordering::Relaxed) == QpType::Uc as u32
            || self.entry.connection.load(Ordering::Acquire) == self.connection
    }

    /// Joins the connection of the queue pair to `initiator`, a connection of the caller's. False if it has had requests of
    /// another one: one of the two queue pairs was reset alone, so that their packet sequence numbers differ.
    pub(super) fn claim(&self, initiator: u32) -> bool {
        let mine = initiator_claim(self.connection, initiator);
        let found = self.entry.initiator.load(Ordering::Acquire);
        if is_same_claimed(found, mine) {
            return found == mine;
        }
        let claimed = self.entry.initiator.compare_exchange(found, mine, Ordering::AcqRel, Ordering::Relaxed);
        claimed.is_ok()
    }

    /// Whether the queue pair has the type that receives from the type `sender`.
    pub(super) fn is_peer_of(&self, sender: QpType) -> bool {
        self.entry.kind.load(Ordering::Relaxed) == sender.receiver() as u32
    }

    /// The message to its owner that the request `me` sent last broke a rule; None if it was not found ready.
    #[cold]
    pub(super) fn error_report(&self, me: Qpn, event: u32) -> Option<Message> {
        Some(Message::new(Op::QpError, [self.qpn.get(), me.get(), event, self.ready_at.get()?]))
    }

    /// Whether the queue pair is in RTR, so that its owner must be notified of the first request (11.6.3.3).
    pub(super) fn awaits_contact(&self) -> bool {
        self.entry.state.load(Ordering::Relaxed) == qp_state::RTR
    }

    /// Whether requests from the queue pair `me` can be executed. `me` is zero for datagrams, which any queue pair may
    /// send.
    #[inline]
    pub(super) fn responder_status(&self, me: Qpn) -> ResponderStatus {
        match self.entry.state.load(Ordering::Acquire) {
            _ if !self.is_same() => ResponderStatus::Gone,
            qp_state::RTR | qp_state::RTS | qp_state::SQD | qp_state::SQE => {
                let connected = self.entry.dest_qpn.load(Ordering::Relaxed) == me.get();
                if me == Qpn::default() || (connected && self.has_same_connection()) {
                    ResponderStatus::Ready
                } else {
                    ResponderStatus::Gone
                }
            }
            qp_state::RESET | qp_state::INIT => ResponderStatus::NotReady,
            _ => ResponderStatus::Gone,
        }
    }

    /// Whether requests from the queue pair `me` can be executed. It is looked up only after a change of the entry.
    #[inline]
    pub(super) fn current_responder_status(&self, me: Qpn) -> ResponderStatus {
        if self.ready_at.get() == Some(self.revision()) {
            ResponderStatus::Ready
        } else {
            self.look_up_responder_status(me)
        }
    }

    /// Looks the responder_status up and caches it for [`ready_at`](Self::ready_at).
    #[inline(never)]
    fn look_up_responder_status(&self, me: Qpn) -> ResponderStatus {
        // Later changes increment the revision.
        let revision = self.entry.revision.load(Ordering::Acquire);
        let responder_status = self.responder_status(me);
        self.access.set(self.entry.access.load(Ordering::Acquire));
        self.ready_at.set((responder_status == ResponderStatus::Ready).then_some(revision));
        responder_status
    }

    /// The revision of the entry at which it was found ready, if it was. While it equals [`revision`](Self::revision),
    /// the queue pair is unchanged.
    #[inline(always)]
    pub(super) fn ready_at(&self) -> Option<u32> {
        self.ready_at.get()
    }

    /// The revision of the entry.
    #[inline(always)]
    pub(super) fn revision(&self) -> u32 {
        self.entry.revision.load(Ordering::Acquire)
    }

    /// Whether the queue pair allowed the access when it was found ready.
    #[inline(always)]
    pub(super) fn allows(&self, access: u32) -> bool {
        self.access.get() & access == access
    }

    /// Whether a receive is posted. Other initiators may take a shared one meanwhile.
    #[inline]
    pub(super) fn has_receive(&self) -> bool {
        match &self.srq {
            None => self.own_receives(self.entry.rq_head.load(Ordering::Relaxed)) != 0,
            // Equal values mean that the queue was empty when the first one was read.
            Some(srq) => srq.ring.head.load(Ordering::Acquire) != srq.ring.tail.load(Ordering::Acquire),
        }
    }

    /// Receives that wait in the queue pair's own queue. Only for its one initiator, or the one that holds the lock.
    #[inline]
    fn own_receives(&self, head: u32) -> u32 {
        self.waiting(head, &self.entry.rq_seen_tail, &self.entry.rq_tail)
    }

    /// Receives that wait in a queue, of those posted before `seen_tail` was read last; if none is left, of all. The caller
    /// excludes other initiators, which use the same `seen_tail`. The owner's core holds the cache line of `tail`.
    #[inline]
    fn waiting(&self, head: u32, seen_tail: &AtomicU32, tail: &AtomicU32) -> u32 {
        // A queue holds no more than its slots: the numbers wrap around, and a peer may have stored any.
        let ahead =
            |tail: u32| Some(tail.wrapping_sub(head)).filter(|&n| n.wrapping_sub(1) <= self.slots.mask);
        ahead(seen_tail.load(Ordering::Relaxed)).unwrap_or_else(|| {
            let tail = tail.load(Ordering::Acquire);
            seen_tail.store(tail, Ordering::Relaxed);
            ahead(tail).unwrap_or(0)
        })
    }

    /// Whether an initiator failed, or exited, that had taken a receive. Only for an initiator that holds the lock under
    /// which taken receives are recorded, or is the only one.
    #[inline]
    pub(super) fn has_abandoned(&self) -> bool {
        self.srq.as_ref().map_or(&self.entry.srq_taken, |srq| &*srq.taken).load(Ordering::Relaxed) != 0
    }

    /// Records that a receive of the queue pair's own queue is in use, for one of its many initiators. If this process exits
    /// before [`release_receive`](Self::release_receive), the owner finds out whether the receive was completed.
    #[inline]
    pub(super) fn record_receive(&self, receive: Receive) {
        if self.srq.is_none() {
            let note = taken_request::encode(receive.sequence, receive.slot);
            self.entry.srq_taken.store(note, Ordering::Relaxed);
            // No store to the receive's memory, nor its completion, may be seen before the record.
            fence(Ordering::Release);
        }
    }

    /// Ends [`record_receive`](Self::record_receive).
    #[inline]
    pub(super) fn release_receive(&self) {
        if self.srq.is_none() {
            self.entry.srq_taken.store(0, Ordering::Release);
        }
    }

    /// Whether receives come from a shared queue: a receive is removed when it is taken.
    pub(super) fn shares_receives(&self) -> bool {
        self.srq.is_some()
    }

    /// Asks the receiver for a notification when it posts a receive.
    pub(super) fn request_rnr_notification(&self) {
        let wait = self.srq.as_ref().map_or(&self.entry.rnr_wait, |srq| &srq.ring.rnr_wait);
        wait.store(1, Ordering::Relaxed);
    }

    /// Takes the oldest receive. A receive of the queue pair's own queue stays there until it is completed. A receive of
    /// a shared queue is recorded, so that its owner gets it back if this process exits.
    #[inline]
    pub(super) fn take_receive(&self, me: OwnerId) -> Result<(Receive, SrqLimit), ExecError> {
        let Some(srq) = &self.srq else {
            // Sequence numbers must not wrap around while copies are kept.
            self.ahead.count.set(0);
            let head = self.entry.rq_head.load(Ordering::Relaxed);
            let waits = self.own_receives(head) != 0;
            let receive = Receive { sequence: head, slot: head & self.slots.mask };
            return if waits {
                Ok((receive, SrqLimit::NotReached))
            } else {
                Err(ExecError::ReceiverNotReady)
            };
        };
        let ring = &*srq.ring;
        let guard = ring.lock.lock(me).ok_or(UNRESPONSIVE)?.guard;
        let head = ring.head.load(Ordering::Relaxed);
        if self.waiting(head, &ring.seen_tail, &ring.tail) == 0 {
            return Err(ExecError::ReceiverNotReady);
        }
        // SAFETY: the place is masked to those that exist; the value is checked below.
        let slot_at =
            |at: u32| unsafe { srq.order.as_ptr().add((at & self.slots.mask) as usize).read_volatile() };
        let slot = slot_at(head);
        self.slots.prefetch(slot_at(head.wrapping_add(prefetch::DISTANCE)));
        srq.taken.store(taken_request::encode(head, slot), Ordering::Relaxed);
        ring.head.store(head.wrapping_add(1), Ordering::Release);
        drop(guard);
        // Checked last: the owner sets a limit before it counts the remaining receives.
        let left = || ring.tail.load(Ordering::Acquire).wrapping_sub(head).wrapping_sub(1);
        let reached = ring.limit.is_reached(left, srq.asymmetric);
        let slot = slot & self.slots.mask;
        Ok((
            Receive { sequence: srq.tag | slot, slot },
            if reached { SrqLimit::Reached } else { SrqLimit::NotReached },
        ))
    }

    /// The receive of the queue pair's own queue behind the `before` oldest ones, with its element, if it has exactly
    /// one.
    #[inline(always)]
    pub(super) fn single_sge_receive(&self, before: u32) -> Option<(Receive, Sge)> {
        if self.srq.is_some() {
            return None;
        }
        let head = self.entry.rq_head.load(Ordering::Relaxed).wrapping_add(before);
        let mut at = head.wrapping_sub(self.ahead.first.get());
        if at >= self.ahead.count.get() {
            self.read_ahead(head);
            at = 0;
        }
        let (elements, first) = self.ahead.requests[at as usize % READ_AHEAD].get();
        let receive = Receive { sequence: head, slot: head & self.slots.mask };
        (self.ahead.count.get() != 0 && elements == 1).then_some((receive, first))
    }

    /// Copies the posted receives from `head` on, and prefetches those behind them. A posted receive does not change,
    /// and sequence numbers are unique: a copy is valid until its receive is consumed.
    #[inline(never)]
    fn read_ahead(&self, head: u32) {
        let waiting = self.own_receives(head);
        let count = waiting.min(READ_AHEAD as u32);
        for (request, at) in self.ahead.requests.iter().zip(0..count) {
            let slot = self.slots.at(head.wrapping_add(at));
            // SAFETY: the slot exists and has room for an element; the copy is checked like any other.
            request.set(unsafe {
                let elements = (*slot.cast::<RecvSlot>()).n_sge.load(Ordering::Relaxed);
                (elements, slot.add(size_of::<RecvSlot>()).cast::<Sge>().read_volatile())
            });
        }
        self.ahead.first.set(head);
        self.ahead.count.set(count);
        if waiting > count {
            (count..2 * count).for_each(|at| self.slots.prefetch(head.wrapping_add(at)));
        }
    }

    /// Copies a receive's elements out of shared memory.
    #[inline]
    pub(super) fn read_receive(&self, receive: Receive, out: &mut Elements) {
        // SAFETY: the slot exists and the count is bounded by its size; the copy may be garbage if
        // the owner misbehaves, and is checked like any other.
        unsafe {
            let slot = self.slots.at(receive.slot);
            let n = (*slot.cast::<RecvSlot>()).n_sge.load(Ordering::Relaxed).min(self.slots.sges) as usize;
            let from = slot.add(size_of::<RecvSlot>()).cast::<Sge>();
            out.extend((0..n).map(|i| from.add(i).read_volatile()));
        }
        if self.srq.is_none() {
            self.slots.prefetch(receive.slot.wrapping_add(prefetch::DISTANCE));
        }
    }

    /// Completes and consumes a receive; true if the receiver's completion channel must be signalled.
    #[inline(always)]
    pub(super) fn complete_receive(
        &self,
        me: OwnerId,
        receive: Receive,
        cqe: Cqe,
        solicited: bool,
    ) -> Result<bool, PushError> {
        let cqe = Cqe { qpn: self.qpn.get(), sequence: receive.sequence, ..cqe };
        let result = self.cq.push(me, cqe, solicited);
        // Consumed last: a receive that is consumed and not completed would be lost if this process exited between.
        match &self.srq {
            // The owner reclaims it.
            _ if result.is_err() => {}
            None => self.entry.rq_head.store(receive.sequence.wrapping_add(1), Ordering::Release),
            Some(srq) => srq.taken.store(0, Ordering::Release),
        }
        result
    }

    /// Completes the `count` oldest receives of the queue pair's own queue, by unsolicited SENDs of `byte_len` bytes
    /// each: all of them or none. True if the receiver's completion channel must be signalled.
    #[inline(always)]
    pub(super) fn complete_receives(
        &self,
        me: OwnerId,
        count: u32,
        byte_len: impl Fn(u32) -> u32,
    ) -> Result<bool, PushError> {
        let head = self.entry.rq_head.load(Ordering::Relaxed);
        let cqe = |at: u32| Cqe {
            qpn: self.qpn.get(),
            sequence: head.wrapping_add(at),
            opcode: WC_OP_RECV as u16,
            byte_len: byte_len(at),
            ..Cqe::default()
        };
        let signal = self.cq.push_all(me, count, cqe, false)?;
        // Consumed last, as above.
        self.entry.rq_head.store(head.wrapping_add(count), Ordering::Release);
        Ok(signal)
    }
}

impl Slots {
    /// The slot of the receive number `at`.
    #[inline(always)]
    fn at(&self, at: u32) -> *mut u8 {
        self.base.as_ptr().wrapping_add((at & self.mask) as usize * self.len)
    }

    /// Prefetches a receive that another core posted.
    #[inline]
    fn prefetch(&self, slot: u32) {
        prefetch::for_load(self.at(slot));
    }

    fn check(peer: &Peer, at: usize, mask: u32, sges: u32) -> Option<Self> {
        if !power_of_two_mask(mask, MAX_QP_WR.next_power_of_two()) || sges == 0 || sges > MAX_SGE {
            return None;
        }
        let len = recv_slot_len(sges);
        let base = NonNull::new(peer.at(at, (mask as usize + 1) * len)?)?;
        Some(Self { base, len, mask, sges })
    }
}

fn power_of_two_mask(mask: u32, most: u32) -> bool {
    mask.checked_add(1).is_some_and(|n| n.is_power_of_two() && n <= most)
}
