//! Amounts, and how people read them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An amount of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A length of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seconds(pub f64);

/// A rate of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BytesPerSecond(pub f64);

impl Bytes {
    /// The rate at which this much moved in that time; nothing if no time passed.
    pub fn per(self, time: Seconds) -> Option<BytesPerSecond> {
        per(self.0, time).map(BytesPerSecond)
    }
}

/// `count` per second; nothing if no time passed.
pub(crate) fn per(count: u64, time: Seconds) -> Option<f64> {
    (time.0 > 0.0).then(|| count as f64 / time.0).filter(|rate| rate.is_finite())
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

/// Three significant digits with a metric prefix, as in `8.43 GB/s`.
pub(crate) fn metric(value: f64, unit: &str) -> String {
    let (scale, prefix) = prefix(value, 999.5);
    format!("{} {prefix}{unit}", three_digits(value / scale))
}

/// The metric prefix with which `value` is less than `limit`, and its factor.
pub(crate) fn prefix(value: f64, limit: f64) -> (f64, &'static str) {
    const UP: [(f64, &str); 7] =
        [(1e0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"), (1e18, "E")];
    const DOWN: [(f64, &str); 3] = [(1e-3, "m"), (1e-6, "µ"), (1e-9, "n")];
    let size = value.abs();
    // The bound that makes 0.9996 round to "1.00" and not to "1000 m".
    if size == 0.0 || !size.is_finite() || size >= limit / 1e3 {
        *UP.iter()
            .find(|(scale, _)| size < scale * limit)
            .unwrap_or(&UP[if size.is_finite() { 6 } else { 0 }])
    } else {
        *DOWN.iter().find(|(scale, _)| size >= scale * limit / 1e3).unwrap_or(&DOWN[2])
    }
}

fn three_digits(value: f64) -> String {
    let size = value.abs();
    // The bounds are where rounding adds a digit.
    if value == 0.0 {
        "0".into()
    } else if size < 9.995 {
        format!("{value:.2}")
    } else if size < 99.95 {
        format!("{value:.1}")
    } else if size < 1e6 {
        format!("{value:.0}")
    } else {
        format!("{value:.2e}")
    }
}

/// The size of a block: with a binary prefix if that makes it a whole number.
pub(crate) fn block(bytes: Bytes) -> String {
    const PREFIXES: [(u64, &str); 3] = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match PREFIXES.iter().find(|(scale, _)| bytes.0 >= *scale && bytes.0.is_multiple_of(*scale)) {
        Some((scale, unit)) => format!("{} {unit}", count(bytes.0 / scale)),
        None => bytes.to_string(),
    }
}

/// A count with a comma after every three digits.
pub fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Decimals of a fraction that is shown as per cent: more if it is close to the whole without being it.
pub(crate) fn per_cent(part: u64, whole: u64) -> String {
    if part == whole {
        return "100 %".into();
    }
    // Rounded down, so that only the whole is 100 %.
    let fraction = (part as f64 / whole as f64 * 1e5).floor() / 1e3;
    format!("{} %", fraction.min(99.999))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_three_digits_and_a_prefix() {
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
        assert_eq!(BytesPerSecond(f64::MAX).to_string(), "1.80e290 EB/s");
        assert_eq!(BytesPerSecond(f64::NAN).to_string(), "NaN B/s");
    }

    #[test]
    fn times_are_short() {
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
    fn counts_are_grouped() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(691_200), "691,200");
        assert_eq!(count(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn blocks_are_binary_where_they_can_be() {
        let shown = |bytes| block(Bytes(bytes));
        assert_eq!(shown(0), "0 B");
        assert_eq!(shown(64 << 10), "64 KiB");
        assert_eq!(shown(3 << 20), "3 MiB");
        assert_eq!(shown(158_400), "158 kB");
    }

    #[test]
    fn only_the_whole_is_all_of_it() {
        assert_eq!(per_cent(691_200, 691_200), "100 %");
        assert_eq!(per_cent(691_199, 691_200), "99.999 %");
        assert_eq!(per_cent(u64::MAX - 1, u64::MAX), "99.999 %");
        assert_eq!(per_cent(1, 2), "50 %");
    }

    #[test]
    fn no_time_has_no_rate() {
        assert_eq!(Bytes(10).per(Seconds(0.0)), None);
        assert_eq!(Bytes(10).per(Seconds(f64::MIN_POSITIVE / 8.0)), None);
        assert_eq!(Bytes(10).per(Seconds(2.0)), Some(BytesPerSecond(5.0)));
    }
}
