//! Shared receive queues: every request is consumed once, and none is lost when a queue pair or process ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use millstream_device::qp::state::{QpState, attr};
use millstream_device::qp::{Qp, QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    Sge, WC_LOC_PROT_ERR, WC_REM_ACCESS_ERR, WC_REM_OP_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_RDMA_WRITE,
    WR_SEND,
};
use millstream_device::{Cq, Errno, Pd, Srq};
use millstream_quantity::Rkey;

use crate::support::{
    Adapter, Command, End, Kind, Placement, QpConfig, TEST_TIMEOUT, attributes, connect_queue_pair, element,
    event, has_begun, is_empty, next, request, wait_for,
};
use crate::unreliable;

/// `IBV_EVENT_QP_ACCESS_ERR`, `IBV_EVENT_SRQ_LIMIT_REACHED`, `IBV_EVENT_QP_LAST_WQE_REACHED`
const ACCESS_ERR: u32 = 3;
const LIMIT_REACHED: u32 = 15;
const LAST_WQE_REACHED: u32 = 16;

/// Queue pairs on one shared receive queue, each with its sender.
struct SrqFixture {
    adapter: Adapter,
    srq: Arc<Srq>,
    /// Completions of all receivers.
    received: Arc<Cq>,
    sent: Arc<Cq>,
    pairs: Vec<(Arc<Qp>, Arc<Qp>)>,
}

impl SrqFixture {
    fn new(requests: u32, pairs: usize) -> Self {
        let adapter = Adapter::open();
        let srq = Srq::new(&adapter.pd, requests, 2).expect("a shared queue");
        let mut fixture =
            Self { srq, received: adapter.cq(), sent: adapter.cq(), pairs: Vec::new(), adapter };
        (0..pairs).for_each(|_| fixture.add_pair());
        fixture
    }

    fn add_pair(&mut self) {
        let shared = RecvSource::Shared(self.srq.clone());
        let receiver = self.adapter.qp_with(&self.received, QpType::Rc, shared).expect("a queue pair");
        let sender = self.adapter.qp(&self.sent).expect("a queue pair");
        connect_queue_pair(&sender, receiver.qpn().get(), &QpConfig::default());
        connect_queue_pair(&receiver, sender.qpn().get(), &QpConfig::default());
        self.pairs.push((sender, receiver));
    }

    fn send(&self, pair: usize) {
        self.pairs[pair].0.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    }

    /// Number of free slots of the queue.
    fn room(&self) -> usize {
        (0..).take_while(|i| self.srq.post(1000 + i, &[]) != Err(Errno::NOMEM)).count()
    }
}

#[test]
fn srq_requests_are_consumed_in_order_by_any_queue_pair() {
    let fixture = SrqFixture::new(8, 3);
    for round in 0..20 {
        for i in 0..6 {
            fixture.srq.post(round * 6 + i, &[]).expect("room");
        }
        for i in 0..6 {
            let pair = [0, 2, 1, 1, 0, 2][i as usize];
            fixture.send(pair);
            let wc = next(&fixture.received);
            assert_eq!((wc.wr_id, wc.qp_num), (round * 6 + i, fixture.pairs[pair].1.qpn().get()));
            assert_eq!(next(&fixture.sent).status, WC_SUCCESS);
        }
    }
    assert_eq!(fixture.room(), 8);
    assert_eq!(fixture.srq.post(0, &[Sge::default(); 3]), Err(Errno::INVAL));
    assert_eq!(fixture.pairs[0].1.post_recv(0, &[]), Err(Errno::INVAL), "it has none of its own");
}

