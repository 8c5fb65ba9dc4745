//! The responder packet by packet: execution, acknowledgements, errors.

mod common;

use common::{A, B, Craft, Pair, changes, config, psn, send_config};
use millstream_proto::{
    Access, Changes, Config, Disposition, DropReason, Event, FailureCause, Mtu, QpState, ReceivedKind,
    Status, TransmitLimits, WorkId,
};
use millstream_wire::{NakCode, Opcode, Packet, Psn, Rkey, Syndrome};

const KEY: Rkey = Rkey::new(0x77);
const VA: u64 = 0x1000;

/// B is the responder; the test plays the requester A.
fn responder() -> Pair {
    let mut pair = Pair::new(Mtu::B256, 1);
    pair.ends[B].world.region(KEY.get(), VA, 4096).bytes = (0..4096_u32).map(|n| n as u8).collect();
    pair
}

/// The nth PSN of A.
fn at(n: u32) -> Psn {
    psn(A).plus(n)
}

fn send(n: u32) -> Craft {
    Craft::new(Opcode::RC_SEND_ONLY, at(n)).payload(vec![n as u8; 8])
}

fn write(n: u32, len: usize) -> Craft {
    Craft::new(Opcode::RC_WRITE_ONLY, at(n)).remote(VA, KEY, len as u32).payload(vec![0xaa; len])
}

fn read(n: u32, length: u32) -> Craft {
    Craft::new(Opcode::RC_READ_REQUEST, at(n)).remote(VA, KEY, length)
}

fn add(n: u32) -> Craft {
    Craft { words: [1, 0], ..Craft::new(Opcode::RC_FETCH_ADD, at(n)).remote(VA, KEY, 0) }
}

impl Pair {
    /// Delivers a packet from A to B.
    fn hand(&mut self, craft: Craft) -> Disposition {
        let bytes = craft.from(A);
        self.give(B, &bytes)
    }

    /// Acknowledgements of B: PSNs relative to A's first, and syndromes.
    fn acks(&mut self) -> Vec<(u32, Syndrome)> {
        let first = psn(A);
        let relative = |psn: Psn| psn.ahead_of(first) as u32;
        self.take(B)
            .into_iter()
            .map(|sent| (relative(sent.psn), sent.syndrome.unwrap_or(Syndrome::Reserved(0))))
            .collect()
    }

    fn failed(&self, end: usize) -> Option<FailureCause> {
        self.ends[end].events.iter().find_map(|event| match event {
            Event::Failed(fault) => Some(*fault),
            _ => None,
        })
    }
}

const ACK: Syndrome = Syndrome::ACK_UNLIMITED;
const GAP: Syndrome = Syndrome::Nak(NakCode::SequenceError);

fn refused(craft: Craft) -> (Vec<(u32, Syndrome)>, Pair) {
    let mut pair = responder();
    pair.ends[B].world.receive(1, 64);
    assert_eq!(pair.hand(craft), Disposition::Nak);
    (pair.acks(), pair)
}

#[test]
fn one_nak_per_gap() {
    let mut pair = responder();
    (0..10).for_each(|id| pair.ends[B].world.receive(id, 64));
    pair.hand(send(0));
    assert_eq!(pair.acks(), [(0, ACK)]);
    for n in [2, 3, 4, 7] {
        assert_eq!(pair.hand(send(n)), Disposition::OutOfSequence);
    }
    assert_eq!(pair.acks(), [(1, GAP)], "named by the packet that is missing");
    pair.hand(send(5));
    assert_eq!(pair.acks(), [(1, GAP)], "the requester began again, and the packet was lost again");
    pair.hand(send(1));
    assert_eq!(pair.acks(), [(5, ACK)], "what was lost was all that was missing");
    pair.hand(send(8));
    assert_eq!(pair.acks(), [], "the requester, which has begun again at 1, will come by 6");
    pair.hand(send(7));
    assert_eq!(pair.acks(), [(6, GAP)], "it was lost once more");
    pair.hand(send(6));
    assert_eq!(pair.acks(), [(8, ACK)]);
    let ids: Vec<_> = pair.ends[B].received.iter().map(|(received, _)| received.id.0).collect();
    assert_eq!(ids, (0..9).collect::<Vec<_>>());
    pair.hand(send(12));
    assert_eq!(pair.acks(), [(9, GAP)], "a new gap");
}

