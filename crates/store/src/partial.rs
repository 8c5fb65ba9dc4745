//! Atomic creation of event files: a partial name during writing, the final name once complete.
//!
//! A killed writer leaves its partial file. The lock distinguishes it from a file that is being written: a
//! writer holds an exclusive `flock` on its partial file, which ends with the process. HDF5's own lock is
//! unsuitable. Child processes inherit its descriptor, so it can outlive the writer, and it stays on the
//! finished file.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use millstream_fragment::file::{IoError, sync_name};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::FileError;
use crate::commit_record;
use crate::recover::recover_partial;

pub(crate) const EXTENSION: &str = "h5";
pub(crate) const SUFFIX: &str = ".h5.partial";

/// How often a new file is created that another process takes for one of a dead writer and removes.
const ATTEMPTS: u32 = 1000;

/// A partial file, removed when dropped unless it is kept.
#[derive(Debug)]
pub(crate) struct PartialFile {
    path: PathBuf,
    final_path: PathBuf,
    /// The file created by this writer.
    file: File,
    replace: bool,
    /// Whether it has events.
    keep: bool,
    is_name_synced: bool,
}

impl PartialFile {
    /// Creates the empty partial file. That of a dead writer is recovered first.
    pub(crate) fn create(final_path: &Path, replace: bool) -> Result<Self, FileError> {
        Self::create_as(final_path, EXTENSION, replace, 0)
    }

