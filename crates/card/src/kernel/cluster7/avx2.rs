//! The arithmetic for x86-64 processors with AVX2, spelled out: the compiler does not find byte
//! transpositions by itself, and what it makes of the sums changes with every touch of the code.

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_add_epi16, _mm256_cmpgt_epi16, _mm256_extract_epi64, _mm256_loadu_si256,
    _mm256_packus_epi16, _mm256_permute4x64_epi64, _mm256_set_m128i, _mm256_set1_epi16, _mm256_setzero_si256,
    _mm256_storeu_si256, _mm256_sub_epi16, _mm256_unpackhi_epi8, _mm256_unpackhi_epi16,
    _mm256_unpackhi_epi32, _mm256_unpacklo_epi8, _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
};

use super::decide::{CRATE_PATCHES, CRATE_STRIDE, Eight, Inputs, LANES, Lanes, Traces};

/// Turns the traces, sample by sample, into rows, patch by patch: 16 samples of 16 patches at a time.
///
/// A vector starts with sample `i` of 16 patches in its lower half and sample `i + 8` in its upper
/// half. Three rounds of interleaving leave eight samples of two patches in each half, in order;
/// interleaving those with zeros leaves 16 samples of one patch, widened to 16 bits.
#[target_feature(enable = "avx2")]
pub(super) fn spread(traces: &Traces, halves: &mut [Vec<Lanes>; 2]) {
    for (index, crate_traces) in traces.crates().iter().enumerate() {
        let (groups, _) = crate_traces.as_chunks::<{ 16 * CRATE_STRIDE }>();
        for (group, samples) in groups.iter().enumerate() {
            let (half, group) = (16 * group / LANES, group % (LANES / 16));
            let rows = &mut halves[half][index * CRATE_PATCHES..][..CRATE_PATCHES];
            for (block, rows) in rows.chunks_exact_mut(16).enumerate() {
                let vectors = std::array::from_fn(|sample| {
                    let at = |sample| sample * CRATE_STRIDE + 16 * block;
                    load(&samples[at(sample)..], &samples[at(sample + 8)..])
                });
                for (pair, samples) in rows.chunks_exact_mut(2).zip(interleave(vectors)) {
                    let zero = _mm256_setzero_si256();
                    store(&mut pair[0], group, _mm256_unpacklo_epi8(samples, zero));
                    store(&mut pair[1], group, _mm256_unpackhi_epi8(samples, zero));
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
    // Patches 0–3, 4–7, 8–11, 12–15; of each, samples 0–3 and samples 4–7.
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

/// The decisions of eight neighbouring positions: a byte per sample, packed into words.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn decide_eight(rows: &[Lanes], inputs: &[Inputs; 8], threshold: i16) -> Eight {
    let threshold = _mm256_set1_epi16(threshold);
    let mut decided = [_mm256_setzero_si256(); 2];
    // From the highest bit down: each round doubles what is there and adds its own bit, which is
    // minus one where the comparison holds.
    for inputs in inputs.iter().rev() {
        let mut sums = [_mm256_setzero_si256(); 2];
        for &input in inputs {
            let row = &rows[usize::from(input)];
            sums = [
                _mm256_add_epi16(sums[0], load_lanes(row, 0)),
                _mm256_add_epi16(sums[1], load_lanes(row, 1)),
            ];
        }
        decided = [0, 1].map(|part| {
            let doubled = _mm256_add_epi16(decided[part], decided[part]);
            _mm256_sub_epi16(doubled, _mm256_cmpgt_epi16(sums[part], threshold))
        });
    }
    // Packing works on the two halves of a vector separately; the permutation restores the order.
    let bytes = _mm256_packus_epi16(decided[0], decided[1]);
    let bytes = _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes);
    [
        _mm256_extract_epi64::<0>(bytes) as u64,
        _mm256_extract_epi64::<1>(bytes) as u64,
        _mm256_extract_epi64::<2>(bytes) as u64,
        _mm256_extract_epi64::<3>(bytes) as u64,
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_lanes(row: &Lanes, part: usize) -> __m256i {
    let lanes = &row.0.as_chunks::<16>().0[part];
    // SAFETY: reads the 16 lanes of the array, 32 bytes.
    unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
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
fn store(row: &mut Lanes, group: usize, samples: __m256i) {
    let lanes = &mut row.0.as_chunks_mut::<16>().0[group];
    // SAFETY: writes the 16 lanes of the array, 32 bytes.
    unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), samples) };
}
