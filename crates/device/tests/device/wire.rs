//! Tests of the wire, with UDP packets on the loopback interface: the semantics are those of shared memory,
//! also with network faults.
//!
//! The environment of a process selects the wire. So these tests start this program again with
//! `MILLSTREAM_PATH=wire`, either to repeat the tests of other modules, or in a role.

use std::cell::OnceCell;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpCap, QpType, RecvSource};
use millstream_device::send_wr::SendWr;
use millstream_device::types::{
    SEND_SIGNALED, WC_RETRY_EXC_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_RDMA_WRITE, WR_SEND, Wc,
};
use millstream_device::{Context, Cq, Mr, Pd, gsi};
use millstream_wire::icrc::Flow;
use millstream_wire::{
    ICRC_LEN, Msn, Opcode, Packet, Psn, Qkey, Qpn, Repr, Rkey, Srqn, UDP_PORT, aeth, atomic_ack_eth,
    atomic_eth, bth, cm, deth, ieth, imm_dt, reth, xrceth,
};

use crate::forged_peer::PEER_QPN;
use crate::forged_peer::network::{PEER, Sender, connect, shared_socket};
use crate::support::{
    Adapter, Command as Order, CqKind, End, Kind, Placement, Process, QpConfig, TEST_TIMEOUT, attributes,
    mask, own_network, pair, pattern, request, send_to_parent, wait_for,
};

/// Modules whose tests apply to both paths.
const MODULES: [&str; 9] = [
    "errors::",
    "events::",
    "queues::",
    "semantics::",
    "shared::",
    "transfers::",
    "unreliable::",
    "windows::",
    "xrc::",
];

/// Tests that do not apply to packets, with the reason.
const SHARED_MEMORY_ONLY: [(&str, &str); 15] = [
    (
        "a_limit_that_is_set_during_a_send",
        "the race is between processes that share the queue; thousands take minutes",
    ),
    (
        "a_destroyed_completion_queue_leaves_no_signal",
        "requests complete with the acknowledgement, not when posted",
    ),
    ("a_busy_queue_does_not_delay_the_events_of_others", "as above"),
    ("a_fault_of_a_held_back_request", "as above"),
    ("a_full_completion_queue_of", "as above, and an acknowledgement is not revoked"),
    ("a_limit_is_reported_although_its_queue_pair", "as above: the queue pair is destroyed before"),
    ("a_limit_is_reported_and_an_overflow", "as above"),
    ("an_unreliable_connection_carries", "as above: a WRITE completes when it was sent"),
    ("destruction_takes_completions_along", "as above"),
    (
        "reset_forgets_everything",
        "packet numbers restart at zero: packets of the former connection fit the new one",
    ),
    ("each_message_meets_its_own_receive", "as above: both ends are reset"),
    (
        "an_atomic_operation_on_no_word",
        "no packet is sent for a misaligned word: the responder does not fail",
    ),
    ("local_memory_that_is_not_there", "a READ fails when its response arrives: later requests were sent"),
    ("memory_of_another_protection_domain", "as above"),
    (
        "only_windows_of_type_2_can_be_invalidated",
        "a key is invalidated in order, after requests that wait for acknowledgements",
    ),
];

/// Runs the tests whose names contain `filters` over packets, with these variables set. At least `least` must pass.
fn rerun_over_packets(filters: &[&str], least: usize, variables: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().expect("a test program has a path"));
    command.args(filters).args(["--test-threads", "3"]);
    for (test, reason) in SHARED_MEMORY_ONLY {
        println!("not over packets: {test}: {reason}");
        command.args(["--skip", test]);
    }
    let output = command.env("MILLSTREAM_PATH", "wire").envs(variables.iter().copied()).output();
    let output = output.expect("this program starts again");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let passed = text.lines().filter(|line| line.starts_with("test ") && line.ends_with(" ok")).count();
    assert!(passed >= least, "only {passed} tests ran:\n{text}");
}

#[test]
fn the_tests_pass_over_packets() {
    rerun_over_packets(&MODULES, 60, &[]);
}

