//! The service network: node processes and host monitors report to supervisors, which change routes.
//!
//! ```text
//!   host monitor ── Report ──► supervisors (all)      node process ◄─ Order ── acting supervisor
//!                                                                  ── Answer ─►
//! ```
//! Lines of JSON over TCP, after both ends have proved that they know the run's key. The lowest live supervisor acts. Read [`message`], [`supervisor_core`] (the machine) and [`supervisor`]
//! (the process).

pub(crate) mod lines;
pub mod message;
pub mod picture;
pub mod supervisor;
pub mod supervisor_core;
pub mod watcher;

pub use message::{FromSupervisor, LostNodes, NodeRow, ToSupervisor, TorusState, Who};
pub use supervisor_core::SupervisorCore;
