//! The requester packet by packet: transmission, acknowledgements, retries.

mod common;

use std::time::Duration;

use common::{A, B, Craft, Network, Pair, Sent, changes, config, psn, send_config};
use millstream_proto::{
    Changes, Config, Connection, Disposition, DropReason, Event, FailureCause, Mtu, PostError, QpState,
    SendConfig, SendModifier, SendOp, SendRequest, Service, Status, TransmitLimits, WorkId, ack_timeout,
};
use millstream_wire::{NakCode, Opcode, Psn, Rkey, Syndrome};

const KEY: Rkey = Rkey::new(0x77);
const VA: u64 = 0x1000;
const READ: SendOp = SendOp::Read { va: VA, rkey: KEY };
const GAP: Syndrome = Syndrome::Nak(NakCode::SequenceError);

/// A is the requester; the test plays the responder B.
fn requester(change: impl FnOnce(&mut SendConfig)) -> Pair {
    let mut sends = [send_config(A), send_config(B)];
    change(&mut sends[A]);
    Pair::with([config(A, Mtu::B256), config(B, Mtu::B256)], sends, 1)
}

fn at(n: u32) -> Psn {
    psn(A).plus(n)
}

fn numbers(sent: &[Sent]) -> Vec<u32> {
    sent.iter().map(|sent| sent.psn.ahead_of(psn(A)) as u32).collect()
}

impl Pair {
    fn answer(&mut self, n: u32, syndrome: Syndrome) -> Disposition {
        let bytes = Craft::new(Opcode::RC_ACKNOWLEDGE, at(n)).says(syndrome).from(B);
        self.give(A, &bytes)
    }

    fn ack(&mut self, n: u32) -> Disposition {
        self.answer(n, Syndrome::ACK_UNLIMITED)
    }

    fn data(&mut self, opcode: Opcode, n: u32, payload: Vec<u8>) -> Disposition {
        let bytes = Craft::new(opcode, at(n)).payload(payload).from(B);
        self.give(A, &bytes)
    }

    fn asks(&mut self) -> Vec<u32> {
        let sent = self.take(A);
        numbers(&sent)
    }
}

/// The ACK timeout of the test configuration.
fn timeout() -> Duration {
    ack_timeout(8).unwrap()
}

#[test]
fn messages_are_segmented_at_the_path_mtu() {
    let mut pair = requester(|_| ());
    pair.post(A, 1, SendOp::Write { va: VA, rkey: KEY, immediate: Some([1; 4]) }, vec![0; 600]);
    let sent = pair.take(A);
    let seen: Vec<_> =
        sent.iter().map(|sent| (sent.opcode, sent.payload, sent.length, sent.ack_req)).collect();
    assert_eq!(
        seen,
        [
            (Opcode::RC_WRITE_FIRST, 256, Some(600), false),
            (Opcode::RC_WRITE_MIDDLE, 256, None, false),
            (Opcode::RC_WRITE_LAST_IMM, 88, None, true),
        ]
    );
}

#[test]
fn retry_count_7_is_finite() {
    let mut pair = requester(|_| ());
    pair.send(A, 1, vec![1]);
    pair.send(A, 2, vec![2]);
    assert_eq!(pair.asks(), [0, 1]);
    // Backoff is limited to four timeouts, so that a descheduled peer is not given up.
    for (retry, waits) in [1, 2, 4, 4, 4, 4, 4].into_iter().enumerate() {
        pair.wait(A, timeout() * waits - Duration::from_nanos(1));
        assert_eq!(pair.asks(), [], "retry {retry}");
        pair.wait(A, Duration::from_nanos(1));
        assert_eq!(pair.asks(), [0, 1], "retry {retry}");
        assert_eq!(pair.ends[A].completions(), []);
    }
    pair.wait(A, timeout() * 4);
    assert_eq!(pair.ends[A].completions(), [(1, Status::RetryExceeded), (2, Status::Flushed)]);
    assert_eq!(pair.ends[A].connection.state(), QpState::Err);
    assert_eq!(pair.ends[A].connection.poll_timeout(), None);
    assert_eq!(pair.asks(), []);
    assert!(matches!(pair.ends[A].events.last(), Some(Event::Failed(FailureCause::SendRequest))));
}

