//! The trigger's transposition and bound with AVX2 intrinsics.
//!
//! The compiler does not vectorise byte transpositions, and its code for the bound changes with unrelated
//! edits.

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm_storeu_si128, _mm256_adds_epu8, _mm256_avg_epu8, _mm256_castsi256_si128,
    _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_or_si256, _mm256_permute4x64_epi64,
    _mm256_set_m128i, _mm256_set1_epi8, _mm256_setzero_si256, _mm256_subs_epu8, _mm256_testz_si256,
    _mm256_unpackhi_epi8, _mm256_unpackhi_epi16, _mm256_unpackhi_epi32, _mm256_unpacklo_epi8,
    _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
};

use super::{ClusterRows, PATCHES_PER_CRATE, SampleRow, TRACE_STRIDE, TriggerTraces};

/// Transposes the traces into one row per patch, 16 samples of 16 patches at a time.
///
/// A vector starts with sample `i` of 16 patches in its lower half and sample `i + 8` in its upper
/// half. Three rounds of interleaving leave eight samples of two patches in each half, in order.
/// Exchanging the middle quarters leaves 16 samples of one patch in each half.
#[target_feature(enable = "avx2")]
pub(super) fn transpose(traces: &TriggerTraces, rows: &mut [SampleRow]) {
    for (index, crate_traces) in traces.crates.iter().enumerate() {
        let rows = &mut rows[index * PATCHES_PER_CRATE..][..PATCHES_PER_CRATE];
        let (groups, _) = crate_traces.as_chunks::<{ 16 * TRACE_STRIDE }>();
        for (group, samples) in groups.iter().enumerate() {
            for (block, rows) in rows.chunks_exact_mut(16).enumerate() {
                let vectors = std::array::from_fn(|sample| {
                    let at = |sample| sample * TRACE_STRIDE + 16 * block;
                    load(&samples[at(sample)..], &samples[at(sample + 8)..])
                });
                for (pair, samples) in rows.chunks_exact_mut(2).zip(interleave(vectors)) {
                    let [one, other] = pair else { unreachable!("chunks of two") };
                    store(&mut one.0, &mut other.0, group, samples);
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn interleave(v: [__m256i; 8]) -> [__m256i; 8] {
    let (a, b) = (
        [0, 2, 4, 6].map(|i| _mm256_unpacklo_epi8(v[i], v[i + 1])),
        [0, 2, 4, 6].map(|i| _mm256_unpackhi_epi8(v[i], v[i + 1])),
    );
    // Patches 0–3, 4–7, 8–11, 12–15, each as samples 0–3 and samples 4–7.
    let quads = [
        [_mm256_unpacklo_epi16(a[0], a[1]), _mm256_unpacklo_epi16(a[2], a[3])],
        [_mm256_unpackhi_epi16(a[0], a[1]), _mm256_unpackhi_epi16(a[2], a[3])],
        [_mm256_unpacklo_epi16(b[0], b[1]), _mm256_unpacklo_epi16(b[2], b[3])],
        [_mm256_unpackhi_epi16(b[0], b[1]), _mm256_unpackhi_epi16(b[2], b[3])],
    ];
    let [one, two, three, four] =
        quads.map(|[early, late]| [_mm256_unpacklo_epi32(early, late), _mm256_unpackhi_epi32(early, late)]);
    [one[0], one[1], two[0], two[1], three[0], three[1], four[0], four[1]]
}

/// Whether the upper bound of a cluster's sum exceeds `limit` in any sample.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn may_exceed(rows: &[SampleRow], inputs: &ClusterRows, limit: u8) -> bool {
    let zero = _mm256_setzero_si256();
    let mut bounds = [zero; 2];
    for &input in inputs {
        let samples = load_row(&rows[usize::from(input)]);
        // The average with zero, rounded up, is half of the sample, rounded up.
        bounds = [
            _mm256_adds_epu8(bounds[0], _mm256_avg_epu8(samples[0], zero)),
            _mm256_adds_epu8(bounds[1], _mm256_avg_epu8(samples[1], zero)),
        ];
    }
    let limit = _mm256_set1_epi8(limit as i8);
    let [one, other] = bounds.map(|bound| _mm256_subs_epu8(bound, limit));
    let above = _mm256_or_si256(one, other);
    _mm256_testz_si256(above, above) == 0
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(lower: &[u8], upper: &[u8]) -> __m256i {
    let half = |bytes: &[u8]| {
        let bytes = bytes.first_chunk::<16>().expect("patches of one sample");
        // SAFETY: reads the 16 bytes of the array.
        unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
    };
    _mm256_set_m128i(half(upper), half(lower))
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_row(row: &SampleRow) -> [__m256i; 2] {
    let halves = row.0.as_chunks::<32>().0;
    // SAFETY: each reads the 32 bytes of an array.
    [0, 1].map(|half| unsafe { _mm256_loadu_si256(halves[half].as_ptr().cast()) })
}

/// Stores 16 samples of two patches as group `group` of their rows.
#[inline]
#[target_feature(enable = "avx2")]
fn store(one: &mut [u8], other: &mut [u8], group: usize, samples: __m256i) {
    let samples = _mm256_permute4x64_epi64::<0b11_01_10_00>(samples);
    let halves = [_mm256_castsi256_si128(samples), _mm256_extracti128_si256::<1>(samples)];
    for (row, samples) in [one, other].into_iter().zip(halves) {
        let bytes = &mut row.as_chunks_mut::<16>().0[group];
        // SAFETY: writes the 16 bytes of the array.
        unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), samples) };
    }
}
