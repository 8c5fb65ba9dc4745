//! Selective acknowledgements: who sends them and when, and what a requester sends again.

mod common;

use std::time::Duration;

use common::{A, B, Craft, Network, Pair, Sent, config, psn, send_config};
use millstream_proto::{Disposition, DropReason, Mtu, SendConfig, SendOp, Status};
use millstream_wire::{NakCode, Opcode, Rkey, Syndrome};

const GAP: Syndrome = Syndrome::Nak(NakCode::SequenceError);
const PROBE: Duration = Duration::from_micros(400);
const KEY: Rkey = Rkey::new(0x77);

/// The packets that an end sends, relative to A's first.
fn numbers(sent: &[Sent]) -> Vec<u32> {
    sent.iter().map(|sent| sent.psn.ahead_of(psn(A)) as u32).collect()
}

/// A is the requester; the test plays the responder B.
fn requester() -> Pair {
    let send = |end| SendConfig { probe: Some(PROBE), ..send_config(end) };
    Pair::with([config(A, Mtu::B256), config(B, Mtu::B256)], [send(A), send(B)], 1)
}

/// A requester with 40 packets in flight, all before `una` acknowledged, that has learned that the responder stores
/// packets.
fn requester_of_a_storing_responder(una: u32) -> Pair {
    let mut pair = requester();
    (0..40).for_each(|id| pair.send(A, id, vec![1]));
    assert_eq!(pair.take(A).iter().filter(|sent| sent.selective_ack).count(), 0, "nothing is known yet");
    pair.answer(3, GAP);
    assert_eq!(pair.asks(), (3..19).collect::<Vec<_>>());
    // More than was sent again.
    pair.ack(una - 1);
    let again = pair.take(A);
    assert_eq!(numbers(&again), (una..40.min(una + 16)).collect::<Vec<_>>());
    assert!(again.iter().all(|sent| sent.selective_ack));
    pair
}

impl Pair {
    fn answer(&mut self, n: u32, syndrome: Syndrome) -> Disposition {
        self.give(A, &Craft::new(Opcode::RC_ACKNOWLEDGE, psn(A).plus(n)).says(syndrome).from(B))
    }

    fn ack(&mut self, n: u32) -> Disposition {
        self.answer(n, Syndrome::ACK_UNLIMITED)
    }

    /// A selective acknowledgement: `gap` is missing, and `stored` arrived.
    fn selective(&mut self, gap: u32, stored: &[u32], syndrome: Syndrome) -> Disposition {
        let mut bitmap = vec![0; 256];
        stored.iter().map(|n| (n - gap - 1) as usize).for_each(|bit| bitmap[bit / 8] |= 1 << (bit % 8));
        let craft = Craft::new(Opcode::RC_SELECTIVE_ACKNOWLEDGE, psn(A).plus(gap));
        self.give(A, &craft.says(syndrome).payload(bitmap).from(B))
    }

    fn asks(&mut self) -> Vec<u32> {
        let sent = self.take(A);
        numbers(&sent)
    }

    /// Delivers a SEND from A to B.
    fn hand(&mut self, n: u32, selective_ack: bool) -> Disposition {
        let craft = Craft::new(Opcode::RC_SEND_ONLY, psn(A).plus(n)).payload(vec![n as u8; 8]);
        self.give(B, &Craft { selective_ack, ack_req: false, ..craft }.from(A))
    }

    /// Acknowledgements of B: PSN, syndrome, stored packets.
    fn acks(&mut self) -> Vec<(u32, Syndrome, Option<u64>)> {
        let sent = self.take(B);
        let syndromes = sent.iter().map(|sent| (sent.syndrome.expect("an acknowledgement"), sent.stored));
        numbers(&sent)
            .into_iter()
            .zip(syndromes)
            .map(|(n, (syndrome, stored))| (n, syndrome, stored))
            .collect()
    }
}

#[test]
fn all_gaps_are_sent_again_once_and_new_packets_follow() {
    let mut pair = requester_of_a_storing_responder(26);
    pair.send(A, 40, vec![1]);
    pair.selective(30, &[31, 32, 34, 36, 37, 38], GAP);
    assert_eq!(pair.asks(), [30, 33, 35, 40], "39 may be on its way");
    pair.selective(30, &[31, 32, 34, 36, 37, 38], GAP);
    assert_eq!(pair.asks(), [], "a repeated report");
    pair.selective(30, &[31, 32, 34, 36, 37, 38, 40], GAP);
    assert_eq!(pair.asks(), [39]);
    pair.selective(33, &[34, 36, 37, 38, 40], GAP);
    assert_eq!(pair.asks(), [], "33, 35 and 39 are on their way");
    pair.ack(40);
    assert_eq!(pair.ends[A].completions().len(), 41);
    assert_eq!(pair.ends[A].connection.poll_timeout(), None);
}

