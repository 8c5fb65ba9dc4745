//! Event descriptors: a count that can be polled.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::memfd::stat;
use crate::poll;

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

    /// Wraps a descriptor from somebody who is not trusted.
    ///
    /// # Errors
    /// InvalidData for what is certainly no event descriptor: a write to a pipe, a socket or a file may wait
    /// for ever.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        if stat(fd.as_fd())?.st_mode & libc::S_IFMT != 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's descriptor is no event"));
        }
        Ok(Self(fd))
    }

    /// Adds one. Where another holder of the descriptor has brought the count to its limit, at which a write
    /// waits, there is nothing to add: it is readable.
    pub fn signal(&self) {
        let mut polled = [libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLOUT, revents: 0 }];
        if poll(&mut polled, Some(Duration::ZERO)).is_ok_and(|ready| ready == 0) {
            return;
        }
        let one = 1u64;
        // SAFETY: writes eight bytes from a local. A failed write to a peer's descriptor has nobody left
        // to tell.
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
    fn a_full_count_makes_nobody_wait() {
        let event = EventFd::new().unwrap();
        let most = u64::MAX - 1;
        // SAFETY: writes eight bytes from a local.
        assert_eq!(unsafe { libc::write(event.0.as_raw_fd(), (&raw const most).cast(), 8) }, 8);
        event.signal();
        assert!(is_readable(&event));
    }

    #[test]
    fn what_is_no_event_is_refused() {
        let (reader, writer) = std::io::pipe().unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for fd in [OwnedFd::from(reader), writer.into(), socket.into(), file.into()] {
            assert!(EventFd::from_peer(fd).is_err());
        }
        let event = EventFd::from_peer(EventFd::new().unwrap().0).unwrap();
        event.signal();
        assert!(is_readable(&event));
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
