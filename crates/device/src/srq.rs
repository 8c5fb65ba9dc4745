//! Shared receive queues: requests that the peers of many queue pairs take from, each once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use millstream_lockfree::SpinLock;
use millstream_shm::ArenaBlock;

use crate::caps::{MAX_QP_WR, MAX_SGE};
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::event::{EVENT_SRQ_LIMIT_REACHED, Handle};
use crate::greeting::{Message, Op, shared};
use crate::host::Host;
use crate::layout::{RecvSlot, SrqRing, recv_slot_len, srq_len, taken};
use crate::pd::Pd;
use crate::qp::{Received, RecvWqe};
use crate::types::Sge;
use crate::xrc::{self, Membership, Xrcd};

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    /// Its domain no longer counts it.
    ended: AtomicBool,
    pd: Arc<Pd>,
    host: &'static Host,
    block: ArenaBlock,
    ring: &'static SrqRing,
    /// Offset of the slots in the block.
    slots: usize,
    max_wr: u32,
    max_sge: u32,
    poster: SpinLock<Poster>,
    notes: Box<[RecvWqe]>,
    /// By slot: see [`when_posted`].
    posted: Box<[AtomicU32]>,
    /// Whether an event was asked for and not raised yet.
    awaits_limit: AtomicBool,
    /// Queue pairs that use this queue.
    users: AtomicU32,
    handle: Arc<Handle>,
    number: u32,
    /// If it belongs to an XRC domain.
    xrc: Option<Membership>,
}

/// In [`Srq::posted`]: the slot is free.
const NOT_POSTED: u32 = 0;

/// In [`Srq::posted`]: the slot's request was posted as this one, modulo 2^16.
const fn when_posted(at: u16) -> u32 {
    1 << 16 | at as u32
}

#[derive(Debug)]
struct Poster {
    tail: u32,
    free: Vec<u32>,
}

impl Srq {
    /// Makes a queue for `max_wr` requests of `max_sge` elements.
    ///
    /// # Errors
    /// EINVAL for sizes beyond the device's, ENOMEM when the arena is full.
    pub fn new(pd: &Arc<Pd>, max_wr: u32, max_sge: u32) -> Result<Arc<Self>> {
        Self::make(pd, max_wr, max_sge, None)
    }

