//! The processes that this one is connected to, by queue pair number prefix.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

use millstream_lockfree::CancelGuard;
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

/// Whether an error of a connection means that there is no such process, or none that can be connected to. After all others, such
/// as a lack of descriptors, another attempt may succeed.
fn means_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, InvalidData, PermissionDenied, Unsupported};
    matches!(error.kind(), ConnectionRefused | InvalidData | PermissionDenied | Unsupported)
}

/// Reports the first peer that a limit of this process keeps unreachable. Its requests end as if it did not answer.
fn report_shortage(error: &io::Error) {
    static REPORTED: Once = Once::new();
    let limit = match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => "`ulimit -n`",
        Some(libc::ENOMEM) => {
            "`ulimit -v`, or vm.max_map_count: the arena of each peer takes 1 GiB of addresses"
        }
        _ => return,
    };
    REPORTED.call_once(|| {
        tracing::warn!("cannot connect to a process of this host, so its queue pairs are unreachable: {error}; raise {limit}");
    });
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
        self.connect(layout::qpn_prefix(qpn), None)
    }

    /// The process with this prefix. Its answer is waited for as long as `wait`, else as long as [`HalfOpen::wait`] does.
    fn connect(&self, qpn_prefix: u32, wait: Option<Duration>) -> io::Result<Arc<Peer>> {
        if let Some(peer) = self.connected(qpn_prefix) {
            return Ok(peer);
        }
        let _uncancelled = CancelGuard::new();
        let entry = self.lock_half_open().entry(qpn_prefix).or_default().clone();
        let mut half_open = if wait.is_none() {
            entry.lock().expect("no panic under this lock")
        } else {
            // Another thread waits for the process.
            entry.try_lock().map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))?
        };
        // Another thread may have connected while this one waited for the lock.
        if let Some(peer) = self.connected(qpn_prefix) {
            return Ok(peer);
        }
        let finished = self.finish(&mut half_open, qpn_prefix, wait);
        if !matches!(&finished, Err(error) if error.kind() == io::ErrorKind::TimedOut) {
            *half_open = None;
            self.lock_half_open().remove(&qpn_prefix);
        }
        let peer = Arc::new(finished.inspect_err(report_shortage)?);
        self.by_prefix.lock().expect("no panic under this lock").insert(qpn_prefix, peer.clone());
        self.watched.lock().expect("no panic under this lock").push(peer.clone());
        self.tasks.wake();
        Ok(peer)
    }

    /// The processes with these queue pair number prefixes that answer within `wait`, which is for all of them together; and
    /// the prefixes of those that may answer later. Stopped processes and full queues of socket names delay no other process.
    pub(crate) fn owners_of(&self, prefixes: Vec<u32>, wait: Duration) -> (Vec<Arc<Peer>>, Vec<u32>) {
        let deadline = Instant::now() + wait;
        let may_exist = |prefix: &u32| !self.begin(*prefix).is_err_and(|error| means_gone(&error));
        // All are asked before any answer is waited for.
        let begun: Vec<u32> = prefixes.into_iter().filter(may_exist).collect();
        let (mut peers, mut unanswered) = (Vec::new(), Vec::new());
        for prefix in begun {
            match self.connect(prefix, Some(deadline.saturating_duration_since(Instant::now()))) {
                Ok(peer) => peers.push(peer),
                Err(error) if means_gone(&error) => {}
                Err(_) => unanswered.push(prefix),
            }
        }
        (peers, unanswered)
    }

    /// Says hello to the process with this prefix, without waiting for anything.
    fn begin(&self, qpn_prefix: u32) -> io::Result<()> {
        if self.connected(qpn_prefix).is_some() {
            return Ok(());
        }
        let entry = self.lock_half_open().entry(qpn_prefix).or_default().clone();
        let Ok(mut half_open) = entry.try_lock() else { return Err(io::ErrorKind::WouldBlock.into()) };
        if half_open.is_some() {
            return Ok(());
        }
        match HalfOpen::open_at_once(self.me, qpn_prefix) {
            Ok(opened) => *half_open = Some(opened),
            Err(error) => {
                self.lock_half_open().remove(&qpn_prefix);
                report_shortage(&error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// The process with this prefix, if it is connected.
    fn connected(&self, qpn_prefix: u32) -> Option<Arc<Peer>> {
        let peers = self.by_prefix.lock().expect("no panic under this lock");
        peers.get(&qpn_prefix).filter(|peer| peer.alive()).cloned()
    }

    fn lock_half_open(&self) -> MutexGuard<'_, HashMap<u32, Arc<Mutex<Option<HalfOpen>>>>> {
        self.half_open.lock().expect("no panic under this lock")
    }

    fn finish(
        &self,
        half_open: &mut Option<HalfOpen>,
        qpn_prefix: u32,
        wait: Option<Duration>,
    ) -> io::Result<Peer> {
        let opened = match half_open {
            Some(opened) => opened,
            None if wait.is_some() => half_open.insert(HalfOpen::open_at_once(self.me, qpn_prefix)?),
            None => half_open.insert(HalfOpen::open(self.me, qpn_prefix)?),
        };
        match wait {
            Some(wait) => opened.wait_for(wait)?,
            None => opened.wait()?,
        }
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
