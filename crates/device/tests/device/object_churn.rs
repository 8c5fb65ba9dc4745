//! Creation and destruction of objects: thousands of connections, concurrent threads on one context, and
//! forks meanwhile. Afterwards the process has exactly the resources that it had before.
//!
//! `make soak` runs the long forms; `MILLSTREAM_CYCLES` sets the number of cycles.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_device::qp::{QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{WC_SUCCESS, WR_RDMA_WRITE, WR_SEND, Wc};
use millstream_device::{Channel, Context, Cq, Srq};
use millstream_quantity::Rkey;
use millstream_shm::poll_readable;

use crate::support::{
    Adapter, CqKind, End, Kind, Placement, QpConfig, Random, TEST_TIMEOUT, Usage, connect,
    connect_queue_pair, element, from_environment, next, run_role, wait_for,
};

#[test]
fn connections_come_and_go() {
    come_and_go(from_environment("MILLSTREAM_CYCLES", 200));
}

#[test]
#[ignore = "takes a minute: make soak"]
fn ten_thousand_connections_come_and_go() {
    come_and_go(from_environment("MILLSTREAM_CYCLES", 10_000));
}

/// Connects and disconnects two processes, and sometimes replaces one of them.
fn come_and_go(cycles: u64) {
    let config = QpConfig::default();
    let [mut a, mut b] = [(); 2].map(|()| End::new(Placement::OtherProcess));
    let source = a.register(Kind::Anonymous, 1 << 16, 0);
    let mut target = b.register(Kind::Anonymous, 1 << 16, 0);
    let a_id = a.process().id();
    let born = Usage::of(a_id);
    let mut early = 0;
    for cycle in 0..cycles {
        connect(&mut a, &mut b, &config);
        b.recv(1, &[target.part(0, 64)]);
        a.send(2, &[source.part(0, 64)]);
        a.write(3, &[source.all()], (target.addr, target.key));
        assert!(a.sent(2).iter().all(|sent| sent.status == WC_SUCCESS), "cycle {cycle}");
        assert_eq!(b.received(1)[0].status, WC_SUCCESS, "cycle {cycle}");
        // The two ends alternate as the first to disconnect.
        if cycle % 2 == 0 {
            a.destroy();
            b.destroy();
        } else {
            b.destroy();
            a.destroy();
        }
        if cycle % 50 == 49 {
            b = End::new(Placement::OtherProcess);
            target = b.register(Kind::Anonymous, 1 << 16, 0);
        }
        if cycle == cycles / 4 {
            early = Usage::of(a_id).resident_kib;
        }
    }
    drop(b);
    Usage::is_again(a_id, &born);
    let late = Usage::of(a_id).resident_kib;
    println!("{cycles} cycles: {early} KiB after a quarter of them, {late} KiB after all");
    // The queue pair table is touched up to its 1.25 MiB.
    assert!(late < early + (4 << 10), "{early} KiB after a quarter of the cycles, {late} KiB after all");
}

/// A receiver connects again and again, each time with a new completion channel.
#[test]
fn a_sender_keeps_few_completion_channels_of_a_peer() {
    let config = QpConfig::default();
    let [mut a, mut b] = [(); 2].map(|()| End::new(Placement::OtherProcess));
    let source = a.register(Kind::Anonymous, 64, 0);
    let target = b.register(Kind::Anonymous, 64, 0);
    let a_id = a.process().id();
    let descriptors = || Usage::of(a_id).descriptors.values().sum::<usize>();
    let mut first = 0;
    for cycle in 0..160 {
        connect(&mut a, &mut b, &config);
        b.recv(1, &[target.all()]);
        b.arm(CqKind::Recv, false);
        a.send(2, &[source.all()]);
        assert_eq!(a.sent(1)[0].status, WC_SUCCESS, "cycle {cycle}");
        assert!(b.event(CqKind::Recv, TEST_TIMEOUT), "cycle {cycle}");
        assert_eq!(b.received(1)[0].status, WC_SUCCESS, "cycle {cycle}");
        a.destroy();
        b.destroy();
        match cycle {
            0 => first = descriptors(),
            _ => assert!(descriptors() <= first + 64, "cycle {cycle}"),
        }
    }
}

#[test]
fn threads_and_forks_on_one_context() {
    run_role("churn");
}

#[test]
#[ignore = "takes a minute: make soak"]
fn threads_and_forks_on_one_context_for_long() {
    let mut process = crate::support::Process::start_with("churn", |command| {
        command.env("MILLSTREAM_BUSTLE", from_environment("MILLSTREAM_CYCLES", 10_000).to_string())
    });
    assert!(process.finish().success());
}

