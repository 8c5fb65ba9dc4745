//! Batch files: whole batches with stored events, written past the page cache straight from landing memory.
//!
//! A record holds the pages of a slot that hold packets, behind a header with its own CRC-32. [`BatchWriter`] appends
//! records, [`BatchReader`] reads and verifies them, and [`unpack`] writes the stored events into an event file.
//! `docs/output.md` has the format.

mod format;
mod reader;
mod recover;
mod unpack;
mod writer;

pub use format::{RecordEvent, RecordHeader, RecordPacket};
pub use reader::{BatchReader, Record, StoredEvent};
pub use unpack::{UnpackError, unpack};
pub use writer::{Batch, BatchEvent, BatchOptions, BatchPacket, BatchWriter, ClosedBatches, WrittenBytes};

pub(crate) use reader::is_cut_in_its_header;
pub(crate) use recover::recover;

/// Extension of a complete file.
pub(crate) const EXTENSION: &str = "batches";
/// End of the name of a partial file.
pub(crate) const SUFFIX: &str = ".batches.partial";
