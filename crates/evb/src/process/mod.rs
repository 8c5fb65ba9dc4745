//! Processes that run the core's state machines: they do the I/O, the core decides.
//!
//! ```text
//!             TCP: startup, liveness, reports             SEND: control messages
//!   launcher ─────── manager ═══════════════════ readout units, builder units
//!                                                     ║ WRITE, the last with immediate data
//!   card  ◄── rings, interrupts ── builder unit ◄═════╝ lands in the card's memory
//! ```
//!
//! - [`launcher`] starts all processes of a run on this host, and builds the run summary if the manager cannot. On a
//!   cluster, the site's launcher starts each process with the arguments of [`child::Child`].
//! - [`manager`], [`readout`] and [`builder`] are one process each; [`card`] is the process of an emulated card, [`standby`]
//!   that of the standby manager.
//! - Each unit's TCP stream to the manager stays open; its end means that the unit died. Control messages use a
//!   reliable connection.
//!
//! `startup.rs` describes the startup, `joining.rs` how a unit joins a run in progress.

mod admission;
mod availability;
pub mod builder;
pub mod card;
pub mod child;
mod clock;
mod commands;
mod control;
mod corruption;
pub(crate) mod error;
mod joining;
pub mod launcher;
pub mod manager;
mod manager_link;
mod own;
pub mod readout;
mod rendezvous;
pub mod sink;
pub mod standby;
mod startup;
pub mod usage;

use crate::config::RunConfig;
use millstream_rdma::connect::{AckTimeout, RcOptions};
use millstream_rdma::message::MessageChannelOptions;
use millstream_rdma::{Device, DeviceSelector, device};

pub use admission::ReportRefused;
pub use error::ProcessError;
pub use launcher::{Launcher, RunOutcome};
pub use own::OwnConfig;
pub use sink::{AcceptedBatch, AcceptedEvent, EventOfBatch, PacketPlace, Sink, SinkError, WrittenBytes};

/// Options of the run's connections: a link that is cut for less than the run's timeout does not break them. All retries
/// together take that long; with adapters that wait longer than their ACK timeout, more.
fn connection_options(config: &RunConfig) -> RcOptions {
    let options = RcOptions::default();
    let attempts = u32::from(options.retries) + 1;
    let wanted = AckTimeout::at_least(config.plan.timeout / attempts);
    let ack_timeout = if wanted.time() > options.ack_timeout.time() { wanted } else { options.ack_timeout };
    RcOptions { ack_timeout, ..options }
}

/// Options of the control connections.
fn control_options(config: &RunConfig) -> MessageChannelOptions {
    MessageChannelOptions {
        connection: RcOptions { max_inline: 0, ..connection_options(config) },
        ..MessageChannelOptions::default()
    }
}

/// Opens the run's RDMA device. `auto` uses the environment.
fn open_device(config: &RunConfig) -> Result<Device, ProcessError> {
    let choice = match config.device.as_str() {
        "auto" => DeviceSelector::from_environment(),
        name => name.parse().unwrap_or_else(|never: std::convert::Infallible| match never {}),
    };
    Ok(device::open(&choice)?)
}
