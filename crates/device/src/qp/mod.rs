//! Queue pairs.
//!
//! [`state`] says which transitions exist and what they need; `send` takes requests, `batch` many at
//! once, `care` looks after those that wait; `transfer` carries them out in the peer's memory, `plain` the
//! simplest of them with the fewest instructions; `recv` keeps
//! receive requests; `keys` remembers checked memory keys.

mod batch;
mod datagram;
mod fast_path;
mod handler;
mod keys;
mod local_ops;
mod local_transport;
mod recv;
mod remote_memory;
mod send;
pub mod state;
mod target;
mod transfer;
mod transport;
mod wire_transport;
mod wr_list;
mod xrc;

use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use millstream_lockfree::{BiasedLock, OwnerId, barrier};
use millstream_shm::ArenaBlock;

use crate::adapter::{LocalAdapter, wait_until};
use crate::caps::{MAX_INLINE, MAX_QP_WR, MAX_RD_ATOMIC, MAX_SGE, MIN_INLINE};
use crate::context::Context;
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::event::{
    self, EVENT_COMM_EST, EVENT_QP_FATAL, EVENT_QP_LAST_WQE_REACHED, EVENT_SQ_DRAINED, ObjectHandle,
};
use crate::layout::{QPN_INDEX_BITS, QpEntry, qp_state, recv_slot_len};
use crate::multicast;
use crate::pd::Pd;
use crate::peer::Peer;
use crate::srq::Srq;
use crate::types::{
    ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, WC_OP_RECV, WC_WR_FLUSH_ERR,
};
use crate::xrc::{Xrcd, take_abandoned};
use millstream_lockfree::cqe::Cqe;

use crate::qp_table::PolledQp;
use crate::recv_queue::RecvQueue;
pub use batch::{SendOps, WrBatch, WrBatchLock};
use millstream_lockfree::retry_owner::RetryOwner;
use send::SendQueue;
use state::{QpAttr, QpState, attr};
use transport::{Transport, TransportPlan};
use wire_transport::TimerDeadline;
pub use wr_list::{SendWrList, SingleSgeWr};

/// Sizes of a queue pair; what is asked for is rounded up to what is given.
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
    fn granted(self) -> Result<Self> {
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
            max_inline_data: self.max_inline_data.max(MIN_INLINE),
            ..self
        })
    }
}

/// The transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum QpType {
    /// Reliable connection.
    Rc = 1,
    /// Unreliable connection.
    Uc = 2,
    /// Unreliable datagrams.
    Ud = 3,
    /// The sending end of an extended reliable connection (an XRC initiator).
    XrcSend = 4,
    /// The receiving end (an XRC target): it passes on to the shared receive queues of its domain.
    XrcRecv = 5,
}

impl QpType {
    /// Whether errors are told back, and end the queue pair.
    pub(crate) fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::XrcSend | Self::XrcRecv)
    }

    /// What takes the requests of this kind.
    fn receiver(self) -> Self {
        if self == Self::XrcSend { Self::XrcRecv } else { self }
    }

    fn has_receive_queue(self) -> bool {
        !matches!(self, Self::XrcSend | Self::XrcRecv)
    }
}

