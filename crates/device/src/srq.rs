//! Shared receive queues: receive requests for the peers of many queue pairs (IBTA volume 1, 10.2.9).

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

use millstream_lockfree::SpinGuard;
use millstream_shm::ArenaBlock;

use crate::adapter::LocalAdapter;
use crate::caps::{MAX_QP_WR, MAX_SGE};
use crate::cq::{Cq, PacketPolling};
use crate::errno::{Errno, Result};
use crate::event::{EVENT_SRQ_LIMIT_REACHED, ObjectHandle};
use crate::event_sources::EventSource;
use crate::ipc::{Message, Op, srq_event};
use crate::layout::{RecvSlot, SrqRing, recv_slot_len, srq_len, taken_request};
use crate::pd::Pd;
use crate::srq_wqes::{SrqPoster, SrqWqes};
use crate::types::Sge;
use crate::xrc::{XrcMembership, Xrcd};
use crate::xrc_srq_table::{self, XrcSrqOps};

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    /// Destroyed: its protection domain no longer counts it.
    destroyed: AtomicBool,
    pd: Arc<Pd>,
    adapter: &'static LocalAdapter,
    block: ArenaBlock,
    ring: &'static SrqRing,
    /// Offset of the slots in the block.
    slots_offset: usize,
    max_wr: u32,
    max_sge: u32,
    slots: Arc<SrqWqes>,
    /// Whether a limit event was requested and not raised yet.
    limit_armed: Mutex<bool>,
    /// Its number among the sources of events.
    source: u32,
    /// Queue pairs that use this queue.
    users: AtomicU32,
    handle: Arc<ObjectHandle>,
    number: u32,
    /// Its membership in an XRC domain, if it has one.
    xrc: Option<XrcMembership>,
}

impl Srq {
    /// Makes a queue for `max_wr` requests of at most `max_sge` elements.
    ///
    /// # Errors
    /// EINVAL for sizes beyond the device's, ENOMEM when the arena is full.
    pub fn new(pd: &Arc<Pd>, max_wr: u32, max_sge: u32) -> Result<Arc<Self>> {
        Self::with_membership(pd, max_wr, max_sge, None)
    }

    /// Makes a queue for the queue pairs of an XRC domain, in any process. Its requests complete in `cq`.
    ///
    /// # Errors
    /// As [`Srq::new`]; ENOMEM also when the process has too many of them.
    pub fn for_domain(
        pd: &Arc<Pd>,
        domain: &Arc<Xrcd>,
        cq: &Arc<Cq>,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<Arc<Self>> {
        let membership = XrcMembership::new(pd.context.adapter, domain, cq)?;
        Self::with_membership(pd, max_wr, max_sge, Some(membership))
    }

    fn with_membership(
        pd: &Arc<Pd>,
        max_wr: u32,
        max_sge: u32,
        xrc: Option<XrcMembership>,
    ) -> Result<Arc<Self>> {
        if max_wr == 0 || max_wr > MAX_QP_WR || max_sge > MAX_SGE {
            return Err(Errno::INVAL);
        }
        let max_sge = max_sge.max(1);
        let count = max_wr.next_power_of_two();
        let (slots_offset, len) = srq_len(count as usize, max_sge);
        let adapter = pd.context.adapter;
        let block = adapter.arena.alloc(len).ok_or(Errno::NOMEM)?;
        let ring: &'static SrqRing = adapter.arena.get(block.offset);
        // Zero already, unless a peer has written to free memory.
        for word in [&ring.head, &ring.seen_tail, &ring.rnr_wait, &ring.tail] {
            word.store(0, Ordering::Relaxed);
        }
        ring.limit.reset();
        ring.lock.reset();
        ring.sges.store(max_sge, Ordering::Relaxed);
        ring.pd.store(pd.id, Ordering::Relaxed);
        ring.mask.store(count - 1, Ordering::Release);
        pd.attach();
        let srq = Arc::new(Self {
            destroyed: AtomicBool::new(false),
            pd: pd.clone(),
            adapter,
            block,
            ring,
            slots_offset,
            max_wr,
            max_sge,
            slots: Arc::new(SrqWqes::new(count, max_wr)),
            limit_armed: Mutex::default(),
            source: adapter.next_id(),
            users: AtomicU32::new(0),
            handle: Arc::default(),
            number: xrc.as_ref().map_or_else(|| adapter.next_id(), XrcMembership::number),
            xrc,
        });
        let source: Weak<Self> = Arc::downgrade(&srq);
        adapter.event_sources.add(srq.source, source);
        if let Some(membership) = &srq.xrc {
            let handler: Weak<Self> = Arc::downgrade(&srq);
            membership.publish(handler, &srq.slots, srq.arena_offset(), pd.id);
        }
        Ok(srq)
    }

    /// The XRC domain that it belongs to, if it does.
    #[must_use]
    pub fn domain(&self) -> Option<&Arc<Xrcd>> {
        self.xrc.as_ref().map(XrcMembership::domain)
    }

    /// The owner's records of the slots.
    pub(crate) fn slots(&self) -> &Arc<SrqWqes> {
        &self.slots
    }

    /// The program's handle.
    #[must_use]
    pub fn handle(&self) -> &ObjectHandle {
        &self.handle
    }

    /// Requests that may be outstanding.
    #[must_use]
    pub fn max_wr(&self) -> u32 {
        self.max_wr
    }

    /// Elements in a request.
    #[must_use]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// A number unique in the process. The number of an XRC shared receive queue is unique on the host, and senders
    /// name the queue by it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The limit below which an event is raised; zero after the event.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.ring.limit.get()
    }

