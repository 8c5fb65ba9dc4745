//! Regions and DMA transfers of cards on the network: kernels, interrupts, faults.

use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{Card, RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::codes::{MessageKind, RegionState};
use millstream_card_abi::command::Cause;
use millstream_card_abi::dma::{BAR2_OFFSET, DmaDescriptor, DmaOperation};
use millstream_card_abi::image::image_hash;
use millstream_card_abi::registers::{DMA_DESCRIPTOR_BYTES, DMA_RING, DMA_RING_SLOTS};
use millstream_card_abi::registers::{REGION_CONTROL, REGION_STRIDE, at, region_at};

use crate::cards::{BANK, NetworkCard, device};
use crate::host::TIMEOUT;

const LEASE: Duration = Duration::from_secs(20);

fn leased() -> (NetworkCard, RemoteCard) {
    let card = NetworkCard::start();
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    (card, node)
}

#[track_caller]
fn cause(outcome: Result<impl std::fmt::Debug, RemoteError>) -> (u32, Cause, u64) {
    match outcome.unwrap_err().kind {
        RemoteErrorKind::Rejected { region, cause, detail }
        | RemoteErrorKind::TransferFailed { slot: region, cause, detail } => (region, cause, detail),
        other => panic!("{other}"),
    }
}

fn region_word(node: &RemoteCard, region: usize, register: usize) -> u64 {
    node.register(REGION_CONTROL + region * REGION_STRIDE + register).unwrap()
}

#[test]
fn a_kernel_is_loaded_run_and_replaced_while_the_other_region_runs() {
    let (_card, node) = leased();
    let hash = node.load(0, KernelSource::Builtin("null")).unwrap();
    assert_eq!(hash, image_hash(b"null"));
    node.load(1, KernelSource::Builtin("spin")).unwrap();
    let spinning = node.start(1, &RunRequest::new(&[])).unwrap();
    for run in 0..50 {
        let results = node.run(0, &RunRequest::new(&[run, 2, 3, 4]), TIMEOUT).unwrap();
        assert_eq!(results, [run, 2, 3, 4]);
    }
    node.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    node.load(0, KernelSource::Builtin("mix")).unwrap();
    let [sweeps, last, ..] = node.run(0, &RunRequest::new(&[0, 8, 3]), TIMEOUT).unwrap();
    let mut word = [0; 8];
    node.read(0, &mut word).unwrap();
    assert_eq!((sweeps, u64::from_le_bytes(word)), (3, last));
    // The other region is not affected.
    assert_eq!(region_word(&node, 1, region_at::status) as u32, RegionState::Running as u32);
    let progress = region_word(&node, 1, region_at::progress);
    let until = Instant::now() + TIMEOUT;
    while region_word(&node, 1, region_at::progress) == progress {
        assert!(Instant::now() < until, "it has stopped");
    }
    assert!(node.stop(1).unwrap());
    assert_eq!(cause(node.wait(spinning, TIMEOUT)).1, Cause::Interrupted);
    assert!(!node.stop(1).unwrap(), "nothing runs any more");
    // An immediate stop does not hide the start before it.
    for _ in 0..50 {
        let started = node.start(1, &RunRequest::new(&[])).unwrap();
        assert!(node.stop(1).unwrap());
        assert_eq!(cause(node.wait(started, TIMEOUT)).1, Cause::Interrupted);
    }
    // A stop ends the run, and the start that waits for its end. Further starts wait without the connection.
    for _ in 0..20 {
        let run = node.submit(1, &RunRequest::new(&[])).unwrap();
        let queued = node.submit(1, &RunRequest::new(&[])).unwrap();
        let third = node.clone();
        let third = std::thread::spawn(move || third.submit(1, &RunRequest::new(&[])));
        node.write(0, &[0; 8]).unwrap();
        assert!(node.stop(1).unwrap());
        for word in [run, queued] {
            assert_eq!(cause(node.wait(word, TIMEOUT)), (1, Cause::Interrupted, 0));
        }
        let third = third.join().unwrap().unwrap();
        assert!(node.stop(1).unwrap());
        assert_eq!(cause(node.wait(third, TIMEOUT)).1, Cause::Interrupted);
    }
    assert!(!node.stop(1).unwrap(), "nothing runs any more");
    assert_eq!(region_word(&node, 0, region_at::runs), 51);
    node.unload(0).unwrap();
    assert_eq!(cause(node.run(0, &RunRequest::new(&[]), TIMEOUT)), (0, Cause::RegionEmpty, 0));
}

#[test]
fn what_a_card_cannot_load_or_run_ends_with_its_cause_and_the_card_lives() {
    let (_card, node) = leased();
    let unknown = node.load(0, KernelSource::Builtin("nonsense")).unwrap_err();
    assert!(unknown.to_string().contains("it has: verify, cluster7"), "{unknown}");
    assert!(matches!(
        node.load(7, KernelSource::Builtin("null")).unwrap_err().kind,
        RemoteErrorKind::NoSuchRegion { region: 7, regions: 2 }
    ));
    let at = BANK;
    let image = KernelSource::Image { image: b"not a kernel", at };
    assert_eq!(cause(node.load(0, image)), (0, Cause::KernelFormat, u64::from_le_bytes(*b"not a ke")));
    for (span, hash, expected) in [
        (MemoryRange::new(at, 12), 7, (Cause::KernelHash, image_hash(b"not a kernel"))),
        (MemoryRange::new(at, 17 << 20), 0, (Cause::KernelTooLarge, 17 << 20)),
        (MemoryRange::new(4 * BANK - 4, 12), 0, (Cause::ImageOutsideMemory, 4 * BANK - 4)),
        (MemoryRange::new(u64::MAX, 1), 0, (Cause::ImageOutsideMemory, u64::MAX)),
    ] {
        let (region, cause, detail) = cause(node.load(1, KernelSource::InMemory { span, hash }));
        assert_eq!((region, (cause, detail)), (1, expected));
    }

    node.load(0, KernelSource::Builtin("mix")).unwrap();
    // Outside the granted banks, outside memory, and banks that do not exist.
    let only_bank_1 = RunRequest { banks: 0b10, ..RunRequest::new(&[BANK - 8, 16, 1]) };
    assert_eq!(cause(node.run(0, &only_bank_1, TIMEOUT)), (0, Cause::AccessViolation, BANK - 8));
    assert_eq!(
        cause(node.run(0, &RunRequest::new(&[u64::MAX - 7, 8, 1]), TIMEOUT)),
        (0, Cause::AccessViolation, u64::MAX - 7)
    );
    let too_many = RunRequest { banks: 0b1_0000, ..RunRequest::new(&[]) };
    assert_eq!(cause(node.run(0, &too_many, TIMEOUT)), (0, Cause::NoSuchBank, 0b1_0000));
    assert_eq!(cause(node.run(0, &RunRequest::new(&[0, 9, 1]), TIMEOUT)), (0, Cause::InvalidArgument, 1));
    let endless =
        RunRequest { timeout: Some(Duration::from_millis(30)), ..RunRequest::new(&[0, BANK, u64::MAX]) };
    assert_eq!(cause(node.run(0, &endless, TIMEOUT)), (0, Cause::DeadlineExceeded, 30_000_000));
    assert_eq!(region_word(&node, 0, region_at::failed_runs), 4);

    node.load(1, KernelSource::Builtin("spin")).unwrap();
    assert_eq!(cause(node.run(1, &RunRequest::new(&[13]), TIMEOUT)).1, Cause::KernelFailed);
    assert_eq!(cause(node.run(1, &RunRequest::new(&[14]), TIMEOUT)), (1, Cause::KernelTrapped, 14));
    assert_eq!(node.run(0, &RunRequest::new(&[0, 8, 1]), TIMEOUT).unwrap()[0], 1);
}

#[test]
fn a_command_that_is_not_answered_is_waited_for_as_long_as_the_node_said() {
    let card = NetworkCard::start();
    let timeout = Duration::from_secs(3);
    let options = RemoteOptions { timeout, ..RemoteOptions::default() };
    let node = RemoteCard::connect(&device(), &card.address, options).unwrap();
    node.acquire(LEASE, TIMEOUT).unwrap();
    node.load(0, KernelSource::Builtin("spin")).unwrap();
    let spinning = node.start(0, &RunRequest::new(&[])).unwrap();
    // During a run, the region reads no doorbell except a stop.
    for command in [node.load(0, KernelSource::Builtin("null")).map(drop), node.unload(0)] {
        match command.unwrap_err().kind {
            RemoteErrorKind::TimedOut(limit, _) => assert_eq!(limit, timeout),
            other => panic!("{other}"),
        }
    }
    // A stop is executed first and discards the commands whose wait has timed out.
    assert!(node.stop(0).unwrap());
    assert_eq!(cause(node.wait(spinning, TIMEOUT)).1, Cause::Interrupted);
    let spinning = node.start(0, &RunRequest::new(&[])).unwrap();
    node.release().unwrap();
    assert!(node.wait(spinning, TIMEOUT).is_err());
}

#[test]
fn back_to_back_commands_are_all_executed() {
    let (_card, node) = leased();
    node.load(0, KernelSource::Builtin("null")).unwrap();
    for round in 0..300 {
        // The second doorbell may arrive before the region has read the first.
        let [first, second] = [1, 2].map(|turn| node.start(0, &RunRequest::new(&[round, turn])).unwrap());
        assert_eq!(node.wait(first, TIMEOUT).unwrap()[..2], [round, 1]);
        assert_eq!(node.wait(second, TIMEOUT).unwrap()[..2], [round, 2]);
        node.start(0, &RunRequest::new(&[])).unwrap();
        node.load(0, KernelSource::Builtin("null")).unwrap();
    }
    assert_eq!(region_word(&node, 0, region_at::runs), 3 * 300);
}

#[test]
fn an_interrupt_says_which_card_which_region_and_why() {
    let cards = [leased(), leased()];
    let ids = cards.each_ref().map(|(_, node)| node.hello().card);
    assert_ne!(ids[0], ids[1]);
    for (card, (_, node)) in cards.iter().enumerate() {
        for region in [1, 0] {
            node.load(region, KernelSource::Builtin("spin")).unwrap();
            for (order, cause) in [(14, Cause::KernelTrapped), (13, Cause::KernelFailed)] {
                let run = node.start(region, &RunRequest::new(&[order])).unwrap();
                let message = node.message(TIMEOUT).unwrap().expect("an interrupt");
                assert_eq!((message.card, message.epoch), (ids[card], node.held().unwrap().epoch));
                assert_eq!((message.kind, message.region), (MessageKind::RegionFault, region));
                assert_eq!((message.cause, message.sequence), (Some(cause), run));
            }
        }
        assert!(node.message(Duration::from_millis(20)).unwrap().is_none());
    }
}

#[test]
fn cards_copy_between_each_other_and_within_themselves() {
    let (first, one) = leased();
    let (second, other) = leased();
    let data: Vec<u8> = (0..3_000_000u32).map(|at| (at / 7) as u8).collect();
    one.write(100, &data).unwrap();
    one.connect_peer(2, &second.address).unwrap();
    let there = other.held().unwrap().memory;
    let write = DmaDescriptor {
        operation: DmaOperation::Write,
        peer: 2,
        local: MemoryRange::new(100, data.len() as u64),
        remote: there.addr + BANK,
        key: there.rkey.get(),
        notify: false,
    };
    one.run_dma(&[write], TIMEOUT).unwrap();
    let mut back = vec![0; data.len()];
    other.read(BANK, &mut back).unwrap();
    assert!(back == data);
    // Back to another offset, through the DMA window, in one list of three descriptors.
    let len = 1000;
    let read = DmaDescriptor {
        operation: DmaOperation::Read,
        local: MemoryRange::new(3 * BANK, len),
        remote: there.addr + BANK + 7,
        ..write
    };
    let into = DmaDescriptor {
        operation: DmaOperation::Local,
        local: MemoryRange::new(3 * BANK, len),
        remote: BAR2_OFFSET | 64,
        ..write
    };
    let out = DmaDescriptor { local: MemoryRange::new(BAR2_OFFSET | 64, len), remote: 2 * BANK, ..into };
    one.run_dma(&[read, into, out], TIMEOUT).unwrap();
    let mut back = vec![0; len as usize];
    one.read(2 * BANK, &mut back).unwrap();
    assert!(back == data[7..7 + len as usize]);
    assert_eq!(one.register(at::dma_completed).unwrap(), 4);
    assert_eq!(one.register(at::bank_written + 3 * 8).unwrap(), len);

    // The engine rejects invalid descriptors one by one and continues.
    for (bad, expected) in [
        (DmaDescriptor { peer: 1, ..write }, Cause::DmaPeerNotConnected),
        (DmaDescriptor { peer: 77, ..write }, Cause::DmaPeerNotConnected),
        (DmaDescriptor { local: MemoryRange::new(4 * BANK, 1), ..write }, Cause::DmaOutsideMemory),
        (DmaDescriptor { remote: 4 * BANK, ..into }, Cause::DmaOutsideMemory),
        (DmaDescriptor { remote: 3 * BANK + 1, ..into }, Cause::DmaOutsideMemory),
        (
            DmaDescriptor { local: MemoryRange::new(BAR2_OFFSET | 1 << 40, 1), ..into },
            Cause::DmaOutsideMemory,
        ),
        (DmaDescriptor { remote: there.addr + 4 * BANK - 1, ..write }, Cause::DmaRemoteAccess),
    ] {
        assert_eq!(cause(one.run_dma(&[bad], TIMEOUT)).1, expected, "{bad:?}");
    }
    // The last one has broken the connection; a new one works until the other card's lease ends.
    assert_eq!(cause(one.run_dma(&[write], TIMEOUT)).1, Cause::DmaPeerNotConnected);
    one.connect_peer(2, &second.address).unwrap();
    one.run_dma(&[write], TIMEOUT).unwrap();
    other.release().unwrap();
    assert_eq!(cause(one.run_dma(&[write], TIMEOUT)).1, Cause::DmaRemoteAccess);
    let refused = one.connect_peer(0, "nobody").unwrap_err();
    assert!(refused.to_string().contains("host:port"), "{refused}");
    drop(first);
}

/// A holder that commands connections without waiting for their outcome takes one thread of the card for each peer.
#[test]
fn attempts_to_connect_a_peer_follow_each_other() {
    let first = NetworkCard::start();
    let timeout = Duration::from_secs(3);
    let options = RemoteOptions { timeout, ..RemoteOptions::default() };
    let one = RemoteCard::connect(&device(), &first.address, options).unwrap();
    one.acquire(LEASE, TIMEOUT).unwrap();
    let (second, _other) = leased();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let tasks = format!("/proc/{}/task", first.process.id());
    let attempts = || {
        let names = std::fs::read_dir(&tasks).unwrap().map(|task| task.unwrap().path().join("comm"));
        names.filter(|name| std::fs::read_to_string(name).is_ok_and(|name| name == "peer 0\n")).count()
    };
    let most = (0..10).map(|_| {
        assert!(one.connect_peer(0, &address).is_err());
        attempts()
    });
    // A thread may still exit when the next one has started.
    assert!((1..=2).contains(&most.max().unwrap()));
    // The latest command is executed when the attempt has ended.
    let until = Instant::now() + 2 * TIMEOUT;
    while let Err(error) = one.connect_peer(0, &second.address) {
        assert!(Instant::now() < until, "{error}");
    }
}

#[test]
fn a_late_failure_to_connect_a_peer_does_not_disconnect_its_successor() {
    let first = NetworkCard::start();
    let timeout = Duration::from_secs(3);
    let options = RemoteOptions { timeout, ..RemoteOptions::default() };
    let one = RemoteCard::connect(&device(), &first.address, options).unwrap();
    one.acquire(LEASE, TIMEOUT).unwrap();
    let (second, other) = leased();
    // It accepts the connection, and answers nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let refused = one.connect_peer(0, &silent.local_addr().unwrap().to_string()).unwrap_err();
    assert!(matches!(refused.kind, RemoteErrorKind::TimedOut(..)), "{refused}");
    let until = Instant::now() + TIMEOUT;
    while let Err(error) = one.connect_peer(0, &second.address) {
        assert!(Instant::now() < until, "{error}");
    }
    drop(silent);
    let there = other.held().unwrap().memory;
    let copy = DmaDescriptor {
        operation: DmaOperation::Write,
        peer: 0,
        local: MemoryRange::new(0, 4096),
        remote: there.addr,
        key: there.rkey.get(),
        notify: false,
    };
    let until = Instant::now() + Duration::from_millis(500);
    while Instant::now() < until {
        one.run_dma(&[copy], TIMEOUT).unwrap();
    }
}

#[test]
fn of_copies_that_travel_together_those_before_a_bad_one_are_made_and_those_behind_it_are_not() {
    let (_first, one) = leased();
    let (second, other) = leased();
    one.connect_peer(0, &second.address).unwrap();
    one.connect_peer(1, &second.address).unwrap();
    let there = other.held().unwrap().memory;
    let len = 5000;
    let copy = |peer: u16, index: u64| DmaDescriptor {
        operation: DmaOperation::Write,
        peer,
        local: MemoryRange::new(index * len, len),
        remote: there.addr + index * 8192,
        key: there.rkey.get(),
        notify: false,
    };
    let sent = |index: u64| vec![index as u8 + 1; len as usize];
    for index in 0..16 {
        one.write(index * len, &sent(index)).unwrap();
    }
    let arrived = |index: u64| {
        let mut bytes = vec![0; len as usize];
        other.read(index * 8192, &mut bytes).unwrap();
        bytes == sent(index)
    };
    // One list for two peers, with a read and an empty transfer.
    let mut list: Vec<_> = (0..8).map(|index| copy(0, index)).collect();
    list[2].local.len = 0;
    (list[5].peer, list[6].peer) = (1, 1);
    list[7] = DmaDescriptor {
        operation: DmaOperation::Read,
        local: MemoryRange::new(3 * BANK, len),
        remote: there.addr,
        ..list[7]
    };
    one.run_dma(&list, TIMEOUT).unwrap();
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(arrived), [true, true, false, true, true, true, true, false]);
    let mut back = vec![0; len as usize];
    one.read(3 * BANK, &mut back).unwrap();
    assert!(back == sent(0));
    assert_eq!(one.register(at::dma_bytes).unwrap(), 7 * len);
    assert_eq!(one.register(at::bank_read).unwrap(), 6 * len);

    let mut list: Vec<_> = (8..16).map(|index| copy(0, index)).collect();
    list[3].remote = there.addr + 4 * BANK - 1;
    let (slot, refused, _) = cause(one.run_dma(&list, TIMEOUT));
    assert_eq!((slot, refused), (8 + 3, Cause::DmaRemoteAccess));
    assert_eq!([8, 9, 10, 11, 12, 15].map(arrived), [true, true, true, false, false, false]);
    assert_eq!(one.register(at::dma_completed).unwrap(), 16);
    assert_eq!(one.register(at::dma_failed).unwrap(), 5);
    assert_eq!(one.register(at::dma_bytes).unwrap(), 10 * len);
    let causes = (8..16).map(|slot| one.snapshot().unwrap().u32_at(at::dma_cause + 4 * slot));
    let expected =
        [0, 0, 0, Cause::DmaRemoteAccess.code()].into_iter().chain([Cause::DmaPeerNotConnected.code(); 4]);
    assert!(causes.eq(expected));
    // The connection to the other peer still works.
    one.run_dma(&[copy(1, 15)], TIMEOUT).unwrap();
    assert!(arrived(15));

    // The engine also rejects only the transfer whose range exceeds the address space.
    one.connect_peer(0, &second.address).unwrap();
    let mut list: Vec<_> = (8..16).map(|index| copy(0, index)).collect();
    list[3].remote = u64::MAX - 100;
    let (slot, refused, _) = cause(one.run_dma(&list, TIMEOUT));
    assert_eq!((slot, refused), (17 + 3, Cause::DmaRemoteAccess));
    assert_eq!(one.register(at::dma_bytes).unwrap(), (10 + 1 + 3) * len);
}

