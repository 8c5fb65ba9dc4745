//! The event builder without its processes: deterministic state machines for the three kinds of unit.
//!
//! Input goes in through `handle_*`, output comes out through `poll_*`, and time is an argument; there
//! is no I/O, no clock, no thread and no allocation per batch. The same machines run in the processes,
//! under simulated time in the tests, and in the model.
//!
//! ```text
//!            Grant, Done, Short, Fault            Assign, Stop, Settle, Alive
//!   Builder ───────────────────────────► Manager ─────────────────────────────► Builder, Readout
//!   Readout ── WRITE of each packet, the last with immediate data ────────────► slot of a Builder
//! ```
//!
//! One batch's way through them:
//! 1. [`Builder`] grants a free slot to [`Manager`]: a credit. A granted slot has a new [`Life`].
//! 2. [`Manager`] assigns the next batch to that slot and tells all readout units and that builder unit.
//! 3. Each [`Readout`] writes its sources' packets to their places in the slot. Its last write carries
//!    an [`Immediate`]: the slot, and the low bits of the slot's life.
//! 4. When every readout unit's immediate data has arrived, [`Builder`] has the batch processed, learns
//!    the [`Verdict`], lets accepted events be copied out, reports `Done` and grants the slot's next life.
//!
//! The end of a run, for whatever cause, is one sequence: the manager sends `Stop`; readout units finish
//! the writes they have posted and report; the manager sends `Settle`; builder units finish the batches
//! that arrived whole and report; [`Ledger`] merges the reports into the [`Account`] and checks the
//! conservation law. Every wait in it is bounded, and a unit that does not answer counts as lost.
//!
//! Read [`types`] and [`message`] first, then [`manager`], [`readout`], [`builder`], then [`ledger`].
#![forbid(unsafe_code)]

pub mod account;
pub mod builder;
mod deadlines;
pub mod ledger;
pub mod manager;
pub mod message;
pub mod plan;
pub mod readout;
pub mod report;
pub mod shape;
pub mod types;

pub use account::{Account, Tally, Verdict};
pub use builder::Builder;
pub use ledger::Ledger;
pub use manager::Manager;
pub use message::Message;
pub use plan::Plan;
pub use readout::Readout;
pub use types::{
    BatchId, BuIndex, Bytes, EventNumber, Immediate, Life, Nanos, RuIndex, SlotIndex, StopCause, Unit,
};
