//! Takeover of a run by the standby manager.
//!
//! The manager that starts the run has term 1. A standby manager that takes over has the next term. Units answer it with
//! their state ([`BuilderState`], [`ReadoutState`]); from then on they ignore messages of earlier terms, so a manager that was
//! only stopped changes nothing when it continues.
//!
//! ```text
//! manager                     standby manager                     units
//!    │ ── ManagerReplica ──────────► │                               │   when a unit is lost or joins
//!    ×                               │                               │   wait, and go on with their batches
//!                                    │ ── Membership, new term ────► │
//!                                    │ ◄── state ─────────────────── │
//!                                    │ ══ Assign ══════════════════► │   units ignore what they know
//! ```
//!
//! What the state of the units does not tell is what lost units did. The manager copies it in a [`ManagerReplica`] to the
//! standby before it tells the units about the change. It also copies each batch that is done ([`DoneBatch`]) before it assigns
//! the slot again.
//!
//! So a unit may be lost together with the manager: it sends no state. The outcomes of a builder unit's finished batches are in
//! the copy, and readout units know the batches in its slots and still have them. Such a builder unit is excluded: its batches
//! are assigned again once it has ended. A readout unit that sends no state is lost, if the run may go on without it.
//!
//! The new manager finds each batch where it is:
//!
//! - done: counted by its builder unit, or in the replica if that unit is lost;
//! - in a slot, if the slot's builder unit or any readout unit knows the assignment. It is assigned to the same slot again, and
//!   units that know the assignment ignore it;
//! - waiting for another builder unit, if it is unfinished at a lost one and neither in a slot nor done elsewhere;
//! - nowhere, if the assignment reached no unit that is there. It is cut again.
//!
//! A batch that was cut again may not have reached a unit when a further manager is lost, while later batches have. So readout
//! units remember which batches they skipped.
//!
//! The manager of any term may have a standby manager, which joins the run in progress. It gets a copy at once, and units
//! connect to it when the manager names it.
//!
//! The events of all these batches are those of the run up to its newest batch. [`Manager::resume`](super::Manager::resume)
//! compares the two counts and refuses the run if they differ.

use super::message::Assignment;
use super::plan::Batch;
use super::recovery::Membership;
use super::report::{BuilderReport, BuilderView};
use super::summary::{BatchOutcome, Totals};
use super::types::{BatchId, BuIndex, Generation, RuIndex, SlotIndex, Unit};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A builder unit's state, for the manager of a new term.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderState {
    /// Outcomes of finished batches.
    pub done: Totals,
    /// Events of all batches assigned to the unit.
    pub events_assigned: u64,
    /// Fragments in finished batches, by readout unit with restarts.
    pub arrived: Vec<u64>,
    /// Every slot, by index.
    pub slots: Vec<GrantedSlot>,
    /// Finished batches that lost builder units had before.
    pub rebuilt: Vec<BatchId>,
    /// The batch with the highest number that was assigned to the unit.
    pub newest: Option<Batch>,
}

/// The present generation of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantedSlot {
    /// The generation.
    pub generation: Generation,
    /// The batch, if the unit knows its assignment, and whether it was assigned before.
    pub batch: Option<(Batch, bool)>,
    /// Readout units whose packets have arrived.
    pub arrivals: Vec<RuIndex>,
}

/// A readout unit's state, for the manager of a new term.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadoutState {
    /// The last assignment of each slot of a builder unit that is not lost.
    pub assigned: Vec<Assignment>,
    /// The first batch that is newer than all assigned ones.
    pub next_batch: BatchId,
    /// Events of the run before that batch.
    pub next_event: u64,
    /// Batches before it that were not assigned, in order: no unit had got their first assignment when an earlier manager was
    /// lost.
    pub skipped: Vec<BatchRange>,
}

/// Consecutive batches of the run. Each end is a batch and the events of the run before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRange {
    /// The first batch.
    pub start: (BatchId, u64),
    /// The first batch after the range.
    pub end: (BatchId, u64),
}

impl BatchRange {
    /// Whether no batch is in it.
    pub fn is_empty(&self) -> bool {
        self.start.0 >= self.end.0
    }

    /// The ranges joined where they meet, in order.
    pub(crate) fn union(ranges: impl IntoIterator<Item = BatchRange>) -> Vec<BatchRange> {
        let mut sorted: Vec<_> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        sorted.sort_unstable_by_key(|range| range.start);
        let mut union: Vec<BatchRange> = Vec::with_capacity(sorted.len());
        for range in sorted {
            match union.last_mut() {
                Some(last) if range.start.0 <= last.end.0 => last.end = last.end.max(range.end),
                _ => union.push(range),
            }
        }
        union
    }
}

/// The states of the units that the new manager has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnitStates {
    /// Of readout units.
    pub readouts: BTreeMap<RuIndex, ReadoutState>,
    /// Of builder units.
    pub builders: BTreeMap<BuIndex, BuilderState>,
}

