//! Points in time and durations.

use core::fmt;
use core::iter::Sum;
use core::ops::{Add, AddAssign, Mul, Sub};
use core::time::Duration;

use crate::si::metric;

/// A point in time on the caller's clock: nanoseconds since an origin that the caller chose. The clock is
/// monotonic.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// From nanoseconds since the origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The duration since `earlier`; zero if `earlier` is later.
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

/// The duration of a 5-bit local ACK timeout code (9.7.6.1.3): 4.096 µs · 2^code; `None`, no timeout, for 0.
#[inline]
#[must_use]
pub const fn ack_timeout(code: u8) -> Option<Duration> {
    match code & 31 {
        0 => None,
        code => Some(Duration::from_nanos(4096 << code)),
    }
}

/// A point or a span of virtual time in picoseconds; 2⁶⁴ ps are 213 days. Sums and products end there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Picos(pub u64);

impl Picos {
    /// Zero.
    pub const ZERO: Picos = Picos(0);

    /// Rounds `nanos` nanoseconds.
    #[must_use]
    pub fn from_nanos(nanos: f64) -> Picos {
        Picos((nanos * 1e3).round().max(0.0) as u64)
    }

    /// Rounds `seconds` seconds.
    #[must_use]
    pub fn from_seconds(seconds: f64) -> Picos {
        Picos((seconds * 1e12).round().max(0.0) as u64)
    }

    /// In nanoseconds.
    #[must_use]
    pub fn nanos(self) -> f64 {
        self.0 as f64 * 1e-3
    }

    /// In seconds.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.0 as f64 * 1e-12
    }
}

impl Add for Picos {
    type Output = Picos;
    fn add(self, other: Picos) -> Picos {
        Picos(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Picos {
    fn add_assign(&mut self, other: Picos) {
        *self = *self + other;
    }
}

impl Sub for Picos {
    type Output = Picos;
    /// The span since `other`; zero if `other` is later.
    fn sub(self, other: Picos) -> Picos {
        Picos(self.0.saturating_sub(other.0))
    }
}

impl Mul<u64> for Picos {
    type Output = Picos;
    fn mul(self, times: u64) -> Picos {
        Picos(self.0.saturating_mul(times))
    }
}

impl Sum for Picos {
    fn sum<I: Iterator<Item = Picos>>(spans: I) -> Picos {
        spans.fold(Picos::ZERO, Add::add)
    }
}

impl fmt::Display for Picos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ps if ps < 1_000 => write!(f, "{ps} ps"),
            ps if ps < 1_000_000 => write!(f, "{:.2} ns", ps as f64 * 1e-3),
            ps if ps < 1_000_000_000 => write!(f, "{:.3} µs", ps as f64 * 1e-6),
            ps if ps < 1_000_000_000_000 => write!(f, "{:.3} ms", ps as f64 * 1e-9),
            ps => write!(f, "{:.3} s", ps as f64 * 1e-12),
        }
    }
}

/// A duration in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Seconds(pub f64);

/// A frequency in hertz.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Hertz(pub f64);

impl fmt::Display for Hertz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&metric(self.0, "Hz"))
    }
}

impl Seconds {
    /// `count` divided by this duration; `None` if the duration is zero.
    #[must_use]
    pub fn rate_of(self, count: u64) -> Option<f64> {
        (self.0 > 0.0).then(|| count as f64 / self.0).filter(|rate| rate.is_finite())
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0;
        let text = match s {
            _ if !s.is_finite() || s < 0.0 => format!("{s} s"),
            _ if s < 60.0 => metric(s, "s"),
            _ if s < 3600.0 => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), (s % 60.0).floor()),
            _ => format!("{:.0} h {:02.0} min", (s / 3600.0).floor(), (s % 3600.0 / 60.0).floor()),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_printed_in_a_fitting_unit() {
        let shown = |seconds| Seconds(seconds).to_string();
        assert_eq!(shown(0.0), "0 s");
        assert_eq!(shown(0.000_001_7), "1.70 µs");
        assert_eq!(shown(0.9996), "1.00 s");
        assert_eq!(shown(59.94), "59.9 s");
        assert_eq!(shown(61.9), "1 min 01 s");
        assert_eq!(shown(7_320.0), "2 h 02 min");
        assert_eq!(shown(-1.0), "-1 s");
    }

    #[test]
    fn virtual_time_ends_at_its_largest_value() {
        let day = Picos::from_seconds(86_400.0);
        assert_eq!(day * 213, (0..213).map(|_| day).sum());
        assert_eq!([day * 214, day * 213 + day, Picos::from_seconds(1e300)], [Picos(u64::MAX); 3]);
    }

    #[test]
    fn ack_timeout_codes_are_exponents() {
        assert_eq!(ack_timeout(0), None);
        assert_eq!(ack_timeout(14), Some(Duration::from_nanos(67_108_864)));
    }
}
