//! Regions and copies of cards on the network: kernels, interrupts, faults.

use std::time::{Duration, Instant};

use millstream_card::Span;
use millstream_card::command::Cause;
use millstream_card::net::control::{KernelSource, Start};
use millstream_card::net::{RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions};
use millstream_card::region::codes::{MessageKind, RegionState};
use millstream_card::region::copy::{Copy, CopyOperation, IN_DMA_WINDOW};
use millstream_card::region::image_hash;
use millstream_card::registers::{
    COPY_BYTES, COPY_RING, COPY_SLOTS, REGION_CONTROL, REGION_STRIDE, at, region_at,
};

use crate::cards::{BANK, NetworkCard, device};
use crate::host::PATIENCE;

const LEASE: Duration = Duration::from_secs(20);

fn leased() -> (NetworkCard, RemoteCard) {
    let card = NetworkCard::start();
    let node = card.connect();
    node.acquire(LEASE, PATIENCE).unwrap();
    (card, node)
}

#[track_caller]
fn cause(outcome: Result<impl std::fmt::Debug, RemoteError>) -> (u32, Cause, u64) {
    match outcome.unwrap_err().kind {
        RemoteErrorKind::Refused { region, cause, detail } => (region, cause, detail),
        other => panic!("{other}"),
    }
}

fn region_word(node: &RemoteCard, region: usize, register: usize) -> u64 {
    node.register(REGION_CONTROL + region * REGION_STRIDE + register).unwrap()
}

