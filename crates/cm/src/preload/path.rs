//! The paths that are intercepted.

use std::ffi::{CStr, CString, c_char, c_int};

use super::sysfs_dir;

/// An intercepted path.
pub(crate) struct InterceptedPath {
    /// The path of the file that replaces it.
    pub(crate) path: CString,
    pub(crate) device: Option<Device>,
}

/// A character device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// `/dev/infiniband/uverbs0`
    Verbs,
    /// `/dev/infiniband/rdma_cm`
    RdmaCm,
}

impl Device {
    /// Major and minor number, as in sysfs `dev`.
    pub(crate) fn numbers(self) -> (u32, u32) {
        match self {
            Self::Verbs => (231, 192),
            Self::RdmaCm => (10, 120),
        }
    }
}

/// Intercepted directories, with everything below.
const INTERCEPTED: [&CStr; 4] = [
    c"/sys/class/infiniband",
    c"/sys/class/infiniband_verbs",
    c"/sys/class/misc/rdma_cm",
    c"/dev/infiniband",
];

/// The directory where relative paths of a function start: its argument, or the working directory.
macro_rules! directory_of {
    () => {
        libc::AT_FDCWD
    };
    ($dir:ident) => {
        $dir
    };
}
pub(crate) use directory_of;

/// Bytes of the longest path that is looked at, as in the kernel.
const PATH_MAX: usize = libc::PATH_MAX as usize;

/// A path without repeated slashes and without components `.`, on the stack: signal handlers may open the devices' files.
struct NormalPath {
    bytes: [u8; PATH_MAX],
    len: usize,
}

impl NormalPath {
    const fn new() -> Self {
        Self { bytes: [0; PATH_MAX], len: 0 }
    }

    /// Appends the components of `path`; None if it is too long.
    fn append(&mut self, path: &[u8]) -> Option<()> {
        for component in path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".") {
            let end = self.len + 1 + component.len();
            self.bytes.get_mut(self.len..end)?[0] = b'/';
            self.bytes[self.len + 1..end].copy_from_slice(component);
            self.len = end;
        }
        Some(())
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Whether `path` is `root` or below it.
fn is_below(path: &[u8], root: &CStr) -> bool {
    path.strip_prefix(root.to_bytes()).is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
}

/// Whether a path may be intercepted: a component names the devices. The first one of an absolute path is one of two.
fn is_candidate(path: &[u8]) -> bool {
    if path.first() != Some(&b'/') {
        return names_devices(path);
    }
    let Some(start) = path.iter().position(|byte| *byte != b'/' && *byte != b'.') else { return false };
    (path[start..].starts_with(b"sys/") || path[start..].starts_with(b"dev/")) && names_devices(path)
}

fn names_devices(path: &[u8]) -> bool {
    [&b"infiniband"[..], b"rdma_cm"].iter().any(|name| path.windows(name.len()).any(|part| part == *name))
}

/// The directory behind a descriptor, or the working directory for `AT_FDCWD`.
#[inline(never)]
fn directory(dir: c_int, to: &mut NormalPath) -> Option<()> {
    let mut link = [0u8; 40];
    let name: &[u8] = if dir == libc::AT_FDCWD {
        b"/proc/self/cwd\0"
    } else {
        std::io::Write::write_fmt(&mut &mut link[..], format_args!("/proc/self/fd/{dir}\0")).ok()?;
        &link
    };
    let mut target = [0u8; PATH_MAX];
    // A direct system call, because `readlink` is intercepted.
    // SAFETY: a C string, and a buffer on the stack.
    let len = unsafe {
        let (name, target) = (name.as_ptr(), target.as_mut_ptr());
        libc::syscall(libc::SYS_readlinkat, libc::AT_FDCWD, name, target, PATH_MAX)
    };
    to.append(target.get(..usize::try_from(len).ok()?)?)
}

/// Looks up `path`; `None` if it is not intercepted. A relative path starts at the working directory.
///
/// # Safety
/// A C string, or null.
pub(crate) unsafe fn lookup(path: *const c_char) -> Option<InterceptedPath> {
    // SAFETY: as for this function.
    unsafe { lookup_at(libc::AT_FDCWD, path) }
}

/// Looks up `path`, which starts at the directory `dir` if it is relative; `None` if it is not intercepted.
///
/// # Safety
/// A C string, or null.
pub(crate) unsafe fn lookup_at(dir: c_int, path: *const c_char) -> Option<InterceptedPath> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the caller vouches for the string.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if is_candidate(path) { lookup_candidate(dir, path) } else { None }
}

