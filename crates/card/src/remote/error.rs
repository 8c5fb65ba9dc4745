//! What can go wrong with a card on the network.

use std::time::Duration;

use millstream_rdma::connect::ConnectError;
use millstream_rdma::memory::{MemoryError, OutOfBounds};
use millstream_rdma::queue::{PostError, QueueError, WorkError};
use millstream_rdma::wait::WaitError;

use crate::command::Cause;
use crate::memory::Span;

/// Why something could not be done with a remote card.
#[derive(Debug, thiserror::Error)]
#[error("card {card}: {kind}")]
pub struct RemoteError {
    /// Its address.
    pub card: String,
    /// Why.
    pub kind: RemoteErrorKind,
}

/// See [`RemoteError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteErrorKind {
    /// It cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// This node's device refuses a queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// This node's device refuses memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// This node's device refuses a request.
    #[error(transparent)]
    Post(#[from] PostError),
    /// A request failed.
    #[error(transparent)]
    Work(#[from] WorkError),
    /// Waiting failed.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// Who answers there is no card, or one of another version.
    #[error("who listens there is no card of this version")]
    NotACard,
    /// It closed the connection, or died.
    #[error("has closed the connection or died")]
    Lost,
    /// It does not answer in time.
    #[error("does not answer within {0:?}: {1}")]
    TimedOut(Duration, &'static str),
    /// Another node has it.
    #[error("is leased to node {holder} (epoch {epoch})")]
    Held {
        /// The holder.
        holder: u32,
        /// Its epoch.
        epoch: u32,
    },
    /// This node has no lease of it.
    #[error("this node holds no lease of it{}", .0.map_or(String::new(), |cause| format!("; the latest one ended: {cause}")))]
    NotHeld(Option<Cause>),
    /// The card refused a command or a run failed.
    #[error("region {region}: {cause} ({detail:#x})")]
    Refused {
        /// The region.
        region: u32,
        /// Why.
        cause: Cause,
        /// The offending value.
        detail: u64,
    },
    /// The card as a whole refused a command.
    #[error("{0}")]
    RefusedByCard(Cause),
    /// It has no such kernel.
    #[error(transparent)]
    NoSuchKernel(#[from] crate::card::NoSuchKernel),
    /// A range that is not the card's.
    #[error("{span} is outside the card's memory of {memory} bytes")]
    OutOfRange {
        /// The range.
        span: Span,
        /// The memory.
        memory: u64,
    },
    /// It has no such region.
    #[error("has {regions} regions, there is no region {region}")]
    NoSuchRegion {
        /// The one asked for.
        region: u32,
        /// How many there are.
        regions: u32,
    },
}

impl RemoteError {
    /// Whether the connection is over, so that only a new one helps.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self.kind,
            RemoteErrorKind::Connect(_)
                | RemoteErrorKind::Post(_)
                | RemoteErrorKind::Work(_)
                | RemoteErrorKind::Wait(_)
                | RemoteErrorKind::Lost
        )
    }
}

impl From<OutOfBounds> for RemoteErrorKind {
    fn from(error: OutOfBounds) -> RemoteErrorKind {
        let span = Span::new(error.offset, error.length);
        RemoteErrorKind::OutOfRange { span, memory: error.size }
    }
}
