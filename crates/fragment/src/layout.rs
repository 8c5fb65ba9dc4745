//! Alignment of fragments, in files and in packets.

/// Alignment of fragments: a power of two from 8 to 4096 bytes.
///
/// A fragment starts at the end of the previous one, rounded up to the alignment. Bytes between are zero. So
/// the offset of a fragment follows from the lengths before it. Consecutive fragments can be copied in one
/// block to any aligned address.
///
/// The minimum permits access as 64-bit words; the maximum is a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Alignment(u32);

/// A number that is not a valid alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("alignment {0} is not a power of two from {min} to {max}", min = Alignment::MIN.0, max = Alignment::MAX.0)]
pub struct InvalidAlignment(pub u32);

impl Alignment {
    /// 8 bytes.
    pub const MIN: Self = Self(8);
    /// 64 bytes: a cache line.
    pub const CACHE_LINE: Self = Self(64);
    /// 4096 bytes: a page.
    pub const MAX: Self = Self(4096);

    /// Creates the alignment to `bytes`.
    pub const fn new(bytes: u32) -> Result<Self, InvalidAlignment> {
        if bytes.is_power_of_two() && Self::MIN.0 <= bytes && bytes <= Self::MAX.0 {
            Ok(Self(bytes))
        } else {
            Err(InvalidAlignment(bytes))
        }
    }

    /// The alignment, in bytes.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Length of a fragment of `len` bytes with its padding, in bytes.
    pub const fn padded(self, len: u32) -> u64 {
        let mask = self.0 as u64 - 1;
        (len as u64 + mask) & !mask
    }
}

impl Default for Alignment {
    /// A cache line.
    fn default() -> Self {
        Self::CACHE_LINE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_powers_of_two_in_range_are_alignments() {
        let accepted: Vec<u32> = (0..10_000).filter(|&bytes| Alignment::new(bytes).is_ok()).collect();
        assert_eq!(accepted, [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]);
        assert_eq!(
            Alignment::new(48).unwrap_err().to_string(),
            "alignment 48 is not a power of two from 8 to 4096"
        );
    }

    #[test]
    fn padding_reaches_the_next_multiple() {
        let line = Alignment::CACHE_LINE;
        assert_eq!([0, 1, 64, 65].map(|len| line.padded(len)), [0, 64, 64, 128]);
        assert_eq!(line.padded(u32::MAX), 1 << 32);
    }
}
