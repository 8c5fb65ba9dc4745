//! Why two parties did not get connected.
#![forbid(unsafe_code)]

use std::fmt;
use std::io;

use super::hello::HelloError;

/// Why a connection could not be made, and with whom.
#[derive(Debug)]
pub struct ConnectError {
    /// The other party's address.
    pub peer: String,
    /// What went wrong.
    pub kind: ConnectErrorKind,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectErrorKind {
    /// The address is not one.
    #[error("{cause}")]
    Address {
        /// Why.
        cause: io::Error,
    },
    /// The address cannot be listened on.
    #[error("cannot listen: {cause}")]
    Listen {
        /// Why.
        cause: io::Error,
    },
    /// Time is up.
    #[error("timed out while {doing}")]
    TimedOut {
        /// What was being waited for.
        doing: &'static str,
    },
    /// The other party closed the stream.
    #[error("closed the connection while {doing}")]
    Closed {
        /// What was being waited for.
        doing: &'static str,
    },
    /// The stream failed.
    #[error("connection failed while {doing}: {cause}")]
    Stream {
        /// What was being done.
        doing: &'static str,
        /// Why.
        cause: io::Error,
    },
    /// What the other party sent is not what this program understands.
    #[error("{0}")]
    Hello(HelloError),
    /// The other party did not confirm, but sent something else.
    #[error("sent {found:#04x} instead of the confirmation {expected:#04x}")]
    NotReady {
        /// What it sent.
        found: u8,
        /// What it should have sent.
        expected: u8,
    },
    /// The queue pair could not be brought to the next state.
    #[error("cannot bring queue pair to {state}: {cause}")]
    Transition {
        /// The state.
        state: &'static str,
        /// Why.
        cause: String,
    },
}

impl ConnectError {
    pub(super) fn new(peer: impl fmt::Display, kind: ConnectErrorKind) -> ConnectError {
        ConnectError { peer: peer.to_string(), kind }
    }

    /// Classifies an error of the stream.
    pub(super) fn stream(peer: impl fmt::Display, doing: &'static str, cause: io::Error) -> ConnectError {
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
        write!(f, "peer {}: {}", self.peer, self.kind)
    }
}

impl std::error::Error for ConnectError {}
