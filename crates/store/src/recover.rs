//! Completes the partial file of a dead writer. Batch files are cut (`batches`); this is about event files.
//!
//! Everything up to the writer's last flush is in the file, as its commit record says. The superblock still says that the file is being
//! written, and datasets may have rows of a block that was not finished. Recovery corrects both in place: it needs no
//! space, so it also works on a full disk. Before, it compares all events with their checksums (`read_back`).

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{Dataset, Group};
use millstream_fragment::file::{IoError, sync_name};

use crate::FileError;
use crate::batches;
use crate::commit_record::{self, PAGE, USER_BLOCK};
use crate::error::error_text;
use crate::partial::{EXTENSION, SUFFIX, is_named, lock, rename_to_free, set_aside, unlock};
use crate::read_back::check_rows;
use crate::superblock::{self, Superblock};

/// Name of the root's attribute in a recovered file.
pub(crate) const RECOVERED: &str = "recovered";

/// A partial file that was recovered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Its new name, `NAME.recovered.h5` or `NAME.recovered.batches`; `None` if it had no event and was removed.
    pub path: Option<PathBuf>,
    /// Its old name.
    pub partial: PathBuf,
    /// Its events.
    pub events: u64,
}

/// Completes the partial file of a dead writer, if there is one.
///
/// # Errors
/// [`FileError::Busy`] if the writer lives, [`FileError::NotSynced`] if the file cannot be synced. Any other error leaves the
/// partial file in place; [`FileError::UnreadableRow`] and [`FileError::RecordsBehindDamage`] also leave it unchanged, unless the
/// cut itself damaged it.
pub fn recover_partial(path: &Path) -> Result<Option<Recovered>, FileError> {
    let file = match File::options().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(None),
        Err(cause) => return Err(IoError::of(path, "open")(cause).into()),
    };
    lock(&file, path)?;
    let recovered = if is_named(&file, path) { recover(&file, path).map(Some) } else { Ok(None) };
    unlock(&file);
    recovered
}

/// Completes the partial files of dead writers (`*.h5.partial`, `*.batches.partial`) in a folder.
///
/// # Errors
/// The folder cannot be read. Files that cannot be recovered are in the result with their errors.
pub fn recover_partials(folder: &Path) -> Result<Vec<Result<Recovered, FileError>>, FileError> {
    let mut paths = partials(folder)?;
    paths.sort();
    let recovered = paths.iter().filter_map(|path| match recover_partial(path) {
        Ok(None) | Err(FileError::Busy(_)) => None,
        Ok(Some(recovered)) => Some(Ok(recovered)),
        Err(error) => Some(Err(error)),
    });
    Ok(recovered.collect())
}

