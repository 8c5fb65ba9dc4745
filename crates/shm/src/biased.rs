//! A lock for what one thread uses nearly always.
//!
//! A locked instruction waits for all stores before it, and on the data path those are stores to lines
//! that the peer's core holds: taking a free lock would cost more than the work under it. So a lock that
//! the same thread takes again and again becomes that thread's own, to be taken with plain stores.
//! The first other thread to come takes this away, with a fence in the owner's stead ([`barrier::heavy`]), and
//! the lock is an ordinary spin lock. It can become a thread's own again, but each time that takes longer: a
//! fence for all costs as much as some hundred locked instructions.
//!
//! ```text
//! for all ──64 times in a row by one thread──► that thread's own ──another thread comes──► for all
//!    ▲                                                                                        │
//!    └──────────────────────────────── eight times as often in a row ◄────────────────────────┘
//! ```

use crate::barrier;
use crate::spin::{self, SpinGuard};
use crate::sync::UnsafeCell;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Nobody's own; may become somebody's.
const NOBODY: usize = 0;
/// Nobody's own, and never will be.
const EVERYBODYS: usize = 1;

/// So often in a row the same thread takes the lock before it becomes its own: threads that set things
/// up for others are not the ones to favour.
const STREAK: u32 = if cfg!(loom) {
    1
} else if cfg!(miri) {
    4
} else {
    64
};
/// How much longer it takes every time, and how long at most.
const LONGER: u32 = if cfg!(loom) {
    1
} else if cfg!(miri) {
    2
} else {
    8
};
const LONGEST: u32 = 1 << 24;

