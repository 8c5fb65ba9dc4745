//! Waiting for descriptors (`poll(2)`).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use crate::timespec;

/// Waits until one of `descriptors` has an event or hangs up, at most for `timeout` (without one: forever).
/// Fills in the events and returns the number of descriptors with events, zero after the timeout.
///
/// # Errors
/// Those of `ppoll`; EINTR after a signal.
pub fn poll(descriptors: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<usize> {
    let timeout =
        timeout.map(timespec).map(|time| libc::timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec });
    // The C library's ppoll is a cancellation point: programs cancel threads that wait for events. SAFETY:
    // the array has the given length. The kernel reports invalid descriptors in the array; null pointers mean
    // no timeout and no signal mask.
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

/// Waits until one of `fds` is readable or hung up; returns for each whether it is. A signal ends the wait
/// early, with all false.
///
/// # Errors
/// Those of `ppoll`.
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
    fn readable_and_hung_up_descriptors_are_reported() {
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
    fn poll_returns_after_its_timeout() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let start = Instant::now();
        let time = Duration::from_millis(20);
        assert_eq!(poll_readable(&[reader.as_fd()], Some(time)).unwrap(), [false]);
        assert!(start.elapsed() >= time);
    }
}
