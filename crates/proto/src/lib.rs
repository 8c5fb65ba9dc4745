//! The transport layer of RoCEv2 as state machines without I/O.
//!
//! A [`Connection`] is a queue pair of a connected service (RC, UC, XRC), a [`UdQueuePair`] one of the
//! datagram service. Neither has sockets, clocks or memory. `handle_datagram` takes received packets,
//! `poll_transmit` builds packets to send, `poll_event` returns completions. Time is an argument:
//! [`poll_timeout`] returns when to call [`handle_timeout`]. The caller's [`Memory`] copies payload directly
//! between packets and the application's memory.
//!
//! Read first: [`Connection`], [`Memory`], [`SendRequest`]; then `requester` and `responder`, which implement
//! chapter 9.7 of the InfiniBand Architecture Specification, volume 1.
//!
//! [`poll_timeout`]: Connection::poll_timeout
//! [`handle_timeout`]: Connection::handle_timeout

#![forbid(unsafe_code)]

mod burst;
mod config;
mod connection;
mod event;
mod extended_psn;
mod memory;
mod reorder_buffer;
mod request;
mod requester;
mod responder;
mod selective_ack;

mod ud;

pub use burst::{IpIdentification, Transmit, TransmitLimits};
pub use config::{Changes, Config, Mtu, RdAtomic, SendConfig, Service};
pub use connection::{Connection, Counters, Disposition, DropReason, QpState};
pub use event::{Event, FailureCause, Received, ReceivedKind, Status};
pub use memory::{Access, Atomic, DeliveryError, Memory, NakReason};
pub use millstream_quantity::{Instant, ack_timeout};
pub use request::{PostError, ReceiveId, SendModifier, SendOp, SendRequest, WorkId};
pub use ud::{Datagram, DatagramDestination, DatagramSource, UdConfig, UdQueuePair};

/// No message is longer (9.4.1.1: 2³¹ bytes).
pub const MAX_MESSAGE: u32 = 1 << 31;
