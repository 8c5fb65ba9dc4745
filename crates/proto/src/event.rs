//! Completions and asynchronous events of a queue pair.

use core::net::IpAddr;

use millstream_wire::{Qpn, Rkey};

use crate::request::{ReceiveId, WorkId};

/// Completion status (10.10.3, 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Success.
    Success,
    /// Local length error: the message was longer than the receive request.
    LocalLength,
    /// Local queue pair operation error.
    LocalOperation,
    /// Local protection error: a local key does not permit the access.
    LocalProtection,
    /// Work request flushed: the queue pair was in the error state.
    Flushed,
    /// Memory window bind error.
    Bind,
    /// Remote invalid request error.
    RemoteInvalidRequest,
    /// Remote access error: the R_Key does not permit the access.
    RemoteAccess,
    /// Remote operation error.
    RemoteOperation,
    /// Transport retry counter exceeded.
    RetryExceeded,
    /// RNR retry counter exceeded.
    RnrRetryExceeded,
}

/// An event of a queue pair. Send completions come in posting order, receive completions in the order in
/// which [`Memory::take_receive`](crate::Memory::take_receive) returned the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A send request completed.
    Completed {
        /// The send request.
        id: WorkId,
        /// Its status.
        status: Status,
    },
    /// A receive request completed.
    Received(Received),
    /// The first packet arrived in RTR (`IBV_EVENT_COMM_EST`).
    Established,
    /// The send queue is drained (`IBV_EVENT_SQ_DRAINED`).
    Drained,
    /// The queue pair moved to the error state. Send requests were flushed; the caller flushes receive
    /// requests that were not taken.
    Failed(FailureCause),
}

/// Completion of a receive request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The receive request.
    pub id: ReceiveId,
    /// Its status. Unless it is a success, only `id` is valid.
    pub status: Status,
    /// The operation that consumed the receive request.
    pub kind: ReceivedKind,
    /// Bytes of the message; without the 40-byte header of a datagram.
    pub len: u32,
    /// Immediate data.
    pub immediate: Option<[u8; 4]>,
    /// The R_Key that the message invalidated.
    pub invalidated: Option<Rkey>,
    /// Whether the sender requested a solicited event.
    pub solicited: bool,
    /// Source address and queue pair of a datagram.
    pub source: Option<(IpAddr, Qpn)>,
}

/// The operation that consumed a receive request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceivedKind {
    /// SEND.
    Send,
    /// WRITE with immediate data.
    Write,
}

/// The cause of a queue pair's move to the error state (11.6.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureCause {
    /// A send request failed; its completion has the status, and no asynchronous event follows.
    SendRequest,
    /// The caller moved the queue pair to the error state.
    Requested,
    /// The peer sent an invalid request (`IBV_EVENT_QP_REQ_ERR`).
    InvalidRequest,
    /// The peer violated access rights (`IBV_EVENT_QP_ACCESS_ERR`).
    AccessViolation,
    /// A receive request failed (`IBV_EVENT_QP_FATAL`); its completion has the status.
    ReceiveRequest,
}
