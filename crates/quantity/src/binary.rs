//! Sizes with binary units, as in configurations and arguments: `4096`, `"64KiB"`, `"256 MiB"`, `"1GiB"`.

use core::fmt;
use core::str::FromStr;

use crate::data::Bytes;

const UNITS: [(&str, u64); 6] =
    [("", 1), ("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// Text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotASize(String);

impl fmt::Display for NotASize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a size: use a number of bytes, or a number with KiB, MiB, GiB or TiB", self.0)
    }
}

impl core::error::Error for NotASize {}

impl FromStr for Bytes {
    type Err = NotASize;

    fn from_str(text: &str) -> Result<Bytes, NotASize> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let unit = text[digits..].trim_start();
        let factor = UNITS.iter().find(|(name, _)| *name == unit).map(|(_, factor)| *factor);
        let number = text[..digits].parse::<u64>().ok();
        let bytes = number.zip(factor).and_then(|(number, factor)| number.checked_mul(factor));
        bytes.map(Bytes).ok_or_else(|| NotASize(text.to_owned()))
    }
}

/// A size printed exactly, with the largest binary unit that divides it.
#[derive(Clone, Copy, Debug)]
pub struct Binary(Bytes);

impl Bytes {
    /// Prints the size exactly, with a binary unit: `256 MiB`, `4097 B`.
    #[must_use]
    pub fn binary(self) -> Binary {
        Binary(self)
    }
}

impl fmt::Display for Binary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.0;
        let exact = UNITS.iter().rev().find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor));
        match exact {
            Some((unit, factor)) if !unit.is_empty() => write!(f, "{} {unit}", bytes / factor),
            _ => write!(f, "{bytes} B"),
        }
    }
}

/// A number of bytes, or text with a binary unit.
#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        struct SizeVisitor;

        impl serde::de::Visitor<'_> for SizeVisitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 4096 or \"256MiB\"")
            }

            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }

            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Bytes, E> {
                u64::try_from(bytes).map(Bytes).map_err(|_| E::custom(NotASize(bytes.to_string())))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Bytes, E> {
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
        let read = |text: &str| text.parse::<Bytes>().map(|size| (size.0, size.binary().to_string()));
        assert_eq!(read("4096"), Ok((4096, "4 KiB".to_owned())));
        assert_eq!(read("100B"), Ok((100, "100 B".to_owned())));
        assert_eq!(read("256 MiB"), Ok((256 << 20, "256 MiB".to_owned())));
        assert_eq!(read("3GiB"), Ok((3 << 30, "3 GiB".to_owned())));
        assert_eq!(read("2TiB"), Ok((2 << 40, "2 TiB".to_owned())));
        assert_eq!(Bytes(0).binary().to_string(), "0 B");
    }

    #[test]
    fn invalid_sizes_are_refused() {
        for text in ["", "MiB", "-1", "1.5GiB", "10MB", "99999999999GiB", "9PiB", "12 34"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }
}
