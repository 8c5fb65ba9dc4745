//! Data connections of readout units: at the start of the run, and of units that are lost or join.

use super::BuilderProcess;
use super::landing::LandingMemory;
use crate::core::types::Immediate;
use crate::core::{RuIndex, Unit};
use crate::process::ProcessError;
use crate::process::admission::Admission;
use crate::process::startup::{Channel, FromManager, TryReceive};
use millstream_rdma::connect::{Listener, RcOptions};
use millstream_rdma::wait::CompletionWaiter;
use millstream_rdma::{
    Access, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, WaitFd, WrId,
};
use millstream_tls::Stream;
use std::net::SocketAddr;
use std::time::Duration;

/// Longest time to connect to a readout unit that joins the run. No batch is processed meanwhile.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest TLS handshake at the start of the run; other connections wait meanwhile.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The connection of a readout unit that is about to join the run.
pub(super) struct PendingPeer {
    pub(super) index: RuIndex,
    pub(super) pair: QueuePair,
    /// Arrivals from before the manager's message that it has joined.
    pub(super) arrivals: Vec<Immediate>,
}

impl BuilderProcess {
    /// Closes the connections of readout units that the run goes on without: they cannot write into slots any more.
    pub(super) fn close_excluded(&mut self) {
        for (role, place) in (0..).map(RuIndex).zip(&mut self.peers) {
            if self.core.readout_member(role).is_lost
                && let Some(pair) = place.take()
            {
                self.readout_of.remove(&pair.qpn());
            }
        }
    }

    /// Accepts the connection of a readout unit that is about to join. Nobody else is a reason to stop.
    pub(super) fn accept_joining(&mut self, listener: &Listener, queue: &CompletionQueue) {
        let Ok((stream, address)) = listener.accept(Deadline::after(Duration::ZERO)) else { return };
        let deadline = Deadline::after(CONNECT_TIMEOUT.min(self.config.plan.timeout / 4));
        let queues = (&self.device, queue, &self.connection);
        let stream = match self.admission.security.accept(stream, deadline) {
            Ok(stream) => stream,
            Err(error) => return self.admission.refuse(address, &error.to_string()),
        };
        let (index, pair) = match connect_readout((stream, address), queues, &self.landing, deadline) {
            Ok(connected) => connected,
            Err(error) => {
                let reason = format!("no connection to a readout unit that joins: {error}");
                return self.admission.refuse(address, &reason);
            }
        };
        let plan = &self.config.plan;
        let role = plan.readout_role(index);
        let is_present = !self.core.readout_member(role).is_lost;
        if is_present || !plan.is_restart(Unit::Readout(index)) || index.index() >= plan.readout_members() {
            let reason = format!("readout unit {index} may not join");
            return self.admission.refuse(address, &reason);
        }
        self.readout_of.insert(pair.qpn(), index);
        if let Some(before) =
            self.pending[role.index()].replace(PendingPeer { index, pair, arrivals: Vec::new() })
        {
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

/// Each readout unit has at most one immediate data in flight per slot.
pub(super) fn connection(slots: u16, options: RcOptions) -> RcOptions {
    RcOptions {
        send_depth: 1,
        recv_depth: u32::from(slots) + 1,
        send_sges: 1,
        max_inline: 0,
        access: Access::REMOTE_WRITE,
        ..options
    }
}

/// Accepts the connection of a readout unit; fails if the manager's stream ends first.
pub(super) fn accept(
    (listener, admission): (&Listener, &Admission),
    manager: &mut Channel,
    waiter: &mut CompletionWaiter,
    (device, queue, options): (&Device, &CompletionQueue, &RcOptions),
    landing: &LandingMemory,
    deadline: Deadline,
) -> Result<(RuIndex, QueuePair), ProcessError> {
    loop {
        let mut others = [WaitFd::readable(listener), WaitFd::readable(manager)];
        waiter.wait::<ProcessError>(&[], &mut others, deadline, || Ok(false))?;
        let manager_speaks = others[1].is_ready();
        if manager_speaks && matches!(manager.try_receive::<FromManager>(), TryReceive::Closed) {
            return Err(ProcessError::Startup {
                unit: Unit::Manager,
                what: "ended before the run started".to_owned(),
            });
        }
        let (stream, address) = listener.accept(deadline)?;
        match admission.security.accept(stream, deadline.earlier(Deadline::after(HANDSHAKE_TIMEOUT))) {
            Ok(stream) => {
                return connect_readout((stream, address), (device, queue, options), landing, deadline);
            }
            Err(error) if deadline.passed() => return Err(error.into()),
            // Not a unit of this run.
            Err(error) => admission.refuse(address, &error.to_string()),
        }
    }
}

/// Makes the data connection to a readout unit that has connected.
fn connect_readout(
    (mut stream, address): (Stream, SocketAddr),
    (device, queue, options): (&Device, &CompletionQueue, &RcOptions),
    landing: &LandingMemory,
    deadline: Deadline,
) -> Result<(RuIndex, QueuePair), ProcessError> {
    let prepared = PreparedQueuePair::new(device, queue, queue, options)?;
    for _ in 0..options.recv_depth {
        prepared.post_recv(&[], WrId(0))?;
    }
    let connected = prepared.connect(&mut stream, &landing.remote().encode(), deadline)?;
    match <[u8; 2]>::try_from(connected.private_data.as_slice()) {
        Ok(index) => Ok((RuIndex(u16::from_be_bytes(index)), connected.pair)),
        Err(_) => Err(ProcessError::UnknownPeer {
            peer: address.to_string(),
            what: format!("sent {} bytes of private data, expected its index", connected.private_data.len()),
        }),
    }
}
