//! Unreliable connections and datagrams.

mod common;

use std::collections::HashSet;
use std::time::Duration;

use common::{A, B, Craft, Network, Pair, Random, World, address, config, flow, psn, send_config};
use millstream_proto::{
    Config, Datagram, DatagramDestination, DatagramSource, Disposition, DropReason, Event, Mtu, PostError,
    QpState, SendModifier, SendOp, Service, Status, TransmitLimits, UdConfig, UdQueuePair, WorkId,
};
use millstream_wire::{Opcode, Packet, Pkey, Psn, Qkey, Qpn, Rkey};

fn pair() -> Pair {
    let unreliable = |end| Config { service: Service::Uc, ..config(end, Mtu::B256) };
    Pair::with([unreliable(A), unreliable(B)], [send_config(A), send_config(B)], 1)
}

#[test]
fn uc_messages_arrive_whole_or_not_at_all() {
    for seed in 0..20 {
        let mut pair = pair();
        pair.random = Random(seed);
        pair.network = Network { loss: 0.1, duplication: 0.1, reordering: 0.1, ..Network::PERFECT };
        for id in 0..100_u64 {
            pair.ends[B].world.receive(id, 2000);
            let immediate = SendModifier::Immediate((id as u32).to_be_bytes());
            pair.post(A, id, SendOp::Send(immediate), vec![id as u8; (id as usize * 37) % 1500]);
        }
        pair.run();
        let all: Vec<_> = (0..100).map(|id| (id, Status::Success)).collect();
        assert_eq!(pair.ends[A].completions(), all, "complete when sent");
        let received = &pair.ends[B].received;
        assert!((10..100).contains(&received.len()), "{} of 100", received.len());
        let mut numbers = HashSet::new();
        for (nth, (received, memory)) in received.iter().enumerate() {
            let number = u32::from_be_bytes(received.immediate.unwrap());
            assert!(numbers.insert(number), "message {number} twice");
            assert_eq!(received.id.0, nth as u64, "receive requests are not lost with messages");
            assert_eq!(received.len, number * 37 % 1500);
            assert!(memory[..received.len as usize].iter().all(|byte| *byte == number as u8));
        }
        assert_eq!(pair.ends[B].connection.counters().sent, 0, "nothing is answered");
        assert_eq!(pair.ends[A].connection.poll_timeout(), None);
    }
}

/// A SEND of one byte by A, `n` packets after its first PSN.
fn uc_send(n: u32, byte: u8) -> Vec<u8> {
    Craft::new(Opcode::UC_SEND_ONLY, psn(A).plus(n)).payload(vec![byte]).from(A)
}

#[test]
fn forged_uc_packet_does_not_silence_the_sender() {
    for (opcode, len) in
        [(Opcode::UC_SEND_ONLY, 1), (Opcode::UC_SEND_FIRST, 256), (Opcode::UC_SEND_MIDDLE, 256)]
    {
        for ahead in [1, 1000, 0x7f_ffff, 0x80_0000, 0xff_0000] {
            let mut pair = pair();
            (0..4).for_each(|id| pair.ends[B].world.receive(id, 1000));
            assert_eq!(pair.give(B, &uc_send(0, 0x10)), Disposition::Accepted);
            pair.give(B, &Craft::new(opcode, psn(A).plus(ahead)).payload(vec![0xbb; len]).from(A));
            for n in 1..3 {
                assert_eq!(
                    pair.give(B, &uc_send(n, 0x10 + n as u8)),
                    Disposition::Accepted,
                    "{opcode:?} {ahead:#x}"
                );
            }
            let last: Vec<u8> =
                pair.ends[B].received.iter().rev().take(2).map(|(_, memory)| memory[0]).collect();
            assert_eq!(last, [0x12, 0x11]);
        }
    }
}

#[test]
fn uc_sender_that_restarts_at_a_lower_psn_is_heard() {
    let mut pair = pair();
    (0..20).for_each(|id| pair.ends[B].world.receive(id, 100));
    for n in 0..8 {
        assert_eq!(pair.give(B, &uc_send(n, 1)), Disposition::Accepted);
        assert_eq!(pair.give(B, &uc_send(n, 1)), Disposition::Duplicate, "a copy that the network made");
    }
    // A sender that is reset takes longer than a packet that the network repeats.
    pair.now = pair.now + Duration::from_millis(2);
    for n in 0..8 {
        assert_eq!(pair.give(B, &uc_send(n, 1)), Disposition::Accepted);
    }
    for n in (2..5).rev() {
        assert_eq!(pair.give(B, &uc_send(n, 2)), Disposition::Accepted, "other messages are heard at once");
    }
    assert_eq!(pair.ends[B].received.len(), 19);
}

