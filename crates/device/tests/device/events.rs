//! Asynchronous events: when they are raised, how programs wait for them, and that destruction waits for
//! acknowledgements.

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::thread::JoinHandleExt as _;
use std::sync::Arc;
use std::time::Duration;

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{
    SEND_SOLICITED, WC_OP_RECV, WC_OP_SEND, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_RDMA_WRITE, WR_SEND, Wc,
};
use millstream_device::{Channel, Cq, ObjectHandle, Srq};
use millstream_quantity::Qkey;
use millstream_shm::poll_readable;

use crate::support::{
    Adapter, Command, Completion, End, Kind, Placement, QpConfig, attributes, connect_queue_pair, element,
    event, next, pattern, request, wait_for,
};

/// `IBV_EVENT_*`
const CQ_ERR: u32 = 0;
const QP_FATAL: u32 = 1;
const COMM_EST: u32 = 4;
const SQ_DRAINED: u32 = 5;
const LIMIT_REACHED: u32 = 15;

/// Long enough for a wrong event to arrive.
const A_WHILE: Duration = Duration::from_millis(50);

/// Longest wait for an event that must arrive.
const TEST_TIMEOUT: Duration = Duration::from_secs(10);

fn readable(fd: &impl AsFd) -> bool {
    poll_readable(&[fd.as_fd()], Some(Duration::ZERO)).expect("a descriptor")[0]
}

fn make_nonblocking(fd: BorrowedFd<'_>) {
    // SAFETY: plain system calls on a live descriptor.
    unsafe {
        let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
        assert_eq!(libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK), 0);
    }
}

/// A queue pair in transition to SQD, which will raise SQ_DRAINED.
fn drains(adapter: &Adapter, cq: &Arc<Cq>) -> Arc<Qp> {
    let qp = adapter.qp(cq).expect("a queue pair");
    connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
    drain(&qp);
    qp
}

fn drain(qp: &Qp) {
    let sqd = QpAttr { en_sqd_async_notify: true, ..attributes(&QpConfig::default(), QpState::Sqd, 0) };
    qp.modify(&sqd, attr::STATE | attr::EN_SQD_ASYNC_NOTIFY).expect("to SQD");
}

#[test]
fn a_signal_whose_handler_restarts_system_calls_does_not_end_the_wait_for_an_event() {
    extern "C" fn ignore(_: libc::c_int) {}
    // SAFETY: the handler does nothing; no other test uses this signal.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, std::ptr::null_mut()), 0);
    }
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let context = adapter.context.clone();
    let waits = std::thread::spawn(move || context.next_event().map(|event| event.kind()));
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(5));
        // SAFETY: the thread is not joined yet.
        unsafe { libc::pthread_kill(waits.as_pthread_t(), libc::SIGUSR2) };
    }
    let _qp = drains(&adapter, &cq);
    assert_eq!(waits.join().expect("no panic").expect("an event"), SQ_DRAINED);
}

/// Fetches the next event as a C program does, and destroys the object in another thread. Checks that the
/// destruction waits for the acknowledgement.
fn ends_after_the_acknowledgement(
    adapter: &Adapter,
    kind: u32,
    handle: &ObjectHandle,
    end: impl FnOnce() + Send,
) {
    handle.set_pointer(0x1000 + u64::from(kind));
    let fetched = adapter.context.next_event().expect("it waits");
    assert_eq!((fetched.kind(), fetched.pointer()), (kind, handle.pointer()));
    fetched.leave_unacknowledged();
    std::thread::scope(|scope| {
        let ending = scope.spawn(end);
        std::thread::sleep(A_WHILE);
        assert!(!ending.is_finished(), "event {kind} is still held");
        handle.acknowledge();
        wait_for("the end", || ending.is_finished());
    });
}