#[test]
fn a_kernel_is_loaded_run_and_replaced_while_the_other_region_runs() {
    let (_card, node) = leased();
    let hash = node.load(0, KernelSource::Named("null")).unwrap();
    assert_eq!(hash, image_hash(b"null"));
    node.load(1, KernelSource::Named("spin")).unwrap();
    let spinning = node.start(1, &Start::new(&[])).unwrap();
    for run in 0..50 {
        let results = node.run(0, &Start::new(&[run, 2, 3, 4]), PATIENCE).unwrap();
        assert_eq!(results, [run, 2, 3, 4]);
    }
    node.write(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    node.load(0, KernelSource::Named("mix")).unwrap();
    let [sweeps, last, ..] = node.run(0, &Start::new(&[0, 8, 3]), PATIENCE).unwrap();
    let mut word = [0; 8];
    node.read(0, &mut word).unwrap();
    assert_eq!((sweeps, u64::from_le_bytes(word)), (3, last));
    // The other region has not noticed.
    assert_eq!(region_word(&node, 1, region_at::status) as u32, RegionState::Running as u32);
    let progress = region_word(&node, 1, region_at::progress);
    let until = Instant::now() + PATIENCE;
    while region_word(&node, 1, region_at::progress) == progress {
        assert!(Instant::now() < until, "it has stopped");
    }
    assert!(node.stop(1).unwrap());
    assert_eq!(cause(node.wait(spinning, PATIENCE)).1, Cause::Interrupted);
    assert!(!node.stop(1).unwrap(), "nothing runs any more");
    // A stop that follows at once does not hide the start before it.
    for _ in 0..50 {
        let started = node.start(1, &Start::new(&[])).unwrap();
        assert!(node.stop(1).unwrap());
        assert_eq!(cause(node.wait(started, PATIENCE)).1, Cause::Interrupted);
    }
    assert_eq!(region_word(&node, 0, region_at::runs), 51);
    node.unload(0).unwrap();
    assert_eq!(cause(node.run(0, &Start::new(&[]), PATIENCE)), (0, Cause::RegionEmpty, 0));
}

#[test]
fn what_a_card_cannot_load_or_run_ends_with_its_cause_and_the_card_lives() {
    let (_card, node) = leased();
    let unknown = node.load(0, KernelSource::Named("nonsense")).unwrap_err();
    assert!(unknown.to_string().contains("it has: verify, cluster7"), "{unknown}");
    assert!(matches!(
        node.load(7, KernelSource::Named("null")).unwrap_err().kind,
        RemoteErrorKind::NoSuchRegion { region: 7, regions: 2 }
    ));
    let at = BANK;
    let image = KernelSource::Image { image: b"not a kernel", at };
    assert_eq!(cause(node.load(0, image)), (0, Cause::KernelFormat, u64::from_le_bytes(*b"not a ke")));
    for (span, hash, expected) in [
        (Span::new(at, 12), 7, (Cause::KernelHash, image_hash(b"not a kernel"))),
        (Span::new(at, 17 << 20), 0, (Cause::KernelTooLarge, 17 << 20)),
        (Span::new(4 * BANK - 4, 12), 0, (Cause::ImageOutsideMemory, 4 * BANK - 4)),
        (Span::new(u64::MAX, 1), 0, (Cause::ImageOutsideMemory, u64::MAX)),
    ] {
        let (region, cause, detail) = cause(node.load(1, KernelSource::InPlace { span, hash }));
        assert_eq!((region, (cause, detail)), (1, expected));
    }

    node.load(0, KernelSource::Named("mix")).unwrap();
    // Outside the banks that it was given, outside memory, and banks that do not exist.
    let only_bank_1 = Start { banks: 0b10, ..Start::new(&[BANK - 8, 16, 1]) };
    assert_eq!(cause(node.run(0, &only_bank_1, PATIENCE)), (0, Cause::ForeignMemory, BANK - 8));
    assert_eq!(
        cause(node.run(0, &Start::new(&[u64::MAX - 7, 8, 1]), PATIENCE)),
        (0, Cause::ForeignMemory, u64::MAX - 7)
    );
    let too_many = Start { banks: 0b1_0000, ..Start::new(&[]) };
    assert_eq!(cause(node.run(0, &too_many, PATIENCE)), (0, Cause::NoSuchBank, 0b1_0000));
    assert_eq!(cause(node.run(0, &Start::new(&[0, 9, 1]), PATIENCE)), (0, Cause::Argument, 1));
    let endless = Start { deadline: Some(Duration::from_millis(30)), ..Start::new(&[0, BANK, u64::MAX]) };
    assert_eq!(cause(node.run(0, &endless, PATIENCE)), (0, Cause::DeadlineExceeded, 30_000_000));
    assert_eq!(region_word(&node, 0, region_at::failed_runs), 4);

    node.load(1, KernelSource::Named("spin")).unwrap();
    assert_eq!(cause(node.run(1, &Start::new(&[13]), PATIENCE)).1, Cause::KernelFailed);
    assert_eq!(cause(node.run(1, &Start::new(&[14]), PATIENCE)), (1, Cause::KernelTrapped, 14));
    assert_eq!(node.run(0, &Start::new(&[0, 8, 1]), PATIENCE).unwrap()[0], 1);
}

#[test]
fn a_command_that_is_not_answered_is_waited_for_as_long_as_the_node_said() {
    let card = NetworkCard::start();
    let patience = Duration::from_secs(1);
    let options = RemoteOptions { patience, ..RemoteOptions::default() };
    let node = RemoteCard::connect(&device(), &card.address, options).unwrap();
    node.acquire(LEASE, PATIENCE).unwrap();
    node.load(0, KernelSource::Named("spin")).unwrap();
    let spinning = node.start(0, &Start::new(&[])).unwrap();
    // The region looks at no doorbell but that of a stop before the run has ended.
    for command in [node.load(0, KernelSource::Named("null")).map(drop), node.unload(0)] {
        match command.unwrap_err().kind {
            RemoteErrorKind::TimedOut(said, _) => assert_eq!(said, patience),
            other => panic!("{other}"),
        }
    }
    // A stop comes first, and the commands that nobody waits for any more are forgotten.
    assert!(node.stop(0).unwrap());
    assert_eq!(cause(node.wait(spinning, PATIENCE)).1, Cause::Interrupted);
    let spinning = node.start(0, &Start::new(&[])).unwrap();
    node.release().unwrap();
    assert!(node.wait(spinning, PATIENCE).is_err());
}

#[test]
fn commands_that_follow_each_other_at_once_are_all_carried_out() {
    let (_card, node) = leased();
    node.load(0, KernelSource::Named("null")).unwrap();
    for round in 0..300 {
        // The second one is rung while the region may not have seen the first.
        let [first, second] = [1, 2].map(|turn| node.start(0, &Start::new(&[round, turn])).unwrap());
        assert_eq!(node.wait(first, PATIENCE).unwrap()[..2], [round, 1]);
        assert_eq!(node.wait(second, PATIENCE).unwrap()[..2], [round, 2]);
        node.start(0, &Start::new(&[])).unwrap();
        node.load(0, KernelSource::Named("null")).unwrap();
    }
    assert_eq!(region_word(&node, 0, region_at::runs), 3 * 300);
}

#[test]
fn an_interrupt_says_which_card_which_region_and_why() {
    let cards = [leased(), leased()];
    let ids = cards.each_ref().map(|(_, node)| node.greeting().card);
    assert_ne!(ids[0], ids[1]);
    for (card, (_, node)) in cards.iter().enumerate() {
        for region in [1, 0] {
            node.load(region, KernelSource::Named("spin")).unwrap();
            for (order, cause) in [(14, Cause::KernelTrapped), (13, Cause::KernelFailed)] {
                let run = node.start(region, &Start::new(&[order])).unwrap();
                let message = node.message(PATIENCE).unwrap().expect("an interrupt");
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
    let write = Copy {
        operation: CopyOperation::Write,
        peer: 2,
        local: Span::new(100, data.len() as u64),
        remote: there.addr + BANK,
        key: there.rkey.get(),
        notify: false,
    };
    one.copy(&[write], PATIENCE).unwrap();
    let mut back = vec![0; data.len()];
    other.read(BANK, &mut back).unwrap();
    assert!(back == data);
    // Back again to another place, through the DMA window, in one list of three.
    let len = 1000;
    let read = Copy {
        operation: CopyOperation::Read,
        local: Span::new(3 * BANK, len),
        remote: there.addr + BANK + 7,
        ..write
    };
    let into = Copy {
        operation: CopyOperation::Within,
        local: Span::new(3 * BANK, len),
        remote: IN_DMA_WINDOW | 64,
        ..write
    };
    let out = Copy { local: Span::new(IN_DMA_WINDOW | 64, len), remote: 2 * BANK, ..into };
    one.copy(&[read, into, out], PATIENCE).unwrap();
    let mut back = vec![0; len as usize];
    one.read(2 * BANK, &mut back).unwrap();
    assert!(back == data[7..7 + len as usize]);
    assert_eq!(one.register(at::copy_completed).unwrap(), 4);
    assert_eq!(one.register(at::bank_written + 3 * 8).unwrap(), len);

    // Descriptors that make no sense are refused one by one, and the engine goes on.
    for (bad, expected) in [
        (Copy { peer: 1, ..write }, Cause::CopyPeer),
        (Copy { peer: 77, ..write }, Cause::CopyPeer),
        (Copy { local: Span::new(4 * BANK, 1), ..write }, Cause::CopyOutsideMemory),
        (Copy { remote: 4 * BANK, ..into }, Cause::CopyOutsideMemory),
        (Copy { remote: 3 * BANK + 1, ..into }, Cause::CopyOutsideMemory),
        (Copy { local: Span::new(IN_DMA_WINDOW | 1 << 40, 1), ..into }, Cause::CopyOutsideMemory),
        (Copy { remote: there.addr + 4 * BANK - 1, ..write }, Cause::CopyRefused),
    ] {
        assert_eq!(cause(one.copy(&[bad], PATIENCE)).1, expected, "{bad:?}");
    }
    // The last one has cost the connection; a new one works until the other card's lease ends.
    assert_eq!(cause(one.copy(&[write], PATIENCE)).1, Cause::CopyPeer);
    one.connect_peer(2, &second.address).unwrap();
    one.copy(&[write], PATIENCE).unwrap();
    other.release().unwrap();
    assert_eq!(cause(one.copy(&[write], PATIENCE)).1, Cause::CopyRefused);
    let refused = one.connect_peer(0, "nobody").unwrap_err();
    assert!(refused.to_string().contains("host:port"), "{refused}");
    drop(first);
}

#[test]
fn of_copies_that_travel_together_those_before_a_bad_one_are_made_and_those_behind_it_are_not() {
    let (_first, one) = leased();
    let (second, other) = leased();
    one.connect_peer(0, &second.address).unwrap();
    one.connect_peer(1, &second.address).unwrap();
    let there = other.held().unwrap().memory;
    let len = 5000;
    let copy = |peer: u16, index: u64| Copy {
        operation: CopyOperation::Write,
        peer,
        local: Span::new(index * len, len),
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
    // In one list for the card, of two peers, with a read and copies of nothing among them.
    let mut list: Vec<_> = (0..8).map(|index| copy(0, index)).collect();
    list[2].local.len = 0;
    (list[5].peer, list[6].peer) = (1, 1);
    list[7] = Copy {
        operation: CopyOperation::Read,
        local: Span::new(3 * BANK, len),
        remote: there.addr,
        ..list[7]
    };
    one.copy(&list, PATIENCE).unwrap();
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(arrived), [true, true, false, true, true, true, true, false]);
    let mut back = vec![0; len as usize];
    one.read(3 * BANK, &mut back).unwrap();
    assert!(back == sent(0));
    assert_eq!(one.register(at::copy_bytes).unwrap(), 7 * len);
    assert_eq!(one.register(at::bank_read).unwrap(), 6 * len);

    let mut list: Vec<_> = (8..16).map(|index| copy(0, index)).collect();
    list[3].remote = there.addr + 4 * BANK - 1;
    let (slot, refused, _) = cause(one.copy(&list, PATIENCE));
    assert_eq!((slot, refused), (8 + 3, Cause::CopyRefused));
    assert_eq!([8, 9, 10, 11, 12, 15].map(arrived), [true, true, true, false, false, false]);
    assert_eq!(one.register(at::copy_completed).unwrap(), 16);
    assert_eq!(one.register(at::copies_failed).unwrap(), 5);
    assert_eq!(one.register(at::copy_bytes).unwrap(), 10 * len);
    let causes = (8..16).map(|slot| one.snapshot().unwrap().half(at::copy_cause + 4 * slot));
    let expected = [0, 0, 0, Cause::CopyRefused.code()].into_iter().chain([Cause::CopyPeer.code(); 4]);
    assert!(causes.eq(expected));
    // The other peer is as it was.
    one.copy(&[copy(1, 15)], PATIENCE).unwrap();
    assert!(arrived(15));

    // One that would go on behind the last address of all is refused by itself, too.
    one.connect_peer(0, &second.address).unwrap();
    let mut list: Vec<_> = (8..16).map(|index| copy(0, index)).collect();
    list[3].remote = u64::MAX - 100;
    let (slot, refused, _) = cause(one.copy(&list, PATIENCE));
    assert_eq!((slot, refused), (17 + 3, Cause::CopyRefused));
    assert_eq!(one.register(at::copy_bytes).unwrap(), (10 + 1 + 3) * len);
}

#[test]
fn each_copy_of_a_full_ring_may_fail_while_its_node_sleeps() {
    let (_card, node) = leased();
    let bad = Copy {
        operation: CopyOperation::Within,
        peer: 0,
        local: Span::new(4 * BANK, 1),
        remote: 0,
        key: 0,
        notify: false,
    };
    let ring = bad.to_bytes().repeat(COPY_SLOTS);
    assert_eq!(ring.len(), COPY_SLOTS * COPY_BYTES);
    node.control(COPY_RING, &ring).unwrap();
    let slots = COPY_SLOTS as u64;
    node.control(at::copy_producer, &slots.to_le_bytes()).unwrap();
    // The node looks at nothing until the card has told it of all of them, or has not.
    let until = Instant::now() + PATIENCE;
    while node.register(at::copies_failed).unwrap() < slots {
        assert!(Instant::now() < until, "the card has stopped");
        std::thread::sleep(Duration::from_millis(1));
    }
    for sequence in 1..=slots {
        let message = node.message(PATIENCE).unwrap().expect("a message for each of them");
        let told = (message.kind, message.cause, message.sequence, u64::from(message.region));
        assert_eq!(told, (MessageKind::CopyFault, Some(Cause::CopyOutsideMemory), sequence, sequence - 1));
    }
    assert_eq!(node.register(at::messages_lost).unwrap(), 0);
    // By the list of a program, too, which hears of the first.
    let list = vec![bad; 3 * COPY_SLOTS];
    assert_eq!(cause(node.copy(&list, PATIENCE)), (0, Cause::CopyOutsideMemory, 4 * BANK));
    assert!(node.message(Duration::from_millis(20)).unwrap().is_none());
    node.copy(&[Copy { local: Span::new(BANK, 8), ..bad }], PATIENCE).unwrap();
}

#[test]
fn a_copy_producer_that_cannot_be_is_refused_once_and_may_be_corrected() {
    let (_card, node) = leased();
    let within = |to| Copy {
        operation: CopyOperation::Within,
        peer: 0,
        local: Span::new(0, 64),
        remote: to,
        key: 0,
        notify: false,
    };
    node.write(0, &[7; 64]).unwrap();
    node.copy(&[within(64), within(128)], PATIENCE).unwrap();
    for producer in [1, 3 + COPY_SLOTS as u64, u64::MAX] {
        node.control(at::copy_producer, &producer.to_le_bytes()).unwrap();
        let message = node.message(PATIENCE).unwrap().expect("a message that it was refused");
        assert_eq!((message.kind, message.cause), (MessageKind::CopyFault, Some(Cause::CopyRingOverrun)));
        assert_eq!(message.values[1], producer);
        assert!(node.message(Duration::from_millis(20)).unwrap().is_none());
    }
    assert_eq!(node.register(at::copy_consumer).unwrap(), 2);
    node.copy(&[within(192)], PATIENCE).unwrap();
    let mut bytes = [0; 64];
    node.read(192, &mut bytes).unwrap();
    assert_eq!((bytes, node.register(at::copy_completed).unwrap()), ([7; 64], 3));
}

#[test]
fn copies_of_a_lease_that_has_ended_are_not_made_again() {
    let (_card, node) = leased();
    let within = |from, to| Copy {
        operation: CopyOperation::Within,
        peer: 0,
        local: Span::new(from, 4096),
        remote: to,
        key: 0,
        notify: false,
    };
    // More than the ring has twice, fewer, and more again: the ring of every lease begins at its start.
    for copies in [2 * COPY_SLOTS as u64 + 9, 3, 20] {
        let input: Vec<u8> = (0..4096).map(|at| (at + copies as usize) as u8).collect();
        node.write(0, &input).unwrap();
        let list: Vec<_> = (1..=copies).map(|place| within(0, place * 8192)).collect();
        node.copy(&list, PATIENCE).unwrap();
        let mut output = vec![0; 4096];
        node.read(copies * 8192, &mut output).unwrap();
        assert!(output == input);
        assert_eq!(node.register(at::copy_completed).unwrap(), copies);
        node.release().unwrap();
        node.acquire(LEASE, PATIENCE).unwrap();
        assert_eq!(node.register(at::copy_completed).unwrap(), 0);
        node.read(copies * 8192, &mut output).unwrap();
        assert!(output.iter().all(|byte| *byte == 0));
        assert_eq!(node.register(at::copies_failed).unwrap(), 0);
    }
    // One that fails does so by itself, and those behind it have been made when its error arrives.
    let mut list: Vec<_> = (1..=30).map(|place| within(0, place * 8192)).collect();
    list[10].remote = u64::MAX / 4;
    let refused = cause(node.copy(&list, PATIENCE));
    assert_eq!((refused.1, node.register(at::copies_failed).unwrap()), (Cause::CopyOutsideMemory, 1));
    node.copy(&list[..10], PATIENCE).unwrap();
}

#[test]
fn a_card_that_dies_in_the_middle_is_noticed() {
    // In the middle of a kernel.
    let (mut card, node) = leased();
    node.load(0, KernelSource::Named("spin")).unwrap();
    let running = node.start(0, &Start::new(&[])).unwrap();
    card.kill();
    let started = Instant::now();
    assert!(node.wait(running, PATIENCE).unwrap_err().is_fatal());
    assert!(started.elapsed() < PATIENCE / 2);
    assert!(node.read(0, &mut [0]).is_err());

    // In the middle of a transfer, and of a copy from another card.
    let (mut card, node) = leased();
    let (_other_card, other) = leased();
    other.connect_peer(0, &card.address).unwrap();
    let there = node.held().unwrap().memory;
    let copy = Copy {
        operation: CopyOperation::Write,
        peer: 0,
        local: Span::new(0, 4 * BANK),
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
                if let Err(error) = other.copy(&[copy], PATIENCE) {
                    return error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(50));
        card.kill();
        assert!(transfers.join().unwrap().is_fatal());
        let (_, cause, _) = cause(Err::<(), _>(copies.join().unwrap()));
        assert!(matches!(cause, Cause::CopyPeerLost | Cause::CopyPeer), "{cause}");
    });
    // The card that survived goes on.
    other.write(0, &[1]).unwrap();
}

#[test]
fn a_holder_that_dies_in_the_middle_of_a_kernel_leaves_a_card_that_works() {
    let (card, node) = leased();
    node.load(0, KernelSource::Named("spin")).unwrap();
    node.start(0, &Start::new(&[])).unwrap();
    drop(node);
    let next = card.connect();
    next.acquire(LEASE, PATIENCE).unwrap();
    assert_eq!(region_word(&next, 0, region_at::status) as u32, RegionState::Empty as u32);
    next.load(0, KernelSource::Named("null")).unwrap();
    assert_eq!(next.run(0, &Start::new(&[5]), PATIENCE).unwrap()[0], 5);
    assert_eq!(next.message(Duration::ZERO).unwrap().map(|message| message.kind), None::<MessageKind>);
}

#[test]
fn a_paused_card_stands_still_and_goes_on() {
    let (_card, node) = leased();
    node.write(0, &[9; 64]).unwrap();
    node.load(0, KernelSource::Named("spin")).unwrap();
    node.start(0, &Start::new(&[])).unwrap();
    let written = node.pause().unwrap();
    assert_eq!(written, 4096);
    let state = |node: &RemoteCard| region_word(node, 0, region_at::status) as u32;
    assert_eq!(state(&node), RegionState::Parked as u32);
    let points = region_word(&node, 0, region_at::safe_points);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(region_word(&node, 0, region_at::safe_points), points);
    node.resume().unwrap();
    let until = Instant::now() + PATIENCE;
    while region_word(&node, 0, region_at::safe_points) == points {
        assert!(Instant::now() < until, "it does not go on");
    }
    // A lease can end while the card is paused.
    node.pause().unwrap();
    node.release().unwrap();
    node.acquire(LEASE, PATIENCE).unwrap();
    node.load(0, KernelSource::Named("null")).unwrap();
    node.run(0, &Start::new(&[]), PATIENCE).unwrap();
    assert_eq!(node.clear().unwrap(), ());
}