#[test]
fn each_copy_of_a_full_ring_may_fail_while_its_node_sleeps() {
    let (_card, node) = leased();
    let bad = DmaDescriptor {
        operation: DmaOperation::Local,
        peer: 0,
        local: MemoryRange::new(4 * BANK, 1),
        remote: 0,
        key: 0,
        notify: false,
    };
    let ring = bad.to_bytes().repeat(DMA_RING_SLOTS);
    assert_eq!(ring.len(), DMA_RING_SLOTS * DMA_DESCRIPTOR_BYTES);
    node.write_control(DMA_RING, &ring).unwrap();
    let slots = DMA_RING_SLOTS as u64;
    node.write_control(at::dma_producer, &slots.to_le_bytes()).unwrap();
    // The client polls no message until the card has executed all descriptors.
    let until = Instant::now() + TIMEOUT;
    while node.register(at::dma_failed).unwrap() < slots {
        assert!(Instant::now() < until, "the card has stopped");
        std::thread::sleep(Duration::from_millis(1));
    }
    for sequence in 1..=slots {
        let message = node.message(TIMEOUT).unwrap().expect("a message for each of them");
        let reported = (message.kind, message.cause, message.sequence, u64::from(message.region));
        assert_eq!(reported, (MessageKind::DmaFault, Some(Cause::DmaOutsideMemory), sequence, sequence - 1));
    }
    assert_eq!(node.register(at::messages_dropped).unwrap(), 0);
    // `run_dma` with such a list returns the first fault.
    let list = vec![bad; 3 * DMA_RING_SLOTS];
    assert_eq!(cause(node.run_dma(&list, TIMEOUT)), (0, Cause::DmaOutsideMemory, 4 * BANK));
    assert!(node.message(Duration::from_millis(20)).unwrap().is_none());
    node.run_dma(&[DmaDescriptor { local: MemoryRange::new(BANK, 8), ..bad }], TIMEOUT).unwrap();
}

