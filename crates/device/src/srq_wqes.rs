//! The owner's private records of a shared receive queue: which slots are posted, and their work request ids.

use std::sync::atomic::{AtomicU32, Ordering};

use millstream_lockfree::{SpinGuard, SpinLock};

use crate::recv_queue::{Received, RecvWqe};
use crate::types::Sge;

/// In [`SrqWqes::posted`]: the slot is free.
const NOT_POSTED: u32 = 0;

/// In [`SrqWqes::posted`]: the slot's request was the `at`th to be posted, modulo 2^16.
const fn posted_as(at: u16) -> u32 {
    1 << 16 | at as u32
}

/// In [`SrqWqes::posted`]: the owner took this request back. It still can complete.
const TAKEN_BACK: u32 = 2 << 16;

/// The slots of a shared receive queue.
#[derive(Debug)]
pub(crate) struct SrqWqes {
    poster: SpinLock<SrqPoster>,
    wqes: Box<[RecvWqe]>,
    /// The state of each slot: [`NOT_POSTED`], [`posted_as`] or [`TAKEN_BACK`].
    posted: Box<[AtomicU32]>,
}

/// The posting side.
#[derive(Debug)]
pub(crate) struct SrqPoster {
    /// Requests ever posted.
    pub(crate) tail: u32,
    pub(crate) free: Vec<u32>,
}

impl SrqWqes {
    /// `count` slots, a power of two, for `depth` requests.
    pub(crate) fn new(count: u32, depth: u32) -> Self {
        Self {
            poster: SpinLock::new(SrqPoster { tail: 0, free: (0..depth).rev().collect() }),
            wqes: (0..count).map(|_| RecvWqe::default()).collect(),
            posted: (0..count).map(|_| AtomicU32::new(NOT_POSTED)).collect(),
        }
    }

    /// Number of slots.
    pub(crate) fn count(&self) -> u32 {
        self.wqes.len() as u32
    }

    /// Locks the posting side.
    pub(crate) fn lock(&self) -> SpinGuard<'_, SrqPoster> {
        self.poster.lock()
    }

    /// Records the request in `slot`, which is the `at`th to be posted.
    pub(crate) fn record(&self, slot: u32, at: u32, wr_id: u64, sges: &[Sge]) {
        self.wqes[slot as usize].write(wr_id, sges);
        self.posted[slot as usize].store(posted_as(at as u16), Ordering::Release);
    }

    /// Completes the request in `slot`, once.
    #[inline]
    pub(crate) fn complete(&self, slot: u32) -> Option<Received> {
        if self.posted.get(slot as usize)?.swap(NOT_POSTED, Ordering::AcqRel) == NOT_POSTED {
            return None;
        }
        Some(self.free(slot))
    }

    /// Takes the request of `slot` back, once; false if it is no longer the one that was posted as `at`.
    pub(crate) fn take_back(&self, slot: u32, at: u16) -> bool {
        self.change(slot, posted_as(at), TAKEN_BACK)
    }

    /// Records a request that was taken back as the `at`th to be posted; false if it has completed.
    pub(crate) fn record_again(&self, slot: u32, at: u32) -> bool {
        self.change(slot, TAKEN_BACK, posted_as(at as u16))
    }

    fn change(&self, slot: u32, from: u32, to: u32) -> bool {
        let posted = &self.posted[slot as usize];
        posted.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn free(&self, slot: u32) -> Received {
        let received = self.wqes[slot as usize].read();
        self.poster.lock().free.push(slot);
        received
    }
}
