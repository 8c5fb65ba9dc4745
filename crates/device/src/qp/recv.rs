//! The receiving side of a queue pair: posting and flushing receives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_lockfree::cqe::Cqe;
use millstream_quantity::Qpn;
use millstream_shm::ArenaBlock;

use super::state::QpState;
use super::{Qp, QpType};
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::event::EVENT_QP_LAST_WQE_REACHED;
use crate::ipc::{Message, Op};
use crate::peer::Peer;
use crate::recv_queue::RecvPoster;
use crate::srq::Srq;
use crate::types::{Sge, WC_OP_RECV, WC_WR_FLUSH_ERR};
use crate::xrc::{Xrcd, take_abandoned};

/// The receiving side of a queue pair: shared queues and the completion queue. Its own receive queue is in
/// [`QpWorkQueues`].
///
/// [`QpWorkQueues`]: crate::qp_table::QpWorkQueues
#[derive(Debug)]
pub(super) struct RecvSide {
    pub(super) cq: Arc<Cq>,
    /// The shared receive queue, if it takes receives from one.
    pub(super) srq: Option<Arc<Srq>>,
    /// The XRC domain of an XRC target.
    pub(super) domain: Option<Arc<Xrcd>>,
    /// The slots of the private receive queue in the arena.
    pub(super) block: ArenaBlock,
    /// Whether the queue pair has failed and its receives were flushed: later ones are flushed when they are posted. Changed
    /// and read under the lock of the posting side.
    pub(super) flushes: AtomicBool,
    /// Whether the end of its receives from a shared queue was reported.
    pub(super) last_wqe_reported: AtomicBool,
}

impl Qp {
    /// The shared receive queue, if it uses one.
    #[must_use]
    pub fn srq(&self) -> Option<&Arc<Srq>> {
        self.recv.srq.as_ref()
    }

    /// The peer: its process and its queue pair.
    pub(crate) fn sender(&self) -> Option<(Arc<Peer>, Qpn)> {
        let sender = self.entry.dest_qpn.load(Ordering::Acquire);
        Some((self.send.queue.lock().transport.peer()?.clone(), Qpn::new(sender)))
    }

    /// Flushes the receives, and those that are posted from now on. No initiator may use one: [`Qp::quiesce`] comes first.
    pub(super) fn flush_receives(&self) {
        if let Some(srq) = &self.recv.srq {
            // The shared queue still serves other queue pairs.
            self.flush_taken_recv(srq);
            if !self.recv.last_wqe_reported.swap(true, Ordering::AcqRel) {
                self.raise(EVENT_QP_LAST_WQE_REACHED);
            }
            return;
        }
        let poster = self.work_queues.recv.lock();
        self.recv.flushes.store(true, Ordering::Relaxed);
        self.flush_posted(&poster);
    }

    fn flush_posted(&self, recv: &RecvPoster<'_>) {
        let head = self.entry.rq_head.load(Ordering::Acquire);
        // The peer writes the head: an impossible value is ignored.
        let (done, tail) = (recv.done(), recv.tail());
        let from = if tail.wrapping_sub(head) <= tail.wrapping_sub(done) { head } else { done };
        let mut sequence = from;
        // If the completion queue is full or its lock is not available, the remaining receives are dropped.
        while sequence != tail && self.recv.cq.push_shared(self.flushed_receive(sequence)) {
            sequence = sequence.wrapping_add(1);
        }
        self.entry.rq_head.store(tail, Ordering::Release);
    }

    /// Flushes the receive that a peer took from the shared receive queue and did not complete.
    fn flush_taken_recv(&self, srq: &Srq) {
        // If the completion queue is full or its lock is not available, the receive is dropped.
        if let Some(slot) = srq.take_back(&self.entry.srq_taken)
            && !self.recv.cq.push_shared(self.flushed_receive(slot))
        {
            srq.free(slot);
        }
    }

    /// Drops the receive that a peer took from the shared receive queue and did not complete: a queue pair in RESET has no
    /// completions.
    pub(super) fn drop_taken_recv(&self) {
        if let Some(srq) = &self.recv.srq
            && let Some(slot) = srq.take_back(&self.entry.srq_taken)
        {
            srq.free(slot);
        }
    }

    /// Takes back the receive that an exited sender of a datagram took, while other senders continue. It is posted again.
    pub(crate) fn take_back_abandoned(&self) {
        match (self.kind, &self.recv.srq) {
            (QpType::Ud, Some(srq)) => {
                let take_back = || srq.take_back(&self.entry.srq_taken);
                if let Some(slot) = take_abandoned(&self.entry.delivery, self.adapter.id.pid, take_back) {
                    srq.post_again(slot);
                }
            }
            (QpType::Ud, None) => self.consume_completed(),
            _ => {}
        }
    }

