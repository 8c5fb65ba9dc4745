//! Queues as containers: their capacity, the errors of full ones, the order of completions, and their state
//! after RESET.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_device::qp::state::QpState;
use millstream_device::qp::{QpCap, QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, Sge, WC_OP_RDMA_WRITE, WC_OP_RECV, WC_OP_SEND, WC_REM_OP_ERR,
    WC_SUCCESS, WC_WR_FLUSH_ERR, WR_RDMA_WRITE, WR_SEND, Wc,
};
use millstream_device::{
    Channel, Context, Cq, Errno, MAX_CQ, MAX_CQE, MAX_INLINE, MAX_QP_WR, MAX_SGE, Mr, Pd, Qp, Srq,
};

use millstream_quantity::Rkey;

use crate::support::{
    Command, Completion, CqKind, End, Kind, Placement, Process, QpConfig, connect, connect_queue_pair, pair,
    pattern, send_to_parent, statuses, wait_for,
};

/// `IBV_EVENT_CQ_ERR`, `IBV_EVENT_QP_FATAL`
const CQ_ERR: u32 = 0;
const QP_FATAL: u32 = 1;

#[test]
fn sizes_beyond_the_devices_are_refused() {
    let context = Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    for entries in [0, MAX_CQE + 1, u32::MAX] {
        assert_eq!(Cq::new(&context, entries, None).err(), Some(Errno::INVAL), "{entries} entries");
    }
    let cq = Cq::new(&context, 1, None).expect("the smallest");
    let most = QpCap {
        max_send_wr: MAX_QP_WR,
        max_recv_wr: MAX_QP_WR,
        max_send_sge: MAX_SGE,
        max_recv_sge: MAX_SGE,
        max_inline_data: MAX_INLINE,
    };
    let make_as = |kind, capacity| {
        Qp::new(&pd, &cq, &cq, capacity, true, kind, RecvSource::Own).map(|qp| qp.capacity())
    };
    let make = |capacity| make_as(QpType::Rc, capacity);
    assert_eq!(make(most), Ok(most));
    for too_much in [
        QpCap { max_send_wr: MAX_QP_WR + 1, ..most },
        QpCap { max_recv_wr: MAX_QP_WR + 1, ..most },
        QpCap { max_send_sge: MAX_SGE + 1, ..most },
        QpCap { max_recv_sge: MAX_SGE + 1, ..most },
        QpCap { max_inline_data: MAX_INLINE + 1, ..most },
    ] {
        assert_eq!(make(too_much), Err(Errno::INVAL), "{too_much:?}");
    }
    let none = make(QpCap::default()).expect("queues without room");
    assert_eq!((none.max_send_wr, none.max_recv_wr), (0, 0));
    assert_eq!(none.max_inline_data, MAX_INLINE, "every connected queue pair has it");
    // Message layers take it for the size of a datagram.
    for (asked, granted) in [(0, 64), (100, 100)] {
        let datagrams = make_as(QpType::Ud, QpCap { max_inline_data: asked, ..QpCap::default() });
        assert_eq!(datagrams.expect("queues without room").max_inline_data, granted);
    }
    assert_eq!(Srq::new(&pd, 0, 1).err(), Some(Errno::INVAL));
    assert_eq!(Srq::new(&pd, MAX_QP_WR + 1, 1).err(), Some(Errno::INVAL));
    assert_eq!(Srq::new(&pd, 1, MAX_SGE + 1).err(), Some(Errno::INVAL));
}

#[test]
fn the_environment_limits_what_connected_queue_pairs_get() {
    for (setting, granted) in
        [("64", 64), ("100", 100), ("0", 64), ("100000", MAX_INLINE), ("many", MAX_INLINE)]
    {
        let mut process = Process::start_with("inline", |command| command.env("MILLSTREAM_INLINE", setting));
        assert_eq!(process.recv_line(), format!("{granted} {}", granted.max(200)), "{setting}");
        assert!(process.finish().success(), "{setting}");
    }
}

