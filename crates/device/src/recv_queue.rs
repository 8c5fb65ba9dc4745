//! Receive queues: requests in the arena that the peer consumes; their work request ids are kept privately.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use millstream_lockfree::{BiasedLock, SpinGuard, prefetch};

use crate::layout::{QpEntry, RecvSlot};
use crate::types::{Sge, recv_capacity};

/// The owner's private record of a receive request, which peers cannot access.
#[derive(Debug, Default)]
pub(crate) struct RecvWqe {
    wr_id: AtomicU64,
    room: AtomicU32,
}

/// A receive request that was completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// The application's id of the request.
    pub(crate) wr_id: u64,
    /// Bytes of its elements.
    pub(crate) room: u32,
}

impl RecvWqe {
    #[inline]
    pub(crate) fn write(&self, wr_id: u64, sges: &[Sge]) {
        self.wr_id.store(wr_id, Ordering::Relaxed);
        self.room.store(recv_capacity(sges), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn read(&self) -> Received {
        Received { wr_id: self.wr_id.load(Ordering::Relaxed), room: self.room.load(Ordering::Relaxed) }
    }
}

/// A queue pair's own receive queue.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    slots: NonNull<u8>,
    slot_len: usize,
    mask: u32,
    /// Most requests that can be outstanding.
    depth: u32,
    /// Held by the thread that posts.
    poster: BiasedLock<()>,
    /// Requests ever posted.
    tail: AtomicU32,
    /// Requests ever completed to the application.
    done: AtomicU32,
    wqes: Box<[RecvWqe]>,
}

// SAFETY: the slots lie in the arena, are written under the lock and read by the peer.
unsafe impl Send for RecvQueue {}
// SAFETY: as above.
unsafe impl Sync for RecvQueue {}

/// The posting side, locked.
pub(crate) struct RecvPoster<'a> {
    queue: &'a RecvQueue,
    _guard: SpinGuard<'a, ()>,
}

impl RecvPoster<'_> {
    /// Requests ever completed to the application.
    #[inline]
    pub(crate) fn done(&self) -> u32 {
        self.queue.done.load(Ordering::Acquire)
    }

    /// Requests ever posted.
    #[inline]
    pub(crate) fn tail(&self) -> u32 {
        self.queue.tail.load(Ordering::Acquire)
    }

    /// Writes request number `at`, which the peer does not see before [`publish`](Self::publish).
    ///
    /// # Safety
    /// Slot `at` is free, and has room for the elements.
    #[inline]
    pub(crate) unsafe fn write(&self, at: u32, wr_id: u64, sges: &[Sge]) {
        // SAFETY: the lock is held; the rest is the caller's promise.
        unsafe { self.queue.write(at, sges) };
        self.queue.wqes[(at & self.queue.mask) as usize].write(wr_id, sges);
    }

    /// Counts the requests up to `tail` as posted, and lets the peer see them.
    #[inline]
    pub(crate) fn publish(&self, entry: &QpEntry, tail: u32) {
        self.queue.tail.store(tail, Ordering::Release);
        entry.rq_tail.store(tail, Ordering::Release);
    }

    /// Empties the queue. Completions that are still to be polled match no request.
    pub(crate) fn clear(&self, entry: &QpEntry) {
        let tail = self.queue.tail.load(Ordering::Relaxed);
        self.queue.done.store(tail, Ordering::Relaxed);
        entry.rq_seen_tail.store(tail, Ordering::Relaxed);
        entry.rq_head.store(tail, Ordering::Release);
    }
}

impl RecvQueue {
    /// A queue of `count` slots, a power of two, for `depth` requests.
    pub(crate) fn new(slots: NonNull<u8>, count: u32, slot_len: usize, depth: u32) -> Self {
        Self {
            depth,
            slots,
            slot_len,
            mask: count - 1,
            poster: BiasedLock::new(()),
            tail: AtomicU32::new(0),
            done: AtomicU32::new(0),
            wqes: (0..count).map(|_| RecvWqe::default()).collect(),
        }
    }

    /// Locks the posting side.
    #[inline]
    pub(crate) fn lock(&self) -> RecvPoster<'_> {
        RecvPoster { queue: self, _guard: self.poster.lock() }
    }

    /// Completes the oldest request if it has this sequence number. Any other completion is a peer's error or a
    /// duplicate, and is not delivered.
    #[inline]
    pub(crate) fn complete(&self, sequence: u32) -> Option<Received> {
        let done = self.done.load(Ordering::Relaxed);
        if sequence != done || done == self.tail.load(Ordering::Acquire) {
            return None;
        }
        let received = self.wqes[(done & self.mask) as usize].read();
        self.done.store(done.wrapping_add(1), Ordering::Release);
        // The slot of the request that replaces this one.
        prefetch::for_store(self.slot(done.wrapping_add(self.depth)));
        Some(received)
    }

    #[inline]
    fn slot(&self, at: u32) -> *mut u8 {
        self.slots.as_ptr().wrapping_add((at & self.mask) as usize * self.slot_len)
    }

    /// # Safety
    /// The caller holds the poster's lock, the slot is free, and it has room for the elements.
    #[inline]
    unsafe fn write(&self, at: u32, sges: &[Sge]) {
        // SAFETY: the index is masked to slots that exist, and the slot has room for the elements.
        unsafe {
            let slot = self.slot(at);
            let elements = slot.add(size_of::<RecvSlot>()).cast::<Sge>();
            match sges {
                [one] => elements.write(*one),
                _ => elements.copy_from_nonoverlapping(sges.as_ptr(), sges.len()),
            }
            (*slot.cast::<RecvSlot>()).n_sge.store(sges.len() as u32, Ordering::Relaxed);
        }
    }
}
