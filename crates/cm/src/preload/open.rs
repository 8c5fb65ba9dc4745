//! How intercepted paths are opened: nothing in the view can be changed, and one device is an event channel.

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::IntoRawFd as _;
use std::ptr;

use libc::{FILE, O_CREAT, O_DIRECTORY, O_EXCL, O_PATH, O_RDONLY, O_RDWR, O_TRUNC, O_WRONLY};

use super::fail_with;
use super::path::{Device, Target};
use crate::engine::without_cancellation;
use crate::{Errno, engine};

/// The action that opens a path.
pub(super) enum OpenAction {
    /// Done: a descriptor, or -1 with errno.
    Return(c_int),
    /// Open this path with these flags.
    Open(*const c_char, c_int),
}

/// Flags that change a file.
const CHANGES: c_int = O_WRONLY | O_RDWR | O_TRUNC;

/// # Safety
/// The target's path is a C string if it is intercepted.
#[inline]
pub(super) unsafe fn open_action(target: &Target, flags: c_int) -> OpenAction {
    if !target.is_intercepted() || flags & O_PATH != 0 {
        return OpenAction::Open(target.path, flags);
    }
    // SAFETY: the caller vouches for the string.
    unsafe { open_intercepted(target, flags) }
}

#[cold]
#[inline(never)]
unsafe fn open_intercepted(target: &Target, flags: c_int) -> OpenAction {
    let Some(device) = target.device() else {
        // SAFETY: the caller vouches for the string.
        return open_file(unsafe { CStr::from_ptr(target.path) }, flags);
    };
    OpenAction::Return(match device {
        _ if flags & O_CREAT != 0 && flags & O_EXCL != 0 => fail_with(libc::EEXIST),
        _ if flags & O_DIRECTORY != 0 => fail_with(libc::ENOTDIR),
        // The verbs library does not use the kernel's device, and no other program can use it.
        Device::Verbs => fail_with(libc::ENXIO),
        Device::RdmaCm => match engine::open(flags) {
            Ok(channel) => channel.into_raw_fd(),
            Err(error) => fail_with(Errno::from(error).0),
        },
    })
}

/// Files are read-only and cannot be created, as in sysfs, also for root.
fn open_file(path: &CStr, flags: c_int) -> OpenAction {
    if flags & (CHANGES | O_CREAT) == 0 {
        return OpenAction::Open(path.as_ptr(), flags);
    }
    let fail = |errno| OpenAction::Return(fail_with(errno));
    match rustix::fs::stat(path) {
        Err(rustix::io::Errno::NOENT) if flags & O_CREAT != 0 => fail(libc::EACCES),
        Err(error) => fail(error.raw_os_error()),
        Ok(_) if flags & O_CREAT != 0 && flags & O_EXCL != 0 => fail(libc::EEXIST),
        Ok(stat) if stat.st_mode & libc::S_IFMT == libc::S_IFDIR => fail(libc::EISDIR),
        Ok(_) if flags & O_DIRECTORY != 0 => fail(libc::ENOTDIR),
        Ok(_) if flags & CHANGES != 0 => fail(libc::EACCES),
        Ok(_) => OpenAction::Open(path.as_ptr(), flags & !O_CREAT),
    }
}

/// The action of `fopen`.
pub(super) enum StreamAction {
    /// Done: a stream, or null with errno.
    Return(*mut FILE),
    /// Open this path with the same mode.
    Open(*const c_char),
}

/// # Safety
/// The target's path is a C string if it is intercepted. So is the mode.
#[inline]
pub(super) unsafe fn stream_action(target: &Target, mode: *const c_char) -> StreamAction {
    if !target.is_intercepted() {
        return StreamAction::Open(target.path);
    }
    // SAFETY: the caller vouches for the strings.
    unsafe { open_intercepted_stream(target, mode) }
}

#[cold]
#[inline(never)]
unsafe fn open_intercepted_stream(target: &Target, mode: *const c_char) -> StreamAction {
    // SAFETY: the caller vouches for the string.
    let Some(flags) = flags_of(unsafe { CStr::from_ptr(mode) }.to_bytes()) else {
        // The C library refuses the mode.
        return StreamAction::Open(target.path);
    };
    without_cancellation(|| {
        // SAFETY: the caller vouches for the strings.
        match unsafe { open_action(target, flags) } {
            OpenAction::Open(path, _) => StreamAction::Open(path),
            OpenAction::Return(fd) if fd < 0 => StreamAction::Return(ptr::null_mut()),
            OpenAction::Return(fd) => {
                // SAFETY: a descriptor that was just opened, and the caller's string.
                let stream = unsafe { libc::fdopen(fd, mode) };
                if stream.is_null() {
                    let errno = super::errno();
                    // SAFETY: nobody else knows the descriptor.
                    unsafe { libc::close(fd) };
                    super::set_errno(errno);
                }
                StreamAction::Return(stream)
            }
        }
    })
}

/// The flags of `open` for a mode of `fopen`; `None` if it is invalid.
fn flags_of(mode: &[u8]) -> Option<c_int> {
    let (first, rest) = mode.split_first()?;
    let rest = rest.split(|byte| *byte == b',').next()?;
    let has = |letter| rest.contains(&letter);
    let access = |alone| if has(b'+') { O_RDWR } else { alone };
    let mut flags = match first {
        b'r' => access(O_RDONLY),
        b'w' => access(O_WRONLY) | O_CREAT | O_TRUNC,
        b'a' => access(O_WRONLY) | O_CREAT | libc::O_APPEND,
        _ => return None,
    };
    for (letter, flag) in [(b'x', O_EXCL), (b'e', libc::O_CLOEXEC)] {
        if has(letter) {
            flags |= flag;
        }
    }
    Some(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_of_streams_are_flags() {
        for (mode, flags) in [
            ("r", O_RDONLY),
            ("rb", O_RDONLY),
            ("r+", O_RDWR),
            ("rb+e", O_RDWR | libc::O_CLOEXEC),
            ("w", O_WRONLY | O_CREAT | O_TRUNC),
            ("w+x", O_RDWR | O_CREAT | O_TRUNC | O_EXCL),
            ("a", O_WRONLY | O_CREAT | libc::O_APPEND),
            ("r,ccs=ex+", O_RDONLY),
        ] {
            assert_eq!(flags_of(mode.as_bytes()), Some(flags), "{mode}");
        }
        assert_eq!(flags_of(b""), None);
        assert_eq!(flags_of(b"+r"), None);
    }
}
