//! Timers of many owners, and the next one of all, for a thread that sleeps until then.
//!
//! The thread goes to sleep by [`NextExpiry`] alone. Any thread may look at the deadlines and set it anew. A deadline that
//! is set meanwhile is not missed: either the one that looks sees it, or the one that sets it wakes the thread.

use crate::sync::atomic::{AtomicU64, Ordering, fence};

/// No time.
const NEVER: u64 = u64::MAX;

/// The deadline of one owner, nanoseconds.
#[derive(Debug)]
pub struct Deadline(AtomicU64);

impl Default for Deadline {
    fn default() -> Self {
        Self(AtomicU64::new(NEVER))
    }
}

impl Deadline {
    /// The deadline, if one is set.
    #[inline]
    #[must_use]
    pub fn get(&self) -> Option<u64> {
        some(self.0.load(Ordering::Relaxed))
    }

    /// Removes the deadline. [`NextExpiry`] may keep it: whoever looks at the deadlines then finds that none has expired.
    #[inline]
    pub fn clear(&self) {
        self.0.store(NEVER, Ordering::Relaxed);
    }

    /// Sets the deadline; true if the caller must wake the thread that sleeps until `next`.
    #[inline]
    #[must_use]
    pub fn set(&self, time: u64, next: &NextExpiry) -> bool {
        self.0.store(time, Ordering::Relaxed);
        next.include(time)
    }
}

/// The earliest of the deadlines, or an earlier time, nanoseconds.
#[derive(Debug)]
pub struct NextExpiry(AtomicU64);

impl Default for NextExpiry {
    fn default() -> Self {
        Self(AtomicU64::new(NEVER))
    }
}

impl NextExpiry {
    /// The time, if there is one.
    #[inline]
    #[must_use]
    pub fn get(&self) -> Option<u64> {
        some(self.0.load(Ordering::Relaxed))
    }

    /// Whether the time has come.
    #[inline]
    #[must_use]
    pub fn has_come(&self, now: u64) -> bool {
        self.0.load(Ordering::Relaxed) <= now
    }

    /// Begins a look at all deadlines, at the end of which [`include`](Self::include) takes the earliest one.
    pub fn begin(&self) {
        self.0.store(NEVER, Ordering::Relaxed);
        // With the fence in `include`: either this side sees a deadline that is set meanwhile, or its setter sees that the time
        // was removed.
        fence(Ordering::SeqCst);
    }

    /// Makes the time at most `time`; true if the caller must wake the thread.
    #[inline]
    #[must_use]
    pub fn include(&self, time: u64) -> bool {
        fence(Ordering::SeqCst);
        let earlier = time < self.0.load(Ordering::Relaxed);
        if earlier {
            self.0.fetch_min(time, Ordering::Relaxed);
        }
        earlier
    }
}

fn some(time: u64) -> Option<u64> {
    (time != NEVER).then_some(time)
}
