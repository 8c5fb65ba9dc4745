//! The paths that are intercepted.
//!
//! Signal handlers may use other files, and files of the view that exists already. So nothing here allocates or takes a lock,
//! except for the first use of an intercepted path, which creates the view (`sysfs_dir`).

use std::ffi::{CStr, c_char, c_int};

use super::c_string::{PATH_MAX, path_bytes};
use super::sysfs_dir;

/// The path that a function of the C library is called with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) path: *const c_char,
    pub(crate) kind: TargetKind,
    /// Bytes in front of the original path if that was relative: the directory at which it starts, and a slash.
    pub(crate) base: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// The path is not intercepted.
    Other,
    /// A file or directory of the view.
    View,
    /// The view's file that stands for a device, or [`STAND_IN`].
    Device(Device),
}

impl Target {
    pub(crate) fn device(&self) -> Option<Device> {
        match self.kind {
            TargetKind::Device(device) => Some(device),
            TargetKind::Other | TargetKind::View => None,
        }
    }

    pub(crate) fn is_intercepted(&self) -> bool {
        self.kind != TargetKind::Other
    }

    /// Whether there is no view.
    pub(crate) fn has_stand_in(&self) -> bool {
        self.path == STAND_IN.as_ptr()
    }
}

/// The file in place of a device if there is no view: a character device of the same access mode.
const STAND_IN: &CStr = c"/dev/null";

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

/// An absolute path without repeated slashes and without components `.`, on the stack, followed by a NUL.
struct PathBuffer {
    bytes: [u8; PATH_MAX],
    len: usize,
}

impl PathBuffer {
    const fn new() -> Self {
        Self { bytes: [0; PATH_MAX], len: 0 }
    }

    fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn as_c_str(&self) -> &CStr {
        // SAFETY: a NUL follows the path, and none is in it: it is made of parts of C strings.
        unsafe { CStr::from_ptr(self.bytes.as_ptr().cast()) }
    }

    fn set_len(&mut self, len: usize) {
        self.len = len;
        self.bytes[len] = 0;
    }

    /// Appends a slash and `component`; None if the path becomes too long.
    fn push(&mut self, component: &[u8]) -> Option<()> {
        let (start, end) = (self.len + 1, self.len + 1 + component.len());
        if end >= PATH_MAX {
            return None;
        }
        self.bytes[self.len] = b'/';
        self.bytes[start..end].copy_from_slice(component);
        self.set_len(end);
        Some(())
    }

    /// Removes the last component.
    fn pop(&mut self) {
        let end = self.as_bytes().iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        self.set_len(end);
    }

    /// Puts `prefix` in front; None if the path becomes too long.
    fn prepend(&mut self, prefix: &[u8]) -> Option<()> {
        let end = prefix.len() + self.len;
        if end >= PATH_MAX {
            return None;
        }
        self.bytes.copy_within(..self.len, prefix.len());
        self.bytes[..prefix.len()].copy_from_slice(prefix);
        self.set_len(end);
        Some(())
    }

    /// Turns a path inside the view into the original one. Returns whether it was inside.
    fn leave_view(&mut self) -> bool {
        let Some(len) = original_of(self.as_bytes()).map(<[u8]>::len) else { return false };
        self.bytes.copy_within(self.len - len..self.len, 0);
        self.set_len(len);
        true
    }
}

fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".")
}

/// Whether `path` is `root` or below it.
fn is_below(path: &[u8], root: &CStr) -> bool {
    path.strip_prefix(root.to_bytes()).is_some_and(|rest| matches!(rest.first(), None | Some(b'/')))
}

fn is_intercepted(path: &[u8]) -> bool {
    INTERCEPTED.iter().any(|root| is_below(path, root))
}

/// Whether a path may be intercepted: a component names the devices. The first one of an absolute path is one of two.
pub(crate) fn is_candidate(path: &[u8]) -> bool {
    if path.first() != Some(&b'/') {
        // A directory of the view may be open.
        return names(path, &[b"infiniband", b"rdma_cm"])
            || names(path, &[b"uverbs", b".."]) && sysfs_dir::root_if_used().is_some();
    }
    let Some(start) = path.iter().position(|byte| *byte != b'/' && *byte != b'.') else { return false };
    (path[start..].starts_with(b"sys/") || path[start..].starts_with(b"dev/"))
        && names(path, &[b"infiniband", b"rdma_cm"])
}

/// Whether one of the words is in the path.
fn names(path: &[u8], words: &[&[u8]]) -> bool {
    words.iter().any(|word| path.windows(word.len()).any(|part| part == *word))
}

