//! Copies into and out of memory that other processes read while it is written.
//!
//! Up to some kilobytes in the first-level cache, wide loads and stores are faster than the string instructions of
//! `memcpy`. For more bytes the string instructions are better: they do not fetch the lines that they overwrite. The
//! instruction set is detected at run time.

use std::ptr;
use std::sync::atomic::{Ordering, fence};

/// Most bytes of a copy by wide loads and stores: two such ranges fit the first-level cache.
const MAX_WIDE: usize = 16 << 10;

/// Copies so that the last bytes become visible last, behind all earlier stores of this thread. Receivers that poll the end of a
/// buffer rely on this, though the InfiniBand specification (volume 1, 9.5, o9-20) does not guarantee it. One, two, four and eight
/// bytes are one load and one store, as adapters do with aligned words. The two ranges may overlap.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline(always)]
pub unsafe fn copy_in_order(to: *mut u8, from: *const u8, len: usize) {
    if len == 8 {
        // SAFETY: eight bytes of both ranges.
        unsafe {
            let word = from.cast::<u64>().read_unaligned();
            fence(Ordering::Release);
            store_u64(to, word);
        }
    } else {
        // SAFETY: passed on.
        unsafe { copy(to, from, len) };
    }
}

/// # Safety
/// As [`copy_in_order`].
#[inline(never)]
unsafe fn copy(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: all accesses lie in the two ranges.
    unsafe {
        if len <= MAX_WIDE && to.addr().abs_diff(from.addr()) >= len && wide(to, from, len) {
            return;
        }
        if len < 8 {
            return short(to, from, len);
        }
        let body = len - 8;
        let last = from.add(body).cast::<u64>().read_unaligned();
        ptr::copy(from, to, body);
        fence(Ordering::Release);
        store_u64(to.add(body), last);
    }
}

/// Copies up to seven bytes in one or two accesses; two of them overlap.
///
/// # Safety
/// As [`copy_in_order`].
#[inline(always)]
unsafe fn short(to: *mut u8, from: *const u8, len: usize) {
    // The word at the beginning, and that at the end unless it is the same. Both loads come before the stores.
    macro_rules! copy_by {
        ($word:ty, $store:ident) => {{
            let end = len - size_of::<$word>();
            let (first, last) =
                (from.cast::<$word>().read_unaligned(), from.add(end).cast::<$word>().read_unaligned());
            if end > 0 {
                $store(to, first);
            }
            fence(Ordering::Release);
            $store(to.add(end), last);
        }};
    }
    // SAFETY: all accesses lie in the two ranges.
    unsafe {
        match len {
            0 => {}
            1 => {
                let byte = from.read();
                fence(Ordering::Release);
                to.write_volatile(byte);
            }
            2 | 3 => copy_by!(u16, store_u16),
            _ => copy_by!(u32, store_u32),
        }
    }
}

