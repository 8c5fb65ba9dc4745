//! What the card wants of a region, and what it is told: all that the two share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use millstream_shm::futex;

/// What the card wants of one region, and what it is told.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    /// Changes whenever there is something to look at; the region sleeps on it.
    pub(super) attention: AtomicU32,
    /// Be at a safe point and stay there.
    pub(super) hold: AtomicBool,
    /// It is.
    pub(super) held: AtomicBool,
    /// End the run, forget the kernel.
    pub(super) reset: AtomicBool,
    /// Something was begun since the latest reset.
    used: AtomicBool,
    /// The kernel is wanted at a safe point.
    pub(super) wanted: AtomicBool,
    /// When the run has to be over, in nanoseconds of the card's clock; 0: never.
    pub(crate) deadline_ns: AtomicU64,
    /// The number of the kernel loaded.
    pub(crate) loaded: AtomicU64,
    /// Whether a kernel runs, and whether the card still counts on its end: a [`Phase`].
    pub(super) phase: AtomicU32,
    /// Whether anything may begin: a [`Gate`].
    gate: AtomicU32,
}

/// Where a region and its kernel are with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No kernel runs.
    Idle,
    /// One runs.
    Running,
    /// One runs that was to end and did not: the card goes on without the region.
    Lost,
    /// It has ended after all: the card may take the region back.
    Back,
}

impl Phase {
    const ALL: [Phase; 4] = [Phase::Idle, Phase::Running, Phase::Lost, Phase::Back];
}

/// Which lease a doorbell belongs to: grows when one ends, and again when the registers are clear for the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Gate(u32);

impl Gate {
    /// Between two leases.
    pub(super) fn is_closed(self) -> bool {
        self.0 % 2 == 1
    }
}

impl Desk {
    pub(crate) fn phase(&self) -> Phase {
        Phase::ALL[self.phase.load(Ordering::SeqCst) as usize]
    }

    /// Goes from one phase to another; false if it is in a third one.
    pub(super) fn turn(&self, from: Phase, to: Phase) -> bool {
        let (order, relaxed) = (Ordering::SeqCst, Ordering::Relaxed);
        self.phase.compare_exchange(from as u32, to as u32, order, relaxed).is_ok()
    }

    /// Gives up a kernel that does not end; false if it has just ended.
    pub(crate) fn give_up(&self) -> bool {
        self.turn(Phase::Running, Phase::Lost)
    }

    /// Takes back a region whose kernel has ended after it was given up: it becomes empty.
    pub(crate) fn take_back(&self) -> bool {
        if self.phase() != Phase::Back {
            return false;
        }
        self.reset.store(true, Ordering::SeqCst);
        self.turn(Phase::Back, Phase::Idle);
        self.nudge();
        true
    }

    /// Whether the region has not done yet what it is to do.
    pub(crate) fn is_awaited(&self) -> bool {
        let is = |flag: &AtomicBool| flag.load(Ordering::SeqCst);
        is(&self.reset) || is(&self.hold) && !is(&self.held)
    }

    /// Makes the region look up.
    pub(crate) fn nudge(&self) {
        self.attention.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.attention);
    }

    /// Holds the region at its next safe point, or lets it go on.
    pub(crate) fn set_hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::SeqCst);
        self.wanted.store(hold, Ordering::SeqCst);
        self.nudge();
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst)
    }

    /// Ends whatever runs and forgets the kernel. From here on nothing begins, until [`Desk::go_on`].
    pub(crate) fn start_reset(&self) {
        self.gate.fetch_or(1, Ordering::SeqCst);
        // Either this sees that the region began something, or the region sees that it may not.
        if self.used.load(Ordering::SeqCst) {
            self.reset.store(true, Ordering::SeqCst);
            self.wanted.store(true, Ordering::SeqCst);
            self.nudge();
        }
    }

    /// The registers are clear: what is rung from now on is of the next lease.
    pub(crate) fn go_on(&self) {
        if self.gate().is_closed() {
            self.gate.fetch_add(1, Ordering::SeqCst);
            self.nudge();
        }
    }

    pub(super) fn gate(&self) -> Gate {
        Gate(self.gate.load(Ordering::SeqCst))
    }

    /// Whether what was rung while the gate was this may begin.
    pub(super) fn begin(&self, gate: Gate) -> bool {
        self.used.store(true, Ordering::SeqCst);
        self.gate() == gate
    }

    /// The region has nothing of before any more.
    pub(super) fn finish_reset(&self) {
        self.wanted.store(false, Ordering::SeqCst);
        self.used.store(false, Ordering::SeqCst);
        self.reset.store(false, Ordering::SeqCst);
    }

    pub(crate) fn is_reset(&self) -> bool {
        !self.reset.load(Ordering::SeqCst)
    }

    /// Interrupts a kernel that has to end.
    pub(crate) fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }
}
