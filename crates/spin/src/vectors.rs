//! Vector units: scalars, AVX2 and AVX-512.

use std::ops::Range;

use crate::rows::{RowUpdate, Rows, Vector, update};

/// The vector units that the update is implemented for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorUnit {
    /// No vector unit, or an unknown one.
    Portable,
    /// 256-bit vectors of x86-64.
    Avx2,
    /// 512-bit vectors of x86-64.
    Avx512,
}

impl VectorUnit {
    /// All units, the widest first.
    pub const ALL: [VectorUnit; 3] = [VectorUnit::Avx512, VectorUnit::Avx2, VectorUnit::Portable];

    /// Whether this processor has the unit.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            VectorUnit::Portable => true,
            #[cfg(target_arch = "x86_64")]
            VectorUnit::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            VectorUnit::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The widest unit of this processor.
    #[must_use]
    pub fn widest() -> VectorUnit {
        VectorUnit::ALL.into_iter().find(|unit| unit.is_available()).unwrap_or(VectorUnit::Portable)
    }
}

/// One value.
#[derive(Clone, Copy)]
struct Scalar<E>(E);

macro_rules! scalar {
    ($type:ty) => {
        impl Vector for Scalar<$type> {
            type Element = $type;
            const LANES: isize = 1;

            #[inline(always)]
            unsafe fn load(from: *const $type) -> Self {
                // SAFETY: the caller's promise.
                Self(unsafe { *from })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $type) {
                // SAFETY: the caller's promise.
                unsafe { *to = self.0 }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
            #[inline(always)]
            unsafe fn subtract(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
            #[inline(always)]
            unsafe fn multiply(self, other: Self) -> Self {
                Self(self.0 * other.0)
            }
            #[inline(always)]
            unsafe fn divide(self, other: Self) -> Self {
                Self(self.0 / other.0)
            }
            #[inline(always)]
            unsafe fn select_if_zero(self, old: Self, new: Self) -> Self {
                if self.0 == 0.0 { old } else { new }
            }
        }
    };
}

scalar!(f32);
scalar!(f64);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Range, Rows, Scalar, Vector, update};

    /// Implements one instruction set for one element type.
    macro_rules! unit {
        (
            $module:ident, $features:literal, $type:ident of $lanes:literal $element:ty;
            $load:ident, $store:ident, $add:ident, $subtract:ident, $multiply:ident, $divide:ident;
            select($value:ident, $old:ident, $new:ident) $select:expr;
        ) => {
            pub(super) mod $module {
                use super::*;

                #[derive(Clone, Copy)]
                struct Register($type);

                impl Vector for Register {
                    type Element = $element;
                    const LANES: isize = $lanes;

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
                    unsafe fn add(self, other: Self) -> Self {
                        // SAFETY: the processor has the instruction.
                        Self(unsafe { $add(self.0, other.0) })
                    }
                    #[inline(always)]
                    unsafe fn subtract(self, other: Self) -> Self {
                        // SAFETY: the processor has the instruction.
                        Self(unsafe { $subtract(self.0, other.0) })
                    }
                    #[inline(always)]
                    unsafe fn multiply(self, other: Self) -> Self {
                        // SAFETY: the processor has the instruction.
                        Self(unsafe { $multiply(self.0, other.0) })
                    }
                    #[inline(always)]
                    unsafe fn divide(self, other: Self) -> Self {
                        // SAFETY: the processor has the instruction.
                        Self(unsafe { $divide(self.0, other.0) })
                    }
                    #[inline(always)]
                    unsafe fn select_if_zero(self, old: Self, new: Self) -> Self {
                        let ($value, $old, $new) = (self.0, old.0, new.0);
                        // SAFETY: the processor has the instructions.
                        Self(unsafe { $select })
                    }
                }

                /// Updates a row.
                ///
                /// # Safety
                /// As for [`RowUpdate`](crate::rows::RowUpdate).
                #[target_feature(enable = $features)]
                pub(in super::super) unsafe fn row(rows: &Rows<$element>, range: Range<isize>) {
                    // SAFETY: the caller's promise.
                    unsafe { update::<Register, Scalar<$element>>(rows, range) };
                }
            }
        };
    }

    unit! {
        avx512_f32, "avx512f", __m512 of 16 f32;
        _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps, _mm512_div_ps;
        select(value, old, new) _mm512_mask_blend_ps(
            _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(value, _mm512_setzero_ps()), new, old);
    }
    unit! {
        avx512_f64, "avx512f", __m512d of 8 f64;
        _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_sub_pd, _mm512_mul_pd, _mm512_div_pd;
        select(value, old, new) _mm512_mask_blend_pd(
            _mm512_cmp_pd_mask::<_CMP_EQ_OQ>(value, _mm512_setzero_pd()), new, old);
    }
    unit! {
        avx2_f32, "avx2", __m256 of 8 f32;
        _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps, _mm256_div_ps;
        select(value, old, new) _mm256_blendv_ps(
            new, old, _mm256_cmp_ps::<_CMP_EQ_OQ>(value, _mm256_setzero_ps()));
    }
    unit! {
        avx2_f64, "avx2", __m256d of 4 f64;
        _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_sub_pd, _mm256_mul_pd, _mm256_div_pd;
        select(value, old, new) _mm256_blendv_pd(
            new, old, _mm256_cmp_pd::<_CMP_EQ_OQ>(value, _mm256_setzero_pd()));
    }
}

macro_rules! choose {
    ($name:ident, $portable:ident, $element:ty, $avx2:ident, $avx512:ident) => {
        /// # Safety
        /// As for [`RowUpdate`].
        unsafe fn $portable(rows: &Rows<$element>, range: Range<isize>) {
            // SAFETY: the caller's promise.
            unsafe { update::<Scalar<$element>, Scalar<$element>>(rows, range) };
        }

        /// The update for `unit`; the portable one if this processor lacks it.
        pub(crate) fn $name(unit: VectorUnit) -> RowUpdate<$element> {
            match unit {
                #[cfg(target_arch = "x86_64")]
                VectorUnit::Avx512 if unit.is_available() => x86::$avx512::row,
                #[cfg(target_arch = "x86_64")]
                VectorUnit::Avx2 if unit.is_available() => x86::$avx2::row,
                _ => $portable,
            }
        }
    };
}

choose!(update_f32, portable_f32, f32, avx2_f32, avx512_f32);
choose!(update_f64, portable_f64, f64, avx2_f64, avx512_f64);
