//! Whether processes live.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::poll_readable;

/// A handle to the process `pid` that is readable from its end on, reaped or not.
///
/// # Errors
/// What `pidfd_open` reports; ESRCH if there is no such process.
pub fn process_handle(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above returned a new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether no process `pid` runs, counting one as gone that its parent has not yet reaped.
#[must_use]
pub fn process_is_gone(pid: u32) -> bool {
    match process_handle(pid) {
        Ok(handle) => {
            poll_readable(&[handle.as_fd()], Some(Duration::ZERO)).is_ok_and(|ended| ended == [true])
        }
        // The latter two for numbers that no process can have, and for those of mere threads.
        Err(error) => {
            matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EINVAL | libc::ENOENT))
        }
    }
}
