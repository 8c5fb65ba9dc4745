//! Unreliable connections and datagrams: a message that cannot be delivered is dropped without an error.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpType, RecvSource};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{
    WC_FLAG_GRH, WC_FLAG_WITH_IMM, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_OP_RECV, WC_SUCCESS, WC_WR_FLUSH_ERR,
    WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND, WR_SEND_WITH_IMM,
};
use millstream_device::{Errno, Srq};
use millstream_quantity::{Qkey, Qpn, Rkey};

use crate::support::{
    Adapter, Process, QpConfig, TEST_TIMEOUT, Usage, attributes, element, event, is_empty, next, pattern,
};

const QKEY: u32 = 0x1234;
const CQ_ERR: u32 = 0;
const QP_FATAL: u32 = 1;

/// Modifies an unreliable queue pair from RESET to RTS.
pub(crate) fn ready(qp: &Qp, dest: u32) {
    let config = QpConfig::default();
    let ud = qp.kind() == QpType::Ud;
    for (state, needs) in [
        (QpState::Init, attr::PKEY_INDEX | attr::PORT | if ud { attr::QKEY } else { attr::ACCESS_FLAGS }),
        (QpState::Rtr, if ud { 0 } else { attr::AV | attr::PATH_MTU | attr::DEST_QPN | attr::RQ_PSN }),
        (QpState::Rts, attr::SQ_PSN),
    ] {
        let all = QpAttr { qkey: Qkey::new(QKEY), ..attributes(&config, state, dest) };
        qp.modify(&all, attr::STATE | needs).expect("the usual way");
    }
}

/// Two unreliably connected queue pairs.
fn connected(adapter: &Adapter) -> [(Arc<Qp>, Arc<millstream_device::Cq>); 2] {
    let [near, far] = [(); 2].map(|()| {
        let cq = adapter.cq();
        (adapter.qp_with(&cq, QpType::Uc, RecvSource::Own).expect("a queue pair"), cq)
    });
    ready(&near.0, far.0.qpn().get());
    ready(&far.0, near.0.qpn().get());
    [near, far]
}

#[test]
fn an_unreliable_connection_carries_messages_and_writes() {
    let adapter = Adapter::open();
    let [(near, sent), (far, received)] = connected(&adapter);
    let (mut from, mut to) = (pattern(1, 6000), vec![0; 6000]);
    let (source, target) = (adapter.register(&mut from), adapter.register(&mut to));
    let sges = [element(&from, &source)];
    far.post_recv(7, &[element(&to, &target)]).expect("room");
    near.post_send(&SendWr { opcode: WR_SEND, sges: &sges, ..SendWr::default() }).expect("room");
    assert_eq!((next(&sent).status, next(&received).byte_len), (WC_SUCCESS, 6000));
    assert_eq!(to, from);
    to.fill(0);
    let (remote_addr, rkey) = (to.as_ptr() as u64, target.key());
    let write = SendWr {
        opcode: WR_RDMA_WRITE,
        sges: &sges,
        remote_addr,
        rkey: Rkey::new(rkey),
        ..SendWr::default()
    };
    near.post_send(&write).expect("room");
    assert_eq!(next(&sent).status, WC_SUCCESS);
    assert_eq!(to, from);
    assert_eq!(near.post_send(&SendWr { opcode: WR_RDMA_READ, ..write }), Err(Errno::NOTSUP));
}

