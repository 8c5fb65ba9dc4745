//! The shared half of a completion queue: a ring that peers fill, in memory of the queue's owner.
//!
//! The header ([`CqRing`]) never moves. The entries move when the queue is resized. A producer holds the
//! header's lock while it reads the position of the entries.

use std::cell::Cell;
use std::ops::Deref;
use std::ptr::NonNull;

use crate::cqe::{Cqe, CqeSlot};
use crate::prefetch;
use crate::shared::Shared;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::{Acquired, BiasedRobustLock, OwnerId, Timestamp};

/// Most entries of a ring.
pub const MAX_ENTRIES: u32 = 1 << 22;

/// [`CqRing::armed`]: the consumer waits for no event.
pub const ARM_NONE: u32 = 0;
/// [`CqRing::armed`]: the next completion causes an event.
pub const ARM_ANY: u32 = 1;
/// [`CqRing::armed`]: the next solicited completion or error causes an event.
pub const ARM_SOLICITED: u32 = 2;

/// Unit of [`CqRing::entries`], bytes.
pub const OFFSET_UNIT: usize = 64;

/// The header of a completion queue's shared half.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct CqRing {
    // Producers, under the lock.
    /// Held by the producer that adds completions.
    pub lock: BiasedRobustLock,
    /// Completions ever produced.
    pub tail: AtomicU32,
    /// The value of `head` that a producer saw last. Producers read the consumer's cache line only when the
    /// queue seems full.
    pub cached_head: AtomicU32,
    /// The event that the consumer requested: [`ARM_NONE`], [`ARM_ANY`] or [`ARM_SOLICITED`].
    pub armed: AtomicU32,
    /// Events signalled and not yet fetched.
    pub events: AtomicU32,
    /// Completions without an event since the queue was armed, if events are moderated.
    pub pending: AtomicU32,
    /// Set by a producer that found the queue full.
    pub overrun: AtomicU32,
    // Owner.
    /// Rises, under the lock, whenever the entries have moved.
    pub generation: AtomicU32,
    /// The completion channel, zero for none.
    pub channel: AtomicU32,
    // Consumer.
    /// Completions ever consumed.
    pub head: AtomicU32,
    _pad0: [u32; 15],
    // Owner, under the lock; read after a change of generation.
    /// Offset of the entries in the owner's memory, in units of [`OFFSET_UNIT`].
    pub entries: AtomicU32,
    /// Entries less one; a power of two less one.
    pub mask: AtomicU32,
    /// Nonzero if a timestamp of each completion is kept, behind the entries.
    pub timestamps: AtomicU32,
    // Owner; read when an event is due.
    /// Completions per event; events are not moderated if this is below two.
    pub moderation: AtomicU32,
    /// The channel to signal for the first completion of a moderated event.
    pub timer: AtomicU32,
    // Who signals an event, before it counts the event.
    /// Completions ever produced, up to the one that caused the last event.
    pub notified: AtomicU32,
    /// The owner's completions of its send requests ever, up to the one that caused the last event.
    pub notified_own: AtomicU32,
    _pad1: [u32; 9],
}

// SAFETY: atomics and padding.
unsafe impl Shared for CqRing {}

// The model checker's atomics are larger.
#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<CqRing>() == 192);
    assert!(std::mem::offset_of!(CqRing, head) == 64);
};

/// Bytes of a ring's entries, with their timestamps if these are kept.
#[must_use]
pub const fn entries_len(entries: usize, timestamps: bool) -> usize {
    entries * (size_of::<CqeSlot>() + if timestamps { size_of::<AtomicU64>() } else { 0 })
}

/// The entries of a ring, and the timestamps of their completions if these are kept.
#[derive(Clone, Copy, Debug)]
pub struct CqEntries {
    base: NonNull<CqeSlot>,
    mask: u32,
    timestamps: bool,
}

// SAFETY: points into shared memory, where everything is accessed by atomics or raw copies.
unsafe impl Send for CqEntries {}

impl CqEntries {
    /// The entries at `offset` of `memory`, if they lie inside.
    fn check(memory: NonNull<[u8]>, offset: usize, mask: u32, timestamps: bool) -> Option<Self> {
        let count = mask.checked_add(1).filter(|n| n.is_power_of_two() && *n <= MAX_ENTRIES)?;
        let room = memory.len().checked_sub(offset)?;
        let fits = room >= entries_len(count as usize, timestamps);
        // SAFETY: inside the memory, as just checked.
        fits.then(|| Self { base: unsafe { memory.cast::<u8>().add(offset) }.cast(), mask, timestamps })
    }

    /// `capacity` entries in a block of the caller's.
    ///
    /// # Safety
    /// The block has room for [`entries_len`] bytes, is aligned to a slot, and outlives the result.
    pub unsafe fn new(block: NonNull<u8>, capacity: u32, timestamps: bool) -> Self {
        Self { base: block.cast(), mask: capacity - 1, timestamps }
    }

