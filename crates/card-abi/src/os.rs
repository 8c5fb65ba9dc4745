//! Failed system calls, with the operation that failed.

use std::io;

/// A system call failed.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {source}")]
pub struct SyscallError {
    /// The operation, for a reader who does not know the code.
    pub operation: &'static str,
    /// The system's reason.
    pub source: io::Error,
}

/// Attaches the operation to a failed system call.
pub trait IoContext<T> {
    /// Names the operation of an error.
    fn context(self, operation: &'static str) -> Result<T, SyscallError>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn context(self, operation: &'static str) -> Result<T, SyscallError> {
        self.map_err(|source| SyscallError { operation, source })
    }
}
