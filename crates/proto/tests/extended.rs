//! XRC (annex A14): requests one way, responses the other, and a shared receive queue in each request.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{A, B, Craft, Network, Pair, Random, config, psn, send_config};
use millstream_proto::{Disposition, DropReason, Mtu, QpState, SendModifier, SendOp, Service, Status};
use millstream_wire::{NakCode, Opcode, Rkey, Service as WireService, Srqn, Syndrome};

const KEY: Rkey = Rkey::new(0x1234_5678);
/// R_Key for invalidation.
const OTHER: Rkey = Rkey::new(0x99);
const VA: u64 = 0x7f00_0000_1000;
const FIRST: Srqn = Srqn::new(0x12_3456);
const SECOND: Srqn = Srqn::new(0xab_cdef);

fn pair(mtu: Mtu) -> Pair {
    let mut configs = [config(A, mtu), config(B, mtu)];
    (configs[A].service, configs[B].service) = (Service::XrcInitiator, Service::XrcTarget);
    let mut pair = Pair::with(configs, [send_config(A), send_config(B)], 1);
    pair.ends[B].world.region(KEY.get(), VA, 1 << 16).bytes = Random(7).bytes(1 << 16);
    pair.ends[B].world.region(OTHER.get(), 0, 8);
    pair.ends[B].world.queues.extend([FIRST, SECOND]);
    pair.ends[A].world.names = FIRST;
    pair
}

/// Runs every operation over a network with these faults; returns the packets with their queues.
fn every_operation(network: Network) -> Vec<(usize, Opcode, Option<Srqn>)> {
    let mut pair = pair(Mtu::B256);
    pair.network = network;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    pair.filter = Some(Box::new(move |from, packet| {
        log.lock().unwrap().push((from, packet.opcode(), packet.xrceth().map(|header| header.srq())));
        true
    }));
    let message = Random(1).bytes(1000);
    (0..4).for_each(|id| pair.ends[B].world.receive(100 + id, 1000));
    pair.send(A, 0, message.clone());
    pair.post(A, 1, SendOp::Write { va: VA, rkey: KEY, immediate: Some([1; 4]) }, message.clone());
    pair.post(A, 2, SendOp::Read { va: VA, rkey: KEY }, vec![0; 1000]);
    pair.post(A, 3, SendOp::FetchAdd { va: VA + 1024, rkey: KEY, add: 5 }, vec![0; 8]);
    pair.post(A, 4, SendOp::CompareSwap { va: VA + 1032, rkey: KEY, compare: 1, swap: 2 }, vec![0; 8]);
    pair.post(A, 5, SendOp::AtomicWrite { va: VA + 1040, rkey: KEY }, vec![9; 8]);
    pair.post(A, 6, SendOp::Write { va: VA + 2000, rkey: KEY, immediate: None }, message.clone());
    pair.post(A, 7, SendOp::Send(SendModifier::Immediate([2; 4])), vec![]);
    pair.post(A, 8, SendOp::Send(SendModifier::Invalidate(OTHER)), message.clone());
    let word = |pair: &Pair| {
        let region = &pair.ends[B].world.regions[&KEY].bytes[1024..1032];
        u64::from_ne_bytes(region.try_into().unwrap())
    };
    let before = word(&pair);
    pair.run();
    assert_eq!(pair.ends[A].completions(), (0..9).map(|id| (id, Status::Success)).collect::<Vec<_>>());
    let world = &pair.ends[A].world.work;
    assert_eq!(world[&millstream_proto::WorkId(2)], message, "what the READ brought");
    assert_eq!(world[&millstream_proto::WorkId(3)], before.to_ne_bytes(), "what the word was");
    assert_eq!(pair.ends[B].world.atomics, 3);
    assert!(!pair.ends[B].world.regions.contains_key(&OTHER));
    let received = &pair.ends[B].received;
    let lens: Vec<_> = received.iter().map(|(received, _)| received.len).collect();
    assert_eq!(lens, [1000, 1000, 0, 1000]);
    assert_eq!(received[0].1, message);
    assert!(pair.ends[B].world.taken_from.iter().all(|(_, queue)| *queue == FIRST));
    seen.lock().unwrap().clone()
}

