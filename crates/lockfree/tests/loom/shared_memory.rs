//! Completion rings, memory key entries and announcements between processes.

use std::ptr::NonNull;

use loom::thread;
use millstream_lockfree::cq_ring::{ARM_ANY, ARM_NONE, CqEntries, CqProducer, CqRing, PushError};
use millstream_lockfree::cqe::{Cqe, CqeSlot};
use millstream_lockfree::inflight_op::InflightOp;
use millstream_lockfree::mr_entry::{self, MappedFile, MrDescriptor, MrEntry};
use millstream_lockfree::retry_owner::{RetryCheck, RetryOwner};
use millstream_lockfree::srq_limit::SrqLimitWord;
use millstream_lockfree::sync::Arc;
use millstream_lockfree::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use millstream_lockfree::timer::{Deadline, NextExpiry};
use millstream_lockfree::word_ring::{AwaitedEntries, SleepFlag, WordRing};
use millstream_lockfree::{OwnerId, barrier, model};

use crate::{check, check_with};

/// The shared half of a completion queue. It is never freed, like an arena.
#[derive(Clone, Copy)]
struct Queue {
    ring: &'static CqRing,
    slots: &'static [CqeSlot],
}

impl Queue {
    fn new(entries: usize) -> Self {
        let ring = CqRing::default();
        ring.mask.store(entries as u32 - 1, Ordering::Relaxed);
        let slots: Vec<CqeSlot> = (0..entries).map(|_| CqeSlot::default()).collect();
        Self { ring: Box::leak(Box::new(ring)), slots: slots.leak() }
    }

    fn memory(&self) -> NonNull<[u8]> {
        let base = NonNull::from(&self.slots[0]).cast();
        NonNull::slice_from_raw_parts(base, size_of_val(self.slots))
    }

    fn producer(&self) -> CqProducer<&'static CqRing> {
        // SAFETY: the slots are never freed.
        unsafe { CqProducer::new(self.memory(), self.ring) }
    }

    /// The consumer's view.
    fn entries(&self) -> CqEntries {
        // SAFETY: the slots are never freed.
        unsafe { CqEntries::new(self.memory().cast(), self.slots.len() as u32, false) }
    }
}

/// A completion whose every field is its number.
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
        solicited: false,
    }
}

/// A producer in another process, which can get the lock's bias.
fn owner_id(n: u32) -> OwnerId {
    OwnerId { pid: n, number: n }
}

/// The consumer polls one completion, and checks that it is whole.
fn poll(entries: &CqEntries, ring: &CqRing, head: &mut u32) -> Option<u32> {
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
        let producer = thread::spawn(move || queue.producer().push(owner_id(2), completion(2), false));
        let entries = queue.entries();
        let (mut head, mut found) = (0, 0);
        assert_eq!(queue.producer().push(owner_id(1), completion(1), false), Ok(false));
        for _ in 0..2 {
            found += poll(&entries, queue.ring, &mut head).unwrap_or(0);
        }
        assert_eq!(producer.join().unwrap(), Ok(false));
        while let Some(n) = poll(&entries, queue.ring, &mut head) {
            found += n;
        }
        assert_eq!((head, found), (2, 3));
    });
}

/// A ring of one entry, so that every completion needs the consumer: a pending completion is not overwritten.
#[test]
fn a_full_ring_accepts_nothing() {
    check(|| {
        let queue = Queue::new(1);
        let producer = thread::spawn(move || {
            let producer = queue.producer();
            (1..=2)
                .map(|n| u32::from(producer.push(owner_id(1), completion(n), false) != Err(PushError::Full)))
                .sum::<u32>()
        });
        let entries = queue.entries();
        let (mut head, mut found) = (0, 0);
        (0..2).for_each(|_| found += u32::from(poll(&entries, queue.ring, &mut head).is_some()));
        let added = producer.join().unwrap();
        found += u32::from(poll(&entries, queue.ring, &mut head).is_some());
        assert_eq!(found, added);
        assert_eq!(queue.ring.overrun.load(Ordering::Relaxed), u32::from(added == 1));
    });
}