#[test]
fn a_thread_that_polls_for_long_does_its_other_work() {
    let tests = ["errors::", "events::", "semantics::"];
    rerun_over_packets(&tests, 20, &[("MILLSTREAM_SPIN", "10000000")]);
}

#[test]
fn loss_duplication_reordering_and_corruption_only_delay() {
    let tests = ["gathered_and_scattered", "immediate_data", "receivers_memory", "writes_and_reads_reach"];
    let faults = "drop=0.02,duplicate=0.02,reorder=0.02,corrupt=0.01,delay=0.01:1ms,side=both,seed=7";
    rerun_over_packets(&tests, tests.len(), &[("MILLSTREAM_LINK", faults)]);
}

#[test]
fn congestion_notification_only_delays() {
    let tests = ["gathered_and_scattered", "immediate_data", "receivers_memory", "writes_and_reads_reach"];
    rerun_over_packets(&tests, tests.len(), &[("MILLSTREAM_LINK", "mark=0.5,side=both")]);
}

#[test]
fn groups_are_reached_by_packets() {
    let tests = [
        "every_member_gets_a_copy",
        "multicast_loopback_can_be_blocked",
        "queue_pairs_come_and_go",
        "members_of_other_processes",
    ];
    rerun_over_packets(&tests, tests.len(), &[]);
}

/// Runs a role on the wire in another process, and waits until it succeeds.
pub(crate) fn on_the_wire(role: &str) {
    on_the_wire_with(role, &[]);
}

/// The same with further variables set.
pub(crate) fn on_the_wire_with(role: &str, variables: &[(&str, &str)]) {
    let mut process = Process::start_with(role, |command| {
        command.env("MILLSTREAM_PATH", "wire").envs(variables.iter().copied())
    });
    assert!(process.finish().success(), "{role}");
}

#[test]
fn a_peer_that_was_killed_does_not_answer_and_its_retries_run_out() {
    on_the_wire("wire_killed_peer");
}

/// In another process.
pub(crate) fn killed_peer() {
    // 16.8 ms, with three retries.
    let config = QpConfig { timeout: 12, retry_cnt: 3, first_psn: 0x1000, ..QpConfig::default() };
    let patient = QpConfig::default();
    let (mut a, mut b) = pair(Placement::OtherProcess, &patient);
    let source = a.hold(&pattern(1, 10_000));
    let target = b.register(Kind::Anonymous, 10_000, 0);
    a.write(1, &[source.all()], (target.addr, target.key));
    assert_eq!(a.sent(1)[0].status, WC_SUCCESS);
    assert_eq!(b.load(&target, 0, 10_000), pattern(1, 10_000));
    // Only the requests after the kill have few retries.
    let (to_a, to_b) = (a.number(), b.number());
    for end in [&mut a, &mut b] {
        end.modify(QpState::Reset, &patient);
    }
    a.connect_to(to_b, &config);
    b.connect_to(to_a, &config);
    b.process().kill();
    let killed = Instant::now();
    (2..4).for_each(|wr_id| a.write(wr_id, &[source.all()], (target.addr, target.key)));
    let ends: Vec<_> = a.sent(2).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(ends, [(2, WC_RETRY_EXC_ERR), (3, WC_WR_FLUSH_ERR)]);
    assert!(killed.elapsed() >= Duration::from_millis(60), "{:?}", killed.elapsed());
    assert_eq!(a.state(), QpState::Err);
}

/// Number of tries of a measurement that the scheduler may disturb.
const TIMES: u64 = 21;

#[test]
fn a_receiver_that_stops_polling_has_acknowledged() {
    on_the_wire("wire_prompt_ack");
}

