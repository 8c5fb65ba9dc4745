//! Ownership of the retries of pending requests: an application that polls, or the progress thread.
//!
//! A polling application retries at once and at no cost. The thread would take the core and the send queue's
//! lock from the application. So the thread does not retry while the application polls, and detects that
//! without the lock.

use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

/// Decides who retries the pending requests of one send queue.
#[derive(Debug, Default)]
pub struct RetryOwner {
    /// Requests may be pending. Set under the send queue's lock before the thread is notified.
    pending: AtomicBool,
    /// The thread will check again without a notification.
    with_thread: AtomicBool,
    /// Number of checks by a poller, and the number that the thread saw last.
    polls: AtomicU32,
    seen_polls: AtomicU32,
}

/// Result of the thread's check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryCheck {
    /// Nothing is pending. The thread will be notified of the next pending request.
    Idle,
    /// Requests are pending and an application polls.
    Polled,
    /// Requests are pending and no application polls.
    Unattended,
}

impl RetryOwner {
    /// Marks requests as pending; true if the caller must notify the thread. The caller holds the send queue's lock.
    #[must_use]
    pub fn set_pending(&self) -> bool {
        self.pending.store(true, Ordering::Release);
        // Either this side sees that the thread has left, or the thread sees the pending request before it leaves.
        fence(Ordering::SeqCst);
        self.give_to_thread()
    }

    /// True if the thread was not responsible before this call.
    fn give_to_thread(&self) -> bool {
        self.with_thread.compare_exchange(false, true, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Marks the queue as without pending requests. The caller holds the send queue's lock.
    pub fn clear_pending(&self) {
        self.pending.store(false, Ordering::Release);
    }

    /// Counts a check by a poller.
    pub fn count_poll(&self) {
        self.polls.fetch_add(1, Ordering::Relaxed);
    }

    /// The thread's check.
    #[must_use]
    pub fn check(&self) -> RetryCheck {
        if !self.pending.load(Ordering::Acquire) {
            self.with_thread.store(false, Ordering::Release);
            fence(Ordering::SeqCst);
            // A request that became pending in between caused no notification if it still saw the thread responsible.
            let missed = self.pending.load(Ordering::Acquire) && self.give_to_thread();
            return if missed { RetryCheck::Unattended } else { RetryCheck::Idle };
        }
        let polls = self.polls.load(Ordering::Relaxed);
        let before = self.seen_polls.swap(polls, Ordering::Relaxed);
        if polls == before { RetryCheck::Unattended } else { RetryCheck::Polled }
    }
}
