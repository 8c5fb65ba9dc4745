//! Completion queues, their channels and event moderation (IBTA volume 1, 11.4.2).
//!
//! A queue has two halves. Completions of this process's own send requests go into a private ring.
//! Completions that peers produce (receives) go into a ring in the arena, under a lock that
//! survives the exit of its holder. The last store publishes an entry, so that it is never seen half-written.

mod channel;
mod moderation;
mod packet_polling;
mod poller;

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

use crate::adapter::LocalAdapter;
use crate::caps::MAX_CQE;
use crate::channel_table::TIMER_CHANNEL;
use crate::context::Context;
use crate::errno::{Errno, Result};
use crate::event::{EVENT_CQ_ERR, ObjectHandle};
use crate::layout::ARENA_LEN;
use crate::recv_queue::Received;
use crate::tasks::PendingRequests;
use crate::types::{WC_GENERAL_ERR, WC_OP_RECV, WC_SUCCESS, Wc};
use crate::xrc_srq_table;

pub use channel::Channel;
use moderation::Moderation;
pub(crate) use packet_polling::PacketPolling;
pub use poller::{CqPoller, PolledWc};

/// Bit of [`Cq::poller_work`]: send requests are pending.
const PENDING: u32 = 1;
/// Bit of [`Cq::poller_work`]: queue pairs receive packets.
const NETWORK: u32 = 2;

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    pub(crate) context: Arc<Context>,
    channel: Option<Arc<Channel>>,
    /// Number of entries, readable without the consumer's lock.
    capacity: AtomicU32,
    /// The block of the shared half's header.
    block: ArenaBlock,
    pub(crate) ring: &'static CqRing,
    /// Whether a timestamp of each completion is kept.
    timestamps: bool,
    /// Guards both halves' consumer side and the private half.
    consumer: BiasedLock<Consumer>,
    moderation: Mutex<Moderation>,
    /// Queue pairs with pending requests that complete here.
    pending: SpinLock<Vec<Weak<dyn PendingRequests>>>,
    /// Work for a poller of an empty queue: [`PENDING`], [`NETWORK`].
    poller_work: AtomicU32,
    /// Queue pairs that complete here and whose packets a poller receives.
    network_qps: AtomicU32,
    overrun: AtomicBool,
    /// Queue pairs that use this queue.
    users: AtomicU32,
    events: Mutex<Events>,
    acknowledged: Condvar,
    handle: Arc<ObjectHandle>,
}

#[derive(Debug, Default)]
struct Events {
    delivered: u32,
    acknowledged: u32,
}

#[derive(Debug)]
pub(crate) struct Consumer {
    own: VecDeque<OwnCompletion>,
    /// The timestamps of our own completions, if they are kept.
    own_timestamps: VecDeque<Timestamp>,
    /// The shared half.
    entries: CqEntries,
    /// The block of these entries.
    block: ArenaBlock,
    /// Completions of peers ever consumed. The shared copy is for peers.
    head: u32,
    /// The timestamp of the last completion that was polled, if timestamps are kept.
    timestamp: Timestamp,
}

/// A completion of one of our own send requests.
#[derive(Clone, Copy, Debug)]
struct OwnCompletion {
    wc: Wc,
    /// Send requests of the queue pair that are reclaimed with this completion, ever.
    posted: u32,
}

impl Cq {
    /// Makes a queue of at least `entries` entries.
    ///
    /// # Errors
    /// EINVAL for zero or more entries than the device offers, ENOMEM when the arena is full.
    pub fn new(context: &Arc<Context>, entries: u32, channel: Option<Arc<Channel>>) -> Result<Arc<Self>> {
        Self::with_options(context, entries, channel, false)
    }

    /// Makes a queue of at least `entries` entries that keeps a timestamp of each completion.
    ///
    /// # Errors
    /// As [`Cq::new`].
    pub fn with_timestamps(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<Arc<Channel>>,
    ) -> Result<Arc<Self>> {
        Self::with_options(context, entries, channel, true)
    }

