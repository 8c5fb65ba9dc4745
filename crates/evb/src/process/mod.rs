//! The processes around the core: they move bytes and time, and decide nothing.
//!
//! ```text
//!             TCP: wire-up, liveness, reports             SEND: control messages
//!   launcher ─────── manager ═══════════════════ readout units, builder units
//!                                                     ║ WRITE, the last with immediate data
//!   card  ◄── rings, interrupts ── builder unit ◄═════╝ lands in the card's memory
//! ```
//!
//! - [`launcher`] starts all processes of a run on this host and closes the account if the manager cannot.
//!   On a cluster the site's own launcher does that; then each process is started with the arguments that
//!   [`child::Child`] describes.
//! - [`manager`], [`readout`] and [`builder`] are one process each; [`card`] is an emulated card's.
//! - Each unit's TCP stream to the manager stays open: its end is the unit's death. Control messages go
//!   over a reliable connection of their own.
//!
//! `wire_up.rs` has the order in which they find each other.

pub mod builder;
pub mod card;
pub mod child;
mod clock;
mod control;
mod error;
pub mod launcher;
pub mod manager;
pub mod readout;
mod rendezvous;
pub mod sink;
mod wire_up;

use crate::config::Setup;
use millstream_rdma::{Device, DeviceSelector, device};

pub use error::ProcessError;
pub use launcher::{Launcher, RunOutcome};
pub use sink::{AcceptedEvent, Sink, SinkError};

/// Opens the run's RDMA device. `auto` leaves the choice to the environment.
fn open_device(setup: &Setup) -> Result<Device, ProcessError> {
    let choice = match setup.device.as_str() {
        "auto" => DeviceSelector::from_environment(),
        name => name.parse().unwrap_or_else(|never: std::convert::Infallible| match never {}),
    };
    Ok(device::open(&choice)?)
}
