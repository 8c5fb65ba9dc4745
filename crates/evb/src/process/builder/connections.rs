//! Data connections of readout units: at the start of the run, and of units that are lost.

use super::BuilderProcess;
use super::joining::Connecting;
use crate::core::{RuIndex, Unit};
use crate::process::ProcessError;
use crate::process::admission::Admission;
use crate::process::startup::{Channel, FromManager, TryReceive};
use millstream_rdma::connect::{Listener, RcOptions};
use millstream_rdma::wait::CompletionWaiter;
use millstream_rdma::{
    Access, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, RemoteMemory, WaitFd, WrId,
};
use millstream_tls::Stream;
use std::net::SocketAddr;
use std::time::Duration;

/// Longest time for one connection at the start of the run.
const START_TIMEOUT: Duration = Duration::from_secs(10);

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

/// What the data connections of a builder unit have in common.
#[derive(Clone)]
pub(super) struct DataEndpoint {
    pub(super) device: Device,
    pub(super) queue: CompletionQueue,
    pub(super) options: RcOptions,
    /// Readout units write there.
    pub(super) landing: RemoteMemory,
}

/// Accepts the connections of all `expected` readout units; fails if the manager's stream ends first. Connections of others are
/// refused, and hold nobody up.
pub(super) fn accept_all(
    (listener, admission): (&Listener, &Admission),
    manager: &mut Channel,
    waiter: &mut CompletionWaiter,
    endpoint: &DataEndpoint,
    expected: &[RuIndex],
    deadline: Deadline,
) -> Result<Vec<(RuIndex, QueuePair)>, ProcessError> {
    let mut connecting = Connecting::new()?;
    let mut connected: Vec<(RuIndex, QueuePair)> = Vec::with_capacity(expected.len());
    while connected.len() < expected.len() {
        let wake = connecting.wake_fd();
        let mut others = vec![WaitFd::readable(manager), WaitFd::readable(&*wake)];
        if !connecting.is_full() {
            others.push(WaitFd::readable(listener));
        }
        waiter.wait::<ProcessError>(&[], &mut others, deadline, || Ok(false))?;
        let [manager_speaks, has_result] = [others[0].is_ready(), others[1].is_ready()];
        let comes = others.get(2).is_some_and(WaitFd::is_ready);
        if manager_speaks && matches!(manager.try_receive::<FromManager>(), TryReceive::Closed) {
            return Err(ProcessError::Startup {
                unit: Unit::Manager,
                what: "ended before the run started".to_owned(),
            });
        }
        if comes {
            let timeout = deadline.earlier(Deadline::after(START_TIMEOUT));
            connecting.accept(listener, admission, endpoint, timeout);
        }
        while has_result && let Some((address, result)) = connecting.take() {
            match result {
                Ok((ru, _)) if !expected.contains(&ru) || connected.iter().any(|(known, _)| *known == ru) => {
                    admission.refuse(address, &format!("readout unit {ru} is not expected"));
                }
                Ok(peer) => connected.push(peer),
                // Not a unit of this run, or one that ends with an error of its own.
                Err(error @ (ProcessError::Connect(_) | ProcessError::UnknownPeer { .. })) => {
                    admission.refuse(address, &error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        if deadline.passed() {
            let missing = expected.iter().find(|ru| !connected.iter().any(|(known, _)| known == *ru));
            let unit = Unit::Readout(missing.copied().unwrap_or_default());
            return Err(ProcessError::Startup {
                unit,
                what: "did not connect to this builder unit".to_owned(),
            });
        }
    }
    Ok(connected)
}

/// Makes the data connection to a readout unit that has connected.
pub(super) fn connect_readout(
    (mut stream, address): (Stream, SocketAddr),
    endpoint: &DataEndpoint,
    deadline: Deadline,
) -> Result<(RuIndex, QueuePair), ProcessError> {
    let DataEndpoint { device, queue, options, landing } = endpoint;
    let prepared = PreparedQueuePair::new(device, queue, queue, options)?;
    for _ in 0..options.recv_depth {
        prepared.post_recv(&[], WrId(0))?;
    }
    let connected = prepared.connect(&mut stream, &landing.encode(), deadline)?;
    match <[u8; 2]>::try_from(connected.private_data.as_slice()) {
        Ok(index) => Ok((RuIndex(u16::from_be_bytes(index)), connected.pair)),
        Err(_) => Err(ProcessError::UnknownPeer {
            peer: address.to_string(),
            what: format!("sent {} bytes of private data, expected its index", connected.private_data.len()),
        }),
    }
}
