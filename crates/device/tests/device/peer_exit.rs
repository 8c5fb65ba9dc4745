//! Processes that are killed, stopped or forked: the survivors' requests complete in error.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::time::{Duration, Instant};

use millstream_device::Cq;
use millstream_device::qp::state::QpState;
use millstream_device::qp::{QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    WC_OP_RDMA_WRITE, WC_OP_RECV, WC_RETRY_EXC_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_RDMA_READ, WR_RDMA_WRITE,
    WR_SEND,
};
use millstream_quantity::Rkey;

use crate::support::{
    Adapter, Command, Completion, CqKind, End, Kind, Placement, Process, QpConfig, Reply, TEST_TIMEOUT,
    connect, connect_queue_pair, element, next, pair, pattern, peek, request, run_role, serve, statuses,
    wait_for,
};

/// Checks that the requests to an exited peer complete in order: the first with the error, the others
/// flushed.
fn expect_errors_in_order(a: &mut End, first: u64, count: usize) {
    let expected: Vec<_> = (0..count as u64)
        .map(|i| (first + i, if i == 0 { WC_RETRY_EXC_ERR } else { WC_WR_FLUSH_ERR }))
        .collect();
    assert_eq!(statuses(&a.sent(count)), expected);
    assert_eq!(a.state(), QpState::Err);
}

#[test]
fn pending_requests_fail_when_the_peer_is_killed() {
    // ACK timers of minutes.
    let config = QpConfig { timeout: 24, ..QpConfig::default() };
    let (mut a, mut b) = pair(Placement::OtherProcess, &config);
    let source = a.hold(&pattern(1, 64));
    a.recv(10, &[source.all()]);
    a.recv(11, &[source.all()]);
    (0..5).for_each(|wr_id| a.send(wr_id, &[source.all()]));
    // The sender sleeps: only the device's threads can notice the exit.
    a.arm(CqKind::Send, false);
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    b.process().kill();
    assert!(a.event(CqKind::Send, TEST_TIMEOUT));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    expect_errors_in_order(&mut a, 0, 5);
    assert_eq!(statuses(&a.received(2)), [(10, WC_WR_FLUSH_ERR), (11, WC_WR_FLUSH_ERR)]);
    // Requests posted afterwards are flushed, too.
    a.send(5, &[source.all()]);
    a.recv(12, &[source.all()]);
    assert_eq!(statuses(&a.sent(1)), [(5, WC_WR_FLUSH_ERR)]);
    assert_eq!(statuses(&a.received(1)), [(12, WC_WR_FLUSH_ERR)]);
}

#[test]
fn pending_requests_fail_when_the_peer_executes_another_program() {
    // ACK timers of minutes.
    let config = QpConfig { timeout: 24, ..QpConfig::default() };
    let (mut a, mut b) = pair(Placement::OtherProcess, &config);
    let source = a.hold(&pattern(1, 64));
    a.recv(10, &[source.all()]);
    (0..3).for_each(|wr_id| a.send(wr_id, &[source.all()]));
    a.arm(CqKind::Send, false);
    b.begin(&Command::Exec);
    assert!(a.event(CqKind::Send, TEST_TIMEOUT));
    expect_errors_in_order(&mut a, 0, 3);
    assert_eq!(statuses(&a.received(1)), [(10, WC_WR_FLUSH_ERR)]);
    // The process runs on.
    b.process().wait_for_program("sleep");
}

#[test]
fn a_peer_that_exits_or_disconnects_fails_the_stream() {
    for (killed, opcode) in
        [(true, WR_RDMA_WRITE), (true, WR_RDMA_READ), (true, WR_SEND), (false, WR_RDMA_WRITE)]
    {
        for (kind, len) in [(Kind::Anonymous, 1 << 16), (Kind::Data, 3000)] {
            let config = QpConfig { send_wr: 8, send_cqe: 8, timeout: 24, ..QpConfig::default() };
            let (mut a, mut b) = pair(Placement::OtherProcess, &config);
            let source = a.register(Kind::Anonymous, len, 0);
            let target = b.register(kind, len, 0);
            let stream = request(7, opcode, &[source.all()], (target.addr, target.key));
            (0..100).for_each(|wr_id| b.recv(wr_id, &[target.all()]));
            let process = b.process();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(5));
                    if killed {
                        process.kill();
                    } else {
                        // The process exits without a message to its peers.
                        assert!(process.finish().success());
                    }
                });
                let Ok(Reply::Completions(last)) = a.attempt(Command::Hammer(stream.clone())) else {
                    panic!("no completion")
                };
                assert_eq!(statuses(&last), [(7, WC_RETRY_EXC_ERR)]);
            });
            a.post(stream);
            assert_eq!(a.sent(1)[0].status, WC_WR_FLUSH_ERR);
        }
    }
}

