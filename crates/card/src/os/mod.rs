//! What the card needs from Linux, each mechanism in one small file: sealed memfds and their
//! mappings, words that processes wait on, and sockets that carry file descriptors.
//!
//! Together with [`crate::memory`] and the vector code of the kernels this is the only place with
//! unsafe code.

pub(crate) mod futex;
pub(crate) mod mapping;
pub(crate) mod socket;

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

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, doing: &'static str) -> Result<T, OsError> {
        self.map_err(|source| OsError { doing, source: source.into() })
    }
}
