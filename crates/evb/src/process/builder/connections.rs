//! Data connections of readout units: at the start of the run, and of units that are lost.

use super::BuilderProcess;
use super::landing::LandingMemory;
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

/// Longest TLS handshake at the start of the run; other connections wait meanwhile.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

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
                let landing = landing.remote().encode();
                return connect_readout((stream, address), (device, queue, options), &landing, deadline);
            }
            Err(error) if deadline.passed() => return Err(error.into()),
            // Not a unit of this run.
            Err(error) => admission.refuse(address, &error.to_string()),
        }
    }
}

/// Makes the data connection to a readout unit that has connected, which gets the place of landing memory.
pub(super) fn connect_readout(
    (mut stream, address): (Stream, SocketAddr),
    (device, queue, options): (&Device, &CompletionQueue, &RcOptions),
    landing: &[u8],
    deadline: Deadline,
) -> Result<(RuIndex, QueuePair), ProcessError> {
    let prepared = PreparedQueuePair::new(device, queue, queue, options)?;
    for _ in 0..options.recv_depth {
        prepared.post_recv(&[], WrId(0))?;
    }
    let connected = prepared.connect(&mut stream, landing, deadline)?;
    match <[u8; 2]>::try_from(connected.private_data.as_slice()) {
        Ok(index) => Ok((RuIndex(u16::from_be_bytes(index)), connected.pair)),
        Err(_) => Err(ProcessError::UnknownPeer {
            peer: address.to_string(),
            what: format!("sent {} bytes of private data, expected its index", connected.private_data.len()),
        }),
    }
}
