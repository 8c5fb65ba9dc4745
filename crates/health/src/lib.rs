//! Mutual fault awareness of hosts, adapters and neighbours (LO|FA|MO) as state machines without I/O or clock.
//!
//! ```text
//!   host monitor ── HWR ──► adapter monitor ── diagnosis word in every frame ──► neighbours' adapters ── RFD ──► their hosts
//!                ◄── DWR ──                 ── news over several hops ─────────► any host with a service network
//!   host monitors ── reports over the service network ──► supervisors ── verdict of each node
//! ```
//! Host and adapter watch each other's registers ([`registers`], [`watch`]). The adapter judges its links ([`link`]). A
//! monitor without a service network sends its report as [`news`]. A supervisor decides about all nodes ([`verdict`]).
#![forbid(unsafe_code)]

pub mod link;
pub mod news;
pub mod registers;
pub mod timers;
pub mod verdict;
pub mod watch;

pub use link::{LinkEvent, LinkMonitor};
pub use news::{News, NewsRelay};
pub use timers::{Timers, TimersError};
pub use verdict::{NodeState, Page, Reports};
pub use watch::{PeerState, PeerWatch};