#[test]
fn a_lock_of_a_killed_producer_does_not_block_others() {
    let adapter = Adapter::open();
    let cq = Cq::new(&adapter.context, 8192, None).expect("a queue");
    let config = QpConfig::default();
    let mut survivor = End::new(Placement::OtherProcess);
    let from_survivor = adapter.qp_sized(&cq, 64, QpType::Rc, RecvSource::Own).expect("a queue pair");
    connect_queue_pair(&from_survivor, survivor.open(&config), &config);
    survivor.connect_to(from_survivor.qpn().get(), &config);
    for round in 0..10u64 {
        // Another peer completes into the same queue all the time, until it exits.
        let mut dying = End::new(Placement::OtherProcess);
        let from_dying = adapter.qp_sized(&cq, 4096, QpType::Rc, RecvSource::Own).expect("a queue pair");
        connect_queue_pair(&from_dying, dying.open(&config), &config);
        dying.connect_to(from_dying.qpn().get(), &config);
        (0..4096).for_each(|wr_id| from_dying.post_recv(wr_id, &[]).expect("room"));
        dying.begin(&Command::Hammer(request(1, WR_SEND, &[], (0, 0))));
        assert_eq!(next(&cq).wr_id, 0);
        std::thread::sleep(Duration::from_micros(round * 100));
        dying.process().kill();

        from_survivor.post_recv(9999, &[]).expect("room");
        survivor.send(1, &[]);
        assert_eq!(survivor.sent(1)[0].status, WC_SUCCESS);
        let mut came = 1;
        loop {
            let wc = next(&cq);
            if wc.wr_id == 9999 {
                break;
            }
            assert_eq!(wc.wr_id, came, "in order, without gaps");
            came += 1;
        }
        from_dying.destroy();
    }
}

#[test]
fn a_child_does_not_keep_its_dead_parent_alive() {
    let config = QpConfig { timeout: 24, ..QpConfig::default() };
    let (mut a, mut b) = pair(Placement::OtherProcess, &config);
    let number = b.number();
    let source = a.hold(&[1; 64]);
    a.send(0, &[source.all()]);
    // The child holds all descriptors of the exited process, including the ends of our connections.
    let Ok(Reply::Number(child)) = b.attempt(Command::ForkSleeper) else { panic!("no child") };
    b.process().kill();
    let start = Instant::now();
    expect_errors_in_order(&mut a, 0, 1);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // Its socket still exists but has no reader. That is detected at once, too.
    let mut late = End::new(Placement::SameProcess);
    let short = QpConfig { timeout: 8, retry_cnt: 1, ..QpConfig::default() };
    late.open(&short);
    let start = Instant::now();
    late.connect_to(number, &short);
    late.send(1, &[source.all()]);
    assert_eq!(late.sent(1)[0].status, WC_RETRY_EXC_ERR);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    // SAFETY: the child that was started for this.
    unsafe { libc::kill(child as i32, libc::SIGKILL) };
}

#[test]
fn a_forked_child_has_a_device_of_its_own() {
    run_role("fork_tree");
}

/// In another process: parent and child both use the device.
pub(crate) fn fork_tree() {
    let adapter = Adapter::open();
    let config = QpConfig::default();
    let mut inherited = vec![1u8; 3 << 20];
    let _registered = adapter.register(&mut inherited);
    let cq = adapter.cq();
    let parent = adapter.qp(&cq).expect("a queue pair");
    let (mut from_child, to_parent) = std::io::pipe().expect("a pipe");
    let (from_parent, mut to_child) = std::io::pipe().expect("a pipe");
    // SAFETY: the child uses only what the C library and the device keep usable after a fork, and leaves by
    // _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            be_a_child(parent.qpn().get(), &inherited, from_parent, to_parent);
        }));
        // SAFETY: ends the child without its parent's destructors.
        unsafe { libc::_exit(i32::from(good.is_err())) };
    }
    drop(to_parent);
    inherited.fill(2);
    let mut message = [0u8; 16];
    from_child.read_exact(&mut message).expect("the child says where it is");
    let (addr, rest) = message.split_first_chunk::<8>().expect("sixteen bytes");
    let (key, number) = rest.split_first_chunk::<4>().expect("eight bytes");
    let number = u32::from_ne_bytes(number.try_into().expect("four bytes"));
    assert_ne!(number >> 12, parent.qpn().get() >> 12, "a device of its own");
    connect_queue_pair(&parent, number, &config);
    let mut data = pattern(1, 10_000);
    let source = adapter.register(&mut data);
    let sges = [element(&data, &source)];
    let write = SendWr {
        opcode: WR_RDMA_WRITE,
        sges: &sges,
        remote_addr: u64::from_ne_bytes(*addr),
        rkey: Rkey::new(u32::from_ne_bytes(*key)),
        ..SendWr::default()
    };
    parent.post_send(&write).expect("room");
    assert_eq!(next(&cq).status, WC_SUCCESS);
    to_child.write_all(b"!").expect("the child listens");
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's findings are above");
}

fn be_a_child(parent: u32, inherited: &[u8], mut from_parent: PipeReader, mut to_parent: PipeWriter) {
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = adapter.qp(&cq).expect("a queue pair");
    let mut memory = vec![0u8; 10_000];
    let target = adapter.register(&mut memory);
    connect_queue_pair(&qp, parent, &QpConfig::default());
    let mut message = (memory.as_ptr() as u64).to_ne_bytes().to_vec();
    message.extend(target.key().to_ne_bytes());
    message.extend(qp.qpn().get().to_ne_bytes());
    to_parent.write_all(&message).expect("the parent listens");
    from_parent.read_exact(&mut [0]).expect("the parent has written");
    assert_eq!(memory, pattern(1, 10_000));
    assert!((0..inherited.len()).all(|i| peek(inherited, i) == 1), "memory as it was at the fork");
}