/// The partial files in a folder.
///
/// # Errors
/// The folder cannot be read.
pub fn partials(folder: &Path) -> Result<Vec<PathBuf>, FileError> {
    let unreadable = IoError::of(folder, "list");
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let is_partial = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.ends_with(SUFFIX) || name.ends_with(batches::SUFFIX))
            && entry.file_type().map_err(unreadable)?.is_file();
        if is_partial {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

/// Only the holder of the lock renames or removes the file, so the name cannot change its file.
fn recover(file: &File, path: &Path) -> Result<Recovered, FileError> {
    let partial = path.to_owned();
    let (events, extension) = match path.to_string_lossy().ends_with(batches::SUFFIX) {
        true => (batches::recover(file, path)?, batches::EXTENSION),
        false => (recover_events(file, path)?, EXTENSION),
    };
    if events == 0 {
        fs::remove_file(path).map_err(IoError::of(path, "remove"))?;
        return Ok(Recovered { path: None, partial, events });
    }
    file.sync_all().map_err(|cause| set_aside(path, cause))?;
    // The caller found the file by its suffix, or made the name.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.strip_suffix(&*format!(".{extension}.partial")).unwrap_or(&name);
    let target =
        rename_to_free(path, |number| path.with_file_name(format!("{stem}.recovered{number}.{extension}")))?;
    sync_name(&target)?;
    Ok(Recovered { path: Some(target), partial, events })
}

/// Corrects an event file. Returns its events; a file without events, or whose events cannot be read back, is left as it is.
fn recover_events(file: &File, path: &Path) -> Result<u64, FileError> {
    let events = commit_record::read(file, path)?;
    if events > 0 {
        let failed = IoError::of(path, "correct the superblock of");
        let (at, superblock, end) = allocate(file).map_err(failed)?;
        check_rows(path, events)?;
        // Marks the file as closed.
        file.write_all_at(&superblock.closed(end), at).map_err(failed)?;
        if cut_unfinished_rows(path, events)? {
            check_rows(path, events)?;
        }
        // The sync of a record that was not durable yet would pass over it: the kernel reports a failed write-back once.
        commit_record::write(file, events).map_err(IoError::of(path, "write"))?;
    }
    Ok(events)
}

/// Lengthens the file to the space that its superblock has allocated; the HDF5 library opens no shorter one. Returns the place
/// of the superblock, the superblock and the end.
fn allocate(file: &File) -> io::Result<(u64, Superblock, u64)> {
    let (at, superblock) = find_superblock(file)?.ok_or(ErrorKind::InvalidData)?;
    let len = file.metadata()?.len();
    // Space that was allocated, but not written, needs no blocks on the disk.
    let end = len.max(superblock.end()).checked_next_multiple_of(PAGE).ok_or(ErrorKind::InvalidData)?;
    if len < end {
        file.set_len(end)?;
    }
    Ok((at, superblock, end))
}

/// The superblock, and its place: behind the user block, whose length is a power of two (files of earlier versions: 512).
fn find_superblock(file: &File) -> io::Result<Option<(u64, Superblock)>> {
    let mut at = 512;
    while at <= USER_BLOCK {
        let mut bytes = [0; superblock::LEN];
        file.read_exact_at(&mut bytes, at)?;
        if let Some(superblock) = Superblock::parse(bytes) {
            return Ok(Some((at, superblock)));
        }
        at *= 2;
    }
    Ok(None)
}

/// Shortens all datasets to the events that are complete. Returns whether one was longer.
fn cut_unfinished_rows(path: &Path, events: u64) -> Result<bool, FileError> {
    let fail = |object: &str| {
        let object = object.to_owned();
        move |cause: hdf5_metno::Error| FileError::Hdf5 {
            path: path.to_owned(),
            operation: "recover",
            object,
            cause: error_text(&cause),
        }
    };
    let file = hdf5_metno::File::with_options()
        .with_fapl(|access| access.file_locking(false).libver_v110())
        .open_rw(path)
        .map_err(fail("file"))?;
    let mut columns = Vec::new();
    event_columns(&file, &mut columns).map_err(fail("datasets"))?;
    let mut was_longer = false;
    for column in &columns {
        let mut shape = column.shape();
        was_longer |= shape[0] as u64 > events;
        if (shape[0] as u64) < events {
            return Err(FileError::WrongFormat {
                path: path.to_owned(),
                field: column.name(),
                found: format!("{} rows", shape[0]),
                expected: format!("{events} rows, as recorded"),
            });
        }
        shape[0] = events as usize;
        column.resize(shape).map_err(fail(&column.name()))?;
    }
    // Exists if an earlier recovery was interrupted.
    if file.attr(RECOVERED).is_err() {
        let mark = file.new_attr::<u64>().create(RECOVERED);
        mark.and_then(|mark| mark.write_scalar(&events)).map_err(fail("attribute recovered"))?;
    }
    drop(columns);
    file.close().map_err(fail("file"))?;
    Ok(was_longer)
}

/// Collects the datasets with one row per event.
pub(crate) fn event_columns(group: &Group, columns: &mut Vec<Dataset>) -> hdf5_metno::Result<()> {
    for dataset in group.datasets()? {
        let dimensions = dataset.attr("dimensions")?.read_raw::<VarLenUnicode>()?;
        if dimensions.first().is_some_and(|name| name.as_str() == "event") && dataset.ndim() > 0 {
            columns.push(dataset);
        }
    }
    group.groups()?.iter().try_for_each(|group| event_columns(group, columns))
}
