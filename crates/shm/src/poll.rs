//! Waiting for descriptors.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::timespec;

/// Waits until one of `descriptors` has one of its events, or hangs up, at most for `timeout` (for
/// ever without one). Fills in what each has, and returns how many have something: zero after the
/// timeout.
///
/// # Errors
/// What `ppoll` reports, EINTR after a signal.
pub fn poll(descriptors: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<usize> {
    let timeout = timeout.map(timespec);
    // SAFETY: the array has the given length. A number that is no descriptor is reported as such; a
    // null timeout waits for ever and a null mask changes none.
    let ready = unsafe {
        libc::ppoll(
            descriptors.as_mut_ptr(),
            descriptors.len() as libc::nfds_t,
            timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref),
            std::ptr::null(),
        )
    };
    usize::try_from(ready).map_err(|_| io::Error::last_os_error())
}

/// Waits until one of `fds` is readable or hung up; says for each whether it is. A signal ends the
/// wait early, with none.
///
/// # Errors
/// What `ppoll` reports.
pub fn poll_readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<_> =
        fds.iter().map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }).collect();
    match poll(&mut polled, timeout) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(polled.iter().map(|fd| fd.revents != 0).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::time::Instant;

    #[test]
    fn says_who_is_readable_or_hung_up() {
        let (first, mut writer) = std::io::pipe().unwrap();
        let (second, kept) = std::io::pipe().unwrap();
        let fds = [first.as_fd(), second.as_fd()];
        let now = Some(Duration::ZERO);
        assert_eq!(poll_readable(&fds, now).unwrap(), [false, false]);
        writer.write_all(b"x").unwrap();
        assert_eq!(poll_readable(&fds, None).unwrap(), [true, false]);
        drop(kept);
        assert_eq!(poll_readable(&fds, Some(Duration::MAX)).unwrap(), [true, true]);
    }

    #[test]
    fn waits_as_long_as_told() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let start = Instant::now();
        let time = Duration::from_millis(20);
        assert_eq!(poll_readable(&[reader.as_fd()], Some(time)).unwrap(), [false]);
        assert!(start.elapsed() >= time);
    }
}
