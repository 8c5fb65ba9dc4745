//! Every error of a work request: the completions and events on both sides, and the flushed requests behind
//! it.

use std::time::{Duration, Instant};

use millstream_device::qp::state::{QpState, attr};
use millstream_device::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, WC_LOC_LEN_ERR,
    WC_LOC_PROT_ERR, WC_OP_RECV, WC_OP_SEND, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_REM_OP_ERR,
    WC_RNR_RETRY_EXC_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_ATOMIC_FETCH_AND_ADD, WR_RDMA_READ, WR_RDMA_WRITE,
    WR_SEND,
};

use crate::support::{
    Completion, CqKind, End, Kind, Placement, QpConfig, Region, Request, attributes, pair, pattern, request,
    wait_for,
};

/// `IBV_EVENT_QP_REQ_ERR`, `IBV_EVENT_QP_ACCESS_ERR`
const REQ_ERR: u32 = 2;
const ACCESS_ERR: u32 = 3;

const LEN: usize = 8192;

/// A connection on which a request will fail.
struct ConnectionFixture {
    a: End,
    b: End,
    source: Region,
    target: Region,
}

/// The effect at the responder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponderEffect {
    /// None: the requester found the error before it sent anything.
    Unaffected,
    /// Its queue pair fails, with this event.
    QpFails(u32),
    /// Its oldest receive completes with this status, and its queue pair fails.
    ReceiveFails(u32),
}

impl ConnectionFixture {
    fn new(place: Placement, config: &QpConfig) -> Self {
        let (mut a, mut b) = pair(place, config);
        let source = a.hold(&pattern(1, LEN));
        let target = b.register(Kind::Anonymous, LEN, 16);
        b.store(&target, 0, &pattern(2, LEN));
        Self { a, b, source, target }
    }

    fn to(&self, at: usize) -> (u64, u32) {
        (self.target.addr + at as u64, self.target.key)
    }

    /// Posts three receives on both sides, then the request and two more. The request must fail with
    /// `status`. The others must be flushed in order, and so must the receives of each queue pair that fails.
    fn expect_failure(mut self, what: &str, request: Request, status: u32, effect: ResponderEffect) {
        let (a, b) = (&mut self.a, &mut self.b);
        let own = a.register(Kind::Anonymous, 64, 0);
        let room = b.register(Kind::Anonymous, 64, 0);
        for i in 0..3 {
            a.recv(10 + i, &[own.all()]);
            // The responder's queue pair may have receives already, to be flushed.
            if !matches!(effect, ResponderEffect::ReceiveFails(_)) {
                b.recv(20 + i, &[room.all()]);
            }
        }
        a.post(Request { wr_id: 1, ..request });
        a.send(2, &[self.source.all()]);
        a.write(3, &[self.source.all()], (self.target.addr, self.target.key));
        let sent: Vec<_> = a.sent(3).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(sent, [(1, status), (2, WC_WR_FLUSH_ERR), (3, WC_WR_FLUSH_ERR)], "{what}");
        let flushed =
            |first: u64, count: u64| -> Vec<_> { (0..count).map(|i| (first + i, WC_WR_FLUSH_ERR)).collect() };
        let got: Vec<_> = a.received(3).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(got, flushed(10, 3), "{what}");
        assert_eq!(a.state(), QpState::Err, "{what}");
        assert_eq!(a.async_event(Duration::ZERO), None, "{what}: the sender has its completion");

        match effect {
            ResponderEffect::Unaffected => {
                assert_eq!(b.state(), QpState::Rts, "{what}");
                b.has_nothing(CqKind::Recv);
                assert_eq!(b.async_event(Duration::ZERO), None, "{what}");
            }
            ResponderEffect::QpFails(event) => {
                let got: Vec<_> = b.received(3).iter().map(|c| (c.wr_id, c.status)).collect();
                assert_eq!(got, flushed(20, 3), "{what}");
                assert_eq!(b.state(), QpState::Err, "{what}");
                assert_eq!(b.async_event(Duration::from_secs(5)), Some(event), "{what}");
            }
            ResponderEffect::ReceiveFails(status) => {
                let got: Vec<_> = b.received(3).iter().map(|c| (c.wr_id, c.status)).collect();
                assert_eq!(got, [(30, status), (31, WC_WR_FLUSH_ERR), (32, WC_WR_FLUSH_ERR)], "{what}");
                assert_eq!(b.state(), QpState::Err, "{what}");
            }
        }
        a.has_nothing(CqKind::Send);
        a.has_nothing(CqKind::Recv);
        b.has_nothing(CqKind::Recv);
        assert_eq!(b.async_event(Duration::ZERO), None, "{what}");
        assert_eq!(b.load(&self.target, 0, LEN), pattern(2, LEN), "{what}: nothing is written");
        assert_eq!(a.load(&self.source, 0, LEN), pattern(1, LEN), "{what}: nothing is read");
    }
}