/// Reports what queue pairs get that were created with 0 and 200 inline bytes.
pub(crate) fn inline() {
    let context = Context::open().expect("the device opens");
    let (pd, cq) = (Pd::new(&context), Cq::new(&context, 1, None).expect("the smallest"));
    let granted = [0, 200].map(|max_inline_data| {
        let asked = QpCap { max_inline_data, ..QpCap::default() };
        let qp = Qp::new(&pd, &cq, &cq, asked, true, QpType::Rc, RecvSource::Own).expect("room");
        qp.capacity().max_inline_data
    });
    send_to_parent(&format!("{} {}", granted[0], granted[1]));
}

#[test]
fn a_full_queue_accepts_requests_again_after_polling() {
    for place in Placement::BOTH {
        // Not powers of two: the device may round up, but must count the granted capacity exactly.
        let (mut a, mut b) = pair(place, &QpConfig { send_wr: 5, recv_wr: 3, ..QpConfig::default() });
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        let recv = Command::Recv { wr_id: 9, sges: vec![target.all()] };
        let send = Command::Send(crate::support::request(
            9,
            millstream_device::types::WR_RDMA_WRITE,
            &[source.all()],
            (target.addr, target.key),
        ));
        for _ in 0..5 {
            a.attempt(send.clone()).expect("room");
        }
        assert_eq!(a.attempt(send.clone()).unwrap_err(), libc::ENOMEM);
        a.sent(2);
        a.attempt(send.clone()).expect("room");
        a.attempt(send.clone()).expect("room");
        assert_eq!(a.attempt(send).unwrap_err(), libc::ENOMEM);
        a.sent(5);

        for _ in 0..3 {
            b.attempt(recv.clone()).expect("room");
        }
        assert_eq!(b.attempt(recv.clone()).unwrap_err(), libc::ENOMEM);
        a.send(1, &[source.all()]);
        // Consumed, but the slot is free only after its completion is polled.
        assert_eq!(b.attempt(recv.clone()).unwrap_err(), libc::ENOMEM);
        b.received(1);
        b.attempt(recv.clone()).expect("room");
        assert_eq!(b.attempt(recv).unwrap_err(), libc::ENOMEM);
    }
}