    /// The same for the queue pairs of an XRC domain, of whichever process; its requests complete in `cq`.
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
        let membership = Membership::new(pd.context.host, domain, cq)?;
        Self::make(pd, max_wr, max_sge, Some(membership))
    }

    fn make(pd: &Arc<Pd>, max_wr: u32, max_sge: u32, xrc: Option<Membership>) -> Result<Arc<Self>> {
        if max_wr == 0 || max_wr > MAX_QP_WR || max_sge > MAX_SGE {
            return Err(Errno::INVAL);
        }
        let max_sge = max_sge.max(1);
        let count = max_wr.next_power_of_two();
        let (slots, len) = srq_len(count as usize, max_sge);
        let host = pd.context.host;
        let block = host.arena.alloc(len).ok_or(Errno::NOMEM)?;
        // SAFETY: a fresh zeroed block, released only when this queue is dropped; all atomics.
        let ring: &'static SrqRing = unsafe { host.arena.at(block.offset).cast::<SrqRing>().as_ref() };
        // Zero already, unless a peer stored into memory that was free.
        for word in [&ring.head, &ring.rnr_wait, &ring.tail, &ring.limit] {
            word.store(0, Ordering::Relaxed);
        }
        ring.lock.reset();
        ring.sges.store(max_sge, Ordering::Relaxed);
        ring.pd.store(pd.id, Ordering::Relaxed);
        ring.mask.store(count - 1, Ordering::Release);
        pd.attach();
        let srq = Arc::new(Self {
            ended: AtomicBool::new(false),
            pd: pd.clone(),
            host,
            block,
            ring,
            slots,
            max_wr,
            max_sge,
            poster: SpinLock::new(Poster { tail: 0, free: (0..max_wr).rev().collect() }),
            notes: (0..count).map(|_| RecvWqe::default()).collect(),
            posted: (0..count).map(|_| AtomicU32::new(NOT_POSTED)).collect(),
            awaits_limit: AtomicBool::new(false),
            users: AtomicU32::new(0),
            handle: Arc::default(),
            number: xrc.as_ref().map_or_else(|| host.next_id(), Membership::number),
            xrc,
        });
        if let Some(membership) = &srq.xrc {
            membership.publish(&srq);
        }
        Ok(srq)
    }

    /// The XRC domain that it belongs to, if it does.
    #[must_use]
    pub fn domain(&self) -> Option<&Arc<Xrcd>> {
        self.xrc.as_ref().map(Membership::domain)
    }

    pub(crate) fn protection_domain(&self) -> u32 {
        self.pd.id
    }

    pub(crate) fn membership(&self) -> Option<&Membership> {
        self.xrc.as_ref()
    }

    /// What a sender of an XRC domain says about the queue.
    pub(crate) fn happened(self: &Arc<Self>, what: u32) {
        let Some(membership) = &self.xrc else { return };
        match what {
            shared::LIMIT => self.limit_reached(),
            shared::OVERRUN => membership.cq().check_overrun(),
            shared::ABANDONED => self.reclaim(membership.take_abandoned()),
            _ => {}
        }
    }

    /// The queue as its program knows it.
    #[must_use]
    pub fn handle(&self) -> &Handle {
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

    /// A number that no other queue of the process has; that of a queue of an XRC domain tells senders
    /// everywhere which one it is.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The limit below which an event is raised; zero once it was.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.ring.limit.load(Ordering::Acquire)
    }

    /// Asks for one event when fewer than `limit` requests are left.
    ///
    /// # Errors
    /// EINVAL for more than the queue holds.
    pub fn set_limit(self: &Arc<Self>, limit: u32) -> Result<()> {
        if limit > self.max_wr {
            return Err(Errno::INVAL);
        }
        self.awaits_limit.store(limit != 0, Ordering::Release);
        self.ring.limit.store(limit, Ordering::SeqCst);
        let left = self.poster.lock().tail.wrapping_sub(self.ring.head.load(Ordering::Acquire));
        if left < limit && self.ring.limit.swap(0, Ordering::AcqRel) != 0 {
            self.limit_reached();
        }
        Ok(())
    }

    /// A consumer left fewer requests than the limit, or says so.
    pub(crate) fn limit_reached(self: &Arc<Self>) {
        if !self.awaits_limit.swap(false, Ordering::AcqRel) {
            return;
        }
        self.pd.context.raise(EVENT_SRQ_LIMIT_REACHED, &self.handle);
    }

    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL for too many elements, ENOMEM when the queue is full.
    pub fn post(&self, wr_id: u64, sges: &[Sge]) -> Result<()> {
        if sges.len() > self.max_sge as usize {
            return Err(Errno::INVAL);
        }
        let mut poster = self.poster.lock();
        let slot = poster.free.pop().ok_or(Errno::NOMEM)?;
        let mask = self.ring.mask.load(Ordering::Relaxed) & (self.notes.len() as u32 - 1);
        let base = self.host.arena.at(self.block.offset).as_ptr();
        // SAFETY: slot and place in the order are inside the block; the slot is free.
        unsafe {
            let at = base.add(self.slots + slot as usize * recv_slot_len(self.max_sge));
            let elements = at.add(size_of::<RecvSlot>()).cast::<Sge>();
            elements.copy_from_nonoverlapping(sges.as_ptr(), sges.len());
            (*at.cast::<RecvSlot>()).n_sge.store(sges.len() as u32, Ordering::Relaxed);
            let order = base.add(size_of::<SrqRing>()).cast::<u32>();
            order.add((poster.tail & mask) as usize).write_volatile(slot);
        }
        self.notes[slot as usize].write(wr_id, sges);
        self.posted[slot as usize].store(when_posted(poster.tail as u16), Ordering::Release);
        poster.tail = poster.tail.wrapping_add(1);
        self.ring.tail.store(poster.tail, Ordering::Release);
        drop(poster);
        if self.ring.rnr_wait.load(Ordering::Relaxed) != 0 {
            self.wake_senders();
        }
        Ok(())
    }

    /// Peers' requests wait for this receive; whoever comes first gets it.
    #[cold]
    fn wake_senders(&self) {
        if self.ring.rnr_wait.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        if let Some(membership) = &self.xrc {
            return membership.wake_senders();
        }
        for qp in self.host.all_qps() {
            if qp.uses_srq(self)
                && let Some((peer, sender)) = qp.sender()
            {
                peer.tell(self.host, Message::new(Op::Refilled, [sender]));
            }
        }
    }

    /// Takes the request in `slot` as completed, once.
    #[inline]
    pub(crate) fn complete(&self, slot: u32) -> Option<Received> {
        if self.posted.get(slot as usize)?.swap(NOT_POSTED, Ordering::AcqRel) == NOT_POSTED {
            return None;
        }
        Some(self.give_back(slot))
    }

    fn give_back(&self, slot: u32) -> Received {
        let received = self.notes[slot as usize].read();
        self.poster.lock().free.push(slot);
        received
    }

    /// Takes back a request that a peer took, as it noted, and will not complete. The note is old news if the
    /// peer died before it had taken the request, or after it had completed it.
    pub(crate) fn reclaim(&self, note: u32) {
        let Some((slot, at)) = taken::read(note) else { return };
        let Some(posted) = self.posted.get(slot as usize) else { return };
        let Some(guard) = self.ring.lock.lock(self.host.party()) else { return };
        let (head, tail) = (self.ring.head.load(Ordering::Acquire), self.poster.lock().tail);
        let waiting = tail.wrapping_sub(head).min(self.notes.len() as u32);
        let waits = (0..waiting).any(|i| self.order_at(tail.wrapping_sub(i + 1)) == slot);
        drop(guard);
        // If not, and another peer has taken it meanwhile, that one's note was there before the request was gone.
        if waits || self.is_in_use(note, slot) {
            return;
        }
        let same = posted.compare_exchange(when_posted(at), NOT_POSTED, Ordering::AcqRel, Ordering::Relaxed);
        if same.is_ok() {
            let _ = self.give_back(slot);
        }
    }

    /// Whether somebody is about to complete a request, or has.
    fn is_in_use(&self, note: u32, slot: u32) -> bool {
        if let Some(membership) = &self.xrc {
            let sequence = xrc::tag(self.number) | slot;
            return membership.cq().has_received(|cqe| cqe.sequence == sequence);
        }
        self.host.all_qps().iter().any(|qp| qp.uses_srq(self) && qp.uses_request(note, slot))
    }

    /// The slot that was the `at`th to be posted.
    fn order_at(&self, at: u32) -> u32 {
        let mask = self.notes.len() as u32 - 1;
        let base = self.host.arena.at(self.block.offset).as_ptr();
        // SAFETY: the place is masked to those that exist, inside the block.
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

    /// Ends the queue's life; waits until all events that were fetched are acknowledged.
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
        if !self.ended.swap(true, Ordering::AcqRel) {
            if let Some(membership) = &self.xrc {
                membership.withdraw(self.number);
            }
            self.pd.detach();
        }
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        self.end();
        self.host.arena.release(self.block);
    }
}
