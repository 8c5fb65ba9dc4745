//! Sizes with binary units: `4096`, `"64KiB"`, `"256 MiB"`, `"1GiB"`.

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use std::fmt;
use std::str::FromStr;

/// A memory size, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

const UNITS: [(&str, u64); 5] = [("", 1), ("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// Text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a size: use a number of bytes, or a number with KiB, MiB or GiB")]
pub struct NotASize(String);

impl FromStr for Size {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Size, NotASize> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let unit = text[digits..].trim_start();
        let factor = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor);
        let number = text[..digits].parse::<u64>().ok();
        let bytes = number.zip(factor).and_then(|(number, factor)| number.checked_mul(factor));
        bytes.map(Size).ok_or_else(|| NotASize(text.to_owned()))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact =
            UNITS.iter().rev().find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor));
        match exact {
            Some((unit, factor)) if !unit.is_empty() => write!(f, "{} {unit}", self.0 / factor),
            _ => write!(f, "{} B", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        struct SizeVisitor;

        impl Visitor<'_> for SizeVisitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 4096 or \"256MiB\"")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes).map(Size).map_err(|_| E::custom(NotASize(bytes.to_string())))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(SizeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_printed() {
        let read = |text: &str| text.parse::<Size>().map(|size| (size.0, size.to_string()));
        assert_eq!(read("4096"), Ok((4096, "4 KiB".to_owned())));
        assert_eq!(read("100B"), Ok((100, "100 B".to_owned())));
        assert_eq!(read("256 MiB"), Ok((256 << 20, "256 MiB".to_owned())));
        assert_eq!(read("3GiB"), Ok((3 << 30, "3 GiB".to_owned())));
        assert_eq!(Size(0).to_string(), "0 B");
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in ["", "MiB", "-1", "1.5GiB", "10MB", "99999999999GiB", "12 34"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }
}
