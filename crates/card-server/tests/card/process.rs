//! A card as a separate process: commands, sleep, exit, owners, users that are refused.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_card::{Card, CommandError, OpenError, Ring, RingError, RingLayout};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Descriptor, Fault};
use millstream_card_abi::ipc::{OpenReply, Refusal};
use millstream_card_server::{CardConfig, ServeError, serve};
use millstream_shm::poll_readable;
use millstream_shm::socket::{Connection, own_uid};
use rustix::process::{Resource, Rlimit, prlimit};

use crate::host::{CLAIM, ENDED, GRACE, MEMORY, Process, TIMEOUT, again, load_kernels, region_of};

const INPUT: u64 = 64 << 10;
const OUTPUT: u64 = 128 << 10;

fn descriptor(kernel: &str, args: u64, cookie: u64) -> Descriptor {
    Descriptor {
        region: region_of(kernel),
        flags: 0,
        args: MemoryRange::new(INPUT, args),
        result: MemoryRange::new(OUTPUT + 8 * (cookie % 64), 8),
        cookie,
    }
}

fn open_ring(card: &Card, slots: u32) -> Ring {
    Ring::open(card, RingLayout::at(0, slots)).unwrap()
}

/// True if a descriptor becomes readable or hangs up within the time.
fn is_ready(fd: impl AsFd, within: Duration) -> bool {
    poll_readable(&[fd.as_fd()], Some(within)).unwrap()[0]
}

#[test]
fn commands_run_in_order_and_slots_are_reused() {
    let process = Process::start("order", "unbound");
    let card = process.open();
    load_kernels(&card);
    assert_eq!(card.memory().size(), MEMORY);
    assert_eq!(card.bank(0), Some(MemoryRange::new(0, MEMORY)));
    assert_eq!(card.bank(1), None);
    for word in 0..100u64 {
        card.memory().write(INPUT + 8 * word, &word.to_le_bytes()).unwrap();
    }
    let mut ring = open_ring(&card, 4);
    let mut next = 0;
    for taken in 0..1000u64 {
        while next < 1000 && ring.in_flight() < 4 {
            let command = descriptor("sum", 8 * (next % 100), next);
            assert_eq!(ring.submit(&command).unwrap(), next);
            next += 1;
        }
        if next < 1000 {
            let one_more = descriptor("sum", 0, 0);
            assert!(matches!(ring.submit(&one_more), Err(RingError::Full(4))));
        }
        let completion = ring.wait(TIMEOUT).unwrap();
        assert_eq!((completion.index, completion.cookie), (taken, taken));
        assert_eq!(completion.outcome, Ok(()));
        assert_eq!(completion.counters.events, 1);
        let sum = card.memory().read_array(OUTPUT + 8 * (taken % 64)).unwrap();
        let words = taken % 100;
        assert_eq!(u64::from_le_bytes(sum), words * words.saturating_sub(1) / 2);
    }
    assert!(matches!(ring.wait(Duration::from_millis(10)), Err(RingError::TimedOut(_))));
    let registers = card.registers();
    assert_eq!(registers.commands().load(Ordering::Relaxed), 1000);
    assert_eq!(registers.events().load(Ordering::Relaxed), 1000);
    assert_eq!(registers.failed_commands().load(Ordering::Relaxed), 0);
    assert!(registers.doorbells().load(Ordering::Relaxed) >= 1000);
    assert!(registers.interrupts().load(Ordering::Relaxed) >= 1000);
}

