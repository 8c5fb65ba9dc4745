//! Deadlines.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A point in time, or never.
///
/// One deadline is passed through all steps of an operation, so that the operation as a whole is bounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No limit.
    pub const NEVER: Deadline = Deadline(None);

    /// The time `from_now` after now. A time that cannot be represented is [`Deadline::NEVER`].
    pub fn after(from_now: Duration) -> Deadline {
        Deadline(Instant::now().checked_add(from_now))
    }

    /// The deadline at `instant`.
    pub fn at(instant: Instant) -> Deadline {
        Deadline(Some(instant))
    }

    /// Remaining time: zero if the deadline passed, `None` without a limit.
    pub fn remaining(self) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(Instant::now()))
    }

    /// Whether the deadline passed.
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
