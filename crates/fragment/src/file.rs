//! Files with atomic creation, and I/O errors with paths.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// An I/O error with its file and operation.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot {operation}: {cause}", path.display())]
pub struct IoError {
    /// The file or directory.
    pub path: PathBuf,
    /// The operation.
    pub operation: &'static str,
    /// The cause.
    pub cause: io::Error,
}

impl IoError {
    /// Adds the path and the operation to an I/O error.
    pub fn of<'a>(path: &'a Path, operation: &'static str) -> impl Fn(io::Error) -> IoError + Copy + use<'a> {
        move |cause| IoError { path: path.to_owned(), operation, cause }
    }
}

/// Creates a temporary file, `….partial` in the same directory, that [`commit`] renames to `path`. If dropped
/// before, it is removed.
pub(crate) fn create(path: &Path) -> Result<NamedTempFile, IoError> {
    tempfile::Builder::new()
        .prefix(path.file_name().unwrap_or_default())
        .suffix(".partial")
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(folder(path))
        .map_err(IoError::of(path, "create"))
}

/// Syncs the file and renames it to `path`, replacing an existing file.
pub(crate) fn commit(file: NamedTempFile, path: &Path) -> Result<(), IoError> {
    file.as_file().sync_all().map_err(IoError::of(path, "sync"))?;
    file.persist(path).map_err(|error| error.error).map_err(IoError::of(path, "rename"))?;
    sync_name(path)
}

/// Syncs the directory of a file, which makes its name durable.
///
/// # Errors
/// Opening or syncing the directory failed.
pub fn sync_name(path: &Path) -> Result<(), IoError> {
    let folder = folder(path);
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(IoError::of(folder, "sync"))
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_appears_complete_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("name");
        fs::write(&path, "old").unwrap();
        let names = || fs::read_dir(folder.path()).unwrap().count();
        let mut dropped = create(&path).unwrap();
        dropped.write_all(b"new").unwrap();
        assert_eq!(names(), 2);
        drop(dropped);
        assert_eq!((names(), fs::read_to_string(&path).unwrap()), (1, "old".to_owned()));

        let mut file = create(&path).unwrap();
        file.write_all(b"new").unwrap();
        commit(file, &path).unwrap();
        assert_eq!((names(), fs::read_to_string(&path).unwrap()), (1, "new".to_owned()));
    }

    #[test]
    fn an_error_names_the_file_and_the_operation() {
        let error = create(Path::new("/nowhere/name")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/name: cannot create: "), "{error}");
        let error = sync_name(Path::new("/nowhere/name")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere: cannot sync: "), "{error}");
        assert_eq!(folder(Path::new("name")), Path::new("."));
    }
}
