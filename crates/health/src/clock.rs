//! The clock of an observer: its own pauses are no silence of its peers.

use std::time::Duration;

/// Time that an observer has watched. A step of the real time that is longer than its longest regular one is a pause: the
/// observer was stopped or had no processor, and its peers may have stood still with it. Only the longest regular step
/// counts of it, so that peers have time to show that they live before the observer judges them.
///
/// After a pause, as without one, a dead peer is known within the bounds of [`Timers`](crate::Timers).
#[derive(Clone, Copy, Debug)]
pub struct ObserverClock {
    longest_step: Duration,
    real: Duration,
    watched: Duration,
}

impl ObserverClock {
    /// A clock at zero, of an observer that looks at it at least once in `longest_step` while it runs.
    #[must_use]
    pub fn new(longest_step: Duration) -> ObserverClock {
        ObserverClock { longest_step, real: Duration::ZERO, watched: Duration::ZERO }
    }

    /// The time watched so far, at this real time since the origin. A real time before the last one changes nothing.
    pub fn advance(&mut self, real: Duration) -> Duration {
        self.watched += real.saturating_sub(self.real).min(self.longest_step);
        self.real = self.real.max(real);
        self.watched
    }
}