#[test]
fn a_bad_command_fails_alone_and_names_its_cause() {
    let process = Process::start("bad", "unbound");
    let card = process.open();
    load_kernels(&card);
    let mut ring = open_ring(&card, 8);
    let good = descriptor("sum", 8, 0);
    let cases = [
        (Descriptor { region: 99, ..good }, Fault::new(Cause::NoSuchRegion, 99)),
        (Descriptor { region: 4, ..good }, Fault::new(Cause::NoSuchRegion, 4)),
        (Descriptor { flags: 0x8000_0000, ..good }, Fault::new(Cause::UnknownFlags, 0x8000_0000)),
        (
            Descriptor { args: MemoryRange::new(MEMORY - 4, 8), ..good },
            Fault::new(Cause::ArgsOutsideMemory, MEMORY - 4),
        ),
        (
            Descriptor { args: MemoryRange::new(u64::MAX, u64::MAX), ..good },
            Fault::new(Cause::ArgsOutsideMemory, u64::MAX),
        ),
        (
            Descriptor { result: MemoryRange::new(MEMORY + 1, 0), ..good },
            Fault::new(Cause::ResultOutsideMemory, MEMORY + 1),
        ),
        (descriptor("broken", 0, 0), Fault::new(Cause::KernelFailed, region_of("broken").into())),
    ];
    for (errors, (bad, fault)) in (1..).zip(cases) {
        ring.submit(&bad).unwrap();
        ring.submit(&good).unwrap();
        assert_eq!(ring.wait(TIMEOUT).unwrap().outcome, Err(fault));
        assert_eq!(ring.wait(TIMEOUT).unwrap().outcome, Ok(()));
        let registers = card.registers();
        assert_eq!(registers.error_cause().load(Ordering::Acquire), fault.cause.code());
        assert_eq!(registers.error_detail().load(Ordering::Relaxed), fault.detail);
        assert_eq!(registers.errors().load(Ordering::Relaxed), errors);
        assert_eq!(registers.failed_commands().load(Ordering::Relaxed), errors);
    }
    match card.load(0, "cluster8") {
        Err(CommandError::NoSuchKernel(missing)) => assert!(missing.available.contains(&"sum".to_owned())),
        other => panic!("{other:?}"),
    }
}

/// A stopped card answers nothing: the wait for it ends with the client's lease, not with the time for an answer.
#[test]
fn a_load_does_not_outlast_the_lease() {
    let process = Process::start("load", "unbound");
    let card = process.open();
    process.stop();
    let looks = std::cell::Cell::new(0);
    let loaded = card.load_while(0, "sum", || {
        looks.set(looks.get() + 1);
        looks.get() < 3
    });
    assert!(matches!(loaded, Err(CommandError::NoAnswer(_))), "{loaded:?}");
    assert_eq!(looks.get(), 3);
    process.resume();
    card.load(0, "sum").unwrap();
}

/// The card waits for an access that its holder counts, but for no longer than the grace period.
#[test]
fn memory_is_cleared_after_the_access_in_progress() {
    let process = Process::start("access", "unbound");
    let (card, other) = (process.open(), process.open());
    for is_endless in [false, true] {
        let epoch = card.acquire(TIMEOUT).unwrap();
        let access = card.access(epoch).expect("the lease is held");
        assert!(other.access(epoch).is_none(), "another client's lease");
        let start = Instant::now();
        other.registers().lease_revoke().store(epoch.into(), Ordering::Release);
        while card.access(epoch).is_some() {
            assert!(start.elapsed() < TIMEOUT, "the lease does not end");
        }
        // A store that began before the end of the lease.
        card.memory().write(INPUT, b"late").unwrap();
        if is_endless {
            other.acquire(TIMEOUT).unwrap();
            assert!(start.elapsed() >= GRACE / 2, "the card did not wait");
        } else {
            std::thread::sleep(GRACE / 3);
            assert_eq!(card.memory().read_array(INPUT).unwrap(), *b"late", "cleared during the access");
            assert_eq!(card.registers().lease_accesses().load(Ordering::Acquire), 1);
            drop(access);
            other.acquire(TIMEOUT).unwrap();
        }
        assert_eq!(other.memory().read_array(INPUT).unwrap(), [0; 4]);
        assert_eq!(card.registers().lease_accesses().load(Ordering::Acquire), 0);
        let next = other.registers().lease_epoch().load(Ordering::Acquire);
        other.registers().lease_release().store(next, Ordering::Release);
    }
}

