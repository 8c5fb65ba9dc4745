//! The half of a completion queue that peers fill: a ring in the arena of the queue's owner.
//!
//! The header stays where it is for the life of the queue; the entries move when the queue is resized.
//! Whoever adds a completion holds the header's lease, and looks there which entries are the right ones.

use std::cell::Cell;
use std::ptr::NonNull;

use millstream_shm::sync::atomic::{AtomicU64, Ordering};
use millstream_shm::{Party, Taken, cache};

use crate::caps::MAX_CQE;
use crate::clock::Stamp;
use crate::cqe::{Cqe, Place};
use crate::layout::{ARENA_LEN, ARM_NONE, ARM_SOLICITED, CqRing, cq_entries_len};

/// The entries of a ring, and the times of their completions if they are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entries {
    base: NonNull<Place>,
    mask: u32,
    timed: bool,
}

// SAFETY: points into an arena, where everything is accessed by atomics or raw copies.
unsafe impl Send for Entries {}

impl Entries {
    /// The entries at `offset` of an arena, if they lie inside.
    fn check(arena: NonNull<u8>, offset: usize, mask: u32, timed: bool) -> Option<Self> {
        let count = mask.checked_add(1).filter(|n| n.is_power_of_two() && *n <= MAX_CQE)?;
        let fits = offset <= ARENA_LEN && ARENA_LEN - offset >= cq_entries_len(count as usize, timed);
        // SAFETY: inside the arena, as just checked.
        fits.then(|| Self { base: unsafe { arena.add(offset) }.cast(), mask, timed })
    }

    /// `capacity` entries in a block of our own.
    ///
    /// # Safety
    /// The block has room for them, and they are not used after it was released.
    pub(crate) unsafe fn of(block: NonNull<u8>, capacity: u32, timed: bool) -> Self {
        Self { base: block.cast(), mask: capacity - 1, timed }
    }

    #[inline]
    pub(crate) fn capacity(&self) -> u32 {
        self.mask + 1
    }

    /// Where the completion number `at` has its place.
    #[inline]
    pub(crate) fn place(&self, at: u32) -> &Place {
        // SAFETY: masked to entries that exist, and which are made of atomics.
        unsafe { self.base.add((at & self.mask) as usize).as_ref() }
    }

    /// Where its time is.
    #[inline]
    fn time(&self, at: u32) -> &AtomicU64 {
        // SAFETY: the times follow the entries.
        unsafe {
            let times = self.base.add(self.mask as usize + 1).cast::<AtomicU64>();
            times.add((at & self.mask) as usize).as_ref()
        }
    }

    /// The completion number `at`, if it is there. The copy may be garbage if a peer breaks the protocol.
    #[inline]
    pub(crate) fn read(&self, at: u32) -> Option<Cqe> {
        self.place(at).read(at.wrapping_add(1))
    }

    /// When it was added; zero if times are not kept.
    #[inline]
    pub(crate) fn read_time(&self, at: u32) -> Stamp {
        if self.timed { Stamp(self.time(at).load(Ordering::Relaxed)) } else { Stamp::default() }
    }

    /// Notes that it is added now. The place belongs to who adds it.
    #[cold]
    #[inline(never)]
    fn keep_time(&self, at: u32) {
        self.time(at).store(Stamp::now().0, Ordering::Relaxed);
    }

    /// Prepares fresh entries for completions from `first` on. Empty entries are zero, which is the stamp
    /// of one number only: its place gets another one.
    pub(crate) fn begin_at(&self, first: u32) {
        self.place(u32::MAX).clear(first);
    }

    /// Copies the completions from `head` up to `tail`, which fit, to fresh entries, and makes sure that
    /// those which are not there do not seem to be.
    pub(crate) fn move_to(&self, new: &Self, head: u32, tail: u32) {
        new.begin_at(tail);
        let mut at = head;
        while at != tail {
            new.place(at).copy(self.place(at));
            if self.timed && new.timed {
                new.time(at).store(self.time(at).load(Ordering::Relaxed), Ordering::Relaxed);
            }
            at = at.wrapping_add(1);
        }
    }
}

/// Whom a completion concerns: the number of the channel to signal, zero for none. A wish is used up by
/// the completion that fulfils it.
#[inline]
pub(crate) fn to_signal(ring: &CqRing, solicited: bool) -> u32 {
    let wish = ring.armed.load(Ordering::Relaxed);
    if wish == ARM_NONE || (wish == ARM_SOLICITED && !solicited) {
        return 0;
    }
    let enough = ring.moderation.load(Ordering::Relaxed);
    if enough > 1 { moderated(ring, enough) } else { fulfilled(ring) }
}

/// The same while events are for several completions.
#[cold]
#[inline(never)]
fn moderated(ring: &CqRing, enough: u32) -> u32 {
    let pending = ring.pending.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
    match pending {
        _ if pending >= enough => fulfilled(ring),
        // With the first one the time begins that the others have.
        1 => ring.timer.load(Ordering::Relaxed),
        _ => 0,
    }
}

#[inline]
fn fulfilled(ring: &CqRing) -> u32 {
    if fulfil(ring) { ring.channel.load(Ordering::Relaxed) } else { 0 }
}

