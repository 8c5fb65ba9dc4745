//! The processes that this one is connected to, by queue pair number prefix.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use millstream_quantity::Qpn;

use crate::layout;
use crate::peer::{HalfOpen, LocalId, Peer};
use crate::tasks::TaskQueue;

/// The connected peers, and the peers whose exit the progress thread watches for.
#[derive(Debug)]
pub(crate) struct PeerTable {
    me: LocalId,
    tasks: &'static TaskQueue,
    by_prefix: Mutex<HashMap<u32, Arc<Peer>>>,
    /// Processes that have not answered yet. The inner lock is held while a thread waits for the answer; only threads that
    /// need the same process wait for it.
    half_open: Mutex<HashMap<u32, Arc<Mutex<Option<HalfOpen>>>>>,
    watched: Mutex<Vec<Arc<Peer>>>,
}

impl PeerTable {
    pub(crate) fn new(me: LocalId, tasks: &'static TaskQueue) -> Self {
        Self {
            me,
            tasks,
            by_prefix: Mutex::default(),
            half_open: Mutex::default(),
            watched: Mutex::default(),
        }
    }

    /// Adds this process as a peer of itself.
    pub(crate) fn add_local(&self, local: Peer) {
        let mut peers = self.by_prefix.lock().expect("no panic under this lock");
        peers.insert(self.me.qpn_prefix, Arc::new(local));
    }

    /// The process that owns `qpn`, connecting to it if need be.
    ///
    /// # Errors
    /// As [`HalfOpen::open`], [`HalfOpen::wait`] and [`HalfOpen::finish`]. After TimedOut, a later call takes the answer.
    pub(crate) fn owner_of(&self, qpn: Qpn) -> io::Result<Arc<Peer>> {
        let qpn_prefix = layout::qpn_prefix(qpn);
        if let Some(peer) = self.connected(qpn_prefix) {
            return Ok(peer);
        }
        let half_open = self.lock_half_open().entry(qpn_prefix).or_default().clone();
        let mut half_open = half_open.lock().expect("no panic under this lock");
        // Another thread may have connected while this one waited for the lock.
        if let Some(peer) = self.connected(qpn_prefix) {
            return Ok(peer);
        }
        let finished = self.finish(&mut half_open, qpn_prefix);
        if !matches!(&finished, Err(error) if error.kind() == io::ErrorKind::TimedOut) {
            *half_open = None;
            self.lock_half_open().remove(&qpn_prefix);
        }
        let peer = Arc::new(finished?);
        self.by_prefix.lock().expect("no panic under this lock").insert(qpn_prefix, peer.clone());
        self.watched.lock().expect("no panic under this lock").push(peer.clone());
        self.tasks.wake();
        Ok(peer)
    }

    /// The process with this prefix, if it is connected.
    fn connected(&self, qpn_prefix: u32) -> Option<Arc<Peer>> {
        let peers = self.by_prefix.lock().expect("no panic under this lock");
        peers.get(&qpn_prefix).filter(|peer| peer.alive()).cloned()
    }

    fn lock_half_open(&self) -> MutexGuard<'_, HashMap<u32, Arc<Mutex<Option<HalfOpen>>>>> {
        self.half_open.lock().expect("no panic under this lock")
    }

    fn finish(&self, half_open: &mut Option<HalfOpen>, qpn_prefix: u32) -> io::Result<Peer> {
        if half_open.is_none() {
            *half_open = Some(HalfOpen::open(self.me, qpn_prefix)?);
        }
        half_open.as_mut().expect("just set").wait()?;
        half_open.take().expect("just set").finish(self.tasks)
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
