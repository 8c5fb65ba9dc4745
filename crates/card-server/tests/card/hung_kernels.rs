//! Native kernels that reach no safe point: their region goes out of service, and the card continues.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{Card, Ring, RingError, RingLayout};
use millstream_card::{RemoteCard, RemoteError, RemoteErrorKind};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::codes::RegionState;
use millstream_card_abi::command::{Cause, Descriptor, Fault, Status};
use millstream_card_abi::registers::{REGION_CONTROL, REGION_STRIDE, at, region_at};

use crate::cards::NetworkCard;
use crate::host::{ENDED, GRACE, Process, TIMEOUT, load_kernels, region_of};

const LEASE: Duration = Duration::from_secs(20);

/// Time for which the kernel ignores interrupts (ms): longer than all other steps of a test.
const UNINTERRUPTIBLE_MS: u64 = 12_000;

fn start_uninterruptible(node: &RemoteCard, start: RunRequest) -> u64 {
    node.load(0, KernelSource::Builtin("uninterruptible")).unwrap();
    node.start(0, &start).unwrap()
}

fn state(node: &RemoteCard, region: usize) -> u32 {
    node.register(REGION_CONTROL + region * REGION_STRIDE + region_at::status).unwrap() as u32
}

#[track_caller]
fn is_stuck(outcome: Result<impl std::fmt::Debug, RemoteError>) {
    match outcome.unwrap_err().kind {
        RemoteErrorKind::Rejected { region: 0, cause: Cause::KernelHung, detail } => {
            assert!(u128::from(detail) >= GRACE.as_nanos());
        }
        other => panic!("{other}"),
    }
}

/// Waits until the kernel has ended and its region is in service again.
#[track_caller]
fn comes_back(node: &RemoteCard) {
    let until = Instant::now() + 2 * TIMEOUT;
    while state(node, 0) != RegionState::Empty as u32 {
        assert!(Instant::now() < until, "region is in state {}", state(node, 0));
        std::thread::sleep(Duration::from_millis(5));
    }
    node.load(0, KernelSource::Builtin("null")).unwrap();
    assert_eq!(node.run(0, &RunRequest::new(&[5]), TIMEOUT).unwrap()[0], 5);
}

#[test]
fn a_kernel_past_its_deadline_without_safe_points_hangs_its_region_until_it_ends() {
    let card = NetworkCard::start();
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    let timeout = Some(Duration::from_millis(20));
    let started = Instant::now();
    let run =
        start_uninterruptible(&node, RunRequest { timeout, ..RunRequest::new(&[UNINTERRUPTIBLE_MS, 1, 1]) });
    is_stuck(node.wait(run, TIMEOUT));
    assert!(started.elapsed() < Duration::from_millis(UNINTERRUPTIBLE_MS));
    assert_eq!(state(&node, 0), RegionState::Hung as u32);
    // The region rejects every command; the other region and memory remain usable.
    is_stuck(node.load(0, KernelSource::Builtin("null")));
    is_stuck(node.run(0, &RunRequest::new(&[]), TIMEOUT));
    is_stuck(node.stop(0));
    let paused = node.pause().unwrap_err();
    assert!(matches!(paused.kind, RemoteErrorKind::CardRejected(Cause::KernelHung)), "{paused}");
    node.load(1, KernelSource::Builtin("null")).unwrap();
    assert_eq!(node.run(1, &RunRequest::new(&[7]), TIMEOUT).unwrap()[0], 7);
    node.write(4096, &[1, 2, 3]).unwrap();
    assert_eq!(node.register(at::hung_kernels).unwrap(), 1);
    comes_back(&node);
    node.pause().unwrap();
    node.resume().unwrap();
}

