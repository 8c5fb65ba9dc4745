//! Run control of the event builder.
//!
//! One process starts and stops runs on the commands of operators, records each run in a log book, and shows what
//! happens.
//!
//! - [`machine`]: the states and commands, without I/O. Start reading there.
//! - [`configuration`]: the checked configuration of the next run, and changed settings.
//! - [`directory`], [`logbook`]: run numbers, log book, reports.
//! - [`control`]: the machine with its directory and the present run.
//! - [`status`]: what clients see.
//! - [`metrics`]: the list of metrics and their Prometheus text.
//! - [`power`]: energy, temperatures, governor and throttling of the host.
//! - [`http`]: the HTTP API and the page; [`client`]: its client.
//!
//! `docs/run-control.md` describes the use.
#![forbid(unsafe_code)]

mod backend;
pub mod client;
pub mod configuration;
pub mod control;
pub mod directory;
pub mod display;
mod error;
pub mod http;
mod live_run;
pub mod logbook;
pub mod machine;
pub mod metrics;
pub mod power;
mod request;
pub mod status;
pub mod token;
mod totals;

pub use backend::{Backend, FinishedRun};
pub use control::RunControl;
pub use error::ControlError;
pub use request::Request;
pub use totals::Totals;