#[test]
fn reordered_messages_take_one_receive_request_each() {
    let mut pair = responder();
    (0..3).for_each(|id| pair.ends[B].world.receive(id, 64));
    // The first request shows the UDP source port of the peer.
    pair.hand(write(0, 8));
    assert_eq!(pair.acks(), [(0, ACK)]);
    for n in [2, 3, 4, 5] {
        assert_eq!(pair.hand(send(n)), Disposition::OutOfSequence);
    }
    assert_eq!(pair.acks(), [(1, GAP)]);
    pair.hand(send(1));
    assert!(matches!(pair.acks()[..], [(3, ACK), (4, Syndrome::RnrNak { .. })]), "there are three");
    let received = |pair: &Pair| -> Vec<_> {
        pair.ends[B].received.iter().map(|(received, memory)| (received.id.0, memory[..8].to_vec())).collect()
    };
    assert_eq!(received(&pair), [1, 2, 3].map(|n: u8| ((n - 1).into(), vec![n; 8])));
    (3..5).for_each(|id| pair.ends[B].world.receive(id, 64));
    pair.hand(send(4));
    pair.hand(send(5));
    assert_eq!(pair.acks(), [(5, ACK)]);
    assert_eq!(received(&pair)[3..], [4, 5].map(|n: u8| ((n - 1).into(), vec![n; 8])));
}

#[test]
fn duplicate_read_with_an_invalidated_key_keeps_the_connection() {
    let mut pair = responder();
    pair.hand(read(0, 8));
    assert_eq!(pair.acks(), [(0, ACK)]);
    pair.ends[B].world.regions.clear();
    assert_eq!(pair.hand(read(0, 8)), Disposition::Duplicate);
    assert_eq!(pair.acks(), [(0, Syndrome::Nak(NakCode::RemoteAccess))], "in case the data was lost");
    assert_eq!(pair.failed(B), None);
    pair.ends[B].world.receive(1, 64);
    pair.hand(send(1));
    assert_eq!(pair.acks(), [(1, ACK)]);
}

#[test]
fn invalid_reordered_packets_are_dropped() {
    let mut pair = responder();
    (0..4).for_each(|id| pair.ends[B].world.receive(id, 64));
    pair.hand(send(0));
    assert_eq!(pair.acks(), [(0, ACK)]);
    // A WRITE shorter than announced: as the expected packet it would fail the connection.
    assert_eq!(pair.hand(Craft { length: 9, ..write(2, 8) }), Disposition::OutOfSequence);
    pair.take(B);
    pair.hand(send(1));
    assert_eq!((pair.acks(), pair.failed(B)), (vec![(1, ACK), (2, GAP)], None), "as if it had not come");
    assert_eq!(pair.hand(write(2, 8)), Disposition::Accepted);
    // Too far ahead, and more than the buffer holds.
    for n in (3000..3100).chain(4..2200) {
        pair.hand(write(n, 8));
    }
    pair.take(B);
    pair.hand(send(3));
    assert_eq!(pair.acks(), [(2050, ACK)]);
}

#[test]
fn read_responses_obey_the_byte_budget_and_acks_do_not_count() {
    let mut pair = responder();
    pair.hand(write(0, 8));
    pair.limits = TransmitLimits { byte_budget: 0, ..TransmitLimits::NONE };
    assert_eq!(pair.acks(), [(0, ACK)]);
    pair.hand(read(1, 1024));
    pair.hand(write(5, 8));
    assert_eq!(pair.acks(), [], "what comes behind the data waits with it");
    let (end, now) = (&mut pair.ends[B], pair.now);
    let mut buffer = vec![0; 10_000];
    let limits = TransmitLimits { byte_budget: 300, ..TransmitLimits::NONE };
    let first = end.connection.poll_transmit(now, &mut end.world, limits, &mut buffer).unwrap();
    assert_eq!(first.packets, 2, "one more while there is any byte_budget");
    // Base header, 256 bytes and ICRC; the first packet has an AETH.
    assert_eq!(first.paced_bytes, 276 + 272);
    pair.limits = TransmitLimits::NONE;
    let acks: Vec<_> = pair.acks().into_iter().map(|(n, _)| n).collect();
    assert_eq!(acks, [3, 4, 5]);
}