#[test]
fn progress_resets_the_retry_counter() {
    let mut pair = requester(|config| config.retry_count = 1);
    pair.send(A, 1, vec![1]);
    pair.send(A, 2, vec![2]);
    pair.asks();
    pair.wait(A, timeout());
    assert_eq!(pair.asks(), [0, 1]);
    pair.ack(0);
    pair.wait(A, timeout());
    assert_eq!(pair.asks(), [1]);
    pair.wait(A, timeout() * 2);
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success), (2, Status::RetryExceeded)]);
}

#[test]
fn ack_timeout_zero_is_infinite() {
    let mut pair = requester(|config| config.ack_timeout = 0);
    pair.send(A, 1, vec![1]);
    pair.asks();
    assert_eq!(pair.ends[A].connection.poll_timeout(), None);
}

/// Changes the retry count to 1 while packet 0 is in flight, and waits for the end of its request.
fn one_retry_is_left_after_a_change(pair: &mut Pair) {
    let now = pair.now;
    pair.ends[A].connection.modify(now, &Changes { retry_count: 1, ..changes(A) });
    pair.wait(A, timeout());
    assert_eq!(pair.asks(), [0]);
    pair.wait(A, 2 * timeout());
    assert_eq!(pair.ends[A].completions(), [(1, Status::RetryExceeded)]);
}

#[test]
fn a_changed_timeout_and_retry_count_hold_for_packets_in_flight() {
    let mut pair = requester(|config| config.ack_timeout = 0);
    pair.send(A, 1, vec![1]);
    assert_eq!(pair.asks(), [0]);
    one_retry_is_left_after_a_change(&mut pair);
}

#[test]
fn a_smaller_retry_count_than_the_retries_so_far_starts_them_anew() {
    let mut pair = requester(|_| ());
    pair.send(A, 1, vec![1]);
    assert_eq!(pair.asks(), [0]);
    for _ in 0..5 {
        pair.wait(A, 4 * timeout());
        assert_eq!(pair.asks(), [0]);
    }
    one_retry_is_left_after_a_change(&mut pair);
}

#[test]
fn reads_that_were_posted_before_the_limit_became_0_are_sent_one_by_one() {
    let mut pair = requester(|config| config.max_rd_atomic = 2);
    (0..4).for_each(|id| pair.post(A, id, READ, vec![0; 8]));
    assert_eq!(pair.asks(), [0, 1]);
    let now = pair.now;
    pair.ends[A].connection.modify(now, &Changes { max_rd_atomic: 0, ..changes(A) });
    assert_eq!(pair.asks(), []);
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 0, vec![9; 8]);
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![9; 8]);
    assert_eq!(pair.asks(), [2]);
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 2, vec![9; 8]);
    assert_eq!(pair.asks(), [3]);
}

#[test]
fn rnr_retry_7_is_infinite_and_6_is_finite() {
    for (count, last) in [(7, 200), (6, 6), (0, 0)] {
        let mut pair = requester(|config| config.rnr_retry = count);
        pair.send(A, 1, vec![1]);
        for _ in 0..last {
            assert_eq!(pair.asks(), [0]);
            pair.answer(0, Syndrome::RnrNak { timer_code: 1 });
            pair.wait(A, Duration::from_micros(10));
        }
        assert_eq!(pair.ends[A].completions(), []);
        assert_eq!(pair.asks(), [0]);
        pair.answer(0, Syndrome::RnrNak { timer_code: 1 });
        let failed = pair.ends[A].completions() == [(1, Status::RnrRetryExceeded)];
        assert_eq!(failed, count != 7, "{count}");
    }
}

