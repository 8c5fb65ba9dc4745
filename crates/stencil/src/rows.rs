//! The inner loops: two neighbouring rows at a time, for each vector unit.
//!
//! Two rows need four input rows instead of twice three. West and east neighbours come from registers that
//! already hold the row, so a result vector costs two loads and one store. The loop is generic over
//! [`Vector`], which each instruction set implements.

use crate::VectorUnit;
use crate::element::Element;

/// A multiple of the vector length of every unit [elements].
pub(crate) const STEP: usize = 16;

/// Computes `out[0][from..to]` and `out[1][from..to]` from the four rows that surround and contain them.
///
/// # Safety
/// `1 <= from < to`. `out` is writable in `from..to`. `rows` are readable up to and with `to`, and from
/// `from - 1` rounded down to a multiple of [`STEP`]. The two do not overlap. The processor has the vector
/// unit of the [`RowLoops`] that the function is in.
pub(crate) type RowPairFn<E> = unsafe fn(rows: [*const E; 4], out: [*mut E; 2], from: usize, to: usize);

/// The innermost loops of one element type on one vector unit.
#[derive(Clone, Copy, Debug)]
pub struct RowLoops<E> {
    /// Computes two rows with ordinary stores.
    pub(crate) pair: RowPairFn<E>,
    /// Computes two rows with non-temporal stores where the rows are aligned.
    pub(crate) non_temporal: RowPairFn<E>,
}

/// Orders non-temporal stores before later stores of this thread.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Computes one row, point by point.
///
/// # Safety
/// As for [`RowPairFn`], of three rows and one.
pub(crate) unsafe fn single<E: Element>(rows: [*const E; 3], out: *mut E, from: usize, to: usize) {
    for at in from..to {
        // SAFETY: the caller's promise.
        unsafe { point(rows, out, at) };
    }
}

/// Computes one point.
///
/// # Safety
/// As for [`single`], at one column.
#[inline(always)]
unsafe fn point<E: Element>([north, here, south]: [*const E; 3], out: *mut E, at: usize) {
    // SAFETY: the caller's.
    unsafe {
        *out.add(at) = E::average(*north.add(at), *south.add(at), *here.add(at - 1), *here.add(at + 1));
    }
}

/// Computes two rows without a vector unit.
///
/// # Safety
/// As for [`RowPairFn`].
unsafe fn portable<E: Element>(rows: [*const E; 4], out: [*mut E; 2], from: usize, to: usize) {
    let [a, b, c, d] = rows;
    // SAFETY: the caller's.
    unsafe {
        single([a, b, c], out[0], from, to);
        single([b, c, d], out[1], from, to);
    }
}

/// A vector register.
///
/// # Safety of all functions
/// The processor has the instructions. Pointers are to [`LANES`](Self::LANES) elements. Those of
/// [`store_non_temporal`](Self::store_non_temporal) are aligned to [`ALIGNMENT`](Self::ALIGNMENT).
#[cfg(target_arch = "x86_64")]
trait Vector: Copy {
    type Element: Element;
    const LANES: usize;
    const ALIGNMENT: usize = Self::LANES * Self::Element::BYTES;

    unsafe fn load(from: *const Self::Element) -> Self;
    unsafe fn store(self, to: *mut Self::Element);
    unsafe fn store_non_temporal(self, to: *mut Self::Element);
    /// As [`Element::average`], in each lane.
    unsafe fn average(north: Self, south: Self, west: Self, east: Self) -> Self;
    /// The west neighbours of `here`; `before` holds the previous lanes.
    unsafe fn west(before: Self, here: Self) -> Self;
    /// The east neighbours of `here`; `after` holds the next lanes.
    unsafe fn east(here: Self, after: Self) -> Self;
}

