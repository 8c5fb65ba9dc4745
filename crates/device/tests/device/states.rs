//! The state machine of a queue pair, as `modify` exposes it.

use std::time::Duration;

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::types::{
    WC_OP_RDMA_WRITE, WC_OP_SEND, WC_RETRY_EXC_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_SEND,
};
use millstream_device::{Errno, Qp};

use crate::support::{
    Command, Completion, CqKind, End, Kind, Placement, QpConfig, attributes, mask, pair, pattern, request,
};

/// `IBV_EVENT_SQ_DRAINED`
const SQ_DRAINED: u32 = 5;

fn open() -> End {
    let mut end = End::new(Placement::SameProcess);
    end.open(&QpConfig::default());
    end
}

/// Takes a queue pair from RESET to a state by the usual transitions.
fn walk(qp: &Qp, to: QpState) {
    for state in [QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd] {
        let dest = qp.qpn();
        qp.modify(&attributes(&QpConfig::default(), state, dest.get()), mask(state)).expect("the usual way");
        if state == to {
            return;
        }
    }
}

#[test]
fn a_queue_pair_that_is_reset_alone_has_no_connection_with_its_peer() {
    for place in Placement::BOTH {
        for reset_end_sends_first in [true, false] {
            reset_alone(place, reset_end_sends_first);
        }
    }
}

fn reset_alone(place: Placement, reset_end_sends_first: bool) {
    let case = format!("{place:?}, the reset end sends first: {reset_end_sends_first}");
    // 4.2 ms, with one retry.
    let config = QpConfig { timeout: 10, retry_cnt: 1, ..QpConfig::default() };
    let (mut a, mut b) = pair(place, &config);
    let (to_a, to_b) = (a.number(), b.number());
    let (of_a, of_b) = (a.hold(&pattern(1, 64)), b.hold(&pattern(2, 64)));
    let (at_a, at_b) = (a.register(Kind::Anonymous, 64, 0), b.register(Kind::Anonymous, 64, 0));
    // Requests in both directions, then `b` has a new connection, of which `a` does not know.
    a.recv(1, &[at_a.all()]);
    b.recv(1, &[at_b.all()]);
    a.send(1, &[of_a.all()]);
    b.send(1, &[of_b.all()]);
    for end in [&mut a, &mut b] {
        assert_eq!([end.sent(1)[0].status, end.received(1)[0].status], [WC_SUCCESS; 2], "{case}");
    }
    b.modify(QpState::Reset, &config);
    b.connect_to(to_a, &config);
    a.store(&at_a, 0, &[0; 64]);
    b.store(&at_b, 0, &[0; 64]);
    a.recv(2, &[at_a.all()]);
    b.recv(2, &[at_b.all()]);

    // Neither takes data of the other's connection, and both get an error.
    for reset_end in [reset_end_sends_first, !reset_end_sends_first] {
        let (end, source, target) = if reset_end { (&mut b, &of_b, &at_a) } else { (&mut a, &of_a, &at_b) };
        end.send(2, &[source.all()]);
        end.write(3, &[source.all()], (target.addr, target.key));
        let ends: Vec<_> = end.sent(2).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(ends, [(2, WC_RETRY_EXC_ERR), (3, WC_WR_FLUSH_ERR)], "{case}");
        assert_eq!(end.state(), QpState::Err, "{case}");
    }
    assert_eq!([a.load(&at_a, 0, 64), b.load(&at_b, 0, 64)], [vec![0; 64], vec![0; 64]], "{case}");

    // Both are reset: a new connection.
    a.modify(QpState::Reset, &config);
    b.modify(QpState::Reset, &config);
    a.connect_to(to_b, &config);
    b.connect_to(to_a, &config);
    b.recv(4, &[at_b.all()]);
    a.send(4, &[of_a.all()]);
    assert_eq!((a.sent(1)[0].status, b.received(1)[0].wr_id), (WC_SUCCESS, 4), "{case}");
    assert_eq!(b.load(&at_b, 0, 64), pattern(1, 64), "{case}");
}

#[test]
fn a_request_before_the_peer_is_reset_waits_for_the_new_connection() {
    for place in Placement::BOTH {
        let config = QpConfig { timeout: 18, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &config);
        let (to_a, to_b) = (a.number(), b.number());
        let source = a.hold(&pattern(1, 64));
        let target = b.register(Kind::Anonymous, 64, 0);
        b.recv(1, &[target.all()]);
        a.send(1, &[source.all()]);
        assert_eq!((a.sent(1)[0].status, b.received(1)[0].status), (WC_SUCCESS, WC_SUCCESS), "{place:?}");
        b.store(&target, 0, &[0; 64]);
        b.recv(2, &[target.all()]);
        // `a` has its new connection and sends, while `b` has the old one.
        a.modify(QpState::Reset, &config);
        a.connect_to(to_b, &config);
        a.send(3, &[source.all()]);
        std::thread::sleep(Duration::from_millis(20));
        b.has_nothing(CqKind::Recv);
        assert_eq!(b.load(&target, 0, 64), [0; 64], "{place:?}");
        b.modify(QpState::Reset, &config);
        b.connect_to(to_a, &config);
        b.recv(4, &[target.all()]);
        assert_eq!((a.sent(1)[0].status, b.received(1)[0].wr_id), (WC_SUCCESS, 4), "{place:?}");
        assert_eq!(b.load(&target, 0, 64), pattern(1, 64), "{place:?}");
    }
}

