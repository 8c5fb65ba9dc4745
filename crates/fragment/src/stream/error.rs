//! Why a stream file cannot be read or written.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use crate::SourceId;
use crate::file::IoError;

/// A stream file that was not opened, or whose payload is damaged.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// The file is truncated, damaged, or no stream file at all.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The place and what is wrong with it.
        what: Malformed,
    },
}

/// The first field of a file that is not what it has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Offset of the field from the start of the file, in bytes.
    pub offset: u64,
    /// Name of the field as in `docs/formats.md`, with the source and fragment that it belongs to.
    pub field: String,
    /// What is there.
    pub found: String,
    /// What has to be there.
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

/// A stream file that was not written; nothing appears under its name.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// A file has to hold events.
    #[error("events {} to {}: the range is empty", .0.start, .0.end)]
    NoEvents(Range<u64>),
    /// A file has to name its sources, even if none has a fragment.
    #[error("no source: a stream file holds at least one")]
    NoSources,
    /// Sources come in ascending order of their ids, each once.
    #[error("{next} after {last}: source ids have to ascend")]
    SourceOrder {
        /// The source before.
        last: SourceId,
        /// The source that was refused.
        next: SourceId,
    },
    /// A name does not fit, or is not text.
    #[error("{source_id}: name {name:?} is longer than 16 bytes or has a control character")]
    Name {
        /// The source.
        source_id: SourceId,
        /// The name that was refused.
        name: String,
    },
    /// Fragments of a source come in ascending order of their events, each event at most once.
    #[error("{source_id}: event {next} after event {last}: events have to ascend")]
    EventOrder {
        /// The source.
        source_id: SourceId,
        /// The event before.
        last: u64,
        /// The event that was refused.
        next: u64,
    },
    /// A fragment belongs to none of the file's events.
    #[error("{source_id}: event {event} is outside the file's events {} to {}", events.start, events.end - 1)]
    EventRange {
        /// The source.
        source_id: SourceId,
        /// The event that was refused.
        event: u64,
        /// The file's events; not empty.
        events: Range<u64>,
    },
    /// A fragment's length does not fit into 32 bits.
    #[error("{source_id}: event {event}: {len} B do not fit into one fragment")]
    FragmentLen {
        /// The source.
        source_id: SourceId,
        /// The fragment's event.
        event: u64,
        /// The length that was refused, in bytes.
        len: usize,
    },
}