#[test]
fn a_lost_retransmission_is_detected_by_a_timer() {
    let mut pair = requester_of_a_storing_responder(26);
    pair.selective(30, &[31, 33, 34, 36], GAP);
    assert_eq!(pair.asks(), [30, 32, 35]);
    // 30 and 35 are lost again. The smallest timeout applies, as the round trip takes no time here, then twice that.
    let timeout = Duration::from_micros(20);
    pair.wait(A, timeout);
    let again = pair.take(A);
    assert_eq!(
        (numbers(&again), again[0].ack_req),
        (vec![30], true),
        "the oldest, to learn about the others"
    );
    pair.wait(A, timeout);
    assert_eq!(pair.asks(), []);
    pair.selective(35, &[36], GAP);
    assert_eq!(pair.asks(), [35]);
    pair.ack(39);
    assert_eq!(pair.ends[A].completions().len(), 40);
}

#[test]
fn a_responder_that_stores_nothing_more_gets_everything_again_after_a_timeout() {
    let mut pair = requester_of_a_storing_responder(26);
    // A wrong report, as a forger would send it.
    let all: Vec<u32> = (27..40).collect();
    pair.selective(26, &all, GAP);
    assert_eq!(pair.asks(), [26]);
    while pair.ends[A].completions().len() < 40 {
        let due = pair.ends[A].connection.poll_timeout().expect("a timer");
        let wait = due.since(pair.now);
        pair.wait(A, wait);
        if pair.asks() == (26..40).collect::<Vec<_>>() {
            pair.ack(39);
        }
    }
    assert!(pair.ends[A].completions().iter().all(|(_, status)| *status == Status::Success));
}

#[test]
fn selective_acknowledgements_are_checked() {
    let mut pair = requester_of_a_storing_responder(26);
    let unexpected = Disposition::Dropped(DropReason::Unexpected);
    assert_eq!(pair.selective(30, &[31], Syndrome::ACK_UNLIMITED), unexpected);
    assert_eq!(pair.selective(30, &[31], Syndrome::Nak(NakCode::RemoteAccess)), unexpected);
    assert_eq!(pair.selective(40, &[41], GAP), unexpected, "beyond what was sent");
    assert_eq!(pair.selective(25, &[31], GAP), Disposition::Duplicate);
    assert_eq!(pair.asks(), []);
    let beyond: Vec<u32> = (31..2000).collect();
    pair.selective(30, &beyond, GAP);
    assert_eq!(pair.asks(), [30], "packets that were never sent count for nothing");
    let mut pair = requester_of_a_storing_responder(26);
    let short = Craft::new(Opcode::RC_SELECTIVE_ACKNOWLEDGE, psn(A).plus(31)).says(GAP);
    pair.give(A, &short.from(B));
    assert_eq!(pair.asks(), [31], "an empty bitmap names one missing packet");
}

#[test]
fn a_read_request_is_one_packet_of_several_sequence_numbers() {
    let mut pair = requester_of_a_storing_responder(26);
    pair.ack(39);
    let read = SendOp::Read { va: 0x1000, rkey: KEY };
    pair.send(A, 40, vec![1]);
    pair.post(A, 41, read, vec![0; 1000]);
    pair.post(A, 42, read, vec![0; 1000]);
    pair.send(A, 43, vec![1]);
    assert_eq!(pair.asks(), [40, 41, 45, 49]);
    pair.selective(40, &[41, 49], GAP);
    assert_eq!(pair.asks(), [40, 45], "the first READ was stored");
}

#[test]
fn missing_read_data_and_missing_requests_are_repaired_side_by_side() {
    let mut pair = requester_of_a_storing_responder(26);
    pair.ack(39);
    let read = SendOp::Read { va: 0x1000, rkey: KEY };
    pair.post(A, 40, read, vec![0; 512]);
    (41..46).for_each(|id| pair.send(A, id, vec![1]));
    assert_eq!(pair.asks(), [40, 42, 43, 44, 45, 46]);
    // The data at 40 and 41 is lost, and the requests at 43 and 45 are.
    pair.selective(43, &[44, 46], GAP);
    let sent = pair.take(A);
    assert_eq!((numbers(&sent), sent[0].length), (vec![40, 43, 45], Some(512)));
    pair.selective(45, &[46], GAP);
    assert_eq!(pair.asks(), [], "all of it is on its way");
    pair.ack(46);
    assert_eq!(pair.ends[A].completions().len(), 40, "the READ is not complete");
    let data = |opcode, n| Craft::new(opcode, psn(A).plus(n)).payload(vec![n as u8; 256]).from(B);
    pair.give(A, &data(Opcode::RC_READ_RESPONSE_FIRST, 40));
    assert_eq!(pair.ends[A].completions().len(), 40);
    pair.give(A, &data(Opcode::RC_READ_RESPONSE_LAST, 41));
    assert_eq!(pair.ends[A].completions().len(), 46, "with everything acknowledged behind it");
    assert_eq!(pair.ends[A].connection.poll_timeout(), None);
}