#[test]
fn undeliverable_unreliable_messages_are_dropped() {
    let adapter = Adapter::open();
    let [(near, sent), (far, received)] = connected(&adapter);
    let (mut from, mut to) = (vec![1u8; 64], vec![0u8; 64]);
    let (source, target) = (adapter.register(&mut from), adapter.register(&mut to));
    let sges = [element(&from, &source)];
    let send = SendWr { opcode: WR_SEND, sges: &sges, ..SendWr::default() };
    let (remote_addr, rkey) = (to.as_ptr() as u64, target.key());
    let write = SendWr {
        opcode: WR_RDMA_WRITE,
        sges: &sges,
        remote_addr,
        rkey: Rkey::new(rkey),
        ..SendWr::default()
    };
    let dropped = [
        ("no receive", send),
        ("wrong key", SendWr { rkey: Rkey::new(rkey ^ 1), ..write }),
        ("out of bounds", SendWr { remote_addr: remote_addr + 1, ..write }),
    ];
    for (what, wr) in dropped {
        near.post_send(&wr).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS, "{what}");
        assert_eq!((near.state(), far.state()), (QpState::Rts, QpState::Rts), "{what}");
        assert!(is_empty(&received), "{what}");
    }
    // Too long for the receive, which remains for the next message.
    far.post_recv(7, &[millstream_device::types::Sge { length: 63, ..element(&to, &target) }]).expect("room");
    near.post_send(&send).expect("room");
    assert_eq!(next(&sent).status, WC_SUCCESS);
    assert!(is_empty(&received));
    near.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    assert_eq!((next(&received).wr_id, next(&sent).status), (7, WC_SUCCESS));
    assert_eq!(event(&adapter.context, Duration::from_millis(30)), None);
    assert_eq!(to, [0; 64]);
    far.destroy();
    near.post_send(&send).expect("room");
    assert_eq!(next(&sent).status, WC_SUCCESS);
}