/// Appends the directory behind a descriptor, or the working directory for `AT_FDCWD`.
#[inline(never)]
fn directory(dir: c_int, to: &mut PathBuffer) -> Option<()> {
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
    components(target.get(..usize::try_from(len).ok()?)?).try_for_each(|part| to.push(part))
}

/// Whether the view has a directory at the original path `path`.
#[inline(never)]
fn is_directory(path: &[u8]) -> bool {
    let Some(root) = sysfs_dir::root() else { return false };
    let mut copy = PathBuffer::new();
    let pushed = components(path).try_for_each(|part| copy.push(part));
    if pushed.and_then(|()| copy.prepend(root.as_bytes())).is_none() {
        return false;
    }
    rustix::fs::stat(copy.as_c_str()).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFDIR)
}

/// Appends the components of `path`. Below an intercepted directory, a component `..` is resolved, because the directory
/// itself does not exist; elsewhere the kernel does that. Returns whether the path has left an intercepted directory, and the
/// bytes that it has kept of the path before.
fn resolve(path: &[u8], to: &mut PathBuffer) -> Option<(bool, usize)> {
    let (mut has_left, mut kept) = (false, to.len);
    for part in components(path) {
        if part == b".." && is_intercepted(to.as_bytes()) && is_directory(to.as_bytes()) {
            to.pop();
            has_left |= !is_intercepted(to.as_bytes());
            kept = kept.min(to.len);
        } else {
            to.push(part)?;
        }
    }
    Some((has_left, kept))
}

/// Whether the last component must be a directory.
fn requires_directory(path: &[u8]) -> bool {
    matches!(path.rsplit(|byte| *byte == b'/').next(), Some(b"" | b"." | b".."))
}

/// Finds what a path stands for. The new path is written to `to`; the original one stays in use if nothing is.
#[inline(never)]
fn find(dir: c_int, path: &[u8], to: &mut PathBuffer) -> Option<(TargetKind, usize)> {
    let mut base = 0;
    if path.first() != Some(&b'/') {
        let before = super::errno();
        let found = directory(dir, to);
        super::set_errno(before);
        found?;
        to.leave_view();
        base = to.len + 1;
    }
    let (has_left, kept) = resolve(path, to)?;
    if to.leave_view() || kept + 1 < base {
        base = 0;
    }
    let is_intercepted = is_intercepted(to.as_bytes());
    if !is_intercepted && !has_left {
        return None;
    }
    let device = match to.as_bytes() {
        _ if requires_directory(path) => None,
        b"/dev/infiniband/uverbs0" => Some(Device::Verbs),
        b"/dev/infiniband/rdma_cm" => Some(Device::RdmaCm),
        _ => None,
    };
    if requires_directory(path) {
        to.push(b"")?;
    }
    if !is_intercepted {
        return Some((TargetKind::Other, 0));
    }
    let kind = device.map_or(TargetKind::View, TargetKind::Device);
    match sysfs_dir::root() {
        Some(root) => to.prepend(root.as_bytes())?,
        // The devices need no view.
        None => {
            device?;
            to.set_len(0);
        }
    }
    Some((kind, base))
}

/// Calls `call` with the path to use instead of `path`, which starts at the directory `dir` if it is relative.
///
/// # Safety
/// The string does not change during the call.
#[inline]
pub(crate) unsafe fn with_target<R>(dir: c_int, path: *const c_char, call: impl FnOnce(Target) -> R) -> R {
    // SAFETY: as for this function.
    match unsafe { path_bytes(path) } {
        Some(bytes) if is_candidate(bytes) => with_candidate(dir, path, bytes, call),
        _ => call(Target { path, kind: TargetKind::Other, base: 0 }),
    }
}

/// Out of line: a signal handler may open other files on a stack that has no room for a path.
#[cold]
#[inline(never)]
fn with_candidate<R>(dir: c_int, path: *const c_char, bytes: &[u8], call: impl FnOnce(Target) -> R) -> R {
    let mut to = PathBuffer::new();
    call(match find(dir, bytes, &mut to) {
        None => Target { path, kind: TargetKind::Other, base: 0 },
        Some((kind, base)) if to.len != 0 => Target { path: to.as_c_str().as_ptr(), kind, base },
        Some((kind, base)) => Target { path: STAND_IN.as_ptr(), kind, base },
    })
}

