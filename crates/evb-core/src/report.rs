//! Final reports of the units, merged by [`ReportMerger`](super::ReportMerger).

use super::plan::Batch;
use super::summary::Totals;
use super::types::{Bytes, Generation, RuIndex, SlotIndex, StopCause};
use serde::{Deserialize, Serialize};

/// A readout unit's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadoutReport {
    /// Why the unit stopped.
    pub cause: StopCause,
    /// Fragments read from its sources.
    pub fragments_read: u64,
    /// Their payload.
    pub bytes_read: Bytes,
    /// Fragments read but not sent.
    pub fragments_unsent: u64,
    /// Fragments sent again, because the builder unit that got them was lost.
    #[serde(default)]
    pub fragments_rebuilt: u64,
    /// Batches sent, by builder unit.
    pub sent: Vec<SentToBuilder>,
}

/// Batches that a readout unit sent to one builder unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentToBuilder {
    /// Number of batches.
    pub batches: u64,
    /// Events of those batches.
    pub events: u64,
    /// Fragments of those batches.
    pub fragments: u64,
    /// The last batch sent to each slot. Earlier ones are done, because the slot was granted again.
    pub last: Vec<PostedBatch>,
}

/// A batch that a readout unit posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostedBatch {
    /// The slot.
    pub slot: SlotIndex,
    /// The slot's generation.
    pub generation: Generation,
    /// The batch.
    pub batch: Batch,
    /// Its fragments from this readout unit.
    pub fragments: u32,
}

/// A builder unit's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderReport {
    /// Why the unit stopped.
    pub cause: StopCause,
    /// Outcomes of finished batches.
    pub done: Totals,
    /// Events of all batches assigned to the unit.
    pub events_assigned: u64,
    /// Fragments that arrived, by readout unit with restarts.
    pub arrived: Vec<u64>,
    /// Every slot, by [`SlotIndex`].
    pub slots: Vec<SlotReport>,
    /// Rejected arrivals by [`ProtocolError`](super::types::ProtocolError), without zero counts.
    pub rejected_arrivals: Vec<(super::types::ProtocolError, u64)>,
    /// Readout units that the run went on without.
    #[serde(default)]
    pub excluded: Vec<RuIndex>,
}

/// The last generation of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotReport {
    /// The generation; 0 if the slot was never granted.
    pub generation: Generation,
    /// State of that generation.
    pub state: SlotState,
}

/// State of a slot's last generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotState {
    /// Its batch is finished, or the slot was never granted.
    Finished,
    /// Granted, but its batch is not finished.
    Unfinished {
        /// The batch, if it was assigned.
        batch: Option<Batch>,
        /// Fragments that arrived, by readout unit.
        arrived: Vec<(RuIndex, u32)>,
        /// Why it is not finished; valid if a fragment arrived.
        cause: UnfinishedCause,
    },
}

/// Why a batch with arrived fragments is not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnfinishedCause {
    /// Incomplete: a readout unit was lost before its fragments arrived.
    ReadoutLost,
    /// Incomplete: fragments did not arrive in time.
    TimedOut,
    /// Incomplete: the run stopped before.
    Stopped,
    /// Complete, but not processed.
    Unprocessed,
}

/// The manager's report: its record of every builder unit, used for lost ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagerReport {
    /// Why the run ended.
    pub cause: StopCause,
    /// By builder unit.
    pub builders: Vec<BuilderView>,
    /// Units that the run went on without.
    #[serde(default)]
    pub recovered: Vec<super::types::Unit>,
    /// Restarts that joined the run.
    #[serde(default)]
    pub joined: Vec<super::types::Unit>,
}

/// The manager's record of one builder unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderView {
    /// Events of the batches assigned to it.
    pub events_assigned: u64,
    /// Outcomes of the batches that it reported done.
    pub done: Totals,
    /// Fragments in those batches, by readout unit with restarts.
    pub arrived: Vec<u64>,
    /// Batches assigned and not reported done.
    pub unfinished: Vec<UnfinishedBatch>,
}

/// The final reports of a run's units: `None` for units without one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReports {
    /// The manager's.
    pub manager: Option<ManagerReport>,
    /// The readout units', by index.
    pub readouts: Vec<Option<ReadoutReport>>,
    /// The builder units', by index.
    pub builders: Vec<Option<BuilderReport>>,
}

impl RunReports {
    /// No reports, for runs with that many units.
    pub fn none(readouts: usize, builders: usize) -> RunReports {
        RunReports { manager: None, readouts: vec![None; readouts], builders: vec![None; builders] }
    }

    /// Adds the reports of `others` for units that have none here.
    pub fn complete_with(&mut self, others: RunReports) {
        self.manager = self.manager.take().or(others.manager);
        for (own, other) in self.readouts.iter_mut().zip(others.readouts) {
            *own = own.take().or(other);
        }
        for (own, other) in self.builders.iter_mut().zip(others.builders) {
            *own = own.take().or(other);
        }
    }
}

/// A batch that is assigned but not done by its builder unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnfinishedBatch {
    /// Its slot.
    pub slot: SlotIndex,
    /// The slot's generation.
    pub generation: Generation,
    /// The batch.
    pub batch: Batch,
    /// Whether it was then assigned to another builder unit.
    #[serde(default)]
    pub again: bool,
}
