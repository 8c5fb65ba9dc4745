//! A point in time by which something must have happened.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A point in time by which something must have happened, or never.
///
/// One deadline is passed down through a whole operation (connect, exchange, confirm), so that the operation
/// as a whole is bounded and not each of its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No limit.
    pub const NEVER: Deadline = Deadline(None);

    /// `from_now` from now; a time too far away to express is [`Deadline::NEVER`].
    pub fn after(from_now: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(from_now))
    }

    /// The given instant.
    pub fn at(instant: Instant) -> Deadline {
        Deadline(Some(instant))
    }

    /// The time left: zero when it has passed, `None` when there is no limit.
    pub fn remaining(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the time has come.
    pub fn passed(self) -> bool {
        self.0.is_some_and(|at| at <= Instant::now())
    }

    /// The earlier of two deadlines.
    pub fn earlier(self, other: Deadline) -> Deadline {
        match (self.0, other.0) {
            (Some(a), Some(b)) => Deadline(Some(a.min(b))),
            (a, b) => Deadline(a.or(b)),
        }
    }

    pub(crate) fn instant(self) -> Option<Instant> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_does_not_pass_and_loses_against_any_other() {
        let soon = Deadline::after(Duration::ZERO);
        assert!(soon.passed());
        assert_eq!(soon.remaining(), Some(Duration::ZERO));
        assert!(!Deadline::NEVER.passed());
        assert_eq!(Deadline::NEVER.remaining(), None);
        assert_eq!(Deadline::NEVER.earlier(soon), soon);
        assert_eq!(soon.earlier(Deadline::NEVER), soon);
        assert_eq!(soon.earlier(Deadline::after(Duration::from_secs(9))), soon);
        assert_eq!(Deadline::after(Duration::MAX), Deadline::NEVER);
    }
}
