//! Queue pairs in states that a test through the verbs reaches by chance or after hours: old queues, and operations in flight.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_quantity::Qkey;

use super::state::{AddressVector, QpAttr, QpState, attr};
use super::{Qp, QpCap, QpType, RecvSource};
use crate::adapter::wait_until;
use crate::context::Context;
use crate::cq::Cq;
use crate::errno::Errno;
use crate::gid::GidKind;
use crate::gid_table::GidTable;
use crate::mr::Mr;
use crate::pd::Pd;
use crate::send_wr::{SendWr, UdDestination};
use crate::srq::Srq;
use crate::types::{ACCESS_LOCAL_WRITE, SEND_INLINE, Sge, WC_SUCCESS, WC_WR_FLUSH_ERR, WR_SEND, Wc};

const LOOPBACK: [u8; 16] = std::net::Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets();
const QKEY: Qkey = Qkey::new(7);
/// Generous: the machine may be busy.
const LONG: Duration = Duration::from_secs(20);

/// Queue pairs of this process, with one completion queue for all SENDs and one for all receives.
struct Fixture {
    pd: Arc<Pd>,
    sends: Arc<Cq>,
    receives: Arc<Cq>,
}

impl Fixture {
    fn new() -> Self {
        let context = Context::open().unwrap();
        let cq = || Cq::new(&context, 64, None).unwrap();
        Self { pd: Pd::new(&context), sends: cq(), receives: cq() }
    }

    fn queue_pair(&self, kind: QpType, receives: RecvSource) -> Arc<Qp> {
        let capacity =
            QpCap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 };
        Qp::new(&self.pd, &self.sends, &self.receives, capacity, true, kind, receives).unwrap()
    }

    /// Two connected queue pairs.
    fn pair(&self, receives: RecvSource) -> [Arc<Qp>; 2] {
        let ends = [self.queue_pair(QpType::Rc, RecvSource::Own), self.queue_pair(QpType::Rc, receives)];
        connect(&ends[0], &ends[1]);
        connect(&ends[1], &ends[0]);
        ends
    }

    fn datagrams(&self) -> Arc<Qp> {
        let qp = self.queue_pair(QpType::Ud, RecvSource::Own);
        let attributes = |state| QpAttr { state, port: 1, qkey: QKEY, ..QpAttr::default() };
        let masks = [
            attr::STATE | attr::PKEY_INDEX | attr::PORT | attr::QKEY,
            attr::STATE,
            attr::STATE | attr::SQ_PSN,
        ];
        for (state, mask) in [QpState::Init, QpState::Rtr, QpState::Rts].into_iter().zip(masks) {
            qp.modify(&attributes(state), mask).unwrap();
        }
        qp
    }

    /// The next completion of `cq`.
    fn next(cq: &Cq) -> Wc {
        let mut out = [Wc::default()];
        assert!(wait_until(Instant::now() + LONG, || cq.poll(&mut out).unwrap() == 1), "a completion");
        out[0]
    }

    /// Whether `cq` has no completion.
    fn is_empty(cq: &Cq) -> bool {
        cq.poll(&mut [Wc::default()]).unwrap() == 0
    }
}

fn connect(qp: &Qp, to: &Qp) {
    let is_loopback = |entry: &crate::gid::GidEntry| entry.raw == LOOPBACK && entry.kind == GidKind::RoceV2;
    let sgid_index = GidTable::current().index_of(is_loopback).expect("a loopback interface") as u8;
    let path =
        AddressVector { is_global: true, dgid: LOOPBACK, sgid_index, port: 1, ..AddressVector::default() };
    let attributes = QpAttr {
        port: 1,
        path_mtu: 5,
        dest_qpn: to.qpn(),
        max_dest_rd_atomic: 1,
        max_rd_atomic: 1,
        rnr_retry: 7,
        path,
        ..QpAttr::default()
    };
    let rtr = attr::AV
        | attr::PATH_MTU
        | attr::DEST_QPN
        | attr::RQ_PSN
        | attr::MAX_DEST_RD_ATOMIC
        | attr::MIN_RNR_TIMER;
    let rts = attr::TIMEOUT | attr::RETRY_CNT | attr::RNR_RETRY | attr::SQ_PSN | attr::MAX_QP_RD_ATOMIC;
    for (state, mask) in [
        (QpState::Init, attr::PKEY_INDEX | attr::PORT | attr::ACCESS_FLAGS),
        (QpState::Rtr, rtr),
        (QpState::Rts, rts),
    ] {
        qp.modify(&QpAttr { state, ..attributes.clone() }, attr::STATE | mask).unwrap();
    }
}

/// Sends an inline message.
fn send(qp: &Qp, to: Option<UdDestination>) {
    let message = [1u8; 8];
    let sges = [Sge { addr: message.as_ptr() as u64, length: message.len() as u32, lkey: 0 }];
    let wr = SendWr { opcode: WR_SEND, flags: SEND_INLINE, sges: &sges, to, ..SendWr::default() };
    qp.post_send(&wr).unwrap();
}

