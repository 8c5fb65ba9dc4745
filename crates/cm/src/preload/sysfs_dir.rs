//! The device's sysfs files as real files in a directory of the user.
//!
//! The directory is in `XDG_RUNTIME_DIR`, else `/dev/shm`, else `/tmp`. It belongs to the user alone, is read-only, and is
//! named after its content. So processes share it, the first one creates it, and a host whose addresses
//! change gets another one.

use std::ffi::CString;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use millstream_shm::random_u64;
use millstream_shm::socket::own_uid;

use super::{path, sysfs_files};
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

/// Part of the name: rises when the same files are made in another way.
const FORMAT: u32 = 2;

fn make() -> Option<PathBuf> {
    let files = sysfs_files::files();
    let mut hasher = DefaultHasher::new();
    (FORMAT, &files).hash(&mut hasher);
    let name = format!("view-{:016x}", hasher.finish());
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let places = runtime.into_iter().chain(["/dev/shm", "/tmp"].map(PathBuf::from));
    let found = places.filter_map(|place| usable(&place)).find_map(|parent| {
        let dir = private_dir(&parent)?;
        let root = dir.join(&name);
        if !root.is_dir() {
            publish(&dir, &root, &files).ok()?;
        }
        Some(root)
    });
    if found.is_none() {
        millstream_log::init();
        tracing::warn!(
            "no device in /sys/class/infiniband: its files can be written neither in XDG_RUNTIME_DIR, nor in \
             /dev/shm or /tmp"
        );
    }
    found
}

/// A place for the directory, without symbolic links, so that results of `realpath` begin with it, and without characters that
/// `glob` interprets.
fn usable(place: &Path) -> Option<PathBuf> {
    let bytes = place.as_os_str().as_bytes();
    // An intercepted path needs the directory.
    if !place.is_absolute() || path::is_candidate(bytes) {
        return None;
    }
    let place = fs::canonicalize(place).ok()?;
    let is_plain = !place.as_os_str().as_bytes().iter().any(|byte| b"*?[{\\".contains(byte));
    is_plain.then_some(place)
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
    // Processes share the files, so nobody may change them.
    let protected = written.and_then(|()| set_modes(&aside, 0o555, 0o444));
    let named = protected.and_then(|()| fs::rename(&aside, root));
    if named.is_err() {
        // Another process was faster, or there is no space.
        let _ = set_modes(&aside, 0o700, 0o600);
        let _ = fs::remove_dir_all(&aside);
    }
    if root.is_dir() { Ok(()) } else { named }
}

/// Sets the modes of a directory, its directories and its files.
fn set_modes(dir: &Path, dir_mode: u32, file_mode: u32) -> io::Result<()> {
    let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    // Entries can only be changed before the directory is protected, and after it no longer is.
    set(dir, 0o700)?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            set_modes(&entry.path(), dir_mode, file_mode)?;
        } else {
            set(&entry.path(), file_mode)?;
        }
    }
    set(dir, dir_mode)
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
    fn places_have_no_links_and_no_patterns() {
        let place = tempfile::tempdir().unwrap();
        let parent = fs::canonicalize(place.path()).unwrap();
        let link = parent.join("link");
        fs::create_dir(parent.join("run")).unwrap();
        std::os::unix::fs::symlink("run", &link).unwrap();
        assert_eq!(usable(&link), Some(parent.join("run")));
        fs::create_dir(parent.join("run[x]")).unwrap();
        assert_eq!(usable(&parent.join("run[x]")), None);
        assert_eq!(usable(Path::new("tmp")), None);
        assert_eq!(usable(Path::new("/dev/infiniband")), None);
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
        let mode = |path| fs::metadata(root.join(path)).unwrap().mode() & 0o777;
        assert_eq!([mode(""), mode("a"), mode("a/b"), mode("c")], [0o555, 0o555, 0o444, 0o555]);
        set_modes(&root, 0o700, 0o600).unwrap();
    }
}
