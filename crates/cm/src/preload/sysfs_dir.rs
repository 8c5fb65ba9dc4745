//! The device's sysfs files as real files in a directory of the user.
//!
//! The directory is in `XDG_RUNTIME_DIR`, else `/dev/shm`, else `/tmp`. It belongs to the user alone and is
//! named after its content. So processes share it, the first one creates it, and a host whose addresses
//! change gets another one.

use std::ffi::CString;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use millstream_shm::random_u64;
use millstream_shm::socket::own_uid;

use super::sysfs_files;
use crate::engine::without_cancellation;

static ROOT: OnceLock<Option<CString>> = OnceLock::new();

/// The directory, created on first use; `None` if that fails.
pub(crate) fn root() -> Option<&'static CString> {
    // Most calls find it made.
    ROOT.get().unwrap_or_else(|| without_cancellation(|| ROOT.get_or_init(make_root))).as_ref()
}

fn make_root() -> Option<CString> {
    let before = super::errno();
    let made = make().and_then(|path| CString::new(path.into_os_string().into_vec()).ok());
    super::set_errno(before);
    made
}

/// The directory, if it is in use.
pub(crate) fn root_if_used() -> Option<&'static CString> {
    ROOT.get()?.as_ref()
}

fn make() -> Option<PathBuf> {
    let files = sysfs_files::files();
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let name = format!("view-{:016x}", hasher.finish());
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let places = runtime.into_iter().chain(["/dev/shm", "/tmp"].map(PathBuf::from));
    places.filter_map(|parent| private_dir(&parent)).find_map(|dir| {
        let root = dir.join(&name);
        if !root.is_dir() {
            publish(&dir, &root, &files).ok()?;
        }
        Some(root)
    })
}

/// A directory in `parent` that only this user can change, even if another user has created its name first.
fn private_dir(parent: &Path) -> Option<PathBuf> {
    let dir = parent.join(format!("millstream-{}", own_uid()));
    // The directory may exist.
    let _ = fs::DirBuilder::new().mode(0o700).create(&dir);
    let found = fs::symlink_metadata(&dir).ok()?;
    (found.is_dir() && found.uid() == own_uid() && found.mode() & 0o077 == 0).then_some(dir)
}

/// Writes `files` to a temporary directory, then renames it.
fn publish(dir: &Path, root: &Path, files: &[(String, String)]) -> io::Result<()> {
    let aside = dir.join(format!("new-{:016x}", random_u64()));
    let written = files.iter().try_for_each(|(path, content)| {
        let file = aside.join(path);
        if path.ends_with('/') {
            return fs::create_dir_all(&file);
        }
        file.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(file, content)
    });
    let named = written.and_then(|()| fs::rename(&aside, root));
    if named.is_err() {
        // Another process was faster, or there is no space.
        let _ = fs::remove_dir_all(&aside);
    }
    if root.is_dir() { Ok(()) } else { named }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_other_users_are_not_used() {
        let parent = tempfile::tempdir().unwrap();
        let dir = private_dir(parent.path()).expect("made");
        assert_eq!(private_dir(parent.path()), Some(dir.clone()), "found again");
        fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o770)).unwrap();
        assert_eq!(private_dir(parent.path()), None, "others could change it");
        fs::remove_dir(&dir).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &dir).unwrap();
        assert_eq!(private_dir(parent.path()), None, "a link leads anywhere");
    }

    #[test]
    fn directory_appears_atomically() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("view");
        let files = [("a/b".to_owned(), "content\n".to_owned()), ("c/".to_owned(), String::new())];
        publish(parent.path(), &root, &files).unwrap();
        publish(parent.path(), &root, &files).unwrap();
        assert_eq!(fs::read_to_string(root.join("a/b")).unwrap(), "content\n");
        assert!(root.join("c").is_dir());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1, "nothing is left aside");
    }
}
