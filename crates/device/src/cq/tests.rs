//! Tests of the shared half against peers that break the protocol.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use millstream_lockfree::cq_ring::OFFSET_UNIT;
use millstream_lockfree::cqe::Cqe;
use millstream_quantity::Qpn;

use super::{Cq, CqPoller};
use crate::caps::MAX_CQE;
use crate::context::Context;
use crate::layout::ARENA_LEN;
use crate::pd::Pd;
use crate::qp::Qp;
use crate::qp::state::{QpAttr, QpState, attr};
use crate::qp::{QpCap, QpType, RecvSource};
use crate::types::{Sge, WC_GENERAL_ERR, WC_OP_RECV, WC_SUCCESS, Wc};

fn queue_pair(context: &Arc<Context>, cq: &Arc<Cq>) -> Arc<Qp> {
    let capacity = QpCap { max_recv_wr: 4, max_recv_sge: 2, max_send_wr: 1, ..QpCap::default() };
    let pd = Pd::new(context);
    let qp = Qp::new(&pd, cq, cq, capacity, true, QpType::Rc, RecvSource::Own).unwrap();
    let init = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
    qp.modify(&init, attr::STATE | attr::PORT | attr::PKEY_INDEX | attr::ACCESS_FLAGS).unwrap();
    qp
}

/// Adds a completion as a malicious peer would.
fn forge(cq: &Cq, cqe: Cqe) {
    cq.producer().push(cq.context.adapter.owner_id(), cqe, false).unwrap();
}

#[test]
fn a_completion_in_the_wrong_queue_is_dropped() {
    let context = Context::open().unwrap();
    let [here, elsewhere] = [(); 2].map(|()| Cq::new(&context, 8, None).unwrap());
    let qp = queue_pair(&context, &elsewhere);
    qp.post_recv(7, &[]).unwrap();
    let cqe = Cqe { qpn: qp.qpn().get(), opcode: WC_OP_RECV as u16, ..Cqe::default() };
    forge(&here, cqe);
    assert_eq!(here.poll(&mut [Wc::default()]), Ok(0));
    forge(&elsewhere, cqe);
    let mut out = [Wc::default()];
    assert_eq!(elsewhere.poll(&mut out), Ok(1));
    assert_eq!(out[0].wr_id, 7);
}

#[test]
fn completions_carry_no_impossible_values() {
    let context = Context::open().unwrap();
    let cq = Cq::new(&context, 8, None).unwrap();
    let qp = queue_pair(&context, &cq);
    let room = |length| Sge { length, ..Sge::default() };
    qp.post_recv(7, &[room(100), room(28)]).unwrap();
    qp.post_recv(8, &[room(u32::MAX), room(u32::MAX)]).unwrap();
    let cqe = Cqe { qpn: qp.qpn().get(), status: 999, opcode: 2, byte_len: 129, ..Cqe::default() };
    forge(&cq, cqe);
    forge(&cq, Cqe { sequence: 1, status: 0, byte_len: u32::MAX, ..cqe });
    // Neither was posted.
    forge(&cq, Cqe { sequence: 2, ..cqe });
    forge(&cq, Cqe { qpn: qp.qpn().get() ^ 1, ..cqe });
    let mut out = [Wc::default(); 4];
    assert_eq!(cq.poll(&mut out), Ok(2));
    let [first, second, ..] = out;
    assert_eq!((first.wr_id, first.status, first.opcode), (7, WC_GENERAL_ERR, WC_OP_RECV));
    assert_eq!(first.byte_len, 128);
    assert_eq!((second.wr_id, second.status, second.byte_len), (8, WC_SUCCESS, u32::MAX));
}

/// Adds a completion of a send request of our own.
fn push_own(cq: &Arc<Cq>, wr_id: u64) {
    cq.push_own(Wc { wr_id, ..Wc::default() }, 0, false).unwrap();
}