#[test]
fn the_next_holder_does_not_wait_for_a_kernel_that_does_not_end_and_does_not_meet_it() {
    let card = NetworkCard::start();
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    let started = Instant::now();
    start_uninterruptible(&node, RunRequest::new(&[UNINTERRUPTIBLE_MS, u64::MAX, 1]));
    let running = |node: &RemoteCard| {
        let mut word = [0; 8];
        node.read(0, &mut word).unwrap();
        word == [0xff; 8]
    };
    while !running(&node) {
        assert!(started.elapsed() < TIMEOUT);
    }
    node.release().unwrap();

    // The hung kernel keeps writing for seconds, to the replaced memory.
    for _ in 0..2 {
        let next = card.connect();
        next.acquire(LEASE, TIMEOUT).unwrap();
        assert!(
            started.elapsed() < Duration::from_millis(UNINTERRUPTIBLE_MS),
            "the kernel has ended meanwhile"
        );
        assert_eq!(state(&next, 0), RegionState::Hung as u32);
        is_stuck(next.load(0, KernelSource::Builtin("null")));
        next.load(1, KernelSource::Builtin("fill")).unwrap();
        next.run(1, &RunRequest::new(&[0, 9, 8192]), TIMEOUT).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let mut page = [0; 8192];
        next.read(0, &mut page).unwrap();
        assert!(page.as_chunks::<8>().0.iter().all(|word| u64::from_le_bytes(*word) == 9));
        next.release().unwrap();
    }
    let last = card.connect();
    last.acquire(LEASE, TIMEOUT).unwrap();
    comes_back(&last);
}

#[test]
fn a_card_ends_although_a_kernel_does_not() {
    let mut card = NetworkCard::start();
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    start_uninterruptible(&node, RunRequest::new(&[3_600_000]));
    drop(card.process.stdin.take());
    let until = Instant::now() + TIMEOUT;
    while card.process.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "card waits for its kernel");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Offset of a command's result.
const RESULT: u64 = 1 << 20;

/// Submits a command that ignores interrupts for this time, and waits until it runs.
fn submit_uninterruptible(ring: &mut Ring, milliseconds: u64) {
    let card = ring.card().clone();
    let descriptor = Descriptor {
        region: region_of("uninterruptible"),
        flags: 0,
        args: MemoryRange::new(0, milliseconds),
        result: MemoryRange::new(RESULT, 8),
        cookie: 1,
    };
    ring.submit(&descriptor).unwrap();
    let until = Instant::now() + TIMEOUT;
    while card.memory().read_array(RESULT).unwrap() != [0xff; 8] {
        assert!(Instant::now() < until, "the command does not begin");
    }
}

/// Opens rings and starts such a command.
fn open_ring_with_uninterruptible(card: &Card, milliseconds: u64) -> Ring {
    load_kernels(card);
    let mut ring = Ring::open(card, RingLayout::at(0, 8)).unwrap();
    submit_uninterruptible(&mut ring, milliseconds);
    ring
}

/// Runs `sum` without input.
fn sum(ring: &mut Ring) -> Result<(), Fault> {
    let region = region_of("sum");
    let (args, result) = (MemoryRange::new(0, 0), MemoryRange::new(RESULT, 8));
    ring.submit(&Descriptor { region, flags: 0, args, result, cookie: 2 }).unwrap();
    ring.wait(TIMEOUT).unwrap().outcome
}

#[test]
fn a_command_of_the_rings_ends_when_its_time_is_over_and_the_next_one_has_its_own() {
    let process = Process::start("late", "unbound");
    let card = process.open();
    load_kernels(&card);
    assert_eq!(card.registers().default_command_timeout_ns().load(Ordering::Relaxed), 60_000_000_000);
    let mut ring = Ring::open(&card, RingLayout::at(0, 8)).unwrap();
    ring.set_command_timeout(Duration::from_millis(50));
    let region = region_of("slow");
    let (args, result) = (MemoryRange::new(0, 3_600_000), MemoryRange::new(RESULT, 8));
    for _ in 0..2 {
        ring.submit(&Descriptor { region, flags: 0, args, result, cookie: 1 }).unwrap();
        let outcome = ring.wait(TIMEOUT).unwrap().outcome;
        assert_eq!(outcome, Err(Fault::new(Cause::DeadlineExceeded, 50_000_000)));
        assert_eq!(sum(&mut ring), Ok(()));
    }
    // The next user of the rings starts with the card's default timeout.
    let mut next = Ring::open(&card, RingLayout::at(0, 8)).unwrap();
    assert_eq!(card.registers().command_timeout_ns().load(Ordering::Relaxed), 0);
    let args = MemoryRange::new(0, 300);
    next.submit(&Descriptor { region, flags: 0, args, result, cookie: 1 }).unwrap();
    assert_eq!(next.wait(TIMEOUT).unwrap().outcome, Ok(()));
}

