//! The soft RDMA device: what a channel adapter does, done by the initiator's processor.
//!
//! On one host the initiator plays both adapters. It checks the target's memory key, copies once,
//! straight into the target's memory, and writes the target's completion; the target process is
//! not involved. What peers need to see of each other (queue pair entries, memory keys, receive and
//! completion queues, [`layout`]) lies in one shared arena per process; what a process believes
//! lies in its private memory, so that a peer's stray store costs errors and never a crash.
//!
//! Read in this order: [`Context`], [`Pd`], [`Mr`], [`Cq`], [`Qp`]; then `host` (the process's
//! threads and its peers) and `qp::transfer` (the data path).
//!
//! Semantics follow the InfiniBand Architecture Specification, volume 1 (queue pair states:
//! chapter 10.3; completion codes: 10.10 and 11.6; reliable connection: 9.7), as the verbs manual
//! pages render them. Departures:
//! - a work request to a peer on this host completes before `post_send` returns;
//! - a peer known to be gone is reported as RETRY_EXC_ERR when the first ACK timer expires, without waiting out the
//!   retries.

mod adapter;
mod caps;
mod channel_table;
mod clock;
mod context;
mod cq;
mod dm;
mod errno;
mod event;
mod exported_files;
pub mod gid;
pub mod gsi;
mod ipc;
mod layout;
pub mod mr;
mod mr_table;
mod multicast;
pub mod path;
mod pd;
mod peer;
mod peer_table;
mod progress;
pub mod qp;
mod qp_table;
mod recv_queue;
mod roce_port;
pub mod send_wr;
mod server;
mod srq;
mod srq_slots;
mod startup;
mod tasks;
mod timers;
pub mod types;
mod xrc;
mod xrc_srq_table;

pub use caps::*;
pub use clock::{CLOCK_KHZ, WallClock};
pub use context::Context;
pub use cq::{Channel, Cq, CqPoller, PolledWc};
pub use dm::Dm;
pub use errno::{Errno, Result};
pub use event::{AsyncEvent, ObjectHandle};
pub use millstream_lockfree::Timestamp;
pub use mr::Mr;
pub use mr::window::Mw;
pub use multicast::is_group;
pub use pd::{Pd, Td};
pub use qp::Qp;
pub use srq::Srq;
pub use xrc::{Xrcd, XrcdOpenFlags};
