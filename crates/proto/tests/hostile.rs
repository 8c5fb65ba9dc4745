//! Forged, replayed and malformed packets must not change the state of a connection.

mod common;

use common::{A, B, Craft, Pair, Random, config, psn, send_config};
use millstream_proto::{Disposition, Mtu, QpState, SendConfig, SendOp, Status, WorkId};
use millstream_wire::{NakCode, Opcode, Packet, Psn, Rkey, Syndrome};
use proptest::prelude::*;

const KEY: Rkey = Rkey::new(0x77);

/// Two ends with requests outstanding in both directions.
fn busy() -> Pair {
    let send = |end| SendConfig { window: 16, ..send_config(end) };
    let mut pair = Pair::with([config(A, Mtu::B256), config(B, Mtu::B256)], [send(A), send(B)], 3);
    for end in [A, B] {
        pair.ends[end].world.region(KEY.get(), 0, 1 << 16);
        for id in 0..200 {
            pair.ends[end].world.receive(1000 + id, 4096);
        }
        for id in 0..20 {
            let bytes = Random(id + 100 * end as u64).bytes(2000);
            match id % 3 {
                0 => pair.send(end, id, bytes),
                1 => pair.post(end, id, SendOp::Write { va: id * 2000, rkey: KEY, immediate: None }, bytes),
                _ => pair.post(end, id, SendOp::Read { va: 50_000, rkey: KEY }, vec![0; 2000]),
            }
        }
    }
    for _ in 0..6 {
        pair.step();
    }
    pair
}

/// Completes all outstanding requests and checks them.
fn finish(mut pair: Pair) {
    pair.run();
    for end in [A, B] {
        let done: Vec<_> = (0..20).map(|id| (id, Status::Success)).collect();
        assert_eq!(pair.ends[end].completions(), done);
        for id in (1..20).step_by(3) {
            let at = id as usize * 2000;
            let bytes = &pair.ends[1 - end].world.regions[&KEY].bytes[at..at + 2000];
            assert!(bytes == Random(id + 100 * end as u64).bytes(2000), "WRITE {id}");
        }
        for (nth, (received, memory)) in pair.ends[1 - end].received.iter().enumerate() {
            assert_eq!(received.status, Status::Success);
            assert!(memory[..2000] == Random(3 * nth as u64 + 100 * end as u64).bytes(2000), "SEND {nth}");
        }
    }
}

/// A packet of a blind attacker: correct addresses and queue pair, any PSN but the expected one.
fn forged(random: &mut Random, to: usize, far: bool) -> Vec<u8> {
    let opcodes: Vec<_> = Opcode::ALL.iter().copied().filter(|opcode| opcode.to_byte() < 0x20).collect();
    let opcode = opcodes[random.below(opcodes.len() as u64) as usize];
    // PSNs that this connection does not reach.
    let number = if far { 0x20_0000 + random.below(0x1000) as u32 } else { random.next() as u32 };
    let start = if opcode.is_response() { psn(to) } else { psn(1 - to) };
    let naks = [NakCode::RemoteAccess, NakCode::InvalidRequest, NakCode::RemoteOperational];
    let mut craft = Craft::new(opcode, start.plus(number))
        .remote(random.below(1 << 16), KEY, random.below(4096) as u32)
        .says(Syndrome::Nak(naks[random.below(3) as usize]));
    if opcode.has_payload() {
        craft = craft.payload(random.bytes(256));
    }
    craft.from(1 - to)
}

#[test]
fn forged_packets_outside_the_window_are_ignored() {
    for seed in 0..30 {
        let mut pair = busy();
        let mut random = Random(seed);
        for _ in 0..200 {
            for to in [A, B] {
                let bytes = forged(&mut random, to, true);
                let disposition = pair.give(to, &bytes);
                assert!(
                    matches!(disposition, Disposition::Dropped(_) | Disposition::OutOfSequence),
                    "{disposition:?}"
                );
            }
            pair.step();
        }
        finish(pair);
    }
}

#[test]
fn replayed_packets_are_ignored() {
    let mut pair = busy();
    // Every packet that B receives is replayed, at once and much later.
    let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let keep = seen.clone();
    pair.filter = Some(Box::new(move |from, packet: &Packet<&[u8]>| {
        if from == A {
            let bytes = [packet.covered(), &packet.icrc()].concat();
            keep.borrow_mut().push(bytes);
        }
        true
    }));
    for _ in 0..40 {
        pair.step();
        let replayed: Vec<_> = seen.borrow().iter().step_by(3).cloned().collect();
        for bytes in replayed {
            pair.give(B, &bytes);
        }
    }
    pair.run();
    let atomics = pair.ends[B].world.writes;
    for bytes in seen.borrow().iter() {
        pair.give(B, bytes);
    }
    assert_eq!(pair.ends[B].world.writes, atomics, "nothing is written once more");
    pair.filter = None;
    finish(pair);
}

