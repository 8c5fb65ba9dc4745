//! What the rest of the card wants of the rings, and what it is told.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shared by the engine and the warden.
#[derive(Debug, Default)]
pub(crate) struct RingDesk {
    inside: Mutex<Inside>,
    /// The command that runs is to end: a lease has ended, the card does, or its time is over.
    wanted: AtomicBool,
    /// On which of the card's memories commands run.
    generation: AtomicU32,
}

#[derive(Debug, Default)]
struct Inside {
    /// No command may begin.
    closed: bool,
    running: Option<Running>,
}

/// A command.
#[derive(Clone, Copy, Debug)]
struct Running {
    since: Instant,
    limit: Duration,
    /// It was to end because its time is over.
    late: bool,
    /// It did not, and the card goes on without the rings.
    lost: bool,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ended {
    /// Its time was over.
    pub(super) late: bool,
    /// Nobody waits for it any more.
    pub(super) lost: bool,
}

impl RingDesk {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        // Nobody panics with the lock held.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on no command begins, and the one that runs is to end.
    pub(crate) fn close(&self) {
        let mut inside = self.inside();
        inside.closed = true;
        self.wanted.store(true, Ordering::SeqCst);
    }

    pub(crate) fn open(&self) {
        let mut inside = self.inside();
        inside.closed = false;
        // One that has not ended yet is still to.
        self.wanted.store(inside.running.is_some(), Ordering::SeqCst);
    }

    /// Tells a kernel to end.
    pub(super) fn wanted(&self) -> &AtomicBool {
        &self.wanted
    }

    /// Whether a command runs.
    pub(crate) fn is_busy(&self) -> bool {
        self.inside().running.is_some()
    }

    /// Whether a command uses this memory of the card.
    pub(crate) fn is_busy_on(&self, generation: u32) -> bool {
        self.is_busy() && self.generation.load(Ordering::SeqCst) == generation
    }

    /// Whether one does that was given up.
    pub(crate) fn is_lost_on(&self, generation: u32) -> bool {
        self.inside().running.is_some_and(|running| running.lost)
            && self.generation.load(Ordering::SeqCst) == generation
    }

    /// Commands from here on use this memory of the card.
    pub(super) fn set_generation(&self, generation: u32) {
        self.generation.store(generation, Ordering::SeqCst);
    }

    /// Whether a command may begin, which has so much time; if so, [`RingDesk::end`] follows.
    pub(super) fn begin(&self, limit: Duration) -> bool {
        let mut inside = self.inside();
        let begins = !inside.closed;
        if begins {
            inside.running = Some(Running { since: Instant::now(), limit, late: false, lost: false });
        }
        begins
    }

    pub(super) fn end(&self) -> Ended {
        let mut inside = self.inside();
        self.wanted.store(inside.closed, Ordering::SeqCst);
        let ended = inside.running.take();
        ended.map_or_else(Ended::default, |Running { late, lost, .. }| Ended { late, lost })
    }

    /// Has a command end whose time is over. Gives it up if it does not within the grace; true once, when it does so.
    pub(crate) fn attend(&self, grace: Duration) -> bool {
        let mut inside = self.inside();
        let Some(running) = &mut inside.running else { return false };
        let Some(over) = running.since.elapsed().checked_sub(running.limit) else { return false };
        if !running.late {
            running.late = true;
            self.wanted.store(true, Ordering::SeqCst);
        }
        let given_up = over >= grace && !running.lost;
        running.lost |= given_up;
        given_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_command_begins_while_the_rings_are_open_and_counts_on_its_own_memory() {
        let desk = RingDesk::default();
        let wanted = || desk.wanted().load(Ordering::SeqCst);
        assert!(desk.begin(LONG) && desk.is_busy_on(0) && !desk.is_busy_on(1) && !wanted());
        desk.close();
        assert!(desk.is_busy_on(0) && wanted(), "it has not ended yet");
        desk.open();
        assert!(wanted(), "nor has it for the next lease");
        assert_eq!(desk.end(), Ended::default());
        assert!(!wanted());
        desk.close();
        assert!(!desk.is_busy_on(0) && !desk.begin(LONG) && !desk.is_busy_on(0));
        desk.open();
        desk.set_generation(1);
        assert!(desk.begin(LONG) && desk.is_busy_on(1) && !desk.is_busy_on(0));
    }

    #[test]
    fn a_command_whose_time_is_over_is_to_end_and_then_given_up() {
        let desk = RingDesk::default();
        assert!(desk.begin(LONG));
        assert!(!desk.attend(Duration::ZERO));
        assert_eq!(desk.end(), Ended::default());
        assert!(desk.begin(Duration::ZERO));
        assert!(!desk.attend(LONG));
        assert!(desk.wanted().load(Ordering::SeqCst) && !desk.is_lost_on(0));
        assert!(desk.attend(Duration::ZERO) && desk.is_lost_on(0) && !desk.is_lost_on(1));
        assert!(!desk.attend(Duration::ZERO), "that is said once");
        assert_eq!(desk.end(), Ended { late: true, lost: true });
        // The next one has its own time.
        assert!(desk.begin(LONG) && !desk.wanted().load(Ordering::SeqCst));
        assert_eq!((desk.attend(Duration::ZERO), desk.end()), (false, Ended::default()));
    }
}
