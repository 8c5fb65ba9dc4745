//! A lock in shared memory that survives the death of its holder.

use std::time::{Duration, Instant};

#[cfg(loom)]
pub(crate) use crate::model::process_is_gone;
#[cfg(not(loom))]
pub(crate) use crate::process::process_is_gone;
use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sync::{hint, thread};

/// So often a waiter looks at the holder's word between two looks at the holder itself and at the time.
pub(crate) const TURNS: u32 = if cfg!(loom) { 2 } else { 1024 };

/// A lock word holding its owner's process id, zero when free.
///
/// Ownership is one compare-and-swap on that word, so there is never a moment in which the lock is
/// taken but its owner unknown. A waiter that has waited long asks the kernel whether the owner
/// still runs and takes the lock over if not: whatever the lock guards must be written so that a
/// half-done change is invisible (the last store publishes).
///
/// The word lives in memory that a hostile peer can overwrite, and a holder may have been stopped.
/// Neither can make the others wait for ever: who has waited for [`LeaseLock::PATIENCE`] gives up.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct LeaseLock(AtomicU32);

impl LeaseLock {
    /// How long to wait for a holder that runs but does not release. What is done under the lock takes
    /// less than a microsecond, or as long as one message where it says so.
    pub const PATIENCE: Duration = Duration::from_secs(2);

    /// Takes the lock for the calling process `me`; None if its holder does not release it.
    #[inline]
    pub fn lock(&self, me: u32) -> Option<LeaseGuard<'_>> {
        self.lock_within(me, Self::PATIENCE)
    }

    /// The same with another limit; a free lock is taken even without any patience.
    #[inline]
    pub fn lock_within(&self, me: u32, patience: Duration) -> Option<LeaseGuard<'_>> {
        let free = self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok();
        (free || self.wait(me, patience)).then(|| LeaseGuard(&self.0))
    }

    /// Makes the lock free, whoever holds it: for the owner of memory that begins a new life.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }

    #[cold]
    fn wait(&self, me: u32, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut turns = 0u32;
        loop {
            let owner = self.0.load(Ordering::Relaxed);
            let stale = owner != 0 && turns % TURNS == TURNS - 1 && owner != me && process_is_gone(owner);
            let expected = if stale { owner } else { 0 };
            if (owner == 0 || stale)
                && self.0.compare_exchange(expected, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return true;
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(TURNS) && !cfg!(loom) && Instant::now() > deadline {
                return false;
            }
            if turns.is_multiple_of(64) {
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
    }
}

/// Holds a [`LeaseLock`] or an [`OwnLease`](crate::OwnLease).
#[derive(Debug)]
pub struct LeaseGuard<'a>(&'a AtomicU32);

impl<'a> LeaseGuard<'a> {
    /// For a word that is not zero as long as the lease is held.
    pub(crate) fn new(word: &'a AtomicU32) -> Self {
        Self(word)
    }

    /// Releases with a full fence: what follows is ordered after everything before.
    #[inline]
    pub fn release_fenced(self) {
        self.0.swap(0, Ordering::SeqCst);
        // On x86 that was one. Elsewhere a load that follows could still be earlier than the store.
        if cfg!(any(loom, not(target_arch = "x86_64"))) {
            fence(Ordering::SeqCst);
        }
        std::mem::forget(self);
    }
}

impl Drop for LeaseGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::process_is_gone;

    #[test]
    fn taken_from_a_dead_holder() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let lock = LeaseLock::default();
        std::mem::forget(lock.lock(child.id()));
        assert!(!process_is_gone(child.id()));
        child.kill().unwrap();
        // Not reaped yet: a zombie holds nothing.
        assert!(lock.lock(std::process::id()).is_some());
        child.wait().unwrap();
    }

    #[test]
    fn taken_from_who_cannot_be() {
        // SAFETY: a plain system call.
        let thread = unsafe { libc::gettid() } as u32;
        assert_ne!(thread, std::process::id(), "tests run on threads of their own");
        for nobody in [u32::MAX, 1 << 31, i32::MAX as u32, thread] {
            let lock = LeaseLock(AtomicU32::new(nobody));
            assert!(lock.lock(std::process::id()).is_some(), "{nobody}");
        }
    }

    #[test]
    fn not_waited_for_without_end() {
        let lock = LeaseLock::default();
        let _held = lock.lock(std::process::id()).unwrap();
        assert!(!lock.wait(std::process::id(), Duration::from_millis(20)));
        assert!(lock.lock_within(std::process::id(), Duration::from_millis(20)).is_none());
        assert_eq!(lock.0.load(Ordering::Relaxed), std::process::id(), "it stays with its holder");
        // The parent runs, and holds nothing in truth.
        let forged = LeaseLock(AtomicU32::new(std::os::unix::process::parent_id()));
        assert!(!forged.wait(std::process::id(), Duration::from_millis(20)));
    }
}
