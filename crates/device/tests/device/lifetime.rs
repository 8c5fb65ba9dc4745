//! Guarantees of the calls that destroy objects and deregister memory while peers use them.

use std::time::{Duration, Instant};

use millstream_device::qp::state::{QpState, attr};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    WC_LOC_PROT_ERR, WC_REM_ACCESS_ERR, WC_RETRY_EXC_ERR, WC_SUCCESS, WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND,
    Wc,
};
use millstream_device::{Errno, MAX_MR, MAX_QP, Mr};
use millstream_quantity::Rkey;

use crate::support::{
    Adapter, Command, End, Kind, POISON, Placement, QpConfig, Reply, TEST_TIMEOUT, attributes,
    connect_queue_pair, element, has_begun, next, pair, peek, poison, request, run_role, wait_for,
};

#[test]
fn concurrently_created_queue_pairs_are_independent() {
    run_role("concurrent_creation");
}

/// In another process: few queue pair numbers are left, and threads compete for them.
pub(crate) fn concurrent_creation() {
    const THREADS: u8 = 4;
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let room = MAX_QP - THREADS as usize - 1;
    let _occupied: Vec<_> = (0..room).map(|_| adapter.qp(&cq).expect("a number is left")).collect();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let adapter = &adapter;
            scope.spawn(move || {
                let cq = adapter.cq();
                let (mut from, mut to) = (vec![thread; 16], vec![0xff; 16]);
                let (source, target) = (adapter.register(&mut from), adapter.register(&mut to));
                for round in 0..500u64 {
                    let qp = adapter.qp(&cq).expect("a number is left");
                    connect_queue_pair(&qp, qp.qpn().get(), &QpConfig::default());
                    to.fill(0xff);
                    for i in 0..8 {
                        qp.post_recv(round * 8 + i, &[element(&to, &target)]).expect("room");
                    }
                    let sges = [element(&from, &source)];
                    qp.post_send(&SendWr { opcode: WR_SEND, sges: &sges, ..SendWr::default() })
                        .expect("room");
                    let (sent, received) = (next(&cq), next(&cq));
                    assert_eq!((sent.status, received.status), (WC_SUCCESS, WC_SUCCESS));
                    assert_eq!(received.wr_id, round * 8);
                    assert!((0..16).all(|i| peek(&to, i) == thread), "somebody else's memory");
                    qp.destroy();
                }
            });
        }
    });
    let rest: Vec<_> = (0..THREADS + 1).map(|_| adapter.qp(&cq).expect("a number is left")).collect();
    assert_eq!(adapter.qp(&cq).err(), Some(Errno::NOMEM), "all numbers are taken");
    rest.iter().for_each(|qp| qp.destroy());
    assert!(adapter.qp(&cq).is_ok());
}

#[test]
fn a_full_key_table_refuses_and_keys_do_not_come_back() {
    run_role("key_table");
}

/// In another process: the table of memory keys is full.
pub(crate) fn key_table() {
    let adapter = Adapter::open();
    let mut memory = vec![0u8; 64];
    let start = memory.as_mut_ptr() as u64;
    let register = || Mr::register(&adapter.pd, start, 64, start, 7);
    let mut all: Vec<Mr> = (0..MAX_MR).map(|_| register().expect("a place is left")).collect();
    assert_eq!(register().err(), Some(Errno::NOMEM));
    let former = all.pop().expect("many").key();
    // Dropping a region deregisters it, and a second deregistration does nothing.
    let mut twice = all.pop().expect("many");
    assert_eq!((twice.deregister(), twice.deregister()), (Ok(()), Ok(())));
    drop(twice);
    let again = [register().expect("a place is left"), register().expect("a place is left")];
    assert!(again.iter().all(|mr| mr.key() != former));
    assert_ne!(again[0].key() >> 16, again[1].key() >> 16, "two regions in one place");
    assert_eq!(register().err(), Some(Errno::NOMEM));
}

