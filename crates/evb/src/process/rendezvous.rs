//! The manager's side of the startup.
//!
//! Each step waits for all units. It fails if a unit ends or cannot start, or if the stop is requested.

use super::ProcessError;
use super::admission::Admission;
use super::startup::{self, Channel, ToManager, TryReceive};
use crate::config::RunConfig;
use crate::core::plan::Plan;
use crate::core::{BuIndex, RuIndex, StopCause, Unit};
use millstream_rdma::connect::Listener;
use millstream_rdma::wait::CompletionWaiter;
use millstream_rdma::{Deadline, WaitFd};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Time for the first frame of a connection.
const FIRST_FRAME_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections without a first frame at one time; the oldest is dropped for a new one.
const MAX_UNIDENTIFIED: usize = 1024;

/// The units that have joined, by position: readout units, then builder units.
pub(super) struct Rendezvous<'a> {
    config: &'a RunConfig,
    pub(super) waiter: CompletionWaiter,
    /// Each unit's stream, and the address for data connections.
    pub(super) joined: Vec<Option<(Channel, Option<String>)>>,
    pub(super) deadline: Deadline,
    /// The stream of the standby manager, and where it listens.
    pub(super) standby: Option<(Channel, String)>,
    timeout: Duration,
    unidentified: Unidentified,
}

/// Connections that have not sent a complete first frame, with the time at which they are dropped.
pub(super) struct Unidentified {
    admission: Admission,
    connections: Vec<(Channel, SocketAddr, Deadline)>,
}

/// The first frame of a unit.
pub(super) struct JoinRequest {
    pub(super) channel: Channel,
    pub(super) address: SocketAddr,
    pub(super) version: String,
    pub(super) unit: Unit,
    /// Where a builder unit accepts data connections.
    pub(super) data: Option<String>,
}

impl Unidentified {
    pub(super) fn new(admission: &Admission) -> Unidentified {
        Unidentified { admission: admission.clone(), connections: Vec::new() }
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = WaitFd<'_>> {
        self.connections.iter().map(|(channel, ..)| WaitFd::readable(channel))
    }

    /// When the first connection has to be dropped, if that is before `deadline`.
    fn due(&self, deadline: Deadline) -> Deadline {
        self.connections.iter().fold(deadline, |due, (.., at)| due.earlier(*at))
    }

    /// Accepts a connection that waits.
    pub(super) fn accept(&mut self, listener: &Listener, deadline: Deadline) {
        // A connection that has gone away is none.
        let Ok((stream, address)) = listener.accept(deadline) else { return };
        let stream = match self.admission.security.accept_later(stream) {
            Ok(stream) => stream,
            Err(error) => return self.admission.refuse(address, &error.to_string()),
        };
        if self.connections.len() == MAX_UNIDENTIFIED {
            let (_, oldest, _) = self.connections.remove(0);
            self.admission.refuse(oldest, "it made room for a new connection");
        }
        self.connections.push((
            Channel::of_unidentified(stream),
            address,
            Deadline::after(FIRST_FRAME_TIMEOUT),
        ));
    }

    /// Takes the connections whose first frame is there. A connection that sends anything but a Join frame, or nothing
    /// for too long, is not a unit and is dropped.
    pub(super) fn take_requests(&mut self, plan: &Plan) -> Vec<JoinRequest> {
        let mut requests = Vec::new();
        for (mut channel, address, due) in std::mem::take(&mut self.connections) {
            match channel.handshake() {
                Ok(true) => {}
                Ok(false) if due.passed() => {
                    self.admission.refuse(address, "it did not complete the TLS handshake in time");
                    continue;
                }
                Ok(false) => {
                    self.connections.push((channel, address, due));
                    continue;
                }
                Err(error) => {
                    self.admission.refuse(address, &error.to_string());
                    continue;
                }
            }
            match channel.try_receive() {
                TryReceive::Frame(ToManager::Join { version, unit, data }) => {
                    let channel = channel.identified();
                    match channel.set_peer_timeout(plan) {
                        Ok(()) => requests.push(JoinRequest { channel, address, version, unit, data }),
                        Err(error) => self.admission.refuse(address, &error.to_string()),
                    }
                }
                TryReceive::Pending if !due.passed() => self.connections.push((channel, address, due)),
                TryReceive::Pending | TryReceive::Closed | TryReceive::Frame(_) => {
                    self.admission.refuse(address, "it sent no Join frame");
                }
            }
        }
        requests
    }
}