/// One producer adds two completions together, another one a third: the two stay adjacent.
#[test]
fn completions_that_are_added_together_stay_together() {
    check(|| {
        let queue = Queue::new(4);
        let producer = thread::spawn(move || {
            queue.producer().push_all(owner_id(1), 2, |turn| completion(1 + turn), false)
        });
        assert_eq!(queue.producer().push(owner_id(2), completion(3), false), Ok(false));
        let entries = queue.entries();
        let (mut head, mut found) = (0, Vec::new());
        (0..3).for_each(|_| found.extend(poll(&entries, queue.ring, &mut head)));
        assert_eq!(producer.join().unwrap(), Ok(false));
        while let Some(n) = poll(&entries, queue.ring, &mut head) {
            found.push(n);
        }
        assert!(matches!(found[..], [1, 2, 3] | [3, 1, 2]), "{found:?}");
    });
}

/// Room for one of two: the queue accepts neither, and does not overrun.
#[test]
fn a_ring_accepts_all_or_none() {
    check(|| {
        let queue = Queue::new(2);
        let producer = thread::spawn(move || {
            let producer = queue.producer();
            assert_eq!(producer.push(owner_id(1), completion(1), false), Ok(false));
            producer.push_all(owner_id(1), 2, |turn| completion(2 + turn), false)
        });
        let entries = queue.entries();
        let (mut head, mut found) = (0, Vec::new());
        (0..2).for_each(|_| found.extend(poll(&entries, queue.ring, &mut head)));
        let added = producer.join().unwrap();
        while let Some(n) = poll(&entries, queue.ring, &mut head) {
            found.push(n);
        }
        match added {
            Ok(false) => assert_eq!(found, [1, 2, 3]),
            other => assert_eq!((other, &found[..]), (Err(PushError::Full), &[1][..])),
        }
        assert_eq!(queue.ring.overrun.load(Ordering::Relaxed), 0);
    });
}

/// A producer exits after it published a completion, and before it counted it.
#[test]
fn a_completion_of_an_exited_producer_is_not_overwritten() {
    check(|| {
        let queue = Queue::new(2);
        let dying = thread::spawn(move || {
            std::mem::forget(queue.ring.lock.lock(owner_id(1)));
            let tail = queue.ring.tail.load(Ordering::Relaxed);
            queue.slots[(tail & 1) as usize].publish(completion(1), tail + 1);
            model::exit_process(1);
        });
        assert_eq!(queue.producer().push(owner_id(2), completion(2), false), Ok(false));
        dying.join().unwrap();
        let entries = queue.entries();
        let mut head = 0;
        let found = [(); 2].map(|()| poll(&entries, queue.ring, &mut head));
        assert!(matches!(found, [Some(1), Some(2)] | [Some(2), Some(1)]), "{found:?}");
    });
}

/// The consumer arms the queue, polls once more, and sleeps. The producer adds a completion and checks whether the queue
/// is armed. No completion is left without a poll or an event.
#[test]
fn an_armed_queue_is_polled_or_signalled() {
    check(|| {
        let queue = Queue::new(1);
        queue.ring.channel.store(7, Ordering::Relaxed);
        let producer = thread::spawn(move || queue.producer().push(owner_id(1), completion(1), false));
        // The order of `Cq::arm` and the poll after it.
        queue.ring.armed.swap(ARM_ANY, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        let seen = queue.entries().read(0).is_some();
        let signalled = producer.join().unwrap() == Ok(true);
        assert!(seen || signalled);
        assert_eq!(queue.ring.armed.load(Ordering::Relaxed) == ARM_NONE, signalled);
        assert_eq!(queue.ring.events.load(Ordering::Relaxed), u32::from(signalled));
    });
}

/// An initiator takes the last request of a shared receive queue while the owner sets a limit: one of them reports it.
#[test]
fn a_reached_limit_is_reported_once() {
    check(|| {
        let shared = Arc::new((SrqLimitWord::default(), AtomicU32::new(0)));
        let left = |head: &AtomicU32| 1 - head.load(Ordering::Acquire);
        let initiator = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (limit, head) = &*shared;
                head.store(1, Ordering::Release);
                limit.is_reached(|| left(head), true)
            })
        };
        let (limit, head) = &*shared;
        let here = limit.set(1, || left(head));
        assert_ne!(here, initiator.join().unwrap(), "by exactly one");
        assert_eq!(limit.get(), 0);
    });
}

