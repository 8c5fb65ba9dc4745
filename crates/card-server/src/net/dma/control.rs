//! Requests of the lease controller to the DMA engine.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use millstream_shm::futex;

/// Requests of the lease controller to the engine, and the engine's answers.
#[derive(Debug, Default)]
pub(crate) struct DmaControl {
    /// Changes with every request; the engine sleeps on it.
    pub(super) notifications: AtomicU32,
    /// No transfer may begin: the ring belongs to an ended lease.
    pub(super) closed: AtomicBool,
    /// Request: disconnect all peers and restart the ring. Cleared by the engine.
    pub(super) reset_requested: AtomicBool,
    /// The engine has executed a command since the latest reset. Only the engine writes it.
    pub(super) used: AtomicBool,
    /// An attempt to connect a peer has ended.
    pub(super) connect_ended: AtomicBool,
}

impl DmaControl {
    /// Wakes the engine.
    pub(crate) fn notify(&self) {
        self.notifications.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.notifications);
    }

    /// Interrupts transfers and disconnects peers. No transfer begins until [`DmaControl::reopen`].
    pub(crate) fn start_reset(&self) {
        self.closed.store(true, Ordering::SeqCst);
        // Either this load sees that the engine began a command, or the engine sees the closed ring.
        if self.used.load(Ordering::SeqCst) {
            self.reset_requested.store(true, Ordering::SeqCst);
            self.notify();
        }
    }

    pub(crate) fn is_reset(&self) -> bool {
        !self.reset_requested.load(Ordering::SeqCst)
    }

    /// Opens the ring for the next lease. The registers have been cleared.
    pub(crate) fn reopen(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }

    /// Whether a command may begin: the one that the registers have after this call.
    pub(super) fn begin(&self) -> bool {
        // Not stored again if it is set: a sequentially consistent store waits for all earlier ones, which include
        // the copied bytes.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::SeqCst);
        }
        !self.closed.load(Ordering::SeqCst)
    }
}
