//! Waiting on a 32-bit word that several processes share.
//!
//! The words live in a memfd, so the kernel must find waiters by (inode, offset): the *non-private*
//! futex operations. A private futex would only ever wake waiters of the calling process.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};

use crate::os::{Doing, OsError};

/// Sleeps while `word` holds `expected`, at most for `timeout`.
///
/// Returns on a wake, a timeout, a signal, or at once if `word` holds another value already: the
/// caller looks at its own condition again, whatever the reason was.
pub(crate) fn wait(word: &AtomicU32, expected: u32, timeout: Duration) -> Result<(), OsError> {
    // A timeout that does not fit is longer than any process lives.
    let timeout = rustix::thread::Timespec::try_from(timeout).ok();
    match futex::wait(word, Flags::empty(), expected, timeout.as_ref()) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(error) => Err(error).doing("wait on a shared word"),
    }
}

/// Wakes every process that sleeps on `word`.
pub(crate) fn wake_all(word: &AtomicU32) {
    // The word is mapped and aligned, so the call cannot fail; a lost wake would be a shorter
    // sleep for the other side, which never sleeps without a timeout.
    let _ = futex::wake(word, Flags::empty(), i32::MAX as u32);
}