#[test]
fn retransmit_timer_does_not_end_an_rnr_wait() {
    let mut pair = requester(|config| config.probe = Some(Duration::from_micros(50)));
    pair.send(A, 1, vec![1]);
    pair.send(A, 2, vec![2]);
    pair.asks();
    // 655 ms, hundreds of ACK timeouts.
    pair.answer(0, Syndrome::RnrNak { timer_code: 0 });
    for _ in 0..600 {
        pair.wait(A, timeout());
        assert_eq!(pair.asks(), []);
    }
    assert_eq!(pair.answer(0, GAP), Disposition::Accepted, "nor does a NAK about what came after");
    assert_eq!(pair.asks(), []);
    pair.wait(A, Duration::from_millis(30));
    assert_eq!(pair.asks(), [0, 1]);
    assert_eq!(pair.ends[A].completions(), []);
}

#[test]
fn nak_acknowledges_earlier_packets() {
    let mut pair = requester(|_| ());
    (0..5).for_each(|id| pair.send(A, id, vec![1]));
    pair.asks();
    pair.answer(3, GAP);
    assert_eq!(pair.ends[A].completions().len(), 3);
    assert_eq!(pair.asks(), [3, 4], "from the missing one on");
    pair.answer(3, GAP);
    assert_eq!(pair.asks(), [3, 4]);
}

#[test]
fn fatal_nak_completes_its_request_and_flushes_the_rest() {
    let causes = [
        (NakCode::InvalidRequest, Status::RemoteInvalidRequest),
        (NakCode::RemoteAccess, Status::RemoteAccess),
        (NakCode::RemoteOperational, Status::RemoteOperation),
    ];
    for (code, status) in causes {
        let mut pair = requester(|_| ());
        (0..4).for_each(|id| pair.send(A, id, vec![1]));
        pair.asks();
        pair.answer(1, Syndrome::Nak(code));
        let flushed = [(2, Status::Flushed), (3, Status::Flushed)];
        assert_eq!(pair.ends[A].completions(), [&[(0, Status::Success), (1, status)][..], &flushed].concat());
        pair.send(A, 4, vec![1]);
        pair.asks();
        assert_eq!(pair.ends[A].completions()[4..], [(4, Status::Flushed)], "and what is posted later");
    }
}

#[test]
fn unexpected_responses_are_dropped() {
    let mut pair = requester(|_| ());
    (0..3).for_each(|id| pair.send(A, id, vec![1]));
    let unexpected = Disposition::Dropped(DropReason::Unexpected);
    assert_eq!(pair.ack(0), unexpected, "nothing was sent yet");
    pair.asks();
    assert_eq!(pair.ack(3), unexpected, "beyond what was sent");
    assert_eq!(pair.answer(3, Syndrome::Nak(NakCode::RemoteAccess)), unexpected);
    assert_eq!(pair.answer(0x80_0000, Syndrome::Nak(NakCode::RemoteAccess)), Disposition::Duplicate);
    assert_eq!(pair.answer(1, Syndrome::Reserved(0x7f)), unexpected);
    assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![0; 8]), unexpected, "no READ");
    assert_eq!(pair.data(Opcode::RC_ATOMIC_ACKNOWLEDGE, 1, vec![]), unexpected, "no atomic operation");
    assert_eq!(pair.ends[A].completions(), []);
    pair.ack(2);
    assert_eq!(
        pair.answer(2, Syndrome::Nak(NakCode::RemoteAccess)),
        Disposition::Duplicate,
        "answered already"
    );
    assert_eq!(pair.ends[A].completions().len(), 3);
    assert_eq!(pair.ends[A].connection.state(), QpState::Rts);
}

