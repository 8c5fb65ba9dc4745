//! What can go wrong, and whose fault it is: the schema's, one event's, or the file's.

use std::path::PathBuf;

use millstream_fragment::SourceId;
use millstream_fragment::file::IoError;

/// A schema that describes no file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct SchemaError {
    /// The field, as in `arrays[0].dims`.
    pub field: String,
    /// What is wrong with its value.
    pub problem: String,
}

impl SchemaError {
    pub(crate) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// A file that was not written or not read. No file has appeared under the final name.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The schema describes no file.
    #[error("{}: schema: {cause}", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: SchemaError,
    },
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The HDF5 library refused.
    #[error("{}: cannot {doing} {object}: {cause}", path.display())]
    Hdf5 {
        /// The file.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// The dataset, group or attribute.
        object: String,
        /// What the library said.
        cause: String,
    },
    /// The name of the file does not end in `.h5`.
    #[error("{}: the name of an event file ends in .h5", .0.display())]
    Name(PathBuf),
    /// There is a file of this name, and [`Options::replace`](crate::Options::replace) is off.
    #[error("{}: exists already", .0.display())]
    Exists(PathBuf),
    /// Another writer is at work on the partial file.
    #[error("{}: being written by another process", .0.display())]
    Busy(PathBuf),
    /// The partial file is no longer the one that the writer created.
    #[error("{}: removed or replaced while it was being written", .0.display())]
    Lost(PathBuf),
    /// An earlier write failed, so the file lacks events.
    #[error("{}: not completed, since an earlier write failed", .0.display())]
    Incomplete(PathBuf),
    /// The file is not an event file, or of another version.
    #[error("{}: {field} is {found}, expected {expected}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The attribute or dataset.
        field: String,
        /// What is there.
        found: String,
        /// What has to be there.
        expected: String,
    },
    /// The file has no such event.
    #[error("{}: has no row {row}, only {rows} events", path.display())]
    NoRow {
        /// The file.
        path: PathBuf,
        /// The row asked for.
        row: usize,
        /// The number of rows.
        rows: usize,
    },
}

/// An event that does not fit the schema. It was not stored, not even in part, and the writer is as it
/// was before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A fragment is from a source that the schema does not have.
    #[error("event {event}: the schema has no {source_id}")]
    UnknownSource {
        /// Number of the event.
        event: u64,
        /// The source.
        source_id: SourceId,
    },
    /// Two fragments are from the same source.
    #[error("event {event}: two fragments of {source_id}")]
    Twice {
        /// Number of the event.
        event: u64,
        /// The source.
        source_id: SourceId,
    },
    /// A fragment belongs to another event.
    #[error("event {event}: the fragment of {source_id} belongs to event {found}")]
    OtherEvent {
        /// Number of the event.
        event: u64,
        /// The source.
        source_id: SourceId,
        /// The event that the fragment names.
        found: u64,
    },
    /// A fragment does not have the length that its array needs. None at all is allowed.
    #[error("event {event}: the fragment of {source_id} has {found} bytes, {array} takes {expected}")]
    Length {
        /// Number of the event.
        event: u64,
        /// The source.
        source_id: SourceId,
        /// Bytes of the fragment.
        found: usize,
        /// The dataset.
        array: String,
        /// Bytes that it takes from each of its sources.
        expected: usize,
    },
    /// The decision map does not have the length that the schema says.
    #[error("event {event}: the decision map has {found} bytes, expected {expected}")]
    Decisions {
        /// Number of the event.
        event: u64,
        /// Bytes of the map.
        found: usize,
        /// Bytes that the schema says; 0 if the schema has no decisions.
        expected: usize,
    },
}

/// An event that was not stored.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// This event does not fit the schema. Others can still be stored.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The file cannot be written. The writer will not take any more events.
    #[error(transparent)]
    File(#[from] FileError),
}

/// What the HDF5 library said, in one line. Its own text for a failed system call is half a page, with the
/// reason in the middle.
pub(crate) fn said(error: &hdf5_metno::Error) -> String {
    let Some(stack) = error.stack() else { return error.to_string() };
    let Some(cause) = stack.last() else { return error.to_string() };
    let reason = cause.desc().split_once("error message = '").and_then(|(_, rest)| rest.split_once('\''));
    match reason {
        Some((reason, _)) => reason.to_owned(),
        None => format!("{} ({})", cause.desc().replace('\n', " "), stack[0].func()),
    }
}
