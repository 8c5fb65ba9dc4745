//! The file that keeps what is done: a line of parameters, then one line a root.
//!
//! The graph is not in it: it is generated again, for as many nodes as there are then. A last line without its end, from a
//! program that was killed while it wrote, does not count.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::report::RootRecord;

/// What the results depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// Logarithm of the number of vertices.
    pub scale: u32,
    /// Edges per vertex.
    pub edge_factor: u64,
    /// Seeds of the generator.
    pub seeds: (u64, u64),
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// It cannot be read or written.
    #[error("{}: {cause}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// A line is not of this format.
    #[error("{} line {line}: not a checkpoint of `millstream torus bfs`: {cause}", file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The cause.
        cause: serde_json::Error,
    },
    /// It belongs to another graph.
    #[error("{} belongs to another graph, {found:?}: remove it, or give its parameters", file.display())]
    OtherGraph {
        /// The file.
        file: PathBuf,
        /// Its parameters.
        found: Parameters,
    },
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    file: File,
}

impl Checkpoint {
    /// Opens or creates a checkpoint. Returns it with the roots that are done.
    ///
    /// # Errors
    /// [`CheckpointError`].
    pub fn open(
        path: &Path,
        parameters: &Parameters,
    ) -> Result<(Checkpoint, Vec<RootRecord>), CheckpointError> {
        let failed = |cause| CheckpointError::File { file: path.to_owned(), cause };
        let mut options = OpenOptions::new();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(failed)?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed)?;
        let mut checkpoint = Checkpoint { path: path.to_owned(), file };
        let mut lines = text[..whole].lines().enumerate();
        let bad = |line, cause| CheckpointError::Line { file: path.to_owned(), line: line + 1, cause };
        match lines.next() {
            None => checkpoint.append(parameters)?,
            Some((line, text)) => {
                let found: Parameters = serde_json::from_str(text).map_err(|cause| bad(line, cause))?;
                if found != *parameters {
                    return Err(CheckpointError::OtherGraph { file: path.to_owned(), found });
                }
            }
        }
        let records = lines.map(|(line, text)| serde_json::from_str(text).map_err(|cause| bad(line, cause)));
        let records = records.collect::<Result<_, _>>()?;
        Ok((checkpoint, records))
    }

    /// Keeps a root that is done.
    ///
    /// # Errors
    /// [`CheckpointError`] if it cannot be written.
    pub fn keep(&mut self, record: &RootRecord) -> Result<(), CheckpointError> {
        self.append(record)
    }

    fn append(&mut self, line: &impl Serialize) -> Result<(), CheckpointError> {
        let failed = |cause| CheckpointError::File { file: self.path.clone(), cause };
        let mut text = serde_json::to_string(line).map_err(|error| failed(error.into()))?;
        text.push('\n');
        // One write: a reader sees whole lines, or a last one without its end.
        self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data()).map_err(failed)
    }
}
