//! The process's queue pairs, as pollers and the device's threads find them.
//!
//! Queue pairs register themselves. Pollers see [`QpWorkQueues`], a part of the queue pair, without an indirect call. The
//! threads see [`QpOps`], whose methods run rarely. So nothing below the queue pair depends on its type.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use millstream_link::Origin;
use millstream_shm::random_u64;

use crate::caps::MAX_QP;
use crate::errno::{Errno, Result};
use crate::layout::QPN_INDEX_BITS;
use crate::peer::Peer;
use crate::recv_queue::{Received, RecvQueue};
use crate::srq_wqes::SrqWqes;
use crate::tasks::PendingRequests;

/// A packet and its origin.
pub(crate) type Packet<'a> = (Origin, &'a [u8]);

/// The part of a queue pair that polling a completion queue needs.
#[derive(Debug)]
pub(crate) struct QpWorkQueues {
    qpn: u32,
    /// Send requests that the application has reclaimed by polling, ever.
    reclaimed: AtomicU32,
    pub(crate) recv: RecvQueue,
    srq: Option<Arc<SrqWqes>>,
}

impl QpWorkQueues {
    pub(crate) fn new(qpn: u32, recv: RecvQueue, srq: Option<Arc<SrqWqes>>) -> Self {
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
    fn qpn(&self) -> u32;

    /// A peer's request broke a rule of this queue pair, when the entry had this revision.
    fn qp_error(&self, from: u32, event: u32, revision: u32);
    /// A completion of this queue pair was lost.
    fn qp_fatal(&self);
    /// The shared receive queue fell below its limit.
    fn srq_limit(&self);
    /// A peer's first request found this queue pair in RTR, when the entry had this revision.
    fn comm_est(&self, from: u32, revision: u32);
    /// A datagram found the completion queue full.
    fn cq_overrun(&self);
    /// The sender of a datagram exited with a receive request taken.
    fn recv_abandoned(&self);
    /// Retries pending requests now.
    fn retry_now(&self);
    /// A process has exited.
    fn peer_lost(&self, peer: &Arc<Peer>);

    /// Waits until the send request that is being executed, perhaps by a thread of the device, is complete.
    fn wait_for_own_requests(&self);
    /// Waits for the end of an operation that the peer had in flight at the call; false at the deadline.
    fn wait_for_inflight_op(&self, deadline: Instant) -> bool;

    /// Whether this queue pair takes receive requests from the queue.
    fn uses_srq(&self, srq: &SrqWqes) -> bool;
    /// Whether the taken receive request that `record` names is in use here.
    fn uses_request(&self, record: u32, slot: u32) -> bool;
    /// The process that sends to this queue pair, and its queue pair.
    fn sender(&self) -> Option<(Arc<Peer>, u32)>;

    /// Packets for this queue pair have arrived. `now` is in nanoseconds.
    fn packets_arrived(&self, packets: &[Packet<'_>], now: u64);
    /// Handles the timers that expired before `now`; when the next one expires, nanoseconds.
    fn expire_timers(&self, now: u64) -> Option<u64>;
    /// Sends the acknowledgement that waits for a request to carry it.
    fn flush_acks(&self);
}

/// A table of queue pairs. All copies are the same table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpTable {
    /// The slots by index; pointers are valid while registered, see [`QpTable::remove`].
    polled: &'static [PolledSlot],
    registry: &'static Registry,
}

#[derive(Debug)]
struct Registry {
    qpn_prefix: u32,
    handlers: Mutex<HashMap<u32, Weak<dyn QpOps>>>,
    /// Free indices, in random order. A released index is reused as late as possible: its former peers may not have
    /// noticed.
    free: Mutex<VecDeque<u32>>,
}

#[derive(Debug, Default)]
struct PolledSlot {
    qp: AtomicPtr<QpWorkQueues>,
    /// Offset of its receive completion queue in the arena; zero before `qp` is set and after it is cleared.
    recv_cq: AtomicU32,
}

impl QpTable {
    /// An empty table for the process with this prefix. It is never freed.
    pub(crate) fn leak(qpn_prefix: u32) -> Self {
        let polled: Vec<_> = (0..MAX_QP).map(|_| PolledSlot::default()).collect();
        let free = Mutex::new(shuffled(MAX_QP as u32));
        let registry = Registry { qpn_prefix, handlers: Mutex::default(), free };
        Self { polled: polled.leak(), registry: Box::leak(Box::new(registry)) }
    }

    /// Takes a free queue pair number; [`QpTable::remove`] releases it.
    ///
    /// # Errors
    /// ENOMEM if none is free.
    pub(crate) fn take_qpn(&self) -> Result<u32> {
        let index = self.registry.free.lock().expect("no panic under this lock").pop_front();
        index.map(|index| self.registry.qpn_prefix << QPN_INDEX_BITS | index).ok_or(Errno::NOMEM)
    }

    /// Registers a queue pair whose receives complete in the queue at `recv_cq`.
    ///
    /// # Safety
    /// `polled` is valid until [`QpTable::remove`].
    pub(crate) unsafe fn add(&self, qp: Weak<dyn QpOps>, polled: *const QpWorkQueues, recv_cq: u32) {
        // SAFETY: the caller's promise.
        let index = unsafe { &*polled }.qpn % MAX_QP as u32;
        self.registry.handlers.lock().expect("no panic under this lock").insert(index, qp);
        let slot = &self.polled[index as usize];
        slot.qp.store(polled.cast_mut(), Ordering::Release);
        slot.recv_cq.store(recv_cq, Ordering::Release);
    }

    /// Removes a queue pair and releases its number. The caller holds the consumer locks of both its completion
    /// queues, so that no poller uses it.
    pub(crate) fn remove(&self, qpn: u32) {
        let index = qpn % MAX_QP as u32;
        let slot = &self.polled[index as usize];
        slot.recv_cq.store(0, Ordering::Release);
        slot.qp.store(std::ptr::null_mut(), Ordering::Release);
        self.registry.handlers.lock().expect("no panic under this lock").remove(&index);
        self.registry.free.lock().expect("no panic under this lock").push_back(index);
    }

    /// The queue pair `qpn`, for a poller that holds the lock of its send completion queue.
    #[inline]
    pub(crate) fn sender_for_poller(&self, qpn: u32) -> Option<&QpWorkQueues> {
        let pointer = self.polled[qpn as usize % MAX_QP].qp.load(Ordering::Acquire);
        // SAFETY: registered pointers are valid; removal needs the lock that the caller holds.
        let qp = unsafe { pointer.as_ref() }?;
        (qp.qpn == qpn).then_some(qp)
    }

    /// The queue pair `qpn`, for a poller that holds the lock of the completion queue at `recv_cq`. The
    /// number comes from shared memory: it may name a queue pair that completes elsewhere and can be removed
    /// at any time. So the completion queue is compared before the pointer is used.
    #[inline]
    pub(crate) fn receiver_for_poller(&self, qpn: u32, recv_cq: u32) -> Option<&QpWorkQueues> {
        let slot = &self.polled[qpn as usize % MAX_QP];
        if slot.recv_cq.load(Ordering::Acquire) != recv_cq {
            return None;
        }
        // SAFETY: registered, and as just checked its removal needs the lock that the caller holds.
        let qp = unsafe { slot.qp.load(Ordering::Acquire).as_ref() }?;
        (qp.qpn == qpn).then_some(qp)
    }

    /// The queue pair `qpn`.
    pub(crate) fn get(&self, qpn: u32) -> Option<Arc<dyn QpOps>> {
        let index = qpn % MAX_QP as u32;
        let qp = self.registry.handlers.lock().expect("no panic under this lock").get(&index).cloned();
        // Outside the lock: this may be the last reference.
        qp?.upgrade().filter(|qp| qp.qpn() == qpn)
    }

    /// All queue pairs.
    pub(crate) fn all(&self) -> Vec<Arc<dyn QpOps>> {
        let handlers = self.registry.handlers.lock().expect("no panic under this lock");
        handlers.values().filter_map(Weak::upgrade).collect()
    }
}

/// The numbers below `n` in random order (Fisher and Yates).
pub(crate) fn shuffled(n: u32) -> VecDeque<u32> {
    let mut numbers: VecDeque<u32> = (0..n).collect();
    for i in (1..n as usize).rev() {
        numbers.swap(i, random_u64() as usize % (i + 1));
    }
    numbers
}
