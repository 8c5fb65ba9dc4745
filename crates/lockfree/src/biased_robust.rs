//! A robust lock that is biased towards the one owner that takes it nearly always.
//!
//! The counterpart of [`BiasedLock`](crate::BiasedLock) for processes. A locked instruction would wait for
//! all stores before it, here those of a whole message. An owner that takes the lock many times in a row gets
//! the bias. It then takes the lock with plain stores. The next other owner revokes the bias with a heavy
//! fence. The lock then is an ordinary [`RobustLock`] until one owner has used it alone for longer.
//!
//! An owner can be preempted between its look at the bias and its store to the word that says "held". The store must not
//! come when another owner holds the lock by the same word. So the bias passes to another owner only after the former one
//! has taken the lock without it, which proves that the store is done, or has exited.
//!
//! An owner, such as a queue pair, holds the lock at most once at a time. Its number is unique among all
//! running processes.

use std::time::{Duration, Instant};

use crate::barrier;
use crate::robust::{HolderWatch, READS_PER_CHECK, RobustGuard, RobustLock, has_exited};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{hint, thread};

/// Identifies an owner of a [`BiasedRobustLock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerId {
    /// Its process.
    pub pid: u32,
    /// Its number; zero for an owner that never gets the bias.
    pub number: u32,
}

impl OwnerId {
    fn word(self) -> u64 {
        u64::from(self.pid) << 32 | u64::from(self.number)
    }
}

/// Marks the former owner in [`BiasedRobustLock::biased_to`]. No process id has this bit.
const REVOKED: u64 = 1 << 63;

/// Acquisitions in a row before an owner first gets the bias.
const STREAK: u32 = if cfg!(loom) { 1 } else { 64 };
/// Factor by which each revocation lengthens the streak that is needed.
const STREAK_FACTOR: u32 = if cfg!(loom) { 1 } else { 8 };
/// Longest streak that is needed.
const MAX_STREAK: u32 = 1 << 24;

/// An acquired [`BiasedRobustLock`].
#[derive(Debug)]
pub struct Acquired<'a> {
    /// Holds the lock.
    pub guard: RobustGuard<'a>,
    /// No other owner can have held the lock since this one did.
    pub same_owner: bool,
}

/// A robust lock biased towards its most frequent owner. All zeros are a free lock without bias.
#[repr(C)]
#[derive(Debug, Default)]
pub struct BiasedRobustLock {
    /// The owner that has the bias, zero for none; with [`REVOKED`] an owner that had it and may not know that it ended.
    biased_to: AtomicU64,
    /// The process id of that owner while it holds the lock.
    held_biased: AtomicU32,
    /// The lock that all other owners take.
    lock: RobustLock,
    // Written by the holder of `lock`.
    /// The owner that took `lock` last, and how often in a row.
    last: AtomicU64,
    streak: AtomicU32,
    /// The streak that is needed for the bias; zero stands for [`STREAK`].
    needed: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<BiasedRobustLock>() == 32);