#[test]
fn psns_are_compared_modulo_2_24() {
    let mut pair = responder();
    // A's first PSN is 32 before wrap-around.
    for n in 0..64 {
        pair.ends[B].world.receive(n.into(), 64);
        assert_eq!(pair.hand(send(n)), Disposition::Accepted, "{n}");
        assert_eq!(pair.hand(send(n)), Disposition::Duplicate, "{n}");
    }
    assert_eq!(pair.hand(send(64 + 0x7f_ffff)), Disposition::OutOfSequence, "just ahead of half a turn");
    assert_eq!(pair.hand(send(64 + 0x80_0000)), Disposition::Duplicate, "half a turn away is behind");
    assert_eq!(pair.ends[B].received.len(), 64);
}

#[test]
fn duplicate_is_acknowledged_with_the_last_acknowledged_psn() {
    let mut pair = responder();
    (0..3).for_each(|id| pair.ends[B].world.receive(id, 64));
    pair.hand(send(0));
    pair.hand(send(1));
    // Two packets of data, PSNs 2 and 3.
    pair.hand(read(2, 512));
    assert_eq!(pair.acks().len(), 3);
    assert_eq!(pair.hand(send(0)), Disposition::Duplicate);
    assert_eq!(pair.acks(), [(1, ACK)], "not 3, which would say that the READ's data had come");
    pair.hand(send(4));
    assert_eq!(pair.acks(), [(4, ACK)]);
    pair.hand(send(1));
    assert_eq!(pair.acks(), [(4, ACK)]);
    assert_eq!(pair.ends[B].received.len(), 3, "delivered once");
}

#[test]
fn duplicate_read_is_executed_again() {
    let mut pair = responder();
    pair.ends[B].world.receive(1, 64);
    pair.hand(read(0, 1024));
    pair.hand(send(4));
    let first = pair.take(B);
    assert_eq!(first.len(), 5);
    assert_eq!(pair.hand(read(0, 1024)), Disposition::Duplicate);
    let again = pair.take(B);
    assert_eq!(
        again.iter().map(|sent| (sent.opcode, sent.psn)).collect::<Vec<_>>(),
        first[..4].iter().map(|sent| (sent.opcode, sent.psn)).collect::<Vec<_>>()
    );
    // The next request is not affected.
    assert_eq!(pair.hand(write(5, 8)), Disposition::Accepted);
    let after = pair.take(B);
    assert_eq!((after[0].psn, after[0].msn), (at(5), Some(3)), "messages are not counted twice");
}

#[test]
fn duplicate_read_from_the_middle_returns_the_rest() {
    let mut pair = responder();
    pair.hand(read(0, 1000));
    pair.take(B);
    let middle = Craft::new(Opcode::RC_READ_REQUEST, at(2)).remote(VA + 512, KEY, 488);
    assert_eq!(pair.hand(middle), Disposition::Duplicate);
    let sent = pair.take(B);
    let opcodes: Vec<_> = sent.iter().map(|sent| (sent.opcode, sent.psn, sent.payload)).collect();
    assert_eq!(
        opcodes,
        [(Opcode::RC_READ_RESPONSE_FIRST, at(2), 256), (Opcode::RC_READ_RESPONSE_LAST, at(3), 232)]
    );
}

