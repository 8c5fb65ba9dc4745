//! Monotonic clock of a process, in the core's unit.

use crate::core::Instant;
use millstream_rdma::Deadline;
use std::time::Duration;

/// Nanoseconds since this clock was started.
#[derive(Clone, Copy, Debug)]
pub(super) struct MonotonicClock(std::time::Instant);

impl MonotonicClock {
    /// Starts a clock at zero.
    pub(super) fn start() -> MonotonicClock {
        MonotonicClock(std::time::Instant::now())
    }

    /// A clock that was started some time ago.
    pub(super) fn started(ago: Duration) -> MonotonicClock {
        let now = std::time::Instant::now();
        MonotonicClock(now.checked_sub(ago).unwrap_or(now))
    }

    /// The current time.
    pub(super) fn now(self) -> Instant {
        Instant::default() + self.0.elapsed()
    }

    /// The deadline at time `at`; never for `None`.
    pub(super) fn deadline(self, at: Option<Instant>) -> Deadline {
        let instant = at.and_then(|at| self.0.checked_add(Duration::from_nanos(at.as_nanos())));
        instant.map_or(Deadline::NEVER, Deadline::at)
    }
}