impl BiasedRobustLock {
    /// Takes the lock; None if its holder does not release it within [`RobustLock::TIMEOUT`].
    #[inline(always)]
    pub fn lock(&self, me: OwnerId) -> Option<Acquired<'_>> {
        let word = me.word();
        if self.biased_to.load(Ordering::Relaxed) == word && me.number != 0 {
            self.held_biased.store(me.pid, Ordering::Relaxed);
            barrier::light(true);
            if self.biased_to.load(Ordering::Relaxed) == word {
                return Some(Acquired { guard: RobustGuard::new(&self.held_biased), same_owner: true });
            }
            self.held_biased.store(0, Ordering::Release);
        }
        self.lock_unbiased(me)
    }

    /// Frees the lock if its holder has exited or executes another program, as [`RobustLock::recover`].
    #[cfg(not(loom))]
    pub fn recover(&self) {
        crate::robust::recover(&self.held_biased);
        self.lock.recover();
    }

    #[inline(never)]
    fn lock_unbiased(&self, me: OwnerId) -> Option<Acquired<'_>> {
        let guard = self.lock.lock(me.pid)?;
        match self.biased_to.load(Ordering::Relaxed) {
            0 => self.extend_streak(me),
            bias if bias & REVOKED != 0 => {
                if bias == me.word() | REVOKED {
                    self.biased_to.store(0, Ordering::Relaxed);
                }
                self.extend_streak(me);
            }
            bias => self.revoke(bias),
        }
        // After a timeout the guard is dropped.
        (self.held_biased.load(Ordering::Acquire) == 0 || self.wait_for_biased())
            .then_some(Acquired { guard, same_owner: false })
    }

    /// Counts this acquisition, and biases the lock to `me` if the streak is long enough. The current acquisition stays
    /// unbiased.
    fn extend_streak(&self, me: OwnerId) {
        if self.last.load(Ordering::Relaxed) != me.word() {
            self.last.store(me.word(), Ordering::Relaxed);
            self.streak.store(0, Ordering::Relaxed);
        }
        let streak = self.streak.load(Ordering::Relaxed).wrapping_add(1);
        self.streak.store(streak, Ordering::Relaxed);
        if streak >= self.needed.load(Ordering::Relaxed).max(STREAK) && me.number != 0 && barrier::register()
        {
            self.bias_to(me);
        }
    }

    #[cold]
    fn bias_to(&self, me: OwnerId) {
        let former = self.biased_to.load(Ordering::Relaxed);
        let former_pid = ((former & !REVOKED) >> 32) as u32;
        if former == 0 || has_exited(former_pid) {
            self.biased_to.store(me.word(), Ordering::Release);
        } else {
            // The question costs a few system calls, so it is asked more and more rarely.
            self.lengthen_streak();
        }
    }

    #[cold]
    fn revoke(&self, bias: u64) {
        self.biased_to.store(bias | REVOKED, Ordering::SeqCst);
        // Now either the biased owner sees the revocation, or this owner sees `held_biased`.
        barrier::heavy();
        if !barrier::register() {
            // The biased owner has membarrier and this process lacks it (seccomp). No processor delays a
            // store for this long.
            std::thread::sleep(Duration::from_millis(5));
        }
        self.lengthen_streak();
    }

    fn lengthen_streak(&self) {
        self.streak.store(0, Ordering::Relaxed);
        let needed = self.needed.load(Ordering::Relaxed).max(STREAK);
        self.needed.store(needed.saturating_mul(STREAK_FACTOR).min(MAX_STREAK), Ordering::Relaxed);
    }

    /// Waits until the former biased owner has released the lock; false after [`RobustLock::TIMEOUT`].
    #[cold]
    fn wait_for_biased(&self) -> bool {
        let deadline = Instant::now() + RobustLock::TIMEOUT;
        let mut watch = HolderWatch::new(&self.held_biased);
        for reads in 1u32.. {
            let holder = self.held_biased.load(Ordering::Acquire);
            if holder == 0 {
                return true;
            }
            match reads {
                _ if !reads.is_multiple_of(READS_PER_CHECK) => {
                    if reads.is_multiple_of(64) {
                        thread::yield_now();
                    } else {
                        hint::spin_loop();
                    }
                }
                _ if watch.is_gone(holder) => {
                    // An exited holder has published no incomplete change.
                    let _ = self.held_biased.compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
                }
                _ if !cfg!(loom) && Instant::now() > deadline => return false,
                _ => {}
            }
        }
        false
    }

    /// Frees the lock and removes the bias, regardless of the holder. For the owner of the memory before a
    /// new use of it.
    pub fn reset(&self) {
        for word in [&self.biased_to, &self.last] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.held_biased, &self.streak, &self.needed] {
            word.store(0, Ordering::Relaxed);
        }
        self.lock.reset();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn owner_id(number: u32) -> OwnerId {
        OwnerId { pid: std::process::id(), number }
    }

    fn turns(lock: &BiasedRobustLock, who: OwnerId, count: u32) {
        (0..count).for_each(|_| drop(lock.lock(who).unwrap()));
    }

    #[test]
    fn an_owner_that_is_alone_gets_the_bias() {
        let lock = BiasedRobustLock::default();
        let biased_to = || lock.biased_to.load(Ordering::Relaxed);
        turns(&lock, owner_id(0), 2 * STREAK);
        assert_eq!(biased_to(), 0, "number zero never gets the bias");
        turns(&lock, owner_id(1), STREAK);
        assert_eq!(lock.lock(owner_id(1)).unwrap().same_owner, barrier::register());
        let own = if barrier::register() { owner_id(1).word() } else { 0 };
        assert_eq!(biased_to(), own);
        assert!(!lock.lock(owner_id(2)).unwrap().same_owner);
        assert_eq!(biased_to(), own | if own == 0 { 0 } else { REVOKED });
        assert!(!lock.lock(owner_id(1)).unwrap().same_owner);
        assert_eq!(biased_to(), 0);
        turns(&lock, owner_id(1), STREAK * STREAK_FACTOR - 2);
        assert_eq!(biased_to(), 0, "each revocation lengthens the streak");
        turns(&lock, owner_id(1), 1);
        assert_eq!(biased_to(), own);
    }

    /// The former owner may be about to store that it holds the lock.
    #[test]
    fn the_bias_passes_on_once_the_former_owner_has_returned_or_exited() {
        let own = |who: OwnerId| if barrier::register() { who.word() } else { 0 };
        for exits in [false, true] {
            let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
            let first = OwnerId { pid: child.id(), number: 7 };
            let lock = BiasedRobustLock::default();
            let biased_to = || lock.biased_to.load(Ordering::Relaxed);
            turns(&lock, first, STREAK);
            assert_eq!(biased_to(), own(first));
            turns(&lock, owner_id(1), 2 * STREAK * STREAK_FACTOR);
            assert_ne!(biased_to(), owner_id(1).word());
            if exits {
                child.kill().unwrap();
                child.wait().unwrap();
            } else {
                turns(&lock, first, 1);
            }
            turns(&lock, owner_id(1), STREAK * STREAK_FACTOR * STREAK_FACTOR);
            assert_eq!(biased_to(), own(owner_id(1)));
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    #[test]
    fn one_owner_at_a_time() {
        let lock = BiasedRobustLock::default();
        let count = AtomicU32::new(0);
        const TURNS: u32 = 3 * STREAK * STREAK_FACTOR;
        std::thread::scope(|scope| {
            for number in 1..=3 {
                let (lock, count) = (&lock, &count);
                scope.spawn(move || {
                    for turn in 0..10 * TURNS {
                        let guard = lock.lock(owner_id(number)).unwrap().guard;
                        // Two steps: an increment without mutual exclusion would be lost.
                        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        if turn % 2 == 0 {
                            drop(guard)
                        } else {
                            guard.release_fenced()
                        }
                        if turn % TURNS == number * 100 {
                            std::thread::sleep(Duration::from_millis(3));
                        }
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 3 * 10 * TURNS);
    }

    #[test]
    fn the_lock_is_taken_from_a_biased_owner_that_exited() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let dead = OwnerId { pid: child.id(), number: 7 };
        let lock = BiasedRobustLock::default();
        turns(&lock, dead, STREAK);
        std::mem::forget(lock.lock(dead).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(lock.lock(owner_id(1)).is_some());
    }

    #[test]
    fn a_wait_for_a_running_biased_owner_times_out() {
        let lock = BiasedRobustLock::default();
        turns(&lock, owner_id(1), STREAK);
        let held = lock.lock(owner_id(1)).unwrap();
        assert!(lock.lock(owner_id(2)).is_none());
        drop(held);
        assert!(lock.lock(owner_id(2)).is_some(), "a timeout leaves nothing held");
    }
}
