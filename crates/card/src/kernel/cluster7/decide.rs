//! The arithmetic of the camera's trigger: 50 samples of 432 patches in, 50 × 432 decision bits out.
//!
//! The traces come sample by sample, the sums want patch by patch: with the samples of a patch side by
//! side, seven vector additions make the sums of all samples. So the traces are transposed first.
//!
//! Nearly all sums are far below the threshold, and a bound that costs half of an exact sum tells them:
//! half of each sample, rounded up, added in bytes that saturate. If that is at most half of the
//! threshold, rounded down, the sum is at most the threshold. Only clusters that it leaves in doubt, in
//! any sample, are added up exactly.
//!
//! Here is the frame, and the arithmetic for any processor; `avx2` has it for those that can do better.

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

/// Samples in a row: 50, padded to whole vectors with zeros.
const LANES: usize = 64;

/// The row of zeros that stands for "no neighbour".
const NOBODY: usize = PATCHES;

/// Traces of the three crates, as their fragments hold them, with room for whole blocks.
pub(crate) struct Traces {
    crates: Vec<[u8; LANES * CRATE_STRIDE]>,
}

impl Traces {
    pub(crate) fn new() -> Traces {
        Traces { crates: vec![[0; _]; CRATES] }
    }

    pub(super) fn crates(&self) -> &[[u8; LANES * CRATE_STRIDE]] {
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
pub(super) struct Samples(pub(super) [u8; LANES]);

/// Where a cluster's inputs are: indices into the rows, `NOBODY` for none.
pub(super) type Inputs = [u16; CLUSTER];

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
    /// A row for each trace position, and one of zeros.
    rows: Vec<Samples>,
    inputs: Vec<Inputs>,
    vector: bool,
}

/// True if this processor has the vector unit that the code is also compiled for.
pub(crate) fn has_vector_unit() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has
}

impl Decider {
    pub(crate) fn new() -> Decider {
        Decider {
            rows: vec![Samples([0; LANES]); PATCHES + 1],
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
        #[cfg(target_arch = "x86_64")]
        if self.vector {
            // SAFETY: `vector` says that the processor has these features.
            return unsafe { decide_avx2(self, traces, threshold, decisions) };
        }
        spread(traces, &mut self.rows);
        self.decide_rows(threshold, decisions, may_exceed)
    }

    /// Decides on traces that were spread into the rows.
    #[inline(always)]
    fn decide_rows(
        &self,
        threshold: u32,
        decisions: &mut [u8; DECISION_BYTES],
        may_exceed: impl Fn(&[Samples], &Inputs, u8) -> bool,
    ) -> Outcome {
        // A bound that saturates says nothing about the sum, so it has to be above the limit.
        let limit = (threshold / 2).min(u32::from(u8::MAX) - 1) as u8;
        let mut outcome = Outcome::default();
        let mut first_sample = SAMPLES;
        decisions.fill(0);
        for (byte, inputs) in self.inputs.as_chunks::<8>().0.iter().enumerate() {
            for (bit, inputs) in inputs.iter().enumerate() {
                if !may_exceed(&self.rows, inputs, limit) {
                    continue;
                }
                let sums = sums(&self.rows, inputs);
                for (sample, _) in sums.iter().enumerate().filter(|(_, sum)| u32::from(**sum) > threshold) {
                    decisions[sample * SAMPLE_BYTES + byte] |= 1 << bit;
                    outcome.set += 1;
                    first_sample = first_sample.min(sample);
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
#[target_feature(enable = "avx2")]
fn decide_avx2(
    decider: &mut Decider,
    traces: &Traces,
    threshold: u32,
    decisions: &mut [u8; DECISION_BYTES],
) -> Outcome {
    avx2::spread(traces, &mut decider.rows);
    let may_exceed = |rows: &[Samples], inputs: &Inputs, limit| avx2::may_exceed(rows, inputs, limit);
    decider.decide_rows(threshold, decisions, may_exceed)
}

/// Turns the traces, sample by sample, into rows, patch by patch.
fn spread(traces: &Traces, rows: &mut [Samples]) {
    for (crate_traces, rows) in traces.crates().iter().zip(rows.chunks_exact_mut(CRATE_PATCHES)) {
        for (sample, patches) in crate_traces.chunks_exact(CRATE_STRIDE).enumerate() {
            for (row, patch) in rows.iter_mut().zip(patches) {
                row.0[sample] = *patch;
            }
        }
    }
}

/// Whether the bound of a cluster's sums, in any sample, is above `limit`.
fn may_exceed(rows: &[Samples], inputs: &Inputs, limit: u8) -> bool {
    let mut bounds = [0u8; LANES];
    for &input in inputs {
        for (bound, sample) in bounds.iter_mut().zip(&rows[usize::from(input)].0) {
            *bound = bound.saturating_add(sample.div_ceil(2));
        }
    }
    bounds.iter().fold(0, |highest, &bound| highest.max(bound)) > limit
}

/// The sums of a cluster in all samples.
#[inline(always)]
fn sums(rows: &[Samples], inputs: &Inputs) -> [u16; SAMPLES] {
    let mut sums = [0; SAMPLES];
    for &input in inputs {
        for (sum, sample) in sums.iter_mut().zip(&rows[usize::from(input)].0) {
            *sum += u16::from(*sample);
        }
    }
    sums
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
