//! State transitions of a queue pair and their effects (IBTA volume 1, 10.3.1).
//!
//! [`state`](super::state) has the table of transitions.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

use millstream_lockfree::CancelGuard;
use millstream_quantity::Qpn;

use super::send::SendQueue;
use super::state::{self, QpAttr, QpState, attr};
use super::transport::{Transport, TransportPlan};
use super::{Qp, QpType};
use crate::caps::MAX_RD_ATOMIC;
use crate::errno::{Errno, Result};
use crate::event::{self, EVENT_COMM_EST, EVENT_QP_FATAL, EVENT_SQ_DRAINED};
use crate::types::{ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE};

/// A queue pair's state and attributes.
#[derive(Debug)]
pub(super) struct QpStates {
    /// A [`QpState`].
    current: AtomicU8,
    attributes: Mutex<QpAttr>,
    /// Whether the peer's first request was reported.
    pub(super) contact_reported: AtomicBool,
    destroyed: AtomicBool,
    /// The revision of the entry at the last reset. It identifies the connection: later revisions are of this one.
    last_reset: AtomicU32,
    /// Held during a reset and during the handling of a failure, so that a failure of the connection before the reset
    /// does not affect the next one.
    failing: Mutex<()>,
}

impl Default for QpStates {
    fn default() -> Self {
        Self {
            current: AtomicU8::new(QpState::Reset as u8),
            attributes: Mutex::default(),
            contact_reported: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            last_reset: AtomicU32::new(0),
            failing: Mutex::default(),
        }
    }
}

impl QpStates {
    /// Whether the state is RTS, for the holder of the send queue.
    #[inline(always)]
    pub(super) fn is_rts(&self) -> bool {
        self.current.load(Ordering::Relaxed) == QpState::Rts as u8
    }

    fn failing(&self) -> MutexGuard<'_, ()> {
        self.failing.lock().expect("no panic under this lock")
    }
}

/// Identifies the connection that a queue pair has until it is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionId(u32);

impl ConnectionId {
    /// The revision of the entry at the reset before the connection.
    pub(super) fn revision(self) -> u32 {
        self.0
    }

    /// Whether the entry had this revision during the connection.
    fn includes(self, revision: u32) -> bool {
        (revision.wrapping_sub(self.0) as i32) > 0
    }
}

impl Qp {
    /// The current state.
    #[inline]
    #[must_use]
    pub fn state(&self) -> QpState {
        QpState::from_raw(u32::from(self.states.current.load(Ordering::Acquire)))
            .expect("only states are stored")
    }

    /// The attributes that were set, with the current state.
    ///
    /// # Panics
    /// Only if another thread panicked while it changed them.
    #[must_use]
    pub fn attributes(&self) -> QpAttr {
        let attributes = self.states.attributes.lock().expect("no panic under this lock");
        QpAttr { state: self.state(), ..attributes.clone() }
    }

