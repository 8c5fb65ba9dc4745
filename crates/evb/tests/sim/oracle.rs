//! What is true about the simulated sources, and random numbers to make it.

use super::Scenario;
use millstream_evb::core::account::{BatchOutcome, BatchTally, Totals};
use millstream_evb::core::plan::{Batch, Plan};
use millstream_evb::core::{BatchId, RuIndex};
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
    /// The sequence of that seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0 ^ 0x5bd1_e995) % end
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Which fragments exist and are sound, and what really happened to them.
#[derive(Clone, Debug)]
pub struct Oracle {
    plan: Plan,
    seed: u64,
    missing: u64,
    corrupt: u64,
    /// Fragments sent, by readout unit, dead ones included.
    pub sent: Vec<u64>,
    /// How many times each batch was processed.
    pub processed: BTreeMap<BatchId, u32>,
}

impl Oracle {
    /// The oracle of a scenario's sources.
    pub fn new(scenario: &Scenario) -> Oracle {
        Oracle {
            plan: scenario.plan.clone(),
            seed: mix(scenario.seed),
            missing: u64::from(scenario.missing),
            corrupt: u64::from(scenario.corrupt),
            sent: vec![0; scenario.plan.readouts()],
            processed: BTreeMap::new(),
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

    /// Fragments that the readout unit's sources have of a batch.
    pub fn present(&self, ru: RuIndex, batch: &Batch) -> u32 {
        let ru = ru.index();
        let events = batch.first_event.0..batch.first_event.0 + u64::from(batch.events);
        let sources = 0..self.plan.sources[ru].get();
        events.map(|e| sources.clone().filter(|&s| self.exists(ru, s, e)).count() as u32).sum()
    }

    /// What has to become of a batch that arrives whole.
    pub fn outcome(&self, batch: &Batch) -> BatchOutcome {
        let mut outcome = BatchOutcome::default();
        for event in batch.first_event.0..batch.first_event.0 + u64::from(batch.events) {
            let (mut fragments, mut missing, mut corrupt) = (0, false, false);
            for (ru, sources) in self.plan.sources.iter().enumerate() {
                for source in 0..sources.get() {
                    let exists = self.exists(ru, source, event);
                    fragments += u32::from(exists);
                    missing |= !exists;
                    corrupt |= exists && self.is_corrupt(ru, source, event);
                }
            }
            let tally = match (corrupt, missing) {
                (true, _) => &mut outcome.corrupt,
                (false, true) => &mut outcome.missing,
                (false, false) => {
                    outcome.accepted += u16::from(event % 3 == 0);
                    &mut outcome.built
                }
            };
            *tally = BatchTally { events: tally.events + 1, fragments: tally.fragments + fragments };
        }
        outcome
    }

    /// A readout unit sent fragments.
    pub fn sent(&mut self, ru: RuIndex, fragments: u32) {
        self.sent[ru.index()] += u64::from(fragments);
    }

    /// A batch was processed.
    pub fn processed(&mut self, batch: &Batch) {
        *self.processed.entry(batch.id).or_default() += 1;
    }

    /// What has to become of the whole run when nothing goes wrong.
    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for id in 0..self.plan.batches().get() {
            totals += self.outcome(&self.plan.batch(BatchId(id)).expect("the plan has that many batches"));
        }
        totals
    }

    /// The same for the batches that really were processed.
    pub fn processed_totals(&self) -> Totals {
        let mut totals = Totals::default();
        for id in self.processed.keys() {
            totals += self.outcome(&self.plan.batch(*id).expect("processed batches are the plan's"));
        }
        totals
    }
}