    /// Consumes the oldest receive of its own queue if a sender has completed it and exited before it consumed it. Otherwise
    /// the receive stays, and the next sender uses it.
    fn consume_completed(&self) {
        let delivery = self.entry.delivery.lock_within(self.adapter.id.pid, Duration::from_millis(100));
        if delivery.is_none() || self.entry.srq_taken.load(Ordering::Acquire) == 0 {
            return;
        }
        let head = self.entry.rq_head.load(Ordering::Acquire);
        let waits = self.recv.cq.has_received(|cqe| cqe.qpn == self.qpn.get() && cqe.sequence == head);
        // Asked last: a completion that was polled meanwhile is counted.
        let recv = self.work_queues.recv.lock();
        let is_polled = recv.tail().wrapping_sub(recv.done()) < recv.tail().wrapping_sub(head);
        if waits || is_polled {
            self.entry.rq_head.store(head.wrapping_add(1), Ordering::Release);
        }
        self.entry.srq_taken.store(0, Ordering::Release);
    }

    /// Whether a receive of its shared queue is in use: taken by a peer, or completed and not polled yet.
    pub(crate) fn uses_request(&self, note: u32, slot: u32) -> bool {
        self.entry.srq_taken.load(Ordering::Acquire) == note
            || self.recv.cq.has_received(|cqe| cqe.qpn == self.qpn.get() && cqe.sequence == slot)
    }

    /// Drops completions that were not polled, of sends and receives. Runs `with_lock` before pollers are let in
    /// again.
    pub(super) fn forget_completions(&self, with_lock: impl FnOnce()) {
        let (mut sends, receives) = Cq::lock_consumers(&self.send.cq, &self.recv.cq);
        sends.cancel(self.qpn);
        self.recv.cq.cancel_received(receives.as_deref().unwrap_or(&sends), self.qpn, |sequence| {
            if let Some(srq) = &self.recv.srq {
                let _ = srq.slots().complete(sequence);
            }
        });
        with_lock();
    }

    fn flushed_receive(&self, sequence: u32) -> Cqe {
        Cqe {
            qpn: self.qpn.get(),
            sequence,
            status: WC_WR_FLUSH_ERR as u16,
            opcode: WC_OP_RECV as u16,
            ..Cqe::default()
        }
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// EINVAL in state RESET or with too many elements, ENOMEM when the queue is full.
    #[inline]
    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) -> Result<()> {
        self.post_recvs(std::iter::once((wr_id, sges)))
    }

    /// Posts receives, each a `wr_id` and a list of elements, up to the first that is refused. All of them become
    /// visible to the peer at once.
    ///
    /// # Errors
    /// As [`Qp::post_recv`], of the request that the iterator yielded last.
    #[inline]
    pub fn post_recvs<'a>(&self, requests: impl Iterator<Item = (u64, &'a [Sge])>) -> Result<()> {
        let poster = self.work_queues.recv.lock();
        let state = self.state();
        if state == QpState::Reset || self.recv.srq.is_some() {
            return Err(Errno::INVAL);
        }
        let first = poster.tail();
        let mut tail = first;
        let mut result = Ok(());
        for (wr_id, sges) in requests {
            if sges.len() > self.capacity.max_recv_sge as usize {
                result = Err(Errno::INVAL);
                break;
            }
            if tail.wrapping_sub(poster.done()) >= self.capacity.max_recv_wr {
                result = Err(if self.kind.has_receive_queue() { Errno::NOMEM } else { Errno::INVAL });
                break;
            }
            // SAFETY: locked, and the slot is free.
            unsafe { poster.write(tail, wr_id, sges) };
            tail = tail.wrapping_add(1);
        }
        if tail == first {
            return result;
        }
        poster.publish(self.entry, tail);
        if state == QpState::Err {
            // Until then a peer may still use earlier ones, and the thread that fails the queue pair flushes this one, too.
            if self.recv.flushes.load(Ordering::Relaxed) {
                self.flush_posted(&poster);
            }
            return result;
        }
        drop(poster);
        if self.entry.rnr_wait.load(Ordering::Relaxed) != 0 {
            self.wake_sender();
        }
        result
    }

    /// Notifies a peer whose request waits for a receive.
    #[cold]
    fn wake_sender(&self) {
        if self.entry.rnr_wait.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        if let Some((peer, sender)) = self.sender() {
            peer.send(Message::new(Op::RecvPosted, [sender.get()]));
        }
    }
}
