//! What a run does when it loses a unit.
//!
//! A builder unit that is lost: readout units still have its batches, because a batch is released only when its slot is
//! assigned again. The manager assigns the batches that it had not reported done to other builder units ([`OnBuilderLoss`]).
//! A readout unit that is lost: builder units complete batches without it ([`OnReadoutLoss`]).
//!
//! A unit that does not respond is *excluded* first: its peers stop using it, and its process is ended. Its batches
//! are assigned again only when it has reported or ended, so that no two units store one event.

use serde::{Deserialize, Serialize};

/// What a run does when it loses a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryPolicy {
    /// When a builder unit is lost.
    pub builder: OnBuilderLoss,
    /// When a readout unit is lost.
    pub readout: OnReadoutLoss,
    /// The last builder units by index that get batches only once another one is lost.
    pub spare_builders: u16,
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