/// See the module's description.
#[derive(Debug, Default)]
pub struct BiasedLock<T> {
    /// The thread whose own the lock is.
    owner: AtomicUsize,
    /// That thread holds it.
    inside: AtomicBool,
    /// A thread holds it that took it as everybody does.
    held: AtomicBool,
    // Of whoever set `held`.
    /// The last thread that took it so, and how often in a row.
    last: AtomicUsize,
    streak: AtomicU32,
    /// How often it takes; zero stands for [`STREAK`].
    needed: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands the value to one thread at a time.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

impl<T> BiasedLock<T> {
    /// A free lock around `value`.
    pub fn new(value: T) -> Self {
        Self {
            owner: AtomicUsize::new(NOBODY),
            inside: AtomicBool::new(false),
            held: AtomicBool::new(false),
            last: AtomicUsize::new(NOBODY),
            streak: AtomicU32::new(0),
            needed: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock.
    ///
    /// # Panics
    /// If it is the calling thread's own and that thread holds it already.
    #[inline(always)]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        let me = this_thread();
        if self.owner.load(Ordering::Relaxed) == me {
            assert!(!self.inside.load(Ordering::Relaxed), "a thread takes a lock that it holds");
            self.inside.store(true, Ordering::Relaxed);
            barrier::light(true);
            if self.owner.load(Ordering::Relaxed) == me {
                return SpinGuard::new(&self.inside, &self.value);
            }
            self.inside.store(false, Ordering::Release);
        }
        self.lock_as_all(me);
        SpinGuard::new(&self.held, &self.value)
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        let me = this_thread();
        if self.owner.load(Ordering::Relaxed) == me {
            let free = !self.inside.load(Ordering::Relaxed);
            return free.then(|| self.lock());
        }
        if !spin::take(&self.held) {
            return None;
        }
        self.claim(me);
        if self.inside.load(Ordering::Acquire) {
            self.held.store(false, Ordering::Release);
            return None;
        }
        Some(SpinGuard::new(&self.held, &self.value))
    }

    #[inline(never)]
    fn lock_as_all(&self, me: usize) {
        spin::acquire(&self.held);
        self.claim(me);
        spin::wait_while(&self.inside);
    }

    /// Sees to it that no thread comes in any more that does not look at `held`, which the caller has set.
    fn claim(&self, me: usize) {
        match self.owner.load(Ordering::Relaxed) {
            EVERYBODYS => {}
            NOBODY => self.count(me),
            _ => self.take_away(),
        }
    }

    /// Makes the lock this thread's own if it has taken it often enough. For this time it is held as
    /// everybody holds it.
    fn count(&self, me: usize) {
        if self.last.load(Ordering::Relaxed) != me {
            self.last.store(me, Ordering::Relaxed);
            self.streak.store(0, Ordering::Relaxed);
        }
        let streak = self.streak.load(Ordering::Relaxed) + 1;
        self.streak.store(streak, Ordering::Relaxed);
        if streak >= self.needed.load(Ordering::Relaxed).max(STREAK) {
            let own = me > EVERYBODYS && barrier::register();
            self.owner.store(if own { me } else { EVERYBODYS }, Ordering::Release);
        }
    }

    #[cold]
    fn take_away(&self) {
        self.owner.store(NOBODY, Ordering::SeqCst);
        // Now the owner either sees that, or is seen inside.
        barrier::heavy();
        self.streak.store(0, Ordering::Relaxed);
        let needed = self.needed.load(Ordering::Relaxed).max(STREAK);
        self.needed.store(needed.saturating_mul(LONGER).min(LONGEST), Ordering::Relaxed);
    }
}

/// A number that no other living thread has, above [`EVERYBODYS`]; [`EVERYBODYS`] where there is no cheap
/// one: the address of the thread's control block.
#[inline(always)]
fn this_thread() -> usize {
    #[cfg(loom)]
    {
        crate::model::this_thread()
    }
    // Miri has no assembler.
    #[cfg(miri)]
    {
        thread_local!(static BLOCK: u64 = const { 0 });
        BLOCK.with(|block| std::ptr::from_ref(block).addr())
    }
    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(any(loom, miri))))]
    {
        let block: usize;
        // SAFETY: the x86-64 ABI for thread-local storage keeps the block's own address there.
        unsafe {
            std::arch::asm!("mov {}, fs:0", out(reg) block, options(nostack, preserves_flags, readonly, pure));
        }
        block
    }
    #[cfg(all(target_arch = "aarch64", target_os = "linux", not(any(loom, miri))))]
    {
        let block: usize;
        // SAFETY: reads a register.
        unsafe { std::arch::asm!("mrs {}, tpidr_el0", out(reg) block, options(nostack, nomem, pure)) };
        block
    }
    #[cfg(not(any(
        loom,
        miri,
        all(any(target_arch = "x86_64", target_arch = "aarch64"), target_os = "linux")
    )))]
    {
        EVERYBODYS
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    // Miri takes a thousand times as long.
    const TURNS: u64 = if cfg!(miri) { 300 } else { 20_000 };
    const ROUNDS: u64 = if cfg!(miri) { 5 } else { 200 };

    #[test]
    fn becomes_the_own_of_who_uses_it_alone() {
        let lock = BiasedLock::new(0);
        (0..TURNS).for_each(|_| *lock.lock() += 1);
        let owner = lock.owner.load(Ordering::Relaxed);
        assert_eq!(owner, if barrier::register() { this_thread() } else { EVERYBODYS });
        assert_eq!(*lock.lock(), TURNS);
    }

    #[test]
    fn counts_are_not_lost_when_others_come() {
        for round in 0..ROUNDS {
            let lock = BiasedLock::new(0u64);
            let started = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for turn in 0..TURNS {
                        *lock.lock() += 1;
                        if turn == round {
                            started.store(1, Ordering::Release);
                        }
                    }
                });
                for _ in 0..2 {
                    scope.spawn(|| {
                        while started.load(Ordering::Acquire) == 0 {
                            std::hint::spin_loop();
                        }
                        (0..100).for_each(|_| *lock.lock() += 1);
                    });
                }
            });
            assert_eq!(*lock.lock(), TURNS + 200);
            assert_ne!(lock.owner.load(Ordering::Relaxed), this_thread(), "the main thread took it once");
        }
    }

    #[test]
    fn who_uses_it_alone_again_gets_it_back() {
        let lock = BiasedLock::new(0u32);
        let turns = |n: u32| (0..n).for_each(|_| *lock.lock() += 1);
        let mine = || lock.owner.load(Ordering::Relaxed) == this_thread() && this_thread() != EVERYBODYS;
        turns(STREAK);
        let had_it = mine();
        assert_eq!(had_it, barrier::register());
        for streak in [STREAK * LONGER, STREAK * LONGER * LONGER] {
            std::thread::scope(|scope| scope.spawn(|| turns(1)).join().unwrap());
            assert!(!mine());
            turns(streak - 1);
            assert!(!mine(), "it takes longer every time");
            turns(1);
            assert_eq!(mine(), had_it);
        }
        assert_eq!(*lock.lock(), STREAK * (1 + LONGER + LONGER * LONGER) + 2);
    }

    /// Threads that each use it for a while, so that it changes hands in all ways.
    #[test]
    fn counts_are_not_lost_when_it_comes_and_goes() {
        let lock = BiasedLock::new(0u64);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let lock = &lock;
                scope.spawn(move || {
                    for turn in 0..30 {
                        (0..STREAK * LONGER * 2).for_each(|_| *lock.lock() += 1);
                        if turn % 3 == thread {
                            std::thread::sleep(std::time::Duration::from_millis(2));
                        }
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 3 * 30 * u64::from(STREAK * LONGER * 2));
    }

    #[test]
    fn the_owner_is_waited_for() {
        let lock = BiasedLock::new(0);
        (0..=STREAK).for_each(|_| *lock.lock() += 1);
        let mut guard = lock.lock();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| *lock.lock());
            std::thread::sleep(std::time::Duration::from_millis(20));
            *guard = 1000;
            drop(guard);
            assert_eq!(other.join().unwrap(), 1000);
        });
    }

    #[test]
    fn a_try_does_not_wait() {
        for setting_up in [0, STREAK] {
            let lock = BiasedLock::new(());
            (0..setting_up).for_each(|_| drop(lock.lock()));
            let guard = lock.lock();
            assert!(lock.try_lock().is_none());
            std::thread::scope(|scope| {
                assert!(scope.spawn(|| lock.try_lock().is_none()).join().unwrap());
                // The first try has taken it away.
                assert!(scope.spawn(|| lock.try_lock().is_none()).join().unwrap());
            });
            drop(guard);
            assert!(std::thread::scope(|scope| scope.spawn(|| lock.try_lock().is_some()).join().unwrap()));
            assert!(lock.try_lock().is_some());
        }
    }

    #[test]
    #[should_panic(expected = "that it holds")]
    fn is_not_taken_twice() {
        let lock = BiasedLock::new(());
        (0..=STREAK).for_each(|_| drop(lock.lock()));
        if lock.owner.load(Ordering::Relaxed) == EVERYBODYS {
            panic!("not biased here; an ordinary lock would be waited for: that it holds");
        }
        let _guard = lock.lock();
        let _again = lock.lock();
    }
}