#[test]
fn completions_come_once_and_in_order_around_the_rings() {
    for place in Placement::BOTH {
        let config = QpConfig { send_wr: 8, recv_wr: 8, send_cqe: 8, recv_cqe: 8, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let source = a.register(Kind::Anonymous, 64, 0);
        let target = b.register(Kind::Anonymous, 64, 0);
        let mut next = 0;
        for count in [1, 8, 3, 7, 8, 8, 5, 2, 8, 1, 8].into_iter().cycle().take(40) {
            let ids: Vec<u64> = (next..next + count).collect();
            ids.iter().for_each(|id| b.recv(*id, &[target.all()]));
            for id in &ids {
                a.post(
                    crate::support::request(
                        *id,
                        millstream_device::types::WR_SEND,
                        &[source.part(0, 8)],
                        (0, 0),
                    )
                    .with_imm(*id as u32),
                );
            }
            let expected: Vec<_> =
                ids.iter().map(|id| Completion::ok(*id, WC_OP_RECV, 8).with_imm(*id as u32)).collect();
            assert_eq!(b.received(count as usize), expected);
            let expected: Vec<_> = ids.iter().map(|id| Completion::ok(*id, WC_OP_SEND, 0)).collect();
            assert_eq!(a.sent(count as usize), expected);
            next += count;
        }
        a.has_nothing(CqKind::Send);
        b.has_nothing(CqKind::Recv);
    }
}

/// A program that posts a WRITE for each one that completes polls fewer completions than it has outstanding. A message ends
/// it.
#[test]
fn a_message_is_polled_while_writes_never_end() {
    let context = Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    let mut memory = vec![0u8; 64];
    let start = memory.as_mut_ptr() as u64;
    let mut mr =
        Mr::register(&pd, start, 64, start, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE).expect("memory");
    let element = [Sge { addr: start, length: 8, lkey: mr.key() }];
    for (window, most) in [(1, 1), (32, 16)] {
        let config = QpConfig { access: ACCESS_REMOTE_WRITE, ..QpConfig::default() };
        let [(a_cq, a), (_b_cq, b)] = [(); 2].map(|()| {
            let cq = Cq::new(&context, 64, None).expect("a queue");
            let capacity = QpCap {
                max_send_wr: 32,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            };
            let qp =
                Qp::new(&pd, &cq, &cq, capacity, true, QpType::Rc, RecvSource::Own).expect("a queue pair");
            (cq, qp)
        });
        connect_queue_pair(&a, b.qpn().get(), &config);
        connect_queue_pair(&b, a.qpn().get(), &config);
        a.post_recv(1, &element).expect("room");
        let write = SendWr {
            opcode: WR_RDMA_WRITE,
            remote_addr: start + 8,
            rkey: Rkey::new(mr.key()),
            sges: &element,
            ..SendWr::default()
        };
        (0..window).for_each(|_| a.post_send(&write).expect("room"));
        let message = SendWr { opcode: WR_SEND, sges: &element, ..SendWr::default() };
        let mut out = [Wc::default(); 16];
        let mut writes = 0;
        loop {
            let found = a_cq.poll(&mut out[..most]).expect("no overrun");
            if out[..found].iter().any(|wc| wc.opcode == WC_OP_RECV) {
                break;
            }
            for wc in &out[..found] {
                assert_eq!((wc.opcode, wc.status), (WC_OP_RDMA_WRITE, WC_SUCCESS));
                a.post_send(&write).expect("room");
                writes += 1;
                if writes == 100 {
                    b.post_send(&message).expect("room");
                }
            }
            assert!(writes < 1000, "{window} WRITEs, {most} at a time: no message");
        }
        a.destroy();
        b.destroy();
    }
    mr.deregister().expect("no window");
}

/// Senders prefetch several receives at a time.
#[test]
fn each_message_meets_its_own_receive() {
    for place in Placement::BOTH {
        let config = QpConfig { send_wr: 64, recv_wr: 21, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let (to_a, to_b) = (a.number(), b.number());
        let source = a.register(Kind::Anonymous, 4096, 0);
        let target = b.register(Kind::Anonymous, 4096, 0);
        let (mut posted, mut taken) = (0u64, 0u64);
        // Each has its own memory, some in two elements.
        let place_of = |id: u64| 64 * (id % 61) as usize;
        let post = |b: &mut End, ids: std::ops::Range<u64>| {
            for id in ids {
                let at = place_of(id);
                match id % 9 {
                    4 => b.recv(id, &[target.part(at, 5), target.part(at + 5, 59)]),
                    _ => b.recv(id, &[target.part(at, 64)]),
                }
            }
        };
        for (round, (more, messages)) in
            [(21, 5), (5, 1), (1, 21), (21, 3), (3, 20), (1, 2), (9, 9), (21, 21)]
                .into_iter()
                .cycle()
                .take(60)
                .enumerate()
        {
            post(&mut b, posted..posted + more);
            posted += more;
            for id in taken..taken + messages {
                a.store(&source, place_of(id) as isize, &pattern(id, 64));
                let send = crate::support::request(id, WR_SEND, &[source.part(place_of(id), 64)], (0, 0));
                a.post(if id % 13 == 6 { send.with_imm(7) } else { send });
            }
            assert!(b.received(messages as usize).iter().map(|c| c.wr_id).eq(taken..taken + messages));
            for id in taken..taken + messages {
                assert_eq!(b.load(&target, place_of(id) as isize, 64), pattern(id, 64), "message {id}");
            }
            taken += messages;
            a.sent(messages as usize);
            if round % 7 == 3 {
                // RESET drops pending receives.
                b.modify(QpState::Reset, &config);
                a.modify(QpState::Reset, &config);
                b.connect_to(to_a, &config);
                a.connect_to(to_b, &config);
                let waiting = posted - taken;
                taken = posted;
                post(&mut b, posted..posted + waiting);
                posted += waiting;
            }
        }
    }
}

#[test]
fn a_full_completion_queue_of_the_sender_is_fatal() {
    let (mut a, mut b) = pair(Placement::SameProcess, &QpConfig { send_cqe: 4, ..QpConfig::default() });
    let source = a.hold(&[1; 64]);
    let target = b.register(Kind::Anonymous, 64, 0);
    a.recv(50, &[source.all()]);
    for wr_id in 0..5 {
        a.write(wr_id, &[source.all()], (target.addr, target.key));
    }
    assert_eq!(a.state(), QpState::Err);
    // Requests posted now are dropped without an error.
    a.write(5, &[source.all()], (target.addr, target.key));
    a.write(6, &[source.all()], (target.addr, target.key));
    let events: HashSet<_> = (0..2).map(|_| a.async_event(Duration::from_secs(5))).collect();
    assert_eq!(events, HashSet::from([Some(CQ_ERR), Some(QP_FATAL)]));
    assert_eq!(a.async_event(Duration::from_millis(50)), None);
    assert_eq!(statuses(&a.received(1)), [(50, WC_WR_FLUSH_ERR)]);
    let good: Vec<_> = (0..4).map(|wr_id| (wr_id, WC_SUCCESS)).collect();
    assert_eq!(statuses(&a.sent(4)), good);
    let poll = Command::Poll { which: CqKind::Send, count: 1, within_ms: 0 };
    assert_eq!(a.attempt(poll).unwrap_err(), libc::EIO, "completions are missing");
}

#[test]
fn a_full_completion_queue_of_the_receiver_is_fatal() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig { recv_cqe: 4, ..QpConfig::default() });
        let source = a.hold(&[1; 64]);
        let target = b.register(Kind::Anonymous, 64, 0);
        (0..8).for_each(|wr_id| b.recv(wr_id, &[target.all()]));
        (0..6).for_each(|wr_id| a.send(wr_id, &[source.all()]));
        let mut expected: Vec<_> = (0..4).map(|wr_id| (wr_id, WC_SUCCESS)).collect();
        expected.extend([(4, WC_REM_OP_ERR), (5, WC_WR_FLUSH_ERR)]);
        assert_eq!(statuses(&a.sent(6)), expected);
        let events: HashSet<_> = (0..2).map(|_| b.async_event(Duration::from_secs(5))).collect();
        assert_eq!(events, HashSet::from([Some(CQ_ERR), Some(QP_FATAL)]));
        assert_eq!(b.async_event(Duration::from_millis(50)), None);
        wait_for("failure", || b.state() == QpState::Err);
        assert_eq!(statuses(&b.received(4)), expected[..4]);
        let poll = Command::Poll { which: CqKind::Recv, count: 1, within_ms: 0 };
        assert_eq!(b.attempt(poll).unwrap_err(), libc::EIO, "completions are missing");
    }
}

