//! The error of any operation of this crate, and I/O errors inside `sideway`'s errors.
#![forbid(unsafe_code)]

use crate::connect::ConnectError;
use crate::memory::MemoryError;
use crate::queue::{PollError, PostError, QueueError, WorkError};
use crate::wait::WaitError;

/// An operation on verbs objects or on their connections failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// A connection could not be made, or an address not be bound.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The device refused a queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The device refused to register memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device refused a work request.
    #[error(transparent)]
    Post(#[from] PostError),
    /// A work request failed.
    #[error(transparent)]
    Work(#[from] WorkError),
    /// A completion queue could not be polled.
    #[error(transparent)]
    Poll(#[from] PollError),
    /// Waiting failed.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// Unwraps `$kind(io::Error)`. `sideway`'s error enums are open; any other variant keeps its text.
macro_rules! os_error {
    ($error:expr, $kind:path) => {
        match $error {
            $kind(cause) => cause,
            other => std::io::Error::other(other),
        }
    };
}

pub(crate) use os_error;
