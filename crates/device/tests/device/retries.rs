//! Peers that are not ready: requests are retried as the queue pair's attributes demand, for polling and for
//! sleeping programs.

use std::time::{Duration, Instant};

use millstream_device::qp::state::QpState;
use millstream_device::types::{
    WC_OP_RDMA_WRITE, WC_OP_RECV, WC_OP_SEND, WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR, WC_WR_FLUSH_ERR,
    WR_RDMA_WRITE,
};

use crate::support::{
    Command, Completion, CqKind, End, Kind, Placement, QpConfig, pair, pattern, request, wait_for,
};

/// Long enough for a wrong timeout to occur.
const A_WHILE: Duration = Duration::from_millis(150);

#[test]
fn without_rnr_retries_an_empty_receive_queue_is_an_error() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig { rnr_retry: 0, ..QpConfig::default() });
        let source = a.hold(&[1; 64]);
        a.send(1, &[source.all()]);
        a.send(2, &[source.all()]);
        let sent: Vec<_> = a.sent(2).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(sent, [(1, WC_RNR_RETRY_EXC_ERR), (2, WC_WR_FLUSH_ERR)]);
        assert_eq!(a.state(), QpState::Err);
        assert_eq!(b.state(), QpState::Rts, "the receiver is not at fault");
    }
}

#[test]
fn rnr_retries_take_the_receivers_time() {
    for place in Placement::BOTH {
        // Code 22: 20.48 ms; three times.
        let config = QpConfig { rnr_retry: 3, min_rnr_timer: 22, ..QpConfig::default() };
        let (mut a, _b) = pair(place, &config);
        let source = a.hold(&[1; 64]);
        let start = Instant::now();
        a.send(1, &[source.all()]);
        assert_eq!(a.sent(1)[0].status, WC_RNR_RETRY_EXC_ERR);
        assert!(start.elapsed() >= Duration::from_micros(61_440), "{:?}", start.elapsed());
    }
}

#[test]
fn rnr_retry_seven_retries_forever_without_polling() {
    // The shortest ACK timeout has no effect on RNR retries.
    let config = QpConfig { rnr_retry: 7, timeout: 1, retry_cnt: 0, min_rnr_timer: 1, ..QpConfig::default() };
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        for wr_id in 1..=3 {
            a.send(wr_id, &[source.all()]);
        }
        let (addr, key) = (target.addr, target.key);
        a.post(request(4, WR_RDMA_WRITE, &[source.part(0, 8)], (addr, key)).with_imm(4));
        std::thread::sleep(A_WHILE);
        assert_eq!(a.state(), QpState::Rts);
        b.recv(11, &[target.all()]);
        wait_for("the message", || b.load(&target, 0, 64) == pattern(1, 64));
        b.recv(12, &[target.all()]);
        b.recv(13, &[target.all()]);
        b.recv(14, &[target.all()]);
        // The sender's completions are in the queue without an earlier poll.
        assert!(b.received(4).iter().map(|c| c.wr_id).eq(11..=14));
        assert!(a.sent(4).iter().map(|c| c.wr_id).eq(1..=4));
    }
}

#[test]
fn a_sleeping_sender_is_woken_by_its_channel() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        for round in 0..20 {
            a.arm(CqKind::Send, false);
            a.send(round, &[source.all()]);
            std::thread::sleep(Duration::from_millis(round));
            b.recv(round, &[target.all()]);
            assert!(a.event(CqKind::Send, Duration::from_secs(20)), "round {round}");
            assert_eq!(a.sent(1), [Completion::ok(round, WC_OP_SEND, 0)]);
            assert_eq!(b.received(1), [Completion::ok(round, WC_OP_RECV, 64)]);
        }
    }
}

