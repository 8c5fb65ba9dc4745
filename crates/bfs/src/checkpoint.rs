//! The file that keeps what is done: a line of parameters, then one line a root.
//!
//! The graph is not in it: it is generated again, for as many nodes as there are then. A last line without its end, from a
//! program that was killed while it wrote, does not count.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::report::RootRecord;
use crate::search::Thresholds;

/// What the results and their times depend on, beside the nodes and their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameters {
    /// Logarithm of the number of vertices.
    pub scale: u32,
    /// Edges per vertex.
    pub edge_factor: u64,
    /// Seeds of the generator.
    pub seeds: (u64, u64),
    /// Bits of a stored vertex number.
    pub width_bits: u32,
    /// When a search changes its direction.
    pub thresholds: Thresholds,
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
    /// It belongs to a run with other parameters.
    #[error("{} belongs to another run, {found:?}: remove it, or give its parameters", file.display())]
    OtherRun {
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
    /// Opens or creates a checkpoint. Returns it with the roots that are done. A file that is refused stays as it is.
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
        let bad = |line, cause| CheckpointError::Line { file: path.to_owned(), line: line + 1, cause };
        let check = |line, text: &str| {
            let found: Parameters = serde_json::from_str(text).map_err(|cause| bad(line, cause))?;
            if found == *parameters {
                return Ok(());
            }
            Err(CheckpointError::OtherRun { file: path.to_owned(), found })
        };
        let mut lines = text[..whole].lines().enumerate();
        let first = lines.next();
        match first {
            Some((line, text)) => check(line, text)?,
            // This run's first line, or the part that was written of it.
            None if line_of(parameters).map_err(failed)?.starts_with(&text) => {}
            None => check(0, &text)?,
        }
        let records = lines.map(|(line, text)| serde_json::from_str(text).map_err(|cause| bad(line, cause)));
        let records = records.collect::<Result<_, _>>()?;
        file.set_len(whole as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(failed)?;
        let mut checkpoint = Checkpoint { path: path.to_owned(), file };
        if first.is_none() {
            checkpoint.append(parameters)?;
        }
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
        let text = line_of(line).map_err(failed)?;
        // One write: a reader sees whole lines, or a last one without its end.
        self.file.write_all(text.as_bytes()).and_then(|()| self.file.sync_data()).map_err(failed)
    }
}

/// A line of the file, with its end.
fn line_of(value: &impl Serialize) -> io::Result<String> {
    Ok(serde_json::to_string(value)? + "\n")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const PARAMETERS: Parameters = Parameters {
        scale: 6,
        edge_factor: 16,
        seeds: (2, 3),
        width_bits: 32,
        thresholds: Thresholds { alpha: 15, beta: 18 },
    };

    #[test]
    fn a_refused_file_keeps_its_contents() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let own = line_of(&PARAMETERS).unwrap();
        let other = line_of(&Parameters { width_bits: 48, ..PARAMETERS }).unwrap();
        for (text, expected) in [
            ("one line of a novel", "line 1: not a checkpoint"),
            ("a line\nand another", "line 1: not a checkpoint"),
            (&format!("{own}no record\nand more"), "line 2: not a checkpoint"),
            (&other, "belongs to another run"),
            (other.trim_end(), "belongs to another run"),
            (&other[..other.len() - 3], "line 1: not a checkpoint"),
        ] {
            fs::write(&file, text).unwrap();
            let error = Checkpoint::open(&file, &PARAMETERS).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
    }

    #[test]
    fn a_first_line_without_its_end_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let own = line_of(&PARAMETERS).unwrap();
        for text in ["", &own[..7], own.trim_end(), &own, &format!("{own}{{\"root\"")] {
            fs::write(&file, text).unwrap();
            let (_, records) = Checkpoint::open(&file, &PARAMETERS).unwrap();
            assert_eq!((records.len(), fs::read_to_string(&file).unwrap()), (0, own.clone()), "{text:?}");
        }
    }
}
