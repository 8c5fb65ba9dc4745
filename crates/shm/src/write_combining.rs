//! Loads from write-combining memory of devices.
//!
//! The processor does not cache this memory: an ordinary load of any size is a round trip over PCIe. A streaming load
//! (`MOVNTDQA`) fetches a line of 64 bytes into a buffer, from which the next three of 16 bytes are served (Intel SDM volume 1,
//! 12.10.3). One load of 64 bytes a line (AVX-512) leaves the processor room for more lines on their way.
//!
//! Stores are combined in buffers that a fence, or an operation with a lock prefix, empties.

/// Bytes of a line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;
/// Lines that are fetched at a time: a core has room for about so many.
#[cfg(target_arch = "x86_64")]
const LINES: usize = 8;

/// Copies bytes out of write-combining memory. A concurrent write can tear them.
///
/// # Safety
/// The lines of 64 bytes around the range are mapped, and `out` does not overlap it.
pub unsafe fn load(from: *const u8, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the caller's promise; the processor has the instruction.
        return unsafe { load_512(from, out) };
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.1") {
        // SAFETY: the caller's promise; the processor has the instruction.
        return unsafe { load_128(from, out) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
}

#[cfg(target_arch = "x86_64")]
#[repr(align(64))]
struct Lines([u8; LINES * LINE]);

/// As [`load`], with loads of 16 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.1")]
unsafe fn load_128(from: *const u8, out: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_store_si128, _mm_stream_load_si128};
    let fetch = |line: *const u8, copy: *mut u8| {
        for part in 0..LINE / 16 {
            // SAFETY: the line is mapped, by the caller's promise, and aligned, as is the copy.
            unsafe {
                let value = _mm_stream_load_si128(line.add(16 * part).cast::<__m128i>());
                _mm_store_si128(copy.add(16 * part).cast::<__m128i>(), value);
            }
        }
    };
    // SAFETY: as promised to this function.
    unsafe { load_lines(from, out, fetch) }
}

/// As [`load`], with loads of 64 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn load_512(from: *const u8, out: &mut [u8]) {
    use std::arch::x86_64::{__m512i, _mm512_store_si512, _mm512_stream_load_si512};
    let fetch = |line: *const u8, copy: *mut u8| {
        // SAFETY: the line is mapped, by the caller's promise, and aligned, as is the copy.
        unsafe {
            _mm512_store_si512(copy.cast::<__m512i>(), _mm512_stream_load_si512(line.cast::<__m512i>()))
        };
    };
    // SAFETY: as promised to this function.
    unsafe { load_lines(from, out, fetch) }
}

/// Copies by `fetch`, which copies one line.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn load_lines(from: *const u8, out: &mut [u8], fetch: impl Fn(*const u8, *mut u8)) {
    // SAFETY: every x86-64 processor has the instruction. Streaming loads are not ordered with earlier stores and loads.
    unsafe { std::arch::x86_64::_mm_mfence() };
    let mut skipped = from as usize % LINE;
    let mut line = from.wrapping_sub(skipped);
    let mut rest = out;
    let mut copy = Lines([0; LINES * LINE]);
    while !rest.is_empty() {
        let lines = (skipped + rest.len()).div_ceil(LINE).min(LINES);
        for i in 0..lines {
            fetch(line.wrapping_add(i * LINE), copy.0[i * LINE..].as_mut_ptr());
        }
        let taken = rest.len().min(lines * LINE - skipped);
        rest[..taken].copy_from_slice(&copy.0[skipped..skipped + taken]);
        rest = &mut rest[taken..];
        (line, skipped) = (line.wrapping_add(lines * LINE), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_any_place_and_length_are_copied() {
        // SAFETY: the lines around each range are mapped.
        check(|from, out| unsafe { load(from, out) });
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("sse4.1") {
            // SAFETY: as above; the processor has the instruction, which `load` uses only without a wider one.
            check(|from, out| unsafe { load_128(from, out) });
        }
    }

    fn check(load: impl Fn(*const u8, &mut [u8])) {
        let source: Vec<u8> = (0..4096_u32).map(|i| (i * 7 + (i >> 8)) as u8).collect();
        for start in (1024..1160).step_by(3) {
            for len in [0, 1, 5, 63, 64, 65, 127, 511, 512, 513, 1000, 1024, 1500] {
                let mut out = vec![0; len + 2];
                load(source[start..].as_ptr(), &mut out[1..=len]);
                assert_eq!(out[1..=len], source[start..start + len], "{len} bytes at {start}");
                assert_eq!((out[0], out[len + 1]), (0, 0));
            }
        }
    }
}
