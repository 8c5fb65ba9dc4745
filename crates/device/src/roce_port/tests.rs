//! Tests of the timers of queue pairs.

use std::sync::mpsc::{Sender, channel};

use millstream_quantity::Qpn;

use super::*;
use crate::context::Context;
use crate::cq::Cq;
use crate::gid;
use crate::gid_table::GidTable;
use crate::pd::Pd;
use crate::peer::Peer;
use crate::qp::state::{AddressVector, QpAttr, QpState, attr};
use crate::qp::{Qp, QpCap, QpType, RecvSource};
use crate::srq_wqes::SrqWqes;
use crate::tasks::PendingRequests;

/// Modifies a queue pair from INIT to RTR, connected to an address for documentation (RFC 5737), which no host has.
fn connect(qp: &Qp) {
    let dgid = std::net::Ipv4Addr::new(192, 0, 2, 1).to_ipv6_mapped().octets();
    let is_ipv4 =
        |entry: &gid::GidEntry| entry.raw == std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
    let sgid_index = GidTable::current().index_of(is_ipv4).expect("a loopback interface") as u8;
    let rtr = QpAttr {
        state: QpState::Rtr,
        path_mtu: 1,
        dest_qpn: Qpn::new(0x12_3456),
        path: AddressVector { is_global: true, dgid, sgid_index, port: 1, ..AddressVector::default() },
        ..QpAttr::default()
    };
    let needs = attr::AV
        | attr::PATH_MTU
        | attr::DEST_QPN
        | attr::RQ_PSN
        | attr::MAX_DEST_RD_ATOMIC
        | attr::MIN_RNR_TIMER;
    qp.modify(&rtr, attr::STATE | needs).expect("the peer is not asked");
}

#[test]
fn a_queue_pair_that_connects_again_has_one_timer() {
    let context = Context::open().expect("the device opens");
    let cq = Cq::new(&context, 4, None).expect("a queue");
    let capacity = QpCap { max_send_wr: 1, max_recv_wr: 1, ..QpCap::default() };
    let qp =
        Qp::new(&Pd::new(&context), &cq, &cq, capacity, true, QpType::Rc, RecvSource::Own).expect("room");
    let init = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
    let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    for _ in 0..100 {
        qp.modify(&init, attr::STATE | attr::PORT | attr::PKEY_INDEX | attr::ACCESS_FLAGS).expect("allowed");
        connect(&qp);
        qp.modify(&reset, attr::STATE).expect("allowed in each state");
    }
    let timed = context.adapter.port.timed.lock().expect("no panic under this lock").clone();
    let own: Vec<_> =
        timed.iter().filter_map(Weak::upgrade).filter(|other| other.qpn() == qp.qpn()).collect();
    assert_eq!(own.len(), 1);
}

/// A queue pair that has only a timer. Its other operations do nothing.
#[derive(Debug)]
struct TimedStub {
    timer: Deadline,
    /// The time that the work of an expired timer takes.
    work: Duration,
    expired: Sender<std::thread::ThreadId>,
}

impl PendingRequests for TimedStub {
    fn retry(&self) -> Option<Duration> {
        None
    }
    fn retry_for_poller(&self) -> bool {
        false
    }
}

impl QpOps for TimedStub {
    fn expire_timers(&self, now: u64) -> Option<u64> {
        let due = self.timer.get()?;
        if due > now {
            return Some(due);
        }
        self.timer.clear();
        std::thread::sleep(self.work);
        let _ = self.expired.send(std::thread::current().id());
        None
    }

    fn qpn(&self) -> Qpn {
        Qpn::default()
    }
    fn qp_error(&self, _: Qpn, _: u32, _: u32) {}
    fn qp_fatal(&self) {}
    fn srq_limit(&self) {}
    fn comm_est(&self, _: Qpn, _: u32) {}
    fn cq_overrun(&self) {}
    fn recv_abandoned(&self) {}
    fn retry_now(&self) {}
    fn request_move(&self) {}
    fn recover_locks(&self) {}
    fn peer_lost(&self, _: &Arc<Peer>) {}
    fn wait_for_own_requests(&self, _: Instant) -> bool {
        true
    }
    fn wait_for_inflight_op(&self, _: Instant) -> bool {
        true
    }
    fn uses_srq(&self, _: &SrqWqes) -> bool {
        false
    }
    fn uses_request(&self, _: u32, _: u32) -> bool {
        false
    }
    fn sender(&self) -> Option<(Arc<Peer>, Qpn)> {
        None
    }
    fn packets_arrived(&self, _: &[Packet<'_>], _: u64) {}
    fn flush_acks(&self) {}
    fn try_flush_acks(&self) -> bool {
        true
    }
}

/// The thread goes to sleep while a poller works on an expired timer, when the next expiry is not known.
#[test]
fn the_thread_expires_a_timer_that_a_slow_poller_has_seen() {
    const WORK: u64 = 3_000_000_000;
    let context = Context::open().expect("the device opens");
    let port = &context.adapter.port;
    port.open().expect("the port is free or shared");
    let (sender, expired) = channel();
    let now = port.now();
    let stub = |due, work| {
        let timer = Deadline::default();
        // Known to nobody yet.
        let _ = timer.set(due, &NextExpiry::default());
        let stub: Arc<dyn QpOps> = Arc::new(TimedStub { timer, work, expired: sender.clone() });
        port.add_timed(Arc::downgrade(&stub));
        stub
    };
    let slow = stub(now, Duration::from_nanos(WORK));
    // The thread wakes up for this one, and finds that the poller expires the timers.
    port.set_timer(&Deadline::default(), now + WORK / 2);
    let next = stub(now + 2 * WORK, Duration::ZERO);
    port.expire_timers();
    let poller = std::thread::current().id();
    assert_eq!(expired.recv(), Ok(poller));
    let thread = expired.recv_timeout(Duration::from_secs(20));
    assert!(thread.is_ok_and(|thread| thread != poller), "{thread:?}");
    drop((slow, next));
}
