//! Requests over XRC connections: through one queue pair to any shared receive queue of its domain (IBTA volume 1,
//! annex A14).
//!
//! As over a reliable connection, the initiator announces its operation in the queue pair's entry. The receive queue,
//! its memory and its completions may belong to another process, and many senders may use the same queue. The
//! initiator therefore also holds a lock in the queue's entry, for which the queue's owner waits.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_quantity::{Qpn, Srqn};
use millstream_shm::MappedRef;

use super::Qp;
use super::keys::{LocalKeys, RemoteKeys};
use super::local_transport::{LocalTransport, checked_peer};
use super::remote_qp::RemoteQp;
use super::transfer::{ExecError, Transfer, UNRESPONSIVE, refused};
use crate::adapter::LocalAdapter;
use crate::event::EVENT_QP_REQ_ERR;
use crate::ipc::{Message, Op, srq_event};
use crate::layout::XrcEntry;
use crate::peer::Peer;
use crate::send_wr::SendWr;
use crate::types::{WC_REM_INV_REQ_ERR, vendor};

/// Shared receive queues that a queue pair has sent to, by number.
#[derive(Debug, Default)]
pub(super) struct SharedQueues(HashMap<Srqn, SharedQueue>);

/// Most queues that are cached. Beyond that the cache is cleared; finding a queue again is cheap.
pub(super) const MAX_CACHED: usize = 1024;

/// A queue's entry, with the queue that it is for.
#[derive(Debug)]
pub(super) struct SharedQueueEntry {
    entry: MappedRef<XrcEntry>,
    number: Srqn,
    generation: u32,
}

impl SharedQueueEntry {
    /// The entry of a queue, and the process that owns it.
    pub(super) fn find(adapter: &'static LocalAdapter, number: Srqn) -> Option<(Arc<Peer>, Self)> {
        let peer = adapter.peer_of(Qpn::new(number.get())).ok()?;
        let entry = peer.xrc_entry(number.get())?;
        // Before the entry's other fields are read: if the queue is replaced meanwhile, it is not the same.
        let generation = entry.generation.load(Ordering::Acquire);
        let found = Self { entry, number, generation };
        (number != Srqn::default() && found.is_same()).then_some((peer, found))
    }

    pub(super) fn number(&self) -> Srqn {
        self.number
    }

    /// Which of the queues with this number it is.
    pub(super) fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether the queue still exists, and no later one has its number. The answer holds while the entry is locked: the owner
    /// waits for the lock.
    pub(super) fn is_same(&self) -> bool {
        self.entry.number.load(Ordering::Acquire) == self.number.get()
            && self.entry.generation.load(Ordering::Acquire) == self.generation
    }
}

impl Deref for SharedQueueEntry {
    type Target = MappedRef<XrcEntry>;

    fn deref(&self) -> &Self::Target {
        &self.entry
    }
}

#[derive(Debug)]
struct SharedQueue {
    /// The peer's queue pair, with this queue as its receive queue.
    target: RemoteQp,
    entry: SharedQueueEntry,
    keys: RemoteKeys,
    peer: Arc<Peer>,
}

/// The domain has no such queue: an invalid request, like an invalid queue number in an XRCETH (A14).
const NO_QUEUE: ExecError = ExecError::Failed {
    status: WC_REM_INV_REQ_ERR,
    vendor: vendor::NO_QUEUE,
    peer_event: Some(EVENT_QP_REQ_ERR),
};

impl SharedQueues {
    fn find(&mut self, qp: &Qp, through: &RemoteQp, number: Srqn) -> Result<&mut SharedQueue, ExecError> {
        let known = self.0.get(&number).is_some_and(|queue| queue.is_alive() && queue.entry.is_same());
        if !known {
            self.0.remove(&number);
            if self.0.len() >= MAX_CACHED {
                self.0.clear();
            }
            self.0.insert(number, SharedQueue::find(qp, through, number).ok_or(NO_QUEUE)?);
        }
        self.0.get_mut(&number).ok_or(NO_QUEUE)
    }

