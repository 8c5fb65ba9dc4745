//! Exceptions of the module and conversions to them.

use std::fmt::Display;

use millstream_card::checkpoint::CheckpointError;
use millstream_card::{RemoteError, RemoteErrorKind};
use millstream_fragment::stream::{ReadError, WriteError};
use millstream_rdma::VerbsError;
use pyo3::exceptions::{PyConnectionError, PyOSError, PyTimeoutError, PyValueError};
use pyo3::types::PyAnyMethods;
use pyo3::{PyErr, Python, create_exception};

create_exception!(
    millstream,
    FormatError,
    PyValueError,
    "A stream file or a packet breaks its format. The text names the file, the offset, the field, the value found and the value expected."
);
create_exception!(
    millstream,
    CardError,
    pyo3::exceptions::PyException,
    "An operation on a card failed. `fatal` says whether the connection has ended."
);

/// An invalid argument.
pub(crate) fn invalid(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// An error of the operating system, of the subclass of `OSError` that its number selects.
fn os_error(number: Option<i32>, text: String) -> PyErr {
    match number {
        Some(number) => PyOSError::new_err((number, text)),
        None => PyOSError::new_err(text),
    }
}

/// A file that cannot be read.
pub(crate) fn read_failed(error: &ReadError) -> PyErr {
    match error {
        ReadError::Io(cause) => os_error(cause.cause.raw_os_error(), error.to_string()),
        ReadError::Malformed { .. } => FormatError::new_err(error.to_string()),
    }
}

/// A file that cannot be written.
pub(crate) fn write_failed(error: &WriteError) -> PyErr {
    match error {
        WriteError::Io(cause) => os_error(cause.cause.raw_os_error(), error.to_string()),
        _ => invalid(error),
    }
}

/// A failed operation on a card.
pub(crate) fn card_failed(error: &RemoteError) -> PyErr {
    let text = error.to_string();
    match &error.kind {
        RemoteErrorKind::Verbs(VerbsError::Connect(_)) => PyConnectionError::new_err(text),
        RemoteErrorKind::TimedOut(..) => PyTimeoutError::new_err(text),
        RemoteErrorKind::OutOfRange { .. }
        | RemoteErrorKind::NoSuchRegion { .. }
        | RemoteErrorKind::NoSuchKernel(_) => invalid(text),
        _ => card_error(text, error.is_fatal()),
    }
}

fn card_error(text: String, fatal: bool) -> PyErr {
    let error = CardError::new_err(text);
    match Python::attach(|py| error.value(py).setattr("fatal", fatal)) {
        Ok(()) => error,
        Err(other) => other,
    }
}

/// A checkpoint that failed.
pub(crate) fn checkpoint_failed(error: &CheckpointError) -> PyErr {
    match error {
        CheckpointError::Io { cause, .. } => os_error(cause.raw_os_error(), error.to_string()),
        CheckpointError::Card(error) => card_failed(error),
        CheckpointError::ImageOverwritten { .. } => card_error(error.to_string(), false),
        _ => FormatError::new_err(error.to_string()),
    }
}
