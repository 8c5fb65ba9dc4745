//! Parameters of a run on which all units agree before it starts.

use super::recovery::RecoveryPolicy;
use super::shaping::TrafficShaping;
use super::types::{BatchId, BuIndex, EventNumber, RuIndex, SlotIndex, Unit};
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::time::Duration;

/// Parameters of a run. Every unit gets the same plan at startup; it does not change afterwards.
///
/// A unit that joins again after a loss has an index of its own, so that an index has one account. With n readout units at
/// the start, unit i has the indices i, i + n for its first restart, i + 2n for the second; likewise builder units.
/// [`role`](Self::readout_role) is the index at the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of the run's first event.
    pub first_event: EventNumber,
    /// Events in the run, including replays.
    pub events: NonZeroU64,
    /// Consecutive events per batch; the last batch may be shorter.
    pub batch: NonZeroU16,
    /// Time after which events that are there are assigned in a shorter batch. Without it, a batch waits until it is full.
    pub batch_timeout: Option<Duration>,
    /// Sources of each readout unit that starts the run, by [`RuIndex`]. At least one readout unit.
    pub sources: Vec<NonZeroU16>,
    /// Slots of each builder unit, by [`BuIndex`]: of those that start the run, then of their restarts. At least one
    /// builder unit.
    pub slots: Vec<NonZeroU16>,
    /// Batches that a readout unit may have in flight to one builder unit.
    pub window: NonZeroU16,
    /// Batches that a readout unit may have in flight to all builder units together. The adapter serves its
    /// connections in any order, so traffic shaping applies only up to posting.
    pub max_in_flight: NonZeroU32,
    /// The order in which a readout unit serves builder units.
    pub traffic_shaping: TrafficShaping,
    /// Time for an assigned batch to arrive completely, and then to be processed. Also the time without a message
    /// after which a unit counts the manager as lost.
    pub timeout: Duration,
    /// Time for each step of the stopping sequence.
    pub drain_timeout: Duration,
    /// What the run does when it loses a unit.
    pub recovery: RecoveryPolicy,
}

/// A parameter that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value} {what}: must be {least} to {most}")]
pub struct PlanError {
    /// The parameter and its unit.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
    /// The smallest valid value.
    pub least: u64,
    /// The largest valid value.
    pub most: u64,
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A batch of consecutive events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Its number.
    pub id: BatchId,
    /// Its first event.
    pub first_event: EventNumber,
    /// Number of events, from 1 to the plan's `batch`.
    pub events: u16,
}

impl Plan {
    /// Time from the assignment of a batch to its report, or from one report that it waits for storage to the next. One timeout
    /// to arrive and one to be processed, which the builder unit enforces; the third is for the report.
    pub(crate) fn done_timeout(&self) -> Duration {
        3 * self.timeout
    }

    /// Checks that the numbers of units, slots, events and fragments fit their types.
    ///
    /// # Errors
    /// The first parameter that is out of range.
    pub fn check(&self) -> Result<(), PlanError> {
        let limits = [
            ("readout units", self.readouts() as u64, 1, u64::from(u16::MAX)),
            ("builder units", self.builders() as u64, 1, u64::from(u16::MAX)),
            (
                "restarts",
                self.recovery.restarts.into(),
                0,
                (u64::from(u16::MAX) / (self.readouts() as u64).max(1)).saturating_sub(1),
            ),
            (
                "builder units without their restarts",
                self.builders() as u64 % (1 + u64::from(self.recovery.restarts)),
                0,
                0,
            ),
            (
                "spare builder units",
                self.recovery.spare_builders.into(),
                0,
                (self.initial_builders() as u64).saturating_sub(1),
            ),
            (
                "fragments of a batch",
                u64::from(self.batch.get()).saturating_mul(self.total_sources()),
                1,
                u64::from(u32::MAX),
            ),
            ("events", self.events.get(), 1, u64::MAX - self.first_event.0),
            ("nanoseconds of timeout", nanos(self.timeout), 1, nanos(Duration::from_secs(3600))),
            (
                "nanoseconds of takeover",
                nanos(self.recovery.takeover_timeout),
                0,
                nanos(Duration::from_secs(3600)),
            ),
            ("nanoseconds of drain", nanos(self.drain_timeout), 1, nanos(Duration::from_secs(3600))),
        ];
        match limits.into_iter().find(|&(_, value, least, most)| !(least..=most).contains(&value)) {
            Some((what, value, least, most)) => Err(PlanError { what, value, least, most }),
            None => Ok(()),
        }
    }

    /// Number of readout units at a time.
    pub fn readouts(&self) -> usize {
        self.sources.len()
    }

    /// Number of readout units with their restarts.
    pub fn readout_members(&self) -> usize {
        self.sources.len() * (1 + usize::from(self.recovery.restarts))
    }

    /// The index at the start of a readout unit, which may be a restart.
    pub fn readout_role(&self, ru: RuIndex) -> RuIndex {
        RuIndex(ru.0 % self.sources.len().max(1) as u16)
    }

