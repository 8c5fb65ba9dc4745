//! Send queues. Requests are executed when they are posted; those whose peer is not ready become pending and are
//! retried (IBTA volume 1, 9.7.5.2).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::datagram::MAX_DATAGRAM;
use super::fast_path::SendGroup;
use super::keys::LocalKeys;
use super::state::{QpAttr, QpState};
use super::transfer::ExecError;
use super::transport::Transport;
use super::wire_transport::QpFailure;
use super::wr_list::{SendWrList, WrSlice};
use super::{Qp, QpType};
use crate::caps::MAX_MSG;
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::mr::window::MwBind;
use crate::peer::Peer;
use crate::send_wr::{SendWr, UdDestination};
use crate::tasks::Task;
use crate::timers::retry_delay;
use crate::types::{
    SEND_INLINE, SEND_SIGNALED, Sge, WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR, WC_SUCCESS, WC_WR_FLUSH_ERR,
    WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_BIND_MW, WR_LOCAL_INV, WR_RDMA_READ,
    WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM, WR_SEND_WITH_INV, Wc,
    completion_opcode, total_len, vendor,
};
use millstream_lockfree::retry_owner::{RetryCheck, RetryOwner};
use millstream_lockfree::timer::Deadline;
use millstream_lockfree::{BiasedLock, CancelGuard};
use millstream_quantity::{Rkey, Srqn};

/// Delay of the progress thread's first retry of a pending request. An application that polls retries earlier.
const FIRST_RETRY: Duration = Duration::from_micros(100);
/// Longest time after which a request to an exited peer fails. It fails earlier if its first ACK timer
/// expires. It never fails at once: programs that end together may still post to each other while one of them
/// exits.
const PEER_GONE_TIMEOUT: Duration = Duration::from_millis(100);
/// Interval at which the progress thread checks a request that an application retries by polling.
const POLLED_RETRY: Duration = Duration::from_millis(1);

/// The sending side of a queue pair.
#[derive(Debug)]
pub(super) struct SendSide {
    pub(super) cq: Arc<Cq>,
    /// Whether every send request generates a completion, regardless of its flags.
    pub(super) signal_all: bool,
    pub(super) queue: BiasedLock<SendQueue>,
    retry_owner: RetryOwner,
    /// The deadline of the timers, readable without the lock.
    pub(super) timer: Deadline,
}

impl SendSide {
    pub(super) fn new(cq: Arc<Cq>, signal_all: bool) -> Self {
        Self {
            cq,
            signal_all,
            queue: BiasedLock::new(SendQueue::default()),
            retry_owner: RetryOwner::default(),
            timer: Deadline::default(),
        }
    }
}

/// The send queue: all that its lock guards.
#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    pub(super) transport: Transport,
    pub(super) local_keys: LocalKeys,
    pub(super) ack_timeout: Option<Duration>,
    pub(super) retries: u32,
    pub(super) rnr_retries: u32,
    /// Requests ever posted.
    pub(super) posted: u32,
    /// SENDs of the group that is being executed.
    pub(super) group: SendGroup,
    pending: VecDeque<PendingWr>,
    /// The reason why the oldest pending request waits, and the start of the wait.
    waits: Option<(ExecError, Instant)>,
    with_cq: bool,
}

/// A pending request, with copies of its elements and inline data.
#[derive(Debug)]
pub(super) struct PendingWr {
    wr_id: u64,
    opcode: u32,
    flags: u32,
    imm: u32,
    remote_addr: u64,
    rkey: Rkey,
    compare_add: u64,
    swap: u64,
    to: Option<UdDestination>,
    bind: Option<MwBind>,
    remote_srqn: Srqn,
    pub(super) posted: u32,
    sges: Sges,
    /// Inline data. `sges` then has one element that points here.
    _inline: Vec<u8>,
}

/// Elements of a request. One element needs no allocation.
#[derive(Debug)]
enum Sges {
    One(Sge),
    Other(Vec<Sge>),
}