/// The original path of a path inside the view.
pub(crate) fn original_of(path: &[u8]) -> Option<&[u8]> {
    let below = path.strip_prefix(sysfs_dir::root_if_used()?.as_bytes())?;
    below.starts_with(b"/").then_some(below)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    /// The path that replaces `path`, and what it is.
    fn target_at(dir: c_int, path: &CStr) -> (String, TargetKind) {
        // SAFETY: C strings.
        unsafe {
            with_target(dir, path.as_ptr(), |target| {
                (CStr::from_ptr(target.path).to_str().unwrap().to_owned(), target.kind)
            })
        }
    }

    fn target(path: &CStr) -> (String, TargetKind) {
        target_at(libc::AT_FDCWD, path)
    }

    /// The original path of the file of the view.
    fn in_view(path: &CStr) -> String {
        let (path, kind) = target(path);
        assert_ne!(kind, TargetKind::Other, "{path}");
        String::from_utf8(original_of(path.as_bytes()).expect("in the view").to_vec()).unwrap()
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
            assert_ne!(target(path).1, TargetKind::Other, "{path:?}");
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
            c"/dev/../dev/infiniband",
            c"../infiniband",
        ] {
            assert_eq!(target(path), (path.to_str().unwrap().to_owned(), TargetKind::Other));
        }
    }

    #[test]
    fn relative_paths_start_at_their_directory() {
        let class = File::open("/sys/class").expect("sysfs is mounted");
        let (path, kind) = target_at(class.as_raw_fd(), c"infiniband//mill0");
        assert_eq!(original_of(path.as_bytes()), Some(&b"/sys/class/infiniband/mill0"[..]));
        assert_eq!(kind, TargetKind::View);
        assert_eq!(target_at(class.as_raw_fd(), c"net/infiniband").1, TargetKind::Other);
        assert_eq!(target_at(-1, c"infiniband").1, TargetKind::Other);
        assert_eq!(target_at(-1, c"/sys/class/infiniband").1, TargetKind::View, "absolute");
    }

    #[test]
    fn relative_paths_start_at_directories_of_the_view() {
        let devices = File::open(target(c"/dev/infiniband").0).expect("the view");
        for (name, device) in [(c"rdma_cm", Device::RdmaCm), (c"./uverbs0", Device::Verbs)] {
            assert_eq!(target_at(devices.as_raw_fd(), name).1, TargetKind::Device(device));
        }
        let null = target_at(devices.as_raw_fd(), c"../null");
        assert_eq!(null, ("/dev/null".to_owned(), TargetKind::Other));
    }

    #[test]
    fn paths_map_into_the_view_and_back() {
        assert_eq!(target(c"/dev/infiniband//rdma_cm").1, TargetKind::Device(Device::RdmaCm));
        assert_eq!(in_view(c"/dev/infiniband//rdma_cm"), "/dev/infiniband/rdma_cm");
        assert_eq!(original_of(b"/dev/infiniband/rdma_cm"), None);
        for bad in [0, 8] {
            let path = std::ptr::without_provenance(bad);
            // SAFETY: the kernel checks the address.
            let kind = unsafe { with_target(libc::AT_FDCWD, path, |target| target.kind) };
            assert_eq!(kind, TargetKind::Other);
        }
    }

    #[test]
    fn parents_are_resolved_below_the_devices_directories() {
        for (path, reduced) in [
            (c"/dev/infiniband/../null", "/dev/null"),
            (c"/sys/class/infiniband/../net/lo/mtu", "/sys/class/net/lo/mtu"),
            (c"/sys/class/infiniband/mill0/../../net/", "/sys/class/net/"),
            (c"/sys/class/infiniband/../net/../infiniband", "/sys/class/net/../infiniband"),
        ] {
            assert_eq!(target(path), (reduced.to_owned(), TargetKind::Other));
        }
        let device = c"/sys/class/infiniband/../infiniband/mill0/../../infiniband_verbs/../../../dev/null";
        assert_eq!(target(device).0, "/sys/class/../../dev/null");
        assert_eq!(in_view(c"/dev/infiniband/../infiniband/rdma_cm"), "/dev/infiniband/rdma_cm");
        // The kernel refuses parents of what is no directory.
        assert_eq!(in_view(c"/dev/infiniband/rdma_cm/../rdma_cm"), "/dev/infiniband/rdma_cm/../rdma_cm");
        assert_eq!(in_view(c"/dev/infiniband/none/.."), "/dev/infiniband/none/../");
    }

    #[test]
    fn devices_are_no_directories() {
        for path in [c"/dev/infiniband/rdma_cm/", c"/dev/infiniband/rdma_cm/."] {
            assert_eq!(target(path).1, TargetKind::View);
            assert_eq!(in_view(path), "/dev/infiniband/rdma_cm/");
        }
    }
}
