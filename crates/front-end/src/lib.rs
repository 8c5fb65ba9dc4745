//! Shared-memory ring from a front-end process to a readout unit of the same host.
//!
//! ```text
//!  front end ── connects to the abstract socket ─────────────► readout unit
//!            ◄─ descriptors: ring memory, wake-up ────────────
//!            ── records: source, event, CRC-32, payload ─────► ring
//!            ◄─ busy: set above the high, cleared below the low mark
//! ```
//!
//! Each connection has a ring of its own with one producer ([`FrontEnd`]) and one consumer ([`RingConsumer`]). Ring memory is
//! a sealed memfd, so nothing is left behind when a process is killed. A refused fragment is counted by its source, and so is
//! the time from the first refusal to the next accepted fragment: dead time.
//!
//! `include/millstream_front_end.h` is the producer in C, `docs/formats.md` describes the memory.

mod consumer;
pub mod layout;
mod producer;

pub use consumer::{InvalidRecord, Record, RingConsumer, RingListener, RingOptions};
pub use producer::{ConnectError, FrontEnd, Push};