#[test]
fn a_reused_qpn_has_no_former_state() {
    run_role("qpn_reuse");
}

/// In another process: a queue pair number is reused.
pub(crate) fn qpn_reuse() {
    const LEN: usize = 96 << 20;
    let config = QpConfig::default();
    let adapter = Adapter::open();
    let (cq, sender_cq) = (adapter.cq(), adapter.cq());
    let former = adapter.qp(&cq).expect("a queue pair");
    let number = former.qpn();
    let sender = adapter.qp(&sender_cq).expect("a queue pair");
    connect_queue_pair(&sender, number.get(), &config);
    connect_queue_pair(&former, sender.qpn().get(), &config);
    // Its sender has cached it, and one of its completions is not polled.
    former.post_recv(77, &[]).expect("room");
    sender.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    assert_eq!(next(&sender_cq).status, WC_SUCCESS);
    former.destroy();
    let mut others = Vec::new();
    let reused = loop {
        let qp = adapter.qp(&cq).expect("at the latest when all others are taken");
        if qp.qpn() == number {
            break qp;
        }
        others.push(qp);
    };
    let peer = others.pop().expect("numbers rest as long as possible");
    connect_queue_pair(&reused, peer.qpn().get(), &config);
    connect_queue_pair(&peer, number.get(), &config);
    reused.post_recv(88, &[]).expect("room");
    assert_eq!(cq.poll(&mut [Wc::default()]), Ok(0), "the completion of a former life");

    // The former sender tries again during a long transfer of the new peer. The owner must not take that for
    // the transfer's end.
    let (mut from, mut to) = (vec![1u8; LEN], vec![2u8; LEN]);
    let (source, mut target) = (adapter.register(&mut from), adapter.register(&mut to));
    let (remote_addr, rkey) = (to.as_ptr() as u64, target.key());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sges = [element(&from, &source)];
            let wr = SendWr {
                opcode: WR_RDMA_WRITE,
                sges: &sges,
                remote_addr,
                rkey: Rkey::new(rkey),
                ..SendWr::default()
            };
            peer.post_send(&wr).expect("room");
        });
        while !has_begun(&to, 1) {}
        sender.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
        assert_eq!(target.deregister(), Ok(()));
        poison(&mut to);
    });
    assert!((0..LEN).all(|i| peek(&to, i) == POISON), "written after its deregistration");
    assert_eq!(next(&sender_cq).status, WC_RETRY_EXC_ERR);
    assert_eq!(next(&cq).status, WC_SUCCESS);
    assert_eq!(cq.poll(&mut [Wc::default()]), Ok(0), "the former sender's message");
}

#[test]
fn no_write_after_deregistration_or_destruction() {
    // Whole pages, which peers map, and a part of a page, which they access through the kernel.
    for (len, skew) in [(64 * 4096, 0), (2000, 100)] {
        for destroy in [false, true] {
            for round in 0..12u64 {
                let config = QpConfig { send_wr: 1, send_cqe: 1, ..QpConfig::default() };
                let (mut a, mut b) = pair(Placement::OtherProcess, &config);
                let source = b.hold(&vec![1; len]);
                let target = a.register(Kind::Anonymous, len, skew);
                let write = request(1, WR_RDMA_WRITE, &[source.all()], (target.addr, target.key));
                b.begin(&Command::Hammer(write));
                wait_for("the first write", || a.load(&target, len as isize - 1, 1) == [1]);
                std::thread::sleep(Duration::from_micros(round * 77));
                let start = Instant::now();
                if destroy {
                    a.destroy();
                } else {
                    a.deregister(&target);
                }
                let took = start.elapsed();
                // Poisons the end first: a copy still in flight writes there last.
                a.store(&target, len as isize - 8, &[POISON; 8]);
                a.store(&target, 0, &vec![POISON; len]);
                let Reply::Completions(last) = b.answer() else { panic!("no completions") };
                let expected = if destroy { WC_RETRY_EXC_ERR } else { WC_REM_ACCESS_ERR };
                assert_eq!(last[0].status, expected);
                assert_eq!(a.load(&target, 0, len), vec![POISON; len], "{len} bytes, round {round}");
                assert!(took < Duration::from_secs(1), "{took:?} for a transfer of {len} bytes");
            }
        }
    }
}

