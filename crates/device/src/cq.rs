//! Completion queues.
//!
//! A queue has two halves. Completions of this process's own send requests go into a private ring.
//! Completions that peers produce (receives) go into a ring in the arena, under a lock that
//! survives the death of its holder; the last store publishes, so a half-written one is never seen.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, Weak};

use millstream_shm::{Block, SpinLock};

use crate::caps::MAX_CQE;
use crate::channel::Channel;
use crate::context::Context;
use crate::errno::{Errno, Result};
use crate::event::{EVENT_CQ_ERR, Handle};
use crate::layout::{ARM_ANY, ARM_NONE, ARM_SOLICITED, CqRing, Cqe, cq_ring_len};
use crate::qp::Qp;
use crate::types::{WC_GENERAL_ERR, WC_OP_RECV, WC_SUCCESS, Wc};

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    context: Arc<Context>,
    channel: Option<Arc<Channel>>,
    capacity: usize,
    block: Block,
    ring: &'static CqRing,
    /// Guards both halves' consumer side and the private half.
    consumer: SpinLock<Consumer>,
    /// Queue pairs with parked requests that complete here.
    parked: SpinLock<Vec<Weak<Qp>>>,
    has_parked: AtomicBool,
    overrun: AtomicBool,
    /// Queue pairs that use this queue.
    users: AtomicU32,
    events: Mutex<Events>,
    acknowledged: Condvar,
    handle: Arc<Handle>,
}

#[derive(Debug, Default)]
struct Events {
    delivered: u32,
    acknowledged: u32,
}

#[derive(Debug)]
pub(crate) struct Consumer {
    own: VecDeque<OwnCompletion>,
    /// Completions of peers ever consumed. The shared word is for peers to read.
    head: u32,
}

/// A completion of one of our own send requests.
#[derive(Clone, Copy, Debug)]
struct OwnCompletion {
    wc: Wc,
    /// Send requests of the queue pair that this completion gives back, ever.
    posted: u32,
}

impl Cq {
    /// Makes a queue of at least `entries` entries.
    ///
    /// # Errors
    /// EINVAL for zero or more entries than the device offers, ENOMEM when the arena is full.
    pub fn new(context: &Arc<Context>, entries: u32, channel: Option<Arc<Channel>>) -> Result<Arc<Self>> {
        if entries == 0 || entries > MAX_CQE {
            return Err(Errno::INVAL);
        }
        let capacity = entries.next_power_of_two() as usize;
        let host = context.host;
        let block = host.arena.alloc(cq_ring_len(capacity)).ok_or(Errno::NOMEM)?;
        // SAFETY: a fresh zeroed block of the right size, released only when this queue is dropped,
        // by when no reference is left; all fields are atomics.
        let ring: &'static CqRing = unsafe { host.arena.at(block.offset).cast::<CqRing>().as_ref() };
        // Zero already, unless a peer stored into memory that was free.
        for word in [&ring.tail, &ring.seen_head, &ring.armed, &ring.events, &ring.overrun, &ring.head] {
            word.store(0, Ordering::Relaxed);
        }
        ring.lock.reset();
        ring.mask.store(capacity as u32 - 1, Ordering::Relaxed);
        ring.channel.store(channel.as_ref().map_or(0, |c| c.id), Ordering::Release);
        let cq = Arc::new(Self {
            context: context.clone(),
            channel: channel.clone(),
            capacity,
            block,
            ring,
            consumer: SpinLock::new(Consumer { own: VecDeque::with_capacity(capacity.min(4096)), head: 0 }),
            parked: SpinLock::new(Vec::new()),
            has_parked: AtomicBool::new(false),
            overrun: AtomicBool::new(false),
            users: AtomicU32::new(0),
            events: Mutex::default(),
            acknowledged: Condvar::new(),
            handle: Arc::default(),
        });
        if let Some(channel) = &channel {
            channel.add(&cq);
        }
        Ok(cq)
    }

