//! A sequence of files with events: a new file by size or time, and an index of the complete ones.
//!
//! The sequence `BASE` of event files has the file `BASE.h5`, or with rotation `BASE.0001.h5`, `BASE.0002.h5`, …. A file is
//! completed on a thread of its own: syncing a large file takes long, and the next file is already being written.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millstream_quantity::Bytes;

use crate::batches::{Batch, BatchOptions, BatchWriter, ClosedBatches, WrittenBytes};
use crate::index::{IndexEntry, append_to_index, index_path};
use crate::sequence_files::remove_earlier_sequence;
use crate::writer::ClosedFile;
use crate::{AppendError, Event, EventWriter, FileError, Schema, StoreSummary, WriteOptions};

/// When a sequence starts a new file, when it syncs, and what it does with the files of an earlier one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceOptions {
    /// Start a new file when one has this length.
    pub rotate_size: Option<Bytes>,
    /// Start a new file when one is this old and has events.
    pub rotate_interval: Option<Duration>,
    /// Whether a flush also makes the events durable, and events count as stored only then. Otherwise this happens when a
    /// file is complete, and flushed events count as stored.
    pub sync_on_flush: bool,
    /// Remove the files of an earlier sequence with this base name. Otherwise they are refused if they have events.
    pub replace: bool,
}

impl SequenceOptions {
    fn rotates(&self) -> bool {
        self.rotate_size.is_some() || self.rotate_interval.is_some()
    }
}

/// A writer of one file of a sequence.
pub trait SequencedFile: Sized {
    /// Extension of the complete file.
    const EXTENSION: &'static str;
    /// Options of each file.
    type Options: Clone;
    /// A file without further events that has its partial name.
    type Closed: Send + 'static;

    /// Creates the partial file of a name. With `durable`, its events count as stored once they survive a crash of the host.
    ///
    /// # Errors
    /// The file cannot be created.
    fn start(path: &Path, schema: &Schema, options: &Self::Options, durable: bool)
    -> Result<Self, FileError>;

    /// Its events.
    fn stored(&self) -> u64;

    /// Its length \[bytes\].
    ///
    /// # Errors
    /// The length cannot be read.
    fn length(&self) -> Result<u64, FileError>;

    /// Writes all events to where they survive the end of this process; if the file is durable, also a crash of the host.
    ///
    /// # Errors
    /// The events cannot be written.
    fn write_out(&mut self) -> Result<(), FileError>;

    /// Ends the file.
    ///
    /// # Errors
    /// The file cannot be written.
    fn end(self) -> Result<Self::Closed, FileError>;

    /// Syncs a file and gives it its final name. Returns its counts, length and checksum.
    ///
    /// # Errors
    /// The file keeps its partial name.
    fn complete(closed: Self::Closed) -> Result<(StoreSummary, Bytes, String), FileError>;
}

impl SequencedFile for EventWriter {
    const EXTENSION: &'static str = crate::partial::EXTENSION;
    type Options = WriteOptions;
    type Closed = ClosedFile;

    fn start(path: &Path, schema: &Schema, options: &WriteOptions, durable: bool) -> Result<Self, FileError> {
        let writer = Self::create(path, schema, options)?;
        Ok(if durable { writer.commit_on_sync() } else { writer })
    }

    fn stored(&self) -> u64 {
        self.events()
    }

    fn length(&self) -> Result<u64, FileError> {
        self.file_bytes()
    }

    fn write_out(&mut self) -> Result<(), FileError> {
        self.flush()?;
        if self.commits_on_sync() { self.sync() } else { Ok(()) }
    }

    fn end(self) -> Result<ClosedFile, FileError> {
        self.close()
    }

    fn complete(closed: ClosedFile) -> Result<(StoreSummary, Bytes, String), FileError> {
        let (bytes, checksum) = closed.checksum()?;
        Ok((closed.commit()?, bytes, checksum))
    }
}

impl SequencedFile for BatchWriter {
    const EXTENSION: &'static str = crate::batches::EXTENSION;
    type Options = BatchOptions;
    type Closed = ClosedBatches;

    fn start(path: &Path, schema: &Schema, options: &BatchOptions, durable: bool) -> Result<Self, FileError> {
        let writer = Self::create(path, schema, *options)?;
        Ok(if durable { writer.commit_on_sync() } else { writer })
    }

    fn stored(&self) -> u64 {
        self.events()
    }

    fn length(&self) -> Result<u64, FileError> {
        Ok(self.file_bytes())
    }

    fn write_out(&mut self) -> Result<(), FileError> {
        if self.commits_on_sync() { self.sync() } else { Ok(()) }
    }