/// A holder whose lease was revoked submits a command: the next holder's card does not execute it.
#[test]
fn rings_of_a_lease_end_with_it() {
    let process = Process::start("rings", "unbound");
    let (former, next) = (process.open(), process.open());
    let epoch = former.acquire(TIMEOUT).unwrap();
    let mut ring = open_ring(&former, 16);
    former.load(0, "sum").unwrap();
    next.registers().lease_revoke().store(epoch.into(), Ordering::Release);
    next.acquire(TIMEOUT).unwrap();
    next.load(0, "sum").unwrap();
    next.memory().write(OUTPUT, &[0x55; 8]).unwrap();
    // As a process does that does not look at the state of its rings.
    next.memory().write(0, &descriptor("sum", 0, 0).to_bytes()).unwrap();
    former.registers().producer().store(1, Ordering::Release);
    let closed = ring.wait(TIMEOUT).unwrap_err();
    assert!(matches!(closed, RingError::Closed(Cause::Interrupted)), "{closed}");
    let refused = ring.submit(&descriptor("sum", 0, 0)).unwrap_err();
    assert!(matches!(refused, RingError::Closed(Cause::Interrupted)), "{refused}");
    assert_eq!(next.registers().commands().load(Ordering::Relaxed), 0);
    assert_eq!(next.memory().read_array(OUTPUT).unwrap(), [0x55; 8]);

    let mut ring = open_ring(&next, 16);
    ring.submit(&descriptor("sum", 0, 0)).unwrap();
    assert_eq!(ring.wait(TIMEOUT).unwrap().outcome, Ok(()));
}

/// Holders report their own traffic, and may report any number.
#[test]
fn reports_of_traffic_may_overflow() {
    let process = Process::start("reports", "unbound");
    let card = process.open();
    for lease in 1..=3u64 {
        let epoch = card.acquire(TIMEOUT).unwrap();
        let registers = card.registers();
        for report in [registers.report_written(0), registers.report_read(0), registers.report_bar2_read()] {
            report.store(u64::MAX, Ordering::Relaxed);
        }
        registers.lease_release().store(epoch.into(), Ordering::Release);
        let until = Instant::now() + TIMEOUT;
        while registers.lease_epoch().load(Ordering::Acquire) == u64::from(epoch) {
            assert!(Instant::now() < until && card.is_alive(), "the lease does not end");
        }
        assert_eq!(registers.bank_rdma_read(0).load(Ordering::Relaxed), lease.wrapping_neg());
    }
}

#[test]
fn bad_rings_are_refused_and_the_next_ones_work() {
    let process = Process::start("bad-rings", "unbound");
    let card = process.open();
    load_kernels(&card);
    let cases = [
        (RingLayout::at(0, 0), Cause::BadRingSlots),
        (RingLayout::at(0, 12), Cause::BadRingSlots),
        (RingLayout::at(0, 1 << 20), Cause::BadRingSlots),
        (RingLayout::at(32, 8), Cause::BadRingAddress),
        (RingLayout::at(MEMORY - 64, 1), Cause::BadRingAddress),
        (RingLayout::at(u64::MAX - 63, 8), Cause::BadRingAddress),
        (RingLayout { commands: 0, completions: 64, slots: 2 }, Cause::RingsOverlap),
    ];
    for (layout, expected) in cases {
        match Ring::open(&card, layout) {
            Err(RingError::Closed(cause)) => assert_eq!(cause, expected, "{layout:?}"),
            other => panic!("{layout:?}: {other:?}"),
        }
        let mut ring = open_ring(&card, 8);
        ring.submit(&descriptor("sum", 8, 5)).unwrap();
        assert_eq!(ring.wait(TIMEOUT).unwrap().cookie, 5);
    }
}

