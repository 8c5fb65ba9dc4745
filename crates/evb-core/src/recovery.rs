//! What a run does when it loses a unit.
//!
//! A builder unit that is lost: readout units still have its batches, because a batch is released only when its slot is
//! assigned again. The manager assigns the batches that it had not reported done to other builder units ([`OnBuilderLoss`]).
//! A readout unit that is lost: builder units complete batches without it ([`OnReadoutLoss`]).
//!
//! A unit that does not respond is *excluded* first: its peers stop using it, and its process is ended. Its batches
//! are assigned again only when it has reported or ended, so that no two units store one event.
//!
//! A lost unit may join again, as a *restart* with an index of its own ([`Plan`](super::Plan)). A builder unit starts with
//! empty slots. A readout unit sends from a batch boundary on: the manager's next batch. Earlier batches stay without its
//! sources, also if they are assigned again.

use super::types::{BatchId, BuIndex, RuIndex, Term};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a run does when it loses a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPolicy {
    /// When a builder unit is lost.
    pub builder: OnBuilderLoss,
    /// When a readout unit is lost.
    pub readout: OnReadoutLoss,
    /// The last builder units by index that get batches only once another one is lost.
    pub spare_builders: u16,
    /// How often each unit may join again.
    #[serde(default)]
    pub restarts: u16,
    /// How long a run without a readout unit, or without a builder unit, waits for one to join again.
    #[serde(default)]
    pub join_timeout: Duration,
    /// How long units wait for the standby manager once the manager is lost; 0: there is no standby manager, and the run
    /// stops.
    #[serde(default)]
    pub takeover_timeout: Duration,
}

impl RecoveryPolicy {
    /// Whether there is a standby manager.
    pub fn has_standby(&self) -> bool {
        self.takeover_timeout > Duration::ZERO
    }
}

/// The units of a run at one time, for a unit that joins it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// The term of the manager.
    #[serde(default)]
    pub term: Term,
    /// By the index at the start.
    pub readouts: Vec<ReadoutMember>,
    /// Builder units that are lost, or have not joined.
    pub absent_builders: Vec<BuIndex>,
    /// The first batch that a readout unit that joins gets.
    pub first_batch: BatchId,
    /// Events of the run before that batch.
    pub first_event: u64,
}

/// The last readout unit that had one set of sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadoutMember {
    /// Its index.
    pub index: RuIndex,
    /// Whether it is lost.
    pub is_lost: bool,
    /// The first batch that it sends.
    pub first_batch: BatchId,
}

/// What a run does when it loses a builder unit or its card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBuilderLoss {
    /// The run stops.
    #[default]
    Stop,
    /// Other builder units build its unfinished batches. The run stops if there is none.
    Rebuild,
}

/// What a run does when it loses a readout unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnReadoutLoss {
    /// The run stops.
    #[default]
    Stop,
    /// Events are built without its sources and stored as other events are.
    Deliver,
    /// Events without its sources are counted, but not stored.
    Discard,
}
