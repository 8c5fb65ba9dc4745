//! The torus between processes.
//!
//! ```text
//!   application ── command ring, completion ring (shared memory) ── node process ══ RC to six neighbours ══ node processes
//! ```
//! A node process owns the registered memory and the connections, so packets pass a node whose application is busy or
//! absent. Read [`engine`] (one node as a machine over any links), [`verbs`] (links over verbs), [`control`] (the memory
//! between application and node), [`application`] (the [`Fabric`](millstream_fabric::Fabric) of an application process),
//! [`node`] (the process), [`seventh`] (hosts outside of the torus) and [`launch`] (a torus on this host). [`direct`] is the same interface
//! where a switch joins all nodes.

pub mod application;
mod attach;
pub mod card;
pub mod control;
pub mod direct;
pub mod engine;
mod exchange;
pub mod health_page;
pub mod in_process;
mod initiator;
pub mod key;
pub mod launch;
mod layout;
pub mod memory;
pub mod monitor;
pub mod node;
mod outstanding;
mod proof;
pub mod service;
pub mod seventh;
mod staging;
pub mod traffic;
pub mod verbs;

pub use application::TorusNode;
pub use direct::DirectNode;
pub use seventh::host::OutsideHost;
