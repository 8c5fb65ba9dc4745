//! Operations of peers that did not end before their queue pair was destroyed: the peers are stopped.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use millstream_quantity::Qpn;

use crate::layout::QpEntry;
use crate::peer::Peer;
use crate::qp_table::QpTable;

/// An operation of a peer on a queue pair that no longer exists.
#[derive(Debug)]
pub(crate) struct UnfinishedOp {
    pub(crate) qpn: Qpn,
    pub(crate) entry: &'static QpEntry,
    pub(crate) initiator: Initiator,
}

/// Who executes an operation.
#[derive(Debug)]
pub(crate) enum Initiator {
    /// The one peer of a connection, if its process is known. The operation has this number.
    Connected(u32, Option<Arc<Peer>>),
    /// One of many, which holds the lock of the entry.
    Datagram,
}

impl UnfinishedOp {
    fn has_ended(&self, pid: u32) -> bool {
        match &self.initiator {
            Initiator::Connected(operation, peer) => {
                self.entry.inflight.has_ended(*operation)
                    || peer.as_ref().is_some_and(|peer| peer.has_exited())
            }
            Initiator::Datagram => self.entry.delivery.lock_within(pid, Duration::ZERO).is_some(),
        }
    }
}

/// The unfinished operations of a process's peers. The numbers of their queue pairs stay in use, because the peers still
/// store to the entries.
#[derive(Debug, Default)]
pub(crate) struct UnfinishedOps(Mutex<Vec<UnfinishedOp>>);

impl UnfinishedOps {
    /// Adds an operation of a queue pair that was [unlisted](QpTable::unlist).
    pub(crate) fn add(&self, operation: UnfinishedOp) {
        self.0.lock().expect("no panic under this lock").push(operation);
    }

    /// Whether all have ended.
    pub(crate) fn have_ended(&self, pid: u32, qps: &QpTable) -> bool {
        let mut list = self.0.lock().expect("no panic under this lock");
        for ended in list.extract_if(.., |operation| operation.has_ended(pid)) {
            qps.release_qpn(ended.qpn);
        }
        list.is_empty()
    }
}