    /// Entries, at least as many as asked for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity as u32
    }

    /// The channel given at creation.
    #[must_use]
    pub fn channel(&self) -> Option<&Arc<Channel>> {
        self.channel.as_ref()
    }

    /// The queue as its program knows it.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Ends the queue's life; waits until all events that were fetched, of either kind, are acknowledged.
    ///
    /// # Errors
    /// EBUSY while queue pairs use it.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the event counts.
    pub fn destroy(self: &Arc<Self>) -> Result<()> {
        if self.users.load(Ordering::Acquire) != 0 {
            return Err(Errno::BUSY);
        }
        if let Some(channel) = &self.channel {
            channel.remove(self);
        }
        self.context.end_events(&self.handle);
        let mut events = self.events.lock().expect("no panic under this lock");
        while events.acknowledged != events.delivered {
            events = self.acknowledged.wait(events).expect("no panic under this lock");
        }
        Ok(())
    }

    pub(crate) fn attach(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn detach(&self) {
        self.users.fetch_sub(1, Ordering::AcqRel);
    }

    /// Where the shared half lies in the arena, in units of 64 bytes.
    pub(crate) fn arena_offset(&self) -> u32 {
        (self.block.offset / 64) as u32
    }

    /// Keeps pollers out of two queues, which may be one and the same: then the second is none. The
    /// order in which they are locked is the same for all.
    pub(crate) fn lock_consumers<'a>(
        a: &'a Self,
        b: &'a Self,
    ) -> (millstream_shm::SpinGuard<'a, Consumer>, Option<millstream_shm::SpinGuard<'a, Consumer>>) {
        match a.block.offset.cmp(&b.block.offset) {
            std::cmp::Ordering::Equal => (a.consumer.lock(), None),
            std::cmp::Ordering::Less => {
                let first = a.consumer.lock();
                (first, Some(b.consumer.lock()))
            }
            std::cmp::Ordering::Greater => {
                let second = b.consumer.lock();
                (a.consumer.lock(), Some(second))
            }
        }
    }

    /// Drops the undelivered completions of a queue pair's receive requests, and names each request to
    /// `lost` as [`Cqe::sequence`] does.
    pub(crate) fn forget_received(&self, consumer: &Consumer, qpn: u32, mut lost: impl FnMut(u32)) {
        let mut at = consumer.head;
        for _ in 0..self.capacity {
            let Some(cqe) = self.read(at) else { break };
            if cqe.qpn == qpn {
                lost(cqe.sequence);
                let index = at as usize & (self.capacity - 1);
                // SAFETY: inside the block; a published entry is the consumer's until it is consumed.
                unsafe { (&raw mut (*entries(self.ring).add(index)).qpn).write_volatile(0) };
            }
            at = at.wrapping_add(1);
        }
    }

    /// Takes up to `out.len()` completions.
    ///
    /// # Errors
    /// EIO after the queue has overflowed and everything that fit has been taken.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize> {
        let n = self.take(out);
        if n != 0 {
            return Ok(n);
        }
        if self.overrun.load(Ordering::Relaxed) && !out.is_empty() {
            return Err(Errno(libc::EIO));
        }
        if !self.has_parked.load(Ordering::Relaxed) {
            return Ok(0);
        }
        self.progress();
        Ok(self.take(out))
    }

    #[inline]
    fn take(&self, out: &mut [Wc]) -> usize {
        let host = self.context.host;
        let mut consumer = self.consumer.lock();
        let mut n = 0;
        while n < out.len() {
            let Some(own) = consumer.own.pop_front() else { break };
            if let Some(qp) = host.sender_for_poller(own.wc.qp_num) {
                qp.reclaim(own.posted);
            }
            out[n] = own.wc;
            n += 1;
        }
        let mut head = consumer.head;
        let before = head;
        // A peer that breaks the rules can publish entries for ever; one lap of them is enough for a call.
        while n < out.len() && (head.wrapping_sub(before) as usize) < self.capacity {
            let Some(cqe) = self.read(head) else { break };
            head = head.wrapping_add(1);
            // Completions of queue pairs that are gone, or that no request matches, are dropped.
            if let Some(qp) = host.receiver_for_poller(cqe.qpn, self.arena_offset())
                && let Some(receive) = qp.received(cqe.sequence)
            {
                // What a peer wrote is passed on as far as it is possible: programs rely on the rest.
                let opcode = WC_OP_RECV | u32::from(cqe.opcode) & 1;
                let room = if opcode == WC_OP_RECV { receive.room } else { u32::MAX };
                out[n] = Wc {
                    wr_id: receive.wr_id,
                    status: u32::from(cqe.status).min(WC_GENERAL_ERR),
                    opcode,
                    vendor_err: if cqe.status == WC_SUCCESS as u16 { 0 } else { cqe.detail },
                    byte_len: cqe.byte_len.min(room),
                    imm: cqe.imm,
                    qp_num: cqe.qpn,
                    src_qp: if cqe.status == WC_SUCCESS as u16 { cqe.detail } else { 0 },
                    wc_flags: cqe.wc_flags,
                    ..Wc::default()
                };
                n += 1;
            }
        }
        if head != before {
            consumer.head = head;
            self.ring.head.store(head, Ordering::Release);
        }
        n
    }

    #[inline]
    fn read(&self, at: u32) -> Option<Cqe> {
        let index = at as usize & (self.capacity - 1);
        // SAFETY: the entry lies inside the block. A producer may be overwriting it only if it
        // breaks the protocol; the copy is then garbage, and is checked as such.
        unsafe {
            let entry = entries(self.ring).add(index);
            (stamp(entry).load(Ordering::Acquire) == at.wrapping_add(1)).then(|| entry.read_volatile())
        }
    }

    /// Adds a completion of one of our own send requests.
    #[inline]
    pub(crate) fn push_own(
        self: &Arc<Self>,
        wc: Wc,
        posted: u32,
        solicited: bool,
    ) -> std::result::Result<(), CqFull> {
        let mut consumer = self.consumer.lock();
        if consumer.own.len() >= self.capacity {
            drop(consumer);
            self.overflow();
            return Err(CqFull);
        }
        consumer.own.push_back(OwnCompletion { wc, posted });
        drop(consumer);
        if self.channel.is_some() {
            fence(Ordering::SeqCst);
            self.notify(solicited || wc.status != WC_SUCCESS);
        }
        Ok(())
    }

    /// Adds to the shared half, as the process that owns it (for flushed receives).
    /// False if it cannot take more.
    pub(crate) fn push_shared(self: &Arc<Self>, cqe: Cqe) -> bool {
        let remote = RemoteCq { ring: self.ring, mask: self.capacity as u32 - 1 };
        match remote.push(self.context.host.pid, cqe, true) {
            Ok(true) => {
                if let Some(channel) = &self.channel {
                    channel.signal();
                }
            }
            Ok(false) => {}
            Err(_) => {
                self.overflow();
                return false;
            }
        }
        true
    }

    fn notify(&self, solicited: bool) {
        if wants_event(self.ring, solicited)
            && let Some(channel) = &self.channel
        {
            channel.signal();
        }
    }

    /// The queue was full: a completion is lost, which is an error of the queue (IBTA volume 1, 11.6.3.1).
    pub(crate) fn overflow(self: &Arc<Self>) {
        if !self.overrun.swap(true, Ordering::AcqRel) {
            self.context.raise(EVENT_CQ_ERR, &self.handle);
        }
    }

    pub(crate) fn has_overrun(&self) -> bool {
        self.overrun.load(Ordering::Acquire)
    }

    /// Reports an overflow that a peer ran into.
    pub(crate) fn check_overrun(self: &Arc<Self>) {
        if self.ring.overrun.load(Ordering::Acquire) != 0 {
            self.overflow();
        }
    }

    /// Asks for an event with the next completion, or the next solicited one or error.
    pub fn arm(&self, solicited_only: bool) {
        let wish = if solicited_only { ARM_SOLICITED } else { ARM_ANY };
        // A request for any completion is not weakened by a later one for solicited ones.
        if !(solicited_only && self.ring.armed.load(Ordering::Relaxed) == ARM_ANY) {
            self.ring.armed.store(wish, Ordering::Relaxed);
        }
        // Producers publish, then look at the wish; the consumer wishes, then polls once more.
        fence(Ordering::SeqCst);
    }

    /// Takes back events that were signalled and not yet fetched; how many.
    pub(crate) fn forget_events(&self) -> u32 {
        // Peers can write this word, too: each entry caused one event at most.
        self.ring.events.swap(0, Ordering::AcqRel).min(2 * self.capacity as u32)
    }

    pub(crate) fn take_event(&self) -> bool {
        let taken =
            self.ring.events.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok();
        if taken {
            self.events.lock().expect("no panic under this lock").delivered += 1;
        }
        taken
    }

    /// Acknowledges events that were fetched from the channel.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the event counts.
    pub fn acknowledge(&self, events: u32) {
        let mut counts = self.events.lock().expect("no panic under this lock");
        counts.acknowledged = counts.acknowledged.wrapping_add(events);
        self.acknowledged.notify_all();
    }

    pub(crate) fn add_parked(&self, qp: Weak<Qp>) {
        self.parked.lock().push(qp);
        self.has_parked.store(true, Ordering::Release);
    }

    /// Tries parked requests again, on behalf of an application that polls.
    #[cold]
    fn progress(&self) {
        let parked = {
            let mut list = self.parked.lock();
            self.has_parked.store(false, Ordering::Release);
            std::mem::take(&mut *list)
        };
        for qp in parked {
            if qp.upgrade().is_some_and(|qp| qp.retry_for_poller()) {
                self.add_parked(qp);
            }
        }
    }
}

