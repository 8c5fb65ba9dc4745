//! Two neighbouring rows at a time: the innermost loops, for every kind of vector unit.
//!
//! Two rows take four rows of input instead of twice three, and the western and eastern neighbours come out
//! of registers that hold the row already, so that a vector of results costs two loads and one store. All
//! that is written here once, over [`Vector`]; the instruction sets below fill it in.

use crate::Unit;
use crate::element::Element;

/// Columns that divide into whole vectors on every unit.
pub(crate) const STEP: usize = 16;

/// `out[0][from..to]` and `out[1][from..to]` from the four rows that surround and contain them.
///
/// # Safety
/// `1 <= from < to`. `out` is writable in `from..to`, `rows` are readable up to and with `to`, and from
/// `from - 1` rounded down to a multiple of [`STEP`]; the two do not overlap. The processor has the vector
/// unit of the [`Rows`] that the function is in.
pub(crate) type Pair<E> = unsafe fn(rows: [*const E; 4], out: [*mut E; 2], from: usize, to: usize);

/// The innermost loops of one element type on one vector unit.
#[derive(Clone, Copy, Debug)]
pub struct Rows<E> {
    /// Two rows, to be read again soon.
    pub(crate) pair: Pair<E>,
    /// Two rows, not to be read again soon: their stores pass the caches by where they can.
    pub(crate) stream: Pair<E>,
}

/// Makes streamed stores visible before what this thread stores next.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// One row, plainly.
///
/// # Safety
/// As for [`Pair`], of three rows and one.
pub(crate) unsafe fn single<E: Element>(rows: [*const E; 3], out: *mut E, from: usize, to: usize) {
    for at in from..to {
        // SAFETY: the caller's.
        unsafe { point(rows, out, at) };
    }
}

/// # Safety
/// As for [`single`], at one place.
#[inline(always)]
unsafe fn point<E: Element>([north, here, south]: [*const E; 3], out: *mut E, at: usize) {
    // SAFETY: the caller's.
    unsafe {
        *out.add(at) = E::average(*north.add(at), *south.add(at), *here.add(at - 1), *here.add(at + 1));
    }
}

/// Without a vector unit that we know.
///
/// # Safety
/// As for [`Pair`].
unsafe fn portable<E: Element>(rows: [*const E; 4], out: [*mut E; 2], from: usize, to: usize) {
    let [a, b, c, d] = rows;
    // SAFETY: the caller's.
    unsafe {
        single([a, b, c], out[0], from, to);
        single([b, c, d], out[1], from, to);
    }
}

/// A register of several elements.
///
/// # Safety of all functions
/// The processor has the instructions; pointers are to [`LANES`](Self::LANES) elements; those of
/// [`stream`](Self::stream) are aligned to [`ALIGNMENT`](Self::ALIGNMENT).
trait Vector: Copy {
    type Element: Element;
    const LANES: usize;
    const ALIGNMENT: usize = Self::LANES * Self::Element::BYTES;

    unsafe fn load(from: *const Self::Element) -> Self;
    unsafe fn store(self, to: *mut Self::Element);
    unsafe fn stream(self, to: *mut Self::Element);
    /// As [`Element::average`], in each lane.
    unsafe fn average(north: Self, south: Self, west: Self, east: Self) -> Self;
    /// The western neighbours of `here`; `before` are the lanes that come first.
    unsafe fn west(before: Self, here: Self) -> Self;
    /// The eastern neighbours of `here`; `after` are the lanes that follow.
    unsafe fn east(here: Self, after: Self) -> Self;
}

