//! Sleeping on a 32-bit word that several processes share.
//!
//! The kernel finds the sleepers by file and offset: these are the *non-private* futex operations.
//! A private futex would only ever wake threads that sleep at the same address of the same process.

use std::io;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use crate::timespec;

/// Sleeps while `word` holds `expected`, at most for `timeout`.
///
/// Returns on a wake, a timeout, a signal, or at once if `word` holds another value already: the
/// caller looks at its own condition again, whatever the reason was.
///
/// # Errors
/// What `futex` reports otherwise.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) -> io::Result<()> {
    let timeout = timespec(timeout);
    // SAFETY: the word and the timeout live through the call.
    let woken = unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &raw const timeout)
    };
    if woken == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR | libc::ETIMEDOUT)) => Ok(()),
        error => Err(error),
    }
}

/// Wakes all threads of all processes that sleep on `word`.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: the kernel only takes the word's address. It is mapped and aligned, so the call
    // cannot fail.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memfd, PAGE};
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn another_value_or_the_timeout_ends_the_sleep() {
        let word = AtomicU32::new(1);
        wait(&word, 0, Duration::MAX).unwrap();
        let start = Instant::now();
        wait(&word, 1, Duration::from_millis(20)).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn a_wake_reaches_those_who_map_the_word_elsewhere() {
        let memory = Memfd::new("test", PAGE).unwrap();
        let (here, there) = (memory.map().unwrap(), memory.map().unwrap());
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while there.word32(64).load(Ordering::Acquire) == 0 {
                    wait(there.word32(64), 0, Duration::from_secs(60)).unwrap();
                }
            });
            // Time to fall asleep; without it the test passes, but for another reason.
            std::thread::sleep(Duration::from_millis(50));
            here.word32(64).store(1, Ordering::Release);
            wake_all(here.word32(64));
        });
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