impl Sges {
    fn new(sges: &[Sge]) -> Self {
        if let [one] = sges { Self::One(*one) } else { Self::Other(sges.to_vec()) }
    }

    fn as_slice(&self) -> &[Sge] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Other(sges) => sges,
        }
    }
}

impl PendingWr {
    pub(super) fn new(wr: &SendWr<'_>, posted: u32) -> Self {
        let mut sges = Sges::new(wr.sges);
        let mut inline = Vec::new();
        if wr.flags & SEND_INLINE != 0 {
            for sge in wr.sges {
                // SAFETY: the application's inline data is valid during post_send.
                let data = unsafe { std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize) };
                inline.extend_from_slice(data);
            }
            sges = Sges::One(Sge { addr: inline.as_ptr() as u64, length: inline.len() as u32, lkey: 0 });
        }
        Self {
            wr_id: wr.wr_id,
            opcode: wr.opcode,
            flags: wr.flags,
            imm: wr.imm,
            remote_addr: wr.remote_addr,
            rkey: wr.rkey,
            compare_add: wr.compare_add,
            swap: wr.swap,
            to: wr.to,
            bind: wr.bind.cloned(),
            remote_srqn: wr.remote_srqn,
            posted,
            sges,
            _inline: inline,
        }
    }

    pub(super) fn request(&self) -> SendWr<'_> {
        SendWr {
            wr_id: self.wr_id,
            opcode: self.opcode,
            flags: self.flags,
            imm: self.imm,
            sges: self.sges.as_slice(),
            remote_addr: self.remote_addr,
            rkey: self.rkey,
            compare_add: self.compare_add,
            swap: self.swap,
            to: self.to,
            bind: self.bind.as_ref(),
            remote_srqn: self.remote_srqn,
        }
    }
}

impl QpType {
    /// Whether the transport service has this operation (IBTA volume 1, 9.2.1, table 35).
    #[inline]
    pub(super) fn offers(self, opcode: u32) -> bool {
        match opcode {
            // An XRC target has no send queue.
            _ if self == Self::XrcRecv => false,
            WR_SEND | WR_SEND_WITH_IMM => true,
            WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM | WR_LOCAL_INV | WR_BIND_MW => self != Self::Ud,
            WR_RDMA_READ
            | WR_ATOMIC_CMP_AND_SWP
            | WR_ATOMIC_FETCH_AND_ADD
            | WR_ATOMIC_WRITE
            | WR_SEND_WITH_INV => self.is_reliable(),
            _ => false,
        }
    }
}

/// Result of posting a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PostOutcome {
    /// The queue pair is not in the error state.
    Accepted,
    /// The request failed the queue pair: [`Qp::fail_connection`] is due once the send queue is released.
    QpFailed,
}

/// The caller of a retry of pending requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retrier {
    Poller,
    Thread,
}

impl SendQueue {
    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Completes all outstanding requests as flushed (IBTA volume 1, 10.8.1).
    pub(super) fn flush(&mut self, qp: &Qp) {
        if let Transport::Wire(wire) = &mut self.transport {
            wire.flush(qp);
        }
        while let Some(pending) = self.pending.pop_front() {
            qp.complete_send(&pending.request(), pending.posted, WC_WR_FLUSH_ERR, 0);
        }
        self.waits = None;
    }