#[test]
fn exited_peers_are_removed() {
    let mut a = End::new(Placement::OtherProcess);
    let arenas = |a: &mut End| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", a.process().id())).expect("our child");
        maps.matches("/memfd:millstream-arena").count()
    };
    let config = QpConfig::default();
    for round in 0..6 {
        a.keep();
        let mut b = End::new(Placement::OtherProcess);
        connect(&mut a, &mut b, &config);
        assert!(arenas(&mut a) >= 2);
        b.process().kill();
        a.destroy();
        wait_for("the dead process's arena to go", || arenas(&mut a) <= 1);
        assert!(round < 6);
    }
}

#[test]
fn messages_to_a_stopped_peer_arrive_when_it_continues() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let source = a.hold(&pattern(1, 1 << 16));
    let [first, second] = [(); 2].map(|()| b.register(Kind::Anonymous, 1 << 16, 0));
    b.process().stop();
    // The memory of a stopped process cannot be mapped. It is accessed through the kernel.
    a.write(1, &[source.all()], (first.addr, first.key));
    assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    b.process().signal(libc::SIGCONT);
    // The late answer must not be taken for the answer to the next request.
    a.write(2, &[source.part(0, 1000)], (second.addr, second.key));
    assert_eq!(a.sent(1), [Completion::ok(2, WC_OP_RDMA_WRITE, 0)]);
    assert!(b.load(&first, 0, 1 << 16) == pattern(1, 1 << 16), "what was written while it was stopped");
    assert!(b.load(&second, 0, 1000) == pattern(1, 1000), "what was written afterwards");
}

#[test]
fn a_stopped_process_is_signalled_when_it_continues() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let (source, target) = (a.hold(&pattern(1, 64)), b.register(Kind::Anonymous, 64, 0));
    b.recv(1, &[target.all()]);
    b.arm(CqKind::Recv, false);
    b.process().stop();
    // The channel was never signalled: the sender would have to request its descriptor.
    a.send(2, &[source.all()]);
    assert_eq!(a.sent(1)[0].status, WC_SUCCESS);
    b.process().signal(libc::SIGCONT);
    assert!(b.event(CqKind::Recv, TEST_TIMEOUT), "the wake-up is lost");
    assert_eq!(b.received(1), [Completion::ok(1, WC_OP_RECV, 64)]);
}

/// A process lives on after its main thread has called `pthread_exit`. Its files in `/proc` are empty then, and the kernel finds
/// its memory by other threads only.
#[test]
fn a_peer_whose_main_thread_has_ended_is_as_any_other() {
    for moves in ["0", "register"] {
        let process =
            Process::start_with("without_main_thread", |command| command.env("MILLSTREAM_MOVE", moves));
        let (mut a, mut b) = (End::new(Placement::SameProcess), End::OtherProcess(Box::new(process)));
        let config = QpConfig::default();
        connect(&mut a, &mut b, &config);
        let [data, back] = [pattern(1, 10_000), pattern(2, 10_000)];
        let source = a.hold(&data);
        let (target, own) = (b.register(Kind::Anonymous, 10_000, 8), b.hold(&back));
        a.write(1, &[source.all()], (target.addr, target.key));
        assert_eq!(statuses(&a.sent(1)), [(1, WC_SUCCESS)], "MILLSTREAM_MOVE={moves}");
        assert!(b.load(&target, 0, 10_000) == data);
        a.read(2, &[source.all()], (own.addr, own.key));
        assert_eq!(statuses(&a.sent(1)), [(2, WC_SUCCESS)], "MILLSTREAM_MOVE={moves}");
        assert!(a.load(&source, 0, 10_000) == back);
        a.recv(3, &[source.all()]);
        b.send(4, &[target.all()]);
        assert_eq!(statuses(&b.sent(1)), [(4, WC_SUCCESS)]);
        assert_eq!(statuses(&a.received(1)), [(3, WC_SUCCESS)]);
        assert!(a.load(&source, 0, 10_000) == data);
    }
}

/// Another process, without its main thread, executes the parent's commands.
pub(crate) fn serve_without_main_thread() {
    extern "C" fn end_thread(_signal: libc::c_int) {
        // SAFETY: ends this thread alone, as `pthread_exit` does.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    std::thread::spawn(|| {
        wait_for("the end of the main thread", || {
            std::fs::read("/proc/self/maps").is_ok_and(|text| text.is_empty())
        });
        serve();
        std::process::exit(0);
    });
    // SAFETY: the main thread is that of the test harness, which waits for this one.
    unsafe {
        libc::signal(libc::SIGUSR1, end_thread as *const () as libc::sighandler_t);
        libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), libc::SIGUSR1);
    }
    loop {
        std::thread::park();
    }
}
