//! The soft RDMA device: a channel adapter whose work the initiator's processor does.
//!
//! On one host the initiator plays both adapters. It checks the target's memory key, copies once,
//! straight into the target's memory, and writes the target's completion. The target process is
//! not involved. The objects that peers read or write (queue pair entries, memory keys, receive and
//! completion queues, `layout`) lie in one shared arena per process. A process keeps its own records
//! in private memory, so that a peer's stray store causes errors and never a crash.
//!
//! Read in this order: [`Context`], [`Pd`], [`Mr`], [`Cq`], [`Qp`]; then `adapter` (tables and peers), `progress` and
//! `server` (threads), and `qp::transfer` (data path).
//!
//! Modules form layers, and none depends on a layer above it (`tests/layers.rs` checks this):
//!
//! ```text
//! qp                                         queue pairs, data path
//! send_wr  srq
//! mr  xrc
//! pd  dm  cq                                 verbs objects
//! context
//! startup  server  progress                  the device's two threads
//! region_mover                               pages that peers can map
//! adapter                                    the tables of the process
//! roce_port
//! multicast  xrc_srq_table
//! peer_table  qp_table                       queue pairs as traits
//! peer
//! mr_table  srq_wqes  tasks  gsi            tables
//! exported_files  ipc  recv_queue
//! layout  path  timers                       the arena, other processes
//! slot_table  event_sources  move_queue      objects by number
//! errno  types  caps  event  gid  clock  channel_table
//! ```
//!
//! Semantics follow the InfiniBand Architecture Specification, volume 1 (queue pair states:
//! chapter 10.3; completion codes: 10.10 and 11.6; reliable connection: 9.7) and the verbs manual
//! pages. Departures:
//! - a work request to a peer on this host completes before `post_send` returns;
//! - a request to a process that has exited completes with RETRY_EXC_ERR when the first ACK timer expires, without
//!   further retries.

mod adapter;
mod address_changes;
mod caps;
mod channel_table;
mod clock;
mod context;
mod cq;
mod dm;
mod errno;
mod event;
mod event_sources;
mod exported_files;
pub mod gid;
pub mod gid_table;
pub mod gsi;
mod ipc;
mod layout;
mod move_queue;
pub mod mr;
mod mr_table;
mod multicast;
pub mod path;
mod pd;
mod peer;
mod peer_channels;
mod peer_table;
mod progress;
pub mod qp;
mod qp_table;
mod recv_queue;
mod region_mover;
mod roce_port;
pub mod send_wr;
mod server;
mod slot_table;
mod srq;
mod srq_wqes;
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