/// Without polling: the completion of the failed request wakes the sender, together with the flushed ones.
#[test]
fn retries_expire_while_both_sides_sleep() {
    for place in Placement::BOTH {
        // No receive: three times 20.48 ms.
        let config = QpConfig { rnr_retry: 3, min_rnr_timer: 22, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&[1; 64]);
        a.arm(CqKind::Send, false);
        (1..=3).for_each(|wr_id| a.send(wr_id, &[source.all()]));
        assert!(a.event(CqKind::Send, Duration::from_secs(20)));
        let sent: Vec<_> = a.sent(3).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(sent[0], (1, WC_RNR_RETRY_EXC_ERR));
        assert_eq!(sent[1..], [(2, WC_WR_FLUSH_ERR), (3, WC_WR_FLUSH_ERR)]);
        assert_eq!((a.state(), b.state()), (QpState::Err, QpState::Rts));

        // Not ready: 4.096 µs × 2¹², three times.
        let config = QpConfig { timeout: 12, retry_cnt: 2, ..QpConfig::default() };
        let (mut a, _b, _) = not_ready(place, &config);
        let source = a.hold(&[1; 64]);
        a.arm(CqKind::Send, false);
        a.send(1, &[source.all()]);
        assert!(a.event(CqKind::Send, Duration::from_secs(20)));
        assert_eq!(a.sent(1)[0].status, WC_RETRY_EXC_ERR);

        // The peer's queue pair is destroyed while the sender sleeps.
        let config = QpConfig { timeout: 21, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&[1; 64]);
        a.arm(CqKind::Send, false);
        a.send(1, &[source.all()]);
        b.destroy();
        assert!(a.event(CqKind::Send, Duration::from_secs(20)));
        assert_eq!(a.sent(1)[0].status, WC_RETRY_EXC_ERR);
    }
}

#[test]
fn requests_behind_a_pending_request_wait() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        a.send(1, &[source.part(0, 1)]);
        a.write(2, &[source.all()], (target.addr, target.key));
        a.has_nothing(CqKind::Send);
        std::thread::sleep(Duration::from_millis(30));
        assert_ne!(b.load(&target, 0, 64), pattern(1, 64));
        b.recv(3, &[]);
        // One byte for an empty receive: the request fails, and the WRITE is flushed.
        let sent: Vec<_> = a.sent(2).iter().map(|c| c.wr_id).collect();
        assert_eq!(sent, [1, 2]);
        assert_ne!(b.load(&target, 0, 64), pattern(1, 64));
    }
}

/// An end in RTS, its peer in INIT, and the number that the peer has to connect to.
fn not_ready(place: Placement, config: &QpConfig) -> (End, End, u32) {
    let (mut a, mut b) = (End::new(Placement::SameProcess), End::new(place));
    let (to_b, to_a) = (b.open(config), a.open(config));
    a.connect_to(to_b, config);
    b.modify(QpState::Init, config);
    (a, b, to_a)
}

/// Takes the peer from INIT to RTS.
fn becomes_ready(b: &mut End, to_a: u32, config: &QpConfig) {
    b.attempt(Command::Connect(to_a, config.clone())).expect("to RTR");
    b.modify(QpState::Rts, config);
}

#[test]
fn a_peer_that_becomes_ready_gets_the_request() {
    for place in Placement::BOTH {
        let config = QpConfig { timeout: 18, ..QpConfig::default() };
        let (mut a, mut b, to_a) = not_ready(place, &config);
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        a.write(1, &[source.all()], (target.addr, target.key));
        a.send(2, &[source.all()]);
        b.recv(3, &[target.all()]);
        std::thread::sleep(Duration::from_millis(50));
        a.has_nothing(CqKind::Send);
        assert_ne!(b.load(&target, 0, 64), pattern(1, 64));
        becomes_ready(&mut b, to_a, &config);
        // Without polling.
        wait_for("the WRITE", || b.load(&target, 0, 64) == pattern(1, 64));
        assert_eq!(a.sent(2), [Completion::ok(1, WC_OP_RDMA_WRITE, 0), Completion::ok(2, WC_OP_SEND, 0)]);
        assert_eq!(b.received(1), [Completion::ok(3, WC_OP_RECV, 64)]);
    }
}