/// An end B whose peer has sent one message from its own port, and that has more receive requests.
fn connected() -> Pair {
    let mut pair = Pair::new(Mtu::B256, 1);
    pair.ends[B].world.region(KEY.get(), 0, 64);
    (0..8).for_each(|id| pair.ends[B].world.receive(id, 16));
    assert_eq!(pair.give(B, &send_of(0, 0)), Disposition::Accepted);
    pair
}

/// A SEND of one byte by A, `n` packets after its first PSN.
fn send_of(n: u32, byte: u8) -> Vec<u8> {
    Craft::new(Opcode::RC_SEND_ONLY, psn(A).plus(n)).payload(vec![byte]).from(A)
}

/// A WRITE of eight bytes with this key.
fn write_of(n: u32, rkey: Rkey) -> Vec<u8> {
    Craft::new(Opcode::RC_WRITE_ONLY, psn(A).plus(n)).remote(0, rkey, 8).payload(vec![0xbb; 8]).from(A)
}

/// The UDP source port of an attacker on the peer's host.
const ANOTHER_PORT: u16 = 60_000;
const WRONG_KEY: Rkey = Rkey::new(1);

#[test]
fn only_the_expected_psn_can_fail_a_connection() {
    // Only the PSN differs from the expected packet. The gaps in front of the forged packets are closed.
    for off in (2..12).chain([100, 0x7f_ffff, 0x80_0000, 0xff_fffe]) {
        let mut pair = connected();
        pair.give_from_port(ANOTHER_PORT, B, &write_of(off, WRONG_KEY));
        for n in 1..8 {
            assert_eq!(pair.give(B, &send_of(n, n as u8)), Disposition::Accepted, "{off:#x}");
        }
        assert_eq!(pair.ends[B].connection.state(), QpState::Rts, "{off:#x}");
        let received: Vec<u8> = pair.ends[B].received.iter().map(|(_, memory)| memory[0]).collect();
        assert_eq!(received, [0, 1, 2, 3, 4, 5, 6, 7], "{off:#x}");
    }
    let mut pair = connected();
    pair.give_from_port(ANOTHER_PORT, B, &write_of(1, WRONG_KEY));
    assert_eq!(pair.ends[B].connection.state(), QpState::Err);
}

#[test]
fn refused_key_fails_the_connection_also_behind_a_gap() {
    let refused = [
        write_of(2, WRONG_KEY),
        Craft::new(Opcode::RC_READ_REQUEST, psn(A).plus(2)).remote(0, WRONG_KEY, 8).from(A),
        Craft::new(Opcode::RC_FETCH_ADD, psn(A).plus(2)).remote(0, WRONG_KEY, 8).from(A),
        // A valid key and an address behind its region.
        Craft::new(Opcode::RC_READ_REQUEST, psn(A).plus(2)).remote(60, KEY, 8).from(A),
        Craft::new(Opcode::RC_SEND_ONLY_INV, psn(A).plus(2)).remote(0, WRONG_KEY, 0).from(A),
    ];
    for bytes in refused {
        let mut pair = connected();
        assert_eq!(pair.give(B, &bytes), Disposition::OutOfSequence);
        pair.give(B, &send_of(1, 1));
        assert_eq!(pair.ends[B].connection.state(), QpState::Err, "{bytes:x?}");
        let nak = pair.take(B).pop().expect("a NAK");
        assert_eq!((nak.psn, nak.syndrome), (psn(A).plus(2), Some(Syndrome::Nak(NakCode::RemoteAccess))));
    }
}

#[test]
fn early_packets_from_another_port_do_not_replace_genuine_ones() {
    for planted in [send_of(2, 0xbb), send_of(3, 0xbb), write_of(2, KEY)] {
        let mut pair = connected();
        pair.give_from_port(ANOTHER_PORT, B, &planted);
        (1..5).for_each(|n| assert_eq!(pair.give(B, &send_of(n, n as u8)), Disposition::Accepted));
        let received: Vec<u8> = pair.ends[B].received.iter().map(|(_, memory)| memory[0]).collect();
        assert_eq!(received, [0, 1, 2, 3, 4]);
        assert_eq!(pair.ends[B].world.regions[&KEY].bytes, [0; 64]);
    }
}