    /// Creates the empty partial file of a name with this extension, opened with these flags of open(2) as well.
    pub(crate) fn create_as(
        final_path: &Path,
        extension: &'static str,
        replace: bool,
        flags: i32,
    ) -> Result<Self, FileError> {
        if final_path.extension().is_none_or(|found| found != extension) {
            return Err(FileError::WrongExtension { path: final_path.to_owned(), expected: extension });
        }
        refuse_existing(final_path, replace)?;
        let mut path = final_path.as_os_str().to_owned();
        path.push(".partial");
        let path = PathBuf::from(path);
        recover_partial(&path)?;
        for _ in 0..ATTEMPTS {
            let file = File::options().write(true).create_new(true).custom_flags(flags).open(&path);
            let file = file.map_err(|cause| match cause.kind() {
                // The only flag is O_DIRECT. The kernel creates the file before it refuses it.
                ErrorKind::InvalidInput if flags != 0 => {
                    let _ = fs::remove_file(&path);
                    FileError::NoDirectIo(path.clone())
                }
                ErrorKind::AlreadyExists => FileError::Busy(path.clone()),
                _ => IoError::of(&path, "create")(cause).into(),
            })?;
            // A process that recovers the files of dead writers may have the lock, and removes the file, which is empty.
            file.lock().map_err(IoError::of(&path, "lock"))?;
            let final_path = final_path.to_owned();
            if is_named(&file, &path) {
                return Ok(Self { path, final_path, file, replace, keep: false, is_name_synced: false });
            }
        }
        Err(FileError::Busy(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Records that this many events are complete in the file. It is kept when this is dropped if there are any.
    pub(crate) fn record_events(&mut self, events: u64) -> Result<(), FileError> {
        commit_record::write(&self.file, events).map_err(IoError::of(&self.path, "write"))?;
        self.keep(events > 0);
        Ok(())
    }

    /// Whether the file is kept when this is dropped.
    pub(crate) fn keep(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// The open file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Makes the file's contents durable, and its name.
    pub(crate) fn sync(&mut self) -> Result<(), FileError> {
        self.file.sync_data().map_err(IoError::of(&self.path, "sync"))?;
        if !self.is_name_synced {
            sync_name(&self.path)?;
            self.is_name_synced = true;
        }
        Ok(())
    }

    /// Length of the file.
    pub(crate) fn len(&self) -> Result<u64, FileError> {
        Ok(self.file.metadata().map_err(IoError::of(&self.path, "read the length of"))?.len())
    }

    /// Syncs the file and renames it to its final name. The HDF5 library must have closed it.
    ///
    /// # Errors
    /// [`FileError::NotSynced`] if the file cannot be synced. Any other error leaves the partial file in place.
    pub(crate) fn commit(self) -> Result<PathBuf, FileError> {
        self.commit_then_record(None)
    }

    /// As [`commit`](Self::commit); then records that this many events are complete, if there is a number.
    pub(crate) fn commit_then_record(mut self, events: Option<u64>) -> Result<PathBuf, FileError> {
        let synced = self.file.sync_all();
        if !self.is_ours() {
            return Err(FileError::PartialReplaced(self.path.clone()));
        }
        synced.map_err(|cause| {
            self.keep = true;
            set_aside(&self.path, cause)
        })?;
        refuse_existing(&self.final_path, self.replace)?;
        fs::rename(&self.path, &self.final_path).map_err(IoError::of(&self.path, "rename"))?;
        self.keep = true;
        if let Some(events) = events {
            let recorded = commit_record::write(&self.file, events).and_then(|()| self.file.sync_data());
            recorded.map_err(IoError::of(&self.final_path, "write"))?;
        }
        unlock(&self.file);
        sync_name(&self.final_path)?;
        Ok(self.final_path.clone())
    }

    /// Whether the partial name still refers to the file created by this writer.
    fn is_ours(&self) -> bool {
        is_named(&self.file, &self.path)
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // After a commit the name does not exist, or belongs to a new writer.
        if !self.keep && self.is_ours() {
            let _ = fs::remove_file(&self.path);
        }
        unlock(&self.file);
    }
}

/// Renames a partial file that cannot be synced, for the kernel reports a failed write-back only once: the next sync of the same
/// pages succeeds though they are lost. So nobody completes the file, or takes its events for stored.
pub(crate) fn set_aside(partial: &Path, cause: io::Error) -> FileError {
    let complete = partial.with_extension("");
    let renamed = rename_to_free(partial, |number| {
        let mut path = complete.clone().into_os_string();
        path.push(format!(".not-synced{number}"));
        path.into()
    });
    match renamed {
        Ok(aside) => FileError::NotSynced { path: complete, aside, cause },
        // On a file system that failed, this can fail too.
        Err(error) => error,
    }
}

/// Renames a partial file to the first name that does not exist: with no suffix, then with `-2`, `-3`, …. Returns the name.
pub(crate) fn rename_to_free(partial: &Path, name: impl Fn(&str) -> PathBuf) -> Result<PathBuf, FileError> {
    for number in 1..=u32::MAX {
        let path = name(&if number == 1 { String::new() } else { format!("-{number}") });
        match rename_without_replacing(partial, &path) {
            Ok(()) => return Ok(path),
            Err(cause) if cause.kind() == ErrorKind::AlreadyExists => {}
            Err(cause) => return Err(IoError::of(partial, "rename")(cause).into()),
        }
    }
    Err(IoError::of(partial, "find a name for")(ErrorKind::AlreadyExists.into()).into())
}

/// Renames a file, or fails with [`ErrorKind::AlreadyExists`].
fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // The file system, as NFS, cannot: an empty file keeps the name. Left alone, it counts as absent.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            File::options().write(true).create_new(true).open(to)?;
            fs::rename(from, to)
        }
        renamed => Ok(renamed?),
    }
}

/// Whether the path refers to this file.
pub(crate) fn is_named(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), fs::symlink_metadata(path)) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

pub(crate) fn lock(file: &File, path: &Path) -> Result<(), FileError> {
    file.try_lock().map_err(|refused| match refused {
        TryLockError::WouldBlock => FileError::Busy(path.to_owned()),
        TryLockError::Error(cause) => IoError::of(path, "lock")(cause).into(),
    })
}

/// Releases the lock explicitly: descriptors inherited by child processes would hold it.
pub(crate) fn unlock(file: &File) {
    let _ = file.unlock();
}

/// An empty file counts as absent: an interrupted recovery can leave one.
fn refuse_existing(path: &Path, replace: bool) -> Result<(), FileError> {
    let exists = fs::symlink_metadata(path).is_ok_and(|found| !found.is_file() || found.len() > 0);
    if exists && !replace { Err(FileError::Exists(path.to_owned())) } else { Ok(()) }
}
