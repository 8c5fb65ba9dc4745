//! Completion queues, their channels and event moderation (IBTA volume 1, 11.4.2).
//!
//! A queue has two halves. Completions of this process's own send requests go into a private ring.
//! Completions that peers produce (receives) go into a ring in the arena, under a lock that
//! survives the exit of its holder. The last store publishes an entry, so that it is never seen half-written.

mod channel;
mod consumer;
mod events;
mod moderation;
mod poller;
mod poller_work;
mod producer;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};

use millstream_lockfree::cq_ring::{CqEntries, CqRing, OFFSET_UNIT, entries_len};
use millstream_lockfree::{BiasedLock, SpinGuard, SpinLock, Timestamp};
use millstream_shm::ArenaBlock;

use crate::adapter::LocalAdapter;
use crate::caps::MAX_CQE;
use crate::channel_table::TIMER_CHANNEL;
use crate::context::Context;
use crate::errno::{Errno, Result};
use crate::event::ObjectHandle;
use crate::tasks::PendingRequests;

pub use channel::Channel;
pub(crate) use consumer::Consumer;
use events::EventCounts;
use moderation::Moderation;
pub use poller::{CqPoller, PolledWc};
pub(crate) use poller_work::PacketPolling;

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
    /// Work for a poller of an empty queue, see [`poller_work`].
    poller_work: AtomicU32,
    /// Queue pairs that complete here and whose packets a poller receives.
    network_qps: AtomicU32,
    overrun: AtomicBool,
    /// Queue pairs that use this queue.
    users: AtomicU32,
    /// Times that the queue was armed while it was not, since creation. Each is followed by one event.
    requested: AtomicU32,
    events: Mutex<EventCounts>,
    acknowledged: Condvar,
    handle: Arc<ObjectHandle>,
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
        let counts = [
            &ring.tail,
            &ring.cached_head,
            &ring.events,
            &ring.pending,
            &ring.head,
            &ring.notified,
            &ring.notified_own,
        ];
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
            own_produced: 0,
            own_timestamps: VecDeque::with_capacity(if timestamps { reserved } else { 0 }),
            turn: None,
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
            requested: AtomicU32::new(0),
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

    /// Frees the producers' lock if its holder is gone.
    pub(crate) fn recover_lock(&self) {
        self.ring.lock.recover();
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
