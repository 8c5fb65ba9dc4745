//! Time as the caller tells it.

use core::fmt;
use core::ops::Add;
use core::time::Duration;

/// A point in time: nanoseconds since a moment that the caller has chosen. Times that the caller hands in never
/// go back.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// From nanoseconds.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// As nanoseconds.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How long after `earlier`; zero if it is before.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl fmt::Debug for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", Duration::from_nanos(self.0))
    }
}

/// The time that a 5-bit local ACK timeout code stands for (11.2.4.2): 4.096 µs · 2^code; 0 is for ever.
#[must_use]
pub const fn ack_timeout(code: u8) -> Option<Duration> {
    match code & 31 {
        0 => None,
        code => Some(Duration::from_nanos(4096 << code)),
    }
}