/// In another process.
pub(crate) fn prompt_ack() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let (source, target) = (b.hold(&[1; 64]), a.register(Kind::Anonymous, 64, 0));
    let mut acknowledged_after = |wr_id| {
        a.recv(wr_id, &[target.all()]);
        // Long enough that the progress thread expects no poller.
        std::thread::sleep(Duration::from_millis(5));
        b.begin(&Order::Repeat(request(wr_id, WR_SEND, &[source.all()], (0, 0)), 1));
        poll_one_receive(&a);
        let taken = Instant::now();
        b.answer();
        taken.elapsed()
    };
    // Without a prompt ACK each try lasts until the sender's ACK timer expires, after 4 ms. On a loaded machine the scheduler may
    // delay many, for a while.
    let mut waits = Vec::new();
    for _ in 0..5 {
        waits = (0..TIMES).map(&mut acknowledged_after).collect();
        waits.sort_unstable();
        if waits[waits.len() / 4] < Duration::from_millis(3) {
            return;
        }
    }
    panic!("acknowledged after {waits:?}");
}

#[test]
fn a_busy_receiver_acknowledges_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let capture = folder.path().join("%p.pcap");
    let mut process = Process::start_with("wire_busy_receiver", |command| {
        command.env("MILLSTREAM_PATH", "wire").env("MILLSTREAM_PCAP", &capture).current_dir(&folder)
    });
    assert!(process.finish().success());
}

/// In another process, which captures its packets.
pub(crate) fn busy_receiver() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let (source, target) = (b.hold(&[1; 64]), a.register(Kind::Anonymous, 64, 0));
    let capture = format!("{}.pcap", std::process::id());
    let captured = || std::fs::metadata(&capture).expect("a capture").len();
    let mut late = 0;
    for wr_id in 0..TIMES {
        a.recv(wr_id, &[target.all()]);
        b.begin(&Order::Repeat(request(wr_id, WR_SEND, &[source.all()], (0, 0)), 1));
        poll_one_receive(&a);
        a.register(Kind::Anonymous, 64, 0);
        let registered = captured();
        b.answer();
        late += u32::from(captured() != registered);
    }
    // On a loaded machine the sender's ACK timer may have expired, which causes one more ACK.
    assert!(u64::from(late) < TIMES / 2, "acknowledged {late} times later than the next thing was done");
}

/// Polls without a pause until a message has arrived, and not afterwards.
fn poll_one_receive(end: &End) {
    let (queue, mut taken) = (end.actor().cq(CqKind::Recv), [Wc::default()]);
    let deadline = Instant::now() + TEST_TIMEOUT;
    while queue.poll(&mut taken).expect("a queue") == 0 {
        assert!(Instant::now() < deadline, "no message comes");
    }
}

/// READs in a row of a responder that does not poll.
const READS: u64 = 200;

#[test]
fn a_responder_polls_while_requests_arrive_at_short_intervals() {
    for (spin, expected) in [("1000000", 0..READS / 4), ("0", READS / 2..u64::MAX)] {
        let mut process = Process::start_with("wire_responder", |command| {
            command.env("MILLSTREAM_PATH", "wire").env("MILLSTREAM_SPIN", spin)
        });
        let deadline = Instant::now() + TEST_TIMEOUT / 4;
        loop {
            process.send_line("");
            let slept = process.recv_line().parse().expect("a number");
            if expected.contains(&slept) {
                break;
            }
            if Instant::now() > deadline {
                assert!(is_crowded(), "MILLSTREAM_SPIN={spin}: slept {slept} times during {READS} READs");
                println!("not checked with MILLSTREAM_SPIN={spin}: other processes compute on all cores");
                break;
            }
        }
        assert!(process.finish().success(), "{spin}");
    }
}

/// Whether other processes compute on this core now and then. Then a responder sleeps although it may poll.
fn is_crowded() -> bool {
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        let start = Instant::now();
        std::thread::yield_now();
        if start.elapsed() > Duration::from_micros(400) {
            return true;
        }
    }
    false
}

/// In another process: how often the responder sleeps during [`READS`], for each line of input.
pub(crate) fn responder() {
    let (mut a, mut b) = pair(Placement::OtherProcess, &QpConfig::default());
    let target = a.register(Kind::Anonymous, 64, 0);
    let source = b.hold(&[1; 64]);
    let responder = b.process().id();
    for _ in std::io::stdin().lines() {
        let before = sleeps(responder, "mill-progress");
        for wr_id in 0..READS {
            a.read(wr_id, &[target.all()], (source.addr, source.key));
            assert_eq!(a.sent(1)[0].status, WC_SUCCESS);
        }
        send_to_parent(&(sleeps(responder, "mill-progress") - before).to_string());
    }
}