#[test]
fn a_peer_that_stays_silent_costs_the_retries() {
    for place in Placement::BOTH {
        // 4.096 µs × 2¹², three times: 50 ms.
        let config = QpConfig { timeout: 12, retry_cnt: 2, ..QpConfig::default() };
        let (mut a, _b, _) = not_ready(place, &config);
        let source = a.hold(&[1; 64]);
        let start = Instant::now();
        a.send(1, &[source.all()]);
        a.send(2, &[source.all()]);
        let sent: Vec<_> = a.sent(2).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(sent, [(1, WC_RETRY_EXC_ERR), (2, WC_WR_FLUSH_ERR)]);
        assert!(start.elapsed() >= Duration::from_micros(50_331), "{:?}", start.elapsed());
    }
}

#[test]
fn held_back_requests_resume_with_the_send_queue() {
    for place in Placement::BOTH {
        let config = QpConfig { timeout: 18, ..QpConfig::default() };
        let (mut a, mut b, to_a) = not_ready(place, &config);
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        a.modify(QpState::Sqd, &config);
        a.write(1, &[source.all()], (target.addr, target.key));
        a.modify(QpState::Rts, &config);
        becomes_ready(&mut b, to_a, &config);
        wait_for("the WRITE", || b.load(&target, 0, 64) == pattern(1, 64));

        let config = QpConfig { rnr_retry: 1, ..config };
        let (mut a, _b) = pair(place, &config);
        let source = a.hold(&[1; 64]);
        a.modify(QpState::Sqd, &config);
        a.send(1, &[source.all()]);
        a.modify(QpState::Rts, &config);
        assert_eq!(a.sent(1)[0].status, WC_RNR_RETRY_EXC_ERR);
    }
}

#[test]
fn timeout_zero_is_infinite() {
    let config = QpConfig { timeout: 0, retry_cnt: 0, ..QpConfig::default() };
    let (mut a, mut b, to_a) = not_ready(Placement::OtherProcess, &config);
    let source = a.hold(&pattern(1, 64));
    let target = b.register(Kind::Anonymous, 64, 0);
    a.write(1, &[source.all()], (target.addr, target.key));
    std::thread::sleep(A_WHILE);
    a.has_nothing(CqKind::Send);
    becomes_ready(&mut b, to_a, &config);
    assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
}

#[test]
fn a_peer_that_never_existed_costs_the_retries() {
    let config = QpConfig { timeout: 10, retry_cnt: 1, ..QpConfig::default() };
    let mut a = End::new(Placement::SameProcess);
    let me = a.open(&config);
    // Another queue pair number prefix; most are unused.
    let nobody = (1..0xfff).map(|i| (me ^ (i << 12)) & 0xff_f000).find(|qpn| {
        let name = format!("@millstream/{}/{:03x}", user(), qpn >> 12);
        !std::fs::read_to_string("/proc/net/unix").expect("this is Linux").contains(&name)
    });
    a.connect_to(nobody.expect("4,095 processes are not running here"), &config);
    let source = a.hold(&[1; 64]);
    a.send(1, &[source.all()]);
    assert_eq!(a.sent(1)[0].status, WC_RETRY_EXC_ERR);
}

fn user() -> u32 {
    // SAFETY: a plain system call.
    unsafe { libc::geteuid() }
}

#[test]
fn a_destroyed_peer_is_not_waited_for() {
    for place in Placement::BOTH {
        // Eight times 8.6 s.
        let config = QpConfig { timeout: 21, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&[1; 64]);
        // One is pending already, one is posted later.
        a.send(1, &[source.all()]);
        b.destroy();
        assert_eq!(a.sent(1)[0].status, WC_RETRY_EXC_ERR);

        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&[1; 64]);
        b.destroy();
        a.send(1, &[source.all()]);
        assert_eq!(a.sent(1)[0].status, WC_RETRY_EXC_ERR);
    }
}
