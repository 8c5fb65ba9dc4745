//! The transport of RoCEv2 as state machines: what two channel adapters do so that messages arrive.
//!
//! A [`Connection`] is one queue pair of the reliable (RC) or unreliable (UC) connected service, a [`Datagrams`]
//! one of the datagram service (UD). Neither has sockets, clocks or memory: packets come in through
//! `handle_datagram` and go out through `poll_transmit`, time is an argument, [`poll_timeout`] says when to
//! call [`handle_timeout`], and completions come out of `poll_event`. Payload stays where it is: the machines
//! say which bytes of which request, and the caller's [`Memory`] copies them, straight between the application's memory and
//! the packet.
//!
//! Read first: [`Connection`], [`Memory`], [`Request`]; then `requester` and `responder`, each of which is one
//! half of chapter 9.7 of the InfiniBand Architecture Specification, volume 1.
//!
//! [`poll_timeout`]: Connection::poll_timeout
//! [`handle_timeout`]: Connection::handle_timeout

#![forbid(unsafe_code)]

mod burst;
mod config;
mod connection;
mod datagrams;
mod early;
mod event;
mod memory;
mod request;
mod requester;
mod responder;
mod sequence;

pub use burst::{Identification, Limits, Transmit};
pub use config::{Config, Mtu, RdAtomic, SendConfig, Service};
pub use connection::{Connection, Counters, Disposition, DropReason, State};
pub use datagrams::{Datagram, Datagrams, DatagramsConfig, Destination, Envelope};
pub use event::{Event, Fault, Received, ReceivedKind, Status};
pub use memory::{Access, Atomic, DeliveryFault, Memory, Refusal};
pub use millstream_quantity::{Instant, ack_timeout};
pub use request::{PostError, ReceiveId, Request, Trailer, Work, WorkId};

/// No message is longer (9.4.1.1: 2³¹ bytes).
pub const MAX_MESSAGE: u32 = 1 << 31;