/// How often the thread of this name has slept.
fn sleeps(process: u32, name: &str) -> u64 {
    let mut status = None;
    // A thread names itself when it first runs.
    wait_for("the thread has its name", || {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("our own child");
        let mut threads =
            tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
        status = threads.find(|status| status.lines().next() == Some(&format!("Name:\t{name}")));
        status.is_some()
    });
    let status = status.expect("found above");
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.expect("in every status").trim().parse().expect("a number")
}

#[test]
fn a_drained_send_queue_sends_the_rest_when_it_resumes() {
    on_the_wire("wire_resume");
}

/// In another process: a window holds a few of the requests.
pub(crate) fn resume() {
    const WRITES: u64 = 64;
    if !own_network("a_drained_send_queue_sends_the_rest_when_it_resumes") {
        return;
    }
    let config = QpConfig::default();
    let (mut a, mut b) = pair(Placement::SameProcess, &config);
    let source = a.register(Kind::Anonymous, 1 << 20, 0);
    let target = b.register(Kind::Anonymous, 1 << 20, 0);
    for wr_id in 0..WRITES {
        a.write(wr_id, &[source.all()], (target.addr, target.key));
    }
    a.modify(QpState::Sqd, &config);
    // Those that have begun end.
    std::thread::sleep(Duration::from_millis(300));
    a.modify(QpState::Rts, &config);
    let sent = a.sent(WRITES as usize);
    assert!(sent.iter().all(|completion| completion.status == WC_SUCCESS), "{sent:?}");
}

#[test]
fn a_path_that_changes_in_sqd_is_used() {
    on_the_wire("wire_changed_path");
}

/// In another process. Further loopback addresses stand for other hosts.
pub(crate) fn changed_path() {
    if !own_network("a_path_that_changes_in_sqd_is_used") {
        return;
    }
    let adapter = Adapter::open();
    let cq = adapter.cq();
    let qp = adapter.qp(&cq).expect("room");
    connect(&qp, PEER, PEER_QPN);
    let elsewhere = Ipv4Addr::new(127, 0, 0, 3);
    let [former, peer] = [PEER, elsewhere].map(|address| Sender::new(address, UDP_PORT));
    let to = |state| QpAttr { state, ..qp.attributes() };
    qp.modify(&to(QpState::Sqd), attr::STATE).expect("to SQD");
    let mut path = to(QpState::Sqd);
    path.path.dgid = [0; 16];
    path.path.is_global = false;
    assert!(qp.modify(&path, attr::STATE | attr::AV).is_err(), "Ethernet has global addresses only");
    path.path.is_global = true;
    path.path.dgid = elsewhere.to_ipv6_mapped().octets();
    qp.modify(&path, attr::STATE | attr::AV).expect("another path");
    qp.modify(&to(QpState::Rts), attr::STATE).expect("to RTS");
    qp.post_send(&SendWr { wr_id: 5, opcode: WR_SEND, flags: SEND_SIGNALED, ..SendWr::default() })
        .expect("room");
    let mut buffer = vec![0; 4096];
    wait_for("the packet", || peer.receive(&mut buffer) > 0);
    assert_eq!(former.receive(&mut buffer), 0, "nothing goes to the former address");
    let sent = Packet::new_checked(&buffer[..]).expect("received above").bth().psn();
    let mut ack = acknowledgement(qp.qpn(), sent);
    former.send(&mut ack, true);
    peer.send(&mut ack, true);
    let mut completions = [Wc::default()];
    wait_for("the completion", || cq.poll(&mut completions) == Ok(1));
    assert_eq!((completions[0].wr_id, completions[0].status), (5, WC_SUCCESS));
}

#[test]
fn a_disconnect_request_to_an_exited_manager_is_answered() {
    on_the_wire("wire_stray_disconnect");
}

