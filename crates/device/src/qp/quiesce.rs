//! Waiting until nobody is inside a queue pair: neither the peer nor this process's own threads.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use millstream_lockfree::barrier;

use super::{Qp, QpType};
use crate::adapter::wait_until;
use crate::peer::Peer;

impl Qp {
    /// Waits until a send request that is being carried out, perhaps by the device's own thread, is over.
    pub(crate) fn wait_for_own_requests(&self) {
        drop(self.send.queue.lock());
    }

    /// Waits until the peer is not inside an operation that it began before.
    pub(crate) fn wait_until_untouched(&self, deadline: Instant) -> bool {
        if self.kind == QpType::Ud {
            // Many initiators, one at a time: the one inside holds the lease.
            let patience = deadline.saturating_duration_since(Instant::now());
            return self.entry.delivery.lock_within(self.adapter.id.pid, patience).is_some();
        }
        // Who calls may hold this or another send queue: only a look is taken at who the peer is.
        self.wait_while_busy(deadline, || self.send.queue.try_lock().map(|send| send.transport.initiator()))
    }

    /// Waits until the peer is not inside an operation that it began before, or is gone. `peer` says who
    /// it is, if that can be seen now, and the queue pair that would tell.
    pub(super) fn wait_while_busy(
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
    pub(super) fn quiesce(&self) -> bool {
        barrier::heavy();
        self.wait_until_untouched(Instant::now() + crate::ipc::TIMEOUT)
    }
}
