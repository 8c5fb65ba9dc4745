//! Every operation without faults: correct data and completions.

mod common;

use common::{A, B, Pair, Random};
use millstream_proto::{
    Event, IpIdentification, Mtu, ReceivedKind, SendModifier, SendOp, Status, TransmitLimits, WorkId,
};
use millstream_wire::Rkey;

const KEY: Rkey = Rkey::new(0x1234_5678);
const VA: u64 = 0x7f00_0000_1000;

fn pair(mtu: Mtu) -> Pair {
    let mut pair = Pair::new(mtu, 1);
    let content = Random(7).bytes(1 << 20);
    pair.ends[B].world.region(KEY.get(), VA, 1 << 20).bytes = content;
    pair
}

fn lengths(mtu: Mtu) -> Vec<usize> {
    let mtu = mtu.bytes() as usize;
    vec![0, 1, 3, mtu - 1, mtu, mtu + 1, 2 * mtu, 5 * mtu + 7, 300 * mtu.min(1024) + 2]
}

#[test]
fn sends_of_every_length_arrive() {
    for mtu in Mtu::ALL {
        let mut pair = pair(mtu);
        for (n, len) in lengths(mtu).into_iter().enumerate() {
            let message = Random(n as u64).bytes(len);
            let trailer = match n % 3 {
                0 => SendModifier::None,
                _ => SendModifier::Immediate([1, 2, 3, n as u8]),
            };
            pair.ends[B].world.receive(100 + n as u64, len);
            pair.post(A, n as u64, SendOp::Send(trailer), message);
        }
        pair.run();
        let count = lengths(mtu).len();
        let expected: Vec<_> = (0..count as u64).map(|id| (id, Status::Success)).collect();
        assert_eq!(pair.ends[A].completions(), expected);
        assert_eq!(pair.ends[B].received.len(), count);
        for (n, (received, memory)) in pair.ends[B].received.iter().enumerate() {
            assert_eq!(received.id.0, 100 + n as u64);
            assert_eq!((received.status, received.kind), (Status::Success, ReceivedKind::Send));
            assert_eq!(memory, &Random(n as u64).bytes(lengths(mtu)[n]));
            assert_eq!(received.len as usize, memory.len());
            assert_eq!(received.immediate, (n % 3 != 0).then_some([1, 2, 3, n as u8]));
        }
    }
}

#[test]
fn writes_of_every_length_arrive() {
    for mtu in Mtu::ALL {
        for (n, len) in lengths(mtu).into_iter().enumerate() {
            let mut pair = pair(mtu);
            let message = Random(n as u64).bytes(len);
            let mut expected = pair.ends[B].world.regions[&KEY].bytes.clone();
            expected[5..5 + len].copy_from_slice(&message);
            pair.ends[B].world.receive(1, 0);
            let immediate = (n % 2 == 1).then_some([9; 4]);
            pair.post(A, 7, SendOp::Write { va: VA + 5, rkey: KEY, immediate }, message);
            pair.run();
            assert_eq!(pair.ends[A].completions(), [(7, Status::Success)]);
            assert!(pair.ends[B].world.regions[&KEY].bytes == expected);
            assert_eq!(pair.ends[B].world.writes, len as u64, "nothing is written twice");
            match &pair.ends[B].received[..] {
                [] => assert_eq!(immediate, None),
                [(received, _)] => {
                    assert_eq!((received.kind, received.len), (ReceivedKind::Write, len as u32));
                    assert_eq!(received.immediate, immediate);
                }
                more => panic!("{more:?}"),
            }
        }
    }
}

#[test]
fn reads_of_every_length_return_the_data() {
    for mtu in Mtu::ALL {
        let mut pair = pair(mtu);
        for (n, len) in lengths(mtu).into_iter().enumerate() {
            pair.post(A, n as u64, SendOp::Read { va: VA + n as u64, rkey: KEY }, vec![0; len]);
        }
        pair.run();
        for (n, len) in lengths(mtu).into_iter().enumerate() {
            let id = millstream_proto::WorkId(n as u64);
            assert!(pair.ends[A].world.work[&id] == pair.ends[B].world.regions[&KEY].bytes[n..n + len]);
        }
        let sum: usize = lengths(mtu).into_iter().sum();
        assert_eq!(pair.ends[B].world.reads, sum as u64, "nothing is read twice");
        assert!(pair.ends[A].completions().into_iter().all(|(_, status)| status == Status::Success));
        assert_eq!(pair.ends[A].connection.counters().retransmitted, 0);
    }
}

