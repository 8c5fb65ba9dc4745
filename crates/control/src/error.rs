//! Errors of run control.

use crate::machine::NotAllowed;
use std::io;
use std::path::{Path, PathBuf};

/// Why run control refuses or fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// A file operation failed.
    #[error("{}: cannot {operation}: {cause}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation.
        operation: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// The token file is refused.
    #[error("{}: {problem}", .path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// The problem, and what to do.
        problem: String,
    },
    /// A file of run control has unexpected content.
    #[error("{}: {problem}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, and what to do.
        problem: String,
    },
    /// The configuration is refused.
    #[error("{0}")]
    Configuration(String),
    /// A setting is refused.
    #[error("setting {field}: {problem}")]
    Setting {
        /// The setting.
        field: String,
        /// The problem.
        problem: String,
    },
    /// Run control is ending, so no run starts.
    #[error("run control is ending: no run starts any more")]
    Ending,
    /// The state does not allow the command.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// A text from a client is refused.
    #[error("{field}: {problem}")]
    Text {
        /// The field of the request.
        field: &'static str,
        /// The problem.
        problem: String,
    },
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {cause}")]
    Listen {
        /// The address.
        address: String,
        /// The cause.
        cause: io::Error,
    },
}

impl ControlError {
    pub(crate) fn io(path: &Path, operation: &'static str, cause: io::Error) -> ControlError {
        ControlError::Io { path: path.to_owned(), operation, cause }
    }
}
