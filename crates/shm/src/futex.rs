//! Futexes: threads block on a 32-bit word that several processes share.
//!
//! The operations are the *non-private* ones, which find waiters by file and offset. A private futex wakes
//! only threads of the same process that wait at the same address.

use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;

use crate::timespec;

/// Blocks while `word` holds `expected`, at most for `timeout`.
///
/// Returns after a wake, the timeout or a signal, and at once if `word` holds another value. The caller
/// checks its condition again in every case.
///
/// # Errors
/// Other errors of `futex`.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) -> io::Result<()> {
    match futex::wait(word, futex::Flags::empty(), expected, Some(&timespec(timeout))) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Wakes all threads of all processes that wait on `word`.
pub fn wake_all(word: &AtomicU32) {
    // A mapped and aligned word is the only precondition.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memfd, PAGE};
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn another_value_or_the_timeout_ends_the_wait() {
        let word = AtomicU32::new(1);
        wait(&word, 0, Duration::MAX).unwrap();
        let start = Instant::now();
        wait(&word, 1, Duration::from_millis(20)).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn wake_reaches_another_mapping_of_the_word() {
        let memory = Memfd::new("test", PAGE).unwrap();
        let (here, there) = (memory.map().unwrap(), memory.map().unwrap());
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while there.word32(64).load(Ordering::Acquire) == 0 {
                    wait(there.word32(64), 0, Duration::from_secs(60)).unwrap();
                }
            });
            // Lets the thread block first. Without it the test passes without a wake.
            std::thread::sleep(Duration::from_millis(50));
            here.word32(64).store(1, Ordering::Release);
            wake_all(here.word32(64));
        });
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
