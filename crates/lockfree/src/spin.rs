//! A spin lock for short critical sections inside one process.

use std::ops::{Deref, DerefMut};

use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{UnsafeCell, hint, thread};

/// A lock of one atomic exchange to acquire and one plain store to release. Waiters yield the core after a
/// while, because the holder may be preempted.
#[derive(Debug, Default)]
pub struct SpinLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands the value to one thread at a time.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    /// A free lock around `value`.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// A free lock around `value`. The model checker's atomics have no constant constructors.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Takes the lock.
    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        acquire(&self.held);
        SpinGuard::new(&self.held, &self.value)
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        (!self.held.load(Ordering::Relaxed) && take(&self.held))
            .then(|| SpinGuard::new(&self.held, &self.value))
    }

    /// A pointer to the value, for a caller that took the lock and forgot the guard.
    #[cfg(not(loom))]
    #[inline]
    pub const fn as_ptr(&self) -> *mut T {
        self.value.get()
    }

    /// Releases the lock without its guard.
    ///
    /// # Safety
    /// The caller must have taken the lock and forgotten the guard.
    #[inline]
    pub unsafe fn force_unlock(&self) {
        self.held.store(false, Ordering::Release);
    }
}

/// Takes a lock's flag if it is clear.
#[inline(always)]
pub(crate) fn take(held: &AtomicBool) -> bool {
    // Storing true over true has no effect on hardware. But the model checker orders that store freely, even
    // after the holder's release.
    if cfg!(loom) {
        held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    } else {
        !held.swap(true, Ordering::Acquire)
    }
}

/// Takes a lock's flag.
#[inline]
pub(crate) fn acquire(held: &AtomicBool) {
    if !take(held) {
        wait_and_acquire(held);
    }
}

#[cold]
fn wait_and_acquire(held: &AtomicBool) {
    loop {
        wait_while(held);
        if take(held) {
            return;
        }
    }
}

/// Waits until a flag is cleared. Yields the core after a while, because the holder may be preempted.
pub(crate) fn wait_while(held: &AtomicBool) {
    let mut turns = 0u32;
    while held.load(Ordering::Acquire) {
        turns = turns.wrapping_add(1);
        if turns.is_multiple_of(128) {
            thread::yield_now();
        } else {
            hint::spin_loop();
        }
    }
}

/// Holds a lock, for the thread that took it.
#[derive(Debug)]
pub struct SpinGuard<'a, T> {
    held: &'a AtomicBool,
    value: &'a UnsafeCell<T>,
}

impl<'a, T> SpinGuard<'a, T> {
    /// A guard for a thread that holds the lock around `value` until it clears `held`.
    #[inline(always)]
    pub(crate) fn new(held: &'a AtomicBool, value: &'a UnsafeCell<T>) -> Self {
        Self { held, value }
    }
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the guard is proof that this thread holds the lock.
        self.value.with(|value| unsafe { &*value })
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard is proof that this thread holds the lock.
        self.value.with_mut(|value| unsafe { &mut *value })
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.held.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_failed_try_lock_leaves_the_lock_held() {
        let lock = SpinLock::new(());
        let _guard = lock.lock();
        (0..2).for_each(|_| assert!(lock.try_lock().is_none()));
    }

    #[test]
    fn counts_are_not_lost() {
        const TURNS: u64 = if cfg!(miri) { 200 } else { 10_000 };
        let lock = Arc::new(SpinLock::new(0u64));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = lock.clone();
                std::thread::spawn(move || (0..TURNS).for_each(|_| *lock.lock() += 1))
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(*lock.lock(), 4 * TURNS);
    }
}