#[test]
fn err_flushes_both_queues_in_order() {
    for place in Placement::BOTH {
        let config = QpConfig { signal_all: false, ..QpConfig::default() };
        let (mut a, _b) = pair(place, &config);
        let source = a.hold(&[1; 64]);
        // Only the second is signalled; flushed requests complete in any case.
        for wr_id in 0..4 {
            let mut request =
                crate::support::request(wr_id, millstream_device::types::WR_SEND, &[source.all()], (0, 0));
            request.flags = if wr_id == 1 { request.flags } else { 0 };
            a.post(request);
            a.recv(10 + wr_id, &[source.all()]);
        }
        a.modify(QpState::Err, &config);
        let expected: Vec<_> = (0..4).map(|wr_id| (wr_id, WC_WR_FLUSH_ERR)).collect();
        assert_eq!(statuses(&a.sent(4)), expected);
        let expected: Vec<_> = (10..14).map(|wr_id| (wr_id, WC_WR_FLUSH_ERR)).collect();
        assert_eq!(statuses(&a.received(4)), expected);
        a.send(4, &[source.all()]);
        a.recv(14, &[source.all()]);
        assert_eq!(statuses(&a.sent(1)), [(4, WC_WR_FLUSH_ERR)]);
        assert_eq!(statuses(&a.received(1)), [(14, WC_WR_FLUSH_ERR)]);
    }
}

