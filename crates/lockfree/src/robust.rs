//! A lock in shared memory that survives the exit of its holder.

use std::time::{Duration, Instant};

#[cfg(loom)]
pub(crate) use crate::model::{has_exited, has_unmapped};
#[cfg(not(loom))]
pub(crate) use crate::process::{has_exited, has_unmapped};
use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sync::{hint, thread};

/// A waiter checks the holder's process and the time once in this many reads of the lock word.
pub(crate) const READS_PER_CHECK: u32 = if cfg!(loom) { 2 } else { 1024 };

/// How long a waiter waits before it checks whether the holder executes another program, and between these checks. Each
/// reads the holder's list of mappings.
const EXEC_CHECK: Duration = Duration::from_millis(10);

/// Judges whether the holder of a lock word will never release it.
#[derive(Debug)]
pub(crate) struct HolderWatch<'a> {
    word: &'a AtomicU32,
    exec_check: Instant,
}

impl<'a> HolderWatch<'a> {
    pub(crate) fn new(word: &'a AtomicU32) -> Self {
        Self { word, exec_check: Instant::now() + EXEC_CHECK }
    }

    /// Whether the process has exited, or executes another program since it took the lock.
    pub(crate) fn is_gone(&mut self, holder: u32) -> bool {
        has_exited(holder) || (!cfg!(loom) && self.executes_another(holder))
    }

    fn executes_another(&mut self, holder: u32) -> bool {
        let due = Instant::now() >= self.exec_check;
        if due {
            self.exec_check = Instant::now() + EXEC_CHECK;
        }
        due && has_unmapped(holder, std::ptr::from_ref(self.word).addr())
    }
}

/// Frees the word if its holder is gone, without waiting.
#[cfg(not(loom))]
pub(crate) fn recover(word: &AtomicU32) {
    let holder = word.load(Ordering::Relaxed);
    let gone = holder != 0 && (has_exited(holder) || has_unmapped(holder, std::ptr::from_ref(word).addr()));
    if gone {
        // An exited holder has published no incomplete change.
        let _ = word.compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// A lock word that holds its owner's process id, zero when free.
///
/// Ownership is one compare-and-swap on that word, so the lock is never taken with its owner unknown. After a long wait
/// a waiter asks the kernel whether the owner still runs, and takes the lock over if it has exited or executes another
/// program. So the data under the
/// lock must be written such that a half-done change is invisible: the last store publishes.
///
/// The word lies in memory that a hostile peer can overwrite, and a holder may be stopped. In both cases a waiter gives up
/// after [`RobustLock::TIMEOUT`].
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct RobustLock(AtomicU32);

impl RobustLock {
    /// Longest wait for a holder that runs and does not release. A critical section takes less than a
    /// microsecond, or at most the time to copy one message.
    pub const TIMEOUT: Duration = Duration::from_secs(2);

    /// Takes the lock for the calling process `me`; None if its holder does not release it.
    #[inline]
    pub fn lock(&self, me: u32) -> Option<RobustGuard<'_>> {
        self.lock_within(me, Self::TIMEOUT)
    }

    /// Takes the lock for the calling process `me`; None after `timeout`. A free lock is taken even with a timeout of zero.
    #[inline]
    pub fn lock_within(&self, me: u32, timeout: Duration) -> Option<RobustGuard<'_>> {
        let free = self.0.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok();
        (free || self.wait(me, timeout)).then(|| RobustGuard(&self.0))
    }

    /// Frees the lock if its holder has exited or executes another program. A new program of the holder may map the memory
    /// again, so the owner of the memory calls this when it notices that a process is gone.
    #[cfg(not(loom))]
    pub fn recover(&self) {
        recover(&self.0);
    }

    /// Frees the lock, regardless of the holder. For the owner of the memory before a new use of it.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Release);
    }

    #[cold]
    fn wait(&self, me: u32, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut watch = HolderWatch::new(&self.0);
        let mut reads = 0u32;
        loop {
            let owner = self.0.load(Ordering::Relaxed);
            let stale = owner != 0
                && reads % READS_PER_CHECK == READS_PER_CHECK - 1
                && owner != me
                && watch.is_gone(owner);
            let expected = if stale { owner } else { 0 };
            if (owner == 0 || stale)
                && self.0.compare_exchange(expected, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return true;
            }
            reads = reads.wrapping_add(1);
            if reads.is_multiple_of(READS_PER_CHECK) && !cfg!(loom) && Instant::now() > deadline {
                return false;
            }
            if reads.is_multiple_of(64) {
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
    }
}

/// Holds a [`RobustLock`] or a [`BiasedRobustLock`](crate::BiasedRobustLock).
#[derive(Debug)]
pub struct RobustGuard<'a>(&'a AtomicU32);

impl<'a> RobustGuard<'a> {
    /// A guard for a word that is nonzero while the lock is held.
    pub(crate) fn new(word: &'a AtomicU32) -> Self {
        Self(word)
    }

    /// Releases the lock with a full fence: later accesses are ordered after all earlier ones.
    #[inline]
    pub fn release_fenced(self) {
        self.0.swap(0, Ordering::SeqCst);
        // On x86 the store above is a full fence. Elsewhere a later load could still precede the store.
        if cfg!(any(loom, not(target_arch = "x86_64"))) {
            fence(Ordering::SeqCst);
        }
        std::mem::forget(self);
    }
}

impl Drop for RobustGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_taken_from_a_holder_that_exited() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let lock = RobustLock::default();
        std::mem::forget(lock.lock(child.id()));
        assert!(!has_exited(child.id()));
        child.kill().unwrap();
        // Not reaped yet: a zombie counts as exited.
        assert!(lock.lock(std::process::id()).is_some());
        child.wait().unwrap();
    }

    #[test]
    fn a_lock_is_taken_from_an_impossible_process_id() {
        // SAFETY: a plain system call.
        let thread = unsafe { libc::gettid() } as u32;
        assert_ne!(thread, std::process::id(), "tests run on threads of their own");
        for pid in [u32::MAX, 1 << 31, i32::MAX as u32, thread] {
            let lock = RobustLock(AtomicU32::new(pid));
            assert!(lock.lock(std::process::id()).is_some(), "{pid}");
        }
    }

    #[test]
    fn a_wait_for_a_running_holder_times_out() {
        let lock = RobustLock::default();
        let _held = lock.lock(std::process::id()).unwrap();
        assert!(!lock.wait(std::process::id(), Duration::from_millis(20)));
        assert!(lock.lock_within(std::process::id(), Duration::from_millis(20)).is_none());
        assert_eq!(lock.0.load(Ordering::Relaxed), std::process::id(), "the holder keeps it");
        // The parent runs, and never took the lock.
        let forged = RobustLock(AtomicU32::new(std::os::unix::process::parent_id()));
        assert!(!forged.wait(std::process::id(), Duration::from_millis(20)));
    }
}