#[test]
fn a_lost_completion_is_fatal_although_only_the_send_queue_failed() {
    let adapter = Adapter::open();
    let small = millstream_device::Cq::new(&adapter.context, 2, None).expect("a queue");
    let near = adapter.qp_with(&small, QpType::Uc, RecvSource::Own).expect("a queue pair");
    let far = adapter.qp_with(&adapter.cq(), QpType::Uc, RecvSource::Own).expect("a queue pair");
    ready(&near, far.qpn().get());
    ready(&far, near.qpn().get());
    let mut from = vec![1u8; 64];
    let source = adapter.register(&mut from);
    let mut bad = element(&from, &source);
    bad.lkey ^= 1;
    (0..2).for_each(|_| near.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room"));
    near.post_send(&SendWr { opcode: WR_SEND, sges: &[bad], ..SendWr::default() }).expect("room");
    let mut events = [(); 2].map(|()| event(&adapter.context, TEST_TIMEOUT).expect("one each"));
    events.sort_unstable();
    assert_eq!(events, [CQ_ERR, QP_FATAL]);
    assert_eq!(near.state(), QpState::Err);
}

#[test]
fn the_senders_own_fault_stops_its_send_queue_only() {
    let adapter = Adapter::open();
    let [(near, sent), (far, received)] = connected(&adapter);
    let mut from = vec![1u8; 64];
    let source = adapter.register(&mut from);
    let mut bad = element(&from, &source);
    bad.lkey ^= 1;
    near.post_send(&SendWr { opcode: WR_SEND, sges: &[bad], ..SendWr::default() }).expect("room");
    assert_eq!((next(&sent).status, near.state()), (WC_LOC_PROT_ERR, QpState::Sqe));
    near.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    assert_eq!(next(&sent).status, WC_WR_FLUSH_ERR);
    // The queue pair still receives.
    near.post_recv(7, &[]).expect("room");
    far.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    assert_eq!((next(&sent).wr_id, next(&received).status), (7, WC_SUCCESS));
    near.modify(&attributes(&QpConfig::default(), QpState::Rts, 0), attr::STATE).expect("SQE to RTS");
    far.post_recv(8, &[]).expect("room");
    near.post_send(&SendWr { opcode: WR_SEND, ..SendWr::default() }).expect("room");
    assert_eq!((next(&sent).status, next(&received).wr_id), (WC_SUCCESS, 8));
}

fn to(qp: &Qp) -> Option<UdDestination> {
    Some(UdDestination { on_this_host: true, qpn: qp.qpn(), qkey: Qkey::new(QKEY), grh: [0x60; 40] })
}

#[test]
fn datagrams_arrive_with_their_header_from_many_senders() {
    let adapter = Adapter::open();
    let received = adapter.cq();
    let receiver = adapter.qp_with(&received, QpType::Ud, RecvSource::Own).expect("a queue pair");
    ready(&receiver, 0);
    let mut memory = vec![0u8; 200];
    let target = adapter.register(&mut memory);
    for i in 0..8u8 {
        let sent = adapter.cq();
        let sender = adapter.qp_with(&sent, QpType::Ud, RecvSource::Own).expect("a queue pair");
        ready(&sender, 0);
        let mut data = pattern(u64::from(i), 100);
        let source = adapter.register(&mut data);
        let sges = [element(&data, &source)];
        let imm = u32::from(i);
        let wr =
            SendWr { opcode: WR_SEND_WITH_IMM, imm, sges: &sges, to: to(&receiver), ..SendWr::default() };
        receiver.post_recv(u64::from(i), &[element(&memory, &target)]).expect("room");
        sender.post_send(&wr).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
        let wc = next(&received);
        assert_eq!((wc.wr_id, wc.opcode, wc.byte_len), (u64::from(i), WC_OP_RECV, 140));
        assert_eq!((wc.imm, wc.src_qp), (imm, sender.qpn().get()));
        assert_eq!(wc.wc_flags, WC_FLAG_GRH | WC_FLAG_WITH_IMM);
        assert_eq!(memory[..40], [0x60; 40]);
        assert_eq!(memory[40..140], data);
    }
}

#[test]
fn the_completion_of_a_datagram_says_what_kind_of_header_it_had() {
    let adapter = Adapter::open();
    let (sent, received) = (adapter.cq(), adapter.cq());
    let sender = adapter.qp_with(&sent, QpType::Ud, RecvSource::Own).expect("a queue pair");
    let receiver = adapter.qp_with(&received, QpType::Ud, RecvSource::Own).expect("a queue pair");
    ready(&sender, 0);
    ready(&receiver, 0);
    let mut memory = vec![0u8; 40];
    let target = adapter.register(&mut memory);
    let mut global = [0; 40];
    (global[0], global[6]) = (0x60, 0x1b);
    let mut ipv6 = global;
    ipv6[6] = 17;
    let mut ipv4 = [0; 40];
    ipv4[20] = 0x45;
    for (grh, kind) in [(global, 0), (ipv6, 9), (ipv4, 10)] {
        let to = to(&receiver).map(|to| UdDestination { grh, ..to });
        receiver.post_recv(1, &[element(&memory, &target)]).expect("room");
        sender.post_send(&SendWr { opcode: WR_SEND, to, ..SendWr::default() }).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
        let wc = next(&received);
        assert_eq!((wc.status, wc.sl, wc.src_qp), (WC_SUCCESS, kind, sender.qpn().get()));
    }
}

#[test]
fn datagrams_that_cannot_be_delivered_are_dropped() {
    let adapter = Adapter::open();
    let [(receiver, received), (sender, sent)] = [(); 2].map(|()| {
        let cq = adapter.cq();
        (adapter.qp_with(&cq, QpType::Ud, RecvSource::Own).expect("a queue pair"), cq)
    });
    ready(&sender, 0);
    let wr = SendWr { opcode: WR_SEND, to: to(&receiver), ..SendWr::default() };
    let nowhere = UdDestination { on_this_host: false, ..to(&receiver).expect("somewhere") };
    let wrong_key = UdDestination { qkey: Qkey::new(QKEY + 1), ..nowhere };
    let post = |wr: &SendWr<'_>, what: &str| {
        sender.post_send(wr).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS, "{what}");
        assert!(is_empty(&received), "{what}");
    };
    post(&wr, "not ready");
    ready(&receiver, 0);
    post(&wr, "no receive");
    receiver.post_recv(7, &[]).expect("room");
    post(&SendWr { to: Some(nowhere), ..wr }, "another host");
    post(&SendWr { to: Some(UdDestination { on_this_host: true, ..wrong_key }), ..wr }, "wrong key");
    assert_eq!(sender.post_send(&SendWr { to: None, ..wr }), Err(Errno::INVAL));
    // No room even for the header.
    sender.post_send(&wr).expect("room");
    assert_eq!((next(&sent).status, next(&received).status), (WC_SUCCESS, WC_LOC_LEN_ERR));
    assert_eq!(receiver.state(), QpState::Rts);
    receiver.destroy();
    post(&wr, "destroyed");
}