/// In another process: threads make, use and destroy all objects; others poll; one forks.
pub(crate) fn churn() {
    const MAKERS: u64 = 3;
    let cycles = from_environment("MILLSTREAM_BUSTLE", 300);
    let adapter = Adapter::open();
    let shared = Cq::new(&adapter.context, 4096, None).expect("a queue");
    let srq = Srq::new(&adapter.pd, 256, 1).expect("a shared queue");
    let over = AtomicBool::new(false);
    // One cycle first, so that lazily created resources exist.
    make_and_end(&adapter, &shared, &srq, &mut Random::new(0));
    let me = std::process::id();
    let born = Usage::of(me);
    std::thread::scope(|scope| {
        let makers: Vec<_> = (0..MAKERS)
            .map(|seed| {
                let (adapter, shared, srq) = (&adapter, &shared, &srq);
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    (0..cycles).for_each(|_| make_and_end(adapter, shared, srq, &mut random));
                })
            })
            .collect();
        // Polls completions of queue pairs that other threads destroy meanwhile.
        scope.spawn(|| {
            let mut out = [Wc::default(); 32];
            while !over.load(Ordering::Relaxed) {
                let n = shared.poll(&mut out).expect("no overflow");
                assert!(out[..n].iter().all(|wc| wc.status == WC_SUCCESS), "{:?}", &out[..n]);
                std::thread::yield_now();
            }
        });
        // Contexts are opened and dropped, too.
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                drop(Context::open().expect("the device opens"));
                std::thread::yield_now();
            }
        });
        scope.spawn(|| {
            // Each kind of fork at least twice.
            let mut turn = 0;
            while turn < 6 || !over.load(Ordering::Relaxed) {
                fork(turn);
                turn += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        // A failed thread stops all threads.
        let results: Vec<_> = makers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        over.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.expect("a maker failed"));
    });
    // Completions left in the queue belong to destroyed queue pairs.
    Usage::is_again(me, &born);
}

/// Makes, uses and destroys a queue pair with its own completion queue and channel, one on the shared queues,
/// and memory.
fn make_and_end(
    adapter: &Adapter,
    shared: &std::sync::Arc<Cq>,
    srq: &std::sync::Arc<Srq>,
    random: &mut Random,
) {
    let channel = Channel::new(&adapter.context).expect("a channel");
    let cq = Cq::new(&adapter.context, 64, Some(channel.clone())).expect("a queue");
    let own = adapter.qp(&cq).expect("a queue pair");
    let other = adapter.qp_with(shared, QpType::Rc, RecvSource::Shared(srq.clone())).expect("a queue pair");
    let config = QpConfig::default();
    connect_queue_pair(&own, other.qpn().get(), &config);
    connect_queue_pair(&other, own.qpn().get(), &config);
    let mut memory = vec![1u8; 4096 * (1 + random.below(4) as usize)];
    let mut mr = adapter.register(&mut memory);
    let sges = [element(&memory, &mr)];
    let write = SendWr {
        opcode: WR_RDMA_WRITE,
        sges: &sges,
        remote_addr: memory.as_ptr() as u64,
        rkey: Rkey::new(mr.key()),
        ..SendWr::default()
    };
    // One SEND to the shared queues, if there is a receive, and one back with an event.
    let _ = srq.post(1, &[]);
    cq.arm(false);
    own.post_recv(2, &[]).expect("room");
    other.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    assert_eq!(
        poll_readable(&[channel.as_fd()], Some(TEST_TIMEOUT)).expect("a descriptor"),
        [true],
        "no event"
    );
    channel.next_event().expect("it is readable");
    cq.acknowledge(1);
    assert_eq!(next(&cq).wr_id, 2);
    own.post_send(&write).expect("room");
    assert_eq!(next(&cq).status, WC_SUCCESS);
    if random.once_in(2) {
        own.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
        assert_eq!(next(&cq).status, WC_SUCCESS);
    }
    if random.once_in(2) {
        mr.deregister().expect("nobody is inside");
    }
    own.destroy();
    other.destroy();
    cq.destroy().expect("no queue pair is left");
}

/// Forks a child that exits at once, executes another program, or opens its own device.
fn fork(turn: u32) {
    // SAFETY: the child uses only what the C library and the device keep usable after a fork, and leaves by
    // _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no room for a child");
    if child == 0 {
        // SAFETY: plain system calls; the arguments are C strings that end with a null.
        unsafe {
            // Ends a child that hangs.
            libc::alarm(TEST_TIMEOUT.as_secs() as u32);
            match turn % 3 {
                0 => libc::_exit(0),
                1 => {
                    let arguments = [c"true".as_ptr(), std::ptr::null()];
                    libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr());
                    libc::_exit(1);
                }
                _ => {
                    let good = std::panic::catch_unwind(|| {
                        let adapter = Adapter::open();
                        let cq = adapter.cq();
                        let qp = adapter.qp(&cq).expect("a queue pair");
                        connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
                        qp.post_recv(1, &[]).expect("room");
                        qp.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
                        assert_eq!((next(&cq).status, next(&cq).status), (WC_SUCCESS, WC_SUCCESS));
                    });
                    libc::_exit(i32::from(good.is_err()));
                }
            }
        }
    }
    let mut status = 0;
    wait_for("the end of a child", || {
        // SAFETY: our own child; the status is a local.
        unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) == child }
    });
    assert_eq!(status, 0, "child of kind {}", turn % 3);
}