#[test]
fn an_empty_queue_makes_all_senders_wait() {
    let fixture = SrqFixture::new(4, 3);
    (0..3).for_each(|pair| fixture.send(pair));
    std::thread::sleep(Duration::from_millis(30));
    assert!(is_empty(&fixture.received) && is_empty(&fixture.sent));
    let mut served: Vec<u32> = (0..3)
        .map(|i| {
            fixture.srq.post(i, &[]).expect("room");
            let wc = next(&fixture.received);
            assert_eq!(wc.wr_id, i);
            assert_eq!(next(&fixture.sent).status, WC_SUCCESS);
            wc.qp_num
        })
        .collect();
    served.sort_unstable();
    let mut expected: Vec<u32> = fixture.pairs.iter().map(|(_, receiver)| receiver.qpn().get()).collect();
    expected.sort_unstable();
    assert_eq!(served, expected, "each of them once");
}

#[test]
fn a_destroyed_queue_pair_returns_unpolled_srq_requests() {
    let mut fixture = SrqFixture::new(4, 2);
    for ends in ["destroyed", "dropped", "reset"] {
        assert_eq!(fixture.room(), 4, "before {ends}");
        (0..3).for_each(|_| fixture.send(1));
        fixture.send(0);
        (0..4).for_each(|_| assert_eq!(next(&fixture.sent).status, WC_SUCCESS));
        let (_, receiver) = &fixture.pairs[1];
        match ends {
            "destroyed" => receiver.destroy(),
            "dropped" => {}
            _ => {
                let reset = attributes(&QpConfig::default(), QpState::Reset, 0);
                receiver.modify(&reset, attr::STATE).expect("to RESET");
            }
        }
        if ends != "reset" {
            fixture.pairs.pop();
        }
        // The other queue pair's completion remains.
        let wc = next(&fixture.received);
        assert_eq!(wc.qp_num, fixture.pairs[0].1.qpn().get());
        assert!(is_empty(&fixture.received), "completions of a queue pair that was {ends}");
        assert_eq!(fixture.room(), 4, "after {ends}");
        // Consumed again, before the next round.
        for _ in 0..4 {
            fixture.send(0);
            assert_eq!(next(&fixture.sent).status, WC_SUCCESS);
            next(&fixture.received);
        }
        if ends != "reset" {
            fixture.add_pair();
        }
    }
}

#[test]
fn a_limit_is_reported_once() {
    let fixture = SrqFixture::new(8, 1);
    assert_eq!(fixture.srq.set_limit(9), Err(Errno::INVAL));
    assert_eq!(fixture.room(), 8);
    fixture.srq.set_limit(6).expect("within the size");
    assert_eq!(fixture.srq.limit(), 6);
    (0..2).for_each(|_| fixture.send(0));
    assert_eq!(event(&fixture.adapter.context, Duration::from_millis(30)), None, "six are left");
    (0..2).for_each(|_| fixture.send(0));
    assert_eq!(event(&fixture.adapter.context, Duration::from_secs(5)), Some(LIMIT_REACHED));
    assert_eq!(fixture.srq.limit(), 0);
    (0..2).for_each(|_| fixture.send(0));
    assert_eq!(event(&fixture.adapter.context, Duration::from_millis(30)), None, "not armed again");
    // Already below the limit.
    fixture.srq.set_limit(3).expect("within the size");
    assert_eq!(event(&fixture.adapter.context, Duration::from_secs(5)), Some(LIMIT_REACHED));
}

/// The owner sets a limit at the moment at which a sender takes the last request: the event is raised in every race.
#[test]
fn a_limit_that_is_set_during_a_send_is_reported() {
    let queues = SrqFixture::new(1, 1);
    let turn = AtomicU32::new(0);
    const RACES: u32 = 5000;
    let wait_for_turn = |n: u32| while turn.load(Ordering::Acquire) != n {};
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for race in 0..RACES {
                wait_for_turn(2 * race + 1);
                queues.send(0);
                turn.store(2 * race + 2, Ordering::Release);
            }
        });
        for race in 0..RACES {
            queues.srq.post(1, &[]).expect("room");
            turn.store(2 * race + 1, Ordering::Release);
            (0..race % 64).for_each(|_| std::hint::spin_loop());
            queues.srq.set_limit(1).expect("within the size");
            wait_for_turn(2 * race + 2);
            assert_eq!(event(&queues.adapter.context, TEST_TIMEOUT), Some(LIMIT_REACHED), "race {race}");
            next(&queues.received);
            next(&queues.sent);
        }
    });
}