#[test]
fn an_invalid_dma_producer_index_is_rejected_once_and_may_be_corrected() {
    let (_card, node) = leased();
    let within = |to| DmaDescriptor {
        operation: DmaOperation::Local,
        peer: 0,
        local: MemoryRange::new(0, 64),
        remote: to,
        key: 0,
        notify: false,
    };
    node.write(0, &[7; 64]).unwrap();
    node.run_dma(&[within(64), within(128)], TIMEOUT).unwrap();
    for producer in [1, 3 + DMA_RING_SLOTS as u64, u64::MAX] {
        node.write_control(at::dma_producer, &producer.to_le_bytes()).unwrap();
        let message = node.message(TIMEOUT).unwrap().expect("a message that it was refused");
        assert_eq!((message.kind, message.cause), (MessageKind::DmaFault, Some(Cause::DmaRingOverrun)));
        assert_eq!(message.values[1], producer);
        assert!(node.message(Duration::from_millis(20)).unwrap().is_none());
    }
    assert_eq!(node.register(at::dma_consumer).unwrap(), 2);
    node.run_dma(&[within(192)], TIMEOUT).unwrap();
    let mut bytes = [0; 64];
    node.read(192, &mut bytes).unwrap();
    assert_eq!((bytes, node.register(at::dma_completed).unwrap()), ([7; 64], 3));
}

