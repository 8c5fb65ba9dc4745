//! Little-endian integers at byte offsets.
//!
//! The readers panic outside of the slice; callers check its length before.

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

pub(crate) fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a slice of N bytes is an array of N bytes")
}

/// Writes the bytes of a field at `at`.
pub(crate) fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

/// Converts a count in memory to a field's type.
pub(crate) fn to_u64(count: usize) -> u64 {
    u64::try_from(count).expect("usize has at most 64 bits")
}

/// Whether checksums of headers and tables are verified. Fuzzers disable this.
pub(crate) const VERIFY_CHECKSUMS: bool = !cfg!(fuzzing);