#[test]
fn a_request_of_invalid_form_fails_after_those_before_it() {
    for place in Placement::BOTH {
        let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
        let (a, b) = (&mut fixture.a, &mut fixture.b);
        let to = (fixture.target.addr, fixture.target.key);
        for wr_id in 0..8 {
            a.write(wr_id, &[fixture.source.all()], to);
        }
        a.post(request(8, WR_ATOMIC_FETCH_AND_ADD, &[fixture.source.part(0, 4)], to));
        a.send(9, &[fixture.source.all()]);
        let sent: Vec<_> = a.sent(10).iter().map(|c| (c.wr_id, c.status)).collect();
        let mut expected: Vec<_> = (0..8).map(|wr_id| (wr_id, WC_SUCCESS)).collect();
        expected.extend([(8, WC_LOC_LEN_ERR), (9, WC_WR_FLUSH_ERR)]);
        assert_eq!(sent, expected, "{place:?}");
        assert_eq!(a.state(), QpState::Err);
        assert_eq!(b.state(), QpState::Rts);
        assert_eq!(b.load(&fixture.target, 0, LEN), pattern(1, LEN));
    }
}

#[test]
fn a_key_that_is_not_valid() {
    for place in Placement::BOTH {
        for opcode in [WR_RDMA_WRITE, WR_RDMA_READ] {
            let fixture = ConnectionFixture::new(place, &QpConfig::default());
            let (addr, key) = fixture.to(0);
            let wrong = request(1, opcode, &[fixture.source.part(0, 8)], (addr, key ^ 1));
            fixture.expect_failure(
                "wrong key",
                wrong,
                WC_REM_ACCESS_ERR,
                ResponderEffect::QpFails(ACCESS_ERR),
            );

            let fixture = ConnectionFixture::new(place, &QpConfig::default());
            let zero = request(1, opcode, &[fixture.source.part(0, 8)], (addr, 0));
            fixture.expect_failure("key zero", zero, WC_REM_ACCESS_ERR, ResponderEffect::QpFails(ACCESS_ERR));

            // Used once, so that the sender caches the key, and then deregistered.
            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let stale = fixture.b.register(Kind::Anonymous, LEN, 0);
            let use_it = request(1, opcode, &[fixture.source.part(0, 8)], (stale.addr, stale.key));
            fixture.a.store(&fixture.source, 0, &[0; 8]);
            fixture.a.post(use_it.clone());
            assert_eq!(fixture.a.sent(1)[0].status, WC_SUCCESS);
            fixture.a.store(&fixture.source, 0, &pattern(1, LEN));
            fixture.b.deregister(&stale);
            fixture.expect_failure(
                "stale key",
                use_it,
                WC_REM_ACCESS_ERR,
                ResponderEffect::QpFails(ACCESS_ERR),
            );
        }
    }
}

