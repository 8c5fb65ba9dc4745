//! A stopped process delays nobody who works with other processes.

use std::time::{Duration, Instant};

use millstream_device::types::{
    WC_OP_ATOMIC_WRITE, WC_OP_FETCH_ADD, WC_OP_RDMA_READ, WC_OP_RDMA_WRITE, WC_OP_RECV, WC_REM_ACCESS_ERR,
    WC_SUCCESS, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_RDMA_READ,
};

use crate::support::{
    Command, Completion, CqKind, End, Kind, Placement, QpConfig, connect_queue_pair, pair, pattern, request,
    runs_with_moved_pages, statuses,
};

/// Far below the two seconds for which a stopped process used to be waited for.
const SOON: Duration = Duration::from_millis(1500);

/// A SEND whose receiver waits for an event, before this process knows how to signal the receiver.
#[test]
fn a_stopped_receiver_delays_no_send() {
    let (mut near, mut stopped) = pair(Placement::OtherProcess, &QpConfig::default());
    let source = near.hold(&pattern(1, 64));
    let target = stopped.register(Kind::Anonymous, 64, 0);
    stopped.recv(1, &[target.all()]);
    stopped.arm(CqKind::Recv, false);
    stopped.process().stop();
    let start = Instant::now();
    near.send(1, &[source.all()]);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    stopped.process().signal(libc::SIGCONT);
    assert!(stopped.event(CqKind::Recv, Duration::from_secs(20)), "its own device signals it");
    assert_eq!(stopped.received(1), [Completion::ok(1, WC_OP_RECV, 64)]);
}

/// A WRITE to memory that this process has not mapped yet goes through the kernel.
#[test]
fn a_stopped_owner_delays_no_write() {
    let (mut near, mut stopped) = pair(Placement::OtherProcess, &QpConfig::default());
    let source = near.hold(&pattern(2, 5000));
    let target = stopped.register(Kind::Anonymous, 5000, 0);
    stopped.process().stop();
    let start = Instant::now();
    near.write(1, &[source.all()], (target.addr, target.key));
    assert_eq!(near.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    stopped.process().signal(libc::SIGCONT);
    assert_eq!(stopped.load(&target, 0, 5000), pattern(2, 5000));
}

/// Other processes may have mapped the memory and use the processor's atomic operations, which copies would overwrite.
#[test]
fn an_atomic_operation_on_memory_of_a_stopped_owner_waits_until_it_is_mapped() {
    // Without an ACK timer, the requests wait for ever.
    let config = QpConfig { timeout: 0, ..QpConfig::default() };
    let (mut near, mut stopped) = pair(Placement::OtherProcess, &config);
    let local = near.hold(&pattern(1, 16));
    let target = stopped.register(Kind::Dmabuf, 16, 0);
    stopped.store(&target, 0, &[5u64.to_ne_bytes(), [0; 8]].concat());
    stopped.process().stop();
    let mut add = request(1, WR_ATOMIC_FETCH_AND_ADD, &[local.part(0, 8)], (target.addr, target.key));
    add.compare_add = 3;
    let set = request(2, WR_ATOMIC_WRITE, &[local.part(8, 8)], (target.addr + 8, target.key));
    near.post(add);
    near.post(set);
    let early = near.poll(CqKind::Send, 1, Duration::from_millis(300));
    assert!(early.is_empty(), "{early:?}");
    stopped.process().signal(libc::SIGCONT);
    let expected = [Completion::ok(1, WC_OP_FETCH_ADD, 8), Completion::ok(2, WC_OP_ATOMIC_WRITE, 0)];
    assert_eq!(near.sent(2), expected);
    assert_eq!(near.load(&local, 0, 8), 5u64.to_ne_bytes());
    let after = [&8u64.to_ne_bytes()[..], &pattern(1, 16)[8..]].concat();
    assert_eq!(stopped.load(&target, 0, 16), after);
}

/// A connection to a stopped process is made when it continues; connections to others are made at once.
#[test]
fn a_stopped_process_delays_no_connection_to_another() {
    let config = QpConfig::default();
    let (mut stopped, mut live) = (End::new(Placement::OtherProcess), End::new(Placement::OtherProcess));
    let (number, live_number) = (stopped.open(&config), live.open(&config));
    stopped.process().stop();
    let (mut to_stopped, mut near) = (End::new(Placement::SameProcess), End::new(Placement::SameProcess));
    let (own, near_number) = (to_stopped.open(&config), near.open(&config));
    std::thread::scope(|scope| {
        let (qp, config) = (to_stopped.actor().qp().clone(), &config);
        scope.spawn(move || connect_queue_pair(&qp, number, config));
        // The other thread waits for the stopped process meanwhile.
        std::thread::sleep(Duration::from_millis(20));
        let start = Instant::now();
        near.connect_to(live_number, config);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        live.connect_to(near_number, config);
        let (source, target) = (near.hold(&pattern(3, 100)), live.register(Kind::Anonymous, 100, 0));
        near.write(1, &[source.all()], (target.addr, target.key));
        assert_eq!(near.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    });
    stopped.process().signal(libc::SIGCONT);
    stopped.connect_to(own, &config);
    let (source, target) = (to_stopped.hold(&pattern(4, 100)), stopped.register(Kind::Anonymous, 100, 0));
    to_stopped.write(2, &[source.all()], (target.addr, target.key));
    assert_eq!(to_stopped.sent(1), [Completion::ok(2, WC_OP_RDMA_WRITE, 0)]);
    assert_eq!(stopped.load(&target, 0, 100), pattern(4, 100));
}

/// The owner waits for the end of a READ whose initiator is stopped, and then takes its pages back: the rest of the READ finds zeros.
#[test]
fn a_read_that_outlasts_the_deregistration_fails() {
    if runs_with_moved_pages("stopped_peers::a_read_that_outlasts_the_deregistration_fails") {
        return;
    }
    const LEN: usize = 64 << 20;
    // As long as an owner waits for a stopped process, less the time in which the loads end.
    const IN_VAIN: Duration = Duration::from_millis(1900);
    for attempt in 0..50 {
        let (mut owner, mut stopped) = pair(Placement::OtherProcess, &QpConfig::default());
        let (source, target) = (owner.hold(&vec![7; LEN]), stopped.register(Kind::Anonymous, LEN, 0));
        let read = |id| request(id, WR_RDMA_READ, &[target.all()], (source.addr, source.key));
        stopped.post(read(1));
        assert_eq!(stopped.sent(1), [Completion::ok(1, WC_OP_RDMA_READ, LEN)]);
        stopped.begin(&Command::Send(read(2)));
        std::thread::sleep(Duration::from_millis(attempt % 10));
        stopped.process().stop();
        let start = Instant::now();
        owner.deregister(&source);
        let waited = start.elapsed();
        stopped.process().signal(libc::SIGCONT);
        stopped.answer();
        let ended = stopped.sent(1);
        if ended[0].status == WC_SUCCESS {
            // Stopped before it began to read, or after it had read all.
            assert_eq!(stopped.load(&target, 0, LEN), vec![7; LEN]);
        } else {
            assert_eq!(statuses(&ended), [(2, WC_REM_ACCESS_ERR)]);
            if waited > IN_VAIN {
                return;
            }
        }
    }
    panic!("no READ was stopped in its middle");
}