#[test]
fn a_producer_that_runs_away_closes_the_rings_only() {
    let process = Process::start("overrun", "unbound");
    let card = process.open();
    load_kernels(&card);
    let mut ring = open_ring(&card, 8);
    card.registers().producer().store(9, Ordering::Release);
    // The card may have closed the rings already.
    let submitted = ring.submit(&descriptor("sum", 8, 0));
    assert!(matches!(submitted, Ok(0) | Err(RingError::Closed(Cause::RingOverrun))), "{submitted:?}");
    card.registers().producer().store(u64::MAX / 2, Ordering::Release);
    let error = loop {
        match ring.wait(TIMEOUT) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RingError::Closed(Cause::RingOverrun)));
    drop(ring);
    let mut ring = open_ring(&card, 8);
    ring.submit(&descriptor("sum", 8, 1)).unwrap();
    assert_eq!(ring.wait(TIMEOUT).unwrap().cookie, 1);
}

#[test]
fn opening_the_rings_again_ends_their_earlier_use() {
    let process = Process::start("supersede", "unbound");
    let (first, second) = (process.open(), process.open());
    load_kernels(&first);
    let mut early = open_ring(&first, 8);
    let mut late = open_ring(&second, 8);
    assert!(matches!(early.poll(), Err(RingError::Superseded)));
    drop(early);
    late.submit(&descriptor("sum", 8, 3)).unwrap();
    assert_eq!(late.wait(TIMEOUT).unwrap().cookie, 3);
}

#[test]
fn a_killed_card_is_noticed_by_all_who_wait() {
    let mut process = Process::start("killed", "unbound");
    let card = process.open();
    load_kernels(&card);
    let mut ring = open_ring(&card, 8);
    ring.submit(&descriptor("slow", 60_000, 0)).unwrap();
    let liveness: OwnedFd = card.liveness_fd().try_clone_to_owned().unwrap();
    let waiting = std::thread::spawn(move || {
        let outcome = ring.wait(TIMEOUT);
        (outcome, Instant::now())
    });
    std::thread::sleep(Duration::from_millis(100));
    assert!(card.is_alive() && !waiting.is_finished());

    let killed = Instant::now();
    process.child.kill().unwrap();
    assert!(is_ready(&liveness, TIMEOUT));
    assert!(killed.elapsed() < TIMEOUT / 2);
    let (outcome, noticed) = waiting.join().unwrap();
    assert!(matches!(outcome, Err(RingError::CardGone)), "{outcome:?}");
    assert!(noticed - killed < TIMEOUT / 2);
    assert!(!card.is_alive());

    // Memory and registers stay mapped, no new command is answered, and no call blocks.
    let error = Ring::open(&card, RingLayout::at(0, 8)).unwrap_err();
    assert!(matches!(error, RingError::CardGone), "{error:?}");
    process.child.wait().unwrap();
    let error = Card::open(&process.name, Duration::ZERO).unwrap_err();
    assert!(matches!(error, OpenError::NotFound(_)), "{error}");
}

/// Connections wait while the card has no free descriptor.
#[test]
fn a_card_without_free_descriptors_serves_later() {
    let process = Process::start("descriptors", "unbound");
    let card = process.open();
    let is_open = |fd| std::fs::symlink_metadata(format!("/proc/{}/fd/{fd}", process.child.id())).is_ok();
    let lowest_free = (0..).find(|fd: &u64| !is_open(*fd)).unwrap();
    let limit = |files| {
        let limit = Rlimit { current: Some(files), maximum: Some(4096) };
        prlimit(Some(process.id()), Resource::Nofile, limit).unwrap()
    };
    limit(lowest_free);
    let refused = Card::open(&process.name, Duration::ZERO).unwrap_err();
    assert!(matches!(refused, OpenError::NoAnswer(_)), "{refused}");
    let before = process.cpu_time();
    std::thread::sleep(Duration::from_millis(500));
    let cpu = process.cpu_time() - before;
    assert!(cpu < Duration::from_millis(400), "the waiting card used {cpu:?} in half a second");
    limit(4096);
    process.open();
    assert!(card.is_alive());
}

