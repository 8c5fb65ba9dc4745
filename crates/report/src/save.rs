//! Atomic replacement of text files.

use std::fs;
use std::io;
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

/// Writes a text file atomically: the path has the old or the new contents.
pub fn save(path: &Path, text: &str) -> Result<(), SaveError> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = Path::new(&partial);
    fs::write(partial, text).and_then(|()| fs::rename(partial, path)).map_err(|cause| {
        let _ = fs::remove_file(partial);
        SaveError { path: path.to_owned(), cause }
    })
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