/// In another process, which has no connection manager.
pub(crate) fn stray_disconnect() {
    if !own_network("a_disconnect_request_to_an_exited_manager_is_answered") {
        return;
    }
    let (_a, _b) = pair(Placement::SameProcess, &QpConfig::default());
    // Another loopback address stands for another host.
    let (here, there) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2));
    let elsewhere = shared_socket(there, UDP_PORT);
    let dreq = cm::Message::Dreq {
        local_id: 0x123_00001,
        remote_id: 0xabc_00002,
        remote_qpn: Qpn::new(5),
        private: &[],
    };
    let mut packet = gsi::packet(Psn::new(7), &dreq.emit(9));
    let flow = Flow::new((there.into(), UDP_PORT), (here.into(), UDP_PORT)).expect("one family");
    let covered = packet.len() - ICRC_LEN;
    let icrc = flow.icrc(&packet[..covered], 0);
    packet[covered..].copy_from_slice(&icrc);
    elsewhere.set_read_timeout(Some(TEST_TIMEOUT)).expect("a socket");
    elsewhere.send_to(&packet, (here, UDP_PORT)).expect("sent");
    let mut bytes = [0; 1024];
    let len = elsewhere.recv(&mut bytes).expect("an answer");
    let packet = Packet::new_checked(&bytes[..len]).expect("a packet");
    let datagram = gsi::payload(&packet).expect("for queue pair 1");
    let drep = cm::Message::Drep { local_id: 0xabc_00002, remote_id: 0x123_00001, private: &[] };
    assert_eq!(datagram, drep.emit(9));
}

#[test]
fn a_request_that_was_acknowledged_before_the_error_state_succeeds() {
    on_the_wire("wire_acknowledged");
}

/// In another process. An application learns by other ways than the queue pair that its peer has everything, such as by a
/// request to disconnect, and modifies the queue pair to ERR. The acknowledgement came before.
pub(crate) fn acknowledged() {
    if !own_network("a_request_that_was_acknowledged_before_the_error_state_succeeds") {
        return;
    }
    let context = Context::open().expect("the device opens");
    let pd = Pd::new(&context);
    let cq = Cq::new(&context, 8, None).expect("a queue");
    let capacity = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
    // It shares the device's port, which is opened first.
    let peer = OnceCell::new();
    let (mut completions, mut buffer) = ([Wc::default()], vec![0; 4096]);
    for round in 0..50 {
        let qp = Qp::new(&pd, &cq, &cq, capacity, true, QpType::Rc, RecvSource::Own).expect("a queue pair");
        connect(&qp, PEER, PEER_QPN);
        let peer = peer.get_or_init(|| Sender::new(PEER, UDP_PORT));
        // While the application polls, nobody else takes packets.
        let polled = Instant::now() + Duration::from_millis(1);
        while Instant::now() < polled {
            assert_eq!(cq.poll(&mut completions), Ok(0));
        }
        qp.post_send(&SendWr { wr_id: round, opcode: WR_SEND, ..SendWr::default() }).expect("room");
        while peer.receive(&mut buffer) == 0 {}
        peer.send(&mut acknowledgement(qp.qpn(), Psn::new(0)), true);
        let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
        qp.modify(&error, attr::STATE).expect("allowed in each state");
        assert_eq!(cq.poll(&mut completions), Ok(1), "round {round}");
        assert_eq!((completions[0].wr_id, completions[0].status), (round, WC_SUCCESS));
        qp.destroy();
    }
}

/// A packet that acknowledges the first message.
fn acknowledgement(to: Qpn, psn: Psn) -> Vec<u8> {
    let ack = Repr {
        aeth: Some(aeth::Repr { syndrome: 0x1f, msn: Msn::new(1) }),
        ..Repr::new(bth::Repr::new(Opcode::RC_ACKNOWLEDGE, to, psn), &[])
    };
    let mut packet = vec![0; ack.buffer_len()];
    ack.emit(&mut packet);
    packet
}

#[test]
fn invalid_datagrams_have_no_effect() {
    on_the_wire("wire_invalid_datagrams");
}