/// Out of line: a signal handler may open other files on a stack that has no room for a path.
#[cold]
#[inline(never)]
fn lookup_candidate(dir: c_int, path: &[u8]) -> Option<InterceptedPath> {
    let mut normal = NormalPath::new();
    if path.first() != Some(&b'/') {
        let before = super::errno();
        let found = directory(dir, &mut normal);
        super::set_errno(before);
        found?;
    }
    normal.append(path)?;
    let path = normal.as_bytes();
    if !INTERCEPTED.iter().any(|root| is_below(path, root)) {
        return None;
    }
    let device = match path {
        b"/dev/infiniband/uverbs0" => Some(Device::Verbs),
        b"/dev/infiniband/rdma_cm" => Some(Device::RdmaCm),
        _ => None,
    };
    let mut led = sysfs_dir::root()?.as_bytes().to_vec();
    led.extend(path);
    Some(InterceptedPath { path: CString::new(led).ok()?, device })
}

/// The original path of a path inside the sysfs copy.
pub(crate) fn original_of(path: &[u8]) -> Option<&[u8]> {
    let below = path.strip_prefix(sysfs_dir::root_if_used()?.as_bytes())?;
    below.starts_with(b"/").then_some(below)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn is_intercepted(path: &CStr) -> bool {
        // SAFETY: a C string.
        unsafe { lookup(path.as_ptr()) }.is_some()
    }

    #[test]
    fn only_device_paths_are_intercepted() {
        for path in [
            c"/sys/class/infiniband",
            c"/sys/class/infiniband/",
            c"//sys/class/infiniband",
            c"/sys//class/./infiniband///mill0",
            c"/./sys/class/infiniband",
            c"/sys/class/infiniband/mill0/ports/1/state",
            c"/sys/class/infiniband_verbs/abi_version",
            c"/sys/class/misc/rdma_cm/abi_version",
            c"/dev/infiniband/rdma_cm",
        ] {
            assert!(is_intercepted(path), "{path:?}");
        }
        for path in [
            c"",
            c"/",
            c"/.",
            c"/sys",
            c"/sys/class",
            c"/sys/class/infiniband_mad/abi_version",
            c"/sys/class/misc/rdma_cmx",
            c"/dev/infiniban",
            c"/dev/null",
            c"/sysfs/class/infiniband",
            c"sys/class/infiniband",
            c"infiniband",
        ] {
            assert!(!is_intercepted(path), "{path:?}");
        }
    }

    #[test]
    fn relative_paths_start_at_their_directory() {
        let class = std::fs::File::open("/sys/class").expect("sysfs is mounted");
        // SAFETY: C strings.
        let place =
            unsafe { lookup_at(class.as_raw_fd(), c"infiniband//mill0".as_ptr()) }.expect("intercepted");
        assert_eq!(original_of(place.path.to_bytes()), Some(&b"/sys/class/infiniband/mill0"[..]));
        // SAFETY: as above.
        unsafe {
            assert!(lookup_at(class.as_raw_fd(), c"net/infiniband".as_ptr()).is_none());
            assert!(lookup_at(-1, c"infiniband".as_ptr()).is_none());
            assert!(lookup_at(-1, c"/sys/class/infiniband".as_ptr()).is_some(), "absolute");
        }
    }

    #[test]
    fn paths_map_into_the_directory_and_back() {
        // SAFETY: C strings.
        let place = unsafe { lookup(c"/dev/infiniband//rdma_cm".as_ptr()) }.expect("intercepted");
        assert_eq!(place.device, Some(Device::RdmaCm));
        assert_eq!(original_of(place.path.to_bytes()), Some(&b"/dev/infiniband/rdma_cm"[..]));
        assert_eq!(original_of(b"/dev/infiniband/rdma_cm"), None);
        // SAFETY: as above.
        assert!(unsafe { lookup(std::ptr::null()) }.is_none());
    }
}