#[test]
fn packets_from_other_addresses_are_dropped() {
    let mut pair = requester(|_| ());
    pair.send(A, 1, vec![1]);
    pair.asks();
    let nak = Craft::new(Opcode::RC_ACKNOWLEDGE, at(0)).says(Syndrome::Nak(NakCode::RemoteAccess));
    let end = &mut pair.ends[A];
    let bytes = nak.from(B);
    let packet = millstream_wire::Packet::new_checked(&bytes[..]).unwrap();
    let from = "10.0.0.3:50001".parse().unwrap();
    let disposition = end.connection.handle_datagram(pair.now, from, &packet, &mut end.world);
    assert_eq!(disposition, Disposition::Dropped(DropReason::WrongSource));
    let mapped = "[::ffff:10.0.0.2]:50001".parse().unwrap();
    let other = nak.to_qp(B, millstream_wire::Qpn::new(0x12));
    let packet = millstream_wire::Packet::new_checked(&other[..]).unwrap();
    let disposition = end.connection.handle_datagram(pair.now, mapped, &packet, &mut end.world);
    assert_eq!(disposition, Disposition::Dropped(DropReason::WrongDestination));
    let unreliable = Craft::new(Opcode::UC_SEND_ONLY, psn(B)).from(B);
    assert_eq!(pair.give(A, &unreliable), Disposition::Dropped(DropReason::WrongDestination));
    let congestion = Craft::new(Opcode::CNP, psn(B)).payload(vec![0; 16]).from(B);
    assert_eq!(pair.give(A, &congestion), Disposition::Congestion);
    assert_eq!(pair.ends[A].completions(), []);
}

#[test]
fn read_is_requested_again_from_the_first_missing_packet() {
    let mut pair = requester(|_| ());
    pair.post(A, 1, READ, vec![0; 1000]);
    let first = pair.take(A);
    assert_eq!((first.len(), first[0].length), (1, Some(1000)));
    pair.data(Opcode::RC_READ_RESPONSE_FIRST, 0, vec![1; 256]);
    // The second packet is lost.
    pair.data(Opcode::RC_READ_RESPONSE_MIDDLE, 2, vec![3; 256]);
    let again = pair.take(A);
    assert_eq!((numbers(&again), again[0].length), (vec![1], Some(256)), "and nothing that has come");
    pair.data(Opcode::RC_READ_RESPONSE_LAST, 3, vec![4; 232]);
    assert_eq!(pair.asks(), [], "once is enough");
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![2; 256]);
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success)]);
    let expected: Vec<u8> = [1, 2, 3, 4].into_iter().flat_map(|n| [n; 256]).take(1000).collect();
    assert_eq!(pair.ends[A].world.work[&WorkId(1)], expected);
}

#[test]
fn all_missing_read_data_is_requested_at_once_and_again_after_a_loss() {
    let mut pair = requester(|config| config.probe = Some(Duration::from_micros(100)));
    pair.post(A, 1, READ, vec![0; 256 * 12]);
    pair.asks();
    let middle = |pair: &mut Pair, n| pair.data(Opcode::RC_READ_RESPONSE_MIDDLE, n, vec![n as u8; 256]);
    let only = |pair: &mut Pair, n| pair.data(Opcode::RC_READ_RESPONSE_ONLY, n, vec![n as u8; 256]);
    let asked = |pair: &mut Pair| {
        let sent = pair.take(A);
        sent.iter().map(|sent| (numbers(&[*sent])[0], sent.length.unwrap())).collect::<Vec<_>>()
    };
    pair.data(Opcode::RC_READ_RESPONSE_FIRST, 0, vec![0; 256]);
    // 1, 2, 4 and 6 are lost, and the data behind 8 has not arrived yet.
    for (n, expected) in [(3, vec![(1, 512)]), (5, vec![(4, 256)]), (7, vec![(6, 256)]), (8, vec![])] {
        middle(&mut pair, n);
        assert_eq!(asked(&mut pair), expected, "after {n}");
    }
    // The first retransmission is lost; the data requested behind it arrives.
    only(&mut pair, 4);
    assert_eq!(pair.asks(), [1]);
    // The first response was only late: it says nothing about the data requested before it.
    middle(&mut pair, 6);
    assert_eq!(pair.asks(), []);
    // Lost again, with nothing behind it: a probe detects that.
    for n in 9..12 {
        middle(&mut pair, n);
    }
    assert_eq!(pair.asks(), []);
    pair.wait(A, Duration::from_micros(400));
    assert_eq!(asked(&mut pair), [(1, 512), (11, 256)], "what is missing, and one packet behind it");
    only(&mut pair, 11);
    assert_eq!(asked(&mut pair), [(1, 512)]);
    middle(&mut pair, 1);
    middle(&mut pair, 2);
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success)]);
    let expected: Vec<u8> = (0..12).flat_map(|n| [n; 256]).collect();
    assert_eq!(pair.ends[A].world.work[&WorkId(1)], expected);
}

