//! A spin lock that is biased towards the one thread that takes it nearly always.
//!
//! A locked instruction waits for all stores before it. On the data path those stores go to cache lines that
//! the peer's core holds. Taking a free lock would therefore cost more than the work under it. A thread that
//! takes the lock many times in a row gets the bias. It then takes the lock with plain stores. The first
//! other thread revokes the bias with a heavy fence ([`barrier::heavy`]), and the lock is an ordinary spin
//! lock. It can become biased again, but each revocation lengthens the streak that is needed: a heavy fence
//! costs as much as some hundred locked instructions.
//!
//! ```text
//! unbiased ──64 acquisitions in a row by one thread──► biased ──another thread──► unbiased
//!    ▲                                                                               │
//!    └─────────────────────── a streak eight times as long ◄─────────────────────────┘
//! ```
//!
//! A thread can be preempted between its look at the bias and its store to the flag that says "held". The store may come
//! when another thread has the bias. So each thread that ever gets the bias has a flag of its own, and a late store
//! disturbs nobody. There are [`SLOTS`] flags; further threads get no bias.

use crate::barrier;
use crate::spin::{self, SpinGuard};
use crate::sync::UnsafeCell;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The lock is not biased, and may become biased.
const UNBIASED: usize = 0;
/// The lock is not biased, and never will be.
const NEVER_BIASED: usize = 1;

/// Acquisitions in a row before a thread first gets the bias. A thread that only initialises the object must
/// not get it.
const STREAK: u32 = if cfg!(loom) {
    1
} else if cfg!(miri) {
    4
} else {
    64
};
/// Factor by which each revocation lengthens the streak that is needed.
const STREAK_FACTOR: u32 = if cfg!(loom) {
    1
} else if cfg!(miri) {
    2
} else {
    8
};
/// Longest streak that is needed.
const MAX_STREAK: u32 = 1 << 24;

/// Threads that can get the bias of one lock, one after another. The low bits of [`BiasedLock::biased_to`] are the slot.
const SLOTS: usize = 4;

/// A spin lock biased towards its most frequent thread. What that thread uses comes first, together.
#[derive(Debug, Default)]
#[repr(C)]
pub struct BiasedLock<T> {
    /// The thread that has the bias and its slot, [`UNBIASED`] or [`NEVER_BIASED`].
    biased_to: AtomicUsize,
    /// The thread of this slot holds the lock, if it has the bias. Only that thread writes here.
    held_biased: [AtomicBool; SLOTS],
    /// A thread without the bias holds the lock.
    held: AtomicBool,
    value: UnsafeCell<T>,
    // Written by the holder of `held`.
    /// The threads of the slots; zero for a free slot.
    owners: [AtomicUsize; SLOTS],
    /// The slot of the thread that got the bias last. It may hold the lock after a revocation.
    slot: AtomicUsize,
    /// The thread that took `held` last, and how often in a row.
    last: AtomicUsize,
    streak: AtomicU32,
    /// The streak that is needed for the bias; zero stands for [`STREAK`].
    needed: AtomicU32,
}

// SAFETY: the lock hands the value to one thread at a time.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