#[test]
fn every_xrc_request_names_its_queue() {
    for (from, opcode, queue) in every_operation(Network::PERFECT) {
        assert_eq!(opcode.service(), WireService::Xrc, "{opcode:?}");
        assert_eq!(opcode.is_response(), from == B, "{opcode:?}");
        assert_eq!(queue, (from == A).then_some(FIRST), "{opcode:?}");
    }
}

#[test]
fn network_faults_only_cost_time() {
    let faults = Network {
        loss: 0.05,
        duplication: 0.05,
        reordering: 0.05,
        corruption: 0.02,
        latency: Duration::from_micros(5),
    };
    every_operation(faults);
}

#[test]
fn unknown_srq_is_an_invalid_request() {
    let mut pair = pair(Mtu::B256);
    pair.ends[A].world.names = Srqn::new(1);
    pair.ends[B].world.receive(100, 10);
    pair.send(A, 0, vec![1; 10]);
    pair.run();
    assert_eq!(pair.ends[A].completions(), [(0, Status::RemoteInvalidRequest)]);
    assert_eq!(pair.ends[B].connection.state(), QpState::Err);
    assert_eq!(pair.ends[B].world.receives.len(), 1, "nothing was taken");
}

/// A packet of a SEND to a queue.
fn part(opcode: Opcode, nth: u32, queue: Srqn) -> Vec<u8> {
    let packet = Craft::new(opcode, psn(A).plus(nth)).payload(vec![7; 256]);
    Craft { queue: queue.get(), ..packet }.from(A)
}

#[test]
fn srq_change_within_a_message_is_invalid() {
    let mut pair = pair(Mtu::B256);
    pair.ends[B].world.receive(100, 1000);
    assert_eq!(pair.give(B, &part(Opcode::XRC_SEND_FIRST, 0, FIRST)), Disposition::Accepted);
    assert_eq!(pair.give(B, &part(Opcode::XRC_SEND_MIDDLE, 1, FIRST)), Disposition::Accepted);
    assert_eq!(pair.give(B, &part(Opcode::XRC_SEND_LAST, 2, SECOND)), Disposition::Nak);
    let nak = pair.take(B).pop().expect("an answer");
    assert_eq!(nak.syndrome, Some(Syndrome::Nak(NakCode::InvalidRequest)));
    assert_eq!(nak.opcode, Opcode::XRC_ACKNOWLEDGE);
    // The receive request is flushed.
    assert_eq!(pair.ends[B].received[0].0.status, Status::Flushed);
}

#[test]
fn read_responses_use_the_queue_of_their_request() {
    let mut pair = pair(Mtu::B256);
    pair.ends[B].world.receive(100, 10);
    let read = Craft::new(Opcode::XRC_READ_REQUEST, psn(A)).remote(VA, KEY, 600);
    assert_eq!(pair.give(B, &Craft { queue: FIRST.get(), ..read }.from(A)), Disposition::Accepted);
    // Another queue is selected between the request and its response.
    let send = Craft { queue: SECOND.get(), ..Craft::new(Opcode::XRC_SEND_ONLY, psn(A).plus(3)) };
    assert_eq!(pair.give(B, &send.from(A)), Disposition::Accepted);
    assert_eq!(pair.ends[B].world.selected, SECOND);
    let sent = pair.take(B);
    assert_eq!(sent.iter().map(|packet| packet.payload).sum::<usize>(), 600);
    assert_eq!(pair.ends[B].world.selected, FIRST);
}

#[test]
fn xrc_ends_drop_packets_in_the_wrong_direction() {
    let mut pair = pair(Mtu::B256);
    let dropped = Disposition::Dropped(DropReason::WrongDestination);
    pair.ends[A].world.receive(100, 10);
    pair.ends[A].world.queues.insert(FIRST);
    let request = Craft { queue: FIRST.get(), ..Craft::new(Opcode::XRC_SEND_ONLY, psn(B)) };
    assert_eq!(pair.give(A, &request.from(B)), dropped, "a request to the sending end");
    let answer = Craft::new(Opcode::XRC_ACKNOWLEDGE, psn(B));
    assert_eq!(pair.give(B, &answer.from(A)), dropped, "an answer to the receiving end");
    for opcode in [Opcode::RC_SEND_ONLY, Opcode::UC_SEND_ONLY] {
        assert_eq!(pair.give(B, &Craft::new(opcode, psn(A)).from(A)), dropped, "{opcode:?}");
    }
    assert!(pair.take(A).is_empty() && pair.take(B).is_empty());
}