#[test]
fn reset_forgets_everything_and_the_queue_pair_is_as_new() {
    for place in Placement::BOTH {
        let config = QpConfig { send_wr: 8, recv_wr: 8, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let source = a.register(Kind::Anonymous, 64, 0);
        let target = b.register(Kind::Anonymous, 64, 0);
        let (to_b, to_a) = (b.number(), a.number());
        for round in 0..5u64 {
            let id = round * 100;
            // Completions not polled, pending requests, unused receives.
            for i in 0..3 {
                b.recv(id + i, &[target.all()]);
                a.recv(id + 10 + i, &[source.all()]);
                a.send(id + 20 + i, &[source.all()]);
            }
            (3..6).for_each(|i| a.send(id + 20 + i, &[source.all()]));
            if round % 2 == 1 {
                a.modify(QpState::Err, &config);
            }
            a.modify(QpState::Reset, &config);
            b.modify(QpState::Reset, &config);
            for end in [&mut a, &mut b] {
                end.has_nothing(CqKind::Send);
                end.has_nothing(CqKind::Recv);
            }
            a.connect_to(to_b, &config);
            b.connect_to(to_a, &config);
            // All slots are free again.
            for i in 0..8 {
                a.store(&source, 0, &pattern(id + i, 64));
                b.recv(id + 40 + i, &[target.all()]);
                a.send(id + 50 + i, &[source.all()]);
                assert_eq!(b.received(1), [Completion::ok(id + 40 + i, WC_OP_RECV, 64)]);
                assert_eq!(b.load(&target, 0, 64), pattern(id + i, 64));
            }
            assert!(a.sent(8).iter().map(|c| c.wr_id).eq(id + 50..id + 58));
        }
    }
}

#[test]
fn a_reset_queue_pair_can_get_another_peer() {
    for place in Placement::BOTH {
        let config = QpConfig::default();
        let (mut a, b) = pair(place, &config);
        drop(b);
        let mut c = End::new(place);
        let (to_c, to_a) = (c.open(&config), a.number());
        a.modify(QpState::Reset, &config);
        a.connect_to(to_c, &config);
        c.connect_to(to_a, &config);
        let (source, target) = (a.hold(&pattern(1, 64)), c.register(Kind::Anonymous, 64, 0));
        a.write(1, &[source.all()], (target.addr, target.key));
        assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
        assert_eq!(c.load(&target, 0, 64), pattern(1, 64));
    }
}

/// Threads that spin until it is dropped.
struct BusyThreads(Arc<AtomicBool>);

impl BusyThreads {
    fn start(count: usize) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        for _ in 0..count {
            let done = done.clone();
            std::thread::spawn(move || while !done.load(Ordering::Relaxed) {});
        }
        Self(done)
    }
}