#[test]
fn a_requester_of_reads_learns_that_the_responder_stores_requests() {
    let mut pair = requester();
    let read = SendOp::Read { va: 0x1000, rkey: KEY };
    (0..4).for_each(|id| pair.post(A, id, read, vec![0; 256 * 20]));
    assert_eq!(pair.asks(), [0, 20, 40, 60]);
    let data = |n: u32| {
        let opcode = match n % 20 {
            0 => Opcode::RC_READ_RESPONSE_FIRST,
            19 => Opcode::RC_READ_RESPONSE_LAST,
            _ => Opcode::RC_READ_RESPONSE_MIDDLE,
        };
        Craft::new(opcode, psn(A).plus(n)).payload(vec![n as u8; 256]).from(B)
    };
    for n in 0..20 {
        pair.give(A, &data(n));
    }
    // The second request was lost, and the others were stored.
    pair.answer(20, GAP);
    assert_eq!(pair.asks(), [20], "the others wait for its data");
    for n in 20..41 {
        pair.give(A, &data(n));
    }
    assert_eq!(pair.asks(), [], "the data of the third was sent although it was not requested again");
    for n in 41..80 {
        pair.give(A, &data(n));
    }
    pair.send(A, 5, vec![1]);
    assert!(pair.take(A)[0].selective_ack);
}

#[test]
fn requesters_that_ask_get_one_report_for_each_gap() {
    let mut pair = Pair::new(Mtu::B256, 1);
    (0..20).for_each(|id| pair.ends[B].world.receive(id, 64));
    pair.hand(0, true);
    for n in [2, 3] {
        pair.hand(n, true);
    }
    assert_eq!(pair.acks(), [(1, GAP, Some(0b11))]);
    pair.hand(4, true);
    assert_eq!(pair.acks(), [], "nothing new is missing");
    pair.hand(7, true);
    pair.hand(9, true);
    assert_eq!(pair.acks(), [(1, GAP, Some(0b1010_0111))]);
    pair.hand(1, true);
    assert_eq!(pair.acks(), [(5, GAP, Some(0b1010))], "it acknowledges what was executed");
    pair.hand(5, true);
    pair.hand(6, true);
    pair.hand(8, true);
    assert_eq!(pair.acks(), [(9, Syndrome::ACK_UNLIMITED, None)]);
    assert_eq!(pair.ends[B].received.len(), 10);
}

#[test]
fn a_requester_that_does_not_ask_gets_a_nak() {
    let mut pair = Pair::new(Mtu::B256, 1);
    (0..20).for_each(|id| pair.ends[B].world.receive(id, 64));
    pair.hand(0, true);
    pair.hand(1, false);
    // Only a packet in sequence counts: others are easier to forge.
    pair.hand(3, true);
    assert_eq!(pair.acks(), [(2, GAP, None)]);
}

/// 4,000 packets of which each twentieth is lost, in each direction: one gap for each round trip would take 200 ms.
#[test]
fn many_losses_take_few_round_trips() {
    const PACKETS: u64 = 4000;
    let send = |end| SendConfig {
        window: 1000,
        ack_timeout: 14,
        probe: Some(Duration::from_millis(4)),
        ..send_config(end)
    };
    let mut pair = Pair::with([config(A, Mtu::B256), config(B, Mtu::B256)], [send(A), send(B)], 1);
    pair.network = Network { loss: 0.05, latency: Duration::from_micros(500), ..Network::PERFECT };
    for id in 0..PACKETS {
        pair.ends[B].world.receive(id, 64);
        pair.send(A, id, vec![1]);
    }
    let start = pair.now;
    while pair.ends[A].completions().len() < PACKETS as usize {
        assert!(pair.step(), "nothing is left to do");
    }
    let took = pair.now.since(start);
    assert!(took < Duration::from_millis(60), "{took:?}");
    let sent = pair.ends[A].connection.counters();
    assert!(sent.retransmitted < PACKETS / 8, "{sent:?}");
    assert_eq!(pair.ends[B].received.len(), PACKETS as usize);
}
