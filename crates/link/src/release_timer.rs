//! When packets that were held back may leave: a descriptor that wakes a thread that sleeps on the port.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::time::Instant;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::fork::CloseOnForkFd;

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
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Ok(Self { fd: fd.into(), next: Mutex::default() })
    }

    /// Sets the next release of one direction; `None` if nothing is held back.
    pub(crate) fn set(&self, direction: Direction, release: Option<Instant>) {
        let mut next = self.next.lock().expect("no panic under this lock");
        if next[direction as usize] == release {
            return;
        }
        next[direction as usize] = release;
        // A value of zero would stop the timer.
        let wait = next
            .iter()
            .flatten()
            .min()
            .map_or(0, |at| at.saturating_duration_since(Instant::now()).as_nanos().max(1));
        let it_value =
            Timespec { tv_sec: (wait / 1_000_000_000) as i64, tv_nsec: (wait % 1_000_000_000) as _ };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        // It fails only in a forked child, which does not use the port.
        let _ = timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &Itimerspec { it_interval, it_value });
    }
}

impl AsFd for ReleaseTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
