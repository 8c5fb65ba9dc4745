//! Queue pairs (IBTA volume 1, 10.3).
//!
//! - States: [`state`] (transition table), `transitions` (what a transition does), `quiesce` (waiting for operations in
//!   flight), `handles`, `ops` (what the device's threads call).
//! - Posting: `send` (send queue, retries), `wr_list` (lists of requests), `batch` (`ibv_wr_*`), `recv`.
//! - Execution: `transport` (chosen at RTR), `local_transport`, `wire_transport`, `datagram`, `xrc`, `local_ops`.
//! - Data path of the local transport: `fast_path`, `transfer` (general path), `remote_memory` and `keys` (checks and
//!   copies), `remote_qp` (the peer's queue pair).

mod batch;
mod datagram;
mod fast_path;
mod handles;
mod keys;
mod local_ops;
mod local_transport;
mod ops;
mod quiesce;
mod recv;
mod remote_memory;
mod remote_qp;
mod send;
pub mod state;
#[cfg(test)]
mod tests;
mod transfer;
mod transitions;
mod transport;
mod wire_transport;
mod wr_list;
mod xrc;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use millstream_lockfree::OwnerId;
use millstream_quantity::Qpn;

use crate::adapter::LocalAdapter;
use crate::caps::{MAX_INLINE, MAX_QP_WR, MAX_SGE, granted_inline};
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::layout::{QpEntry, qp_state, recv_slot_len};
use crate::multicast;
use crate::pd::Pd;
use crate::qp_table::QpWorkQueues;
use crate::recv_queue::RecvQueue;
use crate::srq::Srq;
use crate::xrc::Xrcd;

pub use batch::{SendOps, WrBatch, WrBatchLock};
use handles::QpHandles;
use recv::RecvSide;
use send::SendSide;
use transitions::QpStates;
pub use wr_list::{SendWrList, SingleSgeWr};

/// Sizes of a queue pair's queues, as in `struct ibv_qp_cap`. The device may grant more than requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCap {
    /// Send requests that may be outstanding.
    pub max_send_wr: u32,
    /// Receive requests that may be outstanding.
    pub max_recv_wr: u32,
    /// Elements in a send request.
    pub max_send_sge: u32,
    /// Elements in a receive request.
    pub max_recv_sge: u32,
    /// Inline bytes in a send request.
    pub max_inline_data: u32,
}

impl QpCap {
    fn granted(self, kind: QpType) -> Result<Self> {
        let fits = self.max_send_wr <= MAX_QP_WR
            && self.max_recv_wr <= MAX_QP_WR
            && self.max_send_sge <= MAX_SGE
            && self.max_recv_sge <= MAX_SGE
            && self.max_inline_data <= MAX_INLINE;
        if !fits {
            return Err(Errno::INVAL);
        }
        Ok(Self {
            max_send_sge: self.max_send_sge.max(1),
            max_recv_sge: self.max_recv_sge.max(1),
            max_inline_data: granted_inline(self.max_inline_data, kind != QpType::Ud),
            ..self
        })
    }
}

/// The type of a queue pair: its transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum QpType {
    /// Reliable connection.
    Rc = 1,
    /// Unreliable connection.
    Uc = 2,
    /// Unreliable datagrams.
    Ud = 3,
    /// XRC initiator: the sending end of an extended reliable connection.
    XrcSend = 4,
    /// XRC target: the receiving end, for the shared receive queues of its domain.
    XrcRecv = 5,
}

impl QpType {
    /// Whether errors are acknowledged to the initiator, and fail the queue pair.
    pub(crate) fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::XrcSend | Self::XrcRecv)
    }

    /// The type that receives the requests of this one.
    fn receiver(self) -> Self {
        if self == Self::XrcSend { Self::XrcRecv } else { self }
    }

    fn has_receive_queue(self) -> bool {
        !matches!(self, Self::XrcSend | Self::XrcRecv)
    }
}

