//! The torus network as state machines without I/O, clock or threads.
//!
//! The node processes, the tests and the model run this crate. Input is `handle_*`, output is `poll_*`, time is an
//! argument.
//!
//! ```text
//!   packet ─► Sources (pairs, routes, epochs) ─► Router ═ link ═ Router ═ … ═ Router ─► PairReceiver ─► memory
//!                 ▲ Effect                          ▲ tables
//!   Coordinator ─ Order ─► Participant ─────────────┘
//! ```
//! Read [`topology`] and [`route`] first, then [`header`], [`router`], [`pair`], [`sources`] and [`epoch`].
#![forbid(unsafe_code)]

pub mod epoch;
pub mod faults;
pub mod header;
pub mod pair;
pub mod port;
pub mod route;
pub mod router;
pub mod sources;
pub mod topology;

pub use faults::DeadSet;
pub use header::{Acknowledgement, Header};
pub use pair::{Generation, PairReceiver, PairSender, Sequence};
pub use port::Port;
pub use route::{Route, VirtualChannel};
pub use router::{Router, RouterOptions, TorusRouting};
pub use sources::{Sources, Unreachable};
pub use topology::{Axis, Coordinates, Dimensions, Direction, Link, NodeNumber, Sign};

use std::fmt;

/// Number of a configuration of routes. All nodes use the same dead set in one epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Epoch(pub u32);

impl Epoch {
    /// The next epoch.
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(self.0.wrapping_add(1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}