#[test]
fn objects_end_after_their_events_are_acknowledged() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = drains(&adapter, &cq);
    ends_after_the_acknowledgement(&adapter, SQ_DRAINED, qp.handle(), || qp.destroy());

    let srq = Srq::new(&adapter.pd, 4, 1).expect("a shared queue");
    srq.set_limit(1).expect("within the size");
    ends_after_the_acknowledgement(&adapter, LIMIT_REACHED, srq.handle(), || srq.destroy().expect("unused"));

    let small = Cq::new(&adapter.context, 1, None).expect("a queue");
    let qp = adapter.qp(&small).expect("a queue pair");
    connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
    let nothing = SendWr { opcode: WR_RDMA_WRITE, ..SendWr::default() };
    (0..2).for_each(|_| qp.post_send(&nothing).expect("room"));
    wait_for("the failure", || qp.state() == QpState::Err);
    let first = event(&adapter.context, TEST_TIMEOUT);
    assert_eq!(first, Some(CQ_ERR), "the queue that caused it comes first");
    assert_eq!(event(&adapter.context, TEST_TIMEOUT), Some(QP_FATAL));
    qp.destroy();
    // Its only event was acknowledged.
    small.destroy().expect("unused");
}

#[test]
fn a_queue_that_overflowed_ends_after_the_acknowledgement() {
    let adapter = Adapter::open();
    let small = Cq::new(&adapter.context, 1, None).expect("a queue");
    let qp = adapter.qp(&small).expect("a queue pair");
    connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
    let nothing = SendWr { opcode: WR_RDMA_WRITE, ..SendWr::default() };
    (0..2).for_each(|_| qp.post_send(&nothing).expect("room"));
    wait_for("the failure", || qp.state() == QpState::Err);
    qp.destroy();
    ends_after_the_acknowledgement(&adapter, CQ_ERR, small.handle(), || small.destroy().expect("unused"));
}

#[test]
fn destroying_an_object_drops_its_events() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let (first, second) = (drains(&adapter, &cq), drains(&adapter, &cq));
    second.handle().set_pointer(2);
    assert!(readable(&*adapter.context));
    first.destroy();
    assert!(readable(&*adapter.context), "one is left");
    let fetched = adapter.context.next_event().expect("it waits");
    assert_eq!((fetched.kind(), fetched.pointer()), (SQ_DRAINED, 2));
    drop(fetched);
    assert!(!readable(&*adapter.context));
    // After the last queued event the descriptor must not be readable.
    let third = drains(&adapter, &cq);
    assert!(readable(&*adapter.context));
    third.destroy();
    assert!(!readable(&*adapter.context));
}

#[test]
fn a_nonblocking_descriptor_answers_at_once() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    make_nonblocking(adapter.context.as_fd());
    let none = |adapter: &Adapter| adapter.context.next_event().expect_err("none waits").kind();
    assert_eq!(none(&adapter), ErrorKind::WouldBlock);
    let qps: Vec<_> = (0..3).map(|_| drains(&adapter, &cq)).collect();
    for _ in &qps {
        assert!(readable(&*adapter.context));
        assert_eq!(adapter.context.next_event().expect("it waits").kind(), SQ_DRAINED);
    }
    assert!(!readable(&*adapter.context));
    assert_eq!(none(&adapter), ErrorKind::WouldBlock);
}

#[test]
fn a_thread_that_waits_is_woken() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| adapter.context.next_event().expect("it comes").kind());
        std::thread::sleep(A_WHILE);
        assert!(!waiting.is_finished());
        let _qp = drains(&adapter, &cq);
        assert_eq!(waiting.join().expect("no panic"), SQ_DRAINED);
    });
}

#[test]
fn a_queued_event_is_not_repeated() {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = drains(&adapter, &cq);
    for _ in 0..3 {
        qp.modify(&attributes(&QpConfig::default(), QpState::Rts, 0), attr::STATE).expect("to RTS");
        drain(&qp);
    }
    assert_eq!(event(&adapter.context, TEST_TIMEOUT), Some(SQ_DRAINED));
    assert_eq!(event(&adapter.context, A_WHILE), None);
    qp.modify(&attributes(&QpConfig::default(), QpState::Rts, 0), attr::STATE).expect("to RTS");
    drain(&qp);
    assert_eq!(
        event(&adapter.context, TEST_TIMEOUT),
        Some(SQ_DRAINED),
        "another one, after the first was fetched"
    );
}

