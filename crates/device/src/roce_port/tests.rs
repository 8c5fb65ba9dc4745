//! Tests of the timers of queue pairs.

use millstream_quantity::Qpn;

use super::*;
use crate::context::Context;
use crate::cq::Cq;
use crate::gid;
use crate::gid_table::GidTable;
use crate::pd::Pd;
use crate::qp::state::{AddressVector, QpAttr, QpState, attr};
use crate::qp::{Qp, QpCap, QpType, RecvSource};

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