#[test]
fn copies_of_a_lease_that_has_ended_are_not_made_again() {
    let (_card, node) = leased();
    let within = |from, to| DmaDescriptor {
        operation: DmaOperation::Local,
        peer: 0,
        local: MemoryRange::new(from, 4096),
        remote: to,
        key: 0,
        notify: false,
    };
    // More than two rings of transfers, few, and more again: the ring of every lease begins at its start.
    for copies in [2 * DMA_RING_SLOTS as u64 + 9, 3, 20] {
        let input: Vec<u8> = (0..4096).map(|at| (at + copies as usize) as u8).collect();
        node.write(0, &input).unwrap();
        let list: Vec<_> = (1..=copies).map(|place| within(0, place * 8192)).collect();
        node.run_dma(&list, TIMEOUT).unwrap();
        let mut output = vec![0; 4096];
        node.read(copies * 8192, &mut output).unwrap();
        assert!(output == input);
        assert_eq!(node.register(at::dma_completed).unwrap(), copies);
        node.release().unwrap();
        node.acquire(LEASE, TIMEOUT).unwrap();
        assert_eq!(node.register(at::dma_completed).unwrap(), 0);
        node.read(copies * 8192, &mut output).unwrap();
        assert!(output.iter().all(|byte| *byte == 0));
        assert_eq!(node.register(at::dma_failed).unwrap(), 0);
    }
    // A failed transfer fails alone: the ones after it are complete when its error arrives.
    let mut list: Vec<_> = (1..=30).map(|place| within(0, place * 8192)).collect();
    list[10].remote = u64::MAX / 4;
    let refused = cause(node.run_dma(&list, TIMEOUT));
    assert_eq!((refused.1, node.register(at::dma_failed).unwrap()), (Cause::DmaOutsideMemory, 1));
    node.run_dma(&list[..10], TIMEOUT).unwrap();
}