#[test]
fn no_read_response_is_stored_after_deregistration() {
    const LEN: usize = 48 << 20;
    let adapter = Adapter::open();
    let config = QpConfig::default();
    let mut to = vec![0u8; LEN];
    let mut far = End::new(Placement::OtherProcess);
    let source = far.register(Kind::Anonymous, LEN, 0);
    for _ in 0..3 {
        to.fill(1);
        let mut target = adapter.register(&mut to);
        let cq = adapter.cq();
        let near = adapter.qp(&cq).expect("a queue pair");
        connect_queue_pair(&near, far.open(&config), &config);
        far.modify(QpState::Init, &config);
        let sges = [element(&to, &target)];
        let (remote_addr, rkey) = (source.addr, source.key);
        let wr = SendWr {
            opcode: WR_RDMA_READ,
            sges: &sges,
            remote_addr,
            rkey: Rkey::new(rkey),
            ..SendWr::default()
        };
        near.post_send(&wr).expect("room");
        // The progress thread executes it once the peer is ready.
        far.attempt(Command::Connect(near.qpn().get(), config.clone())).expect("to RTR");
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !has_begun(&to, 0) {
            assert!(Instant::now() < deadline, "the READ does not begin");
        }
        target.deregister().expect("nobody is stopped");
        poison(&mut to);
        let done = next(&cq);
        assert!(matches!(done.status, WC_SUCCESS | WC_LOC_PROT_ERR), "{done:?}");
        assert!((0..LEN).all(|i| peek(&to, i) == POISON), "read into after its deregistration");
        far.destroy();
    }
}

#[test]
fn deregistration_does_not_wait_for_transfers_to_come() {
    let (mut a, mut b) =
        pair(Placement::OtherProcess, &QpConfig { send_wr: 1, send_cqe: 1, ..QpConfig::default() });
    let len = 1 << 20;
    let source = b.register(Kind::Anonymous, len, 0);
    let target = a.register(Kind::Anonymous, len, 0);
    b.begin(&Command::Hammer(request(1, WR_RDMA_WRITE, &[source.all()], (target.addr, target.key))));
    // Unrelated regions are registered and deregistered.
    let start = Instant::now();
    for _ in 0..50 {
        let other = a.register(Kind::Anonymous, 4096, 0);
        a.deregister(&other);
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    a.deregister(&target);
    assert!(matches!(b.answer(), Reply::Completions(_)));
}

#[test]
fn an_operation_of_an_exited_peer_does_not_delay_the_next_peer() {
    const LEN: usize = 96 << 20;
    let adapter = Adapter::open();
    let config = QpConfig::default();
    let cq = adapter.cq();
    let receiver = adapter.qp(&cq).expect("a queue pair");
    let mut memory = vec![1u8; LEN];
    let mut mr = adapter.register(&mut memory);
    let mut dying = End::new(Placement::OtherProcess);
    connect_queue_pair(&receiver, dying.open(&config), &config);
    dying.connect_to(receiver.qpn().get(), &config);
    let source = dying.register(Kind::Anonymous, LEN, 0);
    let to = (memory.as_ptr() as u64, mr.key());
    dying.begin(&Command::Send(request(1, WR_RDMA_WRITE, &[source.all()], to)));
    wait_for("the transfer", || has_begun(&memory, 0));
    dying.process().kill();

    let mut next = End::new(Placement::OtherProcess);
    let number = next.open(&config);
    receiver.modify(&attributes(&config, QpState::Reset, 0), attr::STATE).expect("to RESET");
    connect_queue_pair(&receiver, number, &config);
    assert_eq!(mr.deregister(), Ok(()));
}
