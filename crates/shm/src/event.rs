//! Event descriptors (`eventfd(2)`): a counter that can be polled.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fs::{FileType, OFlags};
use rustix::io::ReadWriteFlags;
use rustix::time::Timespec;

/// An event descriptor: readable while its counter is not zero.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A semaphore with counter zero: a take blocks until the counter is positive and decrements it.
    ///
    /// # Errors
    /// Those of `eventfd`.
    pub fn new() -> io::Result<Self> {
        Self::with(EventfdFlags::SEMAPHORE)
    }

    /// A latch: readable from the first signal until [`clear`](EventFd::clear). It never blocks.
    ///
    /// # Errors
    /// Those of `eventfd`.
    pub fn latch() -> io::Result<Self> {
        Self::with(EventfdFlags::NONBLOCK)
    }

    fn with(flags: EventfdFlags) -> io::Result<Self> {
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | flags)?))
    }

    /// Wraps a descriptor received from a trusted peer.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Wraps a descriptor received from an untrusted peer.
    ///
    /// # Errors
    /// InvalidData for a pipe, socket or file, as a write to one may block forever.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        // An anonymous inode has no file type.
        if FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) != FileType::Unknown {
            let cause = "the descriptor received from the peer is not an eventfd";
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        Ok(Self(fd))
    }

    /// Increments the counter. Does nothing if the counter is at its limit, where a write would block.
    pub fn signal(&self) {
        let mut polled = [PollFd::new(&self.0, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if rustix::event::poll(&mut polled, Some(&now)) == Ok(0) {
            return;
        }
        // A write fails only if the descriptor is not an eventfd, which has no waiter.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Decrements a semaphore or resets a latch. Blocks while the counter is zero, unless the descriptor is
    /// non-blocking.
    ///
    /// # Errors
    /// EAGAIN on an empty non-blocking descriptor, EINTR after a signal.
    pub fn take(&self) -> io::Result<()> {
        let mut count = 0u64;
        // The C library's read is a cancellation point: programs cancel threads that wait in
        // ibv_get_cq_event(). SAFETY: reads eight bytes into a local.
        let n = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        if n == 8 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Decrements a semaphore or resets a latch if the counter is positive. Never blocks. False also if the
    /// kernel lacks `RWF_NOWAIT` for eventfds (before Linux 5.8).
    pub fn try_take(&self) -> bool {
        let mut count = [0; 8];
        let mut into = [io::IoSliceMut::new(&mut count)];
        // Offset −1 reads at the current position.
        let read = rustix::io::preadv2(&self.0, &mut into, u64::MAX, ReadWriteFlags::NOWAIT);
        read == Ok(8)
    }

    /// The counter, read without changing it; zero where `/proc` is not available.
    #[must_use]
    pub fn count(&self) -> u64 {
        let path = format!("/proc/thread-self/fdinfo/{}", self.0.as_raw_fd());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let count = text.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
        count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
    }

    /// Whether the descriptor is non-blocking.
    ///
    /// # Errors
    /// Those of `fcntl`.
    pub fn is_nonblocking(&self) -> io::Result<bool> {
        Ok(rustix::fs::fcntl_getfl(&self.0)?.contains(OFlags::NONBLOCK))
    }

    /// Resets a latch.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // Fails with EAGAIN if the latch was clear.
        let _ = rustix::io::read(&self.0, &mut count);
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
    fn semaphore_counts_signals() {
        let event = EventFd::new().unwrap();
        (0..12).for_each(|_| event.signal());
        assert_eq!(event.count(), 12);
        (0..11).for_each(|_| event.take().unwrap());
        assert!(is_readable(&event));
        event.take().unwrap();
        assert!(!is_readable(&event));
        assert!(!event.try_take());
        event.signal();
        assert!(event.try_take());
        assert!(!is_readable(&event));
    }

    #[test]
    fn signal_at_the_counter_limit_does_not_block() {
        let event = EventFd::new().unwrap();
        let limit = u64::MAX - 1;
        assert_eq!(rustix::io::write(&event.0, &limit.to_ne_bytes()), Ok(8));
        event.signal();
        assert!(is_readable(&event));
    }

    #[test]
    fn other_descriptors_are_refused() {
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
    fn latch_is_cleared_at_once() {
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