#[test]
fn retransmitted_fenced_request_does_not_wait() {
    let mut pair = requester(|_| ());
    pair.post_with(A, 1, SendOp::Send(SendModifier::None), vec![1], true);
    pair.post(A, 2, READ, vec![0; 8]);
    assert_eq!(pair.asks(), [0, 1]);
    pair.answer(0, GAP);
    assert_eq!(pair.asks(), [0, 1]);
}

#[test]
fn retransmitted_reads_do_not_count_as_outstanding_twice() {
    let mut pair = requester(|config| config.max_rd_atomic = 2);
    // The first response shows the UDP source port of the peer.
    pair.send(A, 0, vec![1]);
    pair.asks();
    pair.ack(0);
    (1..5).for_each(|id| pair.post(A, id, READ, vec![0; 8]));
    assert_eq!(pair.asks(), [1, 2]);
    // The data of the first READ was lost.
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 2, vec![1; 8]);
    assert_eq!(pair.asks(), [1], "two are under way");
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![0; 8]);
    assert_eq!(pair.asks(), [3, 4]);
}

/// A slow peer: it takes 100 µs per packet, and is not scheduled for 50 ms after each 30 ms.
#[test]
fn slow_peers_see_no_spurious_retransmissions() {
    let long = |end| SendConfig {
        ack_timeout: 14,
        max_rd_atomic: 16,
        window: 512,
        probe: Some(Duration::from_millis(4)),
        ..send_config(end)
    };
    let answers = |end| Config { max_dest_rd_atomic: 16, ..config(end, Mtu::B256) };
    let mut pair = Pair::with([answers(A), answers(B)], [long(A), long(B)], 1);
    pair.ends[B].world.region(KEY.get(), VA, 1 << 20);
    for id in 0..10 {
        pair.post(A, id, READ, vec![0; 256 * 300]);
    }
    let mut waiting = std::collections::VecDeque::new();
    let mut packets = 0;
    let limit = TransmitLimits { packets: 1, ..TransmitLimits::NONE };
    let mut buffer = vec![0; 65536];
    for tick in 0..40_000_u64 {
        pair.now = pair.now + Duration::from_micros(100);
        let now = pair.now;
        pair.ends[A].connection.handle_timeout(now);
        let end = &mut pair.ends[A];
        while let Some(sent) =
            end.connection.poll_transmit(now, &mut end.world, TransmitLimits::NONE, &mut buffer)
        {
            waiting.extend(buffer[..sent.len].chunks(sent.segment).map(<[u8]>::to_vec));
        }
        if tick % 800 >= 300 {
            continue;
        }
        let end = &mut pair.ends[B];
        if let Some(sent) = end.connection.poll_transmit(now, &mut end.world, limit, &mut buffer) {
            packets += 1;
            pair.give(A, &buffer[..sent.len]);
        } else if let Some(bytes) = waiting.pop_front() {
            pair.give(B, &bytes);
        }
    }
    let done: Vec<_> = (0..10).map(|id| (id, Status::Success)).collect();
    assert_eq!(pair.ends[A].completions(), done);
    assert!(packets < 3100 + 500, "{packets} packets for 3000");
}

#[test]
fn read_data_must_have_the_requested_length() {
    let mut pair = requester(|_| ());
    pair.post(A, 1, READ, vec![0; 300]);
    pair.take(A);
    let unexpected = Disposition::Dropped(DropReason::Unexpected);
    assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_FIRST, 0, vec![1; 255]), unexpected);
    assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_FIRST, 0, vec![1; 300]), unexpected);
    pair.data(Opcode::RC_READ_RESPONSE_FIRST, 0, vec![1; 256]);
    assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_LAST, 1, vec![1; 45]), unexpected, "one byte more");
    assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_LAST, 1, vec![1; 43]), unexpected, "one byte less");
    assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_LAST, 2, vec![1; 44]), unexpected, "beyond the end");
    assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_LAST, 1, vec![1; 44]), Disposition::Accepted);
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success)]);
}

