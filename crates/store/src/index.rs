//! The index of an event file sequence: one line of JSON per complete file.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use millstream_fragment::file::{IoError, sync_name};
use millstream_quantity::Bytes;
use serde::{Deserialize, Serialize};

use crate::batches::{self, BatchReader};
use crate::partial::{is_named, unlock};
use crate::{EventReader, FileError};

/// Suffix of an index.
pub const INDEX_SUFFIX: &str = ".index.jsonl";

/// A complete event file, as the index lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexEntry {
    /// Its name, in the folder of the index.
    pub file: String,
    /// Its events.
    pub events: u64,
    /// The lowest event number; `None` without events.
    pub first_event: Option<u64>,
    /// The highest event number; `None` without events.
    pub last_event: Option<u64>,
    /// Its length.
    pub bytes: Bytes,
    /// Algorithm and checksum, as in `crc32:89abcdef`; `headers-crc32:…` is that of a batch file's headers.
    pub checksum: String,
    /// Whether it is the recovered file of a writer that did not complete it.
    #[serde(default)]
    pub recovered: bool,
}

/// The index of the sequence `base`: `BASE.index.jsonl`.
pub fn index_path(base: &Path) -> PathBuf {
    let mut path = base.as_os_str().to_owned();
    path.push(INDEX_SUFFIX);
    path.into()
}

/// Reads an index; empty if there is none.
///
/// # Errors
/// The file cannot be read, or a line is not an entry. A line that is cut short at the end is left out.
pub fn read_index(path: &Path) -> Result<Vec<IndexEntry>, FileError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(IoError::of(path, "open")(cause).into()),
    };
    let mut entries = Vec::new();
    let mut lines = BufReader::new(file);
    let mut line = String::new();
    for number in 1u64.. {
        line.clear();
        lines.read_line(&mut line).map_err(IoError::of(path, "read"))?;
        if !line.ends_with('\n') {
            break;
        }
        let entry = serde_json::from_str(&line).map_err(|cause| FileError::WrongFormat {
            path: path.to_owned(),
            field: format!("line {number}"),
            found: format!("{:?} ({cause})", line.trim_end()),
            expected: "an entry of an index".to_owned(),
        })?;
        entries.push(entry);
    }
    Ok(entries)
}

/// Appends an entry and makes it durable, unless the index has it. A line that another process did not write to its end is removed
/// first. Processes that append at the same time wait for each other.
///
/// # Errors
/// The index cannot be written. It keeps the entries before, and no part of this one.
pub fn append_to_index(path: &Path, entry: &IndexEntry) -> Result<(), FileError> {
    let mut line =
        serde_json::to_vec(entry).map_err(std::io::Error::from).map_err(IoError::of(path, "write"))?;
    line.push(b'\n');
    let mut file = open_locked(path)?;
    let appended = append(&mut file, path, &line, entry);
    unlock(&file);
    appended
}

/// Opens the index with an exclusive `flock`.
fn open_locked(path: &Path) -> Result<File, FileError> {
    loop {
        let file = File::options().create(true).read(true).append(true).open(path);
        let file = file.map_err(IoError::of(path, "open"))?;
        file.lock().map_err(IoError::of(path, "lock"))?;
        // A run that replaces its files may have removed the index meanwhile.
        if is_named(&file, path) {
            return Ok(file);
        }
    }
}

fn append(file: &mut File, path: &Path, line: &[u8], entry: &IndexEntry) -> Result<(), FileError> {
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(IoError::of(path, "read"))?;
    let end = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let mut entries = text[..end].split(|&byte| byte == b'\n');
    // `evb files --recover` beside a run may have added the file that the run completes.
    if entries.any(|line| serde_json::from_slice(line).is_ok_and(|listed: IndexEntry| listed == *entry)) {
        return Ok(());
    }
    let end = end as u64;
    let written = file.set_len(end).and_then(|()| file.write_all(line)).and_then(|()| file.sync_data());
    written.map_err(|cause| {
        let _ = file.set_len(end);
        IoError::of(path, "write")(cause)
    })?;
    if text.is_empty() { Ok(sync_name(path)?) } else { Ok(()) }
}

impl IndexEntry {
    /// The entry of a file, which is read for it.
    pub fn of_file(path: &Path) -> Result<Self, FileError> {
        let Contents { numbers, bytes, checksum, recovered } = contents(path)?;
        Ok(Self {
            file: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            events: numbers.len() as u64,
            first_event: numbers.iter().min().copied(),
            last_event: numbers.iter().max().copied(),
            bytes,
            checksum,
            recovered,
        })
    }

    /// Compares length and checksum with those of the file in `folder`. In a batch file, the checksum covers the headers; the
    /// payload of stored events is compared with the checksums in these.
    ///
    /// # Errors
    /// The file cannot be read, or differs.
    pub fn verify(&self, folder: &Path) -> Result<(), FileError> {
        let path = folder.join(&self.file);
        let is_batches = is_batch_file(&path);
        let (bytes, checksum) = match is_batches {
            true => BatchReader::open(&path).map(|reader| (reader.bytes(), String::new()))?,
            false => checksum(&path)?,
        };
        let wrong = |field: &str, found: String, expected: String| FileError::WrongFormat {
            path: path.clone(),
            field: field.to_owned(),
            found,
            expected,
        };
        if bytes != self.bytes {
            return Err(wrong("length", bytes.0.to_string(), self.bytes.0.to_string()));
        }
        let checksum = if is_batches { BatchReader::open(&path)?.verify()? } else { checksum };
        if checksum != self.checksum {
            return Err(wrong("checksum", checksum, self.checksum.clone()));
        }
        Ok(())
    }
}

/// Numbers of the events of a complete file, in its order.
pub fn event_numbers(path: &Path) -> Result<Vec<u64>, FileError> {
    match is_batch_file(path) {
        true => BatchReader::open(path)?.numbers().map(|(numbers, _)| numbers),
        false => Ok(EventReader::open(path)?.numbers().to_vec()),
    }
}

/// Whether the name is that of a batch file, complete or partial.
pub(crate) fn is_batch_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(batches::SUFFIX) || name.ends_with(&format!(".{}", batches::EXTENSION))
}

/// What an entry says about a file.
struct Contents {
    numbers: Vec<u64>,
    bytes: Bytes,
    checksum: String,
    recovered: bool,
}

fn contents(path: &Path) -> Result<Contents, FileError> {
    if is_batch_file(path) {
        let reader = BatchReader::open(path)?;
        let (bytes, recovered) = (reader.bytes(), reader.recovered().is_some());
        let (numbers, checksum) = reader.numbers()?;
        return Ok(Contents { numbers, bytes, checksum, recovered });
    }
    let (bytes, checksum) = checksum(path)?;
    let reader = EventReader::open(path)?;
    Ok(Contents { recovered: reader.is_recovered(), numbers: reader.into_numbers(), bytes, checksum })
}

/// Length and checksum of a file.
pub(crate) fn checksum(path: &Path) -> Result<(Bytes, String), FileError> {
    let failed = IoError::of(path, "read");
    let mut file = File::open(path).map_err(failed)?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => return Ok((Bytes(bytes), format!("crc32:{:08x}", hasher.finalize()))),
            len => {
                bytes += len as u64;
                hasher.update(&buffer[..len]);
            }
        }
    }
}
