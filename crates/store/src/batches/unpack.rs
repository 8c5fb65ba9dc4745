//! Writes the stored events of a batch file into an event file.

use std::path::Path;

use super::reader::BatchReader;
use crate::{AppendError, Event, EventWriter, FileError, StoreSummary, WriteOptions};

/// Why a batch file was not unpacked. There is no event file then, complete or partial.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The batch file cannot be read, or the event file cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// An event of the batch file does not match its schema.
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Writes the stored events of `batches` into the event file `to`, with the schema of the batch file. Fragments are compared
/// with their checksums, as in a run that stores event files.
///
/// # Errors
/// See [`UnpackError`].
pub fn unpack(batches: &Path, to: &Path, options: &WriteOptions) -> Result<StoreSummary, UnpackError> {
    let mut reader = BatchReader::open(batches)?;
    let mut writer = EventWriter::create(to, reader.schema(), options)?.without_recovery();
    while let Some(record) = reader.next_record()? {
        let header = record.header();
        for position in 0..header.events.len() {
            let stored = record.event(position)?;
            writer.append(&Event {
                number: stored.number,
                batch: header.batch,
                fragments: &stored.fragments(),
                decisions: record.decisions(position),
                readout_lost: header.readout_lost,
            })?;
        }
    }
    Ok(writer.finish()?)
}
