//! Connections of readout units: at the start of the run, and of units that are about to join it.
//!
//! Each is made on a thread of its own: a peer that says nothing delays no batch, and no other connection.

use super::BuilderProcess;
use super::connections::{DataEndpoint, connect_readout};
use crate::core::types::Immediate;
use crate::core::{RuIndex, Unit};
use crate::process::ProcessError;
use crate::process::admission::Admission;
use crate::process::error::IoContext;
use millstream_rdma::connect::Listener;
use millstream_rdma::{CompletionQueue, Deadline, Qpn, QueuePair, WrId};
use millstream_shm::EventFd;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

/// Longest time to connect to a readout unit that joins the run.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Most connections that are made at a time.
const MAX_CONNECTING: usize = 16;

/// The connection of a readout unit that is about to join the run.
pub(super) struct PendingPeer {
    pub(super) index: RuIndex,
    pub(super) pair: QueuePair,
    /// Arrivals from before the manager's message that it has joined.
    pub(super) arrivals: Vec<Immediate>,
}

/// Who connected, and the connection or why there is none.
type Connected = (SocketAddr, Result<(RuIndex, QueuePair), ProcessError>);

/// Connections that are being made.
pub(super) struct Connecting {
    results: (Sender<Connected>, Receiver<Connected>),
    /// Readable when there is a result.
    wake: Arc<EventFd>,
    number: usize,
    /// Immediate data from readout units whose connection is made, but not taken yet; `None` for one that has failed.
    early: Vec<(Qpn, Option<u32>)>,
}

impl Connecting {
    pub(super) fn new() -> Result<Connecting, ProcessError> {
        let wake = Arc::new(EventFd::new().context("create an eventfd")?);
        Ok(Connecting { results: mpsc::channel(), wake, number: 0, early: Vec::new() })
    }

    /// Readable when a connection is made, or has failed.
    pub(super) fn wake_fd(&self) -> Arc<EventFd> {
        Arc::clone(&self.wake)
    }

    /// Whether no further connection can be made meanwhile.
    pub(super) fn is_full(&self) -> bool {
        self.number == MAX_CONNECTING
    }

    /// Accepts a connection, and makes it by `deadline`.
    pub(super) fn accept(
        &mut self,
        listener: &Listener,
        admission: &Admission,
        endpoint: &DataEndpoint,
        deadline: Deadline,
    ) {
        let Ok((stream, address)) = listener.accept(Deadline::after(Duration::ZERO)) else { return };
        if self.is_full() {
            return admission.refuse(address, "too many others are connecting");
        }
        let (security, endpoint) = (admission.security.clone(), endpoint.clone());
        let (results, wake) = (self.results.0.clone(), self.wake_fd());
        let connect = move || {
            let accepted = security.accept(stream, deadline).map_err(ProcessError::from);
            let connected =
                accepted.and_then(|stream| connect_readout((stream, address), &endpoint, deadline));
            // The unit may have ended.
            let _ = results.send((address, connected));
            wake.signal();
        };
        match std::thread::Builder::new().name("connecting".to_owned()).spawn(connect) {
            Ok(_) => self.number += 1,
            Err(error) => admission.refuse(address, &format!("no thread: {error}")),
        }
    }

    /// The next connection that was made, or failed. Until there is one, [`wake_fd`](Self::wake_fd) is not readable.
    pub(super) fn take(&mut self) -> Option<Connected> {
        let result = self.results.1.try_recv().ok().or_else(|| {
            self.wake.clear();
            self.results.1.try_recv().ok()
        });
        self.number -= usize::from(result.is_some());
        result
    }

    /// Keeps immediate data of a queue pair that is not known yet, or that it has failed.
    pub(super) fn keep(&mut self, pair: Qpn, immediate: Option<u32>) {
        if self.number > 0 {
            self.early.push((pair, immediate));
        }
    }
}

impl BuilderProcess {
    /// Accepts a connection, perhaps of a readout unit that is about to join.
    pub(super) fn accept_joining(&mut self, listener: &Listener, queue: &CompletionQueue) {
        let endpoint = DataEndpoint {
            device: self.device.clone(),
            queue: queue.clone(),
            options: self.connection,
            landing: self.landing.remote(),
        };
        self.connecting.accept(listener, &self.admission, &endpoint, Deadline::after(CONNECT_TIMEOUT));
    }

    /// Takes connections that were made. Nobody who may not join is a reason to stop.
    pub(super) fn take_connected(&mut self) {
        while let Some((address, connected)) = self.connecting.take() {
            match connected {
                Ok((index, pair)) => self.admit(address, index, pair),
                Err(error) => self
                    .admission
                    .refuse(address, &format!("no connection to a readout unit that joins: {error}")),
            }
        }
        if self.connecting.number == 0 {
            // Of connections that were refused.
            self.connecting.early.clear();
        }
    }

    fn admit(&mut self, address: SocketAddr, index: RuIndex, pair: QueuePair) {
        let plan = &self.config.plan;
        let is_restart = plan.is_restart(Unit::Readout(index)) && index.index() < plan.readout_members();
        let member = self.core.readout_member(plan.readout_role(index));
        let role = plan.readout_role(index).index();
        // The manager's message that it has joined may be faster than the thread that made the connection.
        let has_joined = member.index == index && self.peers[role].is_none();
        if !(is_restart && (member.is_lost || has_joined)) {
            return self.admission.refuse(address, &format!("readout unit {index} may not join"));
        }
        let early = self.connecting.early.extract_if(.., |(of, _)| *of == pair.qpn());
        let arrivals: Option<Vec<_>> = early.map(|(_, data)| data.map(Immediate::decode)).collect();
        let lives = |arrivals: &Vec<_>| arrivals.iter().all(|_| pair.post_recv(&[], WrId(0)).is_ok());
        let Some(arrivals) = arrivals.filter(lives) else {
            return self.admission.refuse(address, &format!("readout unit {index} has disconnected"));
        };
        self.readout_of.insert(pair.qpn(), index);
        if let Some(before) = self.pending[role].replace(PendingPeer { index, pair, arrivals }) {
            self.readout_of.remove(&before.pair.qpn());
        }
    }

    /// Takes the connections of readout units that have joined into use.
    pub(super) fn open_joined(&mut self) {
        for role in 0..self.pending.len() {
            let member = self.core.readout_member(RuIndex(role as u16));
            let has_joined = |pending: &PendingPeer| !member.is_lost && pending.index == member.index;
            if self.pending[role].as_ref().is_some_and(has_joined)
                && let Some(PendingPeer { index, pair, arrivals }) = self.pending[role].take()
            {
                self.peers[role] = Some(pair);
                arrivals.into_iter().for_each(|immediate| self.arrive(index, immediate));
            }
        }
    }
}