/// Uses the wish up; true if it was there, and the channel must be signalled.
#[inline]
pub(crate) fn fulfil(ring: &CqRing) -> bool {
    if ring.armed.swap(ARM_NONE, Ordering::AcqRel) == ARM_NONE {
        return false;
    }
    ring.events.fetch_add(1, Ordering::AcqRel);
    true
}

/// A ring as those who add to it see it.
#[derive(Debug)]
pub(crate) struct RemoteCq {
    pub(crate) ring: &'static CqRing,
    arena: NonNull<u8>,
    /// The entries as they were last looked up, if they were, and the header's generation then.
    seen: Cell<Option<NonNull<Place>>>,
    seen_mask: Cell<u32>,
    seen_timed: Cell<bool>,
    seen_generation: Cell<u32>,
    /// The channel to signal for the last completion that asked for it.
    signal: Cell<u32>,
}

/// Why a completion could not be added to somebody's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotAdded {
    /// There was no room.
    Full,
    /// Another producer was stopped while it held the lease, or the word is forged.
    Locked,
}

impl RemoteCq {
    /// The ring in the arena that starts at `arena`.
    ///
    /// # Safety
    /// That is [`ARENA_LEN`] bytes, and outlives the result.
    pub(crate) unsafe fn new(arena: NonNull<u8>, ring: &'static CqRing) -> Self {
        Self {
            ring,
            arena,
            seen: Cell::new(None),
            seen_mask: Cell::new(0),
            seen_timed: Cell::new(false),
            seen_generation: Cell::new(0),
            signal: Cell::new(0),
        }
    }

    /// Whom to tell, after [`push`](Self::push) has said that somebody must be told.
    pub(crate) fn channel(&self) -> u32 {
        self.signal.get()
    }

    /// The entries, under the lease. What the header says is checked.
    #[inline(always)]
    fn entries(&self) -> Option<Entries> {
        let generation = self.ring.generation.load(Ordering::Relaxed);
        match self.seen.get() {
            Some(base) if self.seen_generation.get() == generation => {
                Some(Entries { base, mask: self.seen_mask.get(), timed: self.seen_timed.get() })
            }
            _ => self.look_up(generation),
        }
    }

    #[cold]
    #[inline(never)]
    fn look_up(&self, generation: u32) -> Option<Entries> {
        let offset = self.ring.entries.load(Ordering::Relaxed) as usize * 64;
        let timed = self.ring.timed.load(Ordering::Relaxed) != 0;
        let entries = Entries::check(self.arena, offset, self.ring.mask.load(Ordering::Relaxed), timed)?;
        self.seen.set(Some(entries.base));
        self.seen_mask.set(entries.mask);
        self.seen_timed.set(entries.timed);
        self.seen_generation.set(generation);
        Some(entries)
    }

    /// Adds a completion; true if somebody must be told.
    #[inline(always)]
    pub(crate) fn push(&self, me: Party, cqe: Cqe, solicited: bool) -> std::result::Result<bool, NotAdded> {
        self.push_all(me, 1, |_| cqe, solicited)
    }

    /// Adds `count` completions, all of them or none; true if somebody must be told.
    #[inline(always)]
    pub(crate) fn push_all(
        &self,
        me: Party,
        count: u32,
        cqe: impl Fn(u32) -> Cqe,
        solicited: bool,
    ) -> std::result::Result<bool, NotAdded> {
        let Taken { guard, again } = self.ring.lock.lock(me).ok_or(NotAdded::Locked)?;
        let ring = self.ring;
        let entries = self.entries().ok_or(NotAdded::Locked)?;
        let mut tail = ring.tail.load(Ordering::Relaxed);
        // A producer may have died between publishing this entry and counting it. (The consumer's core has the
        // line: to look there takes as long as all the rest.)
        if !again && entries.place(tail).stamp() == tail.wrapping_add(1) {
            tail = tail.wrapping_add(1);
        }
        let fits = |head: u32| tail.wrapping_sub(head).saturating_add(count) <= entries.capacity();
        if !fits(ring.seen_head.load(Ordering::Relaxed)) {
            let head = ring.head.load(Ordering::Acquire);
            ring.seen_head.store(head, Ordering::Relaxed);
            if !fits(head) {
                // Where there is room for some, the queue is not lost.
                if tail.wrapping_sub(head) > entries.mask {
                    ring.overrun.store(1, Ordering::Release);
                }
                return Err(NotAdded::Full);
            }
        }
        for turn in 0..count {
            if entries.timed {
                entries.keep_time(tail);
            }
            // The place belongs to the holder of the lease until it is stamped.
            entries.place(tail).publish(cqe(turn), tail.wrapping_add(1));
            cache::expect_store(entries.place(tail.wrapping_add(count.max(cache::AHEAD))));
            tail = tail.wrapping_add(1);
            // One at a time: of those that are not counted, who comes next looks for one.
            ring.tail.store(tail, Ordering::Release);
        }
        if ring.channel.load(Ordering::Relaxed) == 0 {
            drop(guard);
            return Ok(false);
        }
        guard.release_fenced();
        // A channel that is signalled makes up for the timer that was to be before it.
        let signals = (0..count).map(|_| to_signal(ring, solicited)).filter(|channel| *channel != 0);
        self.signal.set(signals.last().unwrap_or(0));
        Ok(self.signal.get() != 0)
    }
}
