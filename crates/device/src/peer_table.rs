//! The processes that this one is connected to, by queue pair number prefix.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};

use millstream_quantity::Qpn;

use crate::layout;
use crate::peer::{LocalId, Peer};
use crate::tasks::TaskQueue;

/// The connected peers, and the peers whose exit the progress thread watches for.
#[derive(Debug)]
pub(crate) struct PeerTable {
    me: LocalId,
    tasks: &'static TaskQueue,
    by_prefix: Mutex<HashMap<u32, Arc<Peer>>>,
    watched: Mutex<Vec<Arc<Peer>>>,
}

impl PeerTable {
    pub(crate) fn new(me: LocalId, tasks: &'static TaskQueue) -> Self {
        Self { me, tasks, by_prefix: Mutex::default(), watched: Mutex::default() }
    }

    /// Adds this process as a peer of itself.
    pub(crate) fn add_local(&self, local: Peer) {
        let mut peers = self.by_prefix.lock().expect("no panic under this lock");
        peers.insert(self.me.qpn_prefix, Arc::new(local));
    }

    /// The process that owns `qpn`, connecting to it if need be.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub(crate) fn owner_of(&self, qpn: Qpn) -> io::Result<Arc<Peer>> {
        let qpn_prefix = layout::qpn_prefix(qpn);
        let mut peers = self.by_prefix.lock().expect("no panic under this lock");
        if let Some(peer) = peers.get(&qpn_prefix)
            && peer.alive()
        {
            return Ok(peer.clone());
        }
        let peer = Arc::new(Peer::connect(self.me, qpn_prefix)?);
        peers.insert(qpn_prefix, peer.clone());
        drop(peers);
        self.watched.lock().expect("no panic under this lock").push(peer.clone());
        self.tasks.wake();
        Ok(peer)
    }

    /// The peers whose exit is watched for.
    pub(crate) fn watched(&self) -> Vec<Arc<Peer>> {
        self.watched.lock().expect("no panic under this lock").clone()
    }

    /// Removes a process that has exited. Queue pairs release their references to it when they are reset.
    pub(crate) fn remove(&self, peer: &Arc<Peer>) {
        peer.mark_lost();
        let other = |known: &Arc<Peer>| !Arc::ptr_eq(known, peer);
        self.by_prefix.lock().expect("no panic under this lock").retain(|_, known| other(known));
        self.watched.lock().expect("no panic under this lock").retain(other);
    }
}