    /// The restart of a readout unit that follows `ru`, if there is one.
    pub fn next_readout(&self, ru: RuIndex) -> Option<RuIndex> {
        let next = ru.index() + self.readouts();
        (next < self.readout_members()).then_some(RuIndex(next as u16))
    }

    /// Number of builder units with their restarts.
    pub fn builders(&self) -> usize {
        self.slots.len()
    }

    /// Number of builder units that start the run.
    pub fn initial_builders(&self) -> usize {
        self.slots.len() / (1 + usize::from(self.recovery.restarts))
    }

    /// The index at the start of a builder unit, which may be a restart.
    pub fn builder_role(&self, bu: BuIndex) -> BuIndex {
        BuIndex(bu.0 % self.initial_builders().max(1) as u16)
    }

    /// The restart of a builder unit that follows `bu`, if there is one.
    pub fn next_builder(&self, bu: BuIndex) -> Option<BuIndex> {
        let next = bu.index() + self.initial_builders();
        (next < self.builders()).then_some(BuIndex(next as u16))
    }

    /// Whether a unit is a restart, which is not there at the start of the run.
    pub fn is_restart(&self, unit: Unit) -> bool {
        match unit {
            Unit::Manager => false,
            Unit::Readout(ru) => ru.index() >= self.readouts(),
            Unit::Builder(bu) => bu.index() >= self.initial_builders(),
        }
    }

    /// Whether a builder unit gets batches only once another one is lost.
    pub fn is_spare(&self, builder: BuIndex) -> bool {
        let initial = self.initial_builders();
        builder.index() < initial && builder.index() + usize::from(self.recovery.spare_builders) >= initial
    }

    /// Number of sources of all readout units.
    pub fn total_sources(&self) -> u64 {
        self.sources.iter().map(|s| u64::from(s.get())).sum()
    }

    /// Number of slots of all builder units.
    pub fn total_slots(&self) -> usize {
        self.slots.iter().map(|s| usize::from(s.get())).sum()
    }

    /// Number of batches in the run, if all but the last are full.
    pub fn batches(&self) -> NonZeroU64 {
        let batch = NonZeroU64::from(self.batch);
        NonZeroU64::new(self.events.get().div_ceil(batch.get()))
            .expect("at least one event makes at least one batch")
    }

    /// The batch with that number if all before it are full; `None` past the end of the run.
    pub fn batch(&self, id: BatchId) -> Option<Batch> {
        let size = u64::from(self.batch.get());
        let before = id.0.checked_mul(size)?;
        let rest = self.events.get().checked_sub(before).filter(|&rest| rest > 0)?;
        let events = rest.min(size) as u16;
        Some(Batch { id, first_event: EventNumber(self.first_event.0 + before), events })
    }

    /// Fragments of a readout unit's sources for that many events if none is missing.
    pub fn expected_fragments(&self, ru: RuIndex, events: u16) -> u32 {
        NonZeroU32::from(self.sources[self.readout_role(ru).index()]).get() * u32::from(events)
    }

    /// Whether the slot exists.
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
        batch_timeout: None,
        sources: sources.iter().map(|&s| NonZeroU16::new(s).unwrap()).collect(),
        slots: slots.iter().map(|&s| NonZeroU16::new(s).unwrap()).collect(),
        window: NonZeroU16::new(4).unwrap(),
        max_in_flight: NonZeroU32::MAX,
        traffic_shaping: TrafficShaping::BarrelShifter,
        timeout: Duration::from_millis(100),
        drain_timeout: Duration::from_millis(50),
        recovery: RecoveryPolicy::default(),
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
        assert!(plan(|p| p.drain_timeout = Duration::ZERO).starts_with("0 nanoseconds of drain"));
    }

    #[test]
    fn restarts_have_indices_of_their_own() {
        let mut plan = small(&[2, 3], &[1, 4, 1, 4], 10, 4);
        plan.recovery.restarts = 1;
        plan.recovery.spare_builders = 1;
        assert_eq!((plan.check(), plan.readout_members(), plan.initial_builders()), (Ok(()), 4, 2));
        assert_eq!((plan.readout_role(RuIndex(3)), plan.builder_role(BuIndex(2))), (RuIndex(1), BuIndex(0)));
        assert_eq!((plan.next_readout(RuIndex(1)), plan.next_readout(RuIndex(3))), (Some(RuIndex(3)), None));
        assert_eq!((plan.next_builder(BuIndex(0)), plan.next_builder(BuIndex(2))), (Some(BuIndex(2)), None));
        let spares: Vec<bool> = (0..4).map(|bu| plan.is_spare(BuIndex(bu))).collect();
        assert_eq!(spares, [false, true, false, false]);
        plan.slots.pop();
        assert!(plan.check().unwrap_err().to_string().contains("without their restarts"));
    }

    #[test]
    fn expected_fragments_do_not_overflow() {
        let plan = small(&[u16::MAX], &[1], 10, u16::MAX);
        assert_eq!(plan.expected_fragments(RuIndex(0), u16::MAX), 65_535 * 65_535);
    }
}
