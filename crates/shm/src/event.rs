//! Event descriptors: a count that can be polled.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A semaphore behind a descriptor: every read takes one.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Creates a blocking event descriptor with count zero.
    ///
    /// # Errors
    /// What `eventfd` reports.
    pub fn new() -> io::Result<Self> {
        // SAFETY: creates a descriptor that nobody else owns.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
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

    /// Takes one; waits for it unless the descriptor was made non-blocking.
    ///
    /// # Errors
    /// EAGAIN on an empty non-blocking descriptor, EINTR.
    pub fn take(&self) -> io::Result<()> {
        let mut count = 0u64;
        // SAFETY: reads eight bytes into a local.
        let n = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        if n == 8 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
