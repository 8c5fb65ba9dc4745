//! Event-building protocol as state machines without I/O: event manager, readout unit, builder unit.
//!
//! Input is `handle_*`, output is `poll_*`, time is an argument. There is no I/O, no clock, no thread, and no
//! allocation per batch. The processes, the tests under simulated time, and the model run the same machines.
//!
//! ```text
//!            Grant, Done, MissingFragments, Fault          Assign, Stop, Drain, Heartbeat
//!   Builder ──────────────────────────────────► Manager ─────────────────────────────────► Builder, Readout
//!   Readout ── RDMA WRITE of each packet, the last with immediate data ──────────────────► slot of a Builder
//! ```
//!
//! The path of one batch:
//! 1. [`Builder`] grants a free slot to [`Manager`]: a credit. A granted slot has a new [`Generation`].
//! 2. [`Manager`] assigns the next batch to that slot. It sends `Assign` to all readout units and that builder unit.
//! 3. Each [`Readout`] writes its sources' packets into the slot. The last write carries an [`Immediate`]: the
//!    slot and the low bits of its generation.
//! 4. When the immediate data of every readout unit has arrived, the caller of [`Builder`] processes the batch and
//!    stores accepted events. [`Builder`] takes the [`BatchOutcome`], reports `Done` and grants the slot's next generation.
//!
//! Every run ends with the same sequence. The manager sends `Stop`; readout units finish their posted writes and
//! report. The manager sends `Drain`; builder units finish complete batches and report. [`ReportMerger`] merges
//! the reports into the [`RunSummary`] and checks the invariants. Every wait is bounded; a unit that does not report
//! in time counts as lost.
//!
//! If the manager is lost, a standby manager may take over ([`takeover`]).
//!
//! Read [`types`] and [`message`] first, then [`manager`], [`readout`], [`builder`], then [`merge`].
#![forbid(unsafe_code)]

pub mod builder;
mod deadlines;
pub mod manager;
pub mod merge;
pub mod message;
pub mod plan;
pub mod readout;
pub mod recovery;
pub mod report;
pub mod shaping;
pub mod summary;
pub mod takeover;
pub mod types;
mod watch;

pub use builder::Builder;
pub use manager::Manager;
pub use merge::ReportMerger;
pub use message::Message;
pub use plan::Plan;
pub use readout::Readout;
pub use recovery::RecoveryPolicy;
pub use summary::{BatchOutcome, Counts, RunSummary};
pub use types::{
    BatchId, BuIndex, Bytes, EventNumber, Generation, Immediate, Instant, RuIndex, SlotIndex, StopCause,
    Term, Unit,
};