#[test]
fn ack_behind_a_read_implies_lost_data() {
    let mut pair = requester(|_| ());
    pair.send(A, 1, vec![1]);
    pair.post(A, 2, READ, vec![0; 8]);
    pair.send(A, 3, vec![1]);
    assert_eq!(pair.asks(), [0, 1, 2]);
    pair.ack(2);
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success)], "only what is before the READ");
    assert_eq!(pair.asks(), [1], "not what is acknowledged");
    pair.ack(2);
    assert_eq!(pair.asks(), [], "once");
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![9; 8]);
    assert_eq!(pair.ends[A].completions().len(), 3);
}

#[test]
fn read_data_acknowledges_earlier_packets() {
    let mut pair = requester(|_| ());
    pair.send(A, 1, vec![1]);
    pair.post(A, 2, READ, vec![0; 8]);
    pair.asks();
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![9; 8]);
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success), (2, Status::Success)]);
}

#[test]
fn outstanding_reads_are_limited() {
    let mut pair = requester(|config| config.max_rd_atomic = 2);
    (0..5).for_each(|id| pair.post(A, id, READ, vec![0; 8]));
    pair.send(A, 5, vec![1]);
    assert_eq!(pair.asks(), [0, 1]);
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 0, vec![9; 8]);
    assert_eq!(pair.asks(), [2]);
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![9; 8]);
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 2, vec![9; 8]);
    assert_eq!(pair.asks(), [3, 4, 5]);
    let mut none = requester(|config| config.max_rd_atomic = 0);
    none.ends[A].world.work.insert(WorkId(1), vec![0; 8]);
    let request = SendRequest { id: WorkId(1), work: READ, len: 8, fence: false, solicited: false };
    assert_eq!(none.ends[A].connection.post(request), Err(PostError::NoResources));
}

#[test]
fn fence_waits_for_reads_and_atomics() {
    let mut pair = requester(|_| ());
    pair.post(A, 1, READ, vec![0; 8]);
    pair.send(A, 2, vec![1]);
    pair.post_with(A, 3, SendOp::Send(SendModifier::None), vec![1], true);
    pair.send(A, 4, vec![1]);
    assert_eq!(pair.asks(), [0, 1]);
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 0, vec![9; 8]);
    assert_eq!(pair.asks(), [2, 3], "the SEND before it need not be acknowledged");
}

#[test]
fn last_packet_of_the_window_has_ack_req() {
    let mut pair = requester(|config| config.window = 10);
    pair.post(A, 1, SendOp::Write { va: VA, rkey: KEY, immediate: None }, vec![0; 256 * 30]);
    let sent = pair.take(A);
    assert_eq!(numbers(&sent), (0..10).collect::<Vec<_>>());
    assert!(sent[9].ack_req && !sent[8].ack_req);
    pair.ack(4);
    assert_eq!(pair.asks(), [10, 11, 12, 13, 14]);
}

#[test]
fn byte_budget_limits_requests() {
    let mut pair = requester(|_| ());
    pair.post(A, 1, SendOp::Write { va: VA, rkey: KEY, immediate: None }, vec![0; 256 * 30]);
    pair.limits = TransmitLimits { byte_budget: 0, ..TransmitLimits::NONE };
    assert_eq!(pair.asks(), []);
    let end = &mut pair.ends[A];
    let limits = TransmitLimits { byte_budget: 600, ..TransmitLimits::NONE };
    let mut buffer = vec![0; 10_000];
    let mut sum = 0;
    let mut left = limits.byte_budget;
    while let Some(sent) = end.connection.poll_transmit(
        pair.now,
        &mut end.world,
        TransmitLimits { byte_budget: left, ..limits },
        &mut buffer,
    ) {
        sum += sent.packets;
        left = left.saturating_sub(sent.paced_bytes);
    }
    assert_eq!(sum, 3, "288 and two of 272 bytes: one more packet while there is any byte_budget");
}