#[test]
fn a_range_that_leaves_the_region() {
    for place in Placement::BOTH {
        for opcode in [WR_RDMA_WRITE, WR_RDMA_READ] {
            for (what, offset, len) in [
                ("one byte past the end", 1i64, LEN),
                ("one byte before the start", -1, 1),
                ("starts at the end", LEN as i64, 1),
                ("starts past the end", LEN as i64 + 1, 1),
                ("ends past the end", LEN as i64 - 7, 8),
            ] {
                let fixture = ConnectionFixture::new(place, &QpConfig::default());
                let (start, key) = fixture.to(0);
                let to = (start.wrapping_add_signed(offset), key);
                let wrong = request(1, opcode, &[fixture.source.part(0, len)], to);
                fixture.expect_failure(what, wrong, WC_REM_ACCESS_ERR, ResponderEffect::QpFails(ACCESS_ERR));
            }
            let fixture = ConnectionFixture::new(place, &QpConfig::default());
            // The end wraps around to an address below the start.
            let to = (u64::MAX - 3, fixture.target.key);
            let wrong = request(1, opcode, &[fixture.source.part(0, 8)], to);
            fixture.expect_failure("wraps", wrong, WC_REM_ACCESS_ERR, ResponderEffect::QpFails(ACCESS_ERR));
        }
    }
}

#[test]
fn access_that_was_not_granted() {
    const L: u32 = ACCESS_LOCAL_WRITE;
    for place in Placement::BOTH {
        for (opcode, enough) in [
            (WR_RDMA_WRITE, L | ACCESS_REMOTE_WRITE),
            (WR_RDMA_READ, ACCESS_REMOTE_READ),
            (WR_ATOMIC_FETCH_AND_ADD, L | ACCESS_REMOTE_ATOMIC),
        ] {
            let all = L | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
            let lacking = all & !enough | L;

            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let region = fixture.b.register_as(Kind::Anonymous, LEN, 0, lacking);
            let denied = request(1, opcode, &[fixture.source.part(0, 8)], (region.addr, region.key));
            fixture.expect_failure(
                "by the region",
                denied,
                WC_REM_ACCESS_ERR,
                ResponderEffect::QpFails(ACCESS_ERR),
            );

            let config = QpConfig { access: lacking & !L, ..QpConfig::default() };
            let fixture = ConnectionFixture::new(place, &config);
            let denied = request(1, opcode, &[fixture.source.part(0, 8)], fixture.to(0));
            fixture.expect_failure(
                "by the queue pair",
                denied,
                WC_REM_INV_REQ_ERR,
                ResponderEffect::QpFails(REQ_ERR),
            );
            if opcode != WR_ATOMIC_FETCH_AND_ADD {
                // Without data, too, where no key is checked.
                let fixture = ConnectionFixture::new(place, &config);
                let denied = request(1, opcode, &[], fixture.to(0));
                fixture.expect_failure(
                    "without data",
                    denied,
                    WC_REM_INV_REQ_ERR,
                    ResponderEffect::QpFails(REQ_ERR),
                );
            }

            // The minimum of access rights suffices.
            let config = QpConfig { access: enough & !L, ..QpConfig::default() };
            let mut fixture = ConnectionFixture::new(place, &config);
            let region = fixture.b.register_as(Kind::Anonymous, LEN, 0, enough);
            fixture.a.post(request(1, opcode, &[fixture.source.part(0, 8)], (region.addr, region.key)));
            assert_eq!(fixture.a.sent(1)[0].status, WC_SUCCESS);
        }
    }
}

#[test]
fn memory_of_another_protection_domain() {
    for place in Placement::BOTH {
        for opcode in [WR_RDMA_WRITE, WR_RDMA_READ] {
            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let region = fixture.b.try_register(Kind::Anonymous, LEN, 0, 15, true).expect("registered");
            let foreign = request(1, opcode, &[fixture.source.part(0, 8)], (region.addr, region.key));
            fixture.expect_failure(
                "remote",
                foreign,
                WC_REM_ACCESS_ERR,
                ResponderEffect::QpFails(ACCESS_ERR),
            );

            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let own = fixture.a.try_register(Kind::Anonymous, LEN, 0, 15, true).expect("registered");
            let foreign = request(1, opcode, &[own.part(0, 8)], fixture.to(0));
            fixture.expect_failure("local", foreign, WC_LOC_PROT_ERR, ResponderEffect::Unaffected);
        }
    }
}

