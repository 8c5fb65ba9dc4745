//! Connected queue pairs whose peer is on this host: requests are executed in the peer's memory.
//!
//! The initiator announces an operation in the target's entry, checks, copies, completes, and withdraws the
//! announcement. An owner that withdraws memory or queues waits until the announcement is withdrawn. So no
//! initiator accesses them after `ibv_dereg_mr` or `ibv_destroy_qp` has returned.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use millstream_quantity::Qpn;

use super::keys::{LocalKeys, RemoteKeys};
use super::remote_qp::{RemoteQp, ResponderStatus};
use super::transfer::{ExecError, Transfer};
use super::xrc::SharedQueues;
use super::{Qp, QpType};
use crate::ipc::{Message, Op};
use crate::peer::Peer;
use crate::send_wr::SendWr;
use crate::types::{WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_REM_OP_ERR};

/// An initiator's state of a connection to a peer on this host.
#[derive(Debug)]
pub(super) struct LocalTransport {
    // Order matters: references into the peer's arena are dropped before the peer.
    /// The peer's queue pair. None before the first request.
    pub(super) target: Option<RemoteQp>,
    pub(super) shared_queues: SharedQueues,
    pub(super) remote_keys: RemoteKeys,
    /// The peer's process, if it was found.
    pub(super) peer: Option<Arc<Peer>>,
    pub(super) dest_qpn: Qpn,
    /// Whether the peer's address is one of this host's.
    reachable: bool,
    /// The value last stored in the target's announcement word.
    pub(super) announced: u32,
}

impl LocalTransport {
    /// Connects to the process that owns the peer's queue pair, if it exists already.
    pub(super) fn connect(qp: &Qp, dest_qpn: Qpn, reachable: bool) -> Self {
        Self {
            target: None,
            shared_queues: SharedQueues::default(),
            remote_keys: RemoteKeys::default(),
            peer: if reachable { qp.adapter.peer_of(dest_qpn).ok() } else { None },
            dest_qpn,
            reachable,
            announced: 0,
        }
    }

    /// Executes one request completely, by the rules of the queue pair's transport service.
    #[inline(always)]
    pub(super) fn execute(
        &mut self,
        local_keys: &mut LocalKeys,
        qp: &Qp,
        wr: &SendWr<'_>,
    ) -> Result<(), ExecError> {
        match qp.kind {
            QpType::XrcSend | QpType::XrcRecv => self.execute_xrc(local_keys, qp, wr),
            QpType::Uc => match self.execute_connected(local_keys, qp, wr) {
                // Only local errors are reported: an unreliable connection has no acknowledgements.
                Err(error @ ExecError::Failed { status: WC_LOC_PROT_ERR | WC_LOC_LEN_ERR, .. }) => Err(error),
                _ => Ok(()),
            },
            QpType::Rc | QpType::Ud => self.execute_connected(local_keys, qp, wr),
        }
    }

    #[inline]
    fn execute_connected(
        &mut self,
        local_keys: &mut LocalKeys,
        qp: &Qp,
        wr: &SendWr<'_>,
    ) -> Result<(), ExecError> {
        self.ensure_bound(qp)?;
        let (peer, target) = checked_peer(&self.peer, &self.target, qp)?;
        target.entry.inflight.begin(&mut self.announced, peer.asymmetric);
        let mut transfer = Transfer { qp, peer, target, remote: &mut self.remote_keys, local: local_keys };
        let result = transfer.run(wr);
        target.entry.inflight.end(&mut self.announced);
        match result {
            Ok(false) => Ok(()),
            Ok(true) => {
                peer.signal(target.cq.channel());
                Ok(())
            }
            Err(error) => {
                if let ExecError::Failed { peer_event: Some(event), status, .. } = error
                    // The responder of an unreliable connection drops what it does not allow, and fails only by
                    // its own fault (9.9.3.2).
                    && (qp.kind == QpType::Rc || status == WC_REM_OP_ERR)
                    && let Some(report) = target.error_report(qp.qpn, event)
                {
                    peer.send(report);
                }
                Err(error)
            }
        }
    }

    /// Finds the peer's queue pair if this is the first request.
    #[inline(always)]
    pub(super) fn ensure_bound(&mut self, qp: &Qp) -> Result<(), ExecError> {
        if self.target.is_none() { self.bind(qp) } else { Ok(()) }
    }

    /// Finds the peer's queue pair before the first request.
    #[cold]
    fn bind(&mut self, qp: &Qp) -> Result<(), ExecError> {
        if self.peer.is_none() {
            if !self.reachable {
                return Err(ExecError::PeerNotReady);
            }
            self.peer = Some(qp.adapter.peer_of(self.dest_qpn).map_err(|_| ExecError::PeerNotReady)?);
        }
        let peer = self.peer.as_ref().expect("just set");
        let target = RemoteQp::bind(peer, self.dest_qpn).ok_or(ExecError::PeerGone)?;
        if !target.is_peer_of(qp.kind) {
            return Err(ExecError::PeerGone);
        }
        // Bound only when a packet would be taken, so that this is the first request that arrives.
        let revision = target.revision();
        let status = target.responder_status(qp.qpn);
        if !target.has_same_connection() {
            // It was reset in between.
            return Err(ExecError::PeerNotReady);
        }
        status.check()?;
        if qp.kind.is_reliable() && !target.claim(qp.connection().revision()) {
            // An adapter drops packets of another sequence, until its queue pair is reset, too.
            return Err(ExecError::PeerNotReady);
        }
        if target.awaits_contact() {
            peer.send(Message::new(Op::CommEst, [self.dest_qpn.get(), qp.qpn.get(), revision]));
        }
        self.announced = target.entry.inflight.last();
        self.target = Some(target);
        Ok(())
    }

    /// Asks the receiver to report when it has posted a receive again.
    pub(super) fn request_rnr_notification(&self, qp: &Qp, wr: &SendWr<'_>) {
        match (&self.target, qp.kind) {
            (_, QpType::XrcSend) => self.shared_queues.request_rnr_notification(wr.remote_srqn, qp.qpn),
            (Some(target), _) => target.request_rnr_notification(),
            (None, _) => {}
        }
    }

    /// Code of the target's RNR NAK timer.
    pub(super) fn rnr_timer(&self) -> u32 {
        self.target.as_ref().map_or(0, |target| target.entry.min_rnr_timer.load(Ordering::Relaxed))
    }
}

/// The peer and its queue pair, if a request may be announced to it. The status is checked again after the
/// announcement. An announcement to a queue pair that has another peer would disturb that peer's announcements.
#[inline(always)]
pub(super) fn checked_peer<'a>(
    peer: &'a Option<Arc<Peer>>,
    target: &'a Option<RemoteQp>,
    qp: &Qp,
) -> Result<(&'a Arc<Peer>, &'a RemoteQp), ExecError> {
    let (Some(peer), Some(target)) = (peer, target) else {
        return Err(ExecError::PeerNotReady);
    };
    if !peer.alive() {
        return Err(ExecError::PeerGone);
    }
    target.current_responder_status(qp.qpn).check()?;
    Ok((peer, target))
}

impl ResponderStatus {
    #[inline]
    pub(super) fn check(self) -> Result<(), ExecError> {
        match self {
            Self::Ready => Ok(()),
            Self::NotReady => Err(ExecError::PeerNotReady),
            Self::Gone => Err(ExecError::PeerGone),
        }
    }
}
