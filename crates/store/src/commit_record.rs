//! The commit record: how many events of a file are complete.
//!
//! ```text
//!   0            8            16                 4096
//! ┌────────────┬────────────┬──────────────────┬──────────
//! │ "MSEVENTS" │ events u64 │ zeros            │ HDF5 …
//! └────────────┴────────────┴──────────────────┴──────────
//! ```
//!
//! It is in the user block, which HDF5 leaves to applications. A failed flush, as on a full disk, can leave datasets
//! longer than their data. The record is overwritten in place after each successful flush, which needs no space.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use millstream_fragment::file::IoError;

use crate::FileError;

/// Length of the user block: a page, so that the pages of the HDF5 file are pages of the page cache.
pub(crate) const USER_BLOCK: u64 = PAGE;

/// A signal that kills a process in a `write` can cut the write at a page of the page cache. HDF5 keeps metadata that is
/// smaller than a page of its file inside such a page, so a kill leaves it old or new, and its checksum right.
pub(crate) const PAGE: u64 = 4096;

const MAGIC: &[u8; 8] = b"MSEVENTS";

/// Records the number of complete events.
pub(crate) fn write(file: &File, events: u64) -> io::Result<()> {
    let mut record = [0; 16];
    record[..8].copy_from_slice(MAGIC);
    record[8..].copy_from_slice(&events.to_le_bytes());
    file.write_all_at(&record, 0)
}

/// The number of complete events; 0 before the first record is written.
///
/// # Errors
/// Also [`FileError::WrongFormat`]: the file starts with neither a record nor zeros, so it is not one of this program, or is
/// damaged.
pub(crate) fn read(file: &File, path: &Path) -> Result<u64, FileError> {
    let failed = IoError::of(path, "read");
    let len = file.metadata().map_err(failed)?.len().min(16);
    let mut record = [0; 16];
    match file.read_exact_at(&mut record[..len as usize], 0) {
        Err(cause) if cause.kind() == ErrorKind::UnexpectedEof => {}
        read => read.map_err(failed)?,
    }
    let (magic, events) = record.split_at(8);
    if magic == MAGIC {
        return Ok(events.first_chunk().map_or(0, |events| u64::from_le_bytes(*events)));
    }
    if record == [0; 16] {
        return Ok(0);
    }
    Err(FileError::WrongFormat {
        path: path.to_owned(),
        field: "the start".to_owned(),
        found: format!("{magic:02x?}"),
        expected: "\"MSEVENTS\", the commit record of an event file".to_owned(),
    })
}