#[test]
fn data_that_was_requested_again_goes_ahead_of_data_not_yet_sent() {
    let mut pair = responder();
    for n in 0..3 {
        pair.hand(read(4 * n, 1024));
    }
    let one = TransmitLimits { packets: 1, ..TransmitLimits::NONE };
    let mut buffer = vec![0; 1000];
    let mut send = |pair: &mut Pair| {
        let (end, now) = (&mut pair.ends[B], pair.now);
        let burst = end.connection.poll_transmit(now, &mut end.world, one, &mut buffer).unwrap();
        Packet::new_checked(&buffer[..burst.len]).unwrap().bth().psn().ahead_of(at(0))
    };
    assert_eq!([(); 5].map(|()| send(&mut pair)), [0, 1, 2, 3, 4]);
    // 2 and 1 were lost.
    let part = |n: u32| Craft::new(Opcode::RC_READ_REQUEST, at(n)).remote(VA + 256 * u64::from(n), KEY, 256);
    pair.hand(part(2));
    pair.hand(part(1));
    assert_eq!([(); 3].map(|()| send(&mut pair)), [2, 1, 5], "in the order of the requests");
    // The requester asks for the rest of the second READ: the response starts again.
    pair.hand(Craft::new(Opcode::RC_READ_REQUEST, at(5)).remote(VA + 256, KEY, 768));
    let sent = pair.take(B);
    let sent: Vec<_> = sent.iter().map(|sent| (sent.psn, sent.opcode)).collect();
    let (first, middle, last) =
        (Opcode::RC_READ_RESPONSE_FIRST, Opcode::RC_READ_RESPONSE_MIDDLE, Opcode::RC_READ_RESPONSE_LAST);
    let expected = [(5, first), (6, middle), (7, last), (8, first), (9, middle), (10, middle), (11, last)];
    assert_eq!(sent, expected.map(|(n, opcode)| (at(n), opcode)), "nothing twice");
    // All of them are answered, so that four more READs may be outstanding.
    (0..4).for_each(|n| assert_eq!(pair.hand(read(12 + n, 8)), Disposition::Accepted));
}

#[test]
fn a_read_request_behind_a_gap_causes_another_nak_when_its_data_is_requested_again() {
    let mut pair = responder();
    pair.hand(read(4, 1024));
    assert_eq!(pair.acks(), [(0, GAP)]);
    pair.hand(read(8, 1024));
    assert_eq!(pair.acks(), [], "one NAK a gap");
    // The NAK was lost, and the requester asks for the last packet.
    pair.hand(Craft::new(Opcode::RC_READ_REQUEST, at(11)).remote(VA + 768, KEY, 256));
    assert_eq!(pair.acks(), [(0, GAP)]);
}

#[test]
fn duplicate_read_beyond_the_original_range_is_ignored() {
    let mut pair = responder();
    pair.hand(read(0, 1000));
    pair.take(B);
    let others = [
        Craft::new(Opcode::RC_READ_REQUEST, at(2)).remote(VA + 512, KEY, 489),
        Craft::new(Opcode::RC_READ_REQUEST, at(2)).remote(VA + 513, KEY, 100),
        Craft::new(Opcode::RC_READ_REQUEST, at(0)).remote(VA, Rkey::new(0x78), 1000),
        Craft::new(Opcode::RC_READ_REQUEST, at(0)).remote(VA, KEY, u32::MAX),
        Craft::new(Opcode::RC_READ_REQUEST, at(0)).remote(u64::MAX, KEY, 1000),
    ];
    for other in others {
        pair.hand(other.clone());
        assert_eq!(pair.take(B), [], "{other:?}");
    }
}

#[test]
fn duplicate_atomic_returns_the_stored_result() {
    let mut pair = responder();
    let before = u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7]);
    pair.hand(add(0));
    pair.hand(add(0));
    pair.hand(add(1));
    pair.hand(add(0));
    let sent = pair.take(B);
    assert_eq!(
        sent.iter().filter(|sent| sent.psn == at(0)).count(),
        1,
        "an answer that waits is not sent twice"
    );
    pair.hand(add(0));
    assert_eq!(pair.take(B)[0].psn, at(0));
    assert_eq!(pair.ends[B].world.atomics, 2);
    assert_eq!(pair.ends[B].world.regions[&KEY].bytes[..8], (before + 2).to_ne_bytes());
}

#[test]
fn stored_results_are_bounded() {
    let mut pair = responder();
    for n in 0..10 {
        pair.hand(add(n));
        pair.take(B);
    }
    for n in 0..10 {
        pair.hand(add(n));
        let answers = pair.take(B).len();
        assert_eq!(answers, usize::from(n >= 6), "four of them, as max_dest_rd_atomic says: {n}");
    }
    assert_eq!(pair.ends[B].world.atomics, 10);
}

