//! The lock-free parts of the device under a model checker: the files below with the checker's atomics, and nothing
//! else of the device. `make loom` runs this; otherwise there is nothing here.
#![cfg(loom)]
#![allow(dead_code, missing_docs, unreachable_pub, reason = "the files are also parts of the device")]

#[path = "../src/announce.rs"]
mod announce;
#[path = "../src/caps.rs"]
mod caps;
#[path = "../src/qp/care.rs"]
mod care;
#[path = "../src/clock.rs"]
mod clock;
#[path = "../src/cqe.rs"]
mod cqe;
#[path = "../src/mr/entry.rs"]
mod entry;
#[path = "../src/layout.rs"]
mod layout;
#[path = "../src/ring.rs"]
mod ring;

use std::ptr::NonNull;

use loom::thread;
use millstream_shm::sync::Arc;
use millstream_shm::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use millstream_shm::{Party, barrier, model};

use announce::Announcement;
use care::{Care, Found};
use cqe::{Cqe, Place};
use entry::Shown;
use layout::{ARM_ANY, ARM_NONE, CqRing, MrEntry};
use ring::{Entries, NotAdded, RemoteCq};

/// All orders with at most so many changes of thread where the running one could have gone on.
const PREEMPTIONS: usize = 5;

fn check(model: impl Fn() + Sync + Send + 'static) {
    check_with(PREEMPTIONS, model);
}

