//! Runs the processes of a distributed run on the ranks of a job that Slurm, `mpirun` or a script has started.
//!
//! ```text
//!   rank 0                                             rank r
//!   launcher ── stdio ── relay ══ TCP ══ hub ══ TCP ══ agent ── stdio ── process
//! ```
//!
//! - [`Job`]: rank, number of ranks and meeting point, from the environment of the launcher or from options.
//! - [`Hub`]: at rank 0; waits for all ranks and forwards processes to them.
//! - [`agent`]: at every rank; starts processes of its own command line when the hub requests them.
//! - [`relay`]: stands for a process of another rank. A launcher starts it as it would start the process: standard
//!   streams and the exit status are those of the process. If the relay is killed, so is the process.
//!
//! A rank executes only what its own command line allows: the hub sends a role, never a program. Only relays that have the
//! hub's random key, on its own host, request processes. Hub and ranks prove the job's key to each other without sending it
//! (`proof`). `MILLSTREAM_JOB_SECRET`, if set on all ranks, is part of that key; without it the key can be guessed.

pub mod agent;
mod environment;
mod error;
mod frame;
mod hub;
mod inherited;
mod nodelist;
mod proof;
pub mod relay;

pub use environment::{Job, Rendezvous};
pub use error::JobError;
pub use frame::StartRequest;
pub use hub::Hub;
pub use inherited::Inherited;