#[test]
fn uc_drops_invalid_requests() {
    let mut pair = pair();
    pair.ends[B].world.region(1, 0, 100);
    let write = |n, rkey| {
        Craft::new(Opcode::UC_WRITE_ONLY, psn(A).plus(n))
            .remote(0, Rkey::new(rkey), 8)
            .payload(vec![1; 8])
            .from(A)
    };
    let dropped = Disposition::Dropped(DropReason::QpState);
    assert_eq!(pair.give(B, &write(0, 2)), dropped, "another key");
    assert_eq!(pair.give(B, &write(1, 1)), Disposition::Accepted);
    assert_eq!(pair.ends[B].connection.state(), QpState::Rts);
    let send = Craft::new(Opcode::UC_SEND_ONLY, psn(A).plus(2)).payload(vec![1; 8]).from(A);
    assert_eq!(pair.give(B, &send), Disposition::NotReady, "without a receive request");
    assert_eq!(pair.take(B), []);
    let middle = Craft::new(Opcode::UC_SEND_MIDDLE, psn(A).plus(3)).payload(vec![1; 256]).from(A);
    pair.ends[B].world.receive(1, 1000);
    assert_eq!(pair.give(B, &middle), Disposition::OutOfSequence);
    assert_eq!(pair.ends[B].world.receives.len(), 1);
}

#[test]
fn uc_drops_messages_that_are_too_long_for_their_receive() {
    let mut pair = pair();
    pair.ends[B].world.receive(1, 300);
    let dropped = Disposition::Dropped(DropReason::QpState);
    let send = |n, opcode, len| Craft::new(opcode, psn(A).plus(n)).payload(vec![1; len]).from(A);
    assert_eq!(pair.give(B, &send(0, Opcode::UC_SEND_FIRST, 256)), Disposition::Accepted);
    assert_eq!(pair.give(B, &send(1, Opcode::UC_SEND_LAST, 45)), dropped);
    assert_eq!(pair.ends[B].connection.state(), QpState::Rts);
    assert_eq!(pair.ends[B].completions(), []);
    assert_eq!(pair.give(B, &send(2, Opcode::UC_SEND_ONLY, 100)), Disposition::Accepted, "the same receive");
    assert_eq!(pair.ends[B].world.receives.len(), 0);
}

#[test]
fn inaccessible_memory_fails_the_send_queue_only() {
    let mut pair = pair();
    pair.send(A, 1, vec![1]);
    pair.send(A, 2, vec![1]);
    pair.send(A, 3, vec![1]);
    pair.ends[A].world.unreadable.insert(WorkId(2));
    pair.take(A);
    let expected = [(1, Status::Success), (2, Status::LocalProtection), (3, Status::Flushed)];
    assert_eq!(pair.ends[A].completions(), expected);
    assert_eq!(pair.ends[A].connection.state(), QpState::Sqe);
    pair.ends[A].world.receive(1, 10);
    let send = Craft::new(Opcode::UC_SEND_ONLY, psn(B)).payload(vec![1; 8]).from(B);
    assert_eq!(pair.give(A, &send), Disposition::Accepted, "it still receives");
    pair.ends[A].connection.resume();
    pair.send(A, 4, vec![1]);
    assert_eq!(pair.take(A).len(), 1);
}

const QKEY: Qkey = Qkey::new(0x1111_1111);

fn datagrams(qpn: u32) -> UdQueuePair {
    UdQueuePair::new(UdConfig {
        local_qp: Qpn::new(qpn),
        qkey: QKEY,
        pkey: Pkey::DEFAULT,
        mtu: Mtu::B1024,
        send_psn: Psn::new(0xff_ffff),
    })
}

fn datagram(id: u64, len: u32) -> Datagram {
    let to = DatagramDestination { flow: flow(A), qp: Qpn::new(0x22), qkey: QKEY };
    Datagram { id: WorkId(id), to, len, immediate: Some([4, 3, 2, 1]), solicited: true }
}