#[test]
fn a_command_without_a_lease_that_does_not_end_closes_the_rings_until_it_does() {
    let process = Process::start("hung-alone", "unbound");
    let started = Instant::now();
    let card = process.open();
    load_kernels(&card);
    let mut ring = Ring::open(&card, RingLayout::at(0, 8)).unwrap();
    ring.set_command_timeout(Duration::from_millis(50));
    submit_uninterruptible(&mut ring, UNINTERRUPTIBLE_MS);
    let stuck = |error: RingError| matches!(error, RingError::Closed(Cause::KernelHung));
    // Waiting for the command fails, and so does opening the rings.
    assert!(stuck(ring.wait(TIMEOUT).unwrap_err()));
    assert!(stuck(ring.poll().unwrap_err()));
    assert!(stuck(Ring::open(&card, RingLayout::at(0, 8)).unwrap_err()));
    assert_eq!(card.registers().hung_kernels().load(Ordering::Relaxed), 1);
    assert_eq!(card.registers().status().load(Ordering::Relaxed), Status::Hung as u32);

    // A lease holder gets other memory than the hung command.
    let next = loop {
        assert!(started.elapsed() < TIMEOUT, "nobody gets the card");
        let next = process.open();
        if next.acquire(TIMEOUT).is_ok() {
            break next;
        }
    };
    for _ in 0..20 {
        assert_eq!(next.memory().read_array(RESULT).unwrap(), [0; 8]);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(started.elapsed() < Duration::from_millis(UNINTERRUPTIBLE_MS), "the command has ended meanwhile");
    drop((ring, next, card));
    std::thread::sleep(Duration::from_millis(UNINTERRUPTIBLE_MS).saturating_sub(started.elapsed()));
    let last = process.open();
    let until = Instant::now() + TIMEOUT;
    let mut ring = loop {
        match Ring::open(&last, RingLayout::at(0, 8)) {
            Ok(ring) => break ring,
            Err(error) => assert!(stuck(error) && Instant::now() < until),
        }
    };
    load_kernels(&last);
    assert_eq!(sum(&mut ring), Ok(()));
    assert_eq!(last.registers().hung_kernels().load(Ordering::Relaxed), 1);
}

#[test]
fn a_card_ends_although_a_command_of_its_rings_does_not() {
    let mut process = Process::start("hung-end", "owner");
    let card = Card::open_as_owner(&process.name, TIMEOUT).unwrap();
    let ring = open_ring_with_uninterruptible(&card, 3_600_000);
    drop((ring, card));
    assert_eq!(process.ended().code(), Some(ENDED));
}

#[test]
fn a_hung_queue_command_does_not_affect_the_next_holder() {
    let process = Process::start("hung-lease", "unbound");
    let started = Instant::now();
    let card = process.open();
    // Without a lease, because under a lease the card refuses kernels that its holder did not load.
    let ring = open_ring_with_uninterruptible(&card, UNINTERRUPTIBLE_MS);
    card.acquire(TIMEOUT).unwrap();
    drop((ring, card));

    // The card disconnects users that open it before the memory is replaced.
    let next = loop {
        assert!(started.elapsed() < TIMEOUT, "nobody gets the card");
        let next = process.open();
        if next.acquire(TIMEOUT).is_ok() {
            break next;
        }
    };
    assert!(started.elapsed() < Duration::from_millis(UNINTERRUPTIBLE_MS), "the command has ended meanwhile");
    for _ in 0..20 {
        assert_eq!(next.memory().read_array(RESULT).unwrap(), [0; 8]);
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(next);
    // The rings work again once the command has ended.
    std::thread::sleep(Duration::from_millis(UNINTERRUPTIBLE_MS).saturating_sub(started.elapsed()));
    let last = process.open();
    let mut ring = Ring::open(&last, RingLayout::at(0, 8)).unwrap();
    load_kernels(&last);
    assert_eq!(sum(&mut ring), Ok(()));
}