/// The source of a queue pair's receives.
#[derive(Clone, Debug)]
pub enum RecvSource {
    /// Its own receive queue.
    Own,
    /// A shared receive queue.
    Shared(Arc<Srq>),
    /// The shared receive queues of an XRC domain; each request names one.
    Domain(Arc<Xrcd>),
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    kind: QpType,
    qpn: Qpn,
    me: Weak<Self>,
    adapter: &'static LocalAdapter,
    pd: Arc<Pd>,
    capacity: QpCap,
    /// The shared entry that peers read.
    entry: &'static QpEntry,
    states: QpStates,
    send: SendSide,
    recv: RecvSide,
    /// The part that pollers of completion queues use.
    work_queues: QpWorkQueues,
    handles: QpHandles,
    /// Whether its own multicast datagrams are not delivered to it.
    no_loopback: AtomicBool,
}

impl Qp {
    /// Makes a queue pair in state RESET.
    ///
    /// # Errors
    /// EINVAL for sizes beyond the device's, ENOMEM when the process has no number or memory left.
    pub fn new(
        pd: &Arc<Pd>,
        send_cq: &Arc<Cq>,
        recv_cq: &Arc<Cq>,
        capacity: QpCap,
        signal_all: bool,
        kind: QpType,
        receives: RecvSource,
    ) -> Result<Arc<Self>> {
        let mut capacity = capacity.granted(kind)?;
        let (srq, domain) = match receives {
            RecvSource::Own => (None, None),
            RecvSource::Shared(srq) => (Some(srq), None),
            RecvSource::Domain(domain) => (None, Some(domain)),
        };
        // Only an XRC target receives through a domain. A queue of a domain serves no other queue pair.
        let of_domain = srq.as_ref().is_some_and(|srq| srq.domain().is_some());
        if (kind == QpType::XrcRecv) != domain.is_some() || of_domain {
            return Err(Errno::INVAL);
        }
        if srq.is_some() || !kind.has_receive_queue() {
            (capacity.max_recv_wr, capacity.max_recv_sge) = (0, 1);
        }
        if kind == QpType::XrcRecv {
            capacity = QpCap { max_send_wr: 0, max_inline_data: 0, ..capacity };
        }
        let adapter = pd.context.adapter;
        adapter.port.flush_acks();
        let slots = capacity.max_recv_wr.max(1).next_power_of_two();
        let slot_len = recv_slot_len(capacity.max_recv_sge);
        let block = adapter.arena.alloc(slots as usize * slot_len).ok_or(Errno::NOMEM)?;
        let qpn = adapter.qps.take_qpn().inspect_err(|_| adapter.arena.release(block))?;
        let srq_wqes = srq.as_ref().map(|srq| srq.slots().clone());
        let qp = Arc::new_cyclic(|me| Self {
            kind,
            qpn,
            me: me.clone(),
            adapter,
            pd: pd.clone(),
            capacity,
            entry: adapter.qp_entry(qpn),
            states: QpStates::default(),
            send: SendSide::new(send_cq.clone(), signal_all),
            recv: RecvSide {
                cq: recv_cq.clone(),
                srq,
                domain,
                block,
                flushes: AtomicBool::new(false),
                last_wqe_reported: AtomicBool::new(false),
            },
            work_queues: QpWorkQueues::new(
                qpn,
                RecvQueue::new(adapter.arena.at(block.offset), slots, slot_len, capacity.max_recv_wr),
                srq_wqes,
            ),
            handles: QpHandles::default(),
            no_loopback: AtomicBool::new(false),
        });
        pd.attach();
        send_cq.attach();
        recv_cq.attach();
        if let Some(srq) = &qp.recv.srq {
            srq.attach();
        }
        if let Some(domain) = &qp.recv.domain {
            domain.attach();
        }
        // SAFETY: the queue pair removes itself in `destroy`, at the latest when it is dropped.
        unsafe { adapter.qps.add(qpn, qp.me.clone(), &raw const qp.work_queues, recv_cq.arena_offset()) };
        qp.publish(slots);
        Ok(qp)
    }