/// The loop of all vector units. Whole vectors stand at multiples of their length, counted from column zero;
/// what is left over at either end is computed by a vector that overlaps its neighbour, to the same values.
///
/// # Safety
/// As for [`Pair`], and the processor has the instructions of `V`.
#[inline(always)]
unsafe fn vectors<V: Vector, const STREAM: bool>(
    rows: [*const V::Element; 4],
    out: [*mut V::Element; 2],
    from: usize,
    to: usize,
) {
    if to - from < V::LANES {
        // SAFETY: the caller's.
        return unsafe { portable(rows, out, from, to) };
    }
    let [a, b, c, d] = rows;
    // SAFETY: the caller's; `at` is from `from` to `to - LANES`.
    let unaligned = |at: usize| unsafe {
        let near = |row: *const V::Element| (V::load(row.add(at - 1)), V::load(row.add(at + 1)));
        let ((bw, be), (cw, ce)) = (near(b), near(c));
        let first = V::average(V::load(a.add(at)), V::load(c.add(at)), bw, be);
        let second = V::average(V::load(b.add(at)), V::load(d.add(at)), cw, ce);
        first.store(out[0].add(at));
        second.store(out[1].add(at));
    };
    let mut at = from.next_multiple_of(V::LANES);
    if at != from {
        unaligned(from);
    }
    // Only rows that stand right can be stored past the caches.
    let streams = STREAM && out.iter().all(|&row| row.wrapping_add(at).addr().is_multiple_of(V::ALIGNMENT));
    // SAFETY: the caller's. The furthest load ends at column `to`; the first begins at the last multiple of
    // `LANES` that is not after `from - 1`.
    unsafe {
        if at + 2 * V::LANES <= to + 1 {
            let before = |row: *const V::Element| V::load(row.add(at - V::LANES));
            let (mut b_west, mut c_west) = (before(b), before(c));
            let (mut b_here, mut c_here) = (V::load(b.add(at)), V::load(c.add(at)));
            while at + 2 * V::LANES <= to + 1 {
                let (b_east, c_east) = (V::load(b.add(at + V::LANES)), V::load(c.add(at + V::LANES)));
                let first =
                    V::average(V::load(a.add(at)), c_here, V::west(b_west, b_here), V::east(b_here, b_east));
                let second =
                    V::average(b_here, V::load(d.add(at)), V::west(c_west, c_here), V::east(c_here, c_east));
                if streams {
                    first.stream(out[0].add(at));
                    second.stream(out[1].add(at));
                } else {
                    first.store(out[0].add(at));
                    second.store(out[1].add(at));
                }
                (b_west, b_here, c_west, c_here) = (b_here, b_east, c_here, c_east);
                at += V::LANES;
            }
        }
    }
    while at < to {
        unaligned(at.min(to - V::LANES));
        at += V::LANES;
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! AVX2 and AVX-512.

    use std::arch::x86_64::*;

    use super::{Pair, Rows, Vector, vectors};

    /// Fills in one instruction set for one element type.
    macro_rules! unit {
        (
            $module:ident, $features:literal, $type:ident of $lanes:literal $element:ty;
            $load:ident, $store:ident, $stream:ident, $add:ident, $multiply:ident, $set:ident;
            west($before:ident, $west_here:ident) $west:expr;
            east($east_here:ident, $after:ident) $east:expr;
        ) => {
            pub(super) mod $module {
                use super::*;

                #[derive(Clone, Copy)]
                struct Register($type);

                impl Vector for Register {
                    type Element = $element;
                    const LANES: usize = $lanes;

                    #[inline(always)]
                    unsafe fn load(from: *const $element) -> Self {
                        // SAFETY: the caller's.
                        Self(unsafe { $load(from) })
                    }

                    #[inline(always)]
                    unsafe fn store(self, to: *mut $element) {
                        // SAFETY: the caller's.
                        unsafe { $store(to, self.0) }
                    }

                    #[inline(always)]
                    unsafe fn stream(self, to: *mut $element) {
                        // SAFETY: the caller's.
                        unsafe { $stream(to, self.0) }
                    }

                    #[inline(always)]
                    unsafe fn average(north: Self, south: Self, west: Self, east: Self) -> Self {
                        // SAFETY: the caller's.
                        unsafe {
                            let sum = $add($add(north.0, south.0), $add(west.0, east.0));
                            Self($multiply(sum, $set(0.25)))
                        }
                    }

                    #[inline(always)]
                    unsafe fn west(before: Self, here: Self) -> Self {
                        let ($before, $west_here) = (before.0, here.0);
                        // SAFETY: the caller's.
                        Self(unsafe { $west })
                    }

                    #[inline(always)]
                    unsafe fn east(here: Self, after: Self) -> Self {
                        let ($east_here, $after) = (here.0, after.0);
                        // SAFETY: the caller's.
                        Self(unsafe { $east })
                    }
                }

                #[target_feature(enable = $features)]
                unsafe fn pair(rows: [*const $element; 4], out: [*mut $element; 2], from: usize, to: usize) {
                    // SAFETY: the caller's.
                    unsafe { vectors::<Register, false>(rows, out, from, to) }
                }

                #[target_feature(enable = $features)]
                unsafe fn stream(
                    rows: [*const $element; 4],
                    out: [*mut $element; 2],
                    from: usize,
                    to: usize,
                ) {
                    // SAFETY: the caller's.
                    unsafe { vectors::<Register, true>(rows, out, from, to) }
                }

                pub(in super::super) const ROWS: Rows<$element> =
                    Rows { pair: pair as Pair<$element>, stream: stream as Pair<$element> };
            }
        };
    }

    unit! {
        avx512_f32, "avx512f", __m512 of 16 f32;
        _mm512_loadu_ps, _mm512_storeu_ps, _mm512_stream_ps, _mm512_add_ps, _mm512_mul_ps, _mm512_set1_ps;
        west(before, here) _mm512_castsi512_ps(_mm512_alignr_epi32::<15>(
            _mm512_castps_si512(here), _mm512_castps_si512(before)));
        east(here, after) _mm512_castsi512_ps(_mm512_alignr_epi32::<1>(
            _mm512_castps_si512(after), _mm512_castps_si512(here)));
    }
    unit! {
        avx512_f64, "avx512f", __m512d of 8 f64;
        _mm512_loadu_pd, _mm512_storeu_pd, _mm512_stream_pd, _mm512_add_pd, _mm512_mul_pd, _mm512_set1_pd;
        west(before, here) _mm512_castsi512_pd(_mm512_alignr_epi64::<7>(
            _mm512_castpd_si512(here), _mm512_castpd_si512(before)));
        east(here, after) _mm512_castsi512_pd(_mm512_alignr_epi64::<1>(
            _mm512_castpd_si512(after), _mm512_castpd_si512(here)));
    }
    unit! {
        avx2_f32, "avx2", __m256 of 8 f32;
        _mm256_loadu_ps, _mm256_storeu_ps, _mm256_stream_ps, _mm256_add_ps, _mm256_mul_ps, _mm256_set1_ps;
        west(before, here) {
            let across = _mm256_permute2f128_ps::<0x21>(before, here);
            _mm256_castsi256_ps(_mm256_alignr_epi8::<12>(_mm256_castps_si256(here), _mm256_castps_si256(across)))
        };
        east(here, after) {
            let across = _mm256_permute2f128_ps::<0x21>(here, after);
            _mm256_castsi256_ps(_mm256_alignr_epi8::<4>(_mm256_castps_si256(across), _mm256_castps_si256(here)))
        };
    }
    unit! {
        avx2_f64, "avx2", __m256d of 4 f64;
        _mm256_loadu_pd, _mm256_storeu_pd, _mm256_stream_pd, _mm256_add_pd, _mm256_mul_pd, _mm256_set1_pd;
        west(before, here) {
            let across = _mm256_permute2f128_pd::<0x21>(before, here);
            _mm256_castsi256_pd(_mm256_alignr_epi8::<8>(_mm256_castpd_si256(here), _mm256_castpd_si256(across)))
        };
        east(here, after) {
            let across = _mm256_permute2f128_pd::<0x21>(here, after);
            _mm256_castsi256_pd(_mm256_alignr_epi8::<8>(_mm256_castpd_si256(across), _mm256_castpd_si256(here)))
        };
    }
}

fn plain<E: Element>() -> Rows<E> {
    Rows { pair: portable::<E>, stream: portable::<E> }
}

macro_rules! choose {
    ($name:ident, $element:ty, $avx2:ident, $avx512:ident) => {
        /// The loops for `unit`, which this processor must have; without it, portable ones.
        pub(crate) fn $name(unit: Unit) -> Rows<$element> {
            match unit {
                #[cfg(target_arch = "x86_64")]
                Unit::Avx512 if unit.is_here() => x86::$avx512::ROWS,
                #[cfg(target_arch = "x86_64")]
                Unit::Avx2 if unit.is_here() => x86::$avx2::ROWS,
                _ => plain(),
            }
        }
    };
}

choose!(of_f32, f32, avx2_f32, avx512_f32);
choose!(of_f64, f64, avx2_f64, avx512_f64);