impl<T> BiasedLock<T> {
    /// A free lock around `value`.
    pub fn new(value: T) -> Self {
        Self {
            biased_to: AtomicUsize::new(UNBIASED),
            held_biased: Default::default(),
            held: AtomicBool::new(false),
            owners: Default::default(),
            slot: AtomicUsize::new(0),
            last: AtomicUsize::new(UNBIASED),
            streak: AtomicU32::new(0),
            needed: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock.
    ///
    /// # Panics
    /// If the calling thread has the bias and holds the lock already.
    #[inline(always)]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        let me = this_thread();
        let bias = self.biased_to.load(Ordering::Relaxed);
        if let Some(held) = self.held_biased.get(slot_of(bias, me)) {
            assert!(!held.load(Ordering::Relaxed), "BiasedLock: the calling thread already holds this lock");
            held.store(true, Ordering::Relaxed);
            barrier::light(true);
            if self.biased_to.load(Ordering::Relaxed) == bias {
                return SpinGuard::new(held, &self.value);
            }
            held.store(false, Ordering::Release);
        }
        self.lock_unbiased(me);
        SpinGuard::new(&self.held, &self.value)
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        let me = this_thread();
        let bias = self.biased_to.load(Ordering::Relaxed);
        if let Some(held) = self.held_biased.get(slot_of(bias, me)) {
            return (!held.load(Ordering::Relaxed)).then(|| self.lock());
        }
        if !spin::take(&self.held) {
            return None;
        }
        let (flag, revoked) = self.former_flag();
        if flag.load(Ordering::Acquire) {
            self.held.store(false, Ordering::Release);
            return None;
        }
        if !revoked {
            self.extend_streak(me);
        }
        Some(SpinGuard::new(&self.held, &self.value))
    }

    #[inline(never)]
    fn lock_unbiased(&self, me: usize) {
        spin::acquire(&self.held);
        let (flag, revoked) = self.former_flag();
        spin::wait_while(flag);
        if !revoked {
            self.extend_streak(me);
        }
    }

    /// Revokes the bias of another thread. The flag that the thread that had the bias last may hold the lock with, and
    /// whether the bias was revoked now. The caller has set `held`.
    fn former_flag(&self) -> (&AtomicBool, bool) {
        let revoked = !matches!(self.biased_to.load(Ordering::Relaxed), UNBIASED | NEVER_BIASED);
        if revoked {
            self.revoke();
        }
        (&self.held_biased[self.slot.load(Ordering::Relaxed) % SLOTS], revoked)
    }

    /// Counts this acquisition, and biases the lock to `me` if the streak is long enough. The current acquisition
    /// stays unbiased. The caller has the lock, so no thread with a flag is inside.
    fn extend_streak(&self, me: usize) {
        if self.biased_to.load(Ordering::Relaxed) == NEVER_BIASED {
            return;
        }
        if self.last.load(Ordering::Relaxed) != me {
            self.last.store(me, Ordering::Relaxed);
            self.streak.store(0, Ordering::Relaxed);
        }
        let streak = self.streak.load(Ordering::Relaxed).wrapping_add(1);
        self.streak.store(streak, Ordering::Relaxed);
        if streak >= self.needed.load(Ordering::Relaxed).max(STREAK) {
            self.bias_to(me);
        }
    }

    #[cold]
    fn bias_to(&self, me: usize) {
        if owner_of(me) != me || !barrier::register() {
            self.biased_to.store(NEVER_BIASED, Ordering::Release);
            return;
        }
        let owner = |slot: usize| self.owners[slot].load(Ordering::Relaxed);
        match (0..SLOTS).find(|&slot| [UNBIASED, me].contains(&owner(slot))) {
            Some(slot) => {
                self.owners[slot].store(me, Ordering::Relaxed);
                self.slot.store(slot, Ordering::Relaxed);
                self.biased_to.store(me | slot, Ordering::Release);
            }
            None => self.streak.store(0, Ordering::Relaxed),
        }
    }

    #[cold]
    fn revoke(&self) {
        self.biased_to.store(UNBIASED, Ordering::SeqCst);
        // Now either the biased thread sees the revocation, or this thread sees `held_biased`.
        barrier::heavy();
        self.streak.store(0, Ordering::Relaxed);
        let needed = self.needed.load(Ordering::Relaxed).max(STREAK);
        self.needed.store(needed.saturating_mul(STREAK_FACTOR).min(MAX_STREAK), Ordering::Relaxed);
    }
}

/// The slot in a value of [`BiasedLock::biased_to`] if it has the thread `me`, else a greater number.
#[inline(always)]
const fn slot_of(bias: usize, me: usize) -> usize {
    bias ^ me
}

/// The thread in a value of [`BiasedLock::biased_to`].
const fn owner_of(bias: usize) -> usize {
    bias & !(SLOTS - 1)
}

/// A number that no other living thread has, a multiple of [`SLOTS`] above zero: the address of the thread's control block. All
/// ones where there is no cheap one.
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
        usize::MAX
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    // Fewer under Miri, which is a thousand times slower.
    const TURNS: u64 = if cfg!(miri) { 300 } else { 20_000 };
    const ROUNDS: u64 = if cfg!(miri) { 5 } else { 200 };

