//! Send requests.

use millstream_wire::Rkey;

/// The caller's identifier of a send request, returned in its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkId(pub u64);

/// The caller's identifier of a receive request, returned in its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReceiveId(pub u64);

/// A send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRequest {
    /// The caller's identifier.
    pub id: WorkId,
    /// The operation.
    pub work: SendOp,
    /// Bytes of payload in either direction; 8 for atomic operations, 0 for local ones.
    pub len: u32,
    /// Fence: starts after all earlier READs and atomic operations are complete (10.8.3.3).
    pub fence: bool,
    /// Whether the receiver's completion is a solicited event.
    pub solicited: bool,
}

/// Immediate data or invalidation of a SEND.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendModifier {
    /// Plain SEND.
    None,
    /// SEND with immediate data, in network order.
    Immediate([u8; 4]),
    /// SEND with invalidate: an R_Key of the receiver.
    Invalidate(Rkey),
}

/// The operation of a send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// SEND.
    Send(SendModifier),
    /// RDMA WRITE.
    Write {
        /// Remote virtual address.
        va: u64,
        /// Remote key.
        rkey: Rkey,
        /// Immediate data, which consumes a receive request.
        immediate: Option<[u8; 4]>,
    },
    /// RDMA READ.
    Read {
        /// Remote virtual address.
        va: u64,
        /// Remote key.
        rkey: Rkey,
    },
    /// Atomic compare and swap.
    CompareSwap {
        /// Remote virtual address.
        va: u64,
        /// Remote key.
        rkey: Rkey,
        /// Value to compare with.
        compare: u64,
        /// Value to store.
        swap: u64,
    },
    /// Atomic fetch and add.
    FetchAdd {
        /// Remote virtual address.
        va: u64,
        /// Remote key.
        rkey: Rkey,
        /// Value to add.
        add: u64,
    },
    /// Atomic WRITE of eight bytes (annex A19).
    AtomicWrite {
        /// Remote virtual address.
        va: u64,
        /// Remote key.
        rkey: Rkey,
    },
    /// A local operation in posting order: memory window bind or local invalidate. It sends no packet.
    Local,
}

impl SendOp {
    /// Whether the operation has a response other than an ACK, and counts as an outstanding READ (9.4.4,
    /// 9.4.5).
    pub(crate) const fn awaits_response(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. } | Self::AtomicWrite { .. }
        )
    }

    /// Whether the operation consumes a receive request of the peer.
    pub(crate) const fn takes_receive(&self) -> bool {
        matches!(self, Self::Send(_) | Self::Write { immediate: Some(_), .. })
    }
}

/// The reason why a send request was rejected. The queue pair is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// Longer than [`MAX_MESSAGE`](crate::MAX_MESSAGE), or a datagram longer than the port's MTU.
    #[error("message of {len} bytes exceeds the limit of {max} bytes")]
    TooLong {
        /// Length of the request.
        len: u32,
        /// Longest length.
        max: u32,
    },
    /// Invalid length: atomic operations have 8 bytes, local ones none.
    #[error("invalid length {len}: atomic operations have 8 bytes, local operations none")]
    Length {
        /// Length of the request.
        len: u32,
    },
    /// The transport service does not support the operation (9.2.1, table 35).
    #[error("operation not supported by the transport service")]
    NotOffered,
    /// A READ or atomic operation with `max_rd_atomic` 0.
    #[error("READ or atomic operation posted with max_rd_atomic 0")]
    NoResources,
    /// The queue pair is not in RTS, SQD or an error state.
    #[error("queue pair state does not permit send requests")]
    NotSending,
}
