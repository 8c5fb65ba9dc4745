//! Waiting until no operation on a queue pair is in flight, of the peer or of this process's own threads.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use millstream_lockfree::barrier;
use millstream_quantity::Qpn;

use super::{Qp, QpType};
use crate::adapter::wait_until;
use crate::peer::Peer;

impl Qp {
    /// Waits for the end of a send request that another thread is executing; false at the deadline. The kernel blocks a copy
    /// to memory whose owner was stopped while it moved the pages.
    pub(crate) fn wait_for_own_requests(&self, deadline: Instant) -> bool {
        wait_until(deadline, || self.send.queue.try_lock().is_some())
    }

    /// Waits for the end of an operation that the peer had in flight at the call; false at the deadline.
    pub(crate) fn wait_for_inflight_op(&self, deadline: Instant) -> bool {
        if self.kind == QpType::Ud {
            // Many initiators, one at a time: the current one holds the lock.
            let timeout = deadline.saturating_duration_since(Instant::now());
            return self.entry.delivery.lock_within(self.adapter.id.pid, timeout).is_some();
        }
        // The caller may hold this or another send queue, so this does not wait for send queues.
        self.wait_while_inflight(deadline, || {
            self.send.queue.try_lock().map(|send| send.transport.initiator())
        })
    }

    /// Waits for the end of an operation in flight, or of its initiator. `peer` returns the initiator's process, if
    /// that is known, and its queue pair; None while that cannot be read.
    pub(super) fn wait_while_inflight(
        &self,
        deadline: Instant,
        mut peer: impl FnMut() -> Option<(Option<Arc<Peer>>, Qpn)>,
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
                    // The peer has sent to this queue pair, which has not sent to the peer yet.
                    Some((None, dest_qpn)) => Some(self.adapter.peer_of(dest_qpn)),
                };
            }
            // The calling thread may be the one that detects exits.
            match &known {
                Some(Ok(peer)) => peer.has_exited(),
                Some(Err(error)) => error.kind() == io::ErrorKind::ConnectionRefused,
                None => false,
            }
        })
    }

    /// Waits for the end of all operations that began before the call; false if one did not end (a stopped process).
    pub(super) fn quiesce(&self) -> bool {
        barrier::heavy();
        self.wait_for_inflight_op(Instant::now() + crate::ipc::TIMEOUT)
    }
}