#[test]
fn the_first_request_to_a_queue_pair_in_rtr_is_reported_once() {
    for place in Placement::BOTH {
        // 1.07 s, with seven retries.
        let config = QpConfig { timeout: 18, ..QpConfig::default() };
        let (mut a, mut b) = (End::new(Placement::SameProcess), End::new(place));
        let (to_b, to_a) = (b.open(&config), a.open(&config));
        a.connect_to(to_b, &config);
        b.modify(QpState::Init, &config);
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        b.recv(1, &[target.all()]);
        // Sent before the receiver is ready: it is retried, and raises the event when it arrives.
        a.send(1, &[source.all()]);
        assert_eq!(b.async_event(A_WHILE), None);
        b.attempt(Command::Connect(to_a, config.clone())).expect("to RTR");
        assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_SEND, 0)]);
        assert_eq!(b.received(1), [Completion::ok(1, WC_OP_RECV, 64)]);
        assert_eq!(b.async_event(TEST_TIMEOUT), Some(COMM_EST), "{place:?}");
        a.post(request(2, WR_RDMA_WRITE, &[source.all()], (target.addr, target.key)));
        assert_eq!(a.sent(1)[0].status, WC_SUCCESS);
        assert_eq!(b.async_event(A_WHILE), None, "{place:?}");
        b.modify(QpState::Rts, &config);
        // In the other direction the peer is in RTS already.
        b.post(request(3, WR_RDMA_WRITE, &[target.all()], (source.addr, source.key)));
        assert_eq!(b.sent(1)[0].status, WC_SUCCESS);
        assert_eq!(a.async_event(A_WHILE), None, "{place:?}");
    }
}

#[test]
fn a_datagram_that_overflows_the_completion_queue_is_reported() {
    let adapter = Adapter::open();
    let (sent, received) = (adapter.cq(), Cq::new(&adapter.context, 1, None).expect("a queue"));
    let [sender, receiver] =
        [&sent, &received].map(|cq| adapter.qp_with(cq, QpType::Ud, RecvSource::Own).expect("a queue pair"));
    for qp in [&sender, &receiver] {
        let all = |state| QpAttr { qkey: Qkey::new(7), ..attributes(&QpConfig::default(), state, 0) };
        qp.modify(&all(QpState::Init), attr::STATE | attr::PKEY_INDEX | attr::PORT | attr::QKEY)
            .expect("to INIT");
        qp.modify(&all(QpState::Rtr), attr::STATE).expect("to RTR");
        qp.modify(&all(QpState::Rts), attr::STATE | attr::SQ_PSN).expect("to RTS");
    }
    let mut memory = vec![0u8; 64];
    let mr = adapter.register(&mut memory);
    let to = UdDestination { on_this_host: true, qpn: receiver.qpn(), qkey: Qkey::new(7), grh: [0; 40] };
    for i in 0..2 {
        receiver.post_recv(i, &[element(&memory, &mr)]).expect("room");
        sender.post_send(&SendWr { opcode: WR_SEND, to: Some(to), ..SendWr::default() }).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
    }
    let mut events = [(); 2].map(|()| event(&adapter.context, TEST_TIMEOUT));
    events.sort_unstable();
    assert_eq!(events, [Some(CQ_ERR), Some(QP_FATAL)]);
    assert_eq!((receiver.state(), sender.state()), (QpState::Err, QpState::Rts));
    assert_eq!(received.poll(&mut [Wc::default()]), Ok(1), "what fitted is still there");
}

