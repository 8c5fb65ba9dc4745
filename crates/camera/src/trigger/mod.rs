//! The arithmetic of the camera's trigger: 50 samples of 432 patches in, 50 × 432 decision bits out.
//!
//! For each sample and patch, the trigger adds the traces of the patch and its neighbours (its cluster). It
//! sets the decision bit of the patch where the sum exceeds a threshold.
//!
//! Traces arrive sample by sample and are transposed first. With the samples of a patch side by side, seven
//! vector additions make the sums of all samples.
//!
//! Nearly all sums are far below the threshold. An upper bound at half the cost of the exact sum excludes
//! them: half of each sample, rounded up, added in bytes that saturate. If the bound is at most half of the
//! threshold, rounded down, the sum is at most the threshold. Only the other clusters are added up exactly.
//!
//! This module has the portable arithmetic; `avx2` has the vectorised transposition and bound.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod geometry;

pub use geometry::{CLUSTER_INPUTS, Cluster, EntryError, GEOMETRY_BYTES, ROW_BYTES, TriggerGeometry};

use crate::format::{
    CRATES, DECISION_BYTES, DECISION_STRIDE, PATCHES, PATCHES_PER_CRATE, SAMPLES, TRACE_BYTES, TRACE_STRIDE,
};

/// Samples of a row: [`SAMPLES`], padded with zeros to whole vectors.
const LANES: usize = 64;

/// The row of zeros, the input in place of a missing neighbour.
const ZERO_ROW: usize = PATCHES;

/// Trigger traces of the three crates in the layout of their fragments, padded to whole blocks.
pub struct TriggerTraces {
    crates: Vec<[u8; LANES * TRACE_STRIDE]>,
}

impl Default for TriggerTraces {
    fn default() -> TriggerTraces {
        TriggerTraces::new()
    }
}

impl TriggerTraces {
    /// Buffers filled with zeros.
    pub fn new() -> TriggerTraces {
        TriggerTraces { crates: vec![[0; _]; CRATES] }
    }

    /// The buffer for the fragment of crate `index`, from 0.
    #[inline]
    pub fn crate_mut(&mut self, index: usize) -> &mut [u8; TRACE_BYTES] {
        self.crates[index].first_chunk_mut().expect("room for more than the samples")
    }
}

/// The samples of one patch.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct SampleRow([u8; LANES]);

/// Indices of a cluster's inputs in the rows, [`ZERO_ROW`] for none.
type ClusterRows = [u16; CLUSTER_INPUTS];

/// Summary of an event's decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TriggerOutcome {
    /// Decision bits set.
    pub bits_set: u32,
    /// Sample and decision position of the first bit set, by sample and then by position.
    pub first: Option<(u16, u16)>,
}

/// Computes the decisions of events, one event at a time, in buffers that it keeps.
pub struct Trigger {
    /// One row for each trace position, and the row of zeros.
    rows: Vec<SampleRow>,
    clusters: Vec<ClusterRows>,
    #[cfg(target_arch = "x86_64")]
    avx2: bool,
}

/// Whether this processor has AVX2, which the trigger then uses.
pub fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has
}

impl Default for Trigger {
    fn default() -> Trigger {
        Trigger::new()
    }
}

impl Trigger {
    /// A trigger whose clusters have no inputs yet.
    pub fn new() -> Trigger {
        Trigger {
            rows: vec![SampleRow([0; LANES]); PATCHES + 1],
            clusters: vec![[ZERO_ROW as u16; CLUSTER_INPUTS]; PATCHES],
            #[cfg(target_arch = "x86_64")]
            avx2: has_avx2(),
        }
    }

    /// Sets the clusters of later events.
    pub fn set_geometry(&mut self, geometry: &TriggerGeometry) {
        for (rows, cluster) in self.clusters.iter_mut().zip(geometry.clusters()) {
            *rows = cluster.traces.map(|trace| u16::try_from(trace).unwrap_or(ZERO_ROW as u16));
        }
    }

    /// Sets the bit of each sample and decision position whose sum exceeds `threshold`, and clears all
    /// others.
    pub fn decide(
        &mut self,
        traces: &TriggerTraces,
        threshold: u32,
        decisions: &mut [u8; DECISION_BYTES],
    ) -> TriggerOutcome {
        #[cfg(target_arch = "x86_64")]
        if self.avx2 {
            // SAFETY: `avx2` says that the processor has this feature.
            return unsafe { decide_avx2(self, traces, threshold, decisions) };
        }
        transpose(traces, &mut self.rows);
        self.decide_rows(threshold, decisions, may_exceed)
    }

