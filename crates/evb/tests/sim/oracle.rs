//! Test oracle: which fragments exist, and the expected outcomes.

use super::Scenario;
use millstream_evb::core::plan::{Batch, Plan};
use millstream_evb::core::summary::{BatchCounts, BatchOutcome, Totals};
use millstream_evb::core::{BatchId, EventNumber, RuIndex};
use std::collections::BTreeMap;

/// Random numbers from a seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// One step of splitmix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Random {
    /// Starts the sequence of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0 ^ 0x5bd1_e995) % end
    }

    /// True with probability 1/n.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Which fragments exist and are corrupt, and what was sent and processed.
#[derive(Clone, Debug)]
pub struct Oracle {
    plan: Plan,
    seed: u64,
    missing: u64,
    corrupt: u64,
    /// Fragments sent by each readout unit, including dead ones.
    pub sent: Vec<u64>,
    /// How often each batch was processed.
    pub processed: BTreeMap<BatchId, u32>,
    /// The processed batches.
    pub batches: BTreeMap<BatchId, Batch>,
    /// How often the events of each batch are in the output: a batch that was assigned again is stored if no output of a
    /// lost unit has it.
    pub stored: BTreeMap<BatchId, u32>,
}

impl Oracle {
    /// The sources of a scenario.
    pub fn new(scenario: &Scenario) -> Oracle {
        Oracle {
            plan: scenario.plan.clone(),
            seed: mix(scenario.seed),
            missing: u64::from(scenario.missing),
            corrupt: u64::from(scenario.corrupt),
            sent: vec![0; scenario.plan.readout_members()],
            processed: BTreeMap::new(),
            batches: BTreeMap::new(),
            stored: BTreeMap::new(),
        }
    }

    fn draw(&self, ru: usize, source: u16, event: u64, salt: u64) -> u64 {
        mix(mix(self.seed ^ salt ^ mix(event)) ^ (ru as u64) << 16 ^ u64::from(source)) % 1000
    }

    fn exists(&self, ru: usize, source: u16, event: u64) -> bool {
        self.draw(ru, source, event, 1) >= self.missing
    }

    fn is_corrupt(&self, ru: usize, source: u16, event: u64) -> bool {
        self.draw(ru, source, event, 2) < self.corrupt
    }

    /// Number of fragments of a batch at a readout unit.
    pub fn present(&self, ru: RuIndex, batch: &Batch) -> u32 {
        let ru = self.plan.readout_role(ru).index();
        let events = batch.first_event.0..batch.first_event.0 + u64::from(batch.events);
        let sources = 0..self.plan.sources[ru].get();
        events.map(|e| sources.clone().filter(|&s| self.exists(ru, s, e)).count() as u32).sum()
    }

    /// Expected outcome of a batch with the packets of all readout units.
    pub fn outcome(&self, batch: &Batch) -> BatchOutcome {
        self.outcome_without(batch, &vec![false; self.plan.readouts()])
    }

    /// Expected outcome of a batch without the packets of `absent` readout units.
    pub fn outcome_without(&self, batch: &Batch, absent: &[bool]) -> BatchOutcome {
        let mut outcome = BatchOutcome::default();
        for event in batch.first_event.0..batch.first_event.0 + u64::from(batch.events) {
            let (mut fragments, mut missing, mut corrupt) = (0, false, false);
            for (ru, sources) in self.plan.sources.iter().enumerate() {
                for source in 0..sources.get() {
                    let exists = !absent[ru] && self.exists(ru, source, event);
                    fragments += u32::from(exists);
                    missing |= !exists;
                    corrupt |= exists && self.is_corrupt(ru, source, event);
                }
            }
            let counts = match (corrupt, missing) {
                (true, _) => &mut outcome.corrupt,
                (false, true) => &mut outcome.missing,
                (false, false) => {
                    outcome.accepted += u16::from(event % 3 == 0);
                    &mut outcome.built
                }
            };
            *counts = BatchCounts { events: counts.events + 1, fragments: counts.fragments + fragments };
        }
        outcome
    }

    /// Counts fragments sent by a readout unit.
    pub fn sent(&mut self, ru: RuIndex, fragments: u32) {
        self.sent[ru.index()] += u64::from(fragments);
    }

    /// Counts a processed batch. Its events are stored, unless it was assigned `again` and they are in the output.
    pub fn processed(&mut self, batch: &Batch, again: bool) {
        *self.processed.entry(batch.id).or_default() += 1;
        self.batches.insert(batch.id, *batch);
        if !again || !self.stored.contains_key(&batch.id) {
            *self.stored.entry(batch.id).or_default() += 1;
        }
    }

    /// Number of fragments in all batches.
    pub fn fragments(&self) -> u64 {
        let batches = (0..self.plan.batches().get()).filter_map(|id| self.plan.batch(BatchId(id)));
        let readouts = || (0..self.plan.readouts()).map(|ru| RuIndex(ru as u16));
        batches.flat_map(|batch| readouts().map(move |ru| u64::from(self.present(ru, &batch)))).sum()
    }

    /// Expected totals of a run without failures.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for event in 0..self.plan.events.get() {
            let first_event = EventNumber(self.plan.first_event.0 + event);
            totals += self.outcome(&Batch { id: BatchId(0), first_event, events: 1 });
        }
        totals.batches = self.processed.len() as u64;
        totals
    }

    /// Expected totals of the processed batches.
    pub fn processed_totals(&self) -> Totals {
        self.totals_of(self.batches.values())
    }

    /// Expected totals of the processed batches, of each as often as it was processed.
    pub fn processed_totals_with_repeats(&self) -> Totals {
        self.totals_of(self.processed.iter().flat_map(|(id, &times)| (0..times).map(|_| &self.batches[id])))
    }

    fn totals_of<'b>(&self, batches: impl Iterator<Item = &'b Batch>) -> Totals {
        let mut totals = Totals::default();
        batches.for_each(|batch| totals += self.outcome(batch));
        totals
    }
}
