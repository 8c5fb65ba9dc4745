//! The life of a file on disk: a partial name while it is written, its own name once it is whole.
//!
//! A writer that was killed leaves its partial file. It is told from one that is still being written by
//! the lock: a writer holds an exclusive `flock` on its partial file, which ends with the process.
//! HDF5's own lock would not do. It is on a descriptor that child processes inherit, so it could outlive
//! the writer, and it stays on the finished file for as long.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use millstream_fragment::file::{IoError, sync_name};

use crate::FileError;

const EXTENSION: &str = "h5";
const SUFFIX: &str = ".h5.partial";

/// A file that has its partial name. Dropped, it is removed.
#[derive(Debug)]
pub(crate) struct Partial {
    path: PathBuf,
    final_path: PathBuf,
    /// The file that this writer created, whatever has its name now.
    file: File,
    replace: bool,
}

impl Partial {
    /// Creates the empty partial file, in place of one that a dead writer left.
    pub(crate) fn create(final_path: &Path, replace: bool) -> Result<Self, FileError> {
        if final_path.extension().is_none_or(|found| found != EXTENSION) {
            return Err(FileError::Name(final_path.to_owned()));
        }
        refuse_existing(final_path, replace)?;
        let mut path = final_path.as_os_str().to_owned();
        path.push(".partial");
        let path = PathBuf::from(path);
        remove_stale(&path)?;
        let file =
            File::options().write(true).create_new(true).open(&path).map_err(IoError::of(&path, "create"))?;
        let partial = Self { path, final_path: final_path.to_owned(), file, replace };
        lock(&partial.file, &partial.path)?;
        if !partial.is_ours() {
            // Another process took it for a dead writer's before it was locked.
            return Err(FileError::Busy(partial.path.clone()));
        }
        Ok(partial)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its own name, once it and the name are on the disk. The HDF5 library must have
    /// closed it.
    pub(crate) fn commit(self) -> Result<PathBuf, FileError> {
        self.file.sync_all().map_err(IoError::of(&self.path, "sync"))?;
        if !self.is_ours() {
            return Err(FileError::Lost(self.path.clone()));
        }
        refuse_existing(&self.final_path, self.replace)?;
        fs::rename(&self.path, &self.final_path).map_err(IoError::of(&self.path, "rename"))?;
        unlock(&self.file);
        sync_name(&self.final_path)?;
        Ok(self.final_path.clone())
    }

    /// Whether the partial name still belongs to the file that this writer created.
    fn is_ours(&self) -> bool {
        is_named(&self.file, &self.path)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After a commit the name is gone, or already a new writer's.
        if self.is_ours() {
            let _ = fs::remove_file(&self.path);
        }
        unlock(&self.file);
    }
}

/// Whether the path leads to this very file.
fn is_named(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), fs::symlink_metadata(path)) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

fn lock(file: &File, path: &Path) -> Result<(), FileError> {
    file.try_lock().map_err(|refused| match refused {
        TryLockError::WouldBlock => FileError::Busy(path.to_owned()),
        TryLockError::Error(cause) => IoError::of(path, "lock")(cause).into(),
    })
}

/// Ends the lock, also for copies of the descriptor in processes that are just being started.
fn unlock(file: &File) {
    let _ = file.unlock();
}

fn refuse_existing(path: &Path, replace: bool) -> Result<(), FileError> {
    if !replace && fs::symlink_metadata(path).is_ok() {
        return Err(FileError::Exists(path.to_owned()));
    }
    Ok(())
}

/// Removes the partial file, if there is one and nobody writes it.
fn remove_stale(path: &Path) -> Result<(), FileError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(cause) => return Err(IoError::of(path, "open")(cause).into()),
    };
    lock(&file, path)?;
    // Only who has the lock removes a file, so the name cannot change hands from here on.
    let removed = if is_named(&file, path) { fs::remove_file(path) } else { Ok(()) };
    unlock(&file);
    Ok(removed.map_err(IoError::of(path, "remove"))?)
}

/// Removes what killed writers left in the folder: files that end in `.h5.partial` and that nobody
/// writes any more. Returns their names.
pub fn clean_partials(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let unreadable = IoError::of(folder, "list");
    let mut removed = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let is_partial = entry.file_name().to_str().is_some_and(|name| name.ends_with(SUFFIX))
            && entry.file_type().map_err(unreadable)?.is_file();
        if !is_partial {
            continue;
        }
        match remove_stale(&entry.path()) {
            Ok(()) => removed.push(entry.path()),
            Err(FileError::Busy(_)) => {}
            Err(error) => return Err(error),
        }
    }
    removed.sort();
    Ok(removed)
}