#[test]
fn a_sender_of_datagrams_keeps_nothing_of_receivers_that_have_exited() {
    // The processes do not share a port.
    let mut process = Process::start_with("datagram_sender", |command| command.env("MILLSTREAM_PATH", "shm"));
    assert!(process.finish().success());
}

/// In another process: sends to its children, which receive one datagram each and exit.
pub(crate) fn sends_to_processes_that_exit() {
    let adapter = Adapter::open();
    let sent = adapter.cq();
    let sender = adapter.qp_with(&sent, QpType::Ud, RecvSource::Own).expect("a queue pair");
    ready(&sender, 0);
    let me = std::process::id();
    let born = Usage::of(me);
    for _ in 0..40 {
        let (mut from_child, mut to_parent) = std::io::pipe().expect("a pipe");
        // SAFETY: the child uses only what the C library and the device keep usable after a fork, and leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let adapter = Adapter::open();
                let received = adapter.cq();
                let receiver = adapter.qp_with(&received, QpType::Ud, RecvSource::Own).expect("a queue pair");
                ready(&receiver, 0);
                let mut memory = vec![0u8; 100];
                let target = adapter.register(&mut memory);
                receiver.post_recv(1, &[element(&memory, &target)]).expect("room");
                to_parent.write_all(&receiver.qpn().get().to_ne_bytes()).expect("the parent listens");
                assert_eq!(next(&received).status, WC_SUCCESS);
            }));
            // SAFETY: ends the child without its parent's destructors.
            unsafe { libc::_exit(i32::from(good.is_err())) };
        }
        let mut number = [0; 4];
        from_child.read_exact(&mut number).expect("the child says where it is");
        drop((from_child, to_parent));
        let to = UdDestination {
            on_this_host: true,
            qpn: Qpn::new(u32::from_ne_bytes(number)),
            qkey: Qkey::new(QKEY),
            grh: [0x60; 40],
        };
        sender.post_send(&SendWr { opcode: WR_SEND, to: Some(to), ..SendWr::default() }).expect("room");
        assert_eq!(next(&sent).status, WC_SUCCESS);
        let mut status = 0;
        // SAFETY: waits for our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child's findings are above");
        Usage::is_again(me, &born);
    }
}

#[test]
fn datagrams_count_towards_the_limit_of_a_shared_queue() {
    const LIMIT_REACHED: u32 = 15;
    let adapter = Adapter::open();
    let (cq, srq) = (adapter.cq(), Srq::new(&adapter.pd, 4, 1).expect("a shared queue"));
    let receiver = adapter.qp_with(&cq, QpType::Ud, RecvSource::Shared(srq.clone())).expect("a queue pair");
    ready(&receiver, 0);
    (0..4).for_each(|i| srq.post(i, &[]).expect("room"));
    srq.set_limit(4).expect("within the size");
    receiver.post_send(&SendWr { opcode: WR_SEND, to: to(&receiver), ..SendWr::default() }).expect("room");
    assert_eq!(event(&adapter.context, Duration::from_secs(5)), Some(LIMIT_REACHED));
}

#[test]
fn a_fault_of_a_held_back_request_stops_the_send_queue_only() {
    let adapter = Adapter::open();
    let [(near, sent), (far, _)] = connected(&adapter);
    let mut from = vec![1u8; 64];
    let source = adapter.register(&mut from);
    let mut bad = element(&from, &source);
    bad.lkey ^= 1;
    near.modify(&attributes(&QpConfig::default(), QpState::Sqd, 0), attr::STATE).expect("to SQD");
    near.post_send(&SendWr { wr_id: 1, opcode: WR_SEND, sges: &[bad], ..SendWr::default() }).expect("room");
    near.post_send(&SendWr { wr_id: 2, opcode: WR_SEND, ..SendWr::default() }).expect("room");
    near.modify(&attributes(&QpConfig::default(), QpState::Rts, 0), attr::STATE).expect("to RTS");
    assert_eq!((next(&sent).status, next(&sent).status), (WC_LOC_PROT_ERR, WC_WR_FLUSH_ERR));
    assert_eq!((near.state(), far.state()), (QpState::Sqe, QpState::Rts));
}
