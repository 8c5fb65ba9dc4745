//! The arithmetic of the camera's trigger: 50 samples of 432 patches in, 50 × 432 decision bits out.
//!
//! The traces come sample by sample, the sums want patch by patch: with the 50 samples of a patch
//! side by side, adding the seven patches of a cluster is seven vector additions, and the eight
//! rows that share an output byte build it with vector shifts. So the traces are transposed, summed,
//! and the decisions transposed back. Every loop runs over whole arrays in plain Rust, which the
//! compiler turns into vector code; [`Decider`] picks the widest unit that the processor has.

#[cfg(target_arch = "x86_64")]
use super::avx2;
use crate::geometry::{CLUSTER, Geometry, PATCHES};

/// Samples of a trace.
pub const SAMPLES: usize = 50;

/// Crates that the traces come from.
pub const CRATES: usize = 3;

/// Bytes that one crate sends per sample; the first [`CRATE_PATCHES`] are used.
pub(crate) const CRATE_STRIDE: usize = 192;

/// Patches of one crate.
pub(crate) const CRATE_PATCHES: usize = PATCHES / CRATES;

/// Trigger traces of one crate for one event [bytes].
pub const TRACE_BYTES: usize = SAMPLES * CRATE_STRIDE;

/// Decision bits of one sample [bytes].
const SAMPLE_BYTES: usize = PATCHES / 8;

/// Decision bits of one event [bytes]: sample by sample, by decision position, least significant
/// bit first.
pub const DECISION_BYTES: usize = SAMPLES * SAMPLE_BYTES;

/// Samples in a row. An event takes two rows per patch, the second one padded with zeros: all rows
/// of one half fit into the first-level cache, those of both would not.
pub(super) const LANES: usize = 32;

/// The row of zeros that stands for "no neighbour".
const NOBODY: usize = PATCHES;

/// Traces of the three crates, as their fragments hold them, with room for whole blocks.
pub(crate) struct Traces {
    crates: Vec<[u8; 2 * LANES * CRATE_STRIDE]>,
}

impl Traces {
    pub(crate) fn new() -> Traces {
        Traces { crates: vec![[0; _]; CRATES] }
    }

    pub(super) fn crates(&self) -> &[[u8; 2 * LANES * CRATE_STRIDE]] {
        &self.crates
    }

    /// Where the fragment of crate `index` (0, 1, 2) goes.
    pub(crate) fn of_crate(&mut self, index: usize) -> &mut [u8; TRACE_BYTES] {
        self.crates[index].first_chunk_mut().expect("room for more than the samples")
    }
}

/// The samples of one patch side by side.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Lanes(pub(super) [u16; LANES]);

/// Where a cluster's inputs are: indices into the rows, `NOBODY` for none.
pub(super) type Inputs = [u16; CLUSTER];

/// Decisions of eight positions for the samples of a row: a byte per sample, packed into words.
pub(super) type Eight = [u64; LANES / 8];

/// What an event's decisions amount to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Decision bits set.
    pub(crate) set: u32,
    /// Sample and decision position of the first bit set, by sample and then by position.
    pub(crate) first: Option<(u16, u16)>,
}

/// Computes decisions. Holds all memory that this takes.
pub(crate) struct Decider {
    /// For each half of the samples a row for each trace position, and one of zeros.
    rows: [Vec<Lanes>; 2],
    inputs: Vec<Inputs>,
    vector: bool,
}

/// True if this processor has the vector unit that the code is also compiled for.
pub(crate) fn has_vector_unit() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("popcnt");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has
}

impl Decider {
    pub(crate) fn new() -> Decider {
        Decider {
            rows: [(); 2].map(|()| vec![Lanes([0; LANES]); PATCHES + 1]),
            inputs: vec![[NOBODY as u16; CLUSTER]; PATCHES],
            vector: has_vector_unit(),
        }
    }

    /// Uses this geometry from now on.
    pub(crate) fn set_geometry(&mut self, geometry: &Geometry) {
        for (inputs, row) in self.inputs.iter_mut().zip(geometry.rows()) {
            *inputs = row.traces.map(|trace| u16::try_from(trace).unwrap_or(NOBODY as u16));
        }
    }