#[test]
fn local_memory_that_is_not_there() {
    for place in Placement::BOTH {
        for opcode in [WR_SEND, WR_RDMA_WRITE, WR_RDMA_READ] {
            let fixture = ConnectionFixture::new(place, &QpConfig::default());
            let (addr, len, key) = fixture.source.part(0, 8);
            let wrong = request(1, opcode, &[(addr, len, key ^ 1)], fixture.to(0));
            fixture.expect_failure("wrong key", wrong, WC_LOC_PROT_ERR, ResponderEffect::Unaffected);

            let fixture = ConnectionFixture::new(place, &QpConfig::default());
            let wrong = request(1, opcode, &[fixture.source.part(LEN - 7, 8)], fixture.to(0));
            fixture.expect_failure("bounds", wrong, WC_LOC_PROT_ERR, ResponderEffect::Unaffected);

            let fixture = ConnectionFixture::new(place, &QpConfig::default());
            let wrong = request(1, opcode, &[(u64::MAX - 3, 8, fixture.source.key)], fixture.to(0));
            fixture.expect_failure("wraps", wrong, WC_LOC_PROT_ERR, ResponderEffect::Unaffected);

            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let gone = fixture.a.register(Kind::Anonymous, 64, 0);
            fixture.a.deregister(&gone);
            let wrong = request(1, opcode, &[gone.part(0, 8)], fixture.to(0));
            fixture.expect_failure("deregistered", wrong, WC_LOC_PROT_ERR, ResponderEffect::Unaffected);
        }
        for opcode in [WR_RDMA_READ, WR_ATOMIC_FETCH_AND_ADD] {
            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let fixed = fixture.a.register_as(Kind::Anonymous, 64, 0, 0);
            let wrong = request(1, opcode, &[fixed.part(0, 8)], fixture.to(0));
            fixture.expect_failure("not for writing", wrong, WC_LOC_PROT_ERR, ResponderEffect::Unaffected);
        }
    }
}

#[test]
fn a_message_longer_than_the_receive() {
    for place in Placement::BOTH {
        for (room, len) in [(8, 9), (0, 1), (4096, 4097)] {
            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let region = fixture.b.register(Kind::Anonymous, LEN, 0);
            fixture.b.recv(30, &[region.part(0, room / 2), region.part(room / 2, room - room / 2)]);
            fixture.b.recv(31, &[region.all()]);
            fixture.b.recv(32, &[region.all()]);
            let long = request(1, WR_SEND, &[fixture.source.part(0, len)], (0, 0));
            let effect = ResponderEffect::ReceiveFails(WC_LOC_LEN_ERR);
            fixture.expect_failure("too long", long, WC_REM_INV_REQ_ERR, effect);
        }
    }
}

#[test]
fn a_receive_whose_memory_is_wrong() {
    for place in Placement::BOTH {
        for case in ["wrong key", "bounds", "not for writing", "foreign", "deregistered"] {
            let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
            let b = &mut fixture.b;
            let good = b.register(Kind::Anonymous, 64, 0);
            let bad = match case {
                "wrong key" => (good.addr, 64, good.key ^ 1),
                "bounds" => good.part(1, 64),
                "not for writing" => b.register_as(Kind::Anonymous, 64, 0, 0).all(),
                "foreign" => b.try_register(Kind::Anonymous, 64, 0, 15, true).expect("registered").all(),
                _ => {
                    let gone = b.register(Kind::Anonymous, 64, 0);
                    b.deregister(&gone);
                    gone.all()
                }
            };
            b.recv(30, &[bad]);
            b.recv(31, &[good.all()]);
            b.recv(32, &[good.all()]);
            let message = request(1, WR_SEND, &[fixture.source.part(0, 64)], (0, 0));
            fixture.expect_failure(
                case,
                message,
                WC_REM_OP_ERR,
                ResponderEffect::ReceiveFails(WC_LOC_PROT_ERR),
            );
        }
    }
}

#[test]
fn memory_of_a_receive_that_the_message_does_not_reach_is_not_looked_at() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let (source, target) = (a.hold(&pattern(1, 64)), b.register(Kind::Anonymous, 64, 0));
        b.recv(1, &[(0, 0, 1), target.all(), (12, 99, 77)]);
        a.send(2, &[source.all()]);
        assert_eq!(b.received(1), [Completion::ok(1, WC_OP_RECV, 64)]);
        assert_eq!(a.sent(1), [Completion::ok(2, WC_OP_SEND, 0)]);
    }
}

