//! The event builder: readout units push fragments into slots of builder units' landing memory by
//! one-sided RDMA, and an event manager decides which builder unit takes which batch of events.
//!
//! - [`core`]: assignment, credits, completeness, timeouts and the conservation law, as state
//!   machines that do no I/O and know no clock: the crate `millstream-evb-core`. Start reading there.
//! - [`config`]: the run's description in TOML, and everything that can be refused before it starts.
//! - [`process`]: the processes that do what the core says, over verbs.
//! - [`layout`]: where each source's packet lies in a slot, and each slot in landing memory.
//!
//! `docs/event-builder.md` describes the configuration and the account that a run ends with.
#![forbid(unsafe_code)]

pub mod config;
pub mod layout;
pub mod process;

pub use millstream_evb_core as core;
