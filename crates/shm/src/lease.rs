//! A lock in shared memory that survives the death of its holder.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::poll;

/// A lock word holding its owner's process id, zero when free.
///
/// Ownership is one compare-and-swap on that word, so there is never a moment in which the lock is
/// taken but its owner unknown. A waiter that has waited long asks the kernel whether the owner
/// still runs and takes the lock over if not: whatever the lock guards must be written so that a
/// half-done change is invisible (the last store publishes).
///
/// The word lives in memory that a hostile peer can overwrite. Such a peer can stall the others'
/// producers, which is its right within one user's trust; it cannot make them touch memory wrongly.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct LeaseLock(AtomicU32);

impl LeaseLock {
    /// Takes the lock for the calling process `me`.
    #[inline]
    pub fn lock(&self, me: u32) -> LeaseGuard<'_> {
        if self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait(me);
        }
        LeaseGuard(&self.0)
    }

    #[cold]
    fn wait(&self, me: u32) {
        let mut turns = 0u32;
        loop {
            let owner = self.0.load(Ordering::Relaxed);
            let stale = owner != 0 && turns % 1024 == 1023 && owner != me && process_is_gone(owner);
            let expected = if stale { owner } else { 0 };
            if (owner == 0 || stale)
                && self.0.compare_exchange(expected, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(64) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// Holds a [`LeaseLock`].
#[derive(Debug)]
pub struct LeaseGuard<'a>(&'a AtomicU32);

impl LeaseGuard<'_> {
    /// Releases with a full fence: what follows is ordered after everything before.
    #[inline]
    pub fn release_fenced(self) {
        self.0.swap(0, Ordering::SeqCst);
        std::mem::forget(self);
    }
}

impl Drop for LeaseGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Whether the process `pid` has ended, counting one that its parent has not yet reaped.
#[must_use]
pub fn process_is_gone(pid: u32) -> bool {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    }
    // SAFETY: the call above returned a new descriptor.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut polled = [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    poll(&mut polled, Some(Duration::ZERO)).is_ok_and(|ready| ready == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_from_a_dead_holder() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let lock = LeaseLock::default();
        std::mem::forget(lock.lock(child.id()));
        assert!(!process_is_gone(child.id()));
        child.kill().unwrap();
        // Not reaped yet: a zombie holds nothing.
        drop(lock.lock(std::process::id()));
        child.wait().unwrap();
    }
}