impl Drop for BusyThreads {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The peer's report of the failure may arrive after both queue pairs were connected again.
#[test]
fn a_failure_of_the_last_connection_does_not_fail_the_next_one() {
    // They delay the device's threads.
    let _busy = BusyThreads::start(4);
    let mut config = QpConfig::default();
    let (mut a, mut b) = pair(Placement::SameProcess, &config);
    let (to_a, to_b) = (a.number(), b.number());
    let (source, target) = (a.hold(&pattern(1, 64)), b.register(Kind::Anonymous, 64, 0));
    for round in 0..200 {
        b.recv(1, &[(target.addr, 64, target.key ^ 1)]);
        a.send(2, &[source.all()]);
        assert_eq!(statuses(&a.sent(1)), [(2, WC_REM_OP_ERR)], "round {round}");
        // A negative acknowledgement that is sent again does not fit the next connection's packet numbers.
        config.first_psn += 0x1000;
        for end in [&mut b, &mut a] {
            end.modify(QpState::Reset, &config);
        }
        b.connect_to(to_a, &config);
        a.connect_to(to_b, &config);
        for i in 10..20 {
            b.recv(i, &[target.all()]);
            a.send(i, &[source.all()]);
            assert_eq!(a.sent(1), [Completion::ok(i, WC_OP_SEND, 0)], "round {round}");
            assert_eq!(b.received(1), [Completion::ok(i, WC_OP_RECV, 64)], "round {round}");
        }
    }
}

#[test]
fn destruction_takes_completions_along_but_not_those_of_others() {
    let context = Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    let cq = Cq::new(&context, 64, None).expect("a queue");
    let make = || {
        let capacity = QpCap { max_send_wr: 8, max_recv_wr: 8, ..QpCap::default() };
        Qp::new(&pd, &cq, &cq, capacity, true, QpType::Rc, RecvSource::Own).expect("a queue pair")
    };
    let (first, second) = (make(), make());
    for qp in [&first, &second] {
        crate::support::connect_queue_pair(qp, qp.qpn().get(), &QpConfig::default());
    }
    for i in 0..4 {
        for (qp, base) in [(&first, 0), (&second, 100)] {
            qp.post_recv(base + i, &[]).expect("room");
            let wr = millstream_device::send_wr::SendWr {
                wr_id: base + 10 + i,
                opcode: millstream_device::types::WR_SEND,
                ..Default::default()
            };
            qp.post_send(&wr).expect("room");
        }
    }
    assert_eq!(cq.destroy(), Err(Errno::BUSY));
    first.destroy();
    let mut out = [millstream_device::types::Wc::default(); 16];
    let n = cq.poll(&mut out).expect("no overflow");
    let mut found: Vec<_> = out[..n].iter().map(|wc| (wc.qp_num, wc.wr_id)).collect();
    found.sort_unstable();
    let expected: Vec<_> =
        [100, 101, 102, 103, 110, 111, 112, 113].map(|wr_id| (second.qpn().get(), wr_id)).to_vec();
    assert_eq!(found, expected);
    assert_eq!(cq.destroy(), Err(Errno::BUSY));
    second.destroy();
    assert_eq!(cq.destroy(), Ok(()));
}

#[test]
fn objects_in_use_cannot_be_destroyed() {
    let context = Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    let channel = Channel::new(&context).expect("a channel");
    let cq = Cq::new(&context, 1, Some(channel.clone())).expect("a queue");
    let srq = Srq::new(&pd, 1, 1).expect("a queue");
    assert!(channel.in_use());
    let shared = RecvSource::Shared(srq.clone());
    let qp = Qp::new(&pd, &cq, &cq, QpCap::default(), true, QpType::Rc, shared).expect("a queue pair");
    assert_eq!(cq.destroy(), Err(Errno::BUSY));
    assert_eq!(srq.destroy(), Err(Errno::BUSY));
    // A second call does nothing.
    qp.destroy();
    qp.destroy();
    drop(qp);
    let other = Qp::new(&pd, &cq, &cq, QpCap::default(), true, QpType::Rc, RecvSource::Own);
    assert_eq!(cq.destroy(), Err(Errno::BUSY));
    // Dropping destroys, too.
    drop(other);
    assert_eq!(cq.destroy(), Ok(()));
    assert_eq!(srq.destroy(), Ok(()));
    assert!(!channel.in_use());
}

#[test]
fn deregistering_twice_has_no_effect() {
    let mut end = End::new(Placement::SameProcess);
    let first = end.register(Kind::Anonymous, 64, 0);
    end.deregister(&first);
    end.deregister(&first);
    // No slot of the table may be in use twice.
    let keys: HashSet<u32> = (0..4).map(|_| end.register(Kind::Anonymous, 64, 0).key >> 16).collect();
    assert_eq!(keys.len(), 4);
}

#[test]
fn numbers_and_keys_differ_and_cannot_be_guessed() {
    let mut end = End::new(Placement::OtherProcess);
    let mut numbers = HashSet::new();
    let mut steps = HashSet::new();
    let mut last = 0;
    for _ in 0..64 {
        let qpn = end.open(&QpConfig::default());
        assert!(qpn > 1 && qpn < 0xff_ffff, "{qpn:#x} is special");
        assert!(numbers.insert(qpn), "{qpn:#x} came twice");
        steps.insert(qpn.wrapping_sub(last));
        last = qpn;
    }
    assert!(steps.len() > 50, "the numbers follow a pattern: {steps:x?}");
    let keys: Vec<u32> = (0..64).map(|_| end.register(Kind::Anonymous, 64, 0).key).collect();
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 64);
    // An index in the high half must be random as well: 13 of its bits are.
    let steps: HashSet<u32> = keys.windows(2).map(|two| (two[1] >> 16).wrapping_sub(two[0] >> 16)).collect();
    assert!(steps.len() > 50, "the indices follow a pattern: {keys:x?}");
    let tags: HashSet<u32> = keys.iter().map(|key| key & 0xffff).collect();
    assert!(tags.len() > 60 && keys.iter().all(|key| *key != 0), "{keys:x?}");
    let other = End::new(Placement::OtherProcess).open(&QpConfig::default());
    assert_ne!(other >> 12, last >> 12, "two processes have different numbers");
}