    /// Number of entries.
    #[inline]
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.mask + 1
    }

    /// The slot of completion number `at`.
    #[inline]
    #[must_use]
    pub fn slot(&self, at: u32) -> &CqeSlot {
        // SAFETY: masked to entries that exist, and which are made of atomics.
        unsafe { self.base.add((at & self.mask) as usize).as_ref() }
    }

    /// The timestamp of completion number `at`.
    #[inline]
    fn timestamp_slot(&self, at: u32) -> &AtomicU64 {
        // SAFETY: the timestamps follow the entries.
        unsafe {
            let timestamps = self.base.add(self.mask as usize + 1).cast::<AtomicU64>();
            timestamps.add((at & self.mask) as usize).as_ref()
        }
    }

    /// Completion number `at`, if it is published. The copy may be garbage if a peer breaks the protocol.
    #[inline]
    #[must_use]
    pub fn read(&self, at: u32) -> Option<Cqe> {
        self.slot(at).read(at.wrapping_add(1))
    }

    /// Whether completion number `at` is published.
    #[inline]
    #[must_use]
    pub fn is_published(&self, at: u32) -> bool {
        self.slot(at).phase() == at.wrapping_add(1)
    }

    /// The time at which completion number `at` was added; zero if timestamps are not kept.
    #[inline]
    #[must_use]
    pub fn timestamp(&self, at: u32) -> Timestamp {
        if self.timestamps {
            Timestamp(self.timestamp_slot(at).load(Ordering::Relaxed))
        } else {
            Timestamp::default()
        }
    }

    /// Stores the time now as that of completion number `at`, whose slot the caller owns.
    #[cold]
    #[inline(never)]
    fn store_timestamp(&self, at: u32) {
        self.timestamp_slot(at).store(Timestamp::now().0, Ordering::Relaxed);
    }

    /// Prepares fresh entries for completions from number `first` on. Fresh entries are zero, which is the
    /// phase of number 2^32 − 1. So the slot of that number gets another phase.
    pub fn start_at(&self, first: u32) {
        self.slot(u32::MAX).set_empty(first);
    }

    /// Copies the completions from `head` up to `tail`, which fit, to the fresh entries `new`. All other
    /// entries become unpublished.
    pub fn copy_to(&self, new: &Self, head: u32, tail: u32) {
        new.start_at(tail);
        let mut at = head;
        while at != tail {
            new.slot(at).copy_from(self.slot(at));
            if self.timestamps && new.timestamps {
                let time = self.timestamp_slot(at).load(Ordering::Relaxed);
                new.timestamp_slot(at).store(time, Ordering::Relaxed);
            }
            at = at.wrapping_add(1);
        }
    }
}

impl CqRing {
    /// The channel to signal for a new completion, zero for none. An event disarms the queue; `note` then stores the
    /// completion's position in [`notified`](Self::notified) or [`notified_own`](Self::notified_own).
    #[inline]
    pub fn channel_to_signal(&self, solicited: bool, note: impl FnOnce(&Self)) -> u32 {
        let armed = self.armed.load(Ordering::Relaxed);
        if armed == ARM_NONE || (armed == ARM_SOLICITED && !solicited) {
            return 0;
        }
        let count = self.moderation.load(Ordering::Relaxed);
        if count > 1 { self.moderated_channel(count) } else { self.event_channel(note) }
    }

    /// The channel to signal where one event stands for `count` completions.
    #[cold]
    #[inline(never)]
    fn moderated_channel(&self, count: u32) -> u32 {
        let pending = self.pending.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        match pending {
            _ if pending >= count => self.event_channel(|_| ()),
            // The moderation period starts with the first completion.
            1 => self.timer.load(Ordering::Relaxed),
            _ => 0,
        }
    }

    #[inline]
    fn event_channel(&self, note: impl FnOnce(&Self)) -> u32 {
        if self.disarm(note) { self.channel.load(Ordering::Relaxed) } else { 0 }
    }

    /// Disarms the queue, calls `note` and counts an event; true if it was armed, and the channel must be signalled.
    #[inline]
    pub fn disarm(&self, note: impl FnOnce(&Self)) -> bool {
        if self.armed.swap(ARM_NONE, Ordering::AcqRel) == ARM_NONE {
            return false;
        }
        note(self);
        self.events.fetch_add(1, Ordering::AcqRel);
        true
    }
}

/// A producer's view of a ring. `R` is a reference to the header that keeps the memory mapped.
#[derive(Debug)]
pub struct CqProducer<R> {
    ring: R,
    /// The owner's memory that the entries lie in.
    memory: NonNull<[u8]>,
    /// The entries as looked up last, and the header's generation then.
    base: Cell<Option<NonNull<CqeSlot>>>,
    mask: Cell<u32>,
    timestamps: Cell<bool>,
    generation: Cell<u32>,
    /// The channel to signal for the last completion that needed an event.
    signal: Cell<u32>,
}

// SAFETY: points into shared memory that `R` keeps mapped, where everything is accessed by atomics or raw copies.
unsafe impl<R: Send> Send for CqProducer<R> {}

