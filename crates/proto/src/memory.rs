//! The transport's interface to the application's memory and receive queue.

use millstream_wire::{NakCode, Rkey, Srqn};

use crate::event::Status;
use crate::request::{ReceiveId, WorkId};

/// Remote access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// READ.
    Read,
    /// WRITE and atomic WRITE.
    Write,
    /// Compare and swap, fetch and add.
    Atomic,
}

/// An atomic operation on a word in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Stores `swap` if the word equals `compare`.
    CompareSwap {
        /// Value to compare with.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Adds to the word.
    FetchAdd(u64),
}

/// The reason of the NAK for a peer's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NakReason {
    /// The R_Key does not permit the access (9.7.4.1.5: unknown, other domain, out of bounds, missing right).
    RemoteAccess,
    /// The request is invalid.
    InvalidRequest,
    /// The responder failed to execute the request.
    RemoteOperational,
}

impl NakReason {
    pub(crate) const fn nak(self) -> NakCode {
        match self {
            Self::RemoteAccess => NakCode::RemoteAccess,
            Self::InvalidRequest => NakCode::InvalidRequest,
            Self::RemoteOperational => NakCode::RemoteOperational,
        }
    }
}

/// The error of copying payload into a receive request's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryError {
    /// The receive request is too short.
    TooLong,
    /// A local key does not permit the access.
    Protection,
}

/// Access to the application's memory and receive queue, implemented by the caller.
///
/// Called while packets are handled and built. Every call checks its keys, so that memory deregistered
/// between two packets is not accessed. Lengths and addresses come from the peer: check bounds by
/// subtraction.
pub trait Memory {
    /// Copies `into.len()` bytes at `offset` of a send request's payload into a packet.
    ///
    /// # Errors
    /// The completion status of the request, usually [`Status::LocalProtection`].
    fn gather(&mut self, id: WorkId, offset: u32, into: &mut [u8]) -> Result<(), Status>;

    /// Copies the data of a READ or atomic operation to `offset` of the request's memory. The word of an
    /// atomic operation is in host byte order.
    ///
    /// # Errors
    /// The completion status of the request, usually [`Status::LocalProtection`].
    fn scatter(&mut self, id: WorkId, offset: u32, from: &[u8]) -> Result<(), Status>;

    /// The destination shared receive queue of a send request over XRC.
    fn shared_queue(&mut self, _id: WorkId) -> Srqn {
        Srqn::new(0)
    }

    /// Selects the shared receive queue, with its memory and protection domain, for the calls that follow.
    /// Called for each request over XRC, and again before READ data is copied later.
    ///
    /// # Errors
    /// If the connection's XRC domain has no such queue (annex A14).
    fn select(&mut self, _queue: Srqn) -> Result<(), NakReason> {
        Err(NakReason::InvalidRequest)
    }

    /// Executes [`SendOp::Local`](crate::SendOp::Local).
    ///
    /// # Errors
    /// The completion status of the request.
    fn local(&mut self, id: WorkId) -> Result<(), Status>;

    /// Takes the oldest receive request from the queue pair's own or shared queue.
    /// [`Event::Received`](crate::Event::Received) returns it.
    fn take_receive(&mut self) -> Option<ReceiveId>;

    /// Copies part of a message into a receive request's memory.
    ///
    /// # Errors
    /// If the memory is too short or not accessible; part of the data may have been copied.
    fn deliver(&mut self, id: ReceiveId, offset: u32, from: &[u8]) -> Result<(), DeliveryError>;

    /// Whether the queue pair allows the access at all: transfers without data name no memory.
    ///
    /// # Errors
    /// If it does not.
    fn allows(&mut self, _access: Access) -> Result<(), NakReason> {
        Ok(())
    }

    /// Checks a peer's access to `len` bytes, at least one.
    ///
    /// # Errors
    /// If the access is not permitted.
    fn check(&mut self, rkey: Rkey, va: u64, len: u32, access: Access) -> Result<(), NakReason>;

    /// Checks access and copies a peer's data into memory.
    ///
    /// # Errors
    /// If the access is not permitted.
    fn write(&mut self, rkey: Rkey, va: u64, from: &[u8]) -> Result<(), NakReason>;

    /// Checks access and stores eight bytes atomically; `va` is a multiple of 8.
    ///
    /// # Errors
    /// If the access is not permitted.
    fn write_atomically(&mut self, rkey: Rkey, va: u64, bytes: [u8; 8]) -> Result<(), NakReason>;

    /// Checks access and copies memory into a packet for a peer.
    ///
    /// # Errors
    /// If the access is not permitted.
    fn read(&mut self, rkey: Rkey, va: u64, into: &mut [u8]) -> Result<(), NakReason>;

    /// Checks access, executes an atomic operation and returns the original value; `va` is a multiple of 8.
    ///
    /// # Errors
    /// If the access is not permitted.
    fn atomic(&mut self, rkey: Rkey, va: u64, operation: Atomic) -> Result<u64, NakReason>;

    /// Invalidates an R_Key for a peer (10.6.5): of a type 2 window bound to this queue pair, or of a region
    /// that allows it.
    ///
    /// # Errors
    /// If the peer may not invalidate the key.
    fn invalidate(&mut self, rkey: Rkey) -> Result<(), NakReason>;
}
