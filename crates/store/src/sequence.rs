//! A sequence of event files: a new file by size or time, and an index of the complete ones.
//!
//! The sequence `BASE` has the file `BASE.h5`, or with rotation `BASE.0001.h5`, `BASE.0002.h5`, …. A file is
//! completed on a thread of its own: syncing a large file takes long, and the next file is already being written.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millstream_fragment::file::IoError;
use millstream_quantity::Bytes;

use crate::index::{IndexEntry, append_to_index, index_path};
use crate::writer::ClosedFile;
use crate::{AppendError, Event, EventWriter, FileError, Schema, StoreSummary, WriteOptions};

/// When a sequence starts a new file, and when it syncs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceOptions {
    /// Start a new file when one has this length.
    pub rotate_size: Option<Bytes>,
    /// Start a new file when one is this old and has events.
    pub rotate_interval: Option<Duration>,
    /// Whether a flush also makes the events durable. Otherwise this happens when a file is complete.
    pub sync_on_flush: bool,
}

impl SequenceOptions {
    fn rotates(&self) -> bool {
        self.rotate_size.is_some() || self.rotate_interval.is_some()
    }
}

/// Writes a sequence of event files.
#[derive(Debug)]
pub struct EventFileSequence {
    base: PathBuf,
    schema: Schema,
    write: WriteOptions,
    options: SequenceOptions,
    number: u32,
    current: CurrentFile,
    /// Completes the previous file.
    completing: Option<JoinHandle<Result<StoreSummary, FileError>>>,
    completed: Vec<StoreSummary>,
}

#[derive(Debug)]
struct CurrentFile {
    writer: EventWriter,
    opened: Instant,
}

impl EventFileSequence {
    /// Starts a sequence with its first file. A new index replaces that of an earlier sequence.
    pub fn create(
        base: impl AsRef<Path>,
        schema: Schema,
        write: WriteOptions,
        options: SequenceOptions,
    ) -> Result<Self, FileError> {
        let base = base.as_ref().to_owned();
        let current = CurrentFile::create(&file_path(&base, &options, 1), &schema, &write)?;
        let index = index_path(&base);
        match fs::remove_file(&index) {
            Err(cause) if cause.kind() != ErrorKind::NotFound => {
                return Err(IoError::of(&index, "remove")(cause).into());
            }
            _ => {}
        }
        let (completing, completed) = (None, Vec::new());
        Ok(Self { base, schema, write, options, number: 1, current, completing, completed })
    }

    /// Appends an event. Its bytes are copied before this returns.
    pub fn append(&mut self, event: &Event<'_>) -> Result<(), AppendError> {
        self.current.writer.append(event)
    }

    /// Writes all events into the current file, where they survive the end of this process, then starts a new file
    /// if it is time. Call this also without new events, for rotation by time.
    pub fn flush(&mut self) -> Result<(), FileError> {
        self.current.writer.flush()?;
        if self.options.sync_on_flush {
            self.current.writer.sync()?;
        }
        if self.is_due()? { self.rotate() } else { Ok(()) }
    }

    /// Completes all files. Returns their counts, in order.
    pub fn finish(mut self) -> Result<Vec<StoreSummary>, FileError> {
        self.join()?;
        let Self { base, current, mut completed, .. } = self;
        // A file without events is left only if it is the only one.
        if current.writer.events() > 0 || completed.is_empty() {
            completed.push(complete(current.writer.close()?, &base)?);
        }
        Ok(completed)
    }

    fn is_due(&self) -> Result<bool, FileError> {
        if self.current.writer.events() == 0 {
            return Ok(false);
        }
        let old = self.options.rotate_interval.is_some_and(|most| self.current.opened.elapsed() >= most);
        Ok(old
            || match self.options.rotate_size {
                Some(most) => self.current.writer.file_bytes()? >= most.0,
                None => false,
            })
    }

    fn rotate(&mut self) -> Result<(), FileError> {
        self.join()?;
        self.number += 1;
        let path = file_path(&self.base, &self.options, self.number);
        let next = CurrentFile::create(&path, &self.schema, &self.write)?;
        let closed = std::mem::replace(&mut self.current, next).writer.close()?;
        let base = self.base.clone();
        self.completing = Some(std::thread::spawn(move || complete(closed, &base)));
        Ok(())
    }

    /// Waits until the previous file is complete.
    fn join(&mut self) -> Result<(), FileError> {
        if let Some(thread) = self.completing.take() {
            let stored = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            self.completed.push(stored?);
        }
        Ok(())
    }
}

impl CurrentFile {
    fn create(path: &Path, schema: &Schema, write: &WriteOptions) -> Result<Self, FileError> {
        Ok(Self { writer: EventWriter::create(path, schema, write)?, opened: Instant::now() })
    }
}

/// Syncs and renames a file, and adds it to the index.
fn complete(closed: ClosedFile, base: &Path) -> Result<StoreSummary, FileError> {
    let (bytes, checksum) = closed.checksum()?;
    let stored = closed.commit()?;
    let entry = IndexEntry {
        file: stored.path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        events: stored.events,
        first_event: stored.first_event,
        last_event: stored.last_event,
        bytes,
        checksum,
        recovered: false,
    };
    append_to_index(&index_path(base), &entry)?;
    Ok(stored)
}

fn file_path(base: &Path, options: &SequenceOptions, number: u32) -> PathBuf {
    let mut path = base.as_os_str().to_owned();
    if options.rotates() {
        path.push(format!(".{number:04}"));
    }
    path.push(".h5");
    path.into()
}
