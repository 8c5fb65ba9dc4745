//! The manager's side of the wire-up: waiting for all units, step by step.
//!
//! Whatever it waits for, it hears of a unit that is gone or cannot start, and of being told to stop.

use super::ProcessError;
use super::wire_up::{self, Channel, Look, ToManager};
use crate::config::Setup;
use crate::core::{BuIndex, RuIndex, StopCause, Unit};
use millstream_rdma::connect::Listener;
use millstream_rdma::wait::Waiter;
use millstream_rdma::{Deadline, WaitFd};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The units that have joined, by position: readout units, then builder units.
pub(super) struct Gathering<'a> {
    setup: &'a Setup,
    pub(super) waiter: Waiter,
    /// Each unit's stream, and where it takes connections.
    pub(super) joined: Vec<Option<(Channel, Option<String>)>>,
    pub(super) deadline: Deadline,
    patience: Duration,
}

impl<'a> Gathering<'a> {
    /// Nobody has joined.
    pub(super) fn new(setup: &'a Setup, waiter: Waiter) -> Gathering<'a> {
        let units = setup.plan.readouts() + setup.plan.builders();
        let joined = (0..units).map(|_| None).collect();
        let patience = wire_up::patience(setup);
        Gathering { setup, waiter, joined, deadline: Deadline::after(patience), patience }
    }

    /// The unit at a position.
    pub(super) fn unit(&self, position: usize) -> Unit {
        let readouts = self.setup.plan.readouts();
        match position.checked_sub(readouts) {
            None => Unit::Readout(RuIndex(position as u16)),
            Some(builder) => Unit::Builder(BuIndex(builder as u16)),
        }
    }

    fn position(&self, unit: Unit) -> Option<usize> {
        let readouts = self.setup.plan.readouts();
        let position = match unit {
            Unit::Manager => None,
            Unit::Readout(ru) => (ru.index() < readouts).then_some(ru.index()),
            Unit::Builder(bu) => Some(readouts + bu.index()),
        };
        position.filter(|&position| position < self.joined.len())
    }

    fn missing(&self) -> Option<Unit> {
        let position = self.joined.iter().position(Option::is_none)?;
        Some(self.unit(position))
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
            self.waiter.wait::<ProcessError>(&[], &mut others, self.deadline, || Ok(false))?;
            if others[0].is_ready() {
                return Err(ProcessError::Stopped(StopCause::Requested));
            }
            let comes = others[1].is_ready();
            for position in 0..self.joined.len() {
                if self.hear(position)?.is_some() {
                    return Err(wire_up::out_of_turn(self.unit(position)));
                }
            }
            if comes {
                self.admit(listener)?;
            } else if self.deadline.passed() {
                let what = format!("has not joined within {:?}", self.patience);
                return Err(ProcessError::WireUp { unit: missing, what });
            }
        }
        Ok(())
    }

    fn admit(&mut self, listener: &Listener) -> Result<(), ProcessError> {
        let (stream, address) = listener.accept(self.deadline)?;
        let mut channel = Channel::new(stream);
        let stranger = |what: String| ProcessError::Stranger { peer: address.to_string(), what };
        let soon = Deadline::after(Duration::from_secs(5)).earlier(self.deadline);
        let first = channel.receive(soon).map_err(|error| stranger(error.to_string()))?;
        let ToManager::Join { version, unit, data } = first else {
            return Err(stranger("did not say who it is".to_owned()));
        };
        if !wire_up::is_our_version(&version) {
            return Err(stranger(format!("{unit} is of version {version:?}")));
        }
        let position = self.position(unit).ok_or_else(|| stranger(format!("the run has no {unit}")))?;
        let place = &mut self.joined[position];
        if place.is_some() {
            return Err(stranger(format!("{unit} has joined already")));
        }
        *place = Some((channel, data));
        Ok(())
    }

    /// Takes the frame of a unit if it is there. A unit that is gone, or cannot start, ends the run.
    fn hear(&mut self, position: usize) -> Result<Option<ToManager>, ProcessError> {
        let unit = self.unit(position);
        let Some((channel, _)) = &mut self.joined[position] else { return Ok(None) };
        match channel.look() {
            Look::Nothing => Ok(None),
            Look::Frame(ToManager::Failed(why)) => Err(ProcessError::UnitFailed { unit, why }),
            Look::Frame(said) => Ok(Some(said)),
            Look::Closed => Err(ProcessError::WireUp { unit, what: "is gone before the start".to_owned() }),
        }
    }

    /// Waits until all units have said something that `is_it` accepts; `what` is how to call that.
    pub(super) fn await_all(
        &mut self,
        stop: BorrowedFd<'_>,
        what: &str,
        is_it: impl Fn(&ToManager) -> bool,
    ) -> Result<(), ProcessError> {
        let mut waiting: Vec<usize> = (0..self.joined.len()).collect();
        while let Some(&first) = waiting.first() {
            // Not those that are done: behind what they said a connection may be under way.
            let channels = waiting.iter().filter_map(|&position| self.joined[position].as_ref());
            let mut others = vec![WaitFd::readable(&stop)];
            others.extend(channels.map(|(channel, _)| WaitFd::readable(channel)));
            self.waiter.wait::<ProcessError>(&[], &mut others, self.deadline, || Ok(false))?;
            if others[0].is_ready() {
                return Err(ProcessError::Stopped(StopCause::Requested));
            }
            let mut still = Vec::with_capacity(waiting.len());
            for position in waiting {
                match self.hear(position)? {
                    None => still.push(position),
                    Some(said) if is_it(&said) => {}
                    Some(_) => return Err(wire_up::out_of_turn(self.unit(position))),
                }
            }
            waiting = still;
            if self.deadline.passed() {
                let what = format!("is not {what} within {:?}", self.patience);
                return Err(ProcessError::WireUp { unit: self.unit(first), what });
            }
        }
        Ok(())
    }
}
