//! A lease for what one party of several processes uses nearly always.
//!
//! As [`BiasedLock`](crate::BiasedLock) for threads, and for the same reason: a locked instruction waits for all
//! stores before it, here those of a whole message. The party that takes the lease again and again gets it as its
//! own and takes it with plain stores; the next other one takes that away, with a fence in its stead, and the
//! lease is an ordinary one ([`LeaseLock`]) until somebody has used it alone for longer.
//!
//! A party is whoever takes one turn at a time by itself (a queue pair): it has a number that no other living
//! party has, in any process.

use std::time::{Duration, Instant};

use crate::barrier;
use crate::lease::{LeaseGuard, LeaseLock, TURNS, process_is_gone};
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::sync::{hint, thread};

/// Who wants a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Party {
    /// Its process.
    pub pid: u32,
    /// Its number; zero for one that never gets a lease as its own.
    pub number: u32,
}

impl Party {
    fn word(self) -> u64 {
        u64::from(self.pid) << 32 | u64::from(self.number)
    }
}

/// So often in a row a party takes the lease before it becomes its own; how much longer it takes every time,
/// and how long at most.
const STREAK: u32 = if cfg!(loom) { 1 } else { 64 };
const LONGER: u32 = if cfg!(loom) { 1 } else { 8 };
const LONGEST: u32 = 1 << 24;

/// An [`OwnLease`] that was taken.
#[derive(Debug)]
pub struct Taken<'a> {
    /// Holds it.
    pub guard: LeaseGuard<'a>,
    /// Nobody else can have held it since this party did.
    pub again: bool,
}

/// See the module's description. All zeros are a free one.
#[repr(C)]
#[derive(Debug, Default)]
pub struct OwnLease {
    /// The party whose own it is, zero if it is nobody's.
    owner: AtomicU64,
    /// The process of the owner that holds it as its own.
    inside: AtomicU32,
    /// Everybody takes this one, but for the owner.
    lease: LeaseLock,
    // Of whoever holds `lease`.
    /// The last party that took it so, and how often in a row.
    last: AtomicU64,
    streak: AtomicU32,
    /// How often it takes; zero stands for [`STREAK`].
    needed: AtomicU32,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<OwnLease>() == 32 && crate::PAGE.is_multiple_of(size_of::<OwnLease>()));

