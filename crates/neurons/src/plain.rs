//! Values whose bytes may be copied to other memory and back.

/// A value without padding, all of whose bits are valid.
///
/// # Safety
/// The type is so.
pub(crate) unsafe trait Plain: Copy + 'static {}

// SAFETY: numbers have no padding, and all their bits are valid.
unsafe impl Plain for f64 {}
// SAFETY: as above.
unsafe impl Plain for i64 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}

/// The bytes of values, as they are in memory.
pub(crate) fn bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: plain values have no padding, and all bits are valid.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