    /// The error of a request whose retry time has expired.
    fn expired(&mut self, stop: ExecError) -> Option<ExecError> {
        let now = Instant::now();
        let since = match self.waits {
            Some((what, since)) if what == stop => since,
            _ => {
                self.waits = Some((stop, now));
                now
            }
        };
        let (limit, status) = match stop {
            ExecError::PeerGone => (
                self.ack_timeout.map_or(PEER_GONE_TIMEOUT, |time| time.min(PEER_GONE_TIMEOUT)),
                WC_RETRY_EXC_ERR,
            ),
            ExecError::ReceiverNotReady if self.rnr_retries == 7 => return None,
            ExecError::ReceiverNotReady => {
                let code = match &self.transport {
                    Transport::Local(local) => local.rnr_timer(),
                    Transport::Unconnected | Transport::Wire(_) | Transport::Datagram(_) => 0,
                };
                (QpAttr::rnr_wait(code) * self.rnr_retries, WC_RNR_RETRY_EXC_ERR)
            }
            _ => (self.ack_timeout? * (self.retries + 1), WC_RETRY_EXC_ERR),
        };
        (now - since >= limit).then_some(ExecError::Failed {
            status,
            vendor: if stop == ExecError::PeerGone { vendor::PEER_GONE } else { vendor::PEER_NOT_READY },
            peer_event: None,
        })
    }
}

impl Qp {
    /// Whether every send request generates a completion.
    #[must_use]
    pub fn signal_all(&self) -> bool {
        self.send.signal_all
    }

    /// Fails pending requests to a process that has exited, and forgets it as a receiver of datagrams or XRC requests.
    pub(crate) fn peer_died(&self, peer: &Arc<Peer>) {
        let (waits, _dead) = {
            let mut send = self.send.queue.lock();
            let waits = send.transport.peer().is_some_and(|p| Arc::ptr_eq(p, peer)) && send.has_pending();
            (waits, send.transport.take_dead())
        };
        if waits {
            self.retry_now();
        }
    }