    fn with_options(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<Arc<Channel>>,
        timestamps: bool,
    ) -> Result<Arc<Self>> {
        let adapter = context.adapter;
        adapter.port.flush_acks();
        let (memory, entries) = allocate(adapter, entries, timestamps)?;
        let header = adapter.arena.alloc(size_of::<CqRing>());
        let block = header.ok_or(Errno::NOMEM).inspect_err(|_| adapter.arena.release(memory))?;
        let ring: &'static CqRing = adapter.arena.get(block.offset);
        // Zero already, unless a peer has written to free memory.
        let counts = [&ring.tail, &ring.cached_head, &ring.events, &ring.pending, &ring.head];
        let states = [&ring.armed, &ring.overrun, &ring.generation, &ring.moderation];
        for word in counts.into_iter().chain(states) {
            word.store(0, Ordering::Relaxed);
        }
        ring.lock.reset();
        ring.entries.store((memory.offset / OFFSET_UNIT) as u32, Ordering::Relaxed);
        ring.mask.store(entries.capacity() - 1, Ordering::Relaxed);
        ring.timestamps.store(u32::from(timestamps), Ordering::Relaxed);
        ring.timer.store(TIMER_CHANNEL, Ordering::Relaxed);
        ring.channel.store(channel.as_ref().map_or(0, |c| c.id), Ordering::Release);
        let reserved = entries.capacity().min(4096) as usize;
        let consumer = Consumer {
            own: VecDeque::with_capacity(reserved),
            own_timestamps: VecDeque::with_capacity(if timestamps { reserved } else { 0 }),
            entries,
            block: memory,
            head: 0,
            timestamp: Timestamp::default(),
        };
        let cq = Arc::new(Self {
            context: context.clone(),
            channel: channel.clone(),
            capacity: AtomicU32::new(entries.capacity()),
            block,
            ring,
            timestamps,
            consumer: BiasedLock::new(consumer),
            moderation: Mutex::default(),
            pending: SpinLock::new(Vec::new()),
            poller_work: AtomicU32::new(0),
            network_qps: AtomicU32::new(0),
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

    /// Number of entries, at least as many as requested.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Resizes the queue to at least `entries` entries. Pending completions stay, and peers may add
    /// others meanwhile.
    ///
    /// # Errors
    /// EINVAL for more entries than the device offers, or fewer than are pending; ENOMEM when the arena is full;
    /// EBUSY if a peer was stopped while it added a completion.
    pub fn resize(&self, entries: u32) -> Result<()> {
        let adapter = self.context.adapter;
        let (block, new) = allocate(adapter, entries, self.timestamps)?;
        let replaced = self.replace(block, new);
        // Producers now find the new entries.
        adapter.arena.release(*replaced.as_ref().unwrap_or(&block));
        replaced.map(drop)
    }

    /// Replaces the entries, and returns the block of the old ones.
    fn replace(&self, block: ArenaBlock, new: CqEntries) -> Result<ArenaBlock> {
        let mut consumer = self.consumer.lock();
        let guard = self.ring.lock.lock(self.context.adapter.owner_id()).ok_or(Errno::BUSY)?;
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
        drop(guard);
        consumer.entries = new;
        self.capacity.store(new.capacity(), Ordering::Relaxed);
        Ok(std::mem::replace(&mut consumer.block, block))
    }

    /// The channel given at creation.
    #[must_use]
    pub fn channel(&self) -> Option<&Arc<Channel>> {
        self.channel.as_ref()
    }

    /// The program's handle.
    #[must_use]
    pub fn handle(&self) -> &ObjectHandle {
        &self.handle
    }

    /// Destroys the queue. Waits until all fetched completion and asynchronous events are acknowledged.
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

    /// Offset of the shared half in the arena, in units of 64 bytes.
    pub(crate) fn arena_offset(&self) -> u32 {
        (self.block.offset / OFFSET_UNIT) as u32
    }

    /// Locks out pollers of two queues, in a fixed order. If both are the same queue, the second guard is None.
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

    /// Cancels the pending completions of a queue pair's receive requests, and calls `lost` with the
    /// [`Cqe::sequence`] of each.
    pub(crate) fn cancel_received(&self, consumer: &Consumer, qpn: u32, mut lost: impl FnMut(u32)) {
        self.cancel_matching(consumer, |cqe| {
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

    fn cancel_matching(&self, consumer: &Consumer, mut matches: impl FnMut(&Cqe) -> bool) {
        let mut at = consumer.head;
        for _ in 0..consumer.entries.capacity() {
            let Some(cqe) = consumer.entries.read(at) else { break };
            if matches(&cqe) {
                // A published entry belongs to the consumer until it is consumed.
                consumer.entries.slot(at).cancel();
            }
            at = at.wrapping_add(1);
        }
    }

    /// Polls up to `out.len()` completions.
    ///
    /// # Errors
    /// EIO after the queue has overrun and all completions that fit were polled.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize> {
        let n = self.take_completions(&mut self.consumer.lock(), out);
        if n != 0 || self.is_idle() { Ok(n) } else { self.poll_again(out) }
    }

    #[cold]
    fn poll_again(&self, out: &mut [Wc]) -> Result<usize> {
        self.work_for_poller(!out.is_empty())?;
        Ok(self.take_completions(&mut self.consumer.lock(), out))
    }

    /// Polls the next completion, with its timestamp if these are kept.
    ///
    /// # Errors
    /// As [`Cq::poll`].
    #[inline]
    pub fn poll_one(&self) -> Result<Option<(Wc, Timestamp)>> {
        let found = self.take_one();
        if found.is_some() || self.is_idle() {
            return Ok(found);
        }
        self.work_for_poller(true)?;
        Ok(self.take_one())
    }

    fn take_one(&self) -> Option<(Wc, Timestamp)> {
        let mut out = [Wc::default()];
        let mut consumer = self.consumer.lock();
        (self.take_completions(&mut consumer, &mut out) == 1).then_some((out[0], consumer.timestamp))
    }

    /// Whether nothing was lost and a poller of the empty queue has no work.
    #[inline]
    fn is_idle(&self) -> bool {
        !self.overrun.load(Ordering::Relaxed) && self.poller_work.load(Ordering::Relaxed) == 0
    }

    #[cold]
    fn work_for_poller(&self, reports_overrun: bool) -> Result<()> {
        if reports_overrun && self.overrun.load(Ordering::Relaxed) {
            return Err(Errno(libc::EIO));
        }
        self.progress();
        Ok(())
    }

    #[inline]
    fn take_completions(&self, consumer: &mut Consumer, out: &mut [Wc]) -> usize {
        let adapter = self.context.adapter;
        let mut n = 0;
        while n < out.len() {
            let Some(own) = consumer.own.pop_front() else { break };
            if self.timestamps {
                consumer.timestamp = consumer.own_timestamps.pop_front().unwrap_or_default();
            }
            if let Some(qp) = adapter.qps.sender_for_poller(own.wc.qp_num) {
                qp.reclaim(own.posted);
            }
            out[n] = own.wc;
            n += 1;
        }
        let mut head = consumer.head;
        let before = head;
        // A faulty peer can publish entries endlessly: one call polls at most one lap.
        while n < out.len() && head.wrapping_sub(before) < consumer.entries.capacity() {
            let Some(cqe) = consumer.entries.read(head) else { break };
            if self.timestamps {
                consumer.timestamp = consumer.entries.timestamp(head);
            }
            head = head.wrapping_add(1);
            let receive = match adapter.qps.receiver_for_poller(cqe.qpn, self.arena_offset()) {
                Some(qp) => qp.complete_receive(cqe.sequence),
                None => self.complete_for_domain(cqe.sequence),
            };
            // Completions of destroyed queue pairs, or without a matching request, are dropped.
            if let Some(receive) = receive {
                // Only values that are possible are passed on: programs rely on that.
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

    /// Completes a receive request of an XRC shared receive queue. The queue pair may be another process's.
    #[cold]
    fn complete_for_domain(&self, sequence: u32) -> Option<Received> {
        let srqs = &self.context.adapter.xrc_srqs;
        srqs.for_poller(sequence, self.arena_offset())?.complete(xrc_srq_table::slot(sequence))
    }

    /// Cancels the pending completions of an XRC shared receive queue, and runs `work` while pollers are locked out.
    pub(crate) fn cancel_xrc_srq(&self, number: u32, work: impl FnOnce()) {
        let consumer = self.consumer.lock();
        self.cancel_matching(&consumer, |cqe| {
            xrc_srq_table::is_of(cqe.sequence, number) && self.is_foreign(cqe.qpn)
        });
        work();
    }

    /// Whether no queue pair of this process with this number completes here.
    fn is_foreign(&self, qpn: u32) -> bool {
        self.context.adapter.qps.receiver_for_poller(qpn, self.arena_offset()).is_none()
    }

    /// Adds a completion of one of our own send requests.
    #[inline]
    pub(crate) fn push_own(
        self: &Arc<Self>,
        wc: Wc,
        posted: u32,
        solicited: bool,
    ) -> std::result::Result<(), CqOverrun> {
        let mut consumer = self.consumer.lock();
        if consumer.own.len() >= consumer.entries.capacity() as usize {
            drop(consumer);
            self.report_overrun();
            return Err(CqOverrun);
        }
        if consumer.own.is_empty() {
            // Restart at the beginning, so that an application that polls each completion at once uses the same cache lines.
            consumer.own.clear();
        }
        consumer.own.push_back(OwnCompletion { wc, posted });
        if self.timestamps {
            consumer.store_timestamp();
        }
        drop(consumer);
        if self.channel.is_some() {
            fence(Ordering::SeqCst);
            self.notify(solicited || wc.status != WC_SUCCESS);
        }
        Ok(())
    }

    /// Adds a completion to the shared half as its owner, for flushed receives. False if the queue is full.
    pub(crate) fn push_shared(self: &Arc<Self>, cqe: Cqe) -> bool {
        let producer = self.producer();
        match producer.push(self.context.adapter.owner_id(), cqe, true) {
            Ok(true) => self.signal(producer.channel()),
            Ok(false) => {}
            Err(_) => {
                self.report_overrun();
                return false;
            }
        }
        true
    }

    /// The shared half as a producer sees it.
    fn producer(&self) -> CqProducer<&CqRing> {
        // SAFETY: our own arena, which is never unmapped.
        unsafe {
            CqProducer::new(
                NonNull::slice_from_raw_parts(self.context.adapter.arena.at(0), ARENA_LEN),
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
            _ => self.context.adapter.tasks.wake(),
        }
    }

    /// Reports that a completion was lost because the queue was full (IBTA volume 1, 11.6.3.1).
    pub(crate) fn report_overrun(self: &Arc<Self>) {
        if !self.overrun.swap(true, Ordering::AcqRel) {
            self.context.raise(EVENT_CQ_ERR, &self.handle);
        }
    }

    pub(crate) fn has_overrun(&self) -> bool {
        self.overrun.load(Ordering::Acquire)
    }

    /// Reports an overrun that a peer caused.
    pub(crate) fn check_overrun(self: &Arc<Self>) {
        if self.ring.overrun.load(Ordering::Acquire) != 0 {
            self.report_overrun();
        }
    }

    /// Requests an event for the next completion, or for the next solicited one or error.
    pub fn arm(&self, solicited_only: bool) {
        let armed = if solicited_only { ARM_SOLICITED } else { ARM_ANY };
        if self.ring.moderation.load(Ordering::Relaxed) > 1 {
            self.begin_moderation();
        }
        // A request for any completion is not weakened by a later one for solicited ones.
        if !(solicited_only && self.ring.armed.load(Ordering::Relaxed) == ARM_ANY) {
            self.ring.armed.store(armed, Ordering::Relaxed);
        }
        // A producer publishes, then reads `armed`. The consumer stores `armed`, then polls once more.
        fence(Ordering::SeqCst);
        if self.network_qps.load(Ordering::Relaxed) != 0 {
            // An application that sleeps receives no packets.
            self.context.adapter.port.watch();
        }
    }

    /// Starts or stops to receive packets for a queue pair while this queue is polled.
    pub(crate) fn poll_network(&self, on: bool) {
        if on {
            self.network_qps.fetch_add(1, Ordering::SeqCst);
            self.poller_work.fetch_or(NETWORK, Ordering::SeqCst);
        } else {
            self.network_qps.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Takes back the events that were signalled and not fetched, and returns their number.
    pub(crate) fn cancel_events(&self) -> u32 {
        // Peers can write this word, too. Each entry causes at most one event.
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

    /// Adds a queue pair whose pending requests a poller retries.
    pub(crate) fn add_pending(&self, qp: Weak<dyn PendingRequests>) {
        self.pending.lock().push(qp);
        self.poller_work.fetch_or(PENDING, Ordering::Release);
    }

    /// Retries pending requests and receives packets, for an application that polls.
    #[cold]
    fn progress(&self) {
        let work = self.poller_work.load(Ordering::Acquire);
        if work & NETWORK != 0 {
            if self.network_qps.load(Ordering::Relaxed) != 0 {
                self.context.adapter.port.poll();
            } else {
                self.poller_work.fetch_and(!NETWORK, Ordering::SeqCst);
                // A queue pair that started meanwhile counted itself before it set the bit.
                if self.network_qps.load(Ordering::SeqCst) != 0 {
                    self.poller_work.fetch_or(NETWORK, Ordering::SeqCst);
                }
            }
        }
        if work & PENDING == 0 {
            return;
        }
        let pending = {
            let mut list = self.pending.lock();
            self.poller_work.fetch_and(!PENDING, Ordering::SeqCst);
            std::mem::take(&mut *list)
        };
        for qp in pending {
            if qp.upgrade().is_some_and(|qp| qp.retry_for_poller()) {
                self.add_pending(qp);
            }
        }
    }
}

impl Consumer {
    /// Stores the time now as that of our last own completion.
    #[cold]
    #[inline(never)]
    fn store_timestamp(&mut self) {
        self.own_timestamps.push_back(Timestamp::now());
    }

    /// Cancels the pending completions of a queue pair's send requests.
    pub(crate) fn cancel(&mut self, qpn: u32) {
        let mut timestamps = std::mem::take(&mut self.own_timestamps).into_iter();
        let mut kept = VecDeque::new();
        self.own.retain(|own| {
            let keep = own.wc.qp_num != qpn;
            kept.extend(timestamps.next().filter(|_| keep));
            keep
        });
        self.own_timestamps = kept;
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let arena = self.context.adapter.arena;
        arena.release(self.consumer.lock().block);
        arena.release(self.block);
    }
}

/// Allocates memory for at least this many completions.
fn allocate(adapter: &LocalAdapter, entries: u32, timestamps: bool) -> Result<(ArenaBlock, CqEntries)> {
    if entries == 0 || entries > MAX_CQE {
        return Err(Errno::INVAL);
    }
    let capacity = entries.next_power_of_two();
    let block = adapter.arena.alloc(entries_len(capacity as usize, timestamps)).ok_or(Errno::NOMEM)?;
    // SAFETY: of that length, aligned to a cache line; released after the queue's last use.
    let entries = unsafe { CqEntries::new(adapter.arena.at(block.offset), capacity, timestamps) };
    Ok((block, entries))
}

/// The queue was full: a completion is lost.
#[derive(Debug)]
pub(crate) struct CqOverrun;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pd::Pd;
    use crate::qp::Qp;
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

    /// Adds a completion as a malicious peer would.
    fn forge(cq: &Cq, cqe: Cqe) {
        cq.producer().push(cq.context.adapter.owner_id(), cqe, false).unwrap();
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
    fn completions_carry_no_impossible_values() {
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

    /// At every position of the 32-bit counters, and with any phase in empty slots.
    #[test]
    fn resizing_works_where_counters_wrap_around() {
        let context = Context::open().unwrap();
        let mut out = [Wc::default(); 4];
        for start in [0, u32::MAX - 9, u32::MAX - 2, u32::MAX - 1, u32::MAX] {
            let cq = Cq::with_timestamps(&context, 8, None).unwrap();
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
    fn an_uncounted_completion_of_an_exited_producer_survives_resizing() {
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
    fn entries_outside_the_arena_are_rejected() {
        let context = Context::open().unwrap();
        let cq = Cq::new(&context, 8, None).unwrap();
        let (entries, mask) = (&cq.ring.entries, &cq.ring.mask);
        let producer = cq.producer();
        let push = || producer.push(cq.context.adapter.owner_id(), Cqe::default(), false);
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