/// The manager's record of a lost builder unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostBuilder {
    /// Its index.
    pub builder: BuIndex,
    /// The record.
    pub view: BuilderView,
    /// Its report, if it made one after it was excluded.
    pub report: Option<BuilderReport>,
}

/// The manager's record of a builder unit that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderRecord {
    /// Its index.
    pub builder: BuIndex,
    /// Outcomes of the batches that it reported done.
    pub done: Totals,
    /// Fragments in those batches, by readout unit with restarts.
    pub arrived: Vec<u64>,
    /// The last generation of each slot whose batch is done.
    pub finished: Vec<Generation>,
}

/// A batch that its builder unit has reported done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoneBatch {
    /// The builder unit.
    pub builder: BuIndex,
    /// The slot.
    pub slot: SlotIndex,
    /// The slot's generation.
    pub generation: Generation,
    /// The batch.
    pub batch: BatchId,
    /// Its outcome.
    pub outcome: BatchOutcome,
    /// Its fragments, by readout unit.
    pub arrived: Vec<(RuIndex, u64)>,
}

/// A change of what only the manager knows, for the standby manager.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicaUpdate {
    /// Units were lost or joined: a new copy.
    Whole(Box<ManagerReplica>),
    /// These batches are done.
    Done(Vec<DoneBatch>),
}

/// What only the manager knows. The standby manager has a copy from before the units are told of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagerReplica {
    /// The units of the run.
    pub membership: Membership,
    /// Builder units that get batches only once another one is lost.
    pub spares: Vec<BuIndex>,
    /// Builder units that are excluded, and have neither reported nor ended.
    pub excluding: Vec<BuIndex>,
    /// The records of lost builder units.
    pub lost_builders: Vec<LostBuilder>,
    /// The records of the others, for those that are lost together with the manager.
    pub builders: Vec<BuilderRecord>,
    /// Events of batches that lost builder units had finished, but not reported done.
    pub events_settled: u64,
    /// The first batch of each readout unit, with restarts.
    pub first_batches: Vec<BatchId>,
    /// Units that the run goes on without, in the order of their losses.
    pub recovered: Vec<Unit>,
    /// Restarts that have joined.
    pub joined: Vec<Unit>,
    /// Whether the operator has paused the run.
    pub is_paused: bool,
}

impl ManagerReplica {
    /// Adds a batch that is done.
    pub fn add_done(&mut self, done: &DoneBatch) {
        let DoneBatch { builder, slot, generation, batch, outcome, arrived } = done;
        let add = |sums: &mut [u64]| {
            for (ru, fragments) in arrived {
                if let Some(sum) = sums.get_mut(ru.index()) {
                    *sum += fragments;
                }
            }
        };
        if let Some(record) = self.builders.iter_mut().find(|record| record.builder == *builder) {
            record.done += *outcome;
            add(&mut record.arrived);
            if let Some(finished) = record.finished.get_mut(slot.index()) {
                *finished = *generation;
            }
        } else if let Some(lost) = self.lost_builders.iter_mut().find(|lost| lost.builder == *builder) {
            // It is excluded, and still reports.
            lost.view.done += *outcome;
            add(&mut lost.view.arrived);
            lost.view.unfinished.retain(|unfinished| unfinished.slot != *slot);
        }
        // It is not assigned again to replace what lost units had.
        let unfinished = self.lost_builders.iter_mut().flat_map(|lost| &mut lost.view.unfinished);
        unfinished.filter(|unfinished| unfinished.batch.id == *batch).for_each(|known| known.again = true);
    }

    /// The units whose state the new manager needs.
    pub fn units(&self, builders: usize) -> Vec<Unit> {
        let readouts = self.membership.readouts.iter().filter(|member| !member.is_lost);
        let builders = (0..builders).map(|bu| BuIndex(bu as u16));
        let present = builders.filter(|bu| !self.membership.absent_builders.contains(bu));
        readouts.map(|member| Unit::Readout(member.index)).chain(present.map(Unit::Builder)).collect()
    }
}

/// Why a standby manager cannot take over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TakeoverError {
    /// The state of a unit is missing, and the run may not go on without the unit.
    #[error(
        "{0} has not sent its state, and the run may not go on without it (recovery in the configuration)"
    )]
    NoState(Unit),
    /// The lost manager's copy does not match the plan.
    #[error("the lost manager's copy does not match the plan of the run")]
    Replica,
    /// The state of a unit does not match the run.
    #[error("the state of {0} does not match the run")]
    Mismatch(Unit),
    /// Units know different assignments of a slot, or the batch of a slot with packets is unknown.
    #[error("the units do not agree on the batch in {slot} of {builder}")]
    Conflict {
        /// The builder unit.
        builder: BuIndex,
        /// Its slot.
        slot: SlotIndex,
    },
    /// Events are in no batch that is known, or in two.
    #[error(
        "{found} events are in batches that the units know, but {expected} events of the run were assigned"
    )]
    Events {
        /// Events in known batches.
        found: u64,
        /// Events before the run's next batch.
        expected: u64,
    },
}
