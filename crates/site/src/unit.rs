//! Quantities of a site file, as text with a unit: `"105 ns"`, `"8 GiB"`, `"56 Gb/s"`, `"450 MHz"`.
//!
//! The text is a positive number, an optional space and a unit. Decimal prefixes are powers of 1000, binary ones (`KiB`)
//! powers of 1024; `b` is a bit, `B` a byte. The unit is required; zero, and values that no hardware has, are errors.

use millstream_quantity::{Bytes, BytesPerSecond, Hertz, Metres, Seconds};
use serde::Deserialize;
use serde::de::{self, Deserializer};
use std::fmt;
use std::marker::PhantomData;
use toml::Spanned;

/// A quantity that a site file gives as text with a unit.
pub(crate) trait Quantity: Sized {
    /// Its name in error messages.
    const NAME: &'static str;
    /// A valid text.
    const EXAMPLE: &'static str;
    /// Each unit's symbol and size in the quantity's base unit.
    const UNITS: &'static [(&'static str, f64)];
    /// Smallest and largest value of hardware, as text of the format.
    const RANGE: (&'static str, &'static str);

    /// Converts from a number of base units, which is positive and finite.
    fn from_base(value: f64) -> Self;
}

impl Quantity for Seconds {
    const NAME: &'static str = "time";
    const EXAMPLE: &'static str = "105 ns";
    const UNITS: &'static [(&'static str, f64)] =
        &[("ps", 1e-12), ("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    const RANGE: (&'static str, &'static str) = ("1 ps", "10 ms");

    fn from_base(value: f64) -> Self {
        Self(value)
    }
}

impl Quantity for Bytes {
    const NAME: &'static str = "size";
    const EXAMPLE: &'static str = "8 GiB";
    const UNITS: &'static [(&'static str, f64)] = &[
        ("B", 1.0),
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("TiB", 1_099_511_627_776.0),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
    ];
    const RANGE: (&'static str, &'static str) = ("1 B", "1024 TiB");

    fn from_base(value: f64) -> Self {
        // At least one byte: a part of a byte is no size.
        Self((value.round() as u64).max(1))
    }
}

impl Quantity for BytesPerSecond {
    const NAME: &'static str = "rate";
    const EXAMPLE: &'static str = "56 Gb/s";
    const UNITS: &'static [(&'static str, f64)] = &[
        ("b/s", 0.125),
        ("kb/s", 125.0),
        ("Mb/s", 125e3),
        ("Gb/s", 125e6),
        ("Tb/s", 125e9),
        ("B/s", 1.0),
        ("kB/s", 1e3),
        ("MB/s", 1e6),
        ("GB/s", 1e9),
        ("TB/s", 1e12),
    ];
    const RANGE: (&'static str, &'static str) = ("1 kb/s", "100 TB/s");

    fn from_base(value: f64) -> Self {
        Self(value)
    }
}

impl Quantity for Hertz {
    const NAME: &'static str = "frequency";
    const EXAMPLE: &'static str = "450 MHz";
    const UNITS: &'static [(&'static str, f64)] = &[("Hz", 1.0), ("kHz", 1e3), ("MHz", 1e6), ("GHz", 1e9)];
    const RANGE: (&'static str, &'static str) = ("1 kHz", "20 GHz");

    fn from_base(value: f64) -> Self {
        Self(value)
    }
}

impl Quantity for Metres {
    const NAME: &'static str = "length";
    const EXAMPLE: &'static str = "2 m";
    const UNITS: &'static [(&'static str, f64)] = &[("mm", 1e-3), ("cm", 1e-2), ("m", 1.0), ("km", 1e3)];
    const RANGE: (&'static str, &'static str) = ("1 mm", "1000 km");

    fn from_base(value: f64) -> Self {
        Self(value)
    }
}

