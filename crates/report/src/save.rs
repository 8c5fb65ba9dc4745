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

/// Writes a file as [`Replacement`] does.
///
/// # Errors
/// [`SaveError`]. The path has the old contents, or the new ones if the directory could not be synced.
pub fn replace(path: &Path, contents: &[u8]) -> Result<(), SaveError> {
    let failed = |cause| SaveError { path: path.to_owned(), cause };
    let mut replacement = Replacement::create(path)?;
    replacement.write_all(contents).map_err(failed)?;
    replacement.commit()
}

/// New contents of a file, which appear at once: the path has the old or the new ones, also after a crash of the host. Dropped
/// without [`Replacement::commit`], it leaves the old ones.
///
/// A symbolic link stays, and the file that it names is replaced. What is no regular file, for example a FIFO, `/dev/null` or
/// `/dev/stdout`, is written to and stays.
#[derive(Debug)]
pub struct Replacement {
    path: PathBuf,
    file: fs::File,
    /// The new contents, and the file that they replace. None if they are written in place.
    rename: Option<(PathBuf, PathBuf)>,
}

impl Replacement {
    /// Begins to write.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn create(path: &Path) -> Result<Replacement, SaveError> {
        let open = || match target(path)? {
            Some(target) => {
                let mut partial = target.as_os_str().to_owned();
                partial.push(".partial");
                let partial = PathBuf::from(partial);
                Ok((fs::File::create(&partial)?, Some((partial, target))))
            }
            // The program may have printed to it before.
            None => Ok((fs::File::options().append(true).create(true).open(path)?, None)),
        };
        let (file, rename) = open().map_err(|cause| SaveError { path: path.to_owned(), cause })?;
        Ok(Replacement { path: path.to_owned(), file, rename })
    }

    /// Makes what was written the contents of the file.
    ///
    /// # Errors
    /// [`SaveError`]. The path has the old contents, or the new ones if the directory could not be synced.
    pub fn commit(mut self) -> Result<(), SaveError> {
        let Some((partial, target)) = self.rename.take() else { return Ok(()) };
        let renamed = self.file.sync_all().and_then(|()| fs::rename(&partial, &target));
        renamed
            .inspect_err(|_| drop(fs::remove_file(&partial)))
            .and_then(|()| sync_name(&target))
            .map_err(|cause| SaveError { path: self.path.clone(), cause })
    }
}

impl io::Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if let Some((partial, _)) = &self.rename {
            let _ = fs::remove_file(partial);
        }
    }
}

/// The file to replace; `None` if it is written in place.
fn target(path: &Path) -> io::Result<Option<PathBuf>> {
    // They name an open file of this process, whatever its path.
    if ["/dev/fd", "/dev/stdout", "/dev/stderr", "/proc"].iter().any(|open| path.starts_with(open)) {
        return Ok(None);
    }
    match fs::metadata(path) {
        Ok(existing) if existing.is_file() => fs::canonicalize(path).map(Some),
        Ok(_) => Ok(None),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        // A link that names no file gets one.
        Err(_) if fs::symlink_metadata(path).is_ok() => Ok(None),
        Err(_) => Ok(Some(path.to_owned())),
    }
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

    #[test]
    fn links_and_files_that_are_not_regular_stay() {
        use std::os::unix::fs::{FileTypeExt as _, symlink};

        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        symlink("report.json", at("latest.json")).unwrap();
        for text in ["of a link without a file", "of a link with a file"] {
            save(&at("latest.json"), text).unwrap();
            assert_eq!(fs::read_to_string(at("report.json")).unwrap(), text);
            assert!(fs::symlink_metadata(at("latest.json")).unwrap().is_symlink());
        }
        symlink("/dev/null", at("null")).unwrap();
        save(&at("null"), "text").unwrap();
        assert!(fs::metadata(at("null")).unwrap().file_type().is_char_device());
        let error = save(folder.path(), "text").unwrap_err().to_string();
        assert!(error.ends_with("Is a directory (os error 21)"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_replacement_without_a_commit_leaves_the_old_contents() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.bin");
        save(&path, "old").unwrap();
        let mut begun = Replacement::create(&path).unwrap();
        begun.write_all(b"new").unwrap();
        drop(begun);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