impl<'a> Rendezvous<'a> {
    /// Starts without units.
    pub(super) fn new(
        config: &'a RunConfig,
        admission: &Admission,
        waiter: CompletionWaiter,
    ) -> Rendezvous<'a> {
        let units = config.plan.readouts() + config.plan.initial_builders();
        let joined = (0..units).map(|_| None).collect();
        let timeout = startup::timeout(config);
        Rendezvous {
            config,
            waiter,
            joined,
            deadline: Deadline::after(timeout),
            standby: None,
            timeout,
            unidentified: Unidentified::new(admission),
        }
    }

    /// The unit at a position.
    pub(super) fn unit(&self, position: usize) -> Unit {
        let readouts = self.config.plan.readouts();
        match position.checked_sub(readouts) {
            None => Unit::Readout(RuIndex(position as u16)),
            Some(builder) => Unit::Builder(BuIndex(builder as u16)),
        }
    }

    fn position(&self, unit: Unit) -> Option<usize> {
        let readouts = self.config.plan.readouts();
        let position = match unit {
            Unit::Manager => None,
            Unit::Readout(ru) => (ru.index() < readouts).then_some(ru.index()),
            Unit::Builder(bu) => Some(readouts + bu.index()),
        };
        position.filter(|&position| position < self.joined.len())
    }

    /// A unit that has not joined; the manager stands for its standby.
    fn missing(&self) -> Option<Unit> {
        let needs_standby = self.config.plan.recovery.has_standby();
        match self.joined.iter().position(Option::is_none) {
            Some(position) => Some(self.unit(position)),
            None => (needs_standby && self.standby.is_none()).then_some(Unit::Manager),
        }
    }

    /// Waits until all units have joined.
    pub(super) fn admit_all(
        &mut self,
        listener: &Listener,
        stop: BorrowedFd<'_>,
    ) -> Result<(), ProcessError> {
        while let Some(missing) = self.missing() {
            let mut others = vec![WaitFd::readable(&stop), WaitFd::readable(listener)];
            let there = self.joined.iter().flatten();
            others.extend(there.map(|(channel, _)| WaitFd::readable(channel)));
            others.extend(self.unidentified.descriptors());
            let due = self.unidentified.due(self.deadline);
            self.waiter.wait::<ProcessError>(&[], &mut others, due, || Ok(false))?;
            if others[0].is_ready() {
                return Err(ProcessError::Stopped(StopCause::Requested));
            }
            let comes = others[1].is_ready();
            for position in 0..self.joined.len() {
                if self.receive(position)?.is_some() {
                    return Err(startup::unexpected_frame(self.unit(position)));
                }
            }
            if comes {
                self.unidentified.accept(listener, self.deadline);
            }
            for request in self.unidentified.take_requests(&self.config.plan) {
                self.join(request)?;
            }
            if self.deadline.passed() {
                let whose = if missing == Unit::Manager { "its standby " } else { "" };
                let what = format!("{whose}did not join within {:?}", self.timeout);
                return Err(ProcessError::Startup { unit: missing, what });
            }
        }
        Ok(())
    }

    fn join(&mut self, request: JoinRequest) -> Result<(), ProcessError> {
        let JoinRequest { channel, address, version, unit, data } = request;
        let unknown_peer = |what: String| ProcessError::UnknownPeer { peer: address.to_string(), what };
        if !startup::is_our_version(&version) {
            return Err(unknown_peer(format!(
                "{unit} has version {version:?}; start all units from one build"
            )));
        }
        if unit == Unit::Manager && self.config.plan.recovery.has_standby() {
            let address =
                data.ok_or_else(|| unknown_peer("joined as standby manager without address".into()))?;
            self.standby = Some((channel, address));
            return Ok(());
        }
        let position = self
            .position(unit)
            .ok_or_else(|| unknown_peer(format!("joined as {unit}, which is not in the run")))?;
        let entry = &mut self.joined[position];
        if entry.is_some() {
            return Err(unknown_peer(format!("joined as {unit}, which has already joined")));
        }
        *entry = Some((channel, data));
        Ok(())
    }

    /// Takes the next frame of a unit, if there is one. Fails if the unit ended or cannot start.
    fn receive(&mut self, position: usize) -> Result<Option<ToManager>, ProcessError> {
        let unit = self.unit(position);
        let Some((channel, _)) = &mut self.joined[position] else { return Ok(None) };
        match channel.try_receive() {
            TryReceive::Pending => Ok(None),
            TryReceive::Frame(ToManager::Failed(why)) => Err(ProcessError::UnitFailed { unit, why }),
            TryReceive::Frame(frame) => Ok(Some(frame)),
            TryReceive::Closed => {
                Err(ProcessError::Startup { unit, what: "ended before the run started".to_owned() })
            }
        }
    }

    /// Waits until all units have sent a frame that `is_it` accepts; `what` names it in errors.
    pub(super) fn await_all(
        &mut self,
        stop: BorrowedFd<'_>,
        what: &str,
        is_it: impl Fn(&ToManager) -> bool,
    ) -> Result<(), ProcessError> {
        let mut waiting: Vec<usize> = (0..self.joined.len()).collect();
        while let Some(&first) = waiting.first() {
            // Only units that are not done: others may be making a connection over the stream.
            let channels = waiting.iter().filter_map(|&position| self.joined[position].as_ref());
            let mut others = vec![WaitFd::readable(&stop)];
            others.extend(channels.map(|(channel, _)| WaitFd::readable(channel)));
            self.waiter.wait::<ProcessError>(&[], &mut others, self.deadline, || Ok(false))?;
            if others[0].is_ready() {
                return Err(ProcessError::Stopped(StopCause::Requested));
            }
            let mut still = Vec::with_capacity(waiting.len());
            for position in waiting {
                match self.receive(position)? {
                    None => still.push(position),
                    Some(frame) if is_it(&frame) => {}
                    Some(_) => return Err(startup::unexpected_frame(self.unit(position))),
                }
            }
            waiting = still;
            if self.deadline.passed() {
                let what = format!("is not {what} after {:?}", self.timeout);
                return Err(ProcessError::Startup { unit: self.unit(first), what });
            }
        }
        Ok(())
    }
}
