//! Completion queues.
//!
//! A queue has two halves. Completions of this process's own send requests go into a private ring.
//! Completions that peers produce (receives) go into a ring in the arena, under a lock that
//! survives the death of its holder; the last store publishes, so a half-written one is never seen.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, Weak};

use millstream_lockfree::cq_ring::{
    ARM_ANY, ARM_SOLICITED, CqEntries, CqProducer, CqRing, OFFSET_UNIT, entries_len,
};
use millstream_lockfree::cqe::Cqe;
use millstream_lockfree::{BiasedLock, SpinGuard, SpinLock, Timestamp};
use millstream_shm::ArenaBlock;

use crate::caps::MAX_CQE;
use crate::channel::Channel;
use crate::context::Context;
use crate::errno::{Errno, Result};
use crate::event::{EVENT_CQ_ERR, Handle};
use crate::host::{Host, TIMER_CHANNEL};
use crate::layout::ARENA_LEN;
use crate::moderation::Moderation;
use crate::qp::{Qp, Received};
use crate::types::{WC_GENERAL_ERR, WC_OP_RECV, WC_SUCCESS, Wc};
use crate::xrc;

/// Bits of what waits for who polls.
const PARKED: u32 = 1;
const WIRED: u32 = 2;

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub(crate) context: Arc<Context>,
    channel: Option<Arc<Channel>>,
    /// CqEntries, for those who do not hold the consumer's lock.
    capacity: AtomicU32,
    /// Where the header of the shared half lies.
    block: ArenaBlock,
    pub(crate) ring: &'static CqRing,
    /// Whether completions are stamped with the time.
    timed: bool,
    /// Guards both halves' consumer side and the private half.
    consumer: BiasedLock<Consumer>,
    pub(crate) moderation: Mutex<Moderation>,
    /// Queue pairs with parked requests that complete here.
    parked: SpinLock<Vec<Weak<Qp>>>,
    /// What may wait to be looked after by who polls: [`PARKED`] requests, or packets for [`WIRED`] queue pairs.
    waits: AtomicU32,
    /// Queue pairs that complete here and whose packets a poller takes in.
    wired: AtomicU32,
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
    /// The times of our own completions, if they are kept.
    own_times: VecDeque<Timestamp>,
    /// The shared half.
    entries: CqEntries,
    /// Where they lie.
    block: ArenaBlock,
    /// Completions of peers ever consumed. The shared word is for peers to read.
    head: u32,
    /// When the last completion that was taken was added, if times are kept.
    time: Timestamp,
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
        Self::make(context, entries, channel, false)
    }

    /// The same; every completion is stamped with the time at which it was added.
    ///
    /// # Errors
    /// As [`Cq::new`].
    pub fn timed(context: &Arc<Context>, entries: u32, channel: Option<Arc<Channel>>) -> Result<Arc<Self>> {
        Self::make(context, entries, channel, true)
    }

    fn make(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<Arc<Channel>>,
        timed: bool,
    ) -> Result<Arc<Self>> {
        let host = context.host;
        host.wire.pay();
        let (memory, entries) = allocate(host, entries, timed)?;
        let header = host.arena.alloc(size_of::<CqRing>());
        let block = header.ok_or(Errno::NOMEM).inspect_err(|_| host.arena.release(memory))?;
        // SAFETY: a fresh zeroed block of the right size, released only when this queue is dropped,
        // by when no reference is left; all fields are atomics.
        let ring: &'static CqRing = unsafe { host.arena.at(block.offset).cast::<CqRing>().as_ref() };
        // Zero already, unless a peer stored into memory that was free.
        let counts = [&ring.tail, &ring.cached_head, &ring.events, &ring.pending, &ring.head];
        let states = [&ring.armed, &ring.overrun, &ring.generation, &ring.moderation];
        for word in counts.into_iter().chain(states) {
            word.store(0, Ordering::Relaxed);
        }
        ring.lock.reset();
        ring.entries.store((memory.offset / OFFSET_UNIT) as u32, Ordering::Relaxed);
        ring.mask.store(entries.capacity() - 1, Ordering::Relaxed);
        ring.timestamps.store(u32::from(timed), Ordering::Relaxed);
        ring.timer.store(TIMER_CHANNEL, Ordering::Relaxed);
        ring.channel.store(channel.as_ref().map_or(0, |c| c.id), Ordering::Release);
        let room = entries.capacity().min(4096) as usize;
        let consumer = Consumer {
            own: VecDeque::with_capacity(room),
            own_times: VecDeque::with_capacity(if timed { room } else { 0 }),
            entries,
            block: memory,
            head: 0,
            time: Timestamp::default(),
        };
        let cq = Arc::new(Self {
            context: context.clone(),
            channel: channel.clone(),
            capacity: AtomicU32::new(entries.capacity()),
            block,
            ring,
            timed,
            consumer: BiasedLock::new(consumer),
            moderation: Mutex::default(),
            parked: SpinLock::new(Vec::new()),
            waits: AtomicU32::new(0),
            wired: AtomicU32::new(0),
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

    /// CqEntries, at least as many as asked for.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Makes room for at least `entries` completions, more or fewer than now. Completions that wait stay,
    /// and others may be added meanwhile.
    ///
    /// # Errors
    /// EINVAL for more entries than the device offers, or fewer than wait; ENOMEM when the arena is full;
    /// EBUSY if a peer was stopped while it added a completion.
    pub fn resize(&self, entries: u32) -> Result<()> {
        let host = self.context.host;
        let (block, new) = allocate(host, entries, self.timed)?;
        let replaced = self.replace(block, new);
        // Whoever adds a completion from now on finds the new entries.
        host.arena.release(*replaced.as_ref().unwrap_or(&block));
        replaced.map(drop)
    }

    /// Puts new entries in place of the old, and returns where those were.
    fn replace(&self, block: ArenaBlock, new: CqEntries) -> Result<ArenaBlock> {
        let mut consumer = self.consumer.lock();
        let lease = self.ring.lock.lock(self.context.host.party()).ok_or(Errno::BUSY)?;
        let old = consumer.entries;
        let head = consumer.head;
        let waiting = (0..old.capacity()).take_while(|i| old.read(head.wrapping_add(*i)).is_some()).count();
        if waiting.max(consumer.own.len()) > new.capacity() as usize {
            return Err(Errno::INVAL);
        }
        let tail = head.wrapping_add(waiting as u32);
        old.copy_to(&new, head, tail);
        let ring = self.ring;
        ring.entries.store((block.offset / OFFSET_UNIT) as u32, Ordering::Relaxed);
        ring.mask.store(new.capacity() - 1, Ordering::Relaxed);
        ring.tail.store(tail, Ordering::Relaxed);
        ring.cached_head.store(head, Ordering::Relaxed);
        ring.generation.fetch_add(1, Ordering::Release);
        drop(lease);
        consumer.entries = new;
        self.capacity.store(new.capacity(), Ordering::Relaxed);
        Ok(std::mem::replace(&mut consumer.block, block))
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
        (self.block.offset / OFFSET_UNIT) as u32
    }

    /// Keeps pollers out of two queues, which may be one and the same: then the second is none. The
    /// order in which they are locked is the same for all.
    pub(crate) fn lock_consumers<'a>(
        a: &'a Self,
        b: &'a Self,
    ) -> (SpinGuard<'a, Consumer>, Option<SpinGuard<'a, Consumer>>) {
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
        self.forget_matching(consumer, |cqe| {
            let matches = cqe.qpn == qpn;
            if matches {
                lost(cqe.sequence);
            }
            matches
        });
    }

    /// Whether a completion of a receive request waits to be polled.
    pub(crate) fn has_received(&self, mut matches: impl FnMut(&Cqe) -> bool) -> bool {
        let consumer = self.consumer.lock();
        let waiting =
            (0..consumer.entries.capacity()).map(|i| consumer.entries.read(consumer.head.wrapping_add(i)));
        waiting.map_while(|cqe| cqe).any(|cqe| matches(&cqe))
    }

    fn forget_matching(&self, consumer: &Consumer, mut matches: impl FnMut(&Cqe) -> bool) {
        let mut at = consumer.head;
        for _ in 0..consumer.entries.capacity() {
            let Some(cqe) = consumer.entries.read(at) else { break };
            if matches(&cqe) {
                // A published one is the consumer's until it is consumed.
                consumer.entries.slot(at).cancel();
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
        let n = self.take(&mut self.consumer.lock(), out);
        if n != 0 || self.is_calm() { Ok(n) } else { self.poll_late(out) }
    }

    #[cold]
    fn poll_late(&self, out: &mut [Wc]) -> Result<usize> {
        self.attend(!out.is_empty())?;
        Ok(self.take(&mut self.consumer.lock(), out))
    }

    /// Takes the next completion, with the time at which it was added if times are kept.
    ///
    /// # Errors
    /// As [`Cq::poll`].
    #[inline]
    pub fn poll_one(&self) -> Result<Option<(Wc, Timestamp)>> {
        let found = self.take_one();
        if found.is_some() || self.is_calm() {
            return Ok(found);
        }
        self.attend(true)?;
        Ok(self.take_one())
    }

    fn take_one(&self) -> Option<(Wc, Timestamp)> {
        let mut out = [Wc::default()];
        let mut consumer = self.consumer.lock();
        (self.take(&mut consumer, &mut out) == 1).then_some((out[0], consumer.time))
    }

    /// Whether an empty queue is just that: nothing was lost, and nothing waits to be tried again.
    #[inline]
    fn is_calm(&self) -> bool {
        !self.overrun.load(Ordering::Relaxed) && self.waits.load(Ordering::Relaxed) == 0
    }

    #[cold]
    fn attend(&self, asked: bool) -> Result<()> {
        if asked && self.overrun.load(Ordering::Relaxed) {
            return Err(Errno(libc::EIO));
        }
        self.progress();
        Ok(())
    }

    #[inline]
    fn take(&self, consumer: &mut Consumer, out: &mut [Wc]) -> usize {
        let host = self.context.host;
        let mut n = 0;
        while n < out.len() {
            let Some(own) = consumer.own.pop_front() else { break };
            if self.timed {
                consumer.time = consumer.own_times.pop_front().unwrap_or_default();
            }
            if let Some(qp) = host.sender_for_poller(own.wc.qp_num) {
                qp.reclaim(own.posted);
            }
            out[n] = own.wc;
            n += 1;
        }
        let mut head = consumer.head;
        let before = head;
        // A peer that breaks the rules can publish entries for ever; one lap of them is enough for a call.
        while n < out.len() && head.wrapping_sub(before) < consumer.entries.capacity() {
            let Some(cqe) = consumer.entries.read(head) else { break };
            if self.timed {
                consumer.time = consumer.entries.timestamp(head);
            }
            head = head.wrapping_add(1);
            let receive = match host.receiver_for_poller(cqe.qpn, self.arena_offset()) {
                Some(qp) => qp.received(cqe.sequence),
                None => self.received_for_domain(cqe.sequence),
            };
            // Completions of queue pairs that are gone, or that no request matches, are dropped.
            if let Some(receive) = receive {
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
                    src_qp: if cqe.status == WC_SUCCESS as u16 { cqe.detail & 0xff_ffff } else { 0 },
                    wc_flags: cqe.wc_flags,
                    sl: if cqe.status == WC_SUCCESS as u16 { (cqe.detail >> 24) as u8 } else { 0 },
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

    /// The receive request of a shared queue of an XRC domain; the queue pair may be another process's.
    #[cold]
    fn received_for_domain(&self, sequence: u32) -> Option<Received> {
        self.context.host.xrc.for_poller(sequence, self.arena_offset())?.complete(xrc::slot(sequence))
    }

    /// Runs `work` while no poller looks at what is registered as completing here; the completions of a
    /// shared queue of an XRC domain are dropped.
    pub(crate) fn forget_shared(&self, number: u32, work: impl FnOnce()) {
        let consumer = self.consumer.lock();
        self.forget_matching(&consumer, |cqe| xrc::is_of(cqe.sequence, number) && self.is_foreign(cqe.qpn));
        work();
    }

    /// Whether the queue pair receives through an XRC domain, or not at all.
    fn is_foreign(&self, qpn: u32) -> bool {
        self.context.host.receiver_for_poller(qpn, self.arena_offset()).is_none()
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
        if consumer.own.len() >= consumer.entries.capacity() as usize {
            drop(consumer);
            self.overflow();
            return Err(CqFull);
        }
        if consumer.own.is_empty() {
            // From the start of its memory: who takes each completion at once always meets the same lines.
            consumer.own.clear();
        }
        consumer.own.push_back(OwnCompletion { wc, posted });
        if self.timed {
            consumer.keep_time();
        }
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
        let producer = self.producer();
        match producer.push(self.context.host.party(), cqe, true) {
            Ok(true) => self.signal(producer.channel()),
            Ok(false) => {}
            Err(_) => {
                self.overflow();
                return false;
            }
        }
        true
    }

    /// The shared half as peers see it.
    fn producer(&self) -> CqProducer<&CqRing> {
        // SAFETY: our own arena, which is never unmapped.
        unsafe {
            CqProducer::new(
                NonNull::slice_from_raw_parts(self.context.host.arena.at(0), ARENA_LEN),
                self.ring,
            )
        }
    }

    fn notify(&self, solicited: bool) {
        self.signal(self.ring.channel_to_signal(solicited));
    }

    fn signal(&self, number: u32) {
        match &self.channel {
            _ if number == 0 => {}
            Some(channel) if number == channel.id => channel.signal(),
            _ => self.context.host.progress.wake(),
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
        if self.ring.moderation.load(Ordering::Relaxed) > 1 {
            self.begin_moderation();
        }
        // A request for any completion is not weakened by a later one for solicited ones.
        if !(solicited_only && self.ring.armed.load(Ordering::Relaxed) == ARM_ANY) {
            self.ring.armed.store(wish, Ordering::Relaxed);
        }
        // Producers publish, then look at the wish; the consumer wishes, then polls once more.
        fence(Ordering::SeqCst);
        if self.wired.load(Ordering::Relaxed) != 0 {
            // Who sleeps takes no packets in.
            self.context.host.wire.hand_over(self.context.host);
        }
    }

    /// From now on, or no longer, who polls this queue takes in packets.
    pub(crate) fn set_wired(&self, wired: bool) {
        if wired {
            self.wired.fetch_add(1, Ordering::SeqCst);
            self.waits.fetch_or(WIRED, Ordering::SeqCst);
        } else {
            self.wired.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Takes back events that were signalled and not yet fetched; how many.
    pub(crate) fn forget_events(&self) -> u32 {
        // Peers can write this word, too: each entry caused one event at most.
        self.ring.events.swap(0, Ordering::AcqRel).min(2 * self.capacity())
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
        self.waits.fetch_or(PARKED, Ordering::Release);
    }

    /// Tries parked requests again, and takes packets in, on behalf of an application that polls.
    #[cold]
    fn progress(&self) {
        let waits = self.waits.load(Ordering::Acquire);
        if waits & WIRED != 0 {
            if self.wired.load(Ordering::Relaxed) != 0 {
                self.context.host.wire.poll(self.context.host);
            } else {
                self.waits.fetch_and(!WIRED, Ordering::SeqCst);
                // Who has come meanwhile has counted itself before it set this.
                if self.wired.load(Ordering::SeqCst) != 0 {
                    self.waits.fetch_or(WIRED, Ordering::SeqCst);
                }
            }
        }
        if waits & PARKED == 0 {
            return;
        }
        let parked = {
            let mut list = self.parked.lock();
            self.waits.fetch_and(!PARKED, Ordering::SeqCst);
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
    /// Notes that our own last completion is added now.
    #[cold]
    #[inline(never)]
    fn keep_time(&mut self) {
        self.own_times.push_back(Timestamp::now());
    }

    /// Drops the undelivered completions of a queue pair's send requests.
    pub(crate) fn forget(&mut self, qpn: u32) {
        let mut times = std::mem::take(&mut self.own_times).into_iter();
        let mut kept = VecDeque::new();
        self.own.retain(|own| {
            let keep = own.wc.qp_num != qpn;
            kept.extend(times.next().filter(|_| keep));
            keep
        });
        self.own_times = kept;
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let arena = &self.context.host.arena;
        arena.release(self.consumer.lock().block);
        arena.release(self.block);
    }
}

/// Takes memory for at least this many completions.
fn allocate(host: &Host, entries: u32, timed: bool) -> Result<(ArenaBlock, CqEntries)> {
    if entries == 0 || entries > MAX_CQE {
        return Err(Errno::INVAL);
    }
    let capacity = entries.next_power_of_two();
    let block = host.arena.alloc(entries_len(capacity as usize, timed)).ok_or(Errno::NOMEM)?;
    // SAFETY: of that length; released when a queue has let go of them.
    let entries = unsafe { CqEntries::new(host.arena.at(block.offset), capacity, timed) };
    Ok((block, entries))
}

/// There was no room.
#[derive(Debug)]
pub(crate) struct CqFull;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pd::Pd;
    use crate::qp::state::{QpAttr, QpState, attr};
    use crate::qp::{QpCap, QpType, RecvSource};
    use crate::types::Sge;

    fn queue_pair(context: &Arc<Context>, cq: &Arc<Cq>) -> Arc<Qp> {
        let capacity = QpCap { max_recv_wr: 4, max_recv_sge: 2, max_send_wr: 1, ..QpCap::default() };
        let pd = Pd::new(context);
        let qp = Qp::new(&pd, cq, cq, capacity, true, QpType::Rc, RecvSource::Own).unwrap();
        let init = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
        qp.modify(&init, attr::STATE | attr::PORT | attr::PKEY_INDEX | attr::ACCESS_FLAGS).unwrap();
        qp
    }

    /// What a peer that writes whatever it likes would do.
    fn forge(cq: &Cq, cqe: Cqe) {
        cq.producer().push(cq.context.host.party(), cqe, false).unwrap();
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
    /// Wherever the numbers of completions are, and whatever an empty entry seems to say.
    #[test]
    fn sizes_change_where_numbers_wrap_around() {
        let context = Context::open().unwrap();
        let mut out = [Wc::default(); 4];
        for start in [0, u32::MAX - 9, u32::MAX - 2, u32::MAX - 1, u32::MAX] {
            let cq = Cq::timed(&context, 8, None).unwrap();
            let qp = queue_pair(&context, &cq);
            cq.consumer.lock().head = start;
            for word in [&cq.ring.head, &cq.ring.tail, &cq.ring.cached_head] {
                word.store(start, Ordering::Relaxed);
            }
            cq.consumer.lock().entries.start_at(start);
            let mut sequence = 0;
            for (size, count) in [(16, 1), (4, 4), (2, 0), (8, 2), (8, 3), (4, 1), (1, 1), (64, 4)] {
                cq.resize(size).unwrap();
                assert_eq!(cq.poll(&mut out), Ok(0), "nothing was added at {start}");
                let first = sequence;
                for _ in 0..count {
                    qp.post_recv(sequence.into(), &[]).unwrap();
                    forge(&cq, Cqe { qpn: qp.qpn(), sequence, ..Cqe::default() });
                    sequence += 1;
                }
                cq.resize(size + count).unwrap();
                assert_eq!(cq.poll(&mut out), Ok(count as usize), "from {start}, {size} entries");
                assert!(out.iter().zip(first..sequence).all(|(wc, n)| wc.wr_id == u64::from(n)));
            }
        }
    }

    #[test]
    fn a_completion_that_its_dead_producer_did_not_count_survives_a_change_of_size() {
        let context = Context::open().unwrap();
        let cq = Cq::new(&context, 8, None).unwrap();
        let qp = queue_pair(&context, &cq);
        for sequence in 0..2 {
            qp.post_recv(sequence.into(), &[]).unwrap();
            forge(&cq, Cqe { qpn: qp.qpn(), sequence, ..Cqe::default() });
            cq.ring.tail.store(sequence, Ordering::Relaxed);
            cq.resize(16 << sequence).unwrap();
        }
        let mut out = [Wc::default(); 4];
        assert_eq!(cq.poll(&mut out), Ok(2));
        assert_eq!((out[0].wr_id, out[1].wr_id), (0, 1));
    }

    #[test]
    fn entries_outside_the_arena_are_not_believed() {
        let context = Context::open().unwrap();
        let cq = Cq::new(&context, 8, None).unwrap();
        let (entries, mask) = (&cq.ring.entries, &cq.ring.mask);
        let producer = cq.producer();
        let push = || producer.push(cq.context.host.party(), Cqe::default(), false);
        assert_eq!(push(), Ok(false));
        let honest = (entries.load(Ordering::Relaxed), mask.load(Ordering::Relaxed));
        let end = (ARENA_LEN / OFFSET_UNIT) as u32;
        for (place, size) in
            [(u32::MAX, 7), (end, 0), (end - 1, 7), (0, u32::MAX), (0, 6), (0, MAX_CQE * 2 - 1)]
        {
            entries.store(place, Ordering::Relaxed);
            mask.store(size, Ordering::Relaxed);
            cq.ring.generation.fetch_add(1, Ordering::Relaxed);
            assert_eq!(push(), Err(millstream_lockfree::cq_ring::PushError::Locked), "{place} {size}");
        }
        entries.store(honest.0, Ordering::Relaxed);
        mask.store(honest.1, Ordering::Relaxed);
        assert_eq!(push(), Ok(false));
    }
}
