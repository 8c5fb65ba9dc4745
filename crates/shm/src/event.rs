//! Event descriptors: a count that can be polled.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A count behind a descriptor, which is readable while the count is not zero.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A semaphore with count zero: every take waits for one and takes one.
    ///
    /// # Errors
    /// What `eventfd` reports.
    pub fn new() -> io::Result<Self> {
        Self::with(libc::EFD_SEMAPHORE)
    }

    /// A latch: readable from the first signal until [`clear`](EventFd::clear). It never blocks.
    ///
    /// # Errors
    /// What `eventfd` reports.
    pub fn latch() -> io::Result<Self> {
        Self::with(libc::EFD_NONBLOCK)
    }

    fn with(flags: libc::c_int) -> io::Result<Self> {
        // SAFETY: creates a descriptor that nobody else owns.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Wraps a descriptor received from a peer.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Adds one.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: writes eight bytes from a local. The count cannot reach its limit of 2^64 - 2,
        // and a failed write to a peer's descriptor has nobody left to tell.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes one, or from a latch all; waits for it unless the descriptor was made non-blocking.
    ///
    /// # Errors
    /// EAGAIN on an empty non-blocking descriptor, EINTR.
    pub fn take(&self) -> io::Result<()> {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a local.
        let n = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        if n == 8 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Takes one if there is one, and does not wait even if the descriptor would. False also where the
    /// kernel cannot do that (Linux before 5.8).
    pub fn try_take(&self) -> bool {
        let mut count = 0u64;
        let into = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
        // SAFETY: reads eight bytes into a local.
        unsafe { libc::preadv2(self.0.as_raw_fd(), &raw const into, 1, -1, libc::RWF_NOWAIT) == 8 }
    }

    /// Whether somebody made the descriptor non-blocking.
    ///
    /// # Errors
    /// What `fcntl` reports.
    pub fn is_nonblocking(&self) -> io::Result<bool> {
        // SAFETY: a plain system call on a descriptor that we own.
        let flags = unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 { Err(io::Error::last_os_error()) } else { Ok(flags & libc::O_NONBLOCK != 0) }
    }

    /// Takes back what was signalled to a latch, if anything was.
    pub fn clear(&self) {
        // An empty latch is what was asked for.
        let _ = self.take();
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poll_readable;
    use std::time::Duration;

    fn is_readable(event: &EventFd) -> bool {
        poll_readable(&[event.as_fd()], Some(Duration::ZERO)).unwrap()[0]
    }

    #[test]
    fn a_semaphore_gives_each_signal_once() {
        let event = EventFd::new().unwrap();
        event.signal();
        event.signal();
        event.take().unwrap();
        assert!(is_readable(&event));
        event.take().unwrap();
        assert!(!is_readable(&event));
        assert!(!event.try_take());
        event.signal();
        assert!(event.try_take());
        assert!(!is_readable(&event));
    }

    #[test]
    fn a_latch_forgets_all_signals_at_once() {
        let event = EventFd::latch().unwrap();
        event.clear();
        assert_eq!(event.take().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(event.is_nonblocking().unwrap());
        assert!(!EventFd::new().unwrap().is_nonblocking().unwrap());
        event.signal();
        event.signal();
        assert!(is_readable(&event));
        event.clear();
        assert!(!is_readable(&event));
    }
}