#[test]
fn differing_early_packets_of_one_psn_are_both_dropped() {
    for planted_first in [true, false] {
        let mut pair = connected();
        let mut early = [send_of(2, 0xbb), send_of(2, 2)];
        if !planted_first {
            early.reverse();
        }
        early
            .iter()
            .chain(&early)
            .for_each(|bytes| assert_eq!(pair.give(B, bytes), Disposition::OutOfSequence));
        // A retransmission differs in its AckReq bit only.
        let third =
            Craft { ack_req: false, ..Craft::new(Opcode::RC_SEND_ONLY, psn(A).plus(3)).payload(vec![3]) };
        pair.give(B, &third.from(A));
        pair.give(B, &send_of(3, 3));
        pair.give(B, &send_of(1, 1));
        assert_eq!(pair.ends[B].received.len(), 2, "the packet behind the gap is not executed");
        assert_eq!(pair.give(B, &send_of(2, 2)), Disposition::Accepted);
        let received: Vec<u8> = pair.ends[B].received.iter().map(|(_, memory)| memory[0]).collect();
        assert_eq!(received, [0, 1, 2, 3]);
    }
}

#[test]
fn planted_read_data_does_not_replace_genuine_data() {
    let data = |n: u32, opcode, byte| Craft::new(opcode, psn(A).plus(n)).payload(vec![byte; 256]).from(B);
    for port in [common::source_port(B), ANOTHER_PORT] {
        let mut pair = Pair::new(Mtu::B256, 1);
        pair.post(A, 1, SendOp::Read { va: 0, rkey: KEY }, vec![0; 1024]);
        pair.take(A);
        pair.give(A, &data(0, Opcode::RC_READ_RESPONSE_FIRST, 0));
        pair.give_from_port(port, A, &data(2, Opcode::RC_READ_RESPONSE_MIDDLE, 0xbb));
        for (n, opcode) in [
            (2, Opcode::RC_READ_RESPONSE_MIDDLE),
            (1, Opcode::RC_READ_RESPONSE_MIDDLE),
            (2, Opcode::RC_READ_RESPONSE_MIDDLE),
            (3, Opcode::RC_READ_RESPONSE_LAST),
        ] {
            pair.give(A, &data(n, opcode, n as u8));
        }
        assert_eq!(pair.ends[A].completions(), [(1, Status::Success)]);
        let bytes: Vec<u8> = pair.ends[A].world.work[&WorkId(1)].iter().step_by(256).copied().collect();
        assert_eq!(bytes, [0, 1, 2, 3]);
    }
}

#[test]
fn early_send_that_is_too_long_counts_as_lost() {
    let mut pair = connected();
    let planted = Craft::new(Opcode::RC_SEND_ONLY, psn(A).plus(2)).payload(vec![0xbb; 64]).from(A);
    assert_eq!(pair.give(B, &planted), Disposition::OutOfSequence);
    (1..7).for_each(|n| assert_eq!(pair.give(B, &send_of(n, n as u8)), Disposition::Accepted));
    assert_eq!(pair.ends[B].connection.state(), QpState::Rts);
    let received: Vec<_> = pair.ends[B].received.iter().map(|(r, memory)| (r.id.0, memory[0])).collect();
    assert_eq!(received, (0..7).map(|n| (n, n as u8)).collect::<Vec<_>>(), "no receive request is lost");
    // In sequence it fails the connection.
    let too_long = Craft::new(Opcode::RC_SEND_ONLY, psn(A).plus(7)).payload(vec![0xbb; 64]).from(A);
    assert_eq!(pair.give(B, &too_long), Disposition::Nak);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Arbitrary packets, also with correct PSNs: nothing panics, no rule is violated, every request
    /// completes.
    #[test]
    fn arbitrary_packets_break_no_invariant(seed: u64, near in 0_u32..64) {
        let mut pair = busy();
        let mut random = Random(seed);
        for _ in 0..100 {
            for to in [A, B] {
                let mut bytes = forged(&mut random, to, false);
                let start = if Packet::new_checked(&bytes[..]).unwrap().opcode().is_response() { psn(to) } else { psn(1 - to) };
                let number: Psn = start.plus(near + random.below(40) as u32);
                bytes[9..12].copy_from_slice(&number.get().to_be_bytes()[1..]);
                let end = &mut pair.ends[to];
                let packet = Packet::new_checked(&bytes[..]).unwrap();
                end.connection.handle_datagram(pair.now, (common::address(1 - to), common::source_port(1 - to)).into(), &packet, &mut end.world);
                pair.take_kept(to);
            }
            pair.step();
        }
        pair.run();
        for end in &pair.ends {
            prop_assert_eq!(end.completions().len(), 20);
            let mut order: Vec<_> = end.completions().into_iter().map(|(id, _)| id).collect();
            order.sort_unstable();
            prop_assert_eq!(order, (0..20).collect::<Vec<_>>());
            prop_assert!(end.world.work.contains_key(&WorkId(0)));
            prop_assert_eq!(end.connection.poll_timeout(), None);
        }
    }
}
