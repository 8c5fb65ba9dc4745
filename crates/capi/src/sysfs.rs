//! The two sysfs helpers that libibverbs exports; providers and management tools call them.

use std::{
    env,
    ffi::{CStr, CString, OsStr, c_char, c_int},
    fs, io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::Path,
    slice,
    sync::OnceLock,
};

use millstream_lockfree::CancelGuard;
use millstream_shm::fork;

use crate::errno::{self, Errno};

/// Mount point of sysfs: `SYSFS_PATH` without trailing slashes, else `/sys`. Programs that gained privileges
/// at their start ignore the environment. The string lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    static PATH: OnceLock<CString> = OnceLock::new();
    fork::get_or_init(&PATH, || {
        // SAFETY: getauxval only reads the auxiliary vector.
        let privileged = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
        let chosen = (!privileged).then(|| env::var_os("SYSFS_PATH")).flatten();
        let mut path = chosen.map_or_else(|| b"/sys".to_vec(), OsStringExt::into_vec);
        while path.last() == Some(&b'/') {
            path.pop();
        }
        // An environment variable holds no NUL.
        CString::new(path).unwrap_or_default()
    })
    .as_ptr()
}

/// Reads `dir`/`file` into `buf` as a C string without its last newline. Returns the length, or -1 with
/// errno when the file cannot be read or `size` bytes do not hold it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    if dir.is_null() || file.is_null() || buf.is_null() {
        return errno::index(Err(Errno::INVALID));
    }
    // SAFETY: the caller passes two C strings and `size` writable bytes; a `c_char` is a byte.
    let (dir, file, buf) = unsafe {
        (CStr::from_ptr(dir), CStr::from_ptr(file), slice::from_raw_parts_mut(buf.cast::<u8>(), size))
    };
    let path = Path::new(OsStr::from_bytes(dir.to_bytes())).join(OsStr::from_bytes(file.to_bytes()));
    errno::index(
        read_attribute(&path, buf)
            .map_err(Errno::from)
            .and_then(|length| c_int::try_from(length).map_err(|_| Errno::new(libc::EOVERFLOW))),
    )
}

fn read_attribute(path: &Path, buf: &mut [u8]) -> io::Result<usize> {
    let content = fs::read(path)?;
    let value = content.strip_suffix(b"\n").unwrap_or(&content);
    let room = buf.get_mut(..=value.len());
    let room = room.ok_or_else(|| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
    room[..value.len()].copy_from_slice(value);
    room[value.len()] = 0;
    Ok(value.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attribute_loses_one_newline_and_ends_in_nul() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("node_type");
        fs::write(&path, "1: CA\n").expect("file written");
        let mut buf = [0xff; 8];
        assert_eq!(read_attribute(&path, &mut buf).expect("it fits"), 5);
        assert_eq!(&buf[..6], b"1: CA\0");
        assert_eq!(read_attribute(&path, &mut buf[..6]).expect("the newline's place takes the NUL"), 5);
    }

    #[test]
    fn an_attribute_that_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("guid");
        fs::write(&path, "0123").expect("file written");
        for size in 0..=4 {
            let error = read_attribute(&path, &mut vec![0; size]).expect_err("too small");
            assert_eq!(error.raw_os_error(), Some(libc::EOVERFLOW), "{size} bytes");
        }
    }
}