/// Moderated events: two producers, one event for two completions; the first completion starts the timer.
#[test]
fn moderated_events_are_counted_once() {
    check(|| {
        let queue = Queue::new(2);
        queue.ring.channel.store(7, Ordering::Relaxed);
        queue.ring.timer.store(1, Ordering::Relaxed);
        queue.ring.moderation.store(2, Ordering::Relaxed);
        queue.ring.armed.store(ARM_ANY, Ordering::Relaxed);
        let push = move |me: u32| {
            let producer = queue.producer();
            producer.push(owner_id(me), completion(me), false).unwrap().then(|| producer.channel())
        };
        let other = thread::spawn(move || push(2));
        let mut signalled = [push(1), other.join().unwrap()];
        signalled.sort_unstable();
        assert_eq!(signalled, [Some(1), Some(7)]);
        assert_eq!(queue.ring.events.load(Ordering::Relaxed), 1);
    });
}

/// The holder of the send queue's lock leaves a request pending while the progress thread checks: the thread checks
/// again, or is notified.
#[test]
fn a_pending_request_is_retried() {
    check(|| {
        let shared = Arc::new((RetryOwner::default(), AtomicU32::new(0), AtomicBool::new(false)));
        // A request is pending, and the thread is responsible.
        assert!(shared.0.set_pending());
        let owner = {
            let shared = shared.clone();
            thread::spawn(move || {
                // The first request completes, and another one becomes pending.
                shared.0.clear_pending();
                if shared.0.set_pending() {
                    shared.1.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let checks_again = shared.0.check() != RetryCheck::Idle;
        owner.join().unwrap();
        let notified = shared.1.load(Ordering::Relaxed);
        assert_eq!(u32::from(checks_again) + notified, 1, "by exactly one");
    });
}

/// Two threads look at the deadlines while a third one sets one: the thread that sleeps until the next expiry does not sleep
/// for longer, and is woken when the time becomes earlier.
#[test]
fn a_deadline_that_is_set_while_others_look_at_it_is_not_missed() {
    const DEADLINE: u64 = 5;
    check(|| {
        let shared = Arc::new((Deadline::default(), NextExpiry::default(), AtomicU32::new(0)));
        let look = |(deadline, next, woken): &(Deadline, NextExpiry, AtomicU32)| {
            next.begin();
            if deadline.get().is_some_and(|time| next.include(time)) {
                woken.fetch_add(1, Ordering::Relaxed);
            }
        };
        let other = {
            let shared = shared.clone();
            thread::spawn(move || look(&shared))
        };
        let setter = {
            let shared = shared.clone();
            thread::spawn(move || {
                if shared.0.set(DEADLINE, &shared.1) {
                    shared.2.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        look(&shared);
        other.join().unwrap();
        setter.join().unwrap();
        assert_eq!(shared.1.get(), Some(DEADLINE));
        assert!(shared.2.load(Ordering::Relaxed) > 0, "the thread is woken");
    });
}

/// A descriptor whose every field is its generation.
fn descriptor(generation: u64) -> MrDescriptor {
    let small = generation as u32;
    MrDescriptor {
        access: small,
        pd: small,
        start: generation,
        len: generation,
        va: generation,
        file: (small, small),
        mapped: generation..generation,
        offset: generation,
        qpn: small,
        locks_atomics: false,
    }
}

/// The tag of a key that was reused in another generation.
fn tag(generation: u64) -> u64 {
    mr_entry::tag(generation as u32, 7)
}

/// The generation in a tag.
fn generation(tag: u64) -> u64 {
    tag >> 34
}

/// A key is reused, so that only the generation distinguishes the old region from the new one. A concurrent
/// reader gets one of the two whole, or nothing.
#[test]
fn a_memory_key_is_read_whole_or_not_at_all() {
    // Each of eleven fields is read in all its versions, so fewer preemptions suffice.
    check_with(3, || {
        let entry = Arc::new(MrEntry::default());
        entry.publish(tag(1), &descriptor(1));
        let reader = {
            let entry = entry.clone();
            thread::spawn(move || entry.read(7))
        };
        entry.withdraw();
        entry.publish(tag(2), &descriptor(2));
        if let Some((found, read)) = reader.join().unwrap() {
            assert_eq!((found, read), (tag(generation(found)), descriptor(generation(found))), "torn");
        }
        assert_eq!(entry.read(7), Some((tag(2), descriptor(2))));
    });
}

/// Pages become mappable while a peer reads the entry: it always finds the key, with the file of its stage.
#[test]
fn a_promoted_memory_key_is_found_with_the_file_of_its_stage() {
    check_with(3, || {
        let entry = Arc::new(MrEntry::default());
        entry.publish(tag(1), &descriptor(1));
        let reader = {
            let entry = entry.clone();
            thread::spawn(move || [entry.read(7), entry.read(7)].map(|found| found.map(|(_, read)| read)))
        };
        let mapped = MappedFile { file: (5, 5), mapped: 5..5, offset: 5 };
        let promoted = entry.promote(tag(1), &mapped).expect("nobody else changes it");
        assert!(entry.promote(promoted, &mapped).is_none(), "once");
        let expected = |file: u64, locks_atomics| MrDescriptor {
            file: (file as u32, file as u32),
            mapped: file..file,
            offset: file,
            locks_atomics,
            ..descriptor(1)
        };
        for read in reader.join().unwrap() {
            let read = read.expect("the key is valid all the time");
            assert!(read == expected(1, false) || read == expected(5, true), "{read:?}");
        }
        let settled = entry.settle(promoted).expect("nobody else changes it");
        assert_eq!(entry.read(7), Some((settled, expected(5, false))));
    });
}

/// The protocol of every WRITE: the initiator announces the operation, checks the key's tag, and copies. The owner
/// withdraws the key, and releases the memory when no operation is in flight.
#[test]
fn memory_is_not_accessed_after_its_key_was_withdrawn() {
    check(|| {
        let shared = Arc::new((InflightOp::default(), AtomicBool::new(false), MrEntry::default()));
        shared.2.publish(tag(1), &descriptor(1));
        let initiator = {
            let shared = shared.clone();
            thread::spawn(move || {
                let (inflight, released, entry) = &*shared;
                let mut last = inflight.last();
                // Two operations, the second directly after the first.
                for _ in 0..2 {
                    inflight.begin(&mut last, true);
                    if entry.has_tag(tag(1)) {
                        assert!(!released.load(Ordering::Relaxed), "accessed after it was released");
                    }
                }
                inflight.end(&mut last);
            })
        };
        let (inflight, released, entry) = &*shared;
        // The order of `MrTable::withdraw` and `Qp::wait_for_inflight_op`.
        entry.withdraw();
        barrier::heavy();
        if let Some(operation) = inflight.current() {
            while !inflight.has_ended(operation) {
                thread::yield_now();
            }
        }
        released.store(true, Ordering::Relaxed);
        initiator.join().unwrap();
    });
}

/// Two sides invalidate a window of type 2 at once: one of them succeeds.
#[test]
fn a_window_is_invalidated_once() {
    check(|| {
        let entry = Arc::new(MrEntry::default());
        entry.publish(tag(1), &descriptor(1));
        let other = {
            let entry = entry.clone();
            thread::spawn(move || entry.invalidate(tag(1)))
        };
        let here = entry.invalidate(tag(1));
        assert_ne!(here, other.join().unwrap());
        assert!(!entry.has_tag(tag(1)));
    });
}

/// A ring of words, and its reader's sleep. It is never freed.
struct Words {
    taken: AtomicU64,
    posted: AtomicU64,
    sleeps: AtomicU64,
    awaited: AtomicU64,
    words: Vec<AtomicU64>,
}

impl Words {
    /// Entries have two words.
    fn new(entries: usize) -> &'static Words {
        let new = || AtomicU64::new(0);
        // Positions wrap.
        let start = || AtomicU64::new(u64::MAX);
        let words = (0..2 * entries).map(|_| new()).collect();
        Box::leak(Box::new(Words { taken: start(), posted: start(), sleeps: new(), awaited: start(), words }))
    }

    fn ring(&self) -> WordRing<'_> {
        WordRing { taken: &self.taken, posted: &self.posted, words: &self.words, entry_words: 2 }
    }
}

#[test]
fn entries_of_words_come_whole_once_and_in_order() {
    check(|| {
        let words = Words::new(2);
        // The third one is posted only if the reader has made room.
        let writer =
            thread::spawn(move || (1..=3).take_while(|&n| words.ring().push(&[n, 10 * n]).unwrap()).count());
        let reader =
            thread::spawn(move || [(); 2].map(|()| words.ring().pop::<2>().unwrap()).into_iter().flatten());
        let mut found: Vec<[u64; 2]> = reader.join().unwrap().collect();
        let posted = writer.join().unwrap();
        while let Some(entry) = words.ring().pop::<2>().unwrap() {
            found.push(entry);
        }
        let expected: Vec<[u64; 2]> = (1..=posted as u64).map(|n| [n, 10 * n]).collect();
        assert!(posted >= 2);
        assert_eq!(found, expected);
    });
}

#[test]
fn a_reader_of_words_that_sleeps_is_woken() {
    check(|| {
        let words = Words::new(1);
        let writer = thread::spawn(move || {
            assert_eq!(words.ring().push(&[7, 8]), Ok(true));
            SleepFlag(&words.sleeps).claim()
        });
        let flag = SleepFlag(&words.sleeps);
        flag.set(true);
        let seen = words.ring().pop::<2>().unwrap();
        let woken = writer.join().unwrap();
        assert!(seen.is_some() || woken, "the reader sleeps, and nobody wakes it");
        flag.set(false);
        assert_eq!(seen.or(words.ring().pop().unwrap()), Some([7, 8]));
        assert!(!flag.claim());
    });
}

#[test]
fn a_reader_that_awaits_two_entries_of_words_is_woken_by_the_second() {
    check(|| {
        let words = Words::new(2);
        // A longer wait was given up before.
        AwaitedEntries(&words.awaited).set(&words.ring(), 50);
        let writer = thread::spawn(move || {
            [1, 2].map(|n| {
                assert_eq!(words.ring().push(&[n, n]), Ok(true));
                AwaitedEntries(&words.awaited).are_there(&words.ring())
            })
        });
        let there = AwaitedEntries(&words.awaited).set(&words.ring(), 2);
        let [_, second] = writer.join().unwrap();
        assert!(there || second, "the reader sleeps, and nobody wakes it");
        assert_eq!(words.ring().waiting(), Ok(2));
    });
}

#[test]
fn one_of_two_writers_wakes_a_reader() {
    check(|| {
        let words = Words::new(1);
        SleepFlag(&words.sleeps).set(true);
        let writer = thread::spawn(move || SleepFlag(&words.sleeps).claim());
        let here = SleepFlag(&words.sleeps).claim();
        assert!(here != writer.join().unwrap());
    });
}