    /// Requests one event when fewer than `limit` requests are left.
    ///
    /// # Errors
    /// EINVAL for more than the queue holds.
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        if limit > self.max_wr {
            return Err(Errno::INVAL);
        }
        let mut armed = self.limit_armed.lock().expect("no panic under this lock");
        *armed = limit != 0;
        if self.ring.limit.set(limit, || self.left()) {
            self.raise_limit_event(&mut armed);
        }
        Ok(())
    }

    /// Requests that no initiator has taken.
    fn left(&self) -> u32 {
        self.slots.lock().tail.wrapping_sub(self.ring.head.load(Ordering::Acquire))
    }

    /// Handles an initiator's report that the limit is reached.
    pub(crate) fn limit_reached(&self) {
        let mut armed = self.limit_armed.lock().expect("no panic under this lock");
        // The report of an earlier limit must not use up this one.
        if self.limit() == 0 {
            self.raise_limit_event(&mut armed);
        }
    }

    /// Raises the limit event, if one was requested.
    fn raise_limit_event(&self, armed: &mut bool) {
        if std::mem::take(armed) {
            self.pd.context.raise(EVENT_SRQ_LIMIT_REACHED, &self.handle);
        }
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL for too many elements, ENOMEM when the queue is full.
    pub fn post(&self, wr_id: u64, sges: &[Sge]) -> Result<()> {
        if sges.len() > self.max_sge as usize {
            return Err(Errno::INVAL);
        }
        let mut poster = self.slots.lock();
        let slot = poster.free.pop().ok_or(Errno::NOMEM)?;
        let base = self.adapter.arena.at(self.block.offset).as_ptr();
        // SAFETY: the slot is inside the block, and free.
        unsafe {
            let at = base.add(self.slots_offset + slot as usize * recv_slot_len(self.max_sge));
            let elements = at.add(size_of::<RecvSlot>()).cast::<Sge>();
            elements.copy_from_nonoverlapping(sges.as_ptr(), sges.len());
            (*at.cast::<RecvSlot>()).n_sge.store(sges.len() as u32, Ordering::Relaxed);
        }
        self.slots.record(slot, poster.tail, wr_id, sges);
        self.publish(poster, slot);
        Ok(())
    }

    /// Appends the request that was recorded in `slot` to the queue.
    fn publish(&self, mut poster: SpinGuard<'_, SrqPoster>, slot: u32) {
        let mask = self.ring.mask.load(Ordering::Relaxed) & (self.slots.count() - 1);
        let base = self.adapter.arena.at(self.block.offset).as_ptr();
        // SAFETY: the index is masked to entries that exist, inside the block.
        unsafe {
            let order = base.add(size_of::<SrqRing>()).cast::<u32>();
            order.add((poster.tail & mask) as usize).write_volatile(slot);
        }
        poster.tail = poster.tail.wrapping_add(1);
        self.ring.tail.store(poster.tail, Ordering::Release);
        drop(poster);
        if self.ring.rnr_wait.load(Ordering::Relaxed) != 0 {
            self.notify_senders();
        }
    }

    /// Notifies senders that wait for a receive request. The first one to retry gets it.
    #[cold]
    fn notify_senders(&self) {
        if self.ring.rnr_wait.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        if let Some(membership) = &self.xrc {
            return membership.notify_senders();
        }
        for qp in self.adapter.qps.all() {
            if qp.uses_srq(&self.slots)
                && let Some((peer, sender)) = qp.sender()
            {
                peer.send(Message::new(Op::RecvPosted, [sender.get()]));
            }
        }
    }

    /// Takes a request back that a peer took, as the record `taken` says, and will not complete: its slot, which the caller frees
    /// or uses. None if the record is stale: the peer exited before it took the request, or after it completed it. None also
    /// if a stopped sender holds the queue's lock: then the record stays.
    pub(crate) fn take_back(&self, taken: &AtomicU32) -> Option<u32> {
        if taken.load(Ordering::Acquire) == 0 {
            return None;
        }
        let guard = self.ring.lock.lock(self.adapter.owner_id())?;
        let record = taken.swap(0, Ordering::AcqRel);
        let (slot, at) = taken_request::decode(record).filter(|(slot, _)| *slot < self.slots.count())?;
        let (head, tail) = (self.ring.head.load(Ordering::Acquire), self.slots.lock().tail);
        let waiting = tail.wrapping_sub(head).min(self.slots.count());
        let is_waiting = (0..waiting).any(|i| self.order_at(tail.wrapping_sub(i + 1)) == slot);
        drop(guard);
        // If another peer has taken it meanwhile, that peer stored its record before it took the request. Changed last: a
        // completion that was polled meanwhile has changed the slot.
        let is_free = !is_waiting && !self.is_in_use(record, slot) && self.slots.take_back(slot, at);
        is_free.then_some(slot)
    }

    /// Frees the slot of a request that was taken back. Its completion is lost.
    pub(crate) fn free(&self, slot: u32) {
        let _ = self.slots.complete(slot);
    }

    /// Posts a request again that was taken back.
    pub(crate) fn post_again(&self, slot: u32) {
        let poster = self.slots.lock();
        if self.slots.record_again(slot, poster.tail) {
            self.publish(poster, slot);
        }
    }

    /// Whether a peer will complete a request, or has completed it.
    fn is_in_use(&self, record: u32, slot: u32) -> bool {
        if let Some(membership) = &self.xrc {
            let sequence = xrc_srq_table::tag(self.number) | slot;
            return membership.cq().has_received(|cqe| cqe.sequence == sequence);
        }
        let qps = self.adapter.qps.all();
        qps.iter().any(|qp| qp.uses_srq(&self.slots) && qp.uses_request(record, slot))
    }

    /// As if `count` requests had been posted and taken.
    #[cfg(test)]
    pub(crate) fn age(&self, count: u32) {
        self.slots.lock().tail = count;
        for word in [&self.ring.head, &self.ring.seen_tail, &self.ring.tail] {
            word.store(count, Ordering::Release);
        }
    }

    /// The slot that was the `at`th to be posted.
    fn order_at(&self, at: u32) -> u32 {
        let mask = self.slots.count() - 1;
        let base = self.adapter.arena.at(self.block.offset).as_ptr();
        // SAFETY: the index is masked to entries that exist, inside the block.
        unsafe { base.add(size_of::<SrqRing>()).cast::<u32>().add((at & mask) as usize).read_volatile() }
    }

    pub(crate) fn arena_offset(&self) -> u32 {
        (self.block.offset / 64) as u32
    }

    pub(crate) fn attach(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn detach(&self) {
        self.users.fetch_sub(1, Ordering::AcqRel);
    }

    /// Frees the locks of the queue whose holders are gone.
    pub(crate) fn recover_locks(&self) {
        self.ring.lock.recover();
        if let Some(membership) = &self.xrc {
            membership.recover_locks();
        }
    }

    /// Destroys the queue. Waits until all fetched events are acknowledged.
    ///
    /// # Errors
    /// EBUSY while queue pairs use it.
    pub fn destroy(self: &Arc<Self>) -> Result<()> {
        if self.users.load(Ordering::Acquire) != 0 {
            return Err(Errno::BUSY);
        }
        self.pd.context.end_events(&self.handle);
        self.end();
        Ok(())
    }
}

impl Srq {
    fn end(&self) {
        if !self.destroyed.swap(true, Ordering::AcqRel) {
            if let Some(membership) = &self.xrc {
                membership.withdraw(self.number);
            }
            self.pd.detach();
        }
    }
}

impl EventSource for Srq {
    /// Raises the limit event that an initiator claimed and did not report, or did not claim after it took a request.
    fn restore_events(&self) {
        let mut armed = self.limit_armed.lock().expect("no panic under this lock");
        if *armed && (self.limit() == 0 || self.ring.limit.is_reached(|| self.left(), false)) {
            self.raise_limit_event(&mut armed);
        }
    }
}

impl XrcSrqOps for Srq {
    fn number(&self) -> u32 {
        self.number
    }

    fn srq_event(&self, event: u32) {
        let Some(membership) = &self.xrc else { return };
        match event {
            srq_event::LIMIT => self.limit_reached(),
            srq_event::CQ_OVERRUN => membership.cq().check_overrun(),
            srq_event::RECV_ABANDONED => {
                // No sender takes a request meanwhile: nobody but the record knows who has one.
                if let Some(slot) = membership.take_abandoned(|taken| self.take_back(taken)) {
                    self.post_again(slot);
                }
            }
            _ => {}
        }
    }

    fn recover_locks(&self) {
        Self::recover_locks(self);
    }

    fn wait_for_senders(&self) -> bool {
        self.xrc.as_ref().is_none_or(XrcMembership::wait_for_senders)
    }

    fn poll_network(&self) -> Option<Box<dyn Debug + Send + Sync>> {
        let cq = self.xrc.as_ref()?.cq().clone();
        Some(Box::new(PacketPolling::new(vec![cq])))
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        self.adapter.event_sources.remove(self.source);
        self.end();
        self.adapter.arena.release(self.block);
    }
}