    /// Takes out the queues whose process has exited.
    pub(super) fn take_dead(&mut self) -> impl Send + use<> {
        self.0.extract_if(|_, queue| !queue.is_alive()).map(|(_, queue)| queue).collect::<Vec<_>>()
    }

    /// Asks the owner of a queue for a notification when it posts a receive. If too many senders ask, the last ones rely
    /// on their retries.
    pub(super) fn request_rnr_notification(&self, number: Srqn, me: Qpn) {
        let Some(queue) = self.0.get(&number) else { return };
        let waiters = &queue.entry.waiters;
        let waits = waiters.iter().any(|waiter| waiter.load(Ordering::Relaxed) == me.get())
            || waiters.iter().any(|waiter| {
                waiter.compare_exchange(0, me.get(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
            });
        if waits {
            queue.target.request_rnr_notification();
        }
    }
}

impl SharedQueue {
    fn find(qp: &Qp, through: &RemoteQp, number: Srqn) -> Option<Self> {
        let (peer, entry) = SharedQueueEntry::find(qp.adapter, number)?;
        let target =
            through.with_receives(&peer, &entry, number.get(), entry.project(|entry| &entry.taken))?;
        Some(Self { target, entry, keys: RemoteKeys::default(), peer })
    }

    fn is_alive(&self) -> bool {
        self.peer.alive()
    }
}

impl LocalTransport {
    /// Executes one request completely.
    #[inline(never)]
    pub(super) fn execute_xrc(
        &mut self,
        local_keys: &mut LocalKeys,
        qp: &Qp,
        wr: &SendWr<'_>,
    ) -> Result<(), ExecError> {
        self.ensure_bound(qp)?;
        let (peer, through) = checked_peer(&self.peer, &self.target, qp)?;
        through.entry.inflight.begin(&mut self.announced, peer.asymmetric);
        // Checked again after the announcement.
        let ready = through.current_responder_status(qp.qpn).check();
        let queue = ready.and_then(|()| self.shared_queues.find(qp, through, wr.remote_srqn));
        let result = queue.and_then(|queue| queue.execute(qp, wr, local_keys));
        through.entry.inflight.end(&mut self.announced);
        if let Err(ExecError::Failed { peer_event, vendor, .. }) = result {
            if vendor == vendor::NO_QUEUE {
                self.shared_queues.0.remove(&wr.remote_srqn);
            }
            if let Some(report) = peer_event.and_then(|event| through.error_report(qp.qpn, event)) {
                peer.send(report);
            }
        }
        result
    }
}

impl SharedQueue {
    fn execute(&mut self, qp: &Qp, wr: &SendWr<'_>, local: &mut LocalKeys) -> Result<(), ExecError> {
        let entry = &self.entry;
        let tell = |peer: &Peer, what| peer.send(Message::new(Op::XrcSrqEvent, [entry.number().get(), what]));
        let lease = entry.delivery.lock(qp.adapter.id.pid).ok_or(UNRESPONSIVE)?;
        // A queue that was withdrawn earlier is seen here. Later, its owner waits for the lock.
        fence(Ordering::SeqCst);
        if !entry.is_same() {
            return Err(NO_QUEUE);
        }
        if entry.domain.load(Ordering::Relaxed) != self.target.entry.domain.load(Ordering::Relaxed) {
            return Err(refused(WC_REM_INV_REQ_ERR, vendor::DOMAIN, EVENT_QP_REQ_ERR));
        }
        if self.target.has_abandoned() {
            drop(lease);
            tell(&self.peer, srq_event::RECV_ABANDONED);
            return Err(ExecError::PeerNotReady);
        }
        let keys = &mut self.keys;
        let result = Transfer { qp, peer: &self.peer, target: &self.target, remote: keys, local }.run(wr);
        drop(lease);
        match result {
            Ok(signal) => {
                if signal {
                    self.peer.signal(self.target.cq.channel());
                }
                Ok(())
            }
            Err(stop) => {
                if let ExecError::Failed { vendor: vendor::CQ_FULL, .. } = stop {
                    tell(&self.peer, srq_event::CQ_OVERRUN);
                }
                Err(stop)
            }
        }
    }
}
