//! Quantities with units: `"105 ns"`, `"8 GiB"`, `"56 Gb/s"`, `"450 MHz"`.
//!
//! A quantity is a positive number, an optional space and a unit. Decimal prefixes are powers of 1000, binary ones (`KiB`)
//! powers of 1024; `b` is a bit, `B` a byte. The unit is required, and zero is an error.

use serde::Deserialize;
use serde::de::{self, Deserializer};
use std::fmt;

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $what:literal, $example:literal, [$(($unit:literal, $factor:expr)),+ $(,)?]) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
        pub struct $name(pub f64);

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                const UNITS: &[(&str, f64)] = &[$(($unit, $factor)),+];
                let text = text.trim();
                let end = text
                    .find(|c: char| !(c.is_ascii_digit() || c == '.'))
                    .unwrap_or(text.len());
                let unit = text[end..].trim_start();
                let names = UNITS.iter().map(|(unit, _)| *unit).collect::<Vec<_>>().join(", ");
                let number: f64 = text[..end]
                    .parse()
                    .map_err(|_| format!("{text:?} is not a {}: expected a number and a unit, for example {:?}", $what, $example))?;
                let factor = UNITS
                    .iter()
                    .find_map(|(name, factor)| (*name == unit).then_some(*factor))
                    .ok_or_else(|| format!("{text:?}: unknown unit {unit:?} of a {}; use one of {names}", $what))?;
                let value = number * factor;
                if value > 0.0 && value.is_finite() {
                    Ok(Self(value))
                } else {
                    Err(format!("{text:?}: a {} must be above zero", $what))
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl de::Visitor<'_> for Visitor {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        write!(f, "a {} with its unit, for example {:?}", $what, $example)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                deserializer.deserialize_any(Visitor)
            }
        }
    };
}

quantity!(
    /// A duration in seconds.
    Time, "time", "105 ns",
    [("ps", 1e-12), ("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)]
);
quantity!(
    /// A memory size in bytes.
    Size, "size", "8 GiB",
    [
        ("B", 1.0), ("KiB", 1024.0), ("MiB", 1_048_576.0), ("GiB", 1_073_741_824.0), ("TiB", 1_099_511_627_776.0),
        ("KB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12),
    ]
);
quantity!(
    /// A data rate in bytes per second.
    Rate, "rate", "56 Gb/s",
    [
        ("b/s", 0.125), ("kb/s", 125.0), ("Mb/s", 125e3), ("Gb/s", 125e6), ("Tb/s", 125e9),
        ("B/s", 1.0), ("kB/s", 1e3), ("MB/s", 1e6), ("GB/s", 1e9), ("TB/s", 1e12),
    ]
);
quantity!(
    /// A frequency in hertz.
    Frequency, "frequency", "450 MHz",
    [("Hz", 1.0), ("kHz", 1e3), ("MHz", 1e6), ("GHz", 1e9)]
);
quantity!(
    /// A length in metres.
    Length, "length", "2 m",
    [("mm", 1e-3), ("cm", 1e-2), ("m", 1.0), ("km", 1e3)]
);

impl Size {
    /// In whole bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0 as u64
    }
}

fn metric(f: &mut fmt::Formatter<'_>, value: f64, unit: &str) -> fmt::Result {
    let steps =
        [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")];
    let (scale, prefix) =
        steps.into_iter().find(|(scale, _)| value >= *scale * 0.9995).unwrap_or((1e-12, "p"));
    let shown = (value / scale * 1000.0).round() / 1000.0;
    write!(f, "{shown} {prefix}{unit}")
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        metric(f, self.0, "s")
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        metric(f, self.0 * 8.0, "b/s")
    }
}

impl fmt::Display for Frequency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        metric(f, self.0, "Hz")
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps =
            [(1_099_511_627_776.0, "TiB"), (1_073_741_824.0, "GiB"), (1_048_576.0, "MiB"), (1024.0, "KiB")];
        match steps.into_iter().find(|(scale, _)| self.0 >= *scale) {
            Some((scale, unit)) => write!(f, "{} {unit}", (self.0 / scale * 100.0).round() / 100.0),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_parsed() {
        assert_eq!("105 ns".parse(), Ok(Time(105.0 * 1e-9)));
        assert_eq!("8GiB".parse(), Ok(Size(8_589_934_592.0)));
        assert_eq!("56 Gb/s".parse(), Ok(Rate(7e9)));
        assert_eq!("450 MHz".parse(), Ok(Frequency(450e6)));
    }

    #[test]
    fn invalid_quantities_are_refused_with_the_reason() {
        for (text, why) in [
            ("12", "unknown unit \"\""),
            ("12 parsec", "unknown unit \"parsec\""),
            ("0 B", "above zero"),
            ("fast", "expected a number"),
        ] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = (text.parse::<Size>(), text.parse::<Time>(), text.parse::<Rate>());
        }
    }
}