    /// Makes an XRC target in state RESET.
    ///
    /// # Errors
    /// ENOMEM when the process has no number or memory left.
    pub fn for_domain(domain: &Arc<Xrcd>) -> Result<Arc<Self>> {
        let (pd, cq) = domain.substitutes();
        let receives = RecvSource::Domain(domain.clone());
        Self::new(pd, cq, cq, QpCap::default(), false, QpType::XrcRecv, receives)
    }

    fn publish(&self, slots: u32) {
        let entry = self.entry;
        entry.state.store(qp_state::RESET, Ordering::Relaxed);
        entry.dest_qpn.store(0, Ordering::Relaxed);
        entry.access.store(0, Ordering::Relaxed);
        entry.pd.store(self.pd.id, Ordering::Relaxed);
        entry.rq.store((self.recv.block.offset / 64) as u32, Ordering::Relaxed);
        entry.rq_mask.store(slots - 1, Ordering::Relaxed);
        entry.rq_sges.store(self.capacity.max_recv_sge, Ordering::Relaxed);
        entry.recv_cq.store(self.recv.cq.arena_offset(), Ordering::Relaxed);
        entry.kind.store(self.kind as u32, Ordering::Relaxed);
        entry.qkey.store(0, Ordering::Relaxed);
        entry.srq.store(self.recv.srq.as_ref().map_or(0, |srq| srq.arena_offset()), Ordering::Relaxed);
        entry.domain.store(self.recv.domain.as_ref().map_or(0, |domain| domain.id()), Ordering::Relaxed);
        entry.srq_taken.store(0, Ordering::Relaxed);
        entry.inflight.clear();
        entry.delivery.reset();
        entry.rnr_wait.store(0, Ordering::Relaxed);
        entry.rq_tail.store(0, Ordering::Relaxed);
        entry.rq_head.store(0, Ordering::Relaxed);
        entry.rq_seen_tail.store(0, Ordering::Relaxed);
        entry.generation.fetch_add(1, Ordering::Relaxed);
        entry.qpn.store(self.qpn.get(), Ordering::Release);
        self.entry_changed();
        self.begin_connection();
    }

    /// The queue pair number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// Attaches a UD queue pair to a multicast group. Attaching it again changes nothing.
    ///
    /// # Errors
    /// EINVAL for another type of queue pair or an address that is no multicast group's; ENOMEM when the
    /// process has too many attachments.
    pub fn attach(&self, group: [u8; 16]) -> Result<()> {
        if self.kind != QpType::Ud || !multicast::is_group(&group) {
            return Err(Errno::INVAL);
        }
        let attached = self.adapter.multicast.attach(|| self.adapter.port.port(), group, self.qpn);
        // The thread watches for changes of the host's addresses from now on.
        self.adapter.tasks.wake();
        attached
    }

    /// Detaches the queue pair from a multicast group.
    ///
    /// # Errors
    /// EINVAL if it is not attached to the group.
    pub fn detach(&self, group: [u8; 16]) -> Result<()> {
        self.adapter.multicast.detach(self.adapter.port.port(), group, self.qpn)
    }

    /// Whether the queue pair is attached to a multicast group. Verbs refuses to destroy such a queue pair.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.kind == QpType::Ud && self.adapter.multicast.has(self.qpn)
    }

    /// Stops the queue pair from receiving its own multicast datagrams.
    pub fn block_loopback(&self) {
        self.no_loopback.store(true, Ordering::Release);
    }

    fn blocks_loopback(&self) -> bool {
        self.no_loopback.load(Ordering::Acquire)
    }

    /// The owner of the locks that its requests take. The send queue's lock serializes them.
    #[inline]
    fn owner_id(&self) -> OwnerId {
        OwnerId { pid: self.adapter.id.pid, number: self.qpn.get() }
    }

    /// The type of the queue pair.
    #[must_use]
    pub fn kind(&self) -> QpType {
        self.kind
    }

    /// The granted sizes.
    #[must_use]
    pub fn capacity(&self) -> QpCap {
        self.capacity
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // Pollers hold its address.
        self.destroy();
        self.adapter.arena.release(self.recv.block);
    }
}