/// The loop of all vector units. Vectors start at multiples of their length, counted from column zero. At
/// either end, a vector that overlaps its neighbour computes the remainder, with the same values.
///
/// # Safety
/// As for [`RowPairFn`], and the processor has the instructions of `V`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn vectors<V: Vector, const NON_TEMPORAL: bool>(
    rows: [*const V::Element; 4],
    out: [*mut V::Element; 2],
    from: usize,
    to: usize,
) {
    if to - from < V::LANES {
        // SAFETY: the caller's promise.
        return unsafe { portable(rows, out, from, to) };
    }
    let [a, b, c, d] = rows;
    // SAFETY: the caller's promise; `at` is from `from` to `to - LANES`.
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
    // Non-temporal stores need aligned rows.
    let non_temporal =
        NON_TEMPORAL && out.iter().all(|&row| row.wrapping_add(at).addr().is_multiple_of(V::ALIGNMENT));
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
                if non_temporal {
                    first.store_non_temporal(out[0].add(at));
                    second.store_non_temporal(out[1].add(at));
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

    use super::{RowLoops, RowPairFn, Vector, vectors};

    /// Implements one instruction set for one element type.
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
                        // SAFETY: the caller's promise.
                        Self(unsafe { $load(from) })
                    }

                    #[inline(always)]
                    unsafe fn store(self, to: *mut $element) {
                        // SAFETY: the caller's promise.
                        unsafe { $store(to, self.0) }
                    }

                    #[inline(always)]
                    unsafe fn store_non_temporal(self, to: *mut $element) {
                        // SAFETY: the caller's promise.
                        unsafe { $stream(to, self.0) }
                    }

                    #[inline(always)]
                    unsafe fn average(north: Self, south: Self, west: Self, east: Self) -> Self {
                        // SAFETY: the caller's promise.
                        unsafe {
                            let sum = $add($add(north.0, south.0), $add(west.0, east.0));
                            Self($multiply(sum, $set(0.25)))
                        }
                    }

                    #[inline(always)]
                    unsafe fn west(before: Self, here: Self) -> Self {
                        let ($before, $west_here) = (before.0, here.0);
                        // SAFETY: the caller's promise.
                        Self(unsafe { $west })
                    }

                    #[inline(always)]
                    unsafe fn east(here: Self, after: Self) -> Self {
                        let ($east_here, $after) = (here.0, after.0);
                        // SAFETY: the caller's promise.
                        Self(unsafe { $east })
                    }
                }

                #[target_feature(enable = $features)]
                unsafe fn pair(rows: [*const $element; 4], out: [*mut $element; 2], from: usize, to: usize) {
                    // SAFETY: the caller's promise.
                    unsafe { vectors::<Register, false>(rows, out, from, to) }
                }

                #[target_feature(enable = $features)]
                unsafe fn non_temporal(
                    rows: [*const $element; 4],
                    out: [*mut $element; 2],
                    from: usize,
                    to: usize,
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { vectors::<Register, true>(rows, out, from, to) }
                }

                pub(in super::super) const ROWS: RowLoops<$element> = RowLoops {
                    pair: pair as RowPairFn<$element>,
                    non_temporal: non_temporal as RowPairFn<$element>,
                };
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

fn portable_loops<E: Element>() -> RowLoops<E> {
    RowLoops { pair: portable::<E>, non_temporal: portable::<E> }
}

macro_rules! choose {
    ($name:ident, $element:ty, $avx2:ident, $avx512:ident) => {
        /// The loops for `unit`; portable ones if this processor lacks it.
        pub(crate) fn $name(unit: VectorUnit) -> RowLoops<$element> {
            match unit {
                #[cfg(target_arch = "x86_64")]
                VectorUnit::Avx512 if unit.is_available() => x86::$avx512::ROWS,
                #[cfg(target_arch = "x86_64")]
                VectorUnit::Avx2 if unit.is_available() => x86::$avx2::ROWS,
                _ => portable_loops(),
            }
        }
    };
}

choose!(of_f32, f32, avx2_f32, avx512_f32);
choose!(of_f64, f64, avx2_f64, avx512_f64);