#[test]
fn each_step_needs_exactly_its_attributes() {
    for to in [QpState::Init, QpState::Rtr, QpState::Rts] {
        let end = open();
        let qp = end.actor().qp();
        let from = match to {
            QpState::Init => QpState::Reset,
            QpState::Rtr => QpState::Init,
            _ => QpState::Rtr,
        };
        if from != QpState::Reset {
            walk(qp, from);
        }
        let all = attributes(&QpConfig::default(), to, qp.qpn().get());
        let needed = mask(to);
        for bit in (0..21).map(|i| 1 << i).filter(|bit| needed & bit != 0 && *bit != attr::STATE) {
            assert_eq!(qp.modify(&all, needed & !bit), Err(Errno::INVAL), "{to:?} without {bit:#x}");
            assert_eq!(qp.state(), from);
        }
        for foreign in [attr::QKEY, attr::EN_SQD_ASYNC_NOTIFY, 1 << 19] {
            assert_eq!(qp.modify(&all, needed | foreign), Err(Errno::INVAL), "{to:?} with {foreign:#x}");
            assert_eq!(qp.state(), from);
        }
        assert_eq!(qp.modify(&all, needed), Ok(()));
        assert_eq!(qp.state(), to);
    }
}

#[test]
fn only_transitions_of_the_specification_exist() {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd};
    const STATES: [QpState; 6] = [Reset, Init, Rtr, Rts, Sqd, Err];
    let ways = [
        (Reset, Init),
        (Init, Init),
        (Init, Rtr),
        (Rtr, Rts),
        (Rts, Rts),
        (Rts, Sqd),
        (Sqd, Sqd),
        (Sqd, Rts),
    ];
    for from in STATES {
        for to in STATES {
            let end = open();
            let qp = end.actor().qp();
            match from {
                Reset => {}
                Err => {
                    walk(qp, Init);
                    qp.modify(&attributes(&QpConfig::default(), Err, 0), attr::STATE).expect("to ERR");
                }
                other => walk(qp, other),
            }
            // The attributes that the usual transition to the state requires, or only the state.
            let masks = [mask(to), attr::STATE];
            let exists = to == Reset || (to == Err && from != Reset) || ways.contains(&(from, to));
            let went = masks
                .iter()
                .any(|mask| qp.modify(&attributes(&QpConfig::default(), to, qp.qpn().get()), *mask).is_ok());
            assert_eq!(went, exists, "{from:?} to {to:?}");
            assert_eq!(qp.state(), if exists { to } else { from });
        }
    }
}

#[test]
fn values_out_of_range_are_refused() {
    type Change = fn(&mut QpAttr);
    let init: [(&str, Change); 2] = [("port", |a| a.port = 2), ("pkey", |a| a.pkey_index = 1)];
    let rtr: [(&str, Change); 6] = [
        ("no mtu", |a| a.path_mtu = 0),
        ("mtu", |a| a.path_mtu = 6),
        ("reads", |a| a.max_dest_rd_atomic = 129),
        ("timer", |a| a.min_rnr_timer = 32),
        ("no route header", |a| a.path.is_global = false),
        ("path's port", |a| a.path.port = 2),
    ];
    let rts: [(&str, Change); 4] = [
        ("timeout", |a| a.timeout = 32),
        ("retries", |a| a.retry_cnt = 8),
        ("rnr retries", |a| a.rnr_retry = 8),
        ("reads", |a| a.max_rd_atomic = 129),
    ];
    let end = open();
    let qp = end.actor().qp();
    for (to, changes) in [(QpState::Init, &init[..]), (QpState::Rtr, &rtr[..]), (QpState::Rts, &rts[..])] {
        let good = attributes(&QpConfig::default(), to, qp.qpn().get());
        for (what, change) in changes {
            let mut bad = good.clone();
            change(&mut bad);
            assert_eq!(qp.modify(&bad, mask(to)), Err(Errno::INVAL), "{what}");
        }
        assert_eq!(qp.modify(&good, mask(to)), Ok(()));
    }
}