/// Where receive requests come from.
#[derive(Clone, Debug)]
pub enum RecvSource {
    /// A queue of the queue pair's own.
    Own,
    /// A shared one.
    Shared(Arc<Srq>),
    /// Those of an XRC domain, as senders name them.
    Domain(Arc<Xrcd>),
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    kind: QpType,
    srq: Option<Arc<Srq>>,
    domain: Option<Arc<Xrcd>>,
    qpn: u32,
    me: Weak<Self>,
    adapter: &'static LocalAdapter,
    pd: Arc<Pd>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    capacity: QpCap,
    /// Every send request completes visibly, whatever its flags say.
    signal_all: bool,
    entry: &'static QpEntry,
    rq_block: ArenaBlock,
    state: AtomicU8,
    attributes: Mutex<QpAttr>,
    send: BiasedLock<SendQueue>,
    retry_owner: RetryOwner,
    timer: TimerDeadline,
    /// The part that pollers of completion queues use.
    polled: PolledQp,
    /// Whether the end of its receives from a shared queue was reported.
    last_wqe_reported: AtomicBool,
    /// Whether the peer's first request was reported.
    contact_reported: AtomicBool,
    destroyed: AtomicBool,
    /// Whether its own datagrams to groups do not come back.
    no_loopback: AtomicBool,
    handle: Arc<ObjectHandle>,
    /// Further handles, see [`Qp::open`].
    others: Mutex<Vec<(Arc<Context>, Arc<ObjectHandle>)>>,
    /// ObjectHandles that were not closed.
    open: AtomicU32,
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
        let mut capacity = capacity.granted()?;
        let (srq, domain) = match receives {
            RecvSource::Own => (None, None),
            RecvSource::Shared(srq) => (Some(srq), None),
            RecvSource::Domain(domain) => (None, Some(domain)),
        };
        // An XRC target receives through a domain, and nothing else does. What belongs to a domain takes
        // from no other queue pair.
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
        let rq_block = adapter.arena.alloc(slots as usize * slot_len).ok_or(Errno::NOMEM)?;
        let qpn = adapter.qps.take_qpn().inspect_err(|_| adapter.arena.release(rq_block))?;
        let srq_slots = srq.as_ref().map(|srq| srq.slots().clone());
        let qp = Arc::new_cyclic(|me| Self {
            kind,
            srq,
            domain,
            qpn,
            me: me.clone(),
            adapter,
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            capacity,
            signal_all,
            entry: adapter.qp_entry(qpn),
            rq_block,
            state: AtomicU8::new(QpState::Reset as u8),
            attributes: Mutex::default(),
            send: BiasedLock::new(SendQueue::default()),
            retry_owner: RetryOwner::default(),
            timer: TimerDeadline::default(),
            polled: PolledQp::new(
                qpn,
                RecvQueue::new(adapter.arena.at(rq_block.offset), slots, slot_len, capacity.max_recv_wr),
                srq_slots,
            ),
            last_wqe_reported: AtomicBool::new(false),
            contact_reported: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            no_loopback: AtomicBool::new(false),
            handle: Arc::default(),
            others: Mutex::default(),
            open: AtomicU32::new(1),
        });
        pd.attach();
        send_cq.attach();
        recv_cq.attach();
        if let Some(srq) = &qp.srq {
            srq.attach();
        }
        if let Some(domain) = &qp.domain {
            domain.attach();
        }
        // SAFETY: the queue pair removes itself in `destroy`, at the latest when it is dropped.
        unsafe { adapter.qps.add(qp.me.clone(), &raw const qp.polled, recv_cq.arena_offset()) };
        qp.publish(slots);
        Ok(qp)
    }

    /// The receiving end of an extended reliable connection.
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
        entry.rq.store((self.rq_block.offset / 64) as u32, Ordering::Relaxed);
        entry.rq_mask.store(slots - 1, Ordering::Relaxed);
        entry.rq_sges.store(self.capacity.max_recv_sge, Ordering::Relaxed);
        entry.recv_cq.store(self.recv_cq.arena_offset(), Ordering::Relaxed);
        entry.kind.store(self.kind as u32, Ordering::Relaxed);
        entry.qkey.store(0, Ordering::Relaxed);
        entry.srq.store(self.srq.as_ref().map_or(0, |srq| srq.arena_offset()), Ordering::Relaxed);
        entry.domain.store(self.domain.as_ref().map_or(0, |domain| domain.id()), Ordering::Relaxed);
        entry.srq_taken.store(0, Ordering::Relaxed);
        entry.inflight.clear();
        entry.delivery.reset();
        entry.rnr_wait.store(0, Ordering::Relaxed);
        entry.rq_tail.store(0, Ordering::Relaxed);
        entry.rq_head.store(0, Ordering::Relaxed);
        entry.generation.fetch_add(1, Ordering::Relaxed);
        entry.qpn.store(self.qpn, Ordering::Release);
        self.entry_changed();
    }

    /// The queue pair number.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// The queue pair as its program knows it.
    #[must_use]
    pub fn handle(&self) -> &Arc<ObjectHandle> {
        &self.handle
    }

    /// Another handle of the receiving end of an extended reliable connection, with events of its own.
    ///
    /// # Errors
    /// EINVAL if there is no such queue pair in the domain; EOPNOTSUPP for one of another process.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the list of handles.
    pub fn open(domain: &Xrcd, qpn: u32) -> Result<(Arc<Self>, Arc<ObjectHandle>)> {
        let context = domain.context();
        if qpn >> QPN_INDEX_BITS != context.adapter.id.qpn_prefix {
            return Err(Errno::NOTSUP);
        }
        let qp = context.adapter.qps.get(qpn).ok_or(Errno::INVAL)?;
        let qp: Arc<dyn Any + Send + Sync> = qp;
        let qp: Arc<Self> = qp.downcast().map_err(|_| Errno::INVAL)?;
        if !qp.domain.as_ref().is_some_and(|own| own.is_same(domain)) {
            return Err(Errno::INVAL);
        }
        let handle = Arc::<ObjectHandle>::default();
        let mut others = qp.others.lock().expect("no panic under this lock");
        if qp.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n != 0).then_some(n + 1)).is_err() {
            return Err(Errno::INVAL);
        }
        others.push((context.clone(), handle.clone()));
        drop(others);
        Ok((qp, handle))
    }

    /// Ends a handle when its events are acknowledged; the last one takes the queue pair with it.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the list of handles.
    pub fn close(&self, handle: &Arc<ObjectHandle>) {
        let is_last = self.open.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last {
            self.destroy();
        }
        if Arc::ptr_eq(handle, &self.handle) {
            return self.pd.context.end_events(handle);
        }
        let found = {
            let mut others = self.others.lock().expect("no panic under this lock");
            let at = others.iter().position(|(_, other)| Arc::ptr_eq(other, handle));
            at.map(|at| others.swap_remove(at))
        };
        if let Some((context, handle)) = found {
            context.end_events(&handle);
        }
    }

    /// Joins a datagram queue pair to a multicast group. Twice is once.
    ///
    /// # Errors
    /// EINVAL for another kind of queue pair or an address that is no group's, ENOMEM when the process has
    /// too many attachments.
    pub fn attach(&self, group: [u8; 16]) -> Result<()> {
        if self.kind != QpType::Ud || !multicast::is_group(&group) {
            return Err(Errno::INVAL);
        }
        self.adapter.multicast.attach(self.adapter.port.port(), group, self.qpn)
    }

    /// Takes it out of a multicast group.
    ///
    /// # Errors
    /// EINVAL if it is not in it.
    pub fn detach(&self, group: [u8; 16]) -> Result<()> {
        self.adapter.multicast.detach(self.adapter.port.port(), group, self.qpn)
    }

    /// Whether it belongs to a multicast group. Verbs does not let such a queue pair be destroyed.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.kind == QpType::Ud && self.adapter.multicast.has(self.qpn)
    }

    /// From now on it does not get what it sends itself to its groups.
    pub fn block_loopback(&self) {
        self.no_loopback.store(true, Ordering::Release);
    }

    fn blocks_loopback(&self) -> bool {
        self.no_loopback.load(Ordering::Acquire)
    }

    /// Who takes leases for its requests: they are carried out under the send queue's lock, one at a time.
    #[inline]
    fn party(&self) -> OwnerId {
        OwnerId { pid: self.adapter.id.pid, number: self.qpn }
    }

    /// The transport service.
    #[must_use]
    pub fn kind(&self) -> QpType {
        self.kind
    }

    /// The shared receive queue, if it uses one.
    #[must_use]
    pub fn srq(&self) -> Option<&Arc<Srq>> {
        self.srq.as_ref()
    }

    /// Who sends to this queue pair: the process and its queue pair.
    pub(crate) fn sender(&self) -> Option<(Arc<Peer>, u32)> {
        let sender = self.entry.dest_qpn.load(Ordering::Acquire);
        Some((self.send.lock().transport.peer()?.clone(), sender))
    }

    /// The sizes that were given.
    #[must_use]
    pub fn capacity(&self) -> QpCap {
        self.capacity
    }

    /// Whether every send request completes visibly.
    #[must_use]
    pub fn signal_all(&self) -> bool {
        self.signal_all
    }

    /// The state now.
    #[inline]
    #[must_use]
    pub fn state(&self) -> QpState {
        QpState::from_raw(u32::from(self.state.load(Ordering::Acquire))).expect("only states are stored")
    }

    /// The attributes as they were set, with the state now.
    ///
    /// # Panics
    /// Only if another thread panicked while it changed them.
    #[must_use]
    pub fn attributes(&self) -> QpAttr {
        let attributes = self.attributes.lock().expect("no panic under this lock");
        QpAttr { state: self.state(), ..attributes.clone() }
    }

    /// Changes attributes and state; `mask` says which fields of `new` count.
    ///
    /// # Errors
    /// EINVAL for a transition that does not exist, attributes that are missing or not allowed in
    /// it, or values out of range.
    ///
    /// # Panics
    /// Only if another thread panicked while it changed them.
    pub fn modify(&self, new: &QpAttr, mask: u32) -> Result<()> {
        self.adapter.port.flush_acks();
        let mask = mask & !state::meant_for_the_other_end(self.kind);
        let mut attributes = self.attributes.lock().expect("no panic under this lock");
        let current = self.state();
        if mask & attr::CUR_STATE != 0 && new.cur_state != current {
            return Err(Errno::INVAL);
        }
        let next = if mask & attr::STATE != 0 { new.state } else { current };
        state::check_transition(self.kind, current, next, mask)?;
        let mut merged = attributes.clone();
        merged.merge(new, mask);
        merged.check(mask, MAX_RD_ATOMIC)?;
        let connects = next == QpState::Rtr && current == QpState::Init && self.kind != QpType::Ud;
        if connects && !merged.path.is_global {
            // Ethernet has no other addresses (RoCE annex A17.4.2).
            return Err(Errno::INVAL);
        }
        let reaches_rtr = next == QpState::Rtr && current == QpState::Init;
        let plan = if reaches_rtr { Some(TransportPlan::new(self, &merged)?) } else { None };
        *attributes = merged.clone();
        drop(attributes);
        self.apply(current, next, &merged, mask, plan);
        let notify = mask & attr::EN_SQD_ASYNC_NOTIFY != 0 && new.en_sqd_async_notify;
        if next == QpState::Sqd && current != QpState::Sqd && !self.drain_wire(notify) && notify {
            self.raise(EVENT_SQ_DRAINED);
        }
        Ok(())
    }

    fn apply(
        &self,
        current: QpState,
        next: QpState,
        attributes: &QpAttr,
        mask: u32,
        plan: Option<TransportPlan>,
    ) {
        let remote = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
        self.entry.access.store(attributes.access & remote, Ordering::Release);
        self.entry_changed();
        self.entry.qkey.store(attributes.qkey, Ordering::Release);
        self.entry.min_rnr_timer.store(u32::from(attributes.min_rnr_timer), Ordering::Release);
        match next {
            QpState::Reset => self.reset(),
            QpState::Err => self.fail(),
            _ => {
                let mut send = self.send.lock();
                if mask & attr::TIMEOUT != 0 || next == QpState::Rts {
                    send.ack_timeout = millstream_quantity::ack_timeout(attributes.timeout);
                    send.retries = u32::from(attributes.retry_cnt);
                    send.rnr_retries = u32::from(attributes.rnr_retry);
                }
                if let Some(plan) = plan {
                    send.transport = Transport::connect(self, attributes, plan);
                }
                if next == QpState::Rts {
                    send.transport.start(self, attributes);
                }
                self.set_state(next);
            }
        }
        if next == QpState::Rts && current == QpState::Sqd {
            self.resume();
        }
    }

    fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Ordering::Release);
        self.entry.state.store(state as u32, Ordering::SeqCst);
        self.entry_changed();
    }

    /// Makes initiators look anew at what they have checked.
    fn entry_changed(&self) {
        self.entry.revision.fetch_add(1, Ordering::SeqCst);
    }

    fn raise(&self, event: u32) {
        self.pd.context.raise(event, &self.handle);
        for (context, handle) in &*self.others.lock().expect("no panic under this lock") {
            context.raise(event, handle);
        }
    }

    /// Waits until a send request that is being carried out, perhaps by the device's own thread, is over.
    pub(crate) fn wait_for_own_requests(&self) {
        drop(self.send.lock());
    }

    /// Waits until the peer is not inside an operation that it began before.
    pub(crate) fn wait_until_untouched(&self, deadline: Instant) -> bool {
        if self.kind == QpType::Ud {
            // Many initiators, one at a time: the one inside holds the lease.
            let patience = deadline.saturating_duration_since(Instant::now());
            return self.entry.delivery.lock_within(self.adapter.id.pid, patience).is_some();
        }
        // Who calls may hold this or another send queue: only a look is taken at who the peer is.
        self.wait_while_busy(deadline, || self.send.try_lock().map(|send| send.transport.initiator()))
    }

    /// Waits until the peer is not inside an operation that it began before, or is gone. `peer` says who
    /// it is, if that can be seen now, and the queue pair that would tell.
    fn wait_while_busy(
        &self,
        deadline: Instant,
        mut peer: impl FnMut() -> Option<(Option<Arc<Peer>>, u32)>,
    ) -> bool {
        let Some(operation) = self.entry.inflight.current() else { return true };
        let mut known = None;
        let mut turns = 0;
        wait_until(deadline, || {
            turns += 1;
            if self.entry.inflight.has_ended(operation) {
                return true;
            }
            if turns < 1000 {
                return false;
            }
            if known.is_none() {
                known = match peer() {
                    None => None,
                    Some((Some(peer), _)) => Some(Ok(peer)),
                    // Whoever came to us, we had not come to him yet.
                    Some((None, dest_qpn)) => Some(self.adapter.peer_of(dest_qpn)),
                };
            }
            // This may be the thread that notices deaths.
            match &known {
                Some(Ok(peer)) => peer.has_exited(),
                Some(Err(error)) => error.kind() == io::ErrorKind::ConnectionRefused,
                None => false,
            }
        })
    }

    /// The same for one that began before the call; false if the peer stayed inside (a stopped process).
    fn quiesce(&self) -> bool {
        barrier::heavy();
        self.wait_until_untouched(Instant::now() + crate::ipc::TIMEOUT)
    }

    /// Goes to the error state and flushes both queues, in order.
    pub(crate) fn fail(&self) {
        {
            let mut send = self.send.lock();
            self.set_state(QpState::Err);
            send.flush(self);
        }
        self.quiesce();
        self.flush_receives();
    }

    /// The same for a queue pair one of whose completions was lost.
    pub(crate) fn fail_fatally(&self) {
        self.fail();
        self.raise(EVENT_QP_FATAL);
    }

    fn flush_receives(&self) {
        if self.srq.is_some() {
            // The shared queue goes on serving others.
            self.give_back_taken();
            if !self.last_wqe_reported.swap(true, Ordering::AcqRel) {
                self.raise(EVENT_QP_LAST_WQE_REACHED);
            }
            return;
        }
        let recv = self.polled.recv.lock();
        let head = self.entry.rq_head.load(Ordering::Acquire);
        // A head that the peer cannot honestly have reached is not believed.
        let (done, tail) = (recv.done(), recv.tail());
        let from = if tail.wrapping_sub(head) <= tail.wrapping_sub(done) { head } else { done };
        let mut sequence = from;
        // A queue that is full, or whose lease is not to be had, takes none of the rest either.
        while sequence != tail && self.recv_cq.push_shared(self.flushed_receive(sequence)) {
            sequence = sequence.wrapping_add(1);
        }
        self.entry.rq_head.store(tail, Ordering::Release);
    }

    /// What a dead peer took from the shared receive queue comes back.
    fn give_back_taken(&self) {
        if let Some(srq) = &self.srq {
            srq.reclaim(self.entry.srq_taken.swap(0, Ordering::AcqRel));
        }
    }

    /// The same for the sender of a datagram, while others go on sending.
    pub(crate) fn take_back_abandoned(&self) {
        if let (QpType::Ud, Some(srq)) = (self.kind, &self.srq) {
            srq.reclaim(take_abandoned(&self.entry.delivery, &self.entry.srq_taken, self.adapter.id.pid));
        }
    }

    /// Whether a request of its shared queue is in use here: taken by a peer, or completed and not yet polled.
    pub(crate) fn uses_request(&self, note: u32, slot: u32) -> bool {
        self.entry.srq_taken.load(Ordering::Acquire) == note
            || self.recv_cq.has_received(|cqe| cqe.qpn == self.qpn && cqe.sequence == slot)
    }

    /// Drops completions that nobody polled, this queue pair's own and its peer's. Runs `with_lock`
    /// before pollers are let in again.
    fn forget_completions(&self, with_lock: impl FnOnce()) {
        let (mut sends, receives) = Cq::lock_consumers(&self.send_cq, &self.recv_cq);
        sends.cancel(self.qpn);
        self.recv_cq.cancel_received(receives.as_deref().unwrap_or(&sends), self.qpn, |sequence| {
            if let Some(srq) = &self.srq {
                let _ = srq.slots().complete(sequence);
            }
        });
        with_lock();
    }

    fn flushed_receive(&self, sequence: u32) -> Cqe {
        Cqe {
            qpn: self.qpn,
            sequence,
            status: WC_WR_FLUSH_ERR as u16,
            opcode: WC_OP_RECV as u16,
            ..Cqe::default()
        }
    }

    fn reset(&self) {
        self.flush_ack();
        self.set_state(QpState::Reset);
        if self.quiesce() {
            // A peer that died inside will not withdraw, and the next one is not to be blamed for it.
            self.entry.inflight.clear();
        }
        let mut send = self.send.lock();
        *send = SendQueue::default();
        self.entry.dest_qpn.store(0, Ordering::Release);
        self.entry_changed();
        self.give_back_taken();
        self.forget_completions(|| self.polled.recv.clear(self.entry));
        self.polled.reclaim(0);
        self.last_wqe_reported.store(false, Ordering::Release);
        self.contact_reported.store(false, Ordering::Release);
        *self.attributes.lock().expect("no panic under this lock") = QpAttr::default();
    }

    /// The peer reports that an operation of its broke our rules. Only the first report counts.
    pub(crate) fn fault_from_peer(&self, from: u32, event: u32) {
        let believed = self.entry.dest_qpn.load(Ordering::Acquire) == from && event::may_be_reported(event);
        if !believed {
            return;
        }
        self.recv_cq.check_overrun();
        if matches!(self.state(), QpState::Reset | QpState::Err) {
            return;
        }
        self.fail();
        if event != event::NO_EVENT {
            self.raise(event);
        }
    }

    /// The peer says that its first request came while we were in RTR (11.6.3.3). Only the first
    /// report counts.
    pub(crate) fn contacted(&self, from: u32) {
        let believed = self.entry.dest_qpn.load(Ordering::Acquire) == from
            && matches!(self.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
        if believed && !self.contact_reported.swap(true, Ordering::AcqRel) {
            self.raise(EVENT_COMM_EST);
        }
    }

    /// A datagram found the completion queue full.
    pub(crate) fn completion_lost(&self) {
        self.recv_cq.check_overrun();
        if self.recv_cq.has_overrun() && !matches!(self.state(), QpState::Reset | QpState::Err) {
            self.fail_fatally();
        }
    }

    /// Requests to a dead process end now.
    pub(crate) fn peer_died(&self, peer: &Arc<Peer>) {
        let waits = {
            let send = self.send.lock();
            send.transport.peer().is_some_and(|p| Arc::ptr_eq(p, peer)) && send.has_pending()
        };
        if waits {
            self.retry_now();
        }
    }

    /// Ends the queue pair's life. When this returns, no peer is inside its queues, its completions
    /// that were not polled are gone, and all events that were fetched are acknowledged. A second call
    /// does nothing.
    pub fn destroy(&self) {
        if self.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.kind == QpType::Ud {
            self.adapter.multicast.detach_all(self.adapter.port.port(), self.qpn);
        }
        // The peer waits for the acknowledgement of what the program may have seen already.
        self.flush_ack();
        self.entry.qpn.store(0, Ordering::SeqCst);
        self.set_state(QpState::Reset);
        self.adapter.mrs.unbind_all_of(self.qpn);
        self.quiesce();
        *self.send.lock() = SendQueue::default();
        self.give_back_taken();
        self.forget_completions(|| self.adapter.qps.remove(self.qpn));
        if let Some(srq) = &self.srq {
            srq.detach();
        }
        if let Some(domain) = &self.domain {
            domain.detach();
        }
        self.pd.detach();
        self.send_cq.detach();
        self.recv_cq.detach();
        self.pd.context.end_events(&self.handle);
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // Pollers know it by its address.
        self.destroy();
        self.adapter.arena.release(self.rq_block);
    }
}