#[test]
fn an_idle_card_sleeps_and_sends_heartbeats() {
    let process = Process::start("idle", "unbound");
    let card = process.open();
    load_kernels(&card);
    let mut ring = open_ring(&card, 8);
    ring.submit(&descriptor("sum", 8, 0)).unwrap();
    ring.wait(TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_millis(50));

    let beats = || card.registers().heartbeat().load(Ordering::Relaxed);
    let mut measured = Vec::new();
    // Other processes may disturb one measurement, not all.
    let is_idle = (0..5).any(|_| {
        let (cpu_before, beats_before) = (process.cpu_time(), beats());
        std::thread::sleep(Duration::from_secs(2));
        let (cpu, beaten) = (process.cpu_time() - cpu_before, beats() - beats_before);
        measured.push((cpu, beaten));
        // Two seconds with a clock tick of 10 ms: 1 % is two ticks.
        cpu <= Duration::from_millis(20) && (5..=40).contains(&beaten)
    });
    assert!(is_idle, "processor time and beats in 2 s: {measured:?}");

    // It wakes for the next command, long before its next heartbeat is due.
    let mut medians = (0..5).map(|_| {
        let mut round_trips = [(); 20].map(|()| {
            std::thread::sleep(Duration::from_millis(2));
            let started = Instant::now();
            ring.submit(&descriptor("sum", 8, 0)).unwrap();
            ring.wait(TIMEOUT).unwrap();
            started.elapsed()
        });
        round_trips.sort();
        round_trips[10]
    });
    assert!(medians.any(|median| median < Duration::from_millis(20)), "it waits for its heartbeat");
}

#[test]
fn an_armed_interrupt_makes_the_descriptor_readable_once() {
    let process = Process::start("interrupt", "unbound");
    let card = process.open();
    load_kernels(&card);
    let mut ring = open_ring(&card, 8);
    let now = Duration::ZERO;
    ring.submit(&descriptor("sum", 8, 0)).unwrap();
    ring.wait(TIMEOUT).unwrap();
    assert!(!is_ready(card.interrupt_fd(), now), "not armed");

    ring.arm_interrupt();
    assert!(ring.poll().unwrap().is_none());
    assert!(!is_ready(card.interrupt_fd(), now), "nothing completed");
    ring.submit(&descriptor("slow", 5, 1)).unwrap();
    assert!(is_ready(card.interrupt_fd(), TIMEOUT));
    assert_eq!(ring.wait(TIMEOUT).unwrap().cookie, 1);

    ring.arm_interrupt();
    assert!(!is_ready(card.interrupt_fd(), now), "arming clears");
}

#[test]
fn a_card_ends_with_its_owner() {
    let mut process = Process::start("owner", "owner");
    let owner = Card::open_as_owner(&process.name, TIMEOUT).unwrap();
    let user = process.open();
    load_kernels(&user);
    match Card::open_as_owner(&process.name, TIMEOUT) {
        Err(OpenError::Refused { refusal, .. }) => assert_eq!(refusal, Refusal::OwnerRejected),
        other => panic!("{other:?}"),
    }
    // Also during a command.
    let mut ring = open_ring(&user, 8);
    ring.submit(&descriptor("slow", 60_000, 0)).unwrap();
    std::thread::sleep(CLAIM + Duration::from_millis(200));
    assert!(user.is_alive(), "an owned card outlives the time to claim it");
    drop(owner);
    assert_eq!(process.ended().code(), Some(ENDED));
    assert!(!user.is_alive());
    match ring.wait(TIMEOUT) {
        Ok(last) => assert_eq!(last.outcome, Err(Fault::new(Cause::Interrupted, 0))),
        Err(error) => panic!("{error}"),
    }
    assert!(matches!(ring.wait(TIMEOUT), Err(RingError::CardGone)));
}

#[test]
fn a_card_without_a_client_exits() {
    let mut process = Process::start("unclaimed", "nobody");
    drop(process.open());
    assert_eq!(process.ended().code(), Some(ENDED));
}

