//! Completes the partial batch file of a dead writer: it is cut behind its last whole record that was committed. A file that has whole records
//! behind a damaged one is kept: its writer wrote them one after the other, so this is not what it left.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use millstream_fragment::file::IoError;

use super::format::mark_recovered;
use super::reader::{BatchReader, has_no_record, is_cut_in_its_header};
use crate::FileError;

/// Cuts what follows the last committed record, and marks the file as recovered. Returns its events; a file without events is left
/// as it is.
///
/// # Errors
/// [`FileError::RecordsBehindDamage`]; also if the file cannot be read or written.
pub(crate) fn recover(file: &File, path: &Path) -> Result<u64, FileError> {
    let mut reader = match BatchReader::open(path) {
        Ok(reader) => reader,
        Err(error) if is_cut_in_its_header(&error) => {
            let is_cut = has_no_record(file).map_err(IoError::of(path, "read"))?;
            return if is_cut { Ok(0) } else { Err(error) };
        }
        Err(error) => return Err(error),
    };
    let mut header = reader.encoded_header()?;
    let mut events = 0;
    loop {
        match reader.next_record() {
            Ok(Some(record)) => events += record.header().events.len() as u64,
            Ok(None) => break,
            Err(damage @ FileError::InvalidRecord { .. }) => {
                if reader.is_next_pending()? {
                    break;
                }
                match reader.next_whole()? {
                    Some(next) => {
                        return Err(FileError::RecordsBehindDamage { damage: Box::new(damage), next });
                    }
                    None => break,
                }
            }
            Err(error) => return Err(error),
        }
    }
    if events > 0 {
        mark_recovered(&mut header, events);
        file.set_len(reader.end()).map_err(IoError::of(path, "cut"))?;
        file.write_all_at(&header, 0).map_err(IoError::of(path, "write"))?;
    }
    Ok(events)
}