#[test]
fn an_atomic_operation_on_no_word() {
    for place in Placement::BOTH {
        let fixture = ConnectionFixture::new(place, &QpConfig::default());
        let odd = request(1, WR_ATOMIC_FETCH_AND_ADD, &[fixture.source.part(0, 8)], fixture.to(4));
        fixture.expect_failure("alignment", odd, WC_REM_INV_REQ_ERR, ResponderEffect::QpFails(REQ_ERR));
        for len in [0, 7, 9] {
            let fixture = ConnectionFixture::new(place, &QpConfig::default());
            let odd = request(1, WR_ATOMIC_FETCH_AND_ADD, &[fixture.source.part(0, len)], fixture.to(0));
            fixture.expect_failure("length", odd, WC_LOC_LEN_ERR, ResponderEffect::Unaffected);
        }
    }
}

#[test]
fn earlier_requests_complete_before_a_failing_one() {
    for place in Placement::BOTH {
        let (mut a, mut b) = pair(place, &QpConfig::default());
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        // The first request waits for a receive; the others wait behind it.
        a.send(1, &[source.all()]);
        a.write(2, &[source.all()], (target.addr, target.key ^ 1));
        a.send(3, &[source.all()]);
        a.send(4, &[source.all()]);
        a.has_nothing(CqKind::Send);
        b.recv(5, &[target.all()]);
        let sent: Vec<_> = a.sent(4).iter().map(|c| (c.wr_id, c.status)).collect();
        let flushed = WC_WR_FLUSH_ERR;
        assert_eq!(sent, [(1, WC_SUCCESS), (2, WC_REM_ACCESS_ERR), (3, flushed), (4, flushed)]);
        assert_eq!(b.received(1), [Completion::ok(5, WC_OP_RECV, 64)]);
        wait_for("the other end's failure", || b.state() == QpState::Err);
        // Requests that are posted later are flushed, too.
        a.send(6, &[source.all()]);
        a.recv(7, &[source.all()]);
        b.send(8, &[target.all()]);
        b.recv(9, &[target.all()]);
        assert_eq!((a.sent(1)[0].wr_id, a.received(1)[0].wr_id), (6, 7));
        assert_eq!((b.sent(1)[0].wr_id, b.received(1)[0].wr_id), (8, 9));
    }
}

#[test]
fn retries_follow_attributes_that_change_in_rts_and_in_sqd() {
    let (mut a, mut b) = pair(Placement::SameProcess, &QpConfig::default());
    let source = a.hold(&[1; 64]);
    // Code 22: 20.48 ms.
    let changed = QpConfig { min_rnr_timer: 22, rnr_retry: 1, ..QpConfig::default() };
    let change = |end: &mut End, state, which| {
        end.actor().qp().modify(&attributes(&changed, state, 0), attr::STATE | which).expect("in table 91");
    };
    change(&mut b, QpState::Rts, attr::MIN_RNR_TIMER);
    change(&mut a, QpState::Sqd, 0);
    change(&mut a, QpState::Sqd, attr::RNR_RETRY);
    change(&mut a, QpState::Rts, 0);
    let start = Instant::now();
    a.send(1, &[source.all()]);
    assert_eq!(a.sent(1)[0].status, WC_RNR_RETRY_EXC_ERR);
    assert!(start.elapsed() >= Duration::from_micros(20_480), "{:?}", start.elapsed());
}

#[test]
fn a_request_to_a_queue_pair_in_error() {
    for place in Placement::BOTH {
        let mut fixture = ConnectionFixture::new(place, &QpConfig::default());
        fixture.b.recv(1, &[fixture.target.all()]);
        fixture.b.modify(QpState::Err, &QpConfig::default());
        assert_eq!(fixture.b.received(1)[0].status, WC_WR_FLUSH_ERR);
        fixture.a.send(2, &[fixture.source.all()]);
        assert_eq!(fixture.a.sent(1)[0].status, millstream_device::types::WC_RETRY_EXC_ERR);
    }
}