#[test]
fn a_card_ends_with_its_launcher() {
    let mut process = Process::start("launcher", "launcher");
    let card = process.open();
    match Card::open_as_owner(&process.name, TIMEOUT) {
        Err(OpenError::Refused { refusal, .. }) => assert_eq!(refusal, Refusal::OwnerRejected),
        other => panic!("{other:?}"),
    }
    drop(process.child.stdin.take());
    assert_eq!(process.ended().code(), Some(ENDED));
    assert!(!card.is_alive());
}

#[test]
fn a_name_is_served_once_and_a_bad_size_is_refused() {
    let process = Process::start("name", "unbound");
    process.open();
    let config = CardConfig::new(process.name.clone(), MEMORY);
    match serve(config) {
        Err(ServeError::NameTaken(name)) => assert_eq!(name, process.name),
        other => panic!("{other:?}"),
    }
    for (bank_bytes, bank_count) in [(0, 1), (4096, 0), (5000, 1), (1 << 62, 4)] {
        let name = format!("test-{}-size", std::process::id()).parse().unwrap();
        let mut config = CardConfig::new(name, bank_bytes);
        config.bank_count = bank_count;
        assert!(matches!(serve(config), Err(ServeError::BankSize { .. })));
    }
}

/// Environment variable that makes a test binary open a card as another user: the card's address.
const OPEN_AS_OTHER_USER: &str = "MILLSTREAM_TEST_OTHER_USER";

/// Exit status after the refusal.
const REFUSED: i32 = 3;

#[test]
fn open_as_other_user() {
    let Ok(address) = std::env::var(OPEN_AS_OTHER_USER) else {
        return;
    };
    let card = Connection::open_any_user(&address, TIMEOUT).unwrap();
    let mut answer = [0u8; 64];
    let (len, fds) = card.receive(&mut answer).unwrap();
    assert_eq!((len, fds.len()), (OpenReply::BYTES, 0));
    assert_eq!(answer[12..16], 1u32.to_le_bytes(), "refused as another user");
    assert_eq!(answer[16..24], [0; 8], "and no register value is disclosed");
    assert_eq!(card.receive(&mut answer).unwrap().0, 0, "and disconnected");
    std::process::exit(REFUSED);
}

#[test]
fn another_user_is_refused() {
    if own_uid() != 0 {
        // Only root can change its user id.
        eprintln!("skipped: needs root to act as another user");
        return;
    }
    let process = Process::start("other-user", "unbound");
    let card = process.open();
    let other_user = again("process::open_as_other_user")
        .env(OPEN_AS_OTHER_USER, process.name.address(0))
        .uid(65534)
        .gid(65534)
        .status()
        .unwrap();
    assert_eq!(other_user.code(), Some(REFUSED));
    assert!(card.is_alive());
    process.open();
}

#[test]
fn a_user_that_scribbles_over_all_registers_harms_only_itself() {
    let process = Process::start("scribble", "unbound");
    let card = process.open();
    load_kernels(&card);
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 11
    };
    for _ in 0..20_000 {
        let offset = 8 * (random() % 64) as usize;
        // Small values, too: they resemble a configuration.
        let value = random() >> (random() % 64);
        // SAFETY: inside BAR0, aligned; atomic as all accesses to registers are.
        let word =
            unsafe { std::sync::atomic::AtomicU64::from_ptr(card.registers().as_ptr().add(offset).cast()) };
        word.store(value, Ordering::Relaxed);
    }
    assert!(card.is_alive());
    // The user restores the registers that it overwrote; then the card serves it again.
    let registers = card.registers();
    registers.interrupt_waiters().store(0, Ordering::Relaxed);
    let mut ring = open_ring(&card, 8);
    ring.submit(&Descriptor {
        region: region_of("sum"),
        flags: 0,
        args: MemoryRange::new(INPUT, 8),
        result: MemoryRange::new(OUTPUT, 8),
        cookie: 77,
    })
    .unwrap();
    let completion = ring.wait(TIMEOUT).unwrap();
    assert_eq!((completion.cookie, completion.outcome), (77, Ok(())));
}
