//! The limit of a shared receive queue: one event when fewer requests than the limit are left (IBTA volume 1, 10.2.9.3).
//!
//! An initiator takes a request, then reads the limit. The owner stores a limit, then counts the requests that are left.
//! Between the two steps of each side lies a fence. It is asymmetric, because an initiator runs on every request
//! ([`barrier`]). So at least one of the two sides sees that the limit is reached. The one that clears the limit reports
//! it.

use crate::barrier;
use crate::sync::atomic::{AtomicU32, Ordering};

/// The limit; zero for none.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct SrqLimitWord(AtomicU32);

impl SrqLimitWord {
    /// The limit.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Removes the limit of a queue that no initiator uses yet.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Stores a limit, for the owner. True if fewer requests than that are left, and the caller must report it.
    #[must_use]
    pub fn set(&self, limit: u32, left: impl FnOnce() -> u32) -> bool {
        self.0.store(limit, Ordering::SeqCst);
        barrier::heavy();
        self.claim(limit, left)
    }

    /// Checks the limit, for an initiator that has just taken a request, or for the owner on behalf of one that exited.
    /// True if it is reached, and the caller must report it. `asymmetric`: owner and initiator registered.
    #[inline]
    #[must_use]
    pub fn is_reached(&self, left: impl FnOnce() -> u32, asymmetric: bool) -> bool {
        barrier::light(asymmetric);
        self.claim(self.0.load(Ordering::Relaxed), left)
    }

    #[inline]
    fn claim(&self, limit: u32, left: impl FnOnce() -> u32) -> bool {
        limit != 0 && left() < limit && self.0.swap(0, Ordering::AcqRel) != 0
    }
}
