//! Loads from write-combining memory of devices.
//!
//! The processor does not cache this memory: an ordinary load of any size is a round trip over PCIe. A streaming load
//! (`MOVNTDQA`) fetches a line of 64 bytes into a buffer, from which the next three are served (Intel SDM volume 1,
//! 12.10.3).
//!
//! Stores are combined in buffers that a fence, or an operation with a lock prefix, empties.

/// Bytes of a line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies bytes out of write-combining memory. A concurrent write can tear them.
///
/// # Safety
/// The lines of 64 bytes around the range are mapped, and `out` does not overlap it.
pub unsafe fn load(from: *const u8, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.1") {
        // SAFETY: the caller's promise; the processor has the instruction.
        return unsafe { load_lines(from, out) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
}

/// As [`load`], line by line.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.1")]
unsafe fn load_lines(from: *const u8, out: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_mfence, _mm_store_si128, _mm_stream_load_si128};

    #[repr(align(64))]
    struct Line([u8; LINE]);

    // Streaming loads are not ordered with earlier stores and loads.
    _mm_mfence();
    let skipped = from as usize % LINE;
    let mut line = from.wrapping_sub(skipped);
    let (mut rest, mut start) = (out, skipped);
    while !rest.is_empty() {
        let mut copy = Line([0; LINE]);
        let source = line.cast_mut().cast::<__m128i>();
        let target = copy.0.as_mut_ptr().cast::<__m128i>();
        // SAFETY: the line is mapped, by the caller's promise, and aligned, as is the copy.
        unsafe {
            let [a, b, c, d] = [0, 1, 2, 3].map(|part| _mm_stream_load_si128(source.add(part)));
            _mm_store_si128(target, a);
            _mm_store_si128(target.add(1), b);
            _mm_store_si128(target.add(2), c);
            _mm_store_si128(target.add(3), d);
        }
        let taken = rest.len().min(LINE - start);
        rest[..taken].copy_from_slice(&copy.0[start..start + taken]);
        rest = &mut rest[taken..];
        (line, start) = (line.wrapping_add(LINE), 0);
    }
}