#[test]
fn the_state_that_the_caller_believes_in_is_compared() {
    let end = open();
    let qp = end.actor().qp();
    walk(qp, QpState::Rts);
    let mut change = attributes(&QpConfig::default(), QpState::Rts, 0);
    change.cur_state = QpState::Rtr;
    assert_eq!(qp.modify(&change, attr::STATE | attr::CUR_STATE), Err(Errno::INVAL));
    change.cur_state = QpState::Rts;
    assert_eq!(qp.modify(&change, attr::STATE | attr::CUR_STATE), Ok(()));
}

#[test]
fn attributes_read_back_as_they_were_set() {
    let end = open();
    let qp = end.actor().qp();
    walk(qp, QpState::Rts);
    let set = attributes(&QpConfig::default(), QpState::Rts, qp.qpn().get());
    let read = qp.attributes();
    assert_eq!(QpAttr { cur_state: set.cur_state, ..read }, set);
    qp.modify(&attributes(&QpConfig::default(), QpState::Reset, 0), attr::STATE).expect("to RESET");
    assert_eq!(qp.attributes(), QpAttr::default());
}

#[test]
fn posting_depends_on_the_qp_state() {
    let mut end = open();
    let region = end.register(Kind::Anonymous, 64, 0);
    let send = Command::Send(request(1, WR_SEND, &[region.all()], (0, 0)));
    let recv = Command::Recv { wr_id: 2, sges: vec![region.all()] };
    let config = QpConfig::default();
    for (state, sends, receives) in [
        (QpState::Reset, false, false),
        (QpState::Init, false, true),
        (QpState::Rtr, false, true),
        (QpState::Rts, true, true),
        (QpState::Sqd, true, true),
        (QpState::Err, true, true),
    ] {
        let me = end.actor().qp().qpn();
        match state {
            QpState::Reset => {}
            QpState::Rtr => {
                end.actor().qp().modify(&attributes(&config, state, me.get()), mask(state)).expect("RTR")
            }
            _ => end.modify(state, &config),
        }
        let expect = |ok: bool| if ok { Ok(()) } else { Err(libc::EINVAL) };
        assert_eq!(end.attempt(recv.clone()).map(drop), expect(receives), "receive in {state:?}");
        assert_eq!(end.attempt(send.clone()).map(drop), expect(sends), "send in {state:?}");
    }
}

#[test]
fn a_drained_queue_keeps_its_requests() {
    for place in Placement::BOTH {
        let config = QpConfig::default();
        let (mut a, mut b) = pair(place, &config);
        let source = a.hold(&pattern(1, 100));
        let target = b.register(Kind::Anonymous, 100, 0);
        a.modify(QpState::Sqd, &config);
        a.write(1, &[source.all()], (target.addr, target.key));
        a.has_nothing(CqKind::Send);
        assert_ne!(b.load(&target, 0, 100), pattern(1, 100));
        a.modify(QpState::Rts, &config);
        assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
        assert_eq!(b.load(&target, 0, 100), pattern(1, 100));
        // The queue pair still receives.
        let back = b.hold(&pattern(2, 100));
        a.modify(QpState::Sqd, &config);
        a.recv(2, &[source.all()]);
        b.send(3, &[back.all()]);
        assert_eq!(b.sent(1), [Completion::ok(3, WC_OP_SEND, 0)]);
        assert_eq!(a.received(1).len(), 1);
    }
}

#[test]
fn sq_drained_is_reported_on_request() {
    let mut end = open();
    walk(end.actor().qp(), QpState::Rts);
    let drain = attributes(&QpConfig::default(), QpState::Sqd, 0);
    let resume = attributes(&QpConfig::default(), QpState::Rts, 0);
    let qp = end.actor().qp().clone();
    qp.modify(&drain, attr::STATE).expect("to SQD");
    assert_eq!(end.async_event(Duration::from_millis(20)), None);
    qp.modify(&resume, attr::STATE).expect("to RTS");
    let asks = QpAttr { en_sqd_async_notify: true, ..drain };
    qp.modify(&asks, attr::STATE | attr::EN_SQD_ASYNC_NOTIFY).expect("to SQD");
    assert_eq!(end.async_event(Duration::from_secs(1)), Some(SQ_DRAINED));
    // A change within SQD raises no second SQ_DRAINED.
    qp.modify(&asks, attr::STATE | attr::PORT).expect("in SQD");
    assert_eq!(end.async_event(Duration::from_millis(20)), None);
}

#[test]
fn access_rights_change_while_the_queue_pair_runs() {
    for place in Placement::BOTH {
        let shut = QpConfig { access: 0, ..QpConfig::default() };
        let (mut a, mut b) = pair(place, &shut);
        let source = a.hold(&pattern(1, 100));
        let target = b.register(Kind::Anonymous, 100, 0);
        b.modify(QpState::Rts, &QpConfig::default());
        a.write(1, &[source.all()], (target.addr, target.key));
        assert_eq!(a.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    }
}