    fn end(self) -> Result<ClosedBatches, FileError> {
        self.close()
    }

    fn complete(closed: ClosedBatches) -> Result<(StoreSummary, Bytes, String), FileError> {
        closed.complete()
    }
}

/// Writes a sequence of event files.
pub type EventFileSequence = FileSequence<EventWriter>;
/// Writes a sequence of batch files.
pub type BatchFileSequence = FileSequence<BatchWriter>;

/// Writes a sequence of files.
#[derive(Debug)]
pub struct FileSequence<W: SequencedFile> {
    base: PathBuf,
    schema: Schema,
    write: W::Options,
    options: SequenceOptions,
    number: u32,
    current: CurrentFile<W>,
    /// Completes the previous file.
    completing: Option<JoinHandle<Result<StoreSummary, FileError>>>,
    completed: Vec<StoreSummary>,
}

#[derive(Debug)]
struct CurrentFile<W> {
    writer: W,
    opened: Instant,
}

impl<W: SequencedFile> FileSequence<W> {
    /// Starts a sequence with its first file.
    ///
    /// # Errors
    /// [`FileError::EarlierEvents`] without [`SequenceOptions::replace`]; also if the file cannot be created.
    pub fn create(
        base: impl AsRef<Path>,
        schema: Schema,
        write: W::Options,
        options: SequenceOptions,
    ) -> Result<Self, FileError> {
        let base = base.as_ref().to_owned();
        remove_earlier_sequence(&base, options.replace)?;
        let path = file_path(&base, &options, 1, W::EXTENSION);
        let current = CurrentFile::create(&path, &schema, &write, options.sync_on_flush)?;
        let (completing, completed) = (None, Vec::new());
        Ok(Self { base, schema, write, options, number: 1, current, completing, completed })
    }

    /// Writes all events into the current file, where they survive the end of this process, then starts a new file
    /// if it is time. Call this also without new events, for rotation by time.
    pub fn flush(&mut self) -> Result<(), FileError> {
        self.current.writer.write_out()?;
        if self.is_due()? { self.rotate() } else { Ok(()) }
    }

    /// Completes all files. Returns their counts, in order.
    pub fn finish(mut self) -> Result<Vec<StoreSummary>, FileError> {
        self.join()?;
        let Self { base, current, mut completed, .. } = self;
        // A file without events is left only if it is the only one.
        if current.writer.stored() > 0 || completed.is_empty() {
            completed.push(complete::<W>(current.writer.end()?, &base)?);
        }
        Ok(completed)
    }

    fn is_due(&self) -> Result<bool, FileError> {
        if self.current.writer.stored() == 0 {
            return Ok(false);
        }
        let old = self.options.rotate_interval.is_some_and(|most| self.current.opened.elapsed() >= most);
        Ok(old
            || match self.options.rotate_size {
                Some(most) => self.current.writer.length()? >= most.0,
                None => false,
            })
    }

    fn rotate(&mut self) -> Result<(), FileError> {
        self.join()?;
        self.number += 1;
        let path = file_path(&self.base, &self.options, self.number, W::EXTENSION);
        let next = CurrentFile::create(&path, &self.schema, &self.write, self.options.sync_on_flush)?;
        let closed = std::mem::replace(&mut self.current, next).writer.end()?;
        let base = self.base.clone();
        self.completing = Some(std::thread::spawn(move || complete::<W>(closed, &base)));
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

impl FileSequence<EventWriter> {
    /// Appends an event. Its bytes are copied before this returns.
    pub fn append(&mut self, event: &Event<'_>) -> Result<(), AppendError> {
        self.current.writer.append(event)
    }
}

impl FileSequence<BatchWriter> {
    /// Writes a batch. Its memory may change afterwards.
    pub fn append(&mut self, batch: &Batch<'_>) -> Result<WrittenBytes, FileError> {
        self.current.writer.append(batch)
    }
}

impl<W: SequencedFile> CurrentFile<W> {
    fn create(path: &Path, schema: &Schema, write: &W::Options, durable: bool) -> Result<Self, FileError> {
        Ok(Self { writer: W::start(path, schema, write, durable)?, opened: Instant::now() })
    }
}

/// Syncs and renames a file, and adds it to the index.
fn complete<W: SequencedFile>(closed: W::Closed, base: &Path) -> Result<StoreSummary, FileError> {
    let (stored, bytes, checksum) = W::complete(closed)?;
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

fn file_path(base: &Path, options: &SequenceOptions, number: u32, extension: &str) -> PathBuf {
    let mut path = base.as_os_str().to_owned();
    if options.rotates() {
        path.push(format!(".{number:04}"));
    }
    path.push(format!(".{extension}"));
    path.into()
}