fn carry(
    from: &mut UdQueuePair,
    world: &mut World,
    to: &mut UdQueuePair,
    other: &mut World,
) -> Vec<Disposition> {
    let mut buffer = vec![0; 65_000];
    let mut all = Vec::new();
    while let Some((flow, sent)) = from.poll_transmit(world, TransmitLimits::NONE, &mut buffer) {
        for packet in buffer[..sent.len].chunks(sent.segment) {
            let packet = Packet::new_checked(packet).unwrap();
            assert!(flow.verify(&packet, 0));
            let envelope = DatagramSource { from: address(A), headers: [0x77; 40] };
            all.push(to.handle_datagram(&envelope, &packet, other));
        }
    }
    all
}

#[test]
fn datagrams_are_delivered_behind_their_grh() {
    let (mut a, mut b) = (datagrams(0x11), datagrams(0x22));
    let (mut world, mut other) = (World::default(), World::default());
    for id in 0..4 {
        world.work.insert(WorkId(id), vec![id as u8; id as usize * 300]);
        a.post(datagram(id, id as u32 * 300)).unwrap();
        other.receive(id, 40 + id as usize * 300);
    }
    assert_eq!(carry(&mut a, &mut world, &mut b, &mut other), [Disposition::Accepted; 4]);
    for id in 0..4 {
        let Some(Event::Received(received)) = b.poll_event() else { panic!() };
        assert_eq!((received.id.0, received.len, received.status), (id, id as u32 * 300, Status::Success));
        assert_eq!((received.immediate, received.solicited), (Some([4, 3, 2, 1]), true));
        assert_eq!(received.source, Some((address(A), Qpn::new(0x11))));
        let memory = &other.taken[&received.id];
        assert_eq!(memory[..40], [0x77; 40]);
        assert!(memory[40..].iter().all(|byte| *byte == id as u8));
        assert_eq!(a.poll_event(), Some(Event::Completed { id: WorkId(id), status: Status::Success }));
    }
}

#[test]
fn oversized_datagrams_and_wrong_qkeys_are_dropped() {
    let (mut a, mut b) = (datagrams(0x11), datagrams(0x22));
    let (mut world, mut other) = (World::default(), World::default());
    world.work.insert(WorkId(1), vec![1; 100]);
    world.work.insert(WorkId(2), vec![2; 60]);
    other.receive(1, 100);
    a.post(datagram(1, 100)).unwrap();
    let wrong = DatagramDestination { qkey: Qkey::new(2), ..datagram(2, 60).to };
    a.post(Datagram { to: wrong, ..datagram(2, 60) }).unwrap();
    a.post(datagram(2, 60)).unwrap();
    let expected = [
        Disposition::Dropped(DropReason::QpState),
        Disposition::Dropped(DropReason::WrongDestination),
        Disposition::Accepted,
    ];
    assert_eq!(carry(&mut a, &mut world, &mut b, &mut other), expected);
    let Some(Event::Received(received)) = b.poll_event() else { panic!() };
    assert_eq!((received.id.0, received.len), (1, 60), "the receive request is still there");
    assert_eq!(b.poll_event(), None);
    let max = 1024;
    assert_eq!(a.post(datagram(3, 1025)), Err(PostError::TooLong { len: 1025, max }));
    // Longer than the port's MTU.
    let long = Craft { length: QKEY.get(), ..Craft::new(Opcode::UD_SEND_ONLY, Psn::new(0)) };
    let bytes = long.payload(vec![0; 4096]).to_qp(A, Qpn::new(0x22));
    other.receive(9, 8192);
    let envelope = DatagramSource { from: address(A), headers: [0; 40] };
    let long = Packet::new_checked(&bytes[..]).unwrap();
    assert!(!b.admits(&long), "the caller that delivers by itself must drop it, too");
    let disposition = b.handle_datagram(&envelope, &long, &mut other);
    assert_eq!(disposition, Disposition::Dropped(DropReason::QpState));
    assert_eq!(other.receives.len(), 1);
}

#[test]
fn failed_ud_queue_pair_flushes() {
    let mut a = datagrams(0x11);
    a.post(datagram(1, 1)).unwrap();
    a.fail();
    a.post(datagram(2, 1)).unwrap();
    let flushed = |id| Some(Event::Completed { id: WorkId(id), status: Status::Flushed });
    assert_eq!(a.poll_event(), flushed(1));
    assert!(matches!(a.poll_event(), Some(Event::Failed(_))));
    assert_eq!(a.poll_event(), flushed(2));
}