fn check_with(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// The shared half of a completion queue. It is never freed, as an arena is not.
#[derive(Clone, Copy)]
struct Queue {
    ring: &'static CqRing,
    places: &'static [Place],
}

impl Queue {
    fn new(entries: usize) -> Self {
        let ring = CqRing::default();
        ring.mask.store(entries as u32 - 1, Ordering::Relaxed);
        let places: Vec<Place> = (0..entries).map(|_| Place::default()).collect();
        Self { ring: Box::leak(Box::new(ring)), places: places.leak() }
    }

    fn base(&self) -> NonNull<u8> {
        NonNull::from(&self.places[0]).cast()
    }

    /// As a producer sees it.
    fn remote(&self) -> RemoteCq {
        // SAFETY: the entries, whose number the ring tells, live for ever; nothing else is looked at.
        unsafe { RemoteCq::new(self.base(), self.ring) }
    }

    /// As the consumer sees it.
    fn entries(&self) -> Entries {
        // SAFETY: the entries live for ever.
        unsafe { Entries::of(self.base(), self.places.len() as u32, false) }
    }
}

/// A completion each of whose parts says which it is.
fn completion(n: u32) -> Cqe {
    Cqe {
        qpn: n,
        sequence: n,
        byte_len: n,
        imm: n,
        wc_flags: n,
        detail: n,
        status: n as u16,
        opcode: n as u16,
    }
}

/// A producer that is a process of its own, which may get the lease as its own.
fn party(n: u32) -> Party {
    Party { pid: n, number: n }
}

/// What a consumer takes: whole completions, each once.
fn take(entries: &Entries, ring: &CqRing, head: &mut u32) -> Option<u32> {
    let cqe = entries.read(*head)?;
    assert_eq!(cqe, completion(cqe.qpn), "torn");
    *head += 1;
    ring.head.store(*head, Ordering::Release);
    Some(cqe.qpn)
}

#[test]
fn completions_of_two_producers_come_whole_and_once() {
    check(|| {
        let queue = Queue::new(2);
        let producer = thread::spawn(move || queue.remote().push(party(2), completion(2), false));
        let entries = queue.entries();
        let (mut head, mut found) = (0, 0);
        assert_eq!(queue.remote().push(party(1), completion(1), false), Ok(false));
        for _ in 0..2 {
            found += take(&entries, queue.ring, &mut head).unwrap_or(0);
        }
        assert_eq!(producer.join().unwrap(), Ok(false));
        while let Some(n) = take(&entries, queue.ring, &mut head) {
            found += n;
        }
        assert_eq!((head, found), (2, 3));
    });
}

/// A ring of one entry, so that every completion needs the consumer: what is not taken is not stored over.
#[test]
fn a_full_ring_takes_nothing() {
    check(|| {
        let queue = Queue::new(1);
        let producer = thread::spawn(move || {
            let remote = queue.remote();
            (1..=2)
                .map(|n| u32::from(remote.push(party(1), completion(n), false) != Err(NotAdded::Full)))
                .sum::<u32>()
        });
        let entries = queue.entries();
        let (mut head, mut found) = (0, 0);
        (0..2).for_each(|_| found += u32::from(take(&entries, queue.ring, &mut head).is_some()));
        let added = producer.join().unwrap();
        found += u32::from(take(&entries, queue.ring, &mut head).is_some());
        assert_eq!(found, added);
        assert_eq!(queue.ring.overrun.load(Ordering::Relaxed), u32::from(added == 1));
    });
}

/// Two completions at once beside a third: all or none of them, next to each other.
#[test]
fn completions_that_are_added_together_stay_together() {
    check(|| {
        let queue = Queue::new(4);
        let producer =
            thread::spawn(move || queue.remote().push_all(party(1), 2, |turn| completion(1 + turn), false));
        assert_eq!(queue.remote().push(party(2), completion(3), false), Ok(false));
        let entries = queue.entries();
        let (mut head, mut found) = (0, Vec::new());
        (0..3).for_each(|_| found.extend(take(&entries, queue.ring, &mut head)));
        assert_eq!(producer.join().unwrap(), Ok(false));
        while let Some(n) = take(&entries, queue.ring, &mut head) {
            found.push(n);
        }
        assert!(matches!(found[..], [1, 2, 3] | [3, 1, 2]), "{found:?}");
    });
}

/// Room for one of two: the queue takes neither, and is not lost.
#[test]
fn a_ring_takes_all_or_none() {
    check(|| {
        let queue = Queue::new(2);
        let producer = thread::spawn(move || {
            let remote = queue.remote();
            assert_eq!(remote.push(party(1), completion(1), false), Ok(false));
            remote.push_all(party(1), 2, |turn| completion(2 + turn), false)
        });
        let entries = queue.entries();
        let (mut head, mut found) = (0, Vec::new());
        (0..2).for_each(|_| found.extend(take(&entries, queue.ring, &mut head)));
        let added = producer.join().unwrap();
        while let Some(n) = take(&entries, queue.ring, &mut head) {
            found.push(n);
        }
        match added {
            Ok(false) => assert_eq!(found, [1, 2, 3]),
            other => assert_eq!((other, &found[..]), (Err(NotAdded::Full), &[1][..])),
        }
        assert_eq!(queue.ring.overrun.load(Ordering::Relaxed), 0);
    });
}

/// A producer ends after it has published a completion, and before it has counted it.
#[test]
fn a_completion_that_a_dead_producer_published_is_not_stored_over() {
    check(|| {
        let queue = Queue::new(2);
        let dying = thread::spawn(move || {
            std::mem::forget(queue.ring.lock.lock(party(1)));
            let tail = queue.ring.tail.load(Ordering::Relaxed);
            queue.places[(tail & 1) as usize].publish(completion(1), tail + 1);
            model::end_process(1);
        });
        assert_eq!(queue.remote().push(party(2), completion(2), false), Ok(false));
        dying.join().unwrap();
        let entries = queue.entries();
        let mut head = 0;
        let found = [(); 2].map(|()| take(&entries, queue.ring, &mut head));
        assert!(matches!(found, [Some(1), Some(2)] | [Some(2), Some(1)]), "{found:?}");
    });
}

/// The consumer says that it wants to be told, looks once more, and sleeps; the producer adds, and looks whether it
/// has to tell. Never does one sleep over what the other has added without a word.
#[test]
fn a_wish_is_seen_or_the_completion_is() {
    check(|| {
        let queue = Queue::new(1);
        queue.ring.channel.store(7, Ordering::Relaxed);
        let producer = thread::spawn(move || queue.remote().push(party(1), completion(1), false));
        // As `Cq::arm` and the poll after it.
        queue.ring.armed.store(ARM_ANY, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = queue.entries().read(0).is_some();
        let told = producer.join().unwrap() == Ok(true);
        assert!(seen || told);
        assert_eq!(queue.ring.armed.load(Ordering::Relaxed) == ARM_NONE, told);
        assert_eq!(queue.ring.events.load(Ordering::Relaxed), u32::from(told));
    });
}

/// Moderated events: two producers, one event for two completions, and the first one starts the clock.
#[test]
fn moderated_events_are_counted_once() {
    check(|| {
        let queue = Queue::new(2);
        queue.ring.channel.store(7, Ordering::Relaxed);
        queue.ring.timer.store(1, Ordering::Relaxed);
        queue.ring.moderation.store(2, Ordering::Relaxed);
        queue.ring.armed.store(ARM_ANY, Ordering::Relaxed);
        let push = move |me: u32| {
            let remote = queue.remote();
            remote.push(party(me), completion(me), false).unwrap().then(|| remote.channel())
        };
        let other = thread::spawn(move || push(2));
        let mut told = [push(1), other.join().unwrap()];
        told.sort_unstable();
        assert_eq!(told, [Some(1), Some(7)]);
        assert_eq!(queue.ring.events.load(Ordering::Relaxed), 1);
    });
}

/// Who parks a request, under the send queue's lock, and the thread that looks after it: a request that is parked is
/// looked after, or the thread is told.
#[test]
fn what_is_parked_is_looked_after() {
    check(|| {
        let shared = Arc::new((Care::default(), AtomicU32::new(0), AtomicBool::new(false)));
        // Parked, and with the thread.
        assert!(shared.0.begin());
        let owner = {
            let shared = shared.clone();
            thread::spawn(move || {
                // The first request is done, and another one is parked.
                shared.0.end();
                if shared.0.begin() {
                    shared.1.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let comes_back = shared.0.look() != Found::Nothing;
        owner.join().unwrap();
        let told = shared.1.load(Ordering::Relaxed);
        assert_eq!(u32::from(comes_back) + told, 1, "by exactly one");
    });
}

/// What an entry shows in one life: each field says which.
fn shown(life: u64) -> Shown {
    let small = life as u32;
    Shown {
        access: small,
        pd: small,
        start: life,
        len: life,
        va: life,
        file: (small, small),
        mapped: life..life,
        offset: life,
        qpn: small,
    }
}

/// The name of an entry whose key came back in another life.
fn name(life: u64) -> u64 {
    life << 32 | 7
}

/// A key comes back, so that only the count of lives tells the old region from the new one: who reads in that moment
/// gets one of the two whole, or nothing.
#[test]
fn a_memory_key_is_read_whole_or_not_at_all() {
    // Each of eleven fields is read in all its versions: fewer changes of thread suffice.
    check_with(3, || {
        let entry = Arc::new(MrEntry::default());
        entry.show(name(1), &shown(1));
        let reader = {
            let entry = entry.clone();
            thread::spawn(move || entry.read(7))
        };
        entry.hide();
        entry.show(name(2), &shown(2));
        if let Some((found, what)) = reader.join().unwrap() {
            assert_eq!((found, what), (name(found >> 32), shown(found >> 32)), "torn");
        }
        assert_eq!(entry.read(7), Some((name(2), shown(2))));
    });
}

/// Behind every WRITE: an initiator that knows a memory key announces itself, looks whether the key still has its name,
/// and copies; the owner withdraws the key, and takes the memory away when nobody is inside.
#[test]
fn memory_is_not_touched_after_its_key_was_withdrawn() {
    check(|| {
        let shared = Arc::new((Announcement::default(), AtomicBool::new(false), MrEntry::default()));
        shared.2.show(name(1), &shown(1));
        let initiator = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (inside, taken_away, entry) = &*shared;
                let mut said = inside.last();
                // Two requests, of which the second begins where the first one ends.
                for _ in 0..2 {
                    inside.begin(&mut said, true);
                    if entry.has(name(1)) {
                        assert!(!taken_away.load(Ordering::Relaxed), "touched after it was taken away");
                    }
                }
                inside.end(&mut said);
            })
        };
        let (inside, taken_away, entry) = &*shared;
        // As `MrTable::withdraw` and `Qp::wait_while_busy`.
        entry.hide();
        barrier::heavy();
        if let Some(operation) = inside.under_way() {
            while !inside.is_over(operation) {
                thread::yield_now();
            }
        }
        taken_away.store(true, Ordering::Relaxed);
        initiator.join().unwrap();
    });
}

/// Two peers and the owner end a window of type 2 at once: one of them does.
#[test]
fn a_window_is_invalidated_once() {
    check(|| {
        let entry = Arc::new(MrEntry::default());
        entry.show(name(1), &shown(1));
        let other = {
            let entry = entry.clone();
            thread::spawn(move || entry.end(name(1)))
        };
        let here = entry.end(name(1));
        assert_ne!(here, other.join().unwrap());
        assert!(!entry.has(name(1)));
    });
}
