//! Software trigger: worker processes that decide on events in a builder unit's memory.
//!
//! ```text
//!  builder unit ── Hello: layout of a slot, memory descriptor ─► worker     (once)
//!               ── Job: slot, events, candidates ──────────────► worker     at most `credits` at a time
//!               ◄─ Reply: accepted events ────────────────────── worker
//! ```
//!
//! A worker's standard input is a SOCK_SEQPACKET socket to its builder unit. It maps landing memory read-only and reads
//! payload in place. The slot of a job stays in use until its reply. A worker ends when the socket ends.
//!
//! A worker is a program around [`serve`]:
//!
//! ```no_run
//! fn main() -> Result<(), millstream_software_trigger::WorkerError> {
//!     // Accept events with more than 10 kB of payload.
//!     millstream_software_trigger::serve(|event| {
//!         event.fragments().iter().map(|fragment| fragment.payload().len()).sum::<usize>() > 10_000
//!     })?;
//!     Ok(())
//! }
//! ```
//!
//! `docs/event-builder.md` has the configuration, `docs/formats.md` the messages, for workers in other languages.

mod event;
pub mod protocol;
mod worker;

pub use event::{Event, EventFragment};
pub use worker::{WorkerError, WorkerStatistics, serve, serve_on};