/// A receive queue with `count` receives, and a completion of each.
fn receive(cq: &Arc<Cq>, count: u32) -> Arc<Qp> {
    let qp = queue_pair(&cq.context, cq);
    for sequence in 0..count {
        qp.post_recv((RECEIVED + sequence).into(), &[]).unwrap();
        forge(cq, Cqe { qpn: qp.qpn().get(), sequence, opcode: WC_OP_RECV as u16, ..Cqe::default() });
    }
    qp
}

/// The first identifier of receives.
const RECEIVED: u32 = 1000;

/// A program keeps `window` send requests outstanding, and polls `most` completions at a time.
#[test]
fn receives_are_polled_while_own_completions_never_end() {
    let context = Context::open().unwrap();
    for (window, most) in [(1, 1), (2, 1), (32, 1), (32, 16), (16, 16), (33, 16), (3, 16)] {
        let cq = Cq::with_timestamps(&context, 64, None).unwrap();
        (0..window).for_each(|wr_id| push_own(&cq, wr_id));
        let mut posted = window;
        let _qp = receive(&cq, 4);
        let (mut own, mut received) = (Vec::new(), Vec::new());
        while received.len() < 4 {
            let mut out = [Wc::default(); 16];
            let found = cq.poll(&mut out[..most]).unwrap();
            assert_ne!(found, 0);
            for wc in &out[..found] {
                if wc.opcode == WC_OP_RECV {
                    received.push(wc.wr_id);
                    continue;
                }
                own.push(wc.wr_id);
                push_own(&cq, posted);
                posted += 1;
            }
            assert!(own.len() < 400, "window {window}, {most} at a time: only {received:?} received");
        }
        assert!(received.into_iter().eq(u64::from(RECEIVED)..u64::from(RECEIVED) + 4), "in order");
        let own_count = own.len() as u64;
        assert!(own.into_iter().eq(0..own_count), "in order");
    }
}

#[test]
fn receives_are_polled_one_by_one_while_own_completions_never_end() {
    let context = Context::open().unwrap();
    let cq = Cq::new(&context, 8, None).unwrap();
    let _qp = receive(&cq, 2);
    push_own(&cq, 0);
    let poller = CqPoller::default();
    let mut order = Vec::new();
    poller.start(&cq).unwrap();
    for posted in 1..5 {
        // SAFETY: this thread is inside.
        order.push(unsafe { poller.with(|polled| polled.wc.wr_id) });
        push_own(&cq, posted);
        // SAFETY: as above.
        unsafe { poller.next(&cq) }.unwrap();
    }
    // SAFETY: as above.
    unsafe { poller.end() };
    assert_eq!(order, [0, 1000, 1001, 1]);
}

/// A reply is not polled before the completion of the request that it answers.
#[test]
fn own_completions_that_are_older_than_a_receive_are_polled_before_it() {
    let context = Context::open().unwrap();
    for most in [1, 2, 5, 16] {
        let cq = Cq::new(&context, 16, None).unwrap();
        (0..7).for_each(|wr_id| push_own(&cq, wr_id));
        let _qp = receive(&cq, 4);
        let mut order = Vec::new();
        let mut out = [Wc::default(); 16];
        while order.len() < 11 {
            let found = cq.poll(&mut out[..most]).unwrap();
            order.extend(out[..found].iter().map(|wc| wc.wr_id));
        }
        assert!(order.iter().copied().eq((0..7).chain(1000..1004)), "{most} at a time: {order:?}");
    }
}

/// Destroying a queue pair takes its completions out of the ring.
#[test]
fn cancelled_completions_delay_no_receive() {
    let context = Context::open().unwrap();
    let cq = Cq::new(&context, 16, None).unwrap();
    for (wr_id, qp_num) in [(0, 0), (1, 5), (2, 5)] {
        cq.push_own(Wc { wr_id, qp_num, ..Wc::default() }, 0, false).unwrap();
    }
    let _qp = receive(&cq, 1);
    let mut out = [Wc::default()];
    assert_eq!(cq.poll(&mut out), Ok(1));
    cq.consumer.lock().cancel(Qpn::new(5));
    assert_eq!(cq.poll(&mut out), Ok(1));
    assert_eq!(out[0].wr_id, 1000);
}

