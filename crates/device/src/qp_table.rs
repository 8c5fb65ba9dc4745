//! The process's queue pairs, as pollers and the device's threads find them.
//!
//! Queue pairs register themselves. Pollers see [`QpWorkQueues`], a part of the queue pair, without an indirect call. The
//! threads see [`QpOps`], whose methods run rarely. So nothing below the queue pair depends on its type.

use std::any::Any;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use millstream_link::PacketInfo;
use millstream_quantity::Qpn;

use crate::caps::MAX_QP;
use crate::errno::Result;
use crate::layout;
use crate::peer::Peer;
use crate::recv_queue::{Received, RecvQueue};
use crate::slot_table::SlotTable;
use crate::srq_wqes::SrqWqes;
use crate::tasks::PendingRequests;

/// A packet and its source.
pub(crate) type Packet<'a> = (PacketInfo, &'a [u8]);

/// The part of a queue pair that polling a completion queue needs.
#[derive(Debug)]
pub(crate) struct QpWorkQueues {
    qpn: Qpn,
    /// Send requests that the application has reclaimed by polling, ever.
    reclaimed: AtomicU32,
    pub(crate) recv: RecvQueue,
    srq: Option<Arc<SrqWqes>>,
}

impl QpWorkQueues {
    pub(crate) fn new(qpn: Qpn, recv: RecvQueue, srq: Option<Arc<SrqWqes>>) -> Self {
        Self { qpn, reclaimed: AtomicU32::new(0), recv, srq }
    }

    /// Send requests that the application has reclaimed by polling, ever.
    #[inline]
    pub(crate) fn reclaimed(&self) -> u32 {
        self.reclaimed.load(Ordering::Acquire)
    }

    /// Counts send requests up to `posted` as reclaimed.
    #[inline]
    pub(crate) fn reclaim(&self, posted: u32) {
        self.reclaimed.store(posted, Ordering::Release);
    }

    /// The receive request that a completion with this sequence number is for, once.
    #[inline]
    pub(crate) fn complete_receive(&self, sequence: u32) -> Option<Received> {
        match &self.srq {
            None => self.recv.complete(sequence),
            Some(srq) => srq.complete(sequence),
        }
    }
}

/// The operations of a queue pair that the device's threads and the owners of memory use.
pub(crate) trait QpOps: Any + PendingRequests + Debug + Send + Sync {
    fn qpn(&self) -> Qpn;

    /// A peer's request broke a rule of this queue pair, when the entry had this revision.
    fn qp_error(&self, from: Qpn, event: u32, revision: u32);
    /// A completion of this queue pair was lost.
    fn qp_fatal(&self);
    /// The shared receive queue fell below its limit.
    fn srq_limit(&self);
    /// A peer's first request found this queue pair in RTR, when the entry had this revision.
    fn comm_est(&self, from: Qpn, revision: u32);
    /// A datagram found the completion queue full.
    fn cq_overrun(&self);
    /// The sender of a datagram exited with a receive request taken.
    fn recv_abandoned(&self);
    /// Retries pending requests now.
    fn retry_now(&self);
    /// Lets pollers of the completion queues move the pages of regions.
    fn request_move(&self);
    /// Frees the locks of this queue pair and its queues whose holders are gone.
    fn recover_locks(&self);
    /// A process has exited.
    fn peer_lost(&self, peer: &Arc<Peer>);

    /// Waits until the send request that is being executed, perhaps by a thread of the device, is complete; false at the
    /// deadline.
    fn wait_for_own_requests(&self, deadline: Instant) -> bool;
    /// Waits for the end of an operation that the peer had in flight at the call; false at the deadline.
    fn wait_for_inflight_op(&self, deadline: Instant) -> bool;

    /// Whether this queue pair takes receive requests from the queue.
    fn uses_srq(&self, srq: &SrqWqes) -> bool;
    /// Whether the taken receive request that `record` names is in use here.
    fn uses_request(&self, record: u32, slot: u32) -> bool;
    /// The process that sends to this queue pair, and its queue pair.
    fn sender(&self) -> Option<(Arc<Peer>, Qpn)>;

    /// Packets for this queue pair have arrived. `now` is in nanoseconds.
    fn packets_arrived(&self, packets: &[Packet<'_>], now: u64);
    /// Handles the timers that expired before `now`; when the next one expires, nanoseconds.
    fn expire_timers(&self, now: u64) -> Option<u64>;
    /// Sends the acknowledgement that waits for a request to carry it.
    fn flush_acks(&self);
    /// Sends that acknowledgement, and nothing else; false if the send queue is in use.
    fn try_flush_acks(&self) -> bool;
}

/// A table of queue pairs. All copies are the same table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpTable {
    qpn_prefix: u32,
    table: SlotTable<QpWorkQueues, dyn QpOps>,
}

/// The index of a queue pair in the table of its process.
#[inline]
fn index(qpn: Qpn) -> u32 {
    layout::qpn_index(qpn) as u32
}

impl QpTable {
    /// An empty table for the process with this prefix. It is never freed.
    pub(crate) fn leak(qpn_prefix: u32) -> Self {
        Self { qpn_prefix, table: SlotTable::leak(MAX_QP) }
    }

    /// Takes a free queue pair number; [`QpTable::remove`] releases it.
    ///
    /// # Errors
    /// ENOMEM if none is free.
    pub(crate) fn take_qpn(&self) -> Result<Qpn> {
        Ok(layout::qpn(self.qpn_prefix, self.table.take_index()?))
    }

    /// Registers a queue pair whose receives complete in the queue at `recv_cq`.
    ///
    /// # Safety
    /// `work_queues` is valid until [`QpTable::remove`].
    pub(crate) unsafe fn add(
        &self,
        qpn: Qpn,
        qp: Weak<dyn QpOps>,
        work_queues: *const QpWorkQueues,
        recv_cq: u32,
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.table.add(index(qpn), qp, work_queues, recv_cq) };
    }

    /// Removes a queue pair and releases its number. The caller holds the consumer locks of both its completion
    /// queues, so that no poller uses it.
    pub(crate) fn remove(&self, qpn: Qpn) {
        self.table.remove(index(qpn));
        self.table.release_index(index(qpn));
    }

    /// The queue pair `qpn`, for a poller that holds the lock of its send completion queue.
    #[inline]
    pub(crate) fn sender_for_poller(&self, qpn: Qpn) -> Option<&QpWorkQueues> {
        // SAFETY: the caller holds the lock.
        let qp = unsafe { self.table.locked_by_caller(index(qpn)) }?;
        (qp.qpn == qpn).then_some(qp)
    }

    /// The queue pair `qpn`, for a poller that holds the lock of the completion queue at `recv_cq`; see
    /// [`SlotTable::for_poller`].
    #[inline]
    pub(crate) fn receiver_for_poller(&self, qpn: Qpn, recv_cq: u32) -> Option<&QpWorkQueues> {
        let qp = self.table.for_poller(index(qpn), recv_cq)?;
        (qp.qpn == qpn).then_some(qp)
    }

    /// The queue pair `qpn`.
    pub(crate) fn get(&self, qpn: Qpn) -> Option<Arc<dyn QpOps>> {
        self.table.get(index(qpn)).filter(|qp| qp.qpn() == qpn)
    }

    /// All queue pairs.
    pub(crate) fn all(&self) -> Vec<Arc<dyn QpOps>> {
        self.table.all()
    }
}