#[test]
fn atomic_operations_return_the_original_value() {
    let mut pair = pair(Mtu::B1024);
    pair.ends[B].world.regions.get_mut(&KEY).unwrap().bytes[8..16].copy_from_slice(&40_u64.to_ne_bytes());
    let (va, rkey) = (VA + 8, KEY);
    pair.post(A, 1, SendOp::FetchAdd { va, rkey, add: 2 }, vec![0; 8]);
    pair.post(A, 2, SendOp::CompareSwap { va, rkey, compare: 42, swap: 99 }, vec![0; 8]);
    pair.post(A, 3, SendOp::CompareSwap { va, rkey, compare: 42, swap: 1 }, vec![0; 8]);
    pair.post(A, 4, SendOp::AtomicWrite { va: VA + 16, rkey }, 77_u64.to_ne_bytes().to_vec());
    pair.run();
    let word = |id| {
        u64::from_ne_bytes(pair.ends[A].world.work[&millstream_proto::WorkId(id)][..].try_into().unwrap())
    };
    assert_eq!((word(1), word(2), word(3)), (40, 42, 99));
    let memory = &pair.ends[B].world.regions[&KEY].bytes;
    assert_eq!(memory[8..16], 99_u64.to_ne_bytes());
    assert_eq!(memory[16..24], 77_u64.to_ne_bytes());
    assert_eq!(pair.ends[B].world.atomics, 4);
    assert_eq!(pair.ends[A].completions(), [1, 2, 3, 4].map(|id| (id, Status::Success)));
}

#[test]
fn send_with_invalidate_invalidates() {
    let mut pair = pair(Mtu::B1024);
    pair.ends[B].world.receive(1, 2000);
    pair.post(A, 1, SendOp::Send(SendModifier::Invalidate(KEY)), vec![5; 1500]);
    pair.run();
    assert_eq!(pair.ends[B].received[0].0.invalidated, Some(KEY));
    assert!(!pair.ends[B].world.regions.contains_key(&KEY));
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success)]);
}

fn run_local_operations_behind_sends(pair: &mut Pair) {
    pair.send(A, 1, vec![1]);
    pair.post(A, 2, SendOp::Local, vec![]);
    pair.send(A, 3, vec![1]);
    pair.post(A, 4, SendOp::Local, vec![]);
    pair.run();
    assert_eq!(pair.ends[A].completions(), [1, 2, 3, 4].map(|id| (id, Status::Success)));
}

#[test]
fn local_operations_run_in_posting_order() {
    let mut pair = pair(Mtu::B1024);
    for id in 0..3 {
        pair.ends[B].world.receive(id, 10);
    }
    run_local_operations_behind_sends(&mut pair);
    assert_eq!(pair.ends[A].world.local.len(), 2);
}

#[test]
fn local_operations_run_once_though_requests_before_them_are_sent_again() {
    for lost in [vec![0], vec![1], vec![0, 1]] {
        let mut pair = pair(Mtu::B1024);
        (0..2).for_each(|id| pair.ends[B].world.receive(id, 10));
        let mut seen = 0;
        let lost_packets = lost.clone();
        pair.filter = Some(Box::new(move |from, _| {
            seen += u32::from(from == A);
            from != A || !lost_packets.contains(&(seen - 1))
        }));
        run_local_operations_behind_sends(&mut pair);
        assert_eq!(pair.ends[A].world.local, [WorkId(2), WorkId(4)], "packets {lost:?} were lost");
    }
}

#[test]
fn acks_are_coalesced() {
    let mut pair = pair(Mtu::B1024);
    for id in 0..100 {
        pair.ends[B].world.receive(id, 10);
        pair.send(A, id, vec![1]);
    }
    pair.run();
    let acknowledgements = pair.ends[B].connection.counters().sent;
    assert_eq!(acknowledgements, 1, "a hundred messages that came together");
    assert_eq!(pair.ends[A].completions().len(), 100);
}

#[test]
fn first_packet_in_rtr_reports_established() {
    let mut pair = pair(Mtu::B1024);
    let config = common::config(B, Mtu::B1024);
    pair.ends[B].connection = millstream_proto::Connection::new(config);
    pair.ends[B].world.receive(0, 10);
    pair.ends[B].world.receive(1, 10);
    pair.send(A, 1, vec![1]);
    pair.send(A, 2, vec![1]);
    pair.run();
    let established = pair.ends[B].events.iter().filter(|event| matches!(event, Event::Established)).count();
    assert_eq!(established, 1);
}

#[test]
fn icrc_covers_the_identification_of_segmentation_offload() {
    let mut pair = pair(Mtu::B1024);
    // The test network checks each ICRC with the packet's index in the burst.
    pair.limits = TransmitLimits { identification: IpIdentification::Counted, ..TransmitLimits::NONE };
    pair.post(A, 1, SendOp::Write { va: VA, rkey: KEY, immediate: None }, vec![7; 20_000]);
    pair.post(A, 2, SendOp::Read { va: VA, rkey: KEY }, vec![0; 20_000]);
    pair.run();
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success), (2, Status::Success)]);
}
