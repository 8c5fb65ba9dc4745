//! Why a process of the event builder cannot do its work.

use crate::core::Unit;
use crate::core::plan::PlanError;
use crate::core::types::StopCause;
use millstream_card::{OpenError, RingError};
use millstream_fragment::stream::ReadError;
use millstream_rdma::connect::ConnectError;
use millstream_rdma::device::DeviceError;
use millstream_rdma::memory::MemoryError;
use millstream_rdma::message::{MessageError, PrepareError};
use millstream_rdma::queue::{PollError, PostError, QueueError};
use millstream_rdma::wait::WaitError;
use std::io;

/// Why a process of the event builder cannot do its work. A run that was stopped is no such error: it ends
/// with an account.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// No RDMA device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A queue could not be made.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// Memory could not be registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A connection could not be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A control connection could not be made.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// A control connection failed.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// A work request was not accepted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// A completion queue failed.
    #[error(transparent)]
    Poll(#[from] PollError),
    /// Waiting failed.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// A unit's own memory is not laid out as its plan says: a mistake in this program.
    #[error(transparent)]
    Bounds(#[from] millstream_rdma::memory::OutOfBounds),
    /// The plan from the manager makes no sense.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The input cannot be read.
    #[error(transparent)]
    Input(#[from] ReadError),
    /// The input is not the one that the run was checked with.
    #[error("{input}: {what}, unlike when the run was checked")]
    InputChanged {
        /// The file.
        input: String,
        /// What differs.
        what: String,
    },
    /// The card cannot be opened.
    #[error(transparent)]
    Card(#[from] OpenError),
    /// The card's rings cannot be opened.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The card is not what the run needs.
    #[error("card {card}: {what}")]
    CardUnfit {
        /// Its name.
        card: String,
        /// What does not fit.
        what: String,
    },
    /// Units did not find each other.
    #[error("{unit}: {what}")]
    WireUp {
        /// The unit at the other end.
        unit: Unit,
        /// What went wrong.
        what: String,
    },
    /// A party that is no unit of this run.
    #[error("{peer}: {what}")]
    UnknownPeer {
        /// Its address.
        peer: String,
        /// What it did.
        what: String,
    },
    /// A unit could not start; it says why.
    #[error("{unit} cannot start: {why}")]
    UnitFailed {
        /// The unit.
        unit: Unit,
        /// What it says.
        why: String,
    },
    /// The sink for accepted events failed.
    #[error("accepted events cannot be stored: {0}")]
    Sink(super::SinkError),
    /// The unit had to stop before it was told to.
    #[error("the run was stopped: {0}")]
    Stopped(StopCause),
    /// A system call failed.
    #[error("cannot {operation}: {cause}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        cause: io::Error,
    },
    /// Arguments of a child process that do not parse.
    #[error("arguments {0:?} are none of a process of the event builder")]
    Arguments(Vec<String>),
}

impl ProcessError {
    /// Whether this only tells that another process is in trouble: it is gone, silent, or said so.
    pub fn is_secondary(&self) -> bool {
        matches!(
            self,
            ProcessError::Connect(_)
                | ProcessError::Prepare(PrepareError::Connect(_))
                | ProcessError::Message(_)
                | ProcessError::WireUp { .. }
                | ProcessError::UnitFailed { .. }
                | ProcessError::Stopped(_)
        )
    }
}

/// Says what was being done when a system call failed.
pub(super) trait IoContext<T> {
    fn context(self, operation: &'static str) -> Result<T, ProcessError>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn context(self, operation: &'static str) -> Result<T, ProcessError> {
        self.map_err(|cause| ProcessError::Io { operation, cause })
    }
}