impl Consumer {
    /// Drops the undelivered completions of a queue pair's send requests.
    pub(crate) fn forget(&mut self, qpn: u32) {
        self.own.retain(|own| own.wc.qp_num != qpn);
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.context.host.arena.release(self.block);
    }
}

fn entries(ring: &CqRing) -> *mut Cqe {
    // SAFETY: the entries follow the header in the same block.
    unsafe { std::ptr::from_ref(ring).add(1).cast_mut().cast::<Cqe>() }
}

/// # Safety
/// The pointer is to an entry of a ring that outlives the result.
#[inline]
unsafe fn stamp<'a>(entry: *mut Cqe) -> &'a AtomicU32 {
    // SAFETY: the caller vouches for the entry; its last word is only accessed so.
    unsafe { AtomicU32::from_ptr(&raw mut (*entry).stamp) }
}

/// Whether the consumer waits for a completion like this one; the wish is used up.
fn wants_event(ring: &CqRing, solicited: bool) -> bool {
    let wish = ring.armed.load(Ordering::Relaxed);
    if wish == ARM_NONE || (wish == ARM_SOLICITED && !solicited) {
        return false;
    }
    if ring.armed.swap(ARM_NONE, Ordering::AcqRel) == ARM_NONE {
        return false;
    }
    ring.events.fetch_add(1, Ordering::AcqRel);
    true
}

