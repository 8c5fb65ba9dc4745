//! Requests of the lease controller to one region, and the region's answers: all that the two share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use millstream_shm::futex;

/// Requests of the lease controller to one region, and the region's answers.
#[derive(Debug, Default)]
pub(crate) struct RegionControl {
    /// Changes with every request; the region sleeps on it.
    pub(super) notifications: AtomicU32,
    /// Request: pause at the next safe point.
    pub(super) pause_requested: AtomicBool,
    /// Answer: the region is paused.
    pub(super) paused: AtomicBool,
    /// Request: end the run and unload the kernel.
    pub(super) reset_requested: AtomicBool,
    /// The region has executed a command since the latest reset.
    used: AtomicBool,
    /// Request: the kernel has to reach a safe point.
    pub(super) interrupt_requested: AtomicBool,
    /// When the run must have ended, in nanoseconds of the card's clock; 0: no deadline.
    pub(crate) deadline_ns: AtomicU64,
    /// State of the run: a [`RunPhase`].
    pub(super) phase: AtomicU32,
    /// Epoch of the lease whose doorbells are executed: a [`LeaseEpoch`].
    epoch: AtomicU32,
}

/// State of a region's run, as the lease controller sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunPhase {
    /// No kernel runs.
    Idle,
    /// A kernel runs.
    Running,
    /// A kernel runs that did not end within the grace period; the card continues without the region.
    Hung,
    /// The hung kernel has ended; the controller may put the region back into service.
    Recovered,
}

impl RunPhase {
    const ALL: [RunPhase; 4] = [RunPhase::Idle, RunPhase::Running, RunPhase::Hung, RunPhase::Recovered];
}

/// The lease that a doorbell belongs to. Odd between two leases, even while doorbells are executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LeaseEpoch(u32);

impl LeaseEpoch {
    /// Between two leases.
    pub(super) fn is_closed(self) -> bool {
        self.0 % 2 == 1
    }
}

impl RegionControl {
    pub(crate) fn phase(&self) -> RunPhase {
        RunPhase::ALL[self.phase.load(Ordering::SeqCst) as usize]
    }

    /// Changes the phase from `from` to `to`; false if it is another one.
    pub(super) fn transition(&self, from: RunPhase, to: RunPhase) -> bool {
        let (order, relaxed) = (Ordering::SeqCst, Ordering::Relaxed);
        self.phase.compare_exchange(from as u32, to as u32, order, relaxed).is_ok()
    }

    /// Declares the running kernel hung; false if it has just ended.
    pub(crate) fn declare_hung(&self) -> bool {
        self.transition(RunPhase::Running, RunPhase::Hung)
    }

    /// Puts a recovered region back into service, without a kernel. False if it has not recovered.
    pub(crate) fn recover(&self) -> bool {
        if self.phase() != RunPhase::Recovered {
            return false;
        }
        self.reset_requested.store(true, Ordering::SeqCst);
        self.transition(RunPhase::Recovered, RunPhase::Idle);
        self.notify();
        true
    }

    /// Whether the region has not answered a request yet.
    pub(crate) fn is_request_pending(&self) -> bool {
        let is = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
        is(&self.reset_requested) || is(&self.pause_requested) && !is(&self.paused)
    }

    /// Wakes the region.
    pub(crate) fn notify(&self) {
        self.notifications.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.notifications);
    }

    /// Requests a pause at the next safe point, or ends it. A hung kernel still has to end at its next safe point.
    pub(crate) fn set_pause(&self, pause: bool) {
        self.pause_requested.store(pause, Ordering::SeqCst);
        if pause || self.phase() != RunPhase::Hung {
            self.interrupt_requested.store(pause, Ordering::SeqCst);
        }
        self.notify();
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Ends the run and unloads the kernel. The region executes no doorbell until [`RegionControl::open_epoch`].
    pub(crate) fn close_epoch(&self) {
        self.epoch.fetch_or(1, Ordering::SeqCst);
        // Either this load sees that the region began a command, or the region sees the closed epoch.
        if self.used.load(Ordering::SeqCst) {
            self.reset_requested.store(true, Ordering::SeqCst);
            self.interrupt_requested.store(true, Ordering::SeqCst);
            self.notify();
        }
    }

    /// Opens the epoch of the next lease. The registers have been cleared.
    pub(crate) fn open_epoch(&self) {
        if self.epoch().is_closed() {
            self.epoch.fetch_add(1, Ordering::SeqCst);
            self.notify();
        }
    }

    pub(super) fn epoch(&self) -> LeaseEpoch {
        LeaseEpoch(self.epoch.load(Ordering::SeqCst))
    }

    /// Whether a doorbell that was read in this epoch may still be executed.
    pub(super) fn begin(&self, epoch: LeaseEpoch) -> bool {
        self.used.store(true, Ordering::SeqCst);
        self.epoch() == epoch
    }

    /// The region has completed the reset.
    pub(super) fn finish_reset(&self) {
        self.interrupt_requested.store(false, Ordering::SeqCst);
        self.used.store(false, Ordering::SeqCst);
        self.reset_requested.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_reset(&self) -> bool {
        !self.reset_requested.load(Ordering::SeqCst)
    }

    /// Requests that the kernel reaches a safe point.
    pub(crate) fn request_interrupt(&self) {
        self.interrupt_requested.store(true, Ordering::SeqCst);
    }
}