/// The error of adding a completion to a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushError {
    /// The queue is full.
    Full,
    /// Another producer was stopped while it held the lock, or the lock word is forged.
    Locked,
}

impl<R: Deref<Target = CqRing>> CqProducer<R> {
    /// A producer of the ring whose owner has `memory`.
    ///
    /// # Safety
    /// `memory` is valid for as long as `ring` lives, and aligned to a [`CqeSlot`].
    pub unsafe fn new(memory: NonNull<[u8]>, ring: R) -> Self {
        Self {
            ring,
            memory,
            base: Cell::new(None),
            mask: Cell::new(0),
            timestamps: Cell::new(false),
            generation: Cell::new(0),
            signal: Cell::new(0),
        }
    }

    /// The channel to signal after [`push`](Self::push) returned true.
    pub fn channel(&self) -> u32 {
        self.signal.get()
    }

    /// The entries; the caller holds the lock. The header's values are checked.
    #[inline(always)]
    fn entries(&self) -> Option<CqEntries> {
        let generation = self.ring.generation.load(Ordering::Relaxed);
        match self.base.get() {
            Some(base) if self.generation.get() == generation => {
                Some(CqEntries { base, mask: self.mask.get(), timestamps: self.timestamps.get() })
            }
            _ => self.look_up(generation),
        }
    }

    #[cold]
    #[inline(never)]
    fn look_up(&self, generation: u32) -> Option<CqEntries> {
        let offset = self.ring.entries.load(Ordering::Relaxed) as usize * OFFSET_UNIT;
        let timestamps = self.ring.timestamps.load(Ordering::Relaxed) != 0;
        let mask = self.ring.mask.load(Ordering::Relaxed);
        let entries = CqEntries::check(self.memory, offset, mask, timestamps)?;
        self.base.set(Some(entries.base));
        self.mask.set(entries.mask);
        self.timestamps.set(entries.timestamps);
        self.generation.set(generation);
        Some(entries)
    }

    /// Adds a completion; true if [`channel`](Self::channel) must be signalled.
    ///
    /// # Errors
    /// [`PushError`]; the completion is lost.
    #[inline(always)]
    pub fn push(&self, me: OwnerId, cqe: Cqe, solicited: bool) -> Result<bool, PushError> {
        self.push_all(me, 1, |_| cqe, solicited)
    }

    /// Adds `count` completions, all of them or none; true if [`channel`](Self::channel) must be signalled.
    ///
    /// # Errors
    /// [`PushError`]; no completion was added.
    #[inline(always)]
    pub fn push_all(
        &self,
        me: OwnerId,
        count: u32,
        cqe: impl Fn(u32) -> Cqe,
        solicited: bool,
    ) -> Result<bool, PushError> {
        let ring = &*self.ring;
        let Acquired { guard, same_owner } = ring.lock.lock(me).ok_or(PushError::Locked)?;
        let entries = self.entries().ok_or(PushError::Locked)?;
        let mut tail = ring.tail.load(Ordering::Relaxed);
        // A producer may have exited after it published this entry and before it counted it. The check is skipped where
        // possible, because the consumer's core holds the line.
        if !same_owner && entries.slot(tail).phase() == tail.wrapping_add(1) {
            tail = tail.wrapping_add(1);
        }
        let fits = |head: u32| tail.wrapping_sub(head).saturating_add(count) <= entries.capacity();
        if !fits(ring.cached_head.load(Ordering::Relaxed)) {
            let head = ring.head.load(Ordering::Acquire);
            ring.cached_head.store(head, Ordering::Relaxed);
            if !fits(head) {
                // The queue has not overrun while it has room for some of them.
                if tail.wrapping_sub(head) > entries.mask {
                    ring.overrun.store(1, Ordering::Release);
                }
                return Err(PushError::Full);
            }
        }
        for turn in 0..count {
            if entries.timestamps {
                entries.store_timestamp(tail);
            }
            // The slot belongs to the holder of the lock until its phase is stored.
            entries.slot(tail).publish(Cqe { solicited, ..cqe(turn) }, tail.wrapping_add(1));
            prefetch::for_store(entries.slot(tail.wrapping_add(count.max(prefetch::DISTANCE))));
            tail = tail.wrapping_add(1);
            // Counted one by one: the next producer looks for at most one that is published and not counted.
            ring.tail.store(tail, Ordering::Release);
        }
        if ring.channel.load(Ordering::Relaxed) == 0 {
            drop(guard);
            return Ok(false);
        }
        guard.release_fenced();
        // The completion channel takes precedence over the moderation timer.
        let first = tail.wrapping_sub(count);
        let signals = (1..=count)
            .map(|nth| {
                ring.channel_to_signal(solicited, |ring| {
                    ring.notified.store(first.wrapping_add(nth), Ordering::Relaxed);
                })
            })
            .filter(|channel| *channel != 0);
        self.signal.set(signals.last().unwrap_or(0));
        Ok(self.signal.get() != 0)
    }
}