    /// Changes attributes and state. `mask` names the fields of `new` that are set.
    ///
    /// # Errors
    /// EINVAL for a transition that does not exist, attributes that are missing or not allowed in
    /// it, values out of range, or a path in SQD that needs another transport than the connection has: shared memory
    /// instead of packets, or the other way round.
    ///
    /// # Panics
    /// Only if another thread panicked while it changed them.
    pub fn modify(&self, new: &QpAttr, mask: u32) -> Result<()> {
        self.adapter.port.flush_acks();
        let mask = mask & !state::ignored_attributes(self.kind);
        if mask & attr::STATE != 0 && new.state == QpState::Err {
            // A request that the peer acknowledged before this call is not flushed.
            self.adapter.port.handle_arrived();
        }
        // A reset locks the attributes under the lock of the send queue.
        let by_packets = mask & attr::AV != 0 && self.send.queue.lock().transport.is_wire();
        let mut attributes = self.states.attributes.lock().expect("no panic under this lock");
        let current = self.state();
        if mask & attr::CUR_STATE != 0 && new.cur_state != current {
            return Err(Errno::INVAL);
        }
        let next = if mask & attr::STATE != 0 { new.state } else { current };
        state::check_transition(self.kind, current, next, mask)?;
        let mut merged = attributes.clone();
        merged.merge(new, mask);
        merged.check(mask, MAX_RD_ATOMIC)?;
        if mask & attr::AV != 0 && !merged.path.is_global {
            // Ethernet has no other addresses (RoCE annex A17.4.2).
            return Err(Errno::INVAL);
        }
        let reaches_rtr = next == QpState::Rtr && current == QpState::Init;
        let (mut plan, mut path) = (None, None);
        if reaches_rtr {
            plan = Some(TransportPlan::new(self, &merged)?);
        } else if mask & attr::AV != 0 {
            path = TransportPlan::new(self, &merged)?.path_of_same(by_packets)?;
        }
        *attributes = merged.clone();
        drop(attributes);
        self.apply(current, next, &merged, mask, plan)?;
        if !reaches_rtr && mask & QpAttr::OF_CONNECTION != 0 {
            self.modify_wire(&merged, path);
        }
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
    ) -> Result<()> {
        let remote = ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC;
        self.entry.access.store(attributes.access & remote, Ordering::Release);
        self.entry_changed();
        self.entry.qkey.store(attributes.qkey.get(), Ordering::Release);
        self.entry.min_rnr_timer.store(u32::from(attributes.min_rnr_timer), Ordering::Release);
        match next {
            QpState::Reset => self.reset(),
            QpState::Err => self.fail(),
            _ => {
                let mut send = self.send.queue.lock();
                // A request may have failed the queue pair meanwhile, under this lock.
                if self.state() != current {
                    return Err(Errno::INVAL);
                }
                if mask & QpAttr::OF_CONNECTION != 0 || next == QpState::Rts {
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
        Ok(())
    }

    pub(super) fn set_state(&self, state: QpState) {
        self.states.current.store(state as u8, Ordering::Release);
        self.entry.state.store(state as u32, Ordering::SeqCst);
        self.entry_changed();
    }

    /// Fails the send queue only (10.3.1.7), unless a completion was lost, which fails the queue pair.
    pub(super) fn fail_send_queue(&self) {
        if self.state() != QpState::Err {
            self.set_state(QpState::Sqe);
        }
    }

    /// Makes initiators repeat their checks of the entry.
    pub(super) fn entry_changed(&self) {
        self.entry.revision.fetch_add(1, Ordering::SeqCst);
    }

    /// The connection until the next reset. A holder of the send queue knows that its requests are of this one.
    pub(super) fn connection(&self) -> ConnectionId {
        ConnectionId(self.states.last_reset.load(Ordering::Acquire))
    }

    /// Begins a connection: earlier revisions of the entry are of earlier ones.
    pub(super) fn begin_connection(&self) {
        let revision = self.entry.revision.load(Ordering::Acquire);
        self.states.last_reset.store(revision, Ordering::Release);
        self.entry.connection.store(revision, Ordering::Release);
    }

    /// Moves to the error state and flushes both queues, in order.
    fn fail(&self) {
        let _failing = self.states.failing();
        self.fail_and_flush();
    }

    /// Handles a failure of this connection; false if the queue pair was reset since then.
    pub(super) fn fail_connection(&self, connection: ConnectionId) -> bool {
        let _uncancelled = CancelGuard::new();
        let _failing = self.states.failing();
        let current = self.connection() == connection;
        if current {
            self.fail_and_flush();
        }
        current
    }

    fn fail_and_flush(&self) {
        {
            let mut send = self.send.queue.lock();
            self.set_state(QpState::Err);
            send.flush(self);
        }
        self.quiesce();
        self.flush_receives();
    }

    fn fail_fatally(&self) {
        self.fail();
        self.raise(EVENT_QP_FATAL);
    }

    /// Fails the queue pair if it is in the error state because one of its completions was lost.
    pub(crate) fn handle_lost_completion(&self) {
        let connection = self.connection();
        if self.state() == QpState::Err && self.fail_connection(connection) {
            self.raise(EVENT_QP_FATAL);
        }
    }

    fn reset(&self) {
        self.flush_ack();
        let _failing = self.states.failing();
        self.set_state(QpState::Reset);
        if self.quiesce() {
            // A dead peer's announcement would be taken for the next peer's.
            self.entry.inflight.clear();
        }
        let mut send = self.send.queue.lock();
        self.clear_send_queue(&mut send);
        // A request that failed meanwhile stored ERR.
        self.set_state(QpState::Reset);
        self.entry.dest_qpn.store(0, Ordering::Release);
        self.entry_changed();
        self.begin_connection();
        self.drop_taken_recv();
        self.forget_completions(|| {
            let poster = self.work_queues.recv.lock();
            self.recv.flushes.store(false, Ordering::Relaxed);
            poster.clear(self.entry);
        });
        self.work_queues.reclaim(0);
        self.recv.last_wqe_reported.store(false, Ordering::Release);
        self.states.contact_reported.store(false, Ordering::Release);
        *self.states.attributes.lock().expect("no panic under this lock") = QpAttr::default();
    }

    /// Drops the requests and the transport, and with it the transport's timer.
    fn clear_send_queue(&self, send: &mut SendQueue) {
        *send = SendQueue::default();
        self.set_timer(None);
    }

    /// Handles the peer's report of a request that broke a rule of this queue pair. Only the first report counts.
    pub(crate) fn fault_from_peer(&self, from: Qpn, event: u32, revision: u32) {
        let connection = self.connection();
        let believed = self.entry.dest_qpn.load(Ordering::Acquire) == from.get()
            && event::may_be_reported(event)
            && connection.includes(revision);
        if !believed {
            return;
        }
        self.recv.cq.check_overrun();
        if matches!(self.state(), QpState::Reset | QpState::Err) {
            return;
        }
        if self.fail_connection(connection) && event != event::NO_EVENT {
            self.raise(event);
        }
    }

    /// Handles the peer's report of its first request to this queue pair in RTR (11.6.3.3). Only the first report
    /// counts.
    pub(crate) fn contacted(&self, from: Qpn, revision: u32) {
        let believed = self.entry.dest_qpn.load(Ordering::Acquire) == from.get()
            && self.connection().includes(revision)
            && matches!(self.state(), QpState::Rtr | QpState::Rts | QpState::Sqd);
        if believed && !self.states.contact_reported.swap(true, Ordering::AcqRel) {
            self.raise(EVENT_COMM_EST);
        }
    }

    /// Handles a sender's report that a datagram found the completion queue full.
    pub(crate) fn completion_lost(&self) {
        self.recv.cq.check_overrun();
        if self.recv.cq.has_overrun() && !matches!(self.state(), QpState::Reset | QpState::Err) {
            self.fail_fatally();
        }
    }

    /// Destroys the queue pair. When this returns, no peer accesses its queues, its completions that were not
    /// polled are dropped, and all fetched events are acknowledged. A second call does nothing.
    pub fn destroy(&self) {
        if self.states.destroyed.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.kind == QpType::Ud {
            self.adapter.multicast.detach_all(self.adapter.port.port(), self.qpn);
        }
        // The peer waits for the acknowledgement of messages that the program may have seen already.
        self.flush_ack();
        self.entry.qpn.store(0, Ordering::SeqCst);
        {
            let _failing = self.states.failing();
            self.set_state(QpState::Reset);
            self.begin_connection();
        }
        self.adapter.mrs.unbind_all_of(self.qpn);
        self.quiesce();
        self.clear_send_queue(&mut self.send.queue.lock());
        self.drop_taken_recv();
        self.forget_completions(|| self.adapter.qps.remove(self.qpn));
        if let Some(srq) = &self.recv.srq {
            // A report of a limit that names this queue pair finds none from here on.
            srq.limit_reached();
            srq.detach();
        }
        if let Some(domain) = &self.recv.domain {
            domain.detach();
        }
        self.pd.detach();
        self.send.cq.detach();
        self.recv.cq.detach();
        self.pd.context.end_events(&self.handles.own);
    }
}