/// The shared half of somebody's completion queue, as a producer sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteCq {
    pub(crate) ring: &'static CqRing,
    /// Checked once against the memory that is there.
    pub(crate) mask: u32,
}

/// There was no room.
#[derive(Debug)]
pub(crate) struct CqFull;

/// Why a completion could not be added to somebody's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAdded {
    /// There was no room.
    Full,
    /// Another producer was stopped while it held the lease, or the word is forged.
    Locked,
}

impl RemoteCq {
    /// Adds a completion; true if the consumer's channel must be signalled.
    #[inline]
    pub(crate) fn push(&self, me: u32, cqe: Cqe, solicited: bool) -> std::result::Result<bool, NotAdded> {
        let guard = self.ring.lock.lock(me).ok_or(NotAdded::Locked)?;
        let ring = self.ring;
        let mut tail = ring.tail.load(Ordering::Relaxed);
        // SAFETY: the index is masked to entries that exist, here and below.
        let place = |tail: u32| unsafe { entries(ring).add((tail & self.mask) as usize) };
        // SAFETY: as above.
        if unsafe { stamp(place(tail)) }.load(Ordering::Relaxed) == tail.wrapping_add(1) {
            // A producer died between publishing this entry and counting it.
            tail = tail.wrapping_add(1);
        }
        if tail.wrapping_sub(ring.seen_head.load(Ordering::Relaxed)) > self.mask {
            let head = ring.head.load(Ordering::Acquire);
            ring.seen_head.store(head, Ordering::Relaxed);
            if tail.wrapping_sub(head) > self.mask {
                ring.overrun.store(1, Ordering::Release);
                return Err(NotAdded::Full);
            }
        }
        // The old stamp stays until the rest is written: the consumer of this lap waits for the new one.
        // SAFETY: as above; the entry belongs to the holder of the lease until it is stamped.
        unsafe {
            let entry = place(tail);
            let old = stamp(entry).load(Ordering::Relaxed);
            entry.write_volatile(Cqe { stamp: old, ..cqe });
            stamp(entry).store(tail.wrapping_add(1), Ordering::Release);
        }
        ring.tail.store(tail.wrapping_add(1), Ordering::Release);
        if ring.channel.load(Ordering::Relaxed) == 0 {
            drop(guard);
            return Ok(false);
        }
        guard.release_fenced();
        Ok(wants_event(ring, solicited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pd::Pd;
    use crate::qp::state::{Attributes, State, attr};
    use crate::qp::{Capacity, Kind, Receives};
    use crate::types::Sge;

    fn queue_pair(context: &Arc<Context>, cq: &Arc<Cq>) -> Arc<Qp> {
        let capacity = Capacity { max_recv_wr: 4, max_recv_sge: 2, max_send_wr: 1, ..Capacity::default() };
        let pd = Pd::new(context);
        let qp = Qp::new(&pd, cq, cq, capacity, true, Kind::Rc, Receives::Own).unwrap();
        let init = Attributes { state: State::Init, port: 1, ..Attributes::default() };
        qp.modify(&init, attr::STATE | attr::PORT | attr::PKEY_INDEX | attr::ACCESS_FLAGS).unwrap();
        qp
    }

    /// What a peer that writes whatever it likes would do.
    fn forge(cq: &Cq, cqe: Cqe) {
        let ring = RemoteCq { ring: cq.ring, mask: cq.capacity as u32 - 1 };
        ring.push(cq.context.host.pid, cqe, false).unwrap();
    }

    #[test]
    fn a_completion_in_the_wrong_queue_is_dropped() {
        let context = Context::open().unwrap();
        let [here, elsewhere] = [(); 2].map(|()| Cq::new(&context, 8, None).unwrap());
        let qp = queue_pair(&context, &elsewhere);
        qp.post_recv(7, &[]).unwrap();
        let cqe = Cqe { qpn: qp.qpn(), opcode: WC_OP_RECV as u16, ..Cqe::default() };
        forge(&here, cqe);
        assert_eq!(here.poll(&mut [Wc::default()]), Ok(0));
        forge(&elsewhere, cqe);
        let mut out = [Wc::default()];
        assert_eq!(elsewhere.poll(&mut out), Ok(1));
        assert_eq!(out[0].wr_id, 7);
    }

    #[test]
    fn a_completion_says_nothing_impossible() {
        let context = Context::open().unwrap();
        let cq = Cq::new(&context, 8, None).unwrap();
        let qp = queue_pair(&context, &cq);
        let room = |length| Sge { length, ..Sge::default() };
        qp.post_recv(7, &[room(100), room(28)]).unwrap();
        qp.post_recv(8, &[room(u32::MAX), room(u32::MAX)]).unwrap();
        let cqe = Cqe { qpn: qp.qpn(), status: 999, opcode: 2, byte_len: 129, ..Cqe::default() };
        forge(&cq, cqe);
        forge(&cq, Cqe { sequence: 1, status: 0, byte_len: u32::MAX, ..cqe });
        // Neither was posted.
        forge(&cq, Cqe { sequence: 2, ..cqe });
        forge(&cq, Cqe { qpn: qp.qpn() ^ 1, ..cqe });
        let mut out = [Wc::default(); 4];
        assert_eq!(cq.poll(&mut out), Ok(2));
        let [first, second, ..] = out;
        assert_eq!((first.wr_id, first.status, first.opcode), (7, WC_GENERAL_ERR, WC_OP_RECV));
        assert_eq!(first.byte_len, 128);
        assert_eq!((second.wr_id, second.status, second.byte_len), (8, WC_SUCCESS, u32::MAX));
    }
}
