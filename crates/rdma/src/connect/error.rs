//! Errors of connection setup.
#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use super::hello::HelloError;

/// Why a connection could not be made.
#[derive(Debug)]
pub struct ConnectError {
    /// The peer's address; of [`ConnectErrorKind::Listen`] the own one.
    pub peer: String,
    /// The problem.
    pub kind: ConnectErrorKind,
}

/// The problem.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectErrorKind {
    /// The address is invalid.
    #[error("{cause}")]
    Address {
        /// The cause.
        cause: io::Error,
    },
    /// The address cannot be bound.
    #[error("{cause}")]
    Listen {
        /// The cause.
        cause: io::Error,
    },
    /// The deadline passed.
    #[error("timed out while {doing}")]
    TimedOut {
        /// The operation.
        doing: &'static str,
    },
    /// The peer closed the stream.
    #[error("closed the connection while {doing}")]
    Closed {
        /// The operation.
        doing: &'static str,
    },
    /// The stream failed.
    #[error("connection failed while {doing}: {cause}")]
    Stream {
        /// The operation.
        doing: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// The peer was refused, or refused this program: one has no keys, or a certificate is not accepted.
    #[error("{reason}")]
    Security {
        /// Why.
        reason: String,
    },
    /// The peer sent an invalid record.
    #[error("{0}")]
    Hello(HelloError),
    /// The peer did not confirm the connection.
    #[error("sent {found:#04x}, expected the confirmation {expected:#04x}")]
    NotReady {
        /// The byte received.
        found: u8,
        /// The byte expected.
        expected: u8,
    },
    /// The queue pair's transition failed.
    #[error("cannot bring the queue pair to {state}: {cause}")]
    Transition {
        /// The state.
        state: &'static str,
        /// The cause.
        cause: String,
    },
}

impl ConnectError {
    pub(super) fn new(peer: impl fmt::Display, kind: ConnectErrorKind) -> ConnectError {
        ConnectError { peer: peer.to_string(), kind }
    }

    /// Classifies an I/O error of the stream.
    #[must_use]
    pub fn stream(peer: impl fmt::Display, doing: &'static str, cause: io::Error) -> ConnectError {
        let kind = match cause.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ConnectErrorKind::TimedOut { doing },
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                ConnectErrorKind::Closed { doing }
            }
            _ => ConnectErrorKind::Stream { doing, cause },
        };
        ConnectError::new(peer, kind)
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            ConnectErrorKind::Listen { cause } => write!(f, "cannot listen at {}: {cause}", self.peer),
            kind => write!(f, "peer {}: {kind}", self.peer),
        }
    }
}

impl std::error::Error for ConnectError {}
