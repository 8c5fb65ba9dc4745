//! The interface of a queue pair for the device's threads, completion queues and owners of memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_quantity::Qpn;

use super::Qp;
use crate::peer::Peer;
use crate::qp_table::{Packet, QpOps};
use crate::srq_wqes::SrqWqes;
use crate::tasks::PendingRequests;

impl PendingRequests for Qp {
    fn retry(&self) -> Option<Duration> {
        self.retry()
    }

    fn retry_for_poller(&self) -> bool {
        self.retry_for_poller()
    }
}

impl QpOps for Qp {
    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn qp_error(&self, from: Qpn, event: u32, revision: u32) {
        self.fault_from_peer(from, event, revision);
    }

    fn qp_fatal(&self) {
        self.handle_lost_completion();
    }

    fn srq_limit(&self) {
        if let Some(srq) = &self.recv.srq {
            srq.limit_reached();
        }
    }

    fn comm_est(&self, from: Qpn, revision: u32) {
        self.contacted(from, revision);
    }

    fn cq_overrun(&self) {
        self.completion_lost();
    }

    fn recv_abandoned(&self) {
        self.take_back_abandoned();
    }

    fn retry_now(&self) {
        self.retry_now();
    }

    fn request_move(&self) {
        self.send.cq.request_move();
        self.recv.cq.request_move();
    }

    fn recover_locks(&self) {
        self.entry.delivery.recover();
        self.send.cq.recover_lock();
        self.recv.cq.recover_lock();
        if let Some(srq) = &self.recv.srq {
            srq.recover_locks();
        }
    }

    fn peer_lost(&self, peer: &Arc<Peer>) {
        self.peer_died(peer);
    }

    fn wait_for_own_requests(&self, deadline: Instant) -> bool {
        self.wait_for_own_requests(deadline)
    }

    fn wait_for_inflight_op(&self, deadline: Instant) -> bool {
        self.wait_for_inflight_op(deadline)
    }

    fn uses_srq(&self, srq: &SrqWqes) -> bool {
        self.recv.srq.as_ref().is_some_and(|own| std::ptr::eq(Arc::as_ptr(own.slots()), srq))
    }

    fn uses_request(&self, record: u32, slot: u32) -> bool {
        self.uses_request(record, slot)
    }

    fn sender(&self) -> Option<(Arc<Peer>, Qpn)> {
        self.sender()
    }

    fn packets_arrived(&self, packets: &[Packet<'_>], now: u64) {
        self.handle_packets(packets, now);
    }

    fn expire_timers(&self, now: u64) -> Option<u64> {
        self.handle_timer(now)
    }

    fn flush_acks(&self) {
        self.flush_ack();
    }

    fn try_flush_acks(&self) -> bool {
        self.try_flush_ack()
    }
}