    #[test]
    fn a_thread_that_is_alone_gets_the_bias() {
        let lock = BiasedLock::new(0);
        (0..TURNS).for_each(|_| *lock.lock() += 1);
        let biased_to = owner_of(lock.biased_to.load(Ordering::Relaxed));
        assert_eq!(biased_to, if barrier::register() { this_thread() } else { UNBIASED });
        assert_eq!(*lock.lock(), TURNS);
    }

    #[test]
    fn counts_are_not_lost_on_revocation() {
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
            assert_ne!(
                owner_of(lock.biased_to.load(Ordering::Relaxed)),
                this_thread(),
                "the main thread took the lock once"
            );
        }
    }

    #[test]
    fn a_longer_streak_restores_the_bias() {
        let lock = BiasedLock::new(0u32);
        let turns = |n: u32| (0..n).for_each(|_| *lock.lock() += 1);
        let mine = || owner_of(lock.biased_to.load(Ordering::Relaxed)) == this_thread();
        turns(STREAK);
        let had_it = mine();
        assert_eq!(had_it, barrier::register());
        for streak in [STREAK * STREAK_FACTOR, STREAK * STREAK_FACTOR * STREAK_FACTOR] {
            std::thread::scope(|scope| scope.spawn(|| turns(1)).join().unwrap());
            assert!(!mine());
            turns(streak - 1);
            assert!(!mine(), "each revocation lengthens the streak");
            turns(1);
            assert_eq!(mine(), had_it);
        }
        assert_eq!(*lock.lock(), STREAK * (1 + STREAK_FACTOR + STREAK_FACTOR * STREAK_FACTOR) + 2);
    }

    /// Threads that each use the lock for a while, so that the bias moves between all of them.
    #[test]
    fn counts_are_not_lost_when_the_bias_moves() {
        let lock = BiasedLock::new(0u64);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let lock = &lock;
                scope.spawn(move || {
                    for turn in 0..30 {
                        (0..STREAK * STREAK_FACTOR * 2).for_each(|_| *lock.lock() += 1);
                        if turn % 3 == thread {
                            std::thread::sleep(std::time::Duration::from_millis(2));
                        }
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 3 * 30 * u64::from(STREAK * STREAK_FACTOR * 2));
    }

    /// More threads than slots, one after another.
    #[test]
    fn a_few_threads_can_get_the_bias() {
        let lock = BiasedLock::new(0u32);
        let mut threads = Vec::new();
        let mut streak = STREAK;
        // All threads live at once, so that their numbers differ.
        std::thread::scope(|scope| {
            for nth in 0..=SLOTS {
                let (done, wait) = std::sync::mpsc::channel::<()>();
                let (lock, turns) = (&lock, streak + 1);
                let (tell, has_it) = std::sync::mpsc::channel();
                scope.spawn(move || {
                    (0..turns).for_each(|_| *lock.lock() += 1);
                    tell.send(owner_of(lock.biased_to.load(Ordering::Relaxed)) == this_thread()).unwrap();
                    let _ = wait.recv();
                });
                assert_eq!(has_it.recv().unwrap(), nth < SLOTS && barrier::register());
                threads.push(done);
                if nth + 1 < SLOTS {
                    streak *= STREAK_FACTOR;
                }
            }
            threads.clear();
        });
    }

    #[test]
    fn the_biased_holder_is_waited_for() {
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
                // The first attempt has revoked the bias.
                assert!(scope.spawn(|| lock.try_lock().is_none()).join().unwrap());
            });
            drop(guard);
            assert!(std::thread::scope(|scope| scope.spawn(|| lock.try_lock().is_some()).join().unwrap()));
            assert!(lock.try_lock().is_some());
        }
    }

    #[test]
    #[should_panic(expected = "already holds this lock")]
    fn a_recursive_acquisition_panics() {
        let lock = BiasedLock::new(());
        (0..=STREAK).for_each(|_| drop(lock.lock()));
        if lock.biased_to.load(Ordering::Relaxed) == NEVER_BIASED {
            panic!("not biased here; an ordinary lock would deadlock: already holds this lock");
        }
        let _guard = lock.lock();
        let _again = lock.lock();
    }
}
