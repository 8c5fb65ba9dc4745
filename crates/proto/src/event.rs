//! What a queue pair has to tell.

use core::net::IpAddr;

use millstream_wire::{Qpn, Rkey};

use crate::request::{ReceiveId, WorkId};

/// How a request ended (10.10.3, 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Well.
    Success,
    /// A message was longer than the receive request.
    LocalLength,
    /// The queue pair could not do it.
    LocalOperation,
    /// A local key does not allow it.
    LocalProtection,
    /// The queue pair had failed before.
    Flushed,
    /// A memory window could not be bound.
    Bind,
    /// The other side could make no sense of it.
    RemoteInvalidRequest,
    /// The other side's memory key does not allow it.
    RemoteAccess,
    /// The other side could not do it.
    RemoteOperation,
    /// No answer, however often it was tried.
    RetryExceeded,
    /// No receive request at the other side, however often it was tried.
    RnrRetryExceeded,
}

/// What a queue pair has to tell. Completions of send requests come in the order in which they were posted,
/// those of receive requests in the order in which they were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A send request is complete.
    Completed {
        /// Which one.
        id: WorkId,
        /// How it ended.
        status: Status,
    },
    /// A receive request is complete.
    Received(Received),
    /// The first packet came in while the queue pair only receives (`IBV_EVENT_COMM_EST`).
    Established,
    /// The send queue is drained (`IBV_EVENT_SQ_DRAINED`).
    Drained,
    /// The queue pair is in its error state. Send requests have been flushed; receive requests that the
    /// machine has not taken are the caller's to flush.
    Failed(Fault),
}

/// A completed receive request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Which one.
    pub id: ReceiveId,
    /// How it ended. If not well, only `id` means something.
    pub status: Status,
    /// By what.
    pub kind: ReceivedKind,
    /// Bytes of the message; for a datagram without the 40 bytes in front.
    pub len: u32,
    /// Immediate data.
    pub immediate: Option<[u8; 4]>,
    /// The key that the message invalidated.
    pub invalidated: Option<Rkey>,
    /// Whether the sender asked for a solicited event.
    pub solicited: bool,
    /// Where a datagram came from.
    pub source: Option<(IpAddr, Qpn)>,
}

/// By what a receive request was used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceivedKind {
    /// SEND.
    Send,
    /// WRITE with immediate data; its payload is elsewhere.
    Write,
}

/// Why a queue pair failed, as asynchronous events tell it (11.6.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A send request completed with an error; its completion says more, no asynchronous event is due.
    Request,
    /// The caller wanted it.
    Asked,
    /// The peer's request made no sense (`IBV_EVENT_QP_REQ_ERR`).
    PeerRequest,
    /// The peer used a key that does not allow it (`IBV_EVENT_QP_ACCESS_ERR`).
    PeerAccess,
    /// A receive request's memory (`IBV_EVENT_QP_FATAL`; its completion says more).
    Receive,
}