#[test]
fn outstanding_reads_beyond_the_limit_are_refused() {
    let mut pair = responder();
    for n in 0..4 {
        assert_eq!(pair.hand(read(n, 100)), Disposition::Accepted);
    }
    assert_eq!(pair.hand(read(4, 100)), Disposition::Nak);
    let acks = pair.acks();
    assert_eq!(acks.len(), 5);
    assert_eq!(acks[4], (4, Syndrome::Nak(NakCode::InvalidRequest)));
}

#[test]
fn duplicates_do_not_fill_the_response_queue() {
    let mut pair = responder();
    pair.ends[B].world.receive(1, 64);
    pair.hand(read(0, 1024));
    pair.hand(add(4));
    pair.hand(send(5));
    pair.take(B);
    for _ in 0..10_000 {
        pair.hand(read(0, 1024));
        pair.hand(add(4));
        pair.hand(send(5));
        pair.hand(send(100));
    }
    assert!(pair.take(B).len() < 200);
}

#[test]
fn a_changed_rnr_timer_is_in_the_next_rnr_nak() {
    let mut pair = responder();
    let now = pair.now;
    let changes = Changes { min_rnr_timer: 20, ..changes(B) };
    pair.ends[B].connection.modify(now, &changes);
    assert_eq!(pair.hand(send(0)), Disposition::NotReady);
    assert_eq!(pair.acks(), [(0, Syndrome::RnrNak { timer_code: 20 })]);
}

#[test]
fn missing_receive_request_causes_an_rnr_nak() {
    let mut pair = responder();
    assert_eq!(pair.hand(send(0)), Disposition::NotReady);
    assert_eq!(pair.acks(), [(0, Syndrome::RnrNak { timer_code: 12 })]);
    pair.hand(send(1));
    pair.hand(send(2));
    assert_eq!(pair.acks(), [], "what follows is not a gap");
    pair.ends[B].world.receive(1, 64);
    assert_eq!(pair.hand(send(0)), Disposition::Accepted);
    let not_ready = Syndrome::RnrNak { timer_code: 12 };
    assert_eq!(pair.acks(), [(0, ACK), (1, not_ready)], "the next one was kept");
    pair.ends[B].world.receive(2, 64);
    pair.ends[B].world.receive(3, 64);
    pair.hand(send(1));
    assert_eq!(pair.acks(), [(2, ACK)]);
}

#[test]
fn write_with_immediate_waits_for_a_receive_request() {
    let mut pair = responder();
    let craft = Craft { opcode: Opcode::RC_WRITE_ONLY_IMM, ..write(0, 100) };
    assert_eq!(pair.hand(craft.clone()), Disposition::NotReady);
    pair.ends[B].world.receive(1, 0);
    assert_eq!(pair.hand(craft), Disposition::Accepted);
    let (received, _) = &pair.ends[B].received[0];
    assert_eq!((received.kind, received.len), (ReceivedKind::Write, 100));
    assert_eq!(received.immediate, Some([1, 2, 3, 4]));
}

