//! Monotonic clock of a process, in the core's unit.

use crate::core::Nanos;
use millstream_rdma::Deadline;
use std::time::{Duration, Instant};

/// Nanoseconds since this clock was started.
#[derive(Clone, Copy, Debug)]
pub(super) struct MonotonicClock(Instant);

impl MonotonicClock {
    /// Starts a clock at zero.
    pub(super) fn start() -> MonotonicClock {
        MonotonicClock(Instant::now())
    }

    /// The current time.
    pub(super) fn now(self) -> Nanos {
        Nanos(0) + self.0.elapsed()
    }

    /// The deadline at time `at`; never for `None`.
    pub(super) fn deadline(self, at: Option<Nanos>) -> Deadline {
        let instant = at.and_then(|at| self.0.checked_add(Duration::from_nanos(at.0)));
        instant.map_or(Deadline::NEVER, Deadline::at)
    }
}
