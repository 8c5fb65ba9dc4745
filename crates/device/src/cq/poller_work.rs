//! Work of an application that polls an empty queue: receiving packets and retrying pending requests.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use millstream_lockfree::CancelGuard;

use super::Cq;
use crate::errno::{Errno, Result};
use crate::region_mover;
use crate::tasks::PendingRequests;

/// Bit of [`Cq::poller_work`]: send requests are pending.
const PENDING: u32 = 1;
/// Bit of [`Cq::poller_work`]: queue pairs receive packets.
const NETWORK: u32 = 2;
/// Bit of [`Cq::poller_work`]: pages of regions wait for a thread of the application to move them.
const MOVE: u32 = 4;

impl Cq {
    /// Whether nothing was lost and a poller of the empty queue has no work.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        !self.overrun.load(Ordering::Relaxed) && self.poller_work.load(Ordering::Relaxed) == 0
    }

    #[cold]
    pub(super) fn work_for_poller(&self, reports_overrun: bool) -> Result<()> {
        if reports_overrun && self.overrun.load(Ordering::Relaxed) {
            return Err(Errno(libc::EIO));
        }
        let _uncancelled = CancelGuard::new();
        self.progress();
        Ok(())
    }

    /// Starts or stops to receive packets for a queue pair while this queue is polled.
    pub(crate) fn poll_network(&self, on: bool) {
        if on {
            self.network_qps.fetch_add(1, Ordering::SeqCst);
            self.poller_work.fetch_or(NETWORK, Ordering::SeqCst);
        } else {
            self.network_qps.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Lets the next poller of the empty queue move pages of regions.
    pub(crate) fn request_move(&self) {
        self.poller_work.fetch_or(MOVE, Ordering::Release);
    }

    /// Adds a queue pair whose pending requests a poller retries.
    pub(crate) fn add_pending(&self, qp: Weak<dyn PendingRequests>) {
        self.pending.lock().push(qp);
        self.poller_work.fetch_or(PENDING, Ordering::Release);
    }

    /// Retries pending requests and receives packets, for an application that polls.
    #[cold]
    fn progress(&self) {
        let work = self.poller_work.load(Ordering::Acquire);
        if work & NETWORK != 0 {
            if self.network_qps.load(Ordering::Relaxed) != 0 {
                self.context.adapter.port.poll();
            } else {
                self.poller_work.fetch_and(!NETWORK, Ordering::SeqCst);
                // A queue pair that started meanwhile counted itself before it set the bit.
                if self.network_qps.load(Ordering::SeqCst) != 0 {
                    self.poller_work.fetch_or(NETWORK, Ordering::SeqCst);
                }
            }
        }
        if work & MOVE != 0 {
            self.poller_work.fetch_and(!MOVE, Ordering::SeqCst);
            region_mover::move_deferred(self.context.adapter);
        }
        if work & PENDING == 0 {
            return;
        }
        let pending = {
            let mut list = self.pending.lock();
            self.poller_work.fetch_and(!PENDING, Ordering::SeqCst);
            std::mem::take(&mut *list)
        };
        for qp in pending {
            if qp.upgrade().is_some_and(|qp| qp.retry_for_poller()) {
                self.add_pending(qp);
            }
        }
    }
}

/// While it exists, an application that polls one of the queues also receives packets.
#[derive(Debug)]
pub(crate) struct PacketPolling(Vec<Arc<Cq>>);

impl PacketPolling {
    pub(crate) fn new(queues: Vec<Arc<Cq>>) -> Self {
        queues.iter().for_each(|cq| cq.poll_network(true));
        Self(queues)
    }
}

impl Drop for PacketPolling {
    fn drop(&mut self) {
        self.0.iter().for_each(|cq| cq.poll_network(false));
    }
}
