//! Atomic replacement of files.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// A file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot write: {cause}", path.display())]
pub struct SaveError {
    /// The file.
    pub path: PathBuf,
    /// Error of the operating system.
    pub cause: io::Error,
}

/// Writes a text file as [`replace`] does.
///
/// # Errors
/// [`SaveError`].
pub fn save(path: &Path, text: &str) -> Result<(), SaveError> {
    replace(path, text.as_bytes())
}

/// Writes a file atomically: the path has the old or the new contents, also after a crash of the host.
///
/// # Errors
/// [`SaveError`]. The path has the old contents, or the new ones if the directory could not be synced.
pub fn replace(path: &Path, contents: &[u8]) -> Result<(), SaveError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    let write = || {
        let mut file = fs::File::create(partial)?;
        file.write_all(contents)?;
        file.sync_all()?;
        fs::rename(partial, path)
    };
    write()
        .inspect_err(|_| drop(fs::remove_file(partial)))
        .and_then(|()| sync_name(path))
        .map_err(|cause| SaveError { path: path.to_owned(), cause })
}

/// Makes a file's name durable.
fn sync_name(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_replaced_atomically() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        save(&path, "old").unwrap();
        save(&path, "new").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        let path = folder.path().join("none/report.json");
        let error = save(&path, "text").unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{}: cannot write: No such file or directory (os error 2)", path.display())
        );
    }
}