/// Queue pair and shared receive queue may be of two protection domains.
#[test]
fn receives_use_the_protection_domain_of_their_queue() {
    let of_queue = Adapter::open();
    let of_pair = Adapter { context: of_queue.context.clone(), pd: Pd::new(&of_queue.context) };
    let (received, sent) = (of_queue.cq(), of_queue.cq());
    let srq = Srq::new(&of_queue.pd, 4, 1).expect("a shared queue");
    let shared = RecvSource::Shared(srq.clone());
    let receiver = of_pair.qp_with(&received, QpType::Rc, shared).expect("a queue pair");
    let sender = of_pair.qp(&sent).expect("a queue pair");
    connect_queue_pair(&sender, receiver.qpn().get(), &QpConfig::default());
    connect_queue_pair(&receiver, sender.qpn().get(), &QpConfig::default());
    let [mut right, mut wrong, mut data] = [(); 3].map(|()| vec![0u8; 64]);
    let (of_srq, of_qp) = (of_queue.register(&mut right), of_pair.register(&mut wrong));
    let source = of_pair.register(&mut data);
    let sges = [element(&data, &source)];
    for (request, expected) in [
        (element(&right, &of_srq), [WC_SUCCESS, WC_SUCCESS]),
        (element(&wrong, &of_qp), [WC_REM_OP_ERR, WC_LOC_PROT_ERR]),
    ] {
        srq.post(1, &[request]).expect("room");
        sender.post_send(&SendWr { opcode: WR_SEND, sges: &sges, ..SendWr::default() }).expect("room");
        assert_eq!([next(&sent).status, next(&received).status], expected);
    }
}

/// The report of the limit names the queue pair whose message reached it.
#[test]
fn a_limit_is_reported_although_its_queue_pair_is_destroyed() {
    for round in 0..100 {
        let queues = SrqFixture::new(2, 1);
        (0..2).for_each(|wr_id| queues.srq.post(wr_id, &[]).expect("room"));
        queues.srq.set_limit(2).expect("within the size");
        queues.send(0);
        queues.pairs[0].1.destroy();
        assert_eq!(event(&queues.adapter.context, TEST_TIMEOUT), Some(LIMIT_REACHED), "round {round}");
    }
}

#[test]
fn a_failing_queue_pair_leaves_the_queue_to_the_others() {
    let fixture = SrqFixture::new(4, 2);
    assert_eq!(fixture.room(), 4);
    let mut memory = vec![0u8; 64];
    let mr = fixture.adapter.register(&mut memory);
    let sges = [element(&memory, &mr)];
    let wrong =
        SendWr { opcode: WR_RDMA_WRITE, sges: &sges, rkey: Rkey::new(mr.key() ^ 1), ..SendWr::default() };
    fixture.pairs[1].0.post_send(&wrong).expect("room");
    assert_eq!(next(&fixture.sent).status, WC_REM_ACCESS_ERR);
    let mut events = [(); 2].map(|()| event(&fixture.adapter.context, Duration::from_secs(5)));
    events.sort_unstable();
    assert_eq!(events, [Some(ACCESS_ERR), Some(LAST_WQE_REACHED)]);
    // Requests of a shared queue are not flushed. A second transition to ERR raises no second event.
    let error = attributes(&QpConfig::default(), QpState::Err, 0);
    fixture.pairs[1].1.modify(&error, attr::STATE).expect("to ERR");
    assert!(is_empty(&fixture.received));
    assert_eq!(event(&fixture.adapter.context, Duration::from_millis(30)), None);
    (0..4).for_each(|_| fixture.send(0));
    (0..4).for_each(|_| assert_eq!(next(&fixture.received).status, WC_SUCCESS));
}