/// Packets of every operation for this queue pair, all of them unexpected.
fn unexpected_packets(qpn: u32, psn: u32) -> impl Iterator<Item = Vec<u8>> {
    let payloads: [&'static [u8]; 3] = [&[], &[0x5a; 8], &[0x5a; 1027]];
    Opcode::ALL.iter().flat_map(move |opcode| payloads.map(|payload| (*opcode, payload))).map(
        move |(opcode, payload)| {
            let bth = bth::Repr {
                solicited: true,
                migrated: false,
                becn: true,
                ack_req: true,
                ..bth::Repr::new(opcode, Qpn::new(qpn), Psn::new(psn))
            };
            let (va, rkey) = (u64::MAX - 3, Rkey::new(u32::MAX));
            let repr = Repr {
                bth,
                xrceth: Some(xrceth::Repr { srq: Srqn::new(0xff_ffff) }),
                deth: Some(deth::Repr { qkey: Qkey::new(u32::MAX), src_qp: Qpn::new(qpn) }),
                reth: Some(reth::Repr { va, rkey, length: u32::MAX }),
                atomic_eth: Some(atomic_eth::Repr { va, rkey, swap_or_add: 1, compare: 2 }),
                aeth: Some(aeth::Repr { syndrome: 0x62, msn: Msn::new(0xff_ffff) }),
                atomic_ack_eth: Some(atomic_ack_eth::Repr { original: 3 }),
                imm_dt: Some(imm_dt::Repr { data: [4; 4] }),
                ieth: Some(ieth::Repr { rkey }),
                payload: if opcode.has_payload() { payload } else { &[] },
            };
            let mut packet = vec![0; repr.buffer_len()];
            repr.emit(&mut packet);
            packet
        },
    )
}

/// In another process.
pub(crate) fn invalid_datagrams() {
    let config = QpConfig::default();
    let (mut a, mut b) = pair(Placement::SameProcess, &config);
    let source = a.hold(&pattern(1, 3000));
    let target = b.register(Kind::Anonymous, 3000, 0);
    b.store(&target, 0, &pattern(2, 3000));
    (0..3).for_each(|wr_id| b.recv(wr_id, &[target.all()]));

    // From the peer's address.
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
    let port = socket.local_addr().expect("bound").port();
    let here = |port| (Ipv4Addr::LOCALHOST.into(), port);
    let flow = Flow::new(here(port), here(UDP_PORT)).expect("one family");
    let send = |packet: &[u8]| {
        // Packets that overflow the kernel's buffer would test nothing.
        std::thread::sleep(Duration::from_micros(20));
        socket.send_to(packet, here(UDP_PORT)).expect("sent");
    };
    let sealed = |packet: &[u8]| {
        let covered = &packet[..packet.len() - ICRC_LEN];
        [covered, &flow.icrc(covered, 0)].concat()
    };
    let (near, far) = (a.number(), b.number());
    for (qpn, psn) in [(near, 0x12_3456), (far, 0x12_3456), (far ^ 1, 0), (0, 0), (1, 0), (0xff_ffff, 0)] {
        for packet in unexpected_packets(qpn, psn) {
            send(&sealed(&packet));
            send(&packet);
            // Truncated inside and behind every header, with a valid ICRC.
            for len in (bth::LEN + ICRC_LEN..packet.len().min(80)).chain([packet.len().max(17) - 1]) {
                send(&sealed(&packet[..len]));
            }
            for (at, bits) in [(1, 0x3f), (1, 0x30), (2, 0xff), (0, 0xff)] {
                let mut odd = packet.clone();
                odd[at] ^= bits;
                send(&sealed(&odd));
            }
        }
    }
    (0..20).for_each(|len| send(&vec![0; len]));
    send(&vec![0xff; 60_000]);

    assert_eq!(b.load(&target, 0, 3000), pattern(2, 3000), "memory");
    for end in [&mut a, &mut b] {
        end.has_nothing(CqKind::Send);
        end.has_nothing(CqKind::Recv);
        assert_eq!(end.state(), QpState::Rts);
        assert_eq!(end.async_event(Duration::ZERO), None);
    }
    a.send(9, &[source.all()]);
    assert_eq!((a.sent(1)[0].status, b.received(1)[0].wr_id), (WC_SUCCESS, 0));
    assert_eq!(b.load(&target, 0, 3000), pattern(1, 3000));
}

#[test]
fn a_long_read_leaves_the_responders_locks_to_others() {
    on_the_wire("wire_long_read");
}

/// In another process, the responder of one READ request for half a GiB, as peers send that do not divide long READs.
/// A request is posted while the responses are sent.
pub(crate) fn long_read() {
    const LEN: usize = 512 << 20;
    if !own_network("a_long_read_leaves_the_responders_locks_to_others") {
        return;
    }
    let there = Ipv4Addr::new(127, 0, 0, 2);
    let adapter = Adapter::open();
    let mut memory = vec![0u8; LEN];
    let mr = adapter.register(&mut memory);
    // The device joins the port with its first connection. Then another socket may bind to it.
    let _first = connected_to(&adapter, there);
    let requester = shared_socket(there, UDP_PORT);
    // A thread that posts on a busy machine may not run before the READ is over.
    let is_early = |_| sent_until_posted(&adapter, &requester, &memory, &mr) < LEN / 4 * 3;
    assert!((0..5).any(is_early), "post_send returned when three quarters of the READ were sent, or more");
}

/// A queue pair in RTS whose peer is a host that does not answer.
pub(crate) fn connected_to(adapter: &Adapter, host: Ipv4Addr) -> Arc<Qp> {
    let qp = adapter.qp(&adapter.cq()).expect("room");
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let mut all = attributes(&QpConfig::default(), state, 0x12_3456);
        all.path.dgid = host.to_ipv6_mapped().octets();
        qp.modify(&all, mask(state)).expect("the usual way");
    }
    qp
}

