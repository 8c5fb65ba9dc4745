//! Errors of a card on the network.

use std::time::Duration;

use millstream_rdma::VerbsError;
use millstream_rdma::connect::ConnectError;
use millstream_rdma::memory::{MemoryError, OutOfBounds};
use millstream_rdma::queue::{PollError, PostError, QueueError, WorkError};
use millstream_rdma::wait::WaitError;
use millstream_tls::KeysError;

use crate::card::NoSuchKernel;
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::Cause;

/// An operation on a remote card failed.
#[derive(Debug, thiserror::Error)]
#[error("card {card}: {kind}")]
pub struct RemoteError {
    /// Address of the card.
    pub card: String,
    /// Why.
    pub kind: RemoteErrorKind,
}

/// Reason of a [`RemoteError`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteErrorKind {
    /// The card cannot be reached, or the local device refused or failed an operation.
    #[error(transparent)]
    Verbs(VerbsError),
    /// The keys of this program cannot be used.
    #[error("keys of this program: {0}")]
    Keys(#[from] KeysError),
    /// The peer is not a card, or one of another version.
    #[error("peer is not a compatible card (version mismatch); use the same release on both sides")]
    VersionMismatch,
    /// The card has closed the connection or died.
    #[error("card has closed the connection or died")]
    Disconnected,
    /// The card did not answer in time.
    #[error("no answer within {0:?}: {1}")]
    TimedOut(Duration, &'static str),
    /// Another client holds the lease.
    #[error("card is leased to client {holder:#x} (epoch {epoch})")]
    Leased {
        /// The holder.
        holder: u32,
        /// Epoch of its lease.
        epoch: u32,
    },
    /// This process holds no lease of the card.
    #[error("this process holds no lease of the card; acquire it first{}", .0.map_or(String::new(), |cause| format!(" (the latest lease ended: {cause})")))]
    NotLeased(Option<Cause>),
    /// A region rejected a command, or a run failed.
    #[error("region {region}: {cause} ({detail:#x})")]
    Rejected {
        /// The region.
        region: u32,
        /// Why.
        cause: Cause,
        /// The offending value.
        detail: u64,
    },
    /// A DMA transfer failed.
    #[error("DMA slot {slot}: {cause} ({detail:#x})")]
    TransferFailed {
        /// Slot of the descriptor in the ring.
        slot: u32,
        /// Why.
        cause: Cause,
        /// The offending value.
        detail: u64,
    },
    /// The card rejected a command to the card as a whole.
    #[error("card command: {0}")]
    CardRejected(Cause),
    /// The card does not have the kernel.
    #[error(transparent)]
    NoSuchKernel(#[from] NoSuchKernel),
    /// A range is outside card memory.
    #[error("{span} is outside the card's memory of {memory} bytes")]
    OutOfRange {
        /// The range.
        span: MemoryRange,
        /// Size of the memory (bytes).
        memory: u64,
    },
    /// The card does not have the region.
    #[error("card has {regions} regions, no region {region}")]
    NoSuchRegion {
        /// The requested region.
        region: u32,
        /// Number of regions.
        regions: u32,
    },
}

impl RemoteError {
    /// Whether the connection has ended, so that the card has to be connected again.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self.kind,
            RemoteErrorKind::Verbs(
                VerbsError::Connect(_)
                    | VerbsError::Post(_)
                    | VerbsError::Work(_)
                    | VerbsError::Poll(_)
                    | VerbsError::Wait(_)
            ) | RemoteErrorKind::Disconnected
        )
    }
}

/// Every operation of the verbs crate fails as [`RemoteErrorKind::Verbs`].
macro_rules! from_verbs_errors {
    ($($error:ty),+) => {
        $(impl From<$error> for RemoteErrorKind {
            fn from(error: $error) -> RemoteErrorKind {
                RemoteErrorKind::Verbs(error.into())
            }
        })+
    };
}

from_verbs_errors!(
    VerbsError,
    ConnectError,
    QueueError,
    MemoryError,
    PostError,
    WorkError,
    PollError,
    WaitError
);

impl From<OutOfBounds> for RemoteErrorKind {
    fn from(error: OutOfBounds) -> RemoteErrorKind {
        let span = MemoryRange::new(error.offset, error.length);
        RemoteErrorKind::OutOfRange { span, memory: error.size }
    }
}
