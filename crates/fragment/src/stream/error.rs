//! Errors of stream files.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use crate::SourceId;
use crate::file::IoError;

/// Why a stream file was not opened, or its payload is corrupt.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The file is truncated, corrupt, or not a stream file.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The offset, the field, and the problem.
        what: Malformed,
    },
}

/// The first invalid field of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Offset of the field in the file, in bytes.
    pub offset: u64,
    /// Name of the field as in `docs/formats.md`, with its source and fragment.
    pub field: String,
    /// The value in the file.
    pub found: String,
    /// The valid value.
    pub expected: String,
}

impl Malformed {
    pub(super) fn new(
        offset: u64,
        field: impl Into<String>,
        found: impl fmt::Display,
        expected: impl fmt::Display,
    ) -> Self {
        Self { offset, field: field.into(), found: found.to_string(), expected: expected.to_string() }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, field, found, expected } = self;
        write!(f, "byte {offset}: {field}: found {found}, expected {expected}")
    }
}

impl std::error::Error for Malformed {}

/// Why a stream file was not written. No file appears under its name.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The range of events is empty.
    #[error("events {} to {}: the range is empty; a stream file has at least one event", .0.start, .0.end)]
    NoEvents(Range<u64>),
    /// The file has no source.
    #[error("no source: a stream file has at least one")]
    NoSources,
    /// Source ids do not ascend.
    #[error("{next} after {last}: source ids must ascend")]
    SourceOrder {
        /// The previous source.
        last: SourceId,
        /// The refused source.
        next: SourceId,
    },
    /// An invalid source name.
    #[error("{source_id}: name {name:?} must have at most 16 bytes and no control characters")]
    Name {
        /// The source.
        source_id: SourceId,
        /// The refused name.
        name: String,
    },
    /// Events of a source do not ascend.
    #[error("{source_id}: event {next} after event {last}: events must ascend")]
    EventOrder {
        /// The source.
        source_id: SourceId,
        /// The previous event.
        last: u64,
        /// The refused event.
        next: u64,
    },
    /// An event outside of the file's range.
    #[error("{source_id}: event {event} is outside of the file's events {} to {}", events.start, events.end - 1)]
    EventRange {
        /// The source.
        source_id: SourceId,
        /// The refused event.
        event: u64,
        /// The file's events; not empty.
        events: Range<u64>,
    },
    /// A fragment of 4 GiB or longer.
    #[error("{source_id}: event {event}: {len} B exceed the maximum of 4 GiB of a fragment")]
    FragmentLen {
        /// The source.
        source_id: SourceId,
        /// The fragment's event.
        event: u64,
        /// The length, in bytes.
        len: usize,
    },
}
