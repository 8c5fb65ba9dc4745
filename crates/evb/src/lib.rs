//! Event builder over one-sided RDMA.
//!
//! Readout units write fragments into slots in the landing memory of builder units. The event manager assigns each
//! batch of events to a slot.
//!
//! - [`core`]: assignment, credits, completeness, timeouts and accounting, as state machines without I/O (crate
//!   `millstream-evb-core`). Start reading there.
//! - [`config`]: the run configuration in TOML and its checks.
//! - [`process`]: the processes that run the state machines over verbs.
//! - [`source`]: where the fragments of a readout unit come from.
//! - [`layout`]: the layout of slots and landing memory.
//!
//! `docs/event-builder.md` describes the configuration and the run summary of a run.
#![forbid(unsafe_code)]

pub mod config;
pub mod layout;
pub mod process;
pub mod source;

pub use millstream_evb_core as core;
