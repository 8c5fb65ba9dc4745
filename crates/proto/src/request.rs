//! What a queue pair is asked to do.

use millstream_wire::Rkey;

/// The caller's name for a send request; the machine only hands it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkId(pub u64);

/// The caller's name for a receive request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReceiveId(pub u64);

/// A send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its name.
    pub id: WorkId,
    /// What to do.
    pub work: Work,
    /// Bytes of payload, in whichever direction; 8 for atomic operations, 0 for local work.
    pub len: u32,
    /// Only after all READs and atomic operations before it are complete (10.8.3.3).
    pub fence: bool,
    /// The receiver's completion is a solicited event.
    pub solicited: bool,
}

/// What a SEND brings besides its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trailer {
    /// Nothing.
    None,
    /// Immediate data, as it travels.
    Immediate([u8; 4]),
    /// A key that the receiver shall invalidate.
    Invalidate(Rkey),
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A message for a receive request.
    Send(Trailer),
    /// Into remote memory.
    Write {
        /// Where.
        va: u64,
        /// Its key.
        rkey: Rkey,
        /// Data for the completion of a receive request, if it shall use one.
        immediate: Option<[u8; 4]>,
    },
    /// From remote memory.
    Read {
        /// Where.
        va: u64,
        /// Its key.
        rkey: Rkey,
    },
    /// Stores `swap` if the word is `compare`, and fetches what it was.
    CompareSwap {
        /// The word.
        va: u64,
        /// Its key.
        rkey: Rkey,
        /// What to compare with.
        compare: u64,
        /// What to store.
        swap: u64,
    },
    /// Adds to the word, and fetches what it was.
    FetchAdd {
        /// The word.
        va: u64,
        /// Its key.
        rkey: Rkey,
        /// What to add.
        add: u64,
    },
    /// Stores the eight bytes of payload at once (annex A19).
    AtomicWrite {
        /// The word.
        va: u64,
        /// Its key.
        rkey: Rkey,
    },
    /// Nothing that travels: a window bound or a key invalidated here, in its turn.
    Local,
}

impl Work {
    /// Whether it waits for more than an acknowledgement, and counts as an outstanding READ (9.4.4, 9.4.5).
    pub(crate) const fn awaits_response(&self) -> bool {
        matches!(
            self,
            Self::Read { .. } | Self::CompareSwap { .. } | Self::FetchAdd { .. } | Self::AtomicWrite { .. }
        )
    }

    /// Whether it uses up a receive request of the other side.
    pub(crate) const fn takes_receive(&self) -> bool {
        matches!(self, Self::Send(_) | Self::Write { immediate: Some(_), .. })
    }
}

/// Why a request was not taken. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// Longer than [`MAX_MESSAGE`](crate::MAX_MESSAGE), or than one packet for a datagram.
    #[error("a message of {len} bytes, the most is {most}")]
    TooLong {
        /// What was asked for.
        len: u32,
        /// What there is.
        most: u32,
    },
    /// Not what the operation is about: atomic operations have 8 bytes, local work none.
    #[error("an operation of this kind does not have {len} bytes")]
    Length {
        /// What was asked for.
        len: u32,
    },
    /// The transport service does not have the operation (9.2.1, table 35).
    #[error("the transport service does not offer this operation")]
    NotOffered,
    /// More READs than none are not allowed: `max_rd_atomic` is 0.
    #[error("READs and atomic operations need max_rd_atomic of at least 1")]
    NoResources,
    /// The queue pair does not send (yet, or any more).
    #[error("the queue pair is not in a state that takes send requests")]
    NotSending,
}