    /// Computes the decisions from transposed traces.
    #[inline(always)]
    fn decide_rows(
        &self,
        threshold: u32,
        decisions: &mut [u8; DECISION_BYTES],
        may_exceed: impl Fn(&[SampleRow], &ClusterRows, u8) -> bool,
    ) -> TriggerOutcome {
        // A saturated bound has to be above the limit, as the sum may be anything.
        let limit = (threshold / 2).min(u32::from(u8::MAX) - 1) as u8;
        let mut outcome = TriggerOutcome::default();
        let mut first_sample = SAMPLES;
        decisions.fill(0);
        for (byte, inputs) in self.clusters.as_chunks::<8>().0.iter().enumerate() {
            for (bit, inputs) in inputs.iter().enumerate() {
                if !may_exceed(&self.rows, inputs, limit) {
                    continue;
                }
                let sums = sums(&self.rows, inputs);
                for (sample, _) in sums.iter().enumerate().filter(|(_, sum)| u32::from(**sum) > threshold) {
                    decisions[sample * DECISION_STRIDE + byte] |= 1 << bit;
                    outcome.bits_set += 1;
                    first_sample = first_sample.min(sample);
                }
            }
        }
        if let Some(sample) = decisions.chunks_exact(DECISION_STRIDE).nth(first_sample) {
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
    trigger: &mut Trigger,
    traces: &TriggerTraces,
    threshold: u32,
    decisions: &mut [u8; DECISION_BYTES],
) -> TriggerOutcome {
    avx2::transpose(traces, &mut trigger.rows);
    let may_exceed = |rows: &[SampleRow], inputs: &ClusterRows, limit| avx2::may_exceed(rows, inputs, limit);
    trigger.decide_rows(threshold, decisions, may_exceed)
}

/// Transposes the traces into one row per patch.
fn transpose(traces: &TriggerTraces, rows: &mut [SampleRow]) {
    for (crate_traces, rows) in traces.crates.iter().zip(rows.chunks_exact_mut(PATCHES_PER_CRATE)) {
        for (sample, patches) in crate_traces.chunks_exact(TRACE_STRIDE).enumerate() {
            for (row, patch) in rows.iter_mut().zip(patches) {
                row.0[sample] = *patch;
            }
        }
    }
}

/// Whether the upper bound of a cluster's sum exceeds `limit` in any sample.
fn may_exceed(rows: &[SampleRow], inputs: &ClusterRows, limit: u8) -> bool {
    let mut bounds = [0u8; LANES];
    for &input in inputs {
        for (bound, sample) in bounds.iter_mut().zip(&rows[usize::from(input)].0) {
            *bound = bound.saturating_add(sample.div_ceil(2));
        }
    }
    bounds.iter().fold(0, |highest, &bound| highest.max(bound)) > limit
}

/// The exact sums of a cluster in all samples.
#[inline(always)]
fn sums(rows: &[SampleRow], inputs: &ClusterRows) -> [u16; SAMPLES] {
    let mut sums = [0; SAMPLES];
    for &input in inputs {
        for (sum, sample) in sums.iter_mut().zip(&rows[usize::from(input)].0) {
            *sum += u16::from(*sample);
        }
    }
    sums
}

/// Decisions by the trigger's definition, without vectors or bounds: the reference in tests.
///
/// `traces` has one fragment per crate.
pub fn reference_decisions(
    traces: [&[u8]; CRATES],
    geometry: &TriggerGeometry,
    threshold: u32,
) -> (Vec<u8>, TriggerOutcome) {
    let mut decisions = vec![0; DECISION_BYTES];
    let mut outcome = TriggerOutcome::default();
    for sample in 0..SAMPLES {
        for (position, cluster) in geometry.clusters().iter().enumerate() {
            let trace =
                |at: usize| traces[at / PATCHES_PER_CRATE][sample * TRACE_STRIDE + at % PATCHES_PER_CRATE];
            let present = cluster.traces.iter().filter(|&&at| at >= 0);
            let sum: u32 = present.map(|&at| u32::from(trace(at as usize))).sum();
            if sum > threshold {
                decisions[sample * DECISION_STRIDE + position / 8] |= 1 << (position % 8);
                outcome.bits_set += 1;
                outcome.first.get_or_insert((sample as u16, position as u16));
            }
        }
    }
    (decisions, outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_geometry() -> impl Strategy<Value = TriggerGeometry> {
        proptest::collection::vec(-1i16..PATCHES as i16, PATCHES * 8).prop_map(|entries| {
            let mut bytes = Vec::new();
            for (at, entry) in entries.into_iter().enumerate() {
                let entry = if at % 8 == CLUSTER_INPUTS { entry.max(0) } else { entry };
                bytes.extend(entry.to_le_bytes());
            }
            let bytes: [u8; GEOMETRY_BYTES] = bytes.try_into().unwrap();
            TriggerGeometry::from_bytes(&bytes).unwrap()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn decisions_equal_the_reference(
            geometry in any_geometry(),
            noise in proptest::collection::vec(any::<u8>(), CRATES * TRACE_BYTES),
            threshold in prop_oneof![0u32..1800, Just(u32::MAX)],
            brightness in 0u32..=8,
        ) {
            // Dimmed, so that few or many sums exceed the threshold.
            let noise: Vec<u8> = noise.iter().map(|byte| (u32::from(*byte) * brightness / 8) as u8)
                .collect();
            let fragments: Vec<&[u8]> = noise.chunks_exact(TRACE_BYTES).collect();
            let mut traces = TriggerTraces::new();
            for (index, fragment) in fragments.iter().enumerate() {
                traces.crate_mut(index).copy_from_slice(fragment);
            }
            let expected = reference_decisions([fragments[0], fragments[1], fragments[2]], &geometry, threshold);

            let mut trigger = Trigger::new();
            trigger.set_geometry(&geometry);
            for vector in [has_avx2(), false] {
                #[cfg(target_arch = "x86_64")]
                {
                    trigger.avx2 = vector;
                }
                let mut decisions = [0xff; DECISION_BYTES];
                let outcome = trigger.decide(&traces, threshold, &mut decisions);
                prop_assert_eq!((decisions.to_vec(), outcome), expected.clone(), "AVX2: {}", vector);
            }
        }
    }
}
