//! Whether processes have exited.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A descriptor of the process `pid`. It is readable once the process has exited, reaped or not.
///
/// # Errors
/// What `pidfd_open` reports; ESRCH if there is no such process.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above returned a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether the process behind a descriptor of [`pidfd_open`] has exited.
#[must_use]
pub fn pidfd_has_exited(pidfd: BorrowedFd<'_>) -> bool {
    let mut polled = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one element; a timeout of zero does not wait.
    unsafe { libc::poll(&raw mut polled, 1, 0) == 1 }
}

/// Whether no process `pid` runs. A zombie has exited.
#[must_use]
pub fn has_exited(pid: u32) -> bool {
    match pidfd_open(pid) {
        Ok(pidfd) => pidfd_has_exited(pidfd.as_fd()),
        // EINVAL and ENOENT: numbers that no process can have, and those of threads.
        Err(error) => {
            matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EINVAL | libc::ENOENT))
        }
    }
}
