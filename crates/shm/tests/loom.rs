//! The locks under a model checker: all orders in which a few threads can take, leave and lose them, with all that
//! weak memory lets them see. `make loom` runs this; otherwise there is nothing here.
#![cfg(loom)]

use loom::thread;
use millstream_shm::sync::Arc;
use millstream_shm::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use millstream_shm::{BiasedLock, LeaseLock, OwnLease, Party, SpinLock, barrier, model};

/// All orders with at most so many changes of thread where the running one could have gone on.
const PREEMPTIONS: usize = 5;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(model);
}

#[test]
fn a_spin_lock_is_held_by_one() {
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

/// One thread makes the lock its own while another comes to take it away.
#[test]
fn a_biased_lock_is_held_by_one_while_it_changes_hands() {
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

/// The same with a thread that does not wait.
#[test]
fn a_biased_lock_is_not_had_by_two_when_one_tries() {
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

/// Two threads of which none owns the lock at first, and each may. (Of three, two would wait for each other's
/// turns in endless orders.)
#[test]
fn a_biased_lock_is_held_by_one_whoever_owns_it() {
    check(|| {
        let lock = Arc::new(BiasedLock::new(0));
        let other = {
            let lock = lock.clone();
            thread::spawn(move || (0..2).for_each(|_| *lock.lock() += 1))
        };
        (0..2).for_each(|_| *lock.lock() += 1);
        other.join().unwrap();
        assert_eq!(*lock.lock(), 4);
    });
}

/// A process ends while it holds the lease, with its work half done or done: the next one finds one of the two.
#[test]
fn a_lease_is_taken_from_the_dead_and_only_from_them() {
    check(|| {
        let shared = Arc::new((LeaseLock::default(), AtomicU32::new(0)));
        let dying = {
            let shared = shared.clone();
            thread::spawn(move || {
                std::mem::forget(shared.0.lock(1));
                shared.1.store(1, Ordering::Relaxed);
                shared.1.store(2, Ordering::Relaxed);
                model::end_process(1);
            })
        };
        let heir = {
            let shared = shared.clone();
            thread::spawn(move || {
                let _lease = shared.0.lock(2).unwrap();
                let found = shared.1.load(Ordering::Relaxed);
                // Before the other's turn, or after its end.
                assert!(found == 0 || found == 2, "{found}");
                shared.1.store(0, Ordering::Relaxed);
            })
        };
        // Who comes last takes it from whoever is gone.
        dying.join().unwrap();
        heir.join().unwrap();
        assert!(shared.0.lock(3).is_some());
    });
}

/// A lease that one party has as its own, while another one comes to take it away.
#[test]
fn an_own_lease_is_held_by_one() {
    check(|| {
        let shared = Arc::new((OwnLease::default(), AtomicU32::new(0)));
        let turn = |(lease, count): &(OwnLease, AtomicU32), number| {
            let _guard = lease.lock(Party { pid: number, number }).unwrap().guard;
            // Not one step: a turn that is not exclusive would be lost.
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        };
        turn(&shared, 1);
        let other = {
            let shared = shared.clone();
            thread::spawn(move || turn(&shared, 2))
        };
        turn(&shared, 1);
        turn(&shared, 1);
        other.join().unwrap();
        turn(&shared, 3);
        assert_eq!(shared.1.load(Ordering::Relaxed), 5);
    });
}

/// Its owner ends inside: the next one gets it, and is told that it was somebody else's.
#[test]
fn an_own_lease_is_taken_from_the_dead_and_only_from_them() {
    check(|| {
        let shared = Arc::new((OwnLease::default(), AtomicU32::new(0)));
        drop(shared.0.lock(Party { pid: 1, number: 1 }));
        let dying = {
            let shared = shared.clone();
            thread::spawn(move || {
                std::mem::forget(shared.0.lock(Party { pid: 1, number: 1 }).unwrap().guard);
                shared.1.store(1, Ordering::Relaxed);
                shared.1.store(2, Ordering::Relaxed);
                model::end_process(1);
            })
        };
        let taken = shared.0.lock(Party { pid: 2, number: 2 }).unwrap();
        assert!(!taken.again);
        let found = shared.1.load(Ordering::Relaxed);
        assert!(found == 0 || found == 2, "{found}");
        drop(taken);
        dying.join().unwrap();
    });
}

/// What the two halves of the fence are for: who announces itself and then looks, against who withdraws and then looks
/// for announcements. Never does the first find the thing there while the second finds nobody inside. (The device's own
/// announcements are in its tests.)
fn announcement(fence: impl Fn() + Clone + Send + Sync + 'static) {
    check(move || {
        let shared = Arc::new((AtomicBool::new(false), AtomicBool::new(true), AtomicBool::new(false)));
        let initiator = {
            let (shared, fence) = (shared.clone(), fence.clone());
            thread::spawn(move || {
                let (inside, there, freed) = &*shared;
                inside.store(true, Ordering::Relaxed);
                fence();
                if there.load(Ordering::Acquire) {
                    assert!(!freed.load(Ordering::Relaxed), "touched after it was given back");
                }
                inside.store(false, Ordering::Release);
            })
        };
        let (inside, there, freed) = &*shared;
        there.store(false, Ordering::SeqCst);
        barrier::heavy();
        while inside.load(Ordering::Acquire) {
            thread::yield_now();
        }
        freed.store(true, Ordering::Relaxed);
        initiator.join().unwrap();
    });
}

#[test]
fn an_announcement_is_seen_or_sees() {
    announcement(|| barrier::light(true));
}

/// That the model can tell: without the fence, which membarrier(2) puts there, the same finds the fault.
#[test]
#[should_panic(expected = "touched after it was given back")]
fn without_the_fence_the_checker_finds_the_fault() {
    announcement(|| {});
}
