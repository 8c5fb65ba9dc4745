//! What all units of a run agree on before it starts.

use super::shape::Shape;
use super::types::{BatchId, BuIndex, EventNumber, RuIndex, SlotIndex};
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::time::Duration;

/// The shape of a run. Every unit gets the same plan at wire-up; nothing in it changes afterwards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of the run's first event.
    pub first_event: EventNumber,
    /// Events in the run, replays included.
    pub events: NonZeroU64,
    /// Consecutive events per batch; the last batch may be shorter.
    pub batch: NonZeroU16,
    /// Sources of each readout unit, by [`RuIndex`]. At least one readout unit.
    pub sources: Vec<NonZeroU16>,
    /// Slots of each builder unit, by [`BuIndex`]. At least one builder unit.
    pub slots: Vec<NonZeroU16>,
    /// Batches that a readout unit may have posted but not completed towards one builder unit.
    pub window: NonZeroU16,
    /// Batches that a readout unit may have posted but not completed towards all builder units together:
    /// what is posted is in the adapter's hands, and turns are only taken until then.
    pub under_way: NonZeroU32,
    /// Whose turn it is to get a batch.
    pub shape: Shape,
    /// How long an assigned batch may take to arrive whole, and then to be processed. Also how long a
    /// unit believes in a silent manager.
    pub timeout: Duration,
    /// How long each step of the stopping sequence may take.
    pub drain: Duration,
}

/// A number in a plan that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value} {what}: must be {least} to {most}")]
pub struct PlanError {
    /// What it counts.
    pub what: &'static str,
    /// The number.
    pub value: u64,
    /// The least possible.
    pub least: u64,
    /// The most possible.
    pub most: u64,
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// One batch as the manager cuts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// The batch.
    pub id: BatchId,
    /// Its first event.
    pub first_event: EventNumber,
    /// Its events, 1 ..= the plan's `batch`.
    pub events: u16,
}

impl Plan {
    /// Whether the numbers of units, slots, events and fragments stay within their types.
    ///
    /// # Errors
    /// Names the first number that does not.
    pub fn check(&self) -> Result<(), PlanError> {
        let limits = [
            ("readout units", self.readouts() as u64, 1, u64::from(u16::MAX)),
            ("builder units", self.builders() as u64, 1, u64::from(u16::MAX)),
            (
                "fragments of a batch",
                u64::from(self.batch.get()).saturating_mul(self.total_sources()),
                1,
                u64::from(u32::MAX),
            ),
            ("events", self.events.get(), 1, u64::MAX - self.first_event.0),
            ("nanoseconds of timeout", nanos(self.timeout), 1, nanos(Duration::from_secs(3600))),
            ("nanoseconds of drain", nanos(self.drain), 1, nanos(Duration::from_secs(3600))),
        ];
        match limits.into_iter().find(|&(_, value, least, most)| !(least..=most).contains(&value)) {
            Some((what, value, least, most)) => Err(PlanError { what, value, least, most }),
            None => Ok(()),
        }
    }

    /// Readout units.
    pub fn readouts(&self) -> usize {
        self.sources.len()
    }

    /// Builder units.
    pub fn builders(&self) -> usize {
        self.slots.len()
    }

    /// Sources of all readout units together.
    pub fn total_sources(&self) -> u64 {
        self.sources.iter().map(|s| u64::from(s.get())).sum()
    }

    /// Slots of all builder units together.
    pub fn total_slots(&self) -> usize {
        self.slots.iter().map(|s| usize::from(s.get())).sum()
    }

    /// Batches in the run.
    pub fn batches(&self) -> NonZeroU64 {
        let batch = NonZeroU64::from(self.batch);
        NonZeroU64::new(self.events.get().div_ceil(batch.get()))
            .expect("at least one event makes at least one batch")
    }

    /// The batch of that number, or none past the end of the run.
    pub fn batch(&self, id: BatchId) -> Option<Batch> {
        let size = u64::from(self.batch.get());
        let before = id.0.checked_mul(size)?;
        let rest = self.events.get().checked_sub(before).filter(|&rest| rest > 0)?;
        let events = rest.min(size) as u16;
        Some(Batch { id, first_event: EventNumber(self.first_event.0 + before), events })
    }

    /// Fragments that a readout unit's sources have for that many events when none is missing.
    pub fn nominal_fragments(&self, ru: RuIndex, events: u16) -> u32 {
        NonZeroU32::from(self.sources[ru.index()]).get() * u32::from(events)
    }

    /// Whether the plan has that slot.
    pub fn has_slot(&self, builder: BuIndex, slot: SlotIndex) -> bool {
        self.slots.get(builder.index()).is_some_and(|slots| slot.0 < slots.get())
    }
}

#[cfg(test)]
pub(crate) fn small(sources: &[u16], slots: &[u16], events: u64, batch: u16) -> Plan {
    Plan {
        first_event: EventNumber(100),
        events: NonZeroU64::new(events).unwrap(),
        batch: NonZeroU16::new(batch).unwrap(),
        sources: sources.iter().map(|&s| NonZeroU16::new(s).unwrap()).collect(),
        slots: slots.iter().map(|&s| NonZeroU16::new(s).unwrap()).collect(),
        window: NonZeroU16::new(4).unwrap(),
        under_way: NonZeroU32::MAX,
        shape: Shape::Rotation,
        timeout: Duration::from_millis(100),
        drain: Duration::from_millis(50),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_cover_the_events_and_the_last_is_short() {
        let plan = small(&[2], &[1], 10, 4);
        assert_eq!(plan.batches().get(), 3);
        let cut: Vec<_> =
            (0..4).map(|k| plan.batch(BatchId(k)).map(|b| (b.first_event.0, b.events))).collect();
        assert_eq!(cut, [Some((100, 4)), Some((104, 4)), Some((108, 2)), None]);
        assert_eq!(plan.batch(BatchId(u64::MAX)), None);
    }

    #[test]
    fn check_names_what_is_out_of_range() {
        assert_eq!(small(&[2], &[1], 10, 4).check(), Ok(()));
        let plan = |change: fn(&mut Plan)| {
            let mut plan = small(&[60_000, 60_000], &[1], 10, 4);
            change(&mut plan);
            plan.check().unwrap_err().to_string()
        };
        assert_eq!(plan(|p| p.sources.clear()), "0 readout units: must be 1 to 65535");
        assert_eq!(plan(|p| p.slots.clear()), "0 builder units: must be 1 to 65535");
        let full = "7864200000 fragments of a batch: must be 1 to 4294967295";
        assert_eq!(plan(|p| p.batch = NonZeroU16::MAX), full);
        assert_eq!(plan(|p| p.first_event.0 = u64::MAX - 9), "10 events: must be 1 to 9");
        assert!(plan(|p| p.drain = Duration::ZERO).starts_with("0 nanoseconds of drain"));
    }

    #[test]
    fn nominal_fragments_do_not_overflow() {
        let plan = small(&[u16::MAX], &[1], 10, u16::MAX);
        assert_eq!(plan.nominal_fragments(RuIndex(0), u16::MAX), 65_535 * 65_535);
    }
}
