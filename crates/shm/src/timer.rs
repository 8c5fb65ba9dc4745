//! Timers as descriptors: readable once their time has come (`timerfd_create(2)`).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::timespec;

/// A stopped timer of the monotonic clock, whose descriptor does not block.
///
/// # Errors
/// Those of `timerfd_create`.
pub fn create() -> io::Result<OwnedFd> {
    Ok(timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?)
}

/// Makes the timer expire once after `delay`, or stops it.
///
/// # Errors
/// Those of `timerfd_settime`, if the descriptor is not a timer's.
pub fn set(timer: BorrowedFd<'_>, delay: Option<Duration>) -> io::Result<()> {
    // A value of zero would stop the timer.
    let delay = delay.map_or(Duration::ZERO, |delay| delay.max(Duration::from_nanos(1)));
    let spec = Itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(delay) };
    timerfd_settime(timer, TimerfdTimerFlags::empty(), &spec)?;
    Ok(())
}