/// At every position of the 32-bit counters, and with any phase in empty slots.
#[test]
fn resizing_works_where_counters_wrap_around() {
    let context = Context::open().unwrap();
    let mut out = [Wc::default(); 4];
    for start in [0, u32::MAX - 9, u32::MAX - 2, u32::MAX - 1, u32::MAX] {
        let cq = Cq::with_timestamps(&context, 8, None).unwrap();
        let qp = queue_pair(&context, &cq);
        cq.consumer.lock().head = start;
        for word in [&cq.ring.head, &cq.ring.tail, &cq.ring.cached_head] {
            word.store(start, Ordering::Relaxed);
        }
        cq.consumer.lock().entries.start_at(start);
        let mut sequence = 0;
        for (size, count) in [(16, 1), (4, 4), (2, 0), (8, 2), (8, 3), (4, 1), (1, 1), (64, 4)] {
            cq.resize(size).unwrap();
            assert_eq!(cq.poll(&mut out), Ok(0), "nothing was added at {start}");
            let first = sequence;
            for _ in 0..count {
                qp.post_recv(sequence.into(), &[]).unwrap();
                forge(&cq, Cqe { qpn: qp.qpn().get(), sequence, ..Cqe::default() });
                sequence += 1;
            }
            cq.resize(size + count).unwrap();
            assert_eq!(cq.poll(&mut out), Ok(count as usize), "from {start}, {size} entries");
            assert!(out.iter().zip(first..sequence).all(|(wc, n)| wc.wr_id == u64::from(n)));
        }
    }
}

#[test]
fn an_uncounted_completion_of_an_exited_producer_survives_resizing() {
    let context = Context::open().unwrap();
    let cq = Cq::new(&context, 8, None).unwrap();
    let qp = queue_pair(&context, &cq);
    for sequence in 0..2 {
        qp.post_recv(sequence.into(), &[]).unwrap();
        forge(&cq, Cqe { qpn: qp.qpn().get(), sequence, ..Cqe::default() });
        cq.ring.tail.store(sequence, Ordering::Relaxed);
        cq.resize(16 << sequence).unwrap();
    }
    let mut out = [Wc::default(); 4];
    assert_eq!(cq.poll(&mut out), Ok(2));
    assert_eq!((out[0].wr_id, out[1].wr_id), (0, 1));
}

#[test]
fn entries_outside_the_arena_are_rejected() {
    let context = Context::open().unwrap();
    let cq = Cq::new(&context, 8, None).unwrap();
    let (entries, mask) = (&cq.ring.entries, &cq.ring.mask);
    let producer = cq.producer();
    let push = || producer.push(cq.context.adapter.owner_id(), Cqe::default(), false);
    assert_eq!(push(), Ok(false));
    let honest = (entries.load(Ordering::Relaxed), mask.load(Ordering::Relaxed));
    let end = (ARENA_LEN / OFFSET_UNIT) as u32;
    for (place, size) in [(u32::MAX, 7), (end, 0), (end - 1, 7), (0, u32::MAX), (0, 6), (0, MAX_CQE * 2 - 1)]
    {
        entries.store(place, Ordering::Relaxed);
        mask.store(size, Ordering::Relaxed);
        cq.ring.generation.fetch_add(1, Ordering::Relaxed);
        assert_eq!(push(), Err(millstream_lockfree::cq_ring::PushError::Locked), "{place} {size}");
    }
    entries.store(honest.0, Ordering::Relaxed);
    mask.store(honest.1, Ordering::Relaxed);
    assert_eq!(push(), Ok(false));
}