#[test]
fn five_hundred_queue_pairs_between_two_processes() {
    const COUNT: usize = 512;
    let config = QpConfig { send_wr: 4, recv_wr: 4, send_cqe: 8, recv_cqe: 8, ..QpConfig::default() };
    let mut b = End::new(Placement::OtherProcess);
    let target = b.register(Kind::Anonymous, COUNT, 0);
    let mut ends = Vec::new();
    for i in 0..COUNT {
        let mut a = End::new(Placement::SameProcess);
        // The queue pairs opened before live on beside it.
        b.keep();
        connect(&mut a, &mut b, &config);
        let source = a.hold(&[i as u8 ^ 0x5a]);
        ends.push((a, source));
    }
    for (i, (a, source)) in ends.iter_mut().enumerate() {
        a.write(i as u64, &[source.all()], (target.addr + i as u64, target.key));
    }
    for (i, (a, _)) in ends.iter_mut().enumerate() {
        assert_eq!(a.sent(1), [Completion::ok(i as u64, WC_OP_RDMA_WRITE, 0)]);
    }
    let expected: Vec<u8> = (0..COUNT).map(|i| i as u8 ^ 0x5a).collect();
    assert_eq!(b.load(&target, 0, COUNT), expected);
}

/// No queue takes a mapping of its own: `vm.max_map_count` allows 65,530.
#[test]
fn as_many_completion_queues_as_advertised_exist() {
    let context = Context::open().expect("the device opens");
    let mappings = || std::fs::read_to_string("/proc/self/maps").expect("Linux").lines().count();
    let before = mappings();
    let queues: Vec<_> = (0..MAX_CQ).map_while(|_| Cq::new(&context, 1, None).ok()).collect();
    assert_eq!(queues.len(), MAX_CQ as usize);
    // Other tests map memory meanwhile.
    assert!(mappings() < before + 2000, "{} mappings, {before} before", mappings());
}