/// All users of the card's host map BAR0.
#[test]
fn a_local_user_who_overwrites_the_size_of_a_bank_does_not_stop_dma() {
    let (card, node) = leased();
    let name = format!("net-{}", card.process.id()).parse().unwrap();
    let user = Card::open(&name, TIMEOUT).unwrap();
    user.registers().bank_bytes().store(0, Ordering::Relaxed);
    let copy = DmaDescriptor {
        operation: DmaOperation::Local,
        peer: 0,
        local: MemoryRange::new(0, 4096),
        remote: BANK,
        key: 0,
        notify: false,
    };
    node.write(0, &[7; 4096]).unwrap();
    node.run_dma(&[copy], TIMEOUT).unwrap();
    let mut output = [0; 4096];
    node.read(BANK, &mut output).unwrap();
    assert!(output == [7; 4096]);
    node.release().unwrap();
    node.acquire(LEASE, TIMEOUT).unwrap();
}

#[test]
fn a_card_that_dies_in_the_middle_is_noticed() {
    // During a kernel.
    let (mut card, node) = leased();
    node.load(0, KernelSource::Builtin("spin")).unwrap();
    let running = node.start(0, &RunRequest::new(&[])).unwrap();
    card.kill();
    let started = Instant::now();
    assert!(node.wait(running, TIMEOUT).unwrap_err().is_fatal());
    assert!(started.elapsed() < TIMEOUT / 2);
    assert!(node.read(0, &mut [0]).is_err());

    // During a transfer, and during a copy from another card.
    let (mut card, node) = leased();
    let (_other_card, other) = leased();
    other.connect_peer(0, &card.address).unwrap();
    let there = node.held().unwrap().memory;
    let copy = DmaDescriptor {
        operation: DmaOperation::Write,
        peer: 0,
        local: MemoryRange::new(0, 4 * BANK),
        remote: there.addr,
        key: there.rkey.get(),
        notify: false,
    };
    std::thread::scope(|scope| {
        let transfers = scope.spawn(|| {
            let bytes = vec![7; BANK as usize];
            loop {
                if let Err(error) = node.write(0, &bytes) {
                    return error;
                }
            }
        });
        let copies = scope.spawn(|| {
            loop {
                if let Err(error) = other.run_dma(&[copy], TIMEOUT) {
                    return error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(50));
        card.kill();
        assert!(transfers.join().unwrap().is_fatal());
        let (_, cause, _) = cause(Err::<(), _>(copies.join().unwrap()));
        assert!(matches!(cause, Cause::DmaPeerLost | Cause::DmaPeerNotConnected), "{cause}");
    });
    // The surviving card remains usable.
    other.write(0, &[1]).unwrap();
}

#[test]
fn a_holder_that_dies_in_the_middle_of_a_kernel_leaves_a_card_that_works() {
    let (card, node) = leased();
    node.load(0, KernelSource::Builtin("spin")).unwrap();
    node.start(0, &RunRequest::new(&[])).unwrap();
    drop(node);
    let next = card.connect();
    next.acquire(LEASE, TIMEOUT).unwrap();
    assert_eq!(region_word(&next, 0, region_at::status) as u32, RegionState::Empty as u32);
    next.load(0, KernelSource::Builtin("null")).unwrap();
    assert_eq!(next.run(0, &RunRequest::new(&[5]), TIMEOUT).unwrap()[0], 5);
    assert_eq!(next.message(Duration::ZERO).unwrap().map(|message| message.kind), None::<MessageKind>);
}

#[test]
fn a_paused_card_stops_and_resumes() {
    let (_card, node) = leased();
    node.write(0, &[9; 64]).unwrap();
    node.load(0, KernelSource::Builtin("spin")).unwrap();
    node.start(0, &RunRequest::new(&[])).unwrap();
    let written = node.pause().unwrap();
    assert_eq!(written, 4096);
    let state = |node: &RemoteCard| region_word(node, 0, region_at::status) as u32;
    assert_eq!(state(&node), RegionState::Paused as u32);
    let points = region_word(&node, 0, region_at::safe_points);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(region_word(&node, 0, region_at::safe_points), points);
    node.resume().unwrap();
    let until = Instant::now() + TIMEOUT;
    while region_word(&node, 0, region_at::safe_points) == points {
        assert!(Instant::now() < until, "it does not go on");
    }
    // A lease can end while the card is paused.
    node.pause().unwrap();
    node.release().unwrap();
    node.acquire(LEASE, TIMEOUT).unwrap();
    node.load(0, KernelSource::Builtin("null")).unwrap();
    node.run(0, &RunRequest::new(&[]), TIMEOUT).unwrap();
    assert_eq!(node.clear().unwrap(), ());
}
