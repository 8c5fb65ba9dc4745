//! What each unit knows when a run ends: the evidence that [`Ledger`](super::Ledger) merges.

use super::account::Totals;
use super::plan::Batch;
use super::types::{Bytes, Life, RuIndex, SlotIndex, StopCause};
use serde::{Deserialize, Serialize};

/// A readout unit's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadoutReport {
    /// Why it stopped, as far as it knows.
    pub cause: StopCause,
    /// Fragments read from its sources.
    pub fragments_read: u64,
    /// Their payload.
    pub bytes_read: Bytes,
    /// Fragments read but then not sent.
    pub fragments_unsent: u64,
    /// What it sent, by builder unit.
    pub sent: Vec<Sent>,
}

/// What a readout unit sent to one builder unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// Batches.
    pub batches: u64,
    /// Events of those batches.
    pub events: u64,
    /// Fragments.
    pub fragments: u64,
    /// The last batch sent to each slot. An earlier one is done: its slot was granted again.
    pub last: Vec<Posted>,
}

/// A batch that a readout unit sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Posted {
    /// Where to.
    pub slot: SlotIndex,
    /// The slot's life.
    pub life: Life,
    /// The batch.
    pub batch: Batch,
    /// Fragments of it.
    pub fragments: u32,
}

/// A builder unit's report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderReport {
    /// Why it stopped, as far as it knows.
    pub cause: StopCause,
    /// What became of the batches that it finished.
    pub done: Totals,
    /// Events of all batches that it was told to expect.
    pub events_assigned: u64,
    /// Fragments that arrived, by readout unit.
    pub arrived: Vec<u64>,
    /// Every slot, by [`SlotIndex`].
    pub slots: Vec<SlotReport>,
    /// Arrivals refused, by [`Rule`](super::types::Rule): rules without one are left out.
    pub refused: Vec<(super::types::Rule, u64)>,
}

/// A slot's last life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotReport {
    /// The life; 0 if the slot was never granted.
    pub life: Life,
    /// How far that life got.
    pub state: SlotEnd,
}

/// How far a slot's last life got.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotEnd {
    /// Its batch is among the finished ones; or the slot was never granted.
    Finished,
    /// Granted, perhaps assigned, perhaps written to, but not finished.
    Open {
        /// The batch, if the builder unit was told.
        batch: Option<Batch>,
        /// Fragments that arrived, by readout unit.
        arrived: Vec<(RuIndex, u32)>,
        /// Why it is not finished; counts only if something arrived.
        cause: OpenCause,
    },
}

/// Why a batch of which something arrived is not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenCause {
    /// Incomplete: a readout unit whose fragments lack is lost.
    ReadoutLost,
    /// Incomplete: fragments did not come in time.
    TimedOut,
    /// Incomplete: the run stopped first.
    Stopped,
    /// Complete, but not processed, or not released.
    Unprocessed,
}

/// The manager's report: its view of every builder unit, which stands in for lost ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManagerReport {
    /// Why the run ended.
    pub cause: StopCause,
    /// By builder unit.
    pub builders: Vec<BuilderView>,
}

/// What the manager knows of one builder unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderView {
    /// Events of the batches assigned to it.
    pub events_assigned: u64,
    /// What became of the batches that it reported done.
    pub done: Totals,
    /// Fragments in those batches, by readout unit.
    pub arrived: Vec<u64>,
    /// Batches assigned and not reported done.
    pub open: Vec<OpenBatch>,
}

/// A batch that is assigned and not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenBatch {
    /// Its slot.
    pub slot: SlotIndex,
    /// The slot's life.
    pub life: Life,
    /// The batch.
    pub batch: Batch,
}