/// Copies upwards by the widest loads and stores of the processor; false if it has none for so few bytes.
///
/// # Safety
/// As [`copy_in_order`], and the ranges do not overlap.
#[inline(always)]
unsafe fn wide(to: *mut u8, from: *const u8, len: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: passed on; the processor has the instructions.
    unsafe {
        match len {
            64.. if is_x86_feature_detected!("avx512f") => x86::by_64(to, from, len),
            32.. if is_x86_feature_detected!("avx2") => x86::by_32(to, from, len),
            _ => return false,
        }
        true
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (to, from, len);
        false
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_storeu_si128, _mm256_loadu_si256,
        _mm256_storeu_si256, _mm512_loadu_si512, _mm512_storeu_si512,
    };
    use std::sync::atomic::{Ordering, fence};

    use super::store_u64;

    macro_rules! copy_by {
        (
            $(#[$meta:meta])* $name:ident, $feature:literal,
            $vector:ty, $load:ident, $store:ident,
            $half:ty, $load_half:ident, $store_half:ident
        ) => {
            $(#[$meta])*
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(mut to: *mut u8, mut from: *const u8, mut len: usize) {
                const SIZE: usize = size_of::<$vector>();
                // SAFETY: all accesses lie in the two ranges.
                unsafe {
                    let (to_end, from_end) = (to.add(len), from.add(len));
                    // Stores that cross cache lines take twice as long.
                    let ahead = to.align_offset(SIZE);
                    if ahead != 0 && len > SIZE {
                        $store(to.cast::<$vector>(), $load(from.cast::<$vector>()));
                        (to, from, len) = (to.add(ahead), from.add(ahead), len - ahead);
                    }
                    while len > 4 * SIZE {
                        let load = |at: usize| $load(from.add(at * SIZE).cast::<$vector>());
                        let store = |at: usize, value| $store(to.add(at * SIZE).cast::<$vector>(), value);
                        let values = (load(0), load(1), load(2), load(3));
                        store(0, values.0);
                        store(1, values.1);
                        store(2, values.2);
                        store(3, values.3);
                        (to, from, len) = (to.add(4 * SIZE), from.add(4 * SIZE), len - 4 * SIZE);
                    }
                    if len > 2 * SIZE {
                        let second = $load(from.add(SIZE).cast::<$vector>());
                        $store(to.cast::<$vector>(), $load(from.cast::<$vector>()));
                        $store(to.add(SIZE).cast::<$vector>(), second);
                        (to, from, len) = (to.add(2 * SIZE), from.add(2 * SIZE), len - 2 * SIZE);
                    }
                    if len > SIZE {
                        $store(to.cast::<$vector>(), $load(from.cast::<$vector>()));
                    }
                    // The last bytes at any alignment, then the last eight alone. They are read last, because reads in
                    // order are faster from the second- or third-level cache.
                    for before in [SIZE, SIZE / 2 + 8] {
                        let half = $load_half(from_end.sub(before).cast::<$half>());
                        $store_half(to_end.sub(before).cast::<$half>(), half);
                    }
                    let last = from_end.sub(8).cast::<u64>().read_unaligned();
                    fence(Ordering::Release);
                    store_u64(to_end.sub(8), last);
                }
            }
        };
    }

    copy_by! {
        /// # Safety
        /// As [`super::wide`], for at least 64 bytes.
        by_64, "avx512f",
        __m512i, _mm512_loadu_si512, _mm512_storeu_si512,
        __m256i, _mm256_loadu_si256, _mm256_storeu_si256
    }
    copy_by! {
        /// # Safety
        /// As [`super::wide`], for at least 32 bytes.
        by_32, "avx2",
        __m256i, _mm256_loadu_si256, _mm256_storeu_si256,
        __m128i, _mm_loadu_si128, _mm_storeu_si128
    }
}

macro_rules! store_word {
    ($(#[$meta:meta])* $visibility:vis $name:ident, $word:ty, $instruction:literal) => {
        $(#[$meta])*
        #[inline(always)]
        $visibility unsafe fn $name(at: *mut u8, value: $word) {
            // The compiler moves the portable form through the stack.
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            // SAFETY: the caller vouches for the range; the instruction needs no alignment.
            unsafe {
                std::arch::asm!($instruction, at = in(reg) at, value = in(reg) value, options(nostack, preserves_flags));
            }
            #[cfg(not(all(target_arch = "x86_64", not(miri))))]
            {
                #[repr(C, packed)]
                struct Unaligned($word);
                // SAFETY: the caller vouches for the range; the packed type needs no alignment.
                unsafe { at.cast::<Unaligned>().write_volatile(Unaligned(value)) }
            }
        }
    };
}

store_word! {
    /// Stores eight bytes in one access at any alignment.
    ///
    /// # Safety
    /// The pointer must be valid for eight bytes.
    pub store_u64, u64, "mov qword ptr [{at}], {value}"
}
store_word! {
    /// # Safety
    /// As [`store_u64`], for four bytes.
    store_u32, u32, "mov dword ptr [{at}], {value:e}"
}
store_word! {
    /// # Safety
    /// As [`store_u64`], for two bytes.
    store_u16, u16, "mov word ptr [{at}], {value:x}"
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;

    // Miri takes too long for more.
    const SIZE: usize = if cfg!(miri) { 5000 } else { 3 * MAX_WIDE };

    fn pattern() -> Vec<u8> {
        (0..SIZE as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    fn lengths() -> impl Iterator<Item = usize> {
        let short = (0..700).step_by(if cfg!(miri) { 47 } else { 1 });
        let long = [
            1024,
            4088,
            4096,
            4099,
            MAX_WIDE - 1,
            MAX_WIDE,
            MAX_WIDE + 7,
            MAX_WIDE + 8,
            MAX_WIDE + 9,
            MAX_WIDE + 100,
        ];
        short.chain(long).filter(|len| len + 100 <= SIZE)
    }

    type Copy = unsafe fn(*mut u8, *const u8, usize);

    /// Every copy routine that the processor supports, and its least number of bytes.
    fn copies() -> Vec<(&'static str, usize, Copy)> {
        let mut all: Vec<(_, _, Copy)> = vec![("dispatched", 0, super::copy)];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has the instructions; the rest is the caller's.
                all.push(("by 64", 64, |to, from, len| unsafe { x86::by_64(to, from, len) }));
            }
            if is_x86_feature_detected!("avx2") {
                // SAFETY: as above.
                all.push(("by 32", 32, |to, from, len| unsafe { x86::by_32(to, from, len) }));
            }
        }
        all
    }

    #[test]
    fn a_copy_changes_its_destination_only() {
        let source = pattern();
        for (name, least, copy) in copies() {
            for len in lengths().filter(|len| *len >= least) {
                for (to, from) in [(0, 0), (1, 0), (8, 3), (63, 64), (16, 33)] {
                    let mut target = vec![0xa5u8; to + len + 70];
                    // SAFETY: both ranges lie in their vectors.
                    unsafe { copy(target.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
                    let (before, rest) = target.split_at(to);
                    let (copied, after) = rest.split_at(len);
                    assert!(copied == &source[from..from + len], "{name}: {len} bytes to {to} from {from}");
                    assert!(before.iter().chain(after).all(|b| *b == 0xa5), "{name}: {len} bytes to {to}");
                }
            }
        }
    }

    /// A reader of an aligned word sees values that were stored, and no mixture.
    #[test]
    fn a_word_is_stored_whole() {
        const ROUNDS: usize = if cfg!(miri) { 50 } else { 300_000 };
        for len in [1, 2, 4, 8] {
            let word = AtomicU64::new(0);
            let end = AtomicBool::new(false);
            let whole = u64::MAX >> (64 - 8 * len);
            std::thread::scope(|scope| {
                let at = word.as_ptr().expose_provenance();
                let (word, end) = (&word, &end);
                scope.spawn(move || {
                    let at = std::ptr::with_exposed_provenance_mut::<u8>(at);
                    for round in 0..ROUNDS {
                        let value = if round % 2 == 0 { u64::MAX } else { 0 };
                        // SAFETY: the first bytes of the word.
                        unsafe { copy_in_order(at, (&raw const value).cast(), len) };
                    }
                    end.store(true, Ordering::Release);
                });
                while !end.load(Ordering::Acquire) {
                    let seen = u64::from_le(word.load(Ordering::Relaxed));
                    assert!([0, whole].contains(&seen), "{len} bytes: {seen:#x}");
                }
            });
        }
    }

    #[test]
    fn ranges_may_overlap() {
        for len in lengths().filter(|len| *len > 0) {
            for (to, from) in [(0, 1), (1, 0), (0, 40), (40, 0), (0, 100), (100, 0), (5, 5)] {
                let mut memory = pattern();
                let expected = memory[from..from + len].to_vec();
                let base = memory.as_mut_ptr();
                // SAFETY: both ranges lie in the vector.
                unsafe { copy_in_order(base.add(to), base.add(from), len) };
                assert!(memory[to..to + len] == expected, "{len} bytes to {to} from {from}");
            }
        }
    }
}
