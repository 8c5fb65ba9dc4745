//! What the machines need of the world: the application's memory and the receive queue.

use millstream_wire::{NakCode, Rkey, Srqn};

use crate::event::Status;
use crate::request::{ReceiveId, WorkId};

/// What a peer wants to do with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// RDMA READ.
    Read,
    /// RDMA WRITE, atomic write.
    Write,
    /// Compare and swap, fetch and add.
    Atomic,
}

/// An atomic operation on a word in the host's byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomic {
    /// Store `swap` if the word is `compare`.
    CompareSwap {
        /// What to compare with.
        compare: u64,
        /// What to store.
        swap: u64,
    },
    /// Add.
    FetchAdd(u64),
}

/// Why a peer's request is not carried out: what it is told, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The key does not allow it (9.7.4.1.5: unknown, other domain, out of bounds, not permitted).
    Access,
    /// It makes no sense.
    Invalid,
    /// It could not be done here.
    Operational,
}

impl Refusal {
    pub(crate) const fn nak(self) -> NakCode {
        match self {
            Self::Access => NakCode::RemoteAccess,
            Self::Invalid => NakCode::InvalidRequest,
            Self::Operational => NakCode::RemoteOperational,
        }
    }
}

/// Why a message could not be put into its receive request's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryFault {
    /// The request has less room.
    TooLong,
    /// A local key does not allow it.
    Protection,
}

/// The application's memory and receive queue, which the caller has.
///
/// Called while packets are handled and built. Each call stands for itself: keys are checked in every one, so
/// a region that is taken away between two packets is not touched again. All bounds must be checked by
/// subtraction: lengths and addresses come from the peer.
pub trait Memory {
    /// Copies `into.len()` bytes of a send request's payload, from `offset` on, into a packet.
    ///
    /// # Errors
    /// The status that the request completes with, usually [`Status::LocalProtection`].
    fn gather(&mut self, id: WorkId, offset: u32, into: &mut [u8]) -> Result<(), Status>;

    /// Copies what a READ or atomic operation brought to `offset` of its request's memory. An atomic operation's
    /// word comes in the host's byte order.
    ///
    /// # Errors
    /// The status that the request completes with, usually [`Status::LocalProtection`].
    fn scatter(&mut self, id: WorkId, offset: u32, from: &[u8]) -> Result<(), Status>;

    /// The shared receive queue that a send request over an extended connection is for.
    fn shared_queue(&mut self, _id: WorkId) -> Srqn {
        Srqn::new(0)
    }

    /// What follows is about this shared receive queue: its receives, completions, memory and protection domain. Called
    /// for each request that comes over an extended connection, and again before data is read for it later.
    ///
    /// # Errors
    /// If there is no such queue in the connection's domain (annex A14).
    fn select(&mut self, _queue: Srqn) -> Result<(), Refusal> {
        Err(Refusal::Invalid)
    }

    /// Carries out [`Work::Local`](crate::Work::Local).
    ///
    /// # Errors
    /// The status that the request completes with.
    fn local(&mut self, id: WorkId) -> Result<(), Status>;

    /// Takes the oldest receive request, from the queue pair's own or a shared queue. It is given back by
    /// [`Event::Received`](crate::Event::Received).
    fn take_receive(&mut self) -> Option<ReceiveId>;

    /// Copies part of a message into a receive request's memory.
    ///
    /// # Errors
    /// Nothing of the part is copied then, or some of it.
    fn deliver(&mut self, id: ReceiveId, offset: u32, from: &[u8]) -> Result<(), DeliveryFault>;

    /// Whether a peer may do this with `len` bytes, at least one, of memory.
    ///
    /// # Errors
    /// If not.
    fn check(&mut self, rkey: Rkey, va: u64, len: u32, access: Access) -> Result<(), Refusal>;

    /// Checks, and copies a peer's bytes.
    ///
    /// # Errors
    /// If the peer may not.
    fn write(&mut self, rkey: Rkey, va: u64, from: &[u8]) -> Result<(), Refusal>;

    /// Checks, and stores eight bytes (at an address that is a multiple of 8) at once.
    ///
    /// # Errors
    /// If the peer may not.
    fn write_atomically(&mut self, rkey: Rkey, va: u64, bytes: [u8; 8]) -> Result<(), Refusal>;

    /// Checks, and copies bytes for a peer.
    ///
    /// # Errors
    /// If the peer may not.
    fn read(&mut self, rkey: Rkey, va: u64, into: &mut [u8]) -> Result<(), Refusal>;

    /// Checks, does it (at an address that is a multiple of 8), and says what the word was.
    ///
    /// # Errors
    /// If the peer may not.
    fn atomic(&mut self, rkey: Rkey, va: u64, operation: Atomic) -> Result<u64, Refusal>;

    /// Invalidates a key for a peer (10.6.5): of a window of type 2 that is bound to this queue pair, or of a region that
    /// may be invalidated.
    ///
    /// # Errors
    /// If the peer may not.
    fn invalidate(&mut self, rkey: Rkey) -> Result<(), Refusal>;
}
