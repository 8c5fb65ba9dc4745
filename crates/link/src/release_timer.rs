//! When packets that were held back may leave: a descriptor that wakes a thread that sleeps on the port.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::time::Instant;

use millstream_shm::fork::CloseOnForkFd;
use millstream_shm::timer;

/// Readable from the earliest release time of both directions on.
#[derive(Debug)]
pub(crate) struct ReleaseTimer {
    fd: CloseOnForkFd,
    /// Next release of each direction.
    next: Mutex<[Option<Instant>; 2]>,
}

/// Direction of packets that are held back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Direction {
    Sent,
    Received,
}

impl ReleaseTimer {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { fd: CloseOnForkFd::open(timer::create)?, next: Mutex::default() })
    }

    /// Sets the next release of one direction; `None` if nothing is held back.
    pub(crate) fn set(&self, direction: Direction, release: Option<Instant>) {
        let mut next = self.next.lock().expect("no panic under this lock");
        if next[direction as usize] == release {
            return;
        }
        next[direction as usize] = release;
        let first = next.iter().flatten().min();
        // It fails only in a forked child, which does not use the port.
        let _ = timer::set(self.fd.as_fd(), first.map(|at| at.saturating_duration_since(Instant::now())));
    }
}

impl AsFd for ReleaseTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