/// The completions of an unreliable connection do not fit into their queue. Its sender goes on until the receiver fails.
#[test]
fn a_lost_completion_of_an_unreliable_connection_costs_no_place() {
    const REQUESTS: u32 = 8;
    let fixture = SrqFixture::new(REQUESTS, 1);
    let small = Cq::new(&fixture.adapter.context, 1, None).expect("a queue");
    let shared = RecvSource::Shared(fixture.srq.clone());
    let receiver = fixture.adapter.qp_with(&small, QpType::Uc, shared).expect("a queue pair");
    let sent = fixture.adapter.cq();
    let sender = fixture.adapter.qp_with(&sent, QpType::Uc, RecvSource::Own).expect("a queue pair");
    unreliable::ready(&sender, receiver.qpn().get());
    unreliable::ready(&receiver, sender.qpn().get());
    (0..u64::from(REQUESTS)).for_each(|i| fixture.srq.post(i, &[]).expect("room"));
    for _ in 0..REQUESTS {
        sender.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
    }
    wait_for("the receiver fails", || receiver.state() == QpState::Err);
    receiver.destroy();
    assert_eq!(fixture.room(), 2, "the receive that completed, and the one whose completion was lost");
    for _ in 0..REQUESTS {
        fixture.send(0);
        assert_eq!(next(&fixture.received).status, WC_SUCCESS);
    }
}

#[test]
fn a_request_taken_by_an_exited_sender_is_flushed() {
    let adapter = Adapter::open();
    for ends in ["error", "reset", "destroyed"] {
        while !exits_within_a_message(&adapter, ends) {}
    }
}

/// Kills the sender during a message and ends the connection. False if the message completed first.
fn exits_within_a_message(adapter: &Adapter, ends: &str) -> bool {
    const LEN: usize = 64 << 20;
    let config = QpConfig::default();
    let (cq, srq) = (adapter.cq(), Srq::new(&adapter.pd, 2, 1).expect("a shared queue"));
    let shared = RecvSource::Shared(srq.clone());
    let receiver = adapter.qp_with(&cq, QpType::Rc, shared).expect("a queue pair");
    let mut sender = End::new(Placement::OtherProcess);
    let to = sender.open(&config);
    connect_queue_pair(&receiver, to, &config);
    sender.connect_to(receiver.qpn().get(), &config);
    let source = sender.register(Kind::Anonymous, LEN, 0);
    let mut memory = vec![1u8; LEN];
    let mr = adapter.register(&mut memory);
    srq.post(1, &[element(&memory, &mr)]).expect("room");
    srq.post(2, &[]).expect("room");
    sender.begin(&Command::Send(request(1, WR_SEND, &[source.all()], (0, 0))));
    wait_for("the message", || has_begun(&memory, 0));
    sender.process().kill();
    if !is_empty(&cq) {
        return false;
    }
    match ends {
        "error" => receiver.modify(&attributes(&config, QpState::Err, 0), attr::STATE).expect("to ERR"),
        "reset" => receiver.modify(&attributes(&config, QpState::Reset, 0), attr::STATE).expect("to RESET"),
        _ => receiver.destroy(),
    }
    if ends == "error" {
        let wc = next(&cq);
        if wc.status == WC_SUCCESS {
            // By packets that had arrived before the kill.
            return false;
        }
        assert_eq!((wc.wr_id, wc.status, wc.qp_num), (1, WC_WR_FLUSH_ERR, receiver.qpn().get()));
    }
    assert!(is_empty(&cq), "the message was not whole");
    assert_eq!(srq.post(3, &[]), Ok(()), "the place of the request, when the receiver is {ends}");
    assert_eq!(srq.post(4, &[]), Err(Errno::NOMEM));
    true
}