/// Bytes of a READ of all memory that were sent when a request was posted.
fn sent_until_posted(adapter: &Adapter, requester: &UdpSocket, memory: &[u8], mr: &Mr) -> usize {
    let (here, there) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2));
    let qp = connected_to(adapter, there);
    let reth =
        reth::Repr { va: memory.as_ptr() as u64, rkey: Rkey::new(mr.key()), length: memory.len() as u32 };
    let bth = bth::Repr::new(Opcode::RC_READ_REQUEST, qp.qpn(), Psn::new(0));
    let repr = Repr { reth: Some(reth), ..Repr::new(bth, &[]) };
    let mut packet = vec![0; repr.buffer_len()];
    repr.emit(&mut packet);
    let flow = Flow::new((there.into(), UDP_PORT), (here.into(), UDP_PORT)).expect("one family");
    let covered = packet.len() - ICRC_LEN;
    let icrc = flow.icrc(&packet[..covered], 0);
    packet[covered..].copy_from_slice(&icrc);
    // Responses of the READ before this one.
    let mut bytes = vec![0; 8192];
    requester.set_read_timeout(Some(Duration::from_millis(20))).expect("a socket");
    while requester.recv(&mut bytes).is_ok() {}
    requester.set_read_timeout(Some(TEST_TIMEOUT)).expect("a socket");
    requester.send_to(&packet, (here, UDP_PORT)).expect("sent");
    let len = requester.recv(&mut bytes).expect("a response");
    let first = Packet::new_checked(&bytes[..len]).expect("a packet");
    assert_eq!(first.opcode(), Opcode::RC_READ_RESPONSE_FIRST);
    requester.set_read_timeout(Some(Duration::from_millis(20))).expect("a socket");
    let payload = first.payload().len();
    let (newest, posted) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The socket drops responses that come faster than they are received.
            while !posted.load(Ordering::Relaxed) {
                if let Ok(len) = requester.recv(&mut bytes) {
                    let packet = Packet::new_checked(&bytes[..len]).expect("a packet");
                    newest.store(packet.bth().psn().get(), Ordering::Relaxed);
                }
            }
        });
        let wr = SendWr { opcode: WR_RDMA_WRITE, flags: SEND_SIGNALED, ..SendWr::default() };
        qp.post_send(&wr).expect("room");
        let sent = newest.load(Ordering::Relaxed) as usize * payload;
        posted.store(true, Ordering::Relaxed);
        sent
    })
}