/// Memory for receives.
struct Room(#[expect(dead_code, reason = "freed after the region")] Box<[u8; 4096]>, Mr);

impl Room {
    fn new(pd: &Arc<Pd>) -> (Self, Sge) {
        let memory = Box::new([0u8; 4096]);
        let addr = memory.as_ptr() as u64;
        let mr = Mr::register(pd, addr, 4096, addr, ACCESS_LOCAL_WRITE).unwrap();
        let sge = Sge { addr, length: 4096, lkey: mr.key() };
        (Self(memory, mr), sge)
    }
}

/// Numbers of receives that a queue has had: a queue's numbers wrap around after four billion.
const AGES: [u32; 6] = [0, 1, 1 << 31, (1 << 31) + 5, u32::MAX - 1, u32::MAX];

#[test]
fn a_connection_to_an_old_shared_queue_takes_posted_receives_only() {
    for age in AGES {
        let fixture = Fixture::new();
        let (_room, sge) = Room::new(&fixture.pd);
        let srq = Srq::new(&fixture.pd, 4, 1).unwrap();
        srq.age(age);
        let [near, far] = fixture.pair(RecvSource::Shared(srq.clone()));
        send(&near, None);
        assert!(Fixture::is_empty(&fixture.sends), "no receive is posted, after {age} of them");
        for wr_id in 0..10 {
            srq.post(wr_id, &[sge]).unwrap();
            if wr_id != 0 {
                send(&near, None);
            }
            assert_eq!(Fixture::next(&fixture.sends).status, WC_SUCCESS);
            let received = Fixture::next(&fixture.receives);
            assert_eq!((received.status, received.wr_id), (WC_SUCCESS, wr_id), "after {age} of them");
        }
        near.destroy();
        far.destroy();
        srq.destroy().unwrap();
    }
}

#[test]
fn an_idle_sender_of_datagrams_takes_posted_receives_only() {
    for age in AGES {
        let fixture = Fixture::new();
        let (_room, sge) = Room::new(&fixture.pd);
        let [near, far] = [(); 2].map(|()| fixture.datagrams());
        let to = UdDestination { on_this_host: true, qpn: far.qpn(), qkey: QKEY, grh: [0; 40] };
        far.post_recv(1, &[sge]).unwrap();
        send(&near, Some(to));
        assert_eq!(Fixture::next(&fixture.receives).wr_id, 1);
        // Other senders have taken many since.
        let now = age.wrapping_add(1);
        for word in [&far.entry.rq_tail, &far.entry.rq_seen_tail, &far.entry.rq_head] {
            word.store(now, Ordering::Release);
        }
        send(&near, Some(to));
        assert_eq!(
            far.entry.rq_head.load(Ordering::Acquire),
            now,
            "no receive is posted, after {now} of them"
        );
        near.destroy();
        far.destroy();
    }
}

#[test]
fn a_receive_posted_in_the_error_state_does_not_flush_those_that_a_peer_uses() {
    for kind in [QpType::Rc, QpType::Ud] {
        let fixture = Fixture::new();
        let (_room, sge) = Room::new(&fixture.pd);
        let [_near, far] = match kind {
            QpType::Ud => [(); 2].map(|()| fixture.datagrams()),
            _ => fixture.pair(RecvSource::Own),
        };
        far.post_recv(1, &[sge]).unwrap();
        // An initiator in the middle of a copy, as the queue pair's entry shows it.
        let mut announced = far.entry.inflight.last();
        let lease = match kind {
            QpType::Ud => far.entry.delivery.lock(far.adapter.id.pid),
            _ => {
                far.entry.inflight.begin(&mut announced, false);
                None
            }
        };
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| {
                far.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, attr::STATE).unwrap();
            });
            assert!(wait_until(Instant::now() + LONG, || far.state() == QpState::Err));
            far.post_recv(2, &[sge]).unwrap();
            // The failing thread waits for two seconds at most. If this one was suspended for as long, nothing is shown.
            let empty = Fixture::is_empty(&fixture.receives);
            assert!(empty || failing.is_finished(), "the initiator uses the first receive");
            far.entry.inflight.end(&mut announced);
            drop(lease);
            failing.join().unwrap();
        });
        far.post_recv(3, &[sge]).unwrap();
        for wr_id in 1..=3 {
            let flushed = Fixture::next(&fixture.receives);
            assert_eq!((flushed.status, flushed.wr_id), (WC_WR_FLUSH_ERR, wr_id), "{kind:?}");
        }
        // After a reset, receives wait again.
        far.modify(&QpAttr { state: QpState::Reset, ..QpAttr::default() }, attr::STATE).unwrap();
        far.destroy();
    }
}

#[test]
fn deregistration_waits_two_seconds_for_a_request_of_its_process() {
    let fixture = Fixture::new();
    let (mut room, _) = Room::new(&fixture.pd);
    let [near, _far] = fixture.pair(RecvSource::Own);
    let (locked, is_locked) = std::sync::mpsc::channel();
    let (finish, finished) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let near = &near;
        scope.spawn(move || {
            let _request = near.send.queue.lock();
            locked.send(()).unwrap();
            let _ = finished.recv();
        });
        is_locked.recv().unwrap();
        assert_eq!(room.1.deregister(), Err(Errno::BUSY));
        drop(finish);
    });
    room.1.deregister().unwrap();
}