#[test]
fn keys_lengths_and_positions_are_checked() {
    let access = Syndrome::Nak(NakCode::RemoteAccess);
    let invalid = Syndrome::Nak(NakCode::InvalidRequest);
    let at0 = |opcode| Craft::new(opcode, at(0));
    let cases = [
        ("another key", access, Craft { rkey: Rkey::new(0x78), ..write(0, 8) }),
        ("before the region", access, Craft { va: VA - 1, ..write(0, 8) }),
        ("behind the region", access, Craft { va: VA + 4089, ..write(0, 8) }),
        ("around the end of all addresses", access, Craft { va: u64::MAX - 3, ..write(0, 8) }),
        ("longer than the region", access, read(0, 4097)),
        ("longer than any message", invalid, read(0, (1 << 31) + 1)),
        ("shorter than announced", invalid, Craft { length: 9, ..write(0, 8) }),
        ("longer than announced", invalid, Craft { length: 7, ..write(0, 8) }),
        ("a first packet that is not full", invalid, at0(Opcode::RC_SEND_FIRST).payload(vec![0; 255])),
        ("a packet longer than the path MTU", invalid, at0(Opcode::RC_SEND_ONLY).payload(vec![0; 257])),
        ("a middle without a beginning", invalid, at0(Opcode::RC_SEND_MIDDLE).payload(vec![0; 256])),
        ("an end without a beginning", invalid, at0(Opcode::RC_WRITE_LAST).payload(vec![0; 8])),
        ("a word at an odd address", invalid, Craft { va: VA + 4, ..add(0) }),
        (
            "an atomic write of 4 bytes",
            invalid,
            at0(Opcode::RC_ATOMIC_WRITE).remote(VA, KEY, 8).payload(vec![0; 4]),
        ),
        (
            "an atomic write of 16 bytes",
            invalid,
            at0(Opcode::RC_ATOMIC_WRITE).remote(VA, KEY, 16).payload(vec![0; 16]),
        ),
        (
            "an atomic write that says 16",
            invalid,
            at0(Opcode::RC_ATOMIC_WRITE).remote(VA, KEY, 16).payload(vec![0; 8]),
        ),
        (
            "an atomic write at an odd address",
            invalid,
            at0(Opcode::RC_ATOMIC_WRITE).remote(VA + 1, KEY, 8).payload(vec![0; 8]),
        ),
        (
            "a key that may not be invalidated",
            access,
            Craft { rkey: Rkey::new(1), ..at0(Opcode::RC_SEND_ONLY_INV) },
        ),
    ];
    for (what, syndrome, craft) in cases {
        let (acks, pair) = refused(craft);
        assert_eq!(acks, [(0, syndrome)], "{what}");
        assert_eq!(pair.ends[B].connection.state(), QpState::Err, "{what}");
        assert_eq!(pair.ends[B].world.regions[&KEY].bytes[..16], (0..16).collect::<Vec<u8>>(), "{what}");
        let fault =
            if syndrome == access { FailureCause::AccessViolation } else { FailureCause::InvalidRequest };
        assert_eq!(pair.failed(B), Some(fault), "{what}");
    }
}

#[test]
fn zero_length_transfers_check_no_key() {
    let mut pair = responder();
    let none = Rkey::new(0xbad);
    assert_eq!(pair.hand(Craft { rkey: none, ..write(0, 0) }), Disposition::Accepted);
    assert_eq!(pair.hand(Craft { rkey: none, ..read(1, 0) }), Disposition::Accepted);
    let sent = pair.take(B);
    assert_eq!((sent[1].opcode, sent[1].payload), (Opcode::RC_READ_RESPONSE_ONLY, 0));
}

#[test]
fn operations_without_permission_are_refused() {
    let offers =
        |pair: &mut Pair, config: Config| pair.ends[B].connection = millstream_proto::Connection::new(config);
    for (n, craft) in [write(0, 8), read(0, 8), add(0)].into_iter().enumerate() {
        let mut pair = responder();
        let all = config(B, Mtu::B256);
        offers(&mut pair, Config { remote_write: n != 0, remote_read: n != 1, remote_atomic: n != 2, ..all });
        assert_eq!(pair.hand(craft), Disposition::Nak);
        assert_eq!(pair.acks(), [(0, Syndrome::Nak(NakCode::InvalidRequest))]);
    }
    let mut pair = responder();
    offers(&mut pair, Config { max_dest_rd_atomic: 0, ..config(B, Mtu::B256) });
    assert_eq!(pair.hand(read(0, 8)), Disposition::Nak);
}

#[test]
fn oversized_message_completes_with_a_length_error() {
    let mut pair = responder();
    pair.ends[B].world.receive(1, 300);
    pair.hand(Craft::new(Opcode::RC_SEND_FIRST, at(0)).payload(vec![1; 256]));
    assert_eq!(pair.hand(Craft::new(Opcode::RC_SEND_LAST, at(1)).payload(vec![1; 45])), Disposition::Nak);
    assert_eq!(pair.acks(), [(0, ACK), (1, Syndrome::Nak(NakCode::InvalidRequest))]);
    assert_eq!(pair.ends[B].received[0].0.status, Status::LocalLength);
    assert_eq!(pair.failed(B), Some(FailureCause::ReceiveRequest));
}