/// Number of base units of a text; the error says what is wrong with it.
fn base_units<T: Quantity>(text: &str) -> Result<f64, String> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let unit = text[end..].trim_start();
    let number: f64 = text[..end].parse().map_err(|_| {
        format!("{text:?} is not a {}: expected a number and a unit, for example {:?}", T::NAME, T::EXAMPLE)
    })?;
    let factor =
        T::UNITS.iter().find_map(|(name, factor)| (*name == unit).then_some(*factor)).ok_or_else(|| {
            let names = T::UNITS.iter().map(|(unit, _)| *unit).collect::<Vec<_>>().join(", ");
            format!("{text:?}: unknown unit {unit:?} of a {}; use one of {names}", T::NAME)
        })?;
    Ok(number * factor)
}

/// Parses a quantity; the error says what is wrong with the text.
pub(crate) fn parse<T: Quantity>(text: &str) -> Result<T, String> {
    let text = text.trim();
    let value = base_units::<T>(text)?;
    if value <= 0.0 {
        return Err(format!("{text:?}: a {} must be above zero", T::NAME));
    }
    // Rounding of the product must not exclude the ends.
    let (low, high) = T::RANGE;
    if value < base_units::<T>(low)? * (1.0 - 1e-9) || value > base_units::<T>(high)? * (1.0 + 1e-9) {
        return Err(format!("{text:?}: a {} must be {low} to {high}; check number and unit", T::NAME));
    }
    Ok(T::from_base(value))
}

/// Deserializes a quantity from text with a unit.
pub(crate) fn quantity<'de, T: Quantity, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Visitor<T>(PhantomData<T>);

    impl<T: Quantity> de::Visitor<'_> for Visitor<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a {} with its unit, for example {:?}", T::NAME, T::EXAMPLE)
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            parse(text).map_err(E::custom)
        }
    }

    deserializer.deserialize_any(Visitor(PhantomData))
}

/// Deserializes a quantity with its place in the file.
pub(crate) fn spanned<'de, T: Quantity, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Spanned<T>, D::Error> {
    let text = Spanned::<String>::deserialize(deserializer)?;
    let value = parse(text.get_ref()).map_err(de::Error::custom)?;
    Ok(Spanned::new(text.span(), value))
}

/// Deserializes an optional key's quantity with its place in the file.
pub(crate) fn optional_spanned<'de, T: Quantity, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Spanned<T>>, D::Error> {
    spanned(deserializer).map(Some)
}

/// Deserializes an optional key's quantity.
pub(crate) fn optional<'de, T: Quantity, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    quantity(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_parsed() {
        assert_eq!(parse("105 ns"), Ok(Seconds(105.0 * 1e-9)));
        assert_eq!(parse("8GiB"), Ok(Bytes(8_589_934_592)));
        assert_eq!(parse("56 Gb/s"), Ok(BytesPerSecond(7e9)));
        assert_eq!(parse("450 MHz"), Ok(Hertz(450e6)));
        assert_eq!(parse("2.5 km"), Ok(Metres(2500.0)));
    }

    #[test]
    fn values_that_no_hardware_has_are_refused() {
        assert!(parse::<Hertz>("20 GHz").is_ok() && parse::<Seconds>("10 ms").is_ok());
        for error in [
            parse::<Hertz>("200 GHz").err(),
            parse::<Hertz>("2 Hz").err(),
            parse::<Seconds>("105 s").err(),
            parse::<BytesPerSecond>("101 TB/s").err(),
            parse::<BytesPerSecond>("1 b/s").err(),
            parse::<Metres>("1001 km").err(),
            parse::<Bytes>(&"9".repeat(400)).err(),
        ] {
            let error = error.expect("out of range");
            assert!(error.contains("check number and unit") || error.contains("unknown unit"), "{error}");
        }
    }

    #[test]
    fn invalid_quantities_are_refused_with_the_reason() {
        for (text, why) in [
            ("12", "unknown unit \"\""),
            ("12 parsec", "unknown unit \"parsec\""),
            ("0 B", "above zero"),
            ("fast", "expected a number"),
            ("2000 TB", "must be 1 B to 1024 TiB"),
        ] {
            let error = parse::<Bytes>(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text: String) {
            let _ = (parse::<Bytes>(&text), parse::<Seconds>(&text), parse::<BytesPerSecond>(&text));
        }
    }
}
