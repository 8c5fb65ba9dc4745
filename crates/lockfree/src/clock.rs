//! The clock of completion timestamps.
//!
//! It is CLOCK_MONOTONIC_RAW: timestamps of all processes on the host are comparable, and its rate is never
//! adjusted.

/// A reading of the clock: nanoseconds since an arbitrary moment of this boot.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// The time now.
    #[must_use]
    pub fn now() -> Self {
        Self(read(libc::CLOCK_MONOTONIC_RAW))
    }
}

/// The reading of `clock` in nanoseconds.
#[must_use]
pub fn read(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a writable struct. For a clock that does not exist the call leaves it as it is.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