#[test]
fn credits_of_the_responder_limit_messages() {
    let mut pair = requester(|_| ());
    (1..=6).for_each(|id| pair.send(A, id, vec![1]));
    let limits = TransmitLimits { packets: 1, ..TransmitLimits::NONE };
    let mut buffer = vec![0; 1000];
    let end = &mut pair.ends[A];
    end.connection.poll_transmit(pair.now, &mut end.world, limits, &mut buffer).unwrap();
    // One message completed, two more receive requests.
    let done =
        Craft { msn: 1, ..Craft::new(Opcode::RC_ACKNOWLEDGE, at(0)).says(Syndrome::Ack { credit_code: 2 }) };
    pair.give(A, &done.from(B));
    assert_eq!(pair.asks(), [1, 2]);
    // Completed, with no receive request left: one message may be sent.
    let done =
        Craft { msn: 3, ..Craft::new(Opcode::RC_ACKNOWLEDGE, at(2)).says(Syndrome::Ack { credit_code: 0 }) };
    pair.give(A, &done.from(B));
    assert_eq!(pair.asks(), [3]);
    let done = Craft { msn: 4, ..Craft::new(Opcode::RC_ACKNOWLEDGE, at(3)) };
    pair.give(A, &done.from(B));
    assert_eq!(pair.asks(), [4, 5], "no limit any more");
}

/// Its acknowledgement brings new credits, so the responder is asked for it (9.7.7.2.5).
#[test]
fn packet_beyond_the_credits_has_ack_req() {
    let mut pair = requester(|_| ());
    pair.send(A, 1, vec![1]);
    assert_eq!(pair.asks(), [0]);
    let no_credit = |n| {
        let ack = Craft::new(Opcode::RC_ACKNOWLEDGE, at(n)).says(Syndrome::Ack { credit_code: 0 });
        Craft { msn: 1, ..ack }.from(B)
    };
    pair.give(A, &no_credit(0));
    pair.send(A, 2, vec![2; 600]);
    let requests = |sent: Vec<Sent>| sent.iter().map(|sent| (sent.psn, sent.ack_req)).collect::<Vec<_>>();
    let sent = pair.take(A);
    assert_eq!(requests(sent), [(at(1), true)]);
    pair.give(A, &no_credit(1));
    let sent = pair.take(A);
    assert_eq!(requests(sent), [(at(2), false), (at(3), true)]);
}

#[test]
fn inaccessible_memory_fails_its_request_in_order() {
    let mut pair = requester(|_| ());
    (1..=3).for_each(|id| pair.send(A, id, vec![1]));
    pair.ends[A].world.unreadable.insert(WorkId(2));
    assert_eq!(pair.asks(), [0]);
    assert_eq!(pair.ends[A].completions(), []);
    pair.ack(0);
    pair.asks();
    let expected = [(1, Status::Success), (2, Status::LocalProtection), (3, Status::Flushed)];
    assert_eq!(pair.ends[A].completions(), expected);
}

#[test]
fn inaccessible_memory_fails_a_read() {
    let mut pair = requester(|_| ());
    pair.send(A, 1, vec![1]);
    pair.post(A, 2, READ, vec![0; 8]);
    pair.asks();
    pair.ends[A].world.unreadable.insert(WorkId(2));
    pair.data(Opcode::RC_READ_RESPONSE_ONLY, 1, vec![9; 8]);
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success), (2, Status::LocalProtection)]);
}

