//! Who looks after parked requests: an application that polls, or the progress thread.
//!
//! A poller is there at once and costs nothing. The thread would take the processor from it, and the send
//! queue's lock from its owner; so it keeps away while somebody polls, and finds out without the lock.

use millstream_shm::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};

/// See the module's description.
#[derive(Debug, Default)]
pub(super) struct Care {
    /// Something may be parked. Set under the send queue's lock before the thread is told.
    parked: AtomicBool,
    /// The thread comes back by itself.
    with_thread: AtomicBool,
    /// How often a poller has looked, and what the thread saw of that.
    polled: AtomicU32,
    seen: AtomicU32,
}

/// What the thread finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing is parked; the thread will be told when something is.
    Nothing,
    /// Somebody polls.
    Poller,
    /// Nobody does.
    Nobody,
}

impl Care {
    /// Something is parked, as the holder of the send queue's lock says; true if the thread must be told.
    pub(super) fn begin(&self) -> bool {
        self.parked.store(true, Ordering::Release);
        // Either this sees that the thread has gone, or the thread sees, before it goes, what is parked.
        fence(Ordering::SeqCst);
        self.hand_over()
    }

    /// True if this puts the thread in charge.
    fn hand_over(&self) -> bool {
        self.with_thread.compare_exchange(false, true, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Nothing is parked, as the holder of the send queue's lock says.
    pub(super) fn end(&self) {
        self.parked.store(false, Ordering::Release);
    }

    /// A poller looks.
    pub(super) fn polled(&self) {
        self.polled.fetch_add(1, Ordering::Relaxed);
    }

    /// The thread looks.
    pub(super) fn look(&self) -> Found {
        if !self.parked.load(Ordering::Acquire) {
            self.with_thread.store(false, Ordering::Release);
            fence(Ordering::SeqCst);
            // What was parked in between told nobody, if it still saw the thread in charge.
            let missed = self.parked.load(Ordering::Acquire) && self.hand_over();
            return if missed { Found::Nobody } else { Found::Nothing };
        }
        let polled = self.polled.load(Ordering::Relaxed);
        let before = self.seen.swap(polled, Ordering::Relaxed);
        if polled == before { Found::Nobody } else { Found::Poller }
    }
}
