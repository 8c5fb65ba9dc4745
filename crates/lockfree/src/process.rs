//! Whether processes have exited, or execute another program.

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

/// Whether the process `pid` runs without the file that this process has mapped at `address`. A process that has written
/// there has executed another program since. False if there is no file at `address`, or if the system does not tell.
#[must_use]
pub fn has_unmapped(pid: u32, address: usize) -> bool {
    let Ok(own) = std::fs::read_to_string("/proc/self/maps") else { return false };
    let Some(file) = own.lines().find_map(|line| file_at(line, address)) else { return false };
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
    maps.is_ok_and(|maps| !maps.lines().any(|line| file_of(line) == Some(file)))
}

/// Device and inode of the file that a line of a process's `maps` describes.
fn file_of(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split_ascii_whitespace().skip(3);
    let file = (words.next()?, words.next()?);
    (file.1 != "0").then_some(file)
}

/// The file that the line describes, if its mapping contains the address.
fn file_at(line: &str, address: usize) -> Option<(&str, &str)> {
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    let [start, end] = [start, end].map(|text| usize::from_str_radix(text, 16).ok());
    (start? <= address && address < end?).then(|| file_of(line)).flatten()
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
