//! Errors of the schema, of one event, and of the file.

use std::path::PathBuf;

use millstream_fragment::SourceId;
use millstream_fragment::file::IoError;

/// An invalid schema.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct SchemaError {
    /// The field, as in `arrays[0].dims`.
    pub field: String,
    /// The problem with its value.
    pub problem: String,
}

impl SchemaError {
    pub(crate) fn new(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into() }
    }
}

/// A file that cannot be written or read. After a failed write there is no file with the final name.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The schema is invalid.
    #[error("{}: schema: {cause}", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// The problem.
        cause: SchemaError,
    },
    /// An operation of the operating system failed.
    #[error(transparent)]
    Io(#[from] IoError),
    /// An operation of the HDF5 library failed.
    #[error("{}: cannot {operation} {object}: {cause}", path.display())]
    Hdf5 {
        /// The file.
        path: PathBuf,
        /// The operation.
        operation: &'static str,
        /// The dataset, group or attribute.
        object: String,
        /// Error of the library.
        cause: String,
    },
    /// The file cannot be synced, and was renamed.
    #[error(
        "{}: cannot sync: {cause}; its contents may be lost, and it is kept as {}", path.display(), aside.display()
    )]
    NotSynced {
        /// The file.
        path: PathBuf,
        /// Its name now, `NAME.h5.not-synced` or `NAME.batches.not-synced`.
        aside: PathBuf,
        /// Error of the operating system.
        cause: std::io::Error,
    },
    /// The file name has another extension.
    #[error("{}: the name must end in .{expected}", path.display())]
    WrongExtension {
        /// The file.
        path: PathBuf,
        /// The extension.
        expected: &'static str,
    },
    /// The file system of the file has no direct I/O.
    #[error(
        "{}: the file system cannot write past the page cache (O_DIRECT); set direct = false in [output], or use a \
         directory on another file system",
        .0.display()
    )]
    NoDirectIo(PathBuf),
    /// A record of a batch file is not as it was written.
    #[error("{}: record {record} at {offset}: {problem}", path.display())]
    InvalidRecord {
        /// The file.
        path: PathBuf,
        /// Number of the record, from 0.
        record: u64,
        /// Its place \[bytes\].
        offset: u64,
        /// The problem.
        problem: String,
    },
    /// A partial batch file has whole records behind a damaged one, so it is not cut.
    #[error(
        "{damage}; whole records follow at {next}, so the file is not cut there; docs/output.md, Batch files, says how to recover \
         the records before"
    )]
    RecordsBehindDamage {
        /// The damaged record.
        damage: Box<FileError>,
        /// The first whole record behind it \[bytes\].
        next: u64,
    },
    /// A partial event file has an event that cannot be read back as it was written, as after a crash of the host.
    #[error(
        "{}: of {rows} events, the one in row {row} cannot be read back: {problem}; docs/output.md, Partial files, says how to \
         recover the rows before",
        path.display()
    )]
    UnreadableRow {
        /// The file.
        path: PathBuf,
        /// The first such row.
        row: usize,
        /// The number of events, as recorded.
        rows: usize,
        /// The problem.
        problem: String,
    },
    /// The file exists, and [`WriteOptions::replace`](crate::WriteOptions::replace) is off.
    #[error("{}: file exists", .0.display())]
    Exists(PathBuf),
    /// An earlier sequence with the same base name left events, and [`SequenceOptions::replace`](crate::SequenceOptions::replace)
    /// is off.
    #[error(
        "{}: {events} events of an earlier run; move the files {}.* away, choose another name in [run], or set replace = true in \
         [output], which removes them", path.display(), base.display()
    )]
    EarlierEvents {
        /// A file with events, or the index.
        path: PathBuf,
        /// Start of the names of all its files.
        base: PathBuf,
        /// Its events.
        events: u64,
    },
    /// Another process is writing the partial file.
    #[error("{}: locked by another writer", .0.display())]
    Busy(PathBuf),
    /// The partial file was removed or replaced during the run.
    #[error("{}: removed or replaced while it was being written", .0.display())]
    PartialReplaced(PathBuf),
    /// An earlier write failed, so the file lacks events.
    #[error("{}: incomplete, because an earlier write failed", .0.display())]
    Incomplete(PathBuf),
    /// The file is not an event file, or has another version.
    #[error("{}: {field} is {found}, expected {expected}", path.display())]
    WrongFormat {
        /// The file.
        path: PathBuf,
        /// The attribute or dataset.
        field: String,
        /// The value found.
        found: String,
        /// The value required.
        expected: String,
    },
    /// The row does not exist.
    #[error("{}: no row {row}: the file has {rows} events", path.display())]
    NoRow {
        /// The file.
        path: PathBuf,
        /// The row.
        row: usize,
        /// The number of rows.
        rows: usize,
    },
}

/// An event that does not match the schema. Nothing of it was stored; the writer is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// The schema lacks the source of a fragment.
    #[error("event {event}: the schema has no {source_id}")]
    UnknownSource {
        /// Number of the event.
        event: u64,
        /// The source.
        source_id: SourceId,
    },
    /// Two fragments have the same source.
    #[error("event {event}: two fragments of {source_id}")]
    DuplicateSource {
        /// Number of the event.
        event: u64,
        /// The source.
        source_id: SourceId,
    },
    /// A fragment belongs to another event.
    #[error("event {event}: the fragment of {source_id} belongs to event {found}")]
    WrongEvent {
        /// Number of the event.
        event: u64,
        /// The source.
        source_id: SourceId,
        /// Event number in the fragment.
        found: u64,
    },
    /// The decision map has another length than in the schema.
    #[error("event {event}: the decision map has {found} bytes, expected {expected}")]
    WrongDecisions {
        /// Number of the event.
        event: u64,
        /// Length of the map \[bytes\].
        found: usize,
        /// Length in the schema \[bytes\]; 0 without decisions.
        expected: usize,
    },
}

/// An event that cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The event does not match the schema. Other events can still be stored.
    #[error(transparent)]
    Event(#[from] EventError),
    /// The file cannot be written. All later appends fail.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The cause of an HDF5 error in one line. The library's text for a failed system call has many lines, with
/// the reason in the middle.
pub(crate) fn error_text(error: &hdf5_metno::Error) -> String {
    let Some(stack) = error.stack() else { return error.to_string() };
    let Some(cause) = stack.last() else { return error.to_string() };
    let reason = cause.desc().split_once("error message = '").and_then(|(_, rest)| rest.split_once('\''));
    match reason {
        Some((reason, _)) => reason.to_owned(),
        None => format!("{} ({})", cause.desc().replace('\n', " "), stack[0].func()),
    }
}