/// Adapters signal at once for completions since the last event, and programs that poll a bounded number of completions per
/// event rely on it.
#[test]
fn arming_a_queue_that_holds_completions_raises_an_event() {
    let adapter = Adapter::open();
    let channel = Channel::new(&adapter.context).expect("a channel");
    let [sent, received] =
        [(); 2].map(|()| Cq::new(&adapter.context, 8, Some(channel.clone())).expect("a queue"));
    let capacity = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
    let qp = Qp::new(&adapter.pd, &sent, &received, capacity, true, QpType::Rc, RecvSource::Own)
        .expect("a queue pair");
    connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
    let exchange = |flags: u32| {
        qp.post_recv(1, &[]).expect("room");
        qp.post_send(&SendWr { opcode: WR_SEND, flags, ..SendWr::default() }).expect("room");
    };
    let has_event = |expected: Option<&Arc<Cq>>| {
        let Some(cq) = expected else { return assert!(!readable(&*channel)) };
        // Packets take a moment.
        wait_for("the event", || readable(&*channel));
        let fetched = channel.next_event().expect("it is readable");
        assert!(Arc::ptr_eq(&fetched, cq));
        fetched.acknowledge(1);
    };
    exchange(0);
    for cq in [&sent, &received] {
        // Unsolicited: a send completion always is.
        cq.arm(true);
        has_event(None);
        cq.arm(false);
        has_event(Some(cq));
        // One event for one completion: perftest arms before it polls.
        has_event(None);
        cq.arm(false);
        has_event(None);
    }
    // A second completion each, while the first ones wait.
    exchange(0);
    let mut fetched = [(); 2].map(|()| {
        wait_for("the event", || readable(&*channel));
        channel.next_event().expect("it is readable")
    });
    fetched.sort_by_key(|cq| Arc::ptr_eq(cq, &received));
    assert!(Arc::ptr_eq(&fetched[0], &sent) && Arc::ptr_eq(&fetched[1], &received));
    fetched.iter().for_each(|cq| cq.acknowledge(1));
    for cq in [&sent, &received] {
        (0..2).for_each(|_| assert_eq!(next(cq).status, WC_SUCCESS));
        cq.arm(false);
        has_event(None);
    }
    exchange(SEND_SOLICITED);
    let mut fetched = [(); 2].map(|()| channel.next_event().expect("it waits"));
    fetched.sort_by_key(|cq| Arc::ptr_eq(cq, &received));
    assert!(Arc::ptr_eq(&fetched[0], &sent) && Arc::ptr_eq(&fetched[1], &received));
    fetched.iter().for_each(|cq| cq.acknowledge(1));
    received.arm(true);
    has_event(None);
    (0..2).for_each(|i| assert_eq!(next([&sent, &received][i]).status, WC_SUCCESS));
    has_event(None);
    exchange(SEND_SOLICITED);
    has_event(Some(&received));
    exchange(SEND_SOLICITED);
    received.arm(true);
    has_event(Some(&received));
    (0..4).for_each(|i| assert_eq!(next([&sent, &received][i % 2]).status, WC_SUCCESS));
    // An error is solicited.
    qp.post_recv(2, &[]).expect("room");
    qp.modify(&attributes(&QpConfig::default(), QpState::Err, 0), attr::STATE).expect("to ERR");
    received.arm(true);
    has_event(Some(&received));
    assert_eq!(next(&received).status, WC_WR_FLUSH_ERR);
}