#[test]
fn inaccessible_receive_memory_fails_both_sides() {
    let mut pair = responder();
    pair.ends[B].world.receive(1, 64);
    pair.ends[B].world.unwritable.insert(millstream_proto::ReceiveId(1));
    assert_eq!(pair.hand(send(0)), Disposition::Nak);
    assert_eq!(pair.acks(), [(0, Syndrome::Nak(NakCode::RemoteOperational))]);
    assert_eq!(pair.ends[B].received[0].0.status, Status::LocalProtection);
}

#[test]
fn aborted_message_flushes_its_receive_request() {
    let mut pair = responder();
    pair.ends[B].world.receive(1, 1000);
    pair.hand(Craft::new(Opcode::RC_SEND_FIRST, at(0)).payload(vec![1; 256]));
    // Another message starts in the middle.
    assert_eq!(pair.hand(write(1, 8)), Disposition::Nak);
    assert_eq!(pair.ends[B].received[0].0.status, Status::Flushed);
    assert_eq!(pair.failed(B), Some(FailureCause::InvalidRequest));
    let events = &pair.ends[B].events;
    assert!(matches!(events[..], [Event::Received(_), Event::Failed(_)]), "{events:?}");
}

#[test]
fn key_invalidated_within_a_message_is_rejected() {
    let mut pair = responder();
    pair.hand(Craft::new(Opcode::RC_WRITE_FIRST, at(0)).remote(VA, KEY, 512).payload(vec![1; 256]));
    pair.ends[B].world.regions.get_mut(&KEY).unwrap().allowed = vec![Access::Read];
    assert_eq!(pair.hand(Craft::new(Opcode::RC_WRITE_LAST, at(1)).payload(vec![1; 256])), Disposition::Nak);
    let mut pair = responder();
    pair.hand(read(0, 1024));
    pair.limits.packets = 1;
    let end = &mut pair.ends[B];
    let mut buffer = vec![0; 1000];
    end.connection.poll_transmit(pair.now, &mut end.world, pair.limits, &mut buffer).unwrap();
    end.world.regions.clear();
    assert_eq!(pair.acks(), [(1, Syndrome::Nak(NakCode::RemoteAccess))]);
    assert_eq!(pair.failed(B), Some(FailureCause::AccessViolation));
}

#[test]
fn fatal_nak_is_repeated() {
    let mut pair = responder();
    pair.hand(write(0, 8));
    pair.hand(Craft { rkey: Rkey::new(0), ..write(1, 8) });
    let access = Syndrome::Nak(NakCode::RemoteAccess);
    assert_eq!(pair.acks(), [(0, ACK), (1, access)]);
    let dropped = Disposition::Dropped(DropReason::QpState);
    assert_eq!(pair.hand(write(0, 8)), dropped);
    assert_eq!(pair.acks(), [(1, access)]);
    assert_eq!(pair.hand(write(2, 8)), dropped);
    assert_eq!(pair.acks(), [], "what comes after is not answered");
    assert_eq!(pair.ends[B].world.writes, 8);
}

#[test]
fn packets_without_ack_req_get_no_ack() {
    let mut pair = responder();
    for n in 0..4 {
        pair.hand(Craft { ack_req: false, ..write(n, 8) });
        assert_eq!(pair.acks(), [], "packet {n}");
    }
    pair.hand(write(4, 8));
    assert_eq!(pair.acks(), [(4, ACK)]);
}

#[test]
fn failed_requester_leaves_no_timers() {
    let mut pair = responder();
    pair.ends[B].connection.start(send_config(B));
    pair.send(B, 1, vec![1; 100]);
    pair.send(B, 2, vec![1; 100]);
    assert_eq!(pair.take(B).len(), 2);
    assert!(pair.ends[B].connection.poll_timeout().is_some());
    pair.hand(Craft { rkey: Rkey::new(0), ..write(0, 8) });
    assert_eq!(pair.ends[B].completions(), [(1, Status::Flushed), (2, Status::Flushed)]);
    assert_eq!(pair.ends[B].connection.poll_timeout(), None, "timers die with it");
    pair.send(B, 3, vec![1]);
    pair.take(B);
    assert_eq!(pair.ends[B].completions()[2], (3, Status::Flushed));
    assert!(pair.ends[B].world.work.contains_key(&WorkId(3)));
}
