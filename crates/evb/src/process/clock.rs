//! The clock of a process, as the core sees it.

use crate::core::Nanos;
use millstream_rdma::Deadline;
use std::time::{Duration, Instant};

/// Nanoseconds since this clock was made.
#[derive(Clone, Copy, Debug)]
pub(super) struct MonotonicClock(Instant);

impl MonotonicClock {
    /// A clock that shows zero.
    pub(super) fn start() -> MonotonicClock {
        MonotonicClock(Instant::now())
    }

    /// What it shows.
    pub(super) fn now(self) -> Nanos {
        Nanos(0) + self.0.elapsed()
    }

    /// When it will show `at`; never if there is no such time.
    pub(super) fn deadline(self, at: Option<Nanos>) -> Deadline {
        let instant = at.and_then(|at| self.0.checked_add(Duration::from_nanos(at.0)));
        instant.map_or(Deadline::NEVER, Deadline::at)
    }
}
