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

use crate::data;

static ROOT: OnceLock<Option<CString>> = OnceLock::new();

/// The directory, created on first use; `None` if that fails.
pub(crate) fn root() -> Option<&'static CString> {
    ROOT.get_or_init(|| {
        let before = crate::errno();
        let made = make().and_then(|path| CString::new(path.into_os_string().into_vec()).ok());
        crate::set_errno(before);
        made
    })
    .as_ref()
}

/// The directory, if it is in use.
pub(crate) fn root_if_used() -> Option<&'static CString> {
    ROOT.get()?.as_ref()
}

fn make() -> Option<PathBuf> {
    let files = data::files();
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let name = format!("view-{:016x}", hasher.finish());
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let places = runtime.into_iter().chain(["/dev/shm", "/tmp"].map(PathBuf::from));
    places.filter_map(|place| own_folder(&place)).find_map(|folder| {
        let root = folder.join(&name);
        if !root.is_dir() {
            fill(&folder, &root, &files).ok()?;
        }
        Some(root)
    })
}

/// A directory in `parent` that only this user can change, whoever created something of its name first.
fn own_folder(place: &Path) -> Option<PathBuf> {
    let folder = place.join(format!("millstream-{}", own_uid()));
    // It may exist.
    let _ = fs::DirBuilder::new().mode(0o700).create(&folder);
    let found = fs::symlink_metadata(&folder).ok()?;
    (found.is_dir() && found.uid() == own_uid() && found.mode() & 0o077 == 0).then_some(folder)
}

/// Writes `files` to a temporary directory, then renames it.
fn fill(folder: &Path, root: &Path, files: &[(String, String)]) -> io::Result<()> {
    let aside = folder.join(format!("new-{:016x}", random_u64()));
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
    fn a_folder_of_somebody_else_is_not_used() {
        let place = tempfile::tempdir().unwrap();
        let folder = own_folder(place.path()).expect("made");
        assert_eq!(own_folder(place.path()), Some(folder.clone()), "found again");
        fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o770)).unwrap();
        assert_eq!(own_folder(place.path()), None, "others could change it");
        fs::remove_dir(&folder).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &folder).unwrap();
        assert_eq!(own_folder(place.path()), None, "a link leads anywhere");
    }

    #[test]
    fn the_files_appear_at_once_and_once() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("view");
        let files = [("a/b".to_owned(), "content\n".to_owned()), ("c/".to_owned(), String::new())];
        fill(place.path(), &root, &files).unwrap();
        fill(place.path(), &root, &files).unwrap();
        assert_eq!(fs::read_to_string(root.join("a/b")).unwrap(), "content\n");
        assert!(root.join("c").is_dir());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1, "nothing is left aside");
    }
}