    /// Posts a send request. It is executed before this returns, unless the peer is not ready.
    ///
    /// # Errors
    /// EINVAL in a state that takes no send requests, for too many elements or too much inline data; EOPNOTSUPP for an
    /// operation that the transport does not offer; ENOMEM when the queue is full.
    #[inline]
    pub fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.post_list(&mut WrSlice(std::slice::from_ref(wr)))
    }

    /// Posts a slice of send requests, up to the first that is refused.
    ///
    /// # Errors
    /// As [`Qp::post_send`], with the refused request's index in the list.
    pub fn post_sends(&self, list: &[SendWr<'_>]) -> std::result::Result<(), (usize, Errno)> {
        let mut rest = WrSlice(list);
        self.post_list(&mut rest).map_err(|error| (list.len() - rest.0.len(), error))
    }

    /// Posts the requests of a list in the caller's layout, up to the first that is refused: that one is the next one
    /// of `list` then.
    ///
    /// # Errors
    /// As [`Qp::post_send`], of the refused request; or what [`SendWrList::with_wr`] reports.
    #[inline(always)]
    pub fn post_list<L: SendWrList>(&self, list: &mut L) -> Result<()> {
        self.post_fast(list);
        if list.opcode().is_none() {
            return Ok(());
        }
        let result;
        (*list, result) = self.post_rest(*list);
        result
    }

    /// Posts a list whose first request was left to the general path. The list moves by value: the one in
    /// [`post_list`](Self::post_list) stays in registers.
    #[inline(never)]
    fn post_rest<L: SendWrList>(&self, mut list: L) -> (L, Result<()>) {
        loop {
            if let Err(error) = self.post_next(&list) {
                return (list, Err(error));
            }
            list.advance();
            self.post_fast(&mut list);
            if list.opcode().is_none() {
                return (list, Ok(()));
            }
        }
    }

    /// Posts the next request of a list by the general path.
    #[inline(never)]
    fn post_next(&self, list: &impl SendWrList) -> Result<()> {
        list.with_wr(self.kind, |wr| self.post_wr(wr))??;
        list.accepted();
        Ok(())
    }

    /// Posts a request by the general path.
    fn post_wr(&self, wr: &SendWr<'_>) -> Result<()> {
        let mut send = self.send.queue.lock();
        if self.states.is_rts() {
            self.check(&send, wr)?;
            if self.admit(&mut send, wr) == PostOutcome::QpFailed {
                let connection = self.connection();
                drop(send);
                self.fail_connection(connection);
            }
        } else {
            self.post_outside_rts(&mut send, wr)?;
        }
        if let Some(bind) = wr.bind {
            bind.mw.set_key(bind.key);
        }
        Ok(())
    }

    /// Executes a request that was checked, in state RTS, or makes it pending.
    #[inline(always)]
    pub(super) fn admit(&self, send: &mut SendQueue, wr: &SendWr<'_>) -> PostOutcome {
        send.posted = send.posted.wrapping_add(1);
        let posted = send.posted;
        if send.pending.is_empty() {
            if matches!(send.transport, Transport::Wire(_)) {
                return self.post_to_wire(send, wr, posted);
            }
            match self.execute(send, wr) {
                Ok(()) => {
                    if self.send.signal_all || wr.flags & SEND_SIGNALED != 0 {
                        self.complete_send(wr, posted, WC_SUCCESS, 0);
                    }
                    return PostOutcome::Accepted;
                }
                Err(ExecError::Failed { status, vendor, .. }) => {
                    self.complete_send(wr, posted, status, vendor);
                    if !self.kind.is_reliable() {
                        self.fail_send_queue();
                        return PostOutcome::Accepted;
                    }
                    self.set_state(QpState::Err);
                    return PostOutcome::QpFailed;
                }
                Err(ExecError::ReceiverNotReady | ExecError::PeerNotReady | ExecError::PeerGone) => {}
            }
        }
        send.pending.push_back(PendingWr::new(wr, posted));
        self.schedule_retries(send);
        PostOutcome::Accepted
    }

    /// Gives a request to the packet transport, which completes it later.
    #[cold]
    #[inline(never)]
    fn post_to_wire(&self, send: &mut SendQueue, wr: &SendWr<'_>, posted: u32) -> PostOutcome {
        let SendQueue { transport: Transport::Wire(wire), local_keys, .. } = send else {
            return PostOutcome::Accepted;
        };
        let _uncancelled = CancelGuard::new();
        match wire.post(self, local_keys, PendingWr::new(wr, posted)) {
            None => PostOutcome::Accepted,
            Some(failure) => {
                self.raise_failure(&failure);
                PostOutcome::QpFailed
            }
        }
    }

    fn raise_failure(&self, failure: &QpFailure) {
        if let Some(event) = failure.event {
            self.raise(event);
        }
    }

    /// Executes a request whose transport completes it at once.
    #[inline(always)]
    fn execute(&self, send: &mut SendQueue, wr: &SendWr<'_>) -> std::result::Result<(), ExecError> {
        if matches!(wr.opcode, WR_LOCAL_INV | WR_BIND_MW) {
            return self.execute_local_op(send, wr);
        }
        let SendQueue { transport, local_keys, .. } = send;
        match transport {
            Transport::Local(local) => local.execute(local_keys, self, wr),
            Transport::Datagram(datagram) => datagram.execute(local_keys, self, wr),
            // Packets are sent by `post_to_wire`, and no request is executed before RTR.
            Transport::Wire(_) | Transport::Unconnected => Err(ExecError::PeerNotReady),
        }
    }

    #[inline]
    fn check(&self, send: &SendQueue, wr: &SendWr<'_>) -> Result<()> {
        self.check_form(wr)?;
        if self.send_room(send) == 0 {
            return Err(Errno::NOMEM);
        }
        Ok(())
    }

    /// Checks a request's form: operation, elements, length, destination, binding.
    #[inline(always)]
    pub(super) fn check_form(&self, wr: &SendWr<'_>) -> Result<()> {
        if !self.kind.offers(wr.opcode) {
            return Err(Errno::NOTSUP);
        }
        let len = total_len(wr.sges);
        if wr.opcode == WR_ATOMIC_WRITE {
            // Its eight bytes fit into any request, inline or not.
            let fits = wr.sges.len() <= self.capacity.max_send_sge as usize && len == 8;
            return if fits { Ok(()) } else { Err(Errno::INVAL) };
        }
        let max = if self.kind == QpType::Ud { MAX_DATAGRAM } else { MAX_MSG };
        if wr.sges.len() > self.capacity.max_send_sge as usize
            || !self.may_carry(wr.opcode, wr.flags, len, max)
            || (self.kind == QpType::Ud && wr.to.is_none())
            || (wr.opcode == WR_BIND_MW && !wr.bind.is_some_and(|bind| bind.is_well_formed(self.pd.id)))
        {
            return Err(Errno::INVAL);
        }
        Ok(())
    }

    /// Whether a request may carry `len` bytes, at most `max` if they are not inline.
    #[inline(always)]
    pub(super) fn may_carry(&self, opcode: u32, flags: u32, len: u64, max: u64) -> bool {
        let takes_inline = matches!(
            opcode,
            WR_SEND | WR_SEND_WITH_IMM | WR_SEND_WITH_INV | WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM
        );
        len <= max
            && (flags & SEND_INLINE == 0 || (takes_inline && len <= u64::from(self.capacity.max_inline_data)))
    }

    /// Free entries of the send queue.
    #[inline(always)]
    pub(super) fn send_room(&self, send: &SendQueue) -> u32 {
        let outstanding = send.posted.wrapping_sub(self.work_queues.reclaimed());
        self.capacity.max_send_wr.saturating_sub(outstanding)
    }

    /// Whether send requests may be posted in the state now (11.4.1.1).
    #[inline]
    pub(super) fn takes_sends(&self) -> Result<()> {
        match self.state() {
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err => Ok(()),
            QpState::Reset | QpState::Init | QpState::Rtr => Err(Errno::INVAL),
        }
    }

    #[cold]
    fn post_outside_rts(&self, send: &mut SendQueue, wr: &SendWr<'_>) -> Result<()> {
        self.takes_sends()?;
        self.check(send, wr)?;
        self.admit_outside_rts(send, wr);
        Ok(())
    }

    /// Accepts a request in a state other than RTS. In SQD it waits, in ERR and SQE it is flushed (11.4.1.1).
    #[cold]
    pub(super) fn admit_outside_rts(&self, send: &mut SendQueue, wr: &SendWr<'_>) {
        send.posted = send.posted.wrapping_add(1);
        match self.state() {
            QpState::Err | QpState::Sqe => {
                // The thread that failed the queue pair may not have flushed earlier requests yet.
                send.flush(self);
                self.complete_send(wr, send.posted, WC_WR_FLUSH_ERR, 0);
            }
            QpState::Sqd => send.pending.push_back(PendingWr::new(wr, send.posted)),
            QpState::Rts => {
                // The state has just changed to RTS: earlier requests come first.
                send.pending.push_back(PendingWr::new(wr, send.posted));
                self.schedule_retries(send);
            }
            QpState::Reset | QpState::Init | QpState::Rtr => {}
        }
    }

    #[inline]
    pub(super) fn complete_send(&self, wr: &SendWr<'_>, posted: u32, status: u32, vendor_err: u32) {
        let wc = Wc {
            wr_id: wr.wr_id,
            status,
            opcode: completion_opcode(wr.opcode),
            vendor_err,
            byte_len: match wr.opcode {
                WR_RDMA_READ | WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD => total_len(wr.sges) as u32,
                _ => 0,
            },
            qp_num: self.qpn.get(),
            ..Wc::default()
        };
        // A send completion is unsolicited.
        if self.send.cq.push_own(wc, posted, false).is_err() && self.state() != QpState::Err {
            // A lost completion is fatal for its queue pair (11.6.3.1). The caller holds the send queue, so the
            // progress thread flushes it.
            self.set_state(QpState::Err);
            self.adapter.tasks.add(Task::QpFatal { qpn: self.qpn });
        }
    }

    /// Executes a pending request.
    #[cold]
    #[inline(never)]
    fn execute_pending(&self, send: &mut SendQueue, wr: &SendWr<'_>) -> std::result::Result<(), ExecError> {
        self.execute(send, wr)
    }

    /// Registers pending requests for retries, by a poller or by the progress thread.
    #[cold]
    fn schedule_retries(&self, send: &mut SendQueue) {
        if !std::mem::replace(&mut send.with_cq, true) {
            self.send.cq.add_pending(self.me.clone());
        }
        if self.send.retry_owner.set_pending() {
            self.adapter.tasks.add_pending(self.me.clone(), FIRST_RETRY);
        }
    }

    /// Resumes requests that were held back in SQD.
    pub(super) fn resume(&self) {
        // Those that were posted in SQD follow.
        self.resume_wire();
        {
            let mut send = self.send.queue.lock();
            send.waits = None;
            if send.has_pending() {
                self.schedule_retries(&mut send);
            }
        }
        self.retry_now();
    }

    /// Retries pending requests for an application that polls; false when none is left.
    pub(crate) fn retry_for_poller(&self) -> bool {
        self.send.retry_owner.count_poll();
        self.retry_as(Retrier::Poller).is_some()
    }

    /// Retries pending requests for an application that does not poll; the delay until the next retry.
    pub(crate) fn retry(&self) -> Option<Duration> {
        match self.send.retry_owner.check() {
            RetryCheck::Idle => None,
            RetryCheck::Polled => Some(POLLED_RETRY),
            RetryCheck::Unattended => Some(self.retry_as(Retrier::Thread).unwrap_or(POLLED_RETRY)),
        }
    }

    /// Retries pending requests at once: their peer may be ready.
    pub(crate) fn retry_now(&self) {
        let _ = self.retry_as(Retrier::Thread);
    }

    fn retry_as(&self, who: Retrier) -> Option<Duration> {
        let mut send = self.send.queue.lock();
        loop {
            let Some(pending) = send.pending.pop_front() else {
                send.waits = None;
                send.with_cq &= who != Retrier::Poller;
                self.send.retry_owner.clear_pending();
                return None;
            };
            if !self.states.is_rts() {
                // A drained queue keeps its requests; a failed one has none.
                send.pending.push_front(pending);
                return Some(Duration::from_millis(10));
            }
            if let SendQueue { transport: Transport::Wire(wire), local_keys, .. } = &mut *send {
                match wire.post(self, local_keys, pending) {
                    None if self.states.is_rts() => continue,
                    None => {}
                    Some(failure) => self.raise_failure(&failure),
                }
                break;
            }
            let wr = pending.request();
            let mut result = self.execute_pending(&mut send, &wr);
            if result == Err(ExecError::ReceiverNotReady)
                && who == Retrier::Thread
                && let Transport::Local(local) = &send.transport
            {
                // The receiver reports receives that it posts from now on. The retry finds the ones posted
                // before.
                local.request_rnr_notification(self, &wr);
                fence(Ordering::SeqCst);
                result = self.execute_pending(&mut send, &wr);
            }
            match result {
                Ok(()) => {
                    send.waits = None;
                    if self.send.signal_all || pending.flags & SEND_SIGNALED != 0 {
                        self.complete_send(&wr, pending.posted, WC_SUCCESS, 0);
                    }
                    continue;
                }
                Err(ExecError::Failed { status, vendor, .. }) => {
                    self.complete_send(&wr, pending.posted, status, vendor);
                    break;
                }
                Err(stop) => {
                    if let Some(ExecError::Failed { status, vendor, .. }) = send.expired(stop) {
                        self.complete_send(&wr, pending.posted, status, vendor);
                        break;
                    }
                    send.pending.push_front(pending);
                    let waited = send.waits.map_or(Duration::ZERO, |(_, since)| since.elapsed());
                    return Some(retry_delay(waited));
                }
            }
        }
        send.with_cq &= who != Retrier::Poller;
        if !self.kind.is_reliable() {
            self.fail_send_queue();
            send.flush(self);
            return None;
        }
        self.set_state(QpState::Err);
        let connection = self.connection();
        drop(send);
        self.fail_connection(connection);
        None
    }
}
