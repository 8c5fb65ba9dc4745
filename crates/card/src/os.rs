//! Failed system calls, with what the card was doing.
//!
//! The mechanisms themselves (memory, sockets, waiting) are those of [`millstream_shm`]. The unsafe
//! code of this crate is in [`crate::memory`] and in the vector code of the kernels.

use std::io;

/// A system call failed: what was being done, and the system's reason.
#[derive(Debug, thiserror::Error)]
#[error("{doing}: {source}")]
pub struct OsError {
    /// What the card was doing, for a reader who does not know the code.
    pub doing: &'static str,
    /// The system's reason.
    pub source: io::Error,
}

/// Attaches what was being done to a failed system call.
pub(crate) trait Doing<T> {
    fn doing(self, doing: &'static str) -> Result<T, OsError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str) -> Result<T, OsError> {
        self.map_err(|source| OsError { doing, source })
    }
}