impl OwnLease {
    /// Takes the lease; None if its holder does not release it ([`LeaseLock::PATIENCE`]).
    #[inline(always)]
    pub fn lock(&self, me: Party) -> Option<Taken<'_>> {
        let word = me.word();
        if self.owner.load(Ordering::Relaxed) == word && me.number != 0 {
            self.inside.store(me.pid, Ordering::Relaxed);
            barrier::light(true);
            if self.owner.load(Ordering::Relaxed) == word {
                return Some(Taken { guard: LeaseGuard::new(&self.inside), again: true });
            }
            self.inside.store(0, Ordering::Release);
        }
        self.lock_as_all(me)
    }

    #[inline(never)]
    fn lock_as_all(&self, me: Party) -> Option<Taken<'_>> {
        let guard = self.lease.lock(me.pid)?;
        if self.owner.load(Ordering::Relaxed) == 0 {
            self.count(me);
        } else {
            self.take_away();
        }
        // If this gives up, the guard goes.
        (self.inside.load(Ordering::Acquire) == 0 || self.wait()).then_some(Taken { guard, again: false })
    }

    /// Makes it this party's own if it has taken it often enough. For this time it is held as all hold it.
    fn count(&self, me: Party) {
        if self.last.load(Ordering::Relaxed) != me.word() {
            self.last.store(me.word(), Ordering::Relaxed);
            self.streak.store(0, Ordering::Relaxed);
        }
        let streak = self.streak.load(Ordering::Relaxed).wrapping_add(1);
        self.streak.store(streak, Ordering::Relaxed);
        if streak >= self.needed.load(Ordering::Relaxed).max(STREAK) && me.number != 0 && barrier::register()
        {
            self.owner.store(me.word(), Ordering::Release);
        }
    }

    #[cold]
    fn take_away(&self) {
        self.owner.store(0, Ordering::SeqCst);
        // Now the owner either sees that, or is seen inside.
        barrier::heavy();
        if !barrier::register() {
            // The owner's system has the fence and ours has not (a filter of system calls): no processor keeps
            // a store to itself for that long.
            std::thread::sleep(Duration::from_millis(5));
        }
        self.streak.store(0, Ordering::Relaxed);
        let needed = self.needed.load(Ordering::Relaxed).max(STREAK);
        self.needed.store(needed.saturating_mul(LONGER).min(LONGEST), Ordering::Relaxed);
    }

    /// Waits until the former owner is out; false if it stays.
    #[cold]
    fn wait(&self) -> bool {
        let deadline = Instant::now() + LeaseLock::PATIENCE;
        for turns in 1u32.. {
            let holder = self.inside.load(Ordering::Acquire);
            if holder == 0 {
                return true;
            }
            match turns {
                _ if !turns.is_multiple_of(TURNS) => {
                    if turns.is_multiple_of(64) {
                        thread::yield_now();
                    } else {
                        hint::spin_loop();
                    }
                }
                _ if process_is_gone(holder) => {
                    // What it had not published is not there.
                    let _ = self.inside.compare_exchange(holder, 0, Ordering::AcqRel, Ordering::Relaxed);
                }
                _ if !cfg!(loom) && Instant::now() > deadline => return false,
                _ => {}
            }
        }
        false
    }

    /// Makes the lease free and nobody's, whoever holds it: for the owner of memory that begins a new life.
    pub fn reset(&self) {
        for word in [&self.owner, &self.last] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.inside, &self.streak, &self.needed] {
            word.store(0, Ordering::Relaxed);
        }
        self.lease.reset();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn party(number: u32) -> Party {
        Party { pid: std::process::id(), number }
    }

    fn turns(lease: &OwnLease, who: Party, count: u32) {
        (0..count).for_each(|_| drop(lease.lock(who).unwrap()));
    }

    #[test]
    fn becomes_the_own_of_who_uses_it_alone() {
        let lease = OwnLease::default();
        let owner = || lease.owner.load(Ordering::Relaxed);
        turns(&lease, party(0), 2 * STREAK);
        assert_eq!(owner(), 0, "it has no number");
        turns(&lease, party(1), STREAK);
        assert_eq!(lease.lock(party(1)).unwrap().again, barrier::register());
        let own = if barrier::register() { party(1).word() } else { 0 };
        assert_eq!(owner(), own);
        assert!(!lease.lock(party(2)).unwrap().again);
        assert_eq!(owner(), 0);
        assert!(!lease.lock(party(1)).unwrap().again);
        turns(&lease, party(1), STREAK * LONGER - 2);
        assert_eq!(owner(), 0, "it takes longer every time");
        turns(&lease, party(1), 1);
        assert_eq!(owner(), own);
    }

    #[test]
    fn one_party_at_a_time() {
        let lease = OwnLease::default();
        let count = AtomicU32::new(0);
        const TURNS: u32 = 3 * STREAK * LONGER;
        std::thread::scope(|scope| {
            for number in 1..=3 {
                let (lease, count) = (&lease, &count);
                scope.spawn(move || {
                    for turn in 0..10 * TURNS {
                        let guard = lease.lock(party(number)).unwrap().guard;
                        // Not one step: a turn that is not exclusive would be lost.
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
    fn taken_from_an_owner_that_died_inside() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let dead = Party { pid: child.id(), number: 7 };
        let lease = OwnLease::default();
        turns(&lease, dead, STREAK);
        std::mem::forget(lease.lock(dead).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(lease.lock(party(1)).is_some());
    }

    #[test]
    fn a_holder_that_stays_is_not_waited_for_without_end() {
        let lease = OwnLease::default();
        turns(&lease, party(1), STREAK);
        let held = lease.lock(party(1)).unwrap();
        assert!(lease.lock(party(2)).is_none());
        drop(held);
        assert!(lease.lock(party(2)).is_some(), "who gave up holds nothing");
    }
}
