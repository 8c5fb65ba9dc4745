//! The directory of run control: run number, log book, configurations and reports.
//!
//! ```text
//! DIRECTORY/
//!   lock                         held by the run control process
//!   run-number                   number of the last run
//!   logbook.jsonl                begin and end of each run, comments
//!   configurations/SHA256.toml   every configuration that a run had
//!   reports/run-000012.json      report of the run
//! ```

use crate::error::ControlError;
use crate::logbook::{Entry, EntryKind, Logbook};
use millstream_report::RunReport;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::configuration::Configuration;

/// The number of a run.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct RunNumber(pub u64);

impl std::fmt::Display for RunNumber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:06}", self.0)
    }
}

/// The directory, locked by this process.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    last: RunNumber,
    logbook: Logbook,
    _lock: File,
}

impl Directory {
    /// Opens or makes the directory. Ends the record of a run during which the last run control process ended.
    ///
    /// # Errors
    /// Another run control process uses it, or a file cannot be used.
    pub fn open(path: &Path) -> Result<Directory, ControlError> {
        for folder in [path.to_owned(), path.join("configurations"), path.join("reports")] {
            std::fs::create_dir_all(&folder).map_err(|cause| ControlError::io(&folder, "create", cause))?;
        }
        let lock_path = path.join("lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&lock_path);
        let lock = lock.map_err(|cause| ControlError::io(&lock_path, "open", cause))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| ControlError::File {
            path: path.to_owned(),
            problem: "another run control process uses this directory; stop it or give --directory".into(),
        })?;
        let mut logbook = Logbook::open(&path.join("logbook.jsonl"))?;
        let last = read_number(&path.join("run-number"))?.max(logbook.last_run());
        if let Some(run) = logbook.open_run() {
            let problems = vec!["the run control process ended during the run".to_owned()];
            logbook.append(&Entry::now(run, EntryKind::lost(problems)))?;
        }
        Ok(Directory { path: path.to_owned(), last, logbook, _lock: lock })
    }

    /// The number of the last run.
    pub fn last_run(&self) -> RunNumber {
        self.last
    }

    /// Number of entries of the log book.
    pub fn log_entries(&self) -> u64 {
        self.logbook.entries()
    }

    /// Takes the number of a new run, and makes its folder in `output` if the run stores events. Both are on disk before the
    /// run starts. A number whose folder exists is skipped: the folder holds events of another directory's run, or of a
    /// directory that was lost.
    ///
    /// # Errors
    /// The number cannot be written, or the folder cannot be made.
    pub fn next_run(&mut self, output: Option<&Path>) -> Result<RunNumber, ControlError> {
        let mut next = RunNumber(self.last.0 + 1);
        if let Some(output) = output {
            std::fs::create_dir_all(output).map_err(|cause| ControlError::io(output, "create", cause))?;
            while !make_folder(&output.join(run_folder(next)))? {
                next.0 += 1;
            }
        }
        let written = write_file(&self.path.join("run-number"), format!("{}\n", next.0).as_bytes());
        if let (Err(_), Some(output)) = (&written, output) {
            let _ = std::fs::remove_dir(output.join(run_folder(next)));
        }
        written?;
        self.last = next;
        Ok(next)
    }

    /// The log book.
    pub fn logbook(&mut self) -> &mut Logbook {
        &mut self.logbook
    }

    /// Keeps a configuration under its hash.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep(&self, configuration: &Configuration) -> Result<(), ControlError> {
        let path = self.path.join("configurations").join(format!("{}.toml", configuration.sha256));
        if path.exists() {
            return Ok(());
        }
        write_file(&path, configuration.text.as_bytes())
    }

    /// Writes the report of a run. Returns its path in the directory.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write_report(&self, run: RunNumber, report: &RunReport) -> Result<PathBuf, ControlError> {
        let relative = Path::new("reports").join(format!("run-{run}.json"));
        write_file(&self.path.join(&relative), report.to_json().as_bytes())?;
        Ok(relative)
    }
}

/// The folder of a run in the output directory.
pub(crate) fn run_folder(run: RunNumber) -> String {
    format!("run-{run}")
}

/// The folders of runs in an output directory, by number.
///
/// # Errors
/// The directory cannot be read.
pub fn run_folders(output: &Path) -> Result<Vec<PathBuf>, ControlError> {
    let unreadable = |cause| ControlError::io(output, "list", cause);
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(output).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("run-"));
        let is_run = number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()));
        if is_run && entry.file_type().is_ok_and(|found| found.is_dir()) {
            folders.push(entry.path());
        }
    }
    folders.sort();
    Ok(folders)
}

/// Makes a folder; false if there is something with its name. Of two run control processes, one makes it.
fn make_folder(path: &Path) -> Result<bool, ControlError> {
    match std::fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(cause) if cause.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(cause) => Err(ControlError::io(path, "create", cause)),
    }
}

fn read_number(path: &Path) -> Result<RunNumber, ControlError> {
    match std::fs::read_to_string(path) {
        Ok(text) => text.trim().parse().map(RunNumber).map_err(|_| ControlError::File {
            path: path.to_owned(),
            problem: format!("{:?} is not a run number; write the number of the last run", text.trim()),
        }),
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(RunNumber::default()),
        Err(cause) => Err(ControlError::io(path, "read", cause)),
    }
}

/// Replaces a file as a whole, also if the host fails meanwhile.
fn write_file(path: &Path, bytes: &[u8]) -> Result<(), ControlError> {
    let partial = path.with_extension("partial");
    let written = File::create(&partial)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&partial, path));
    written.map_err(|cause| {
        let _ = std::fs::remove_file(&partial);
        ControlError::io(path, "write", cause)
    })
}
