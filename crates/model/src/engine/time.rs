//! Virtual time.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul, Sub};

/// A point in virtual time or a span of it, in picoseconds. 2⁶⁴ ps are 213 days.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Picos(pub u64);

impl Picos {
    /// No time.
    pub const ZERO: Picos = Picos(0);

    /// So many nanoseconds, rounded.
    #[must_use]
    pub fn from_nanos(nanos: f64) -> Picos {
        Picos((nanos * 1e3).round().max(0.0) as u64)
    }

    /// So many seconds, rounded.
    #[must_use]
    pub fn from_seconds(seconds: f64) -> Picos {
        Picos((seconds * 1e12).round().max(0.0) as u64)
    }

    /// As nanoseconds.
    #[must_use]
    pub fn nanos(self) -> f64 {
        self.0 as f64 * 1e-3
    }

    /// As seconds.
    #[must_use]
    pub fn seconds(self) -> f64 {
        self.0 as f64 * 1e-12
    }
}

impl Add for Picos {
    type Output = Picos;
    fn add(self, other: Picos) -> Picos {
        Picos(self.0 + other.0)
    }
}

impl AddAssign for Picos {
    fn add_assign(&mut self, other: Picos) {
        self.0 += other.0;
    }
}

impl Sub for Picos {
    type Output = Picos;
    /// The span since `other`; none if that is later.
    fn sub(self, other: Picos) -> Picos {
        Picos(self.0.saturating_sub(other.0))
    }
}

impl Mul<u64> for Picos {
    type Output = Picos;
    fn mul(self, times: u64) -> Picos {
        Picos(self.0 * times)
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

/// A rate of data, in bytes a second of virtual time.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Rate(pub f64);

impl Rate {
    /// From 10⁹ bytes a second.
    #[must_use]
    pub fn gigabytes(value: f64) -> Rate {
        Rate(value * 1e9)
    }

    /// From 10⁹ bits a second.
    #[must_use]
    pub fn gigabits(value: f64) -> Rate {
        Rate(value * 125e6)
    }

    /// How long that many bytes take.
    #[must_use]
    pub fn time(self, bytes: u64) -> Picos {
        Picos((bytes as f64 * 1e12 / self.0).round() as u64)
    }

    /// In 10⁹ bytes a second.
    #[must_use]
    pub fn as_gigabytes(self) -> f64 {
        self.0 * 1e-9
    }

    /// In 10⁹ bits a second.
    #[must_use]
    pub fn as_gigabits(self) -> f64 {
        self.0 * 8e-9
    }
}
