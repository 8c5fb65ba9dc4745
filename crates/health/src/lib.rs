//! Mutual fault awareness of hosts, adapters and neighbours (LO|FA|MO) as state machines without I/O or clock.
//!
//! ```text
//!   host monitor ── HWR ──► adapter monitor ── diagnosis word in every frame ──► neighbours' adapters ── RFD ──► their hosts
//!                ◄── DWR ──                 ── reports flooded over links ─────► any host with a service network
//!   host monitors ── reports over the service network ──► supervisors ── verdict of each node
//! ```
//! Host and adapter watch each other's registers ([`registers`], [`watch`]). The adapter judges its links ([`link`]). A
//! monitor without a service network may flood its report over the links ([`flooding`]; the processes of `millstream-torus` do
//! not). A supervisor decides about all nodes ([`verdict`]). All of them judge by a clock that leaves out their own pauses ([`clock`]).
#![forbid(unsafe_code)]

pub mod clock;
pub mod flooding;
pub mod link;
pub mod registers;
pub mod timers;
pub mod verdict;
pub mod watch;

pub use clock::ObserverClock;
pub use flooding::{FloodedReport, FloodingRelay};
pub use link::{LinkEvent, LinkMonitor};
pub use timers::{Timers, TimersError};
pub use verdict::{HostReport, NodeState, Reports};
pub use watch::{PeerState, PeerWatch};