#[test]
fn drained_queue_has_completed_started_requests() {
    let mut pair = requester(|config| config.window = 2);
    pair.send(A, 1, vec![1; 1000]);
    pair.send(A, 2, vec![1]);
    assert_eq!(pair.asks(), [0, 1]);
    pair.ends[A].connection.drain();
    let drained = |pair: &Pair| pair.ends[A].events.contains(&Event::Drained);
    pair.ack(1);
    assert_eq!(pair.asks(), [2, 3]);
    assert!(!drained(&pair));
    pair.ack(3);
    assert_eq!(pair.asks(), []);
    assert!(drained(&pair));
    assert_eq!(pair.ends[A].completions(), [(1, Status::Success)]);
    pair.ends[A].connection.resume();
    assert_eq!(pair.asks(), [4]);
    pair.ends[A].connection.fail();
    let _ = pair.take(A);
    assert_eq!(pair.ends[A].completions()[1..], [(2, Status::Flushed)]);
}

#[test]
fn lost_last_packet_is_detected_by_a_probe() {
    let mut pair = requester(|config| config.probe = Some(Duration::from_micros(100)));
    (0..3).for_each(|id| pair.send(A, id, vec![1]));
    assert_eq!(pair.asks(), [0, 1, 2]);
    pair.wait(A, Duration::from_micros(100));
    let probe = pair.take(A);
    assert_eq!((numbers(&probe), probe[0].ack_req), (vec![2], true), "the last packet once more");
    pair.wait(A, Duration::from_micros(100));
    assert_eq!(pair.asks(), [], "the next one waits longer");
    pair.wait(A, Duration::from_micros(100));
    assert_eq!(pair.asks(), [2]);
    pair.answer(1, GAP);
    assert_eq!(pair.asks(), [1, 2]);
}

#[test]
fn long_reads_are_split_into_several_requests() {
    let mut pair = requester(|config| (config.window, config.max_rd_atomic) = (20, 2));
    pair.post(A, 1, READ, vec![0; 256 * 25 + 10]);
    let sent = pair.take(A);
    let seen: Vec<_> = sent.iter().map(|sent| sent.length.unwrap()).collect();
    assert_eq!((numbers(&sent), seen), (vec![0, 10], vec![2560, 2560]));
    (0..10).for_each(|n| {
        assert_eq!(pair.data(Opcode::RC_READ_RESPONSE_MIDDLE, n, vec![1; 256]), Disposition::Accepted)
    });
    let rest = pair.take(A);
    assert_eq!((numbers(&rest), rest[0].length), (vec![20], Some(1290)));
}

#[test]
fn invalid_send_requests_are_rejected() {
    let mut pair = requester(|_| ());
    let connection = &mut pair.ends[A].connection;
    let request = |work, len| SendRequest { id: WorkId(1), work, len, fence: false, solicited: false };
    let add = SendOp::FetchAdd { va: VA, rkey: KEY, add: 1 };
    assert_eq!(connection.post(request(add, 7)), Err(PostError::Length { len: 7 }));
    assert_eq!(connection.post(request(SendOp::Local, 1)), Err(PostError::Length { len: 1 }));
    assert!(matches!(connection.post(request(READ, (1 << 31) + 1)), Err(PostError::TooLong { .. })));
    let mut receiving = Connection::new(config(A, Mtu::B256));
    assert_eq!(receiving.post(request(READ, 8)), Err(PostError::NotSending));
    let unreliable = Config { service: Service::Uc, ..config(A, Mtu::B256) };
    let mut unreliable = Connection::new(unreliable);
    unreliable.start(send_config(A));
    assert_eq!(unreliable.post(request(READ, 8)), Err(PostError::NotOffered));
    let invalidate = SendOp::Send(SendModifier::Invalidate(KEY));
    assert_eq!(unreliable.post(request(invalidate, 8)), Err(PostError::NotOffered));
}

#[test]
fn silent_peer_times_out() {
    let mut pair = requester(|_| ());
    pair.network = Network { loss: 1.0, ..Network::PERFECT };
    (0..20).for_each(|id| pair.send(A, id, vec![1; 3000]));
    pair.run();
    assert_eq!(pair.ends[A].completions().len(), 20);
    assert_eq!(pair.now.as_nanos() - 1_000_000, (1 + 2 + 6 * 4) * timeout().as_nanos() as u64);
}
