//! The log book: one JSON object per line, appended and never changed.

use crate::directory::RunNumber;
use crate::error::ControlError;
use crate::power::PowerReading;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Entries kept in memory for readers.
const KEPT: usize = 1000;

/// An entry of the log book.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When it was made, in UTC.
    pub time: String,
    /// Number of the present or last run.
    pub run: RunNumber,
    /// What happened.
    #[serde(flatten)]
    pub kind: EntryKind,
}

/// Kind of an entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum EntryKind {
    /// The processes of a run are started.
    Begin {
        /// Who started it.
        operator: String,
        /// The operator's comment.
        comment: String,
        /// The configuration file.
        configuration: PathBuf,
        /// SHA-256 of the configuration with its changed settings.
        sha256: String,
        /// Settings that differ from the file.
        settings: BTreeMap<String, Json>,
    },
    /// The event manager paused the run.
    Pause,
    /// The event manager resumed the run, or started it.
    Resume,
    /// All processes of the run have ended.
    End {
        /// How it ended.
        result: RunResult,
        /// Events and fragments by outcome; `None` if the run did not start.
        account: Option<Json>,
        /// Its problems.
        problems: Vec<String>,
        /// Its report, in the directory.
        report: Option<PathBuf>,
        /// Energy of the host's processors during the run \[J\].
        energy_j: Option<f64>,
        /// The host's power state at its end, with the reasons for missing values.
        power: Option<PowerReading>,
    },
    /// An operator's comment.
    Comment {
        /// Who wrote it.
        operator: String,
        /// The text.
        text: String,
    },
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunResult {
    /// All events were processed.
    Complete,
    /// An operator stopped it.
    Stopped,
    /// It failed.
    Failed,
    /// The run control process ended during the run.
    Lost,
}

impl EntryKind {
    /// The end of a run whose run control process ended.
    pub(crate) fn lost(problems: Vec<String>) -> EntryKind {
        EntryKind::End {
            result: RunResult::Lost,
            account: None,
            problems,
            report: None,
            energy_j: None,
            power: None,
        }
    }
}

impl Entry {
    /// An entry of this moment.
    pub fn now(run: RunNumber, kind: EntryKind) -> Entry {
        Entry { time: now(), run, kind }
    }
}

/// The time in UTC, with milliseconds.
pub(crate) fn now() -> String {
    format!("{:.3}", Timestamp::now())
}

/// The log book.
#[derive(Debug)]
pub struct Logbook {
    path: PathBuf,
    file: File,
    /// Length of the complete lines.
    complete: u64,
    entries: u64,
    recent: VecDeque<Entry>,
    last_run: RunNumber,
    open_run: Option<RunNumber>,
}

impl Logbook {
    /// Opens or makes the file. A last line that a failed host left incomplete is cut off.
    ///
    /// # Errors
    /// The file cannot be used, or has a line that is not an entry.
    pub fn open(path: &Path) -> Result<Logbook, ControlError> {
        let fail = |cause| ControlError::io(path, "open", cause);
        let file = File::options().create(true).read(true).append(true).open(path).map_err(fail)?;
        let mut book = Logbook {
            path: path.to_owned(),
            file,
            complete: 0,
            entries: 0,
            recent: VecDeque::new(),
            last_run: RunNumber::default(),
            open_run: None,
        };
        book.read()?;
        Ok(book)
    }

    fn read(&mut self) -> Result<(), ControlError> {
        let path = self.path.clone();
        let fail = |cause| ControlError::io(&path, "read", cause);
        let mut reader = BufReader::new(self.file.try_clone().map_err(fail)?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            let length = reader.by_ref().read_until(b'\n', &mut line).map_err(fail)?;
            if !line.ends_with(b"\n") {
                break;
            }
            self.complete += length as u64;
            let entry = serde_json::from_slice(&line).map_err(|error| ControlError::File {
                path: path.clone(),
                problem: format!(
                    "line {number} is not an entry of the log book ({error}); repair or move the file"
                ),
            })?;
            self.remember(entry);
        }
        self.file.set_len(self.complete).map_err(|cause| ControlError::io(&self.path, "repair", cause))?;
        self.file.seek(SeekFrom::End(0)).map_err(|cause| ControlError::io(&self.path, "read", cause))?;
        Ok(())
    }

    /// Appends an entry; it is on disk on return.
    ///
    /// # Errors
    /// It cannot be written. The file keeps the entries before, and no part of this one.
    pub fn append(&mut self, entry: &Entry) -> Result<(), ControlError> {
        let fail = |cause| ControlError::io(&self.path, "write", cause);
        let mut line = serde_json::to_vec(entry).map_err(std::io::Error::from).map_err(fail)?;
        line.push(b'\n');
        // A full disk takes a part of the line. The next entry must not follow on it, also if it cannot be cut off now.
        let written = self.file.set_len(self.complete).and_then(|()| self.file.write_all(&line));
        if let Err(cause) = written.and_then(|()| self.file.sync_data()) {
            let _ = self.file.set_len(self.complete);
            return Err(fail(cause));
        }
        self.complete += line.len() as u64;
        self.remember(entry.clone());
        Ok(())
    }

    /// The last entries, in order.
    pub fn recent(&self, count: usize) -> Vec<Entry> {
        self.recent.iter().skip(self.recent.len().saturating_sub(count)).cloned().collect()
    }

    /// Number of entries.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// The highest run number.
    pub fn last_run(&self) -> RunNumber {
        self.last_run
    }

    /// The run that has begun and has not ended.
    pub fn open_run(&self) -> Option<RunNumber> {
        self.open_run
    }

    fn remember(&mut self, entry: Entry) {
        self.entries += 1;
        self.last_run = self.last_run.max(entry.run);
        match entry.kind {
            EntryKind::Begin { .. } => self.open_run = Some(entry.run),
            EntryKind::End { .. } => self.open_run = None,
            _ => {}
        }
        if self.recent.len() == KEPT {
            self.recent.pop_front();
        }
        self.recent.push_back(entry);
    }
}
