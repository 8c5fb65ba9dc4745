//! Errors of the event builder's processes.

use crate::core::Unit;
use crate::core::plan::PlanError;
use crate::core::takeover::TakeoverError;
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
use std::path::PathBuf;

/// Why a process of the event builder failed. A run that was stopped ends with a run summary, not with this error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessError {
    /// The keys of the process cannot be used.
    #[error(transparent)]
    Keys(#[from] millstream_tls::KeysError),
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
    /// A software trigger does not start.
    #[error("cannot start the software trigger {}: {cause}", .program.display())]
    SoftwareTrigger {
        /// The program.
        program: std::path::PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// A unit's memory does not match its plan: a bug.
    #[error(transparent)]
    Bounds(#[from] millstream_rdma::memory::OutOfBounds),
    /// The plan from the manager is invalid.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The manager's configuration, or a card's, is not that of this host.
    #[error(
        "the manager's configuration differs in {field} from that of this rank's command line, so this process does not run it"
    )]
    NotOwn {
        /// The field.
        field: String,
    },
    /// The input cannot be read.
    #[error(transparent)]
    Input(#[from] ReadError),
    /// The input differs from the one that the configuration check read.
    #[error("{input}: {what}; the input changed since the configuration was checked")]
    InputChanged {
        /// The file.
        input: String,
        /// The difference.
        what: String,
    },
    /// The card cannot be opened.
    #[error(transparent)]
    Card(#[from] OpenError),
    /// The card's rings cannot be opened.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The card does not meet the run's requirements.
    #[error("card {card}: {what}")]
    CardUnfit {
        /// Its name.
        card: String,
        /// The problem.
        what: String,
    },
    /// The startup failed.
    #[error("{unit}: {what}")]
    Startup {
        /// The peer.
        unit: Unit,
        /// The problem.
        what: String,
    },
    /// A connection from a process that is not a unit of this run.
    #[error("{peer}: {what}")]
    UnknownPeer {
        /// Its address.
        peer: String,
        /// The problem.
        what: String,
    },
    /// A unit could not start.
    #[error("{unit} could not start: {why}")]
    UnitFailed {
        /// The unit.
        unit: Unit,
        /// The unit's error.
        why: String,
    },
    /// The standby manager cannot take over.
    #[error("the standby manager cannot take over: {0}")]
    Takeover(#[from] TakeoverError),
    /// The sink for accepted events failed.
    #[error("storing accepted events failed: {0}")]
    Sink(super::SinkError),
    /// The unit stopped before the run started.
    #[error("the run was stopped: {0}")]
    Stopped(StopCause),
    /// A process of the run cannot be started.
    #[error("cannot start {}: {cause}", program.display())]
    Start {
        /// Its program.
        program: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// A system call failed.
    #[error("cannot {operation}: {cause}")]
    Io {
        /// The operation.
        operation: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// Arguments that are not a role of a child process.
    #[error("arguments {0:?}: expected manager, standby, readout, builder or card with their parameters")]
    Arguments(Vec<String>),
}

impl ProcessError {
    /// Whether this is a consequence of another process's failure.
    pub fn is_secondary(&self) -> bool {
        matches!(
            self,
            ProcessError::Connect(_)
                | ProcessError::Prepare(PrepareError::Connect(_))
                | ProcessError::Message(_)
                | ProcessError::Startup { .. }
                | ProcessError::UnitFailed { .. }
                | ProcessError::Stopped(_)
        )
    }
}

/// Adds the operation to an I/O error.
pub(crate) trait IoContext<T> {
    fn context(self, operation: &'static str) -> Result<T, ProcessError>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn context(self, operation: &'static str) -> Result<T, ProcessError> {
        self.map_err(|cause| ProcessError::Io { operation, cause })
    }
}
