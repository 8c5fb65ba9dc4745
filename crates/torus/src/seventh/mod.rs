//! The seventh port: hosts outside of the torus put, get and notify through a node, their gateway.
//!
//! ```text
//!   outside host ── RC: WRITE of data, SEND of commands ──► gateway's node process ══ torus ══ any node
//!                ◄── WRITE of data, SEND of completions ──
//! ```
//! Both ends of a connection have staging memory of one layout: data lie at the same offset at both ends. The gateway posts
//! commands at [`Port::Seventh`](millstream_torus_core::Port), whose pairs and injection queues are apart from those of
//! the gateway's application. Outside hosts reach regions that applications published, and nothing else.
//!
//! Read `message` (commands and completions), `handshake` (who is admitted), `channel` (one connection, the same at
//! both ends), `gateway` (the node's side), `host` (the [`Fabric`](millstream_fabric::Fabric) of an outside
//! host) and `directory` (names of published regions).

mod channel;
pub mod directory;
mod fabric;
pub(crate) mod gateway;
mod handshake;
pub mod host;
mod message;

pub use gateway::OutsideCounters;
pub use handshake::{GatewayOptions, HostError};