/// The loop of a program that arms the queue, then polls one completion: none is left behind, and there is no event without
/// a completion (perftest's `ib_send_lat -e` posts beyond its queue's depth otherwise).
#[test]
fn one_poll_for_each_event_finds_every_completion_once() {
    let adapter = Adapter::open();
    let channel = Channel::new(&adapter.context).expect("a channel");
    let cq = Cq::new(&adapter.context, 64, Some(channel.clone())).expect("a queue");
    let qp = adapter.qp(&cq).expect("a queue pair");
    connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
    cq.arm(false);
    for turn in 0..30 {
        // The first raises an event. Arming finds the others.
        let completions = 1 + turn % 3;
        for _ in 0..completions {
            qp.post_send(&SendWr { opcode: WR_RDMA_WRITE, ..SendWr::default() }).expect("room");
        }
        for nth in 0..completions {
            wait_for("the event", || readable(&*channel));
            channel.next_event().expect("it is readable").acknowledge(1);
            cq.arm(false);
            let polled = cq.poll(&mut [Wc::default()]);
            assert_eq!(
                polled,
                Ok(1),
                "turn {turn}: an event without a completion, or completion {nth} is missing"
            );
        }
        assert!(!readable(&*channel), "turn {turn}: an event without a completion");
    }
}

/// Completions that wait when the queue is armed start the moderation period.
#[test]
fn arming_a_moderated_queue_that_holds_completions_raises_an_event_later() {
    let adapter = Adapter::open();
    let channel = Channel::new(&adapter.context).expect("a channel");
    let cq = Cq::new(&adapter.context, 8, Some(channel.clone())).expect("a queue");
    let qp = adapter.qp(&cq).expect("a queue pair");
    connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
    qp.post_send(&SendWr { opcode: WR_RDMA_WRITE, ..SendWr::default() }).expect("room");
    cq.moderate(4, Duration::from_millis(1));
    cq.arm(false);
    wait_for("the event", || readable(&*channel));
}

#[test]
fn a_destroyed_completion_queue_leaves_no_signal_behind() {
    let adapter = Adapter::open();
    let channel = Channel::new(&adapter.context).expect("a channel");
    let [gone, stays] =
        [(); 2].map(|()| Cq::new(&adapter.context, 8, Some(channel.clone())).expect("a queue"));
    let nothing = SendWr { opcode: WR_RDMA_WRITE, ..SendWr::default() };
    let complete = |cq: &Arc<Cq>| {
        let qp = adapter.qp(cq).expect("a queue pair");
        connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
        cq.arm(false);
        qp.post_send(&nothing).expect("room");
        qp.destroy();
    };
    complete(&gone);
    assert!(readable(&*channel));
    gone.destroy().expect("unused");
    assert!(!readable(&*channel));
    complete(&stays);
    assert!(readable(&*channel));
    let fetched = channel.next_event().expect("it waits");
    assert!(Arc::ptr_eq(&fetched, &stays));
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| stays.destroy());
        std::thread::sleep(A_WHILE);
        assert!(!ending.is_finished(), "the event is still held");
        fetched.acknowledge(1);
        assert_eq!(ending.join().expect("no panic"), Ok(()));
    });
}

#[test]
fn a_busy_queue_does_not_delay_the_events_of_others() {
    let adapter = Adapter::open();
    let channel = Channel::new(&adapter.context).expect("a channel");
    let ends = [(); 3].map(|()| {
        let cq = Cq::new(&adapter.context, 8, Some(channel.clone())).expect("a queue");
        let qp = adapter.qp(&cq).expect("a queue pair");
        connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
        (cq, qp)
    });
    let raise = |at: usize| {
        ends[at].0.arm(false);
        ends[at].1.post_send(&SendWr { opcode: WR_RDMA_WRITE, ..SendWr::default() }).expect("room");
    };
    let fetched = || {
        let cq = channel.next_event().expect("an event");
        cq.acknowledge(1);
        assert_eq!(cq.poll(&mut [Wc::default()]), Ok(1));
        ends.iter().position(|(other, _)| Arc::ptr_eq(other, &cq)).expect("one of them")
    };
    (0..3).for_each(raise);
    let mut order = Vec::new();
    for _ in 0..6 {
        order.push(fetched());
        raise(order[order.len() - 1]);
    }
    assert_eq!(order, [0, 1, 2, 0, 1, 2]);
    for (cq, qp) in &ends {
        qp.destroy();
        cq.destroy().expect("unused");
    }
}
