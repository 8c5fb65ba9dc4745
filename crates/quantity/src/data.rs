//! Sizes and rates of data.

use core::fmt;

use crate::si::metric;
use crate::time::{Picos, Seconds};

/// An amount of data in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(transparent))]
pub struct Bytes(pub u64);

/// A data rate in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct BytesPerSecond(pub f64);

impl Bytes {
    /// The rate of transferring this amount in `time`; `None` if `time` is zero.
    #[must_use]
    pub fn per(self, time: Seconds) -> Option<BytesPerSecond> {
        time.rate_of(self.0).map(BytesPerSecond)
    }
}

impl core::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        Self(sizes.map(|size| size.0).sum())
    }
}

impl BytesPerSecond {
    /// Converts from 10⁹ bytes per second.
    #[must_use]
    pub fn gigabytes(value: f64) -> Self {
        Self(value * 1e9)
    }

    /// Converts from 10⁹ bits per second.
    #[must_use]
    pub fn gigabits(value: f64) -> Self {
        Self(value * 125e6)
    }

    /// The time to transfer `bytes` bytes.
    #[must_use]
    pub fn time(self, bytes: u64) -> Picos {
        Picos((bytes as f64 * 1e12 / self.0).round() as u64)
    }

    /// Converts to 10⁹ bytes per second.
    #[must_use]
    pub fn as_gigabytes(self) -> f64 {
        self.0 * 1e-9
    }

    /// Printed in bits per second: `56.0 Gb/s`.
    #[must_use]
    pub fn in_bits(self) -> String {
        metric(self.0 * 8.0, "b/s")
    }

    /// Converts to 10⁹ bits per second.
    #[must_use]
    pub fn as_gigabits(self) -> f64 {
        self.0 * 8e-9
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&metric(self.0 as f64, "B"))
    }
}

impl fmt::Display for BytesPerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&metric(self.0, "B/s"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rates_have_three_digits_and_a_prefix() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(7), "7.00 B");
        assert_eq!(shown(999), "999 B");
        assert_eq!(shown(1_000), "1.00 kB");
        assert_eq!(shown(158_400), "158 kB");
        assert_eq!(shown(999_499_999), "999 MB");
        assert_eq!(shown(999_500_000), "1.00 GB");
        assert_eq!(shown(u64::MAX), "18.4 EB");
        assert_eq!(BytesPerSecond(8.434e9).to_string(), "8.43 GB/s");
        assert_eq!(BytesPerSecond(7e9).in_bits(), "56.0 Gb/s");
        assert_eq!(BytesPerSecond(f64::MAX).to_string(), "1.80e290 EB/s");
        assert_eq!(BytesPerSecond(f64::NAN).to_string(), "NaN B/s");
    }

    #[test]
    fn zero_time_has_no_rate() {
        assert_eq!(Bytes(10).per(Seconds(0.0)), None);
        assert_eq!(Bytes(10).per(Seconds(f64::MIN_POSITIVE / 8.0)), None);
        assert_eq!(Bytes(10).per(Seconds(2.0)), Some(BytesPerSecond(5.0)));
    }
}