    /// Sets the bit of each sample and decision position where the cluster's sum exceeds
    /// `threshold`.
    pub(crate) fn decide(
        &mut self,
        traces: &Traces,
        threshold: u32,
        decisions: &mut [u8; DECISION_BYTES],
    ) -> Outcome {
        // No sum comes near this.
        let threshold = threshold.min(i16::MAX as u32) as i16;
        #[cfg(target_arch = "x86_64")]
        if self.vector {
            // SAFETY: `vector` says that the processor has these features.
            return unsafe { decide_avx2(self, traces, threshold, decisions) };
        }
        spread(traces, &mut self.rows);
        self.collect(decisions, |rows, inputs| decide_eight(rows, inputs, threshold))
    }

    /// Calls `decide_eight` for each half of the samples and each eight positions, and puts what it
    /// finds into the order of the output.
    #[inline(always)]
    fn collect(
        &self,
        decisions: &mut [u8; DECISION_BYTES],
        decide_eight: impl Fn(&[Lanes], &[Inputs; 8]) -> Eight,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        let mut first_sample = SAMPLES;
        decisions.fill(0);
        for (half, rows) in self.rows.iter().enumerate() {
            // Eight output bytes at a time, because the way back is a transposition of 8 × 8 bytes. The
            // last group of 54 bytes has only six.
            for (group, inputs) in self.inputs.chunks(64).enumerate() {
                let mut bytes = [[0; LANES / 8]; 8];
                for (byte, inputs) in bytes.iter_mut().zip(inputs.as_chunks().0) {
                    *byte = decide_eight(rows, inputs);
                }
                if bytes.iter().flatten().all(|&word| word == 0) {
                    continue;
                }
                transpose(&mut bytes);
                let used = inputs.len() / 8;
                for (within, blocks) in bytes.iter().enumerate() {
                    for (block, word) in blocks.iter().enumerate().filter(|(_, word)| **word != 0) {
                        let sample = half * LANES + 8 * block + within;
                        outcome.set += word.count_ones();
                        first_sample = first_sample.min(sample);
                        let at = sample * SAMPLE_BYTES + 8 * group;
                        decisions[at..at + used].copy_from_slice(&word.to_le_bytes()[..used]);
                    }
                }
            }
        }
        if let Some(sample) = decisions.chunks_exact(SAMPLE_BYTES).nth(first_sample) {
            let at = sample.iter().position(|&byte| byte != 0);
            let at = at.expect("a sample is first because it has a bit set");
            let position = 8 * at as u32 + sample[at].trailing_zeros();
            outcome.first = Some((first_sample as u16, position as u16));
        }
        outcome
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi2,popcnt")]
fn decide_avx2(
    decider: &mut Decider,
    traces: &Traces,
    threshold: i16,
    decisions: &mut [u8; DECISION_BYTES],
) -> Outcome {
    avx2::spread(traces, &mut decider.rows);
    decider.collect(decisions, |rows, inputs| avx2::decide_eight(rows, inputs, threshold))
}

/// Turns the traces, sample by sample, into rows, patch by patch.
fn spread(traces: &Traces, halves: &mut [Vec<Lanes>; 2]) {
    for (index, crate_traces) in traces.crates().iter().enumerate() {
        for (sample, patches) in crate_traces.chunks_exact(CRATE_STRIDE).enumerate() {
            let rows = &mut halves[sample / LANES][index * CRATE_PATCHES..];
            for (row, patch) in rows.iter_mut().zip(&patches[..CRATE_PATCHES]) {
                row.0[sample % LANES] = u16::from(*patch);
            }
        }
    }
}

/// The decisions of eight neighbouring positions.
fn decide_eight(rows: &[Lanes], inputs: &[Inputs; 8], threshold: i16) -> Eight {
    let mut words = [0; LANES / 8];
    for (bit, inputs) in inputs.iter().enumerate() {
        let mut sums = [0; LANES];
        for &input in inputs {
            for (sum, sample) in sums.iter_mut().zip(&rows[usize::from(input)].0) {
                *sum += sample;
            }
        }
        for (word, sums) in words.iter_mut().zip(sums.as_chunks::<8>().0) {
            let above = sums.map(|sum| u8::from(sum > threshold as u16));
            *word |= u64::from_le_bytes(above) << bit;
        }
    }
    words
}

/// Transposes `N` blocks of 8 × 8 bytes: byte `j` of word `i` becomes byte `i` of word `j`.
///
/// Three rounds swap the off-diagonal quarters of 8 × 8, 4 × 4 and 2 × 2 bytes, in all blocks side by
/// side.
#[inline(always)]
fn transpose<const N: usize>(words: &mut [[u64; N]; 8]) {
    for upper in [0, 1, 2, 3] {
        swap_quarters::<N, 4>(words, upper, 0x0000_0000_ffff_ffff);
    }
    for upper in [0, 1, 4, 5] {
        swap_quarters::<N, 2>(words, upper, 0x0000_ffff_0000_ffff);
    }
    for upper in [0, 2, 4, 6] {
        swap_quarters::<N, 1>(words, upper, 0x00ff_00ff_00ff_00ff);
    }
}

#[inline(always)]
fn swap_quarters<const N: usize, const DISTANCE: usize>(words: &mut [[u64; N]; 8], upper: usize, mask: u64) {
    let rows = words.get_disjoint_mut([upper, upper + DISTANCE]);
    let [one, other] = rows.expect("two different rows of eight");
    for (one, other) in one.iter_mut().zip(other) {
        let swap = ((*one >> (8 * DISTANCE)) ^ *other) & mask;
        *one ^= swap << (8 * DISTANCE);
        *other ^= swap;
    }
}

/// The same rule as plainly as it can be said, to compare with.
#[cfg(test)]
pub(crate) fn oracle(traces: [&[u8]; CRATES], geometry: &Geometry, threshold: u32) -> (Vec<u8>, Outcome) {
    let mut decisions = vec![0; DECISION_BYTES];
    let mut outcome = Outcome::default();
    for sample in 0..SAMPLES {
        for (position, row) in geometry.rows().iter().enumerate() {
            let trace = |at: usize| traces[at / CRATE_PATCHES][sample * CRATE_STRIDE + at % CRATE_PATCHES];
            let present = row.traces.iter().filter(|&&at| at >= 0);
            let sum: u32 = present.map(|&at| u32::from(trace(at as usize))).sum();
            if sum > threshold {
                decisions[sample * SAMPLE_BYTES + position / 8] |= 1 << (position % 8);
                outcome.set += 1;
                outcome.first.get_or_insert((sample as u16, position as u16));
            }
        }
    }
    (decisions, outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::GEOMETRY_BYTES;
    use proptest::prelude::*;

    #[test]
    fn transposing_twice_is_nothing_and_once_swaps() {
        let original: [[u64; 3]; 8] =
            std::array::from_fn(|i| [i as u64 * 0x0101, 0x8070_6050_4030_2010 + i as u64, 7]);
        let mut words = original;
        transpose(&mut words);
        for block in 0..3 {
            for (i, j) in (0..8).flat_map(|i| (0..8).map(move |j| (i, j))) {
                assert_eq!(words[j][block].to_le_bytes()[i], original[i][block].to_le_bytes()[j]);
            }
        }
        transpose(&mut words);
        assert_eq!(words, original);
    }

    fn any_geometry() -> impl Strategy<Value = Geometry> {
        proptest::collection::vec(-1i16..PATCHES as i16, PATCHES * 8).prop_map(|entries| {
            let mut bytes = Vec::new();
            for (at, entry) in entries.into_iter().enumerate() {
                let entry = if at % 8 == CLUSTER { entry.max(0) } else { entry };
                bytes.extend(entry.to_le_bytes());
            }
            let bytes: [u8; GEOMETRY_BYTES] = bytes.try_into().unwrap();
            Geometry::from_bytes(&bytes).unwrap()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn decisions_are_those_of_the_oracle(
            geometry in any_geometry(),
            noise in proptest::collection::vec(any::<u8>(), CRATES * TRACE_BYTES),
            threshold in prop_oneof![0u32..1800, Just(u32::MAX)],
            brightness in 0u32..=8,
        ) {
            // Dimmed, so that few or many sums exceed the threshold.
            let noise: Vec<u8> = noise.iter().map(|byte| (u32::from(*byte) * brightness / 8) as u8)
                .collect();
            let fragments: Vec<&[u8]> = noise.chunks_exact(TRACE_BYTES).collect();
            let mut traces = Traces::new();
            for (index, fragment) in fragments.iter().enumerate() {
                traces.of_crate(index).copy_from_slice(fragment);
            }
            let expected = oracle([fragments[0], fragments[1], fragments[2]], &geometry, threshold);

            let mut decider = Decider::new();
            decider.set_geometry(&geometry);
            for vector in [decider.vector, false] {
                decider.vector = vector;
                let mut decisions = [0xff; DECISION_BYTES];
                let outcome = decider.decide(&traces, threshold, &mut decisions);
                prop_assert_eq!((decisions.to_vec(), outcome), expected.clone());
            }
        }
    }
}
