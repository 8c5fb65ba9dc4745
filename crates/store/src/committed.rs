//! What the writer of a file has committed: for builder units that build the batches of a lost one again, and for lists of
//! files.

use std::path::{Path, PathBuf};

use millstream_fragment::file::IoError;

use crate::batches::{self, BatchReader};
use crate::index::is_batch_file;
use crate::{EventReader, FileError, commit_record};

/// Reads the numbers of the events that the writer of a file has committed, each once. The file is complete, being written,
/// or left by a dead writer; then these are the events that [`recover_partial`](crate::recover_partial) keeps.
#[derive(Debug)]
pub struct CommittedReader {
    path: PathBuf,
    /// The instance of the run whose events are read; `None` for any.
    instance: Option<String>,
    /// Open once the file has a header, if it is a batch file.
    batches: Option<BatchReader>,
    /// Rows read, if it is an event file.
    rows: u64,
}

impl CommittedReader {
    /// Reads from the start of the file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), instance: None, batches: None, rows: 0 }
    }

    /// Reads from the start of the file if it is of the run with this [`instance`](crate::Run::instance). Otherwise it has no
    /// event.
    pub fn of_run(path: impl Into<PathBuf>, instance: impl Into<String>) -> Self {
        Self { instance: Some(instance.into()), ..Self::new(path) }
    }

    /// The file has another name now.
    pub fn renamed(&mut self, path: impl Into<PathBuf>) {
        self.path = path.into();
    }

    /// Events that were committed since the last call. None if the writer has just created the file.
    ///
    /// # Errors
    /// The file cannot be read. A file that does not exist is an I/O error.
    pub fn read_new(&mut self) -> Result<Vec<u64>, FileError> {
        if !is_batch_file(&self.path) {
            return self.read_rows();
        }
        let reader = match &mut self.batches {
            Some(reader) => reader,
            None => match BatchReader::open(&self.path) {
                Err(error) if batches::is_cut_in_its_header(&error) => return Ok(Vec::new()),
                reader => self.batches.insert(reader?),
            },
        };
        if self.instance.as_ref().is_some_and(|wanted| *wanted != reader.schema().run.instance) {
            return Ok(Vec::new());
        }
        reader.newly_committed()
    }

    fn read_rows(&mut self) -> Result<Vec<u64>, FileError> {
        // Before the numbers: a writer that lives may commit more meanwhile. Until the first commit there may be no HDF5 file.
        let file = std::fs::File::open(&self.path).map_err(IoError::of(&self.path, "open"))?;
        let committed = commit_record::read(&file, &self.path)?;
        if committed <= self.rows {
            return Ok(Vec::new());
        }
        let reader = EventReader::open_from(&self.path, self.rows)?;
        if let Some(wanted) = &self.instance
            && *wanted != reader.instance()?
        {
            return Ok(Vec::new());
        }
        let mut numbers = reader.into_numbers();
        numbers.truncate(usize::try_from(committed - self.rows).unwrap_or(usize::MAX));
        self.rows += numbers.len() as u64;
        Ok(numbers)
    }
}

/// Numbers of the events that the writer of a file committed, whether it is complete, being written, or left by a dead writer.
///
/// # Errors
/// The file cannot be read.
pub fn committed_numbers(path: &Path) -> Result<Vec<u64>, FileError> {
    CommittedReader::new(path).read_new()
}
