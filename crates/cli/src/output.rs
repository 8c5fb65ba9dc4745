//! Paths of results.

use std::io;
use std::path::Path;

use rustix::fs::{Access, access};

/// Whether a path of results is `-`, standard output.
pub(crate) fn is_standard_output(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Refuses a path where no file can be written, before a run that takes long.
pub(crate) fn check_writable(path: &Path) -> Result<(), String> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let writable = match path.is_dir() {
        true => Err(io::ErrorKind::IsADirectory.into()),
        false if folder.is_file() => Err(io::ErrorKind::NotADirectory.into()),
        false => access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(io::Error::from),
    };
    writable.map_err(|error| format!("{}: cannot write: {error}", path.display()))
}
