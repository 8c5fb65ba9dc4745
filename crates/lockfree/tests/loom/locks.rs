//! The locks under contention, revocation, and the exit of holders.

use loom::thread;
use millstream_lockfree::sync::Arc;
use millstream_lockfree::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use millstream_lockfree::{BiasedLock, BiasedRobustLock, OwnerId, RobustLock, SpinLock, barrier, model};

use crate::check;

#[test]
fn a_spin_lock_is_exclusive() {
    check(|| {
        let lock = Arc::new(SpinLock::new(0));
        let other = {
            let lock = lock.clone();
            thread::spawn(move || {
                *lock.lock() += 1;
                lock.try_lock().map(|mut count| *count += 1).is_some()
            })
        };
        *lock.lock() += 1;
        let tried = other.join().unwrap();
        assert_eq!(*lock.lock(), 2 + u32::from(tried));
    });
}

/// One thread gets the bias while another one revokes it.
#[test]
fn a_biased_lock_is_exclusive_during_revocation() {
    check(|| {
        let lock = Arc::new(BiasedLock::new(0));
        *lock.lock() += 1;
        let other = {
            let lock = lock.clone();
            thread::spawn(move || *lock.lock() += 1)
        };
        *lock.lock() += 1;
        *lock.lock() += 1;
        other.join().unwrap();
        assert_eq!(*lock.lock(), 4);
    });
}

/// One thread gets the bias while another one tries the lock without waiting.
#[test]
fn a_biased_lock_is_exclusive_with_try_lock() {
    check(|| {
        let lock = Arc::new(BiasedLock::new(0));
        *lock.lock() += 1;
        let other = {
            let lock = lock.clone();
            thread::spawn(move || lock.try_lock().map(|mut count| *count += 1).is_some())
        };
        *lock.lock() += 1;
        let tried = other.join().unwrap();
        *lock.lock() += 1;
        assert_eq!(*lock.lock(), 3 + u32::from(tried));
    });
}

/// Two threads without the bias at first; each can get it. One of them can get it, lose it to the other, and come again
/// while the other has it. (With three threads, two would wait for each other in endless interleavings.)
#[test]
fn a_biased_lock_is_exclusive_for_any_bias() {
    check(|| {
        let lock = Arc::new(BiasedLock::new(0));
        let other = {
            let lock = lock.clone();
            thread::spawn(move || (0..3).for_each(|_| *lock.lock() += 1))
        };
        (0..2).for_each(|_| *lock.lock() += 1);
        other.join().unwrap();
        assert_eq!(*lock.lock(), 5);
    });
}

/// A process exits while it holds the lock. The next holder sees all of its stores.
#[test]
fn a_robust_lock_is_taken_only_from_an_exited_process() {
    check(|| {
        let shared = Arc::new((RobustLock::default(), AtomicU32::new(0)));
        let dying = {
            let shared = shared.clone();
            thread::spawn(move || {
                std::mem::forget(shared.0.lock(1));
                shared.1.store(1, Ordering::Relaxed);
                shared.1.store(2, Ordering::Relaxed);
                model::exit_process(1);
            })
        };
        let successor = {
            let shared = shared.clone();
            thread::spawn(move || {
                let _guard = shared.0.lock(2).unwrap();
                let found = shared.1.load(Ordering::Relaxed);
                // Before the other process took the lock, or after it exited.
                assert!(found == 0 || found == 2, "{found}");
                shared.1.store(0, Ordering::Relaxed);
            })
        };
        // The last one takes it from any that exited.
        dying.join().unwrap();
        successor.join().unwrap();
        assert!(shared.0.lock(3).is_some());
    });
}

/// Takes the lock and counts in two steps: an increment without mutual exclusion would be lost.
fn count_under((lock, count): &(BiasedRobustLock, AtomicU32), number: u32) {
    let _guard = lock.lock(OwnerId { pid: number, number }).unwrap().guard;
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// One owner has the bias while another one revokes it.
#[test]
fn a_biased_robust_lock_is_exclusive() {
    check(|| {
        let shared = Arc::new((BiasedRobustLock::default(), AtomicU32::new(0)));
        count_under(&shared, 1);
        let other = {
            let shared = shared.clone();
            thread::spawn(move || count_under(&shared, 2))
        };
        count_under(&shared, 1);
        count_under(&shared, 1);
        other.join().unwrap();
        count_under(&shared, 3);
        assert_eq!(shared.1.load(Ordering::Relaxed), 5);
    });
}

/// As `a_biased_lock_is_exclusive_for_any_bias`.
#[test]
fn a_biased_robust_lock_is_exclusive_for_any_bias() {
    check(|| {
        let shared = Arc::new((BiasedRobustLock::default(), AtomicU32::new(0)));
        let other = {
            let shared = shared.clone();
            thread::spawn(move || (0..3).for_each(|_| count_under(&shared, 2)))
        };
        (0..2).for_each(|_| count_under(&shared, 1));
        other.join().unwrap();
        count_under(&shared, 3);
        assert_eq!(shared.1.load(Ordering::Relaxed), 6);
    });
}

/// The biased owner exits while it holds the lock. The next owner gets it, and `same_owner` is false.
#[test]
fn a_biased_robust_lock_is_taken_only_from_an_exited_process() {
    check(|| {
        let shared = Arc::new((BiasedRobustLock::default(), AtomicU32::new(0)));
        drop(shared.0.lock(OwnerId { pid: 1, number: 1 }));
        let dying = {
            let shared = shared.clone();
            thread::spawn(move || {
                std::mem::forget(shared.0.lock(OwnerId { pid: 1, number: 1 }).unwrap().guard);
                shared.1.store(1, Ordering::Relaxed);
                shared.1.store(2, Ordering::Relaxed);
                model::exit_process(1);
            })
        };
        let acquired = shared.0.lock(OwnerId { pid: 2, number: 2 }).unwrap();
        assert!(!acquired.same_owner);
        let found = shared.1.load(Ordering::Relaxed);
        assert!(found == 0 || found == 2, "{found}");
        drop(acquired);
        dying.join().unwrap();
    });
}

/// The two sides of the asymmetric fence: the initiator announces and then checks, the owner withdraws and
/// then checks. Either the initiator finds the memory invalid, or the owner finds the announcement.
fn announce_and_withdraw(fence: impl Fn() + Clone + Send + Sync + 'static) {
    check(move || {
        let shared = Arc::new((AtomicBool::new(false), AtomicBool::new(true), AtomicBool::new(false)));
        let initiator = {
            let (shared, fence) = (shared.clone(), fence.clone());
            thread::spawn(move || {
                let (announced, valid, released) = &*shared;
                announced.store(true, Ordering::Relaxed);
                fence();
                if valid.load(Ordering::Acquire) {
                    assert!(!released.load(Ordering::Relaxed), "accessed after it was released");
                }
                announced.store(false, Ordering::Release);
            })
        };
        let (announced, valid, released) = &*shared;
        valid.store(false, Ordering::SeqCst);
        barrier::heavy();
        while announced.load(Ordering::Acquire) {
            thread::yield_now();
        }
        released.store(true, Ordering::Relaxed);
        initiator.join().unwrap();
    });
}

#[test]
fn an_announcement_is_seen_or_sees_the_withdrawal() {
    announce_and_withdraw(|| barrier::light(true));
}

/// The model can fail: without the fence that membarrier(2) provides, the checker finds the error.
#[test]
#[should_panic(expected = "accessed after it was released")]
fn without_the_fence_the_checker_finds_the_fault() {
    announce_and_withdraw(|| {});
}
