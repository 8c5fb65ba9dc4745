//! Process of the standby manager: keeps a copy of what only the manager knows, and takes over when the launcher orders it.
//!
//! The launcher decides that the manager is lost, so at most one process has a term. Units leave the lost manager when the
//! new term reaches them, so a manager that was only stopped finds closed streams when it continues.

use super::ProcessError;
use super::admission::{Admission, ReportRefused};
use super::clock::MonotonicClock;
use super::commands::{CommandReader, ManagerCommand};
use super::control::Control;
use super::error::IoContext;
use super::joining::Joining;
use super::manager::{ManagerEvent, ManagerProcess, RunResult, TakenOver, WaitSet};
use super::own::OwnConfig;
use super::rendezvous::Unidentified;
use super::startup::{self, Channel, FromManager, ManagerCopy, ToManager, TryReceive};
use crate::config::RunConfig;
use crate::core::manager::Manager;
use crate::core::recovery::Membership;
use crate::core::takeover::UnitStates;
use crate::core::{Instant, StopCause, Unit};
use millstream_rdma::connect::{Listener, listen};
use millstream_rdma::message::{MessageChannelOptions, PreparedMessageChannel};
use millstream_rdma::wait::{CompletionWaiter, WaitOptions};
use millstream_rdma::{CompletionQueue, Deadline, Device, WaitFd};
use millstream_tls::Security;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Longest time for one control connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the standby manager from joining the manager to the end of the run, or until `commands` is closed. Returns the run's
/// result if it took over. `report_refused` is called for each connection that is refused. The manager's configuration
/// must agree with `own`, if there is one.
///
/// # Errors
/// The process could not start, or could not take over.
pub fn run(
    manager: &str,
    own: Option<&OwnConfig>,
    security: &Security,
    commands: BorrowedFd<'_>,
    report_refused: ReportRefused,
    mut notify: impl FnMut(&ManagerEvent),
) -> Result<Option<RunResult>, ProcessError> {
    let listener = listen(&startup::own_address(manager))?;
    let address = listener.address().to_string();
    let joined = startup::join(manager, Unit::Manager, Some(address.clone()), own, security, Some(commands))?;
    let admission = Admission::new(joined.config.security.apply(security.clone())?, report_refused);
    let mut standby = StandbyProcess::new(joined.config, joined.channel, &listener, &admission)?;
    if !standby.wait_for_command(commands)? {
        return Ok(None);
    }
    let (process, queues) = standby.take_over(commands)?;
    notify(&ManagerEvent::TookOver { address, term: process.term() });
    // Commands that came meanwhile were carried out without an answer.
    notify(&ManagerEvent::Paused(process.is_paused()));
    let finished = process.work(queues, commands, Joining::new(&listener, &admission), &mut notify)?;
    notify(&ManagerEvent::Finished(Box::new(finished.clone())));
    Ok(Some(finished))
}

/// A unit's stream, and where it accepts data connections.
type UnitStream = (Channel, Option<String>);

/// The process before it takes over.
struct StandbyProcess<'a> {
    config: RunConfig,
    listener: &'a Listener,
    waiter: CompletionWaiter,
    device: Device,
    clock: MonotonicClock,
    manager: Option<Channel>,
    copy: Option<ManagerCopy>,
    unidentified: Unidentified,
    units: BTreeMap<Unit, UnitStream>,
    /// Units whose streams have ended.
    closed: BTreeSet<Unit>,
    /// Units whose processes have ended, as the launcher says. The standby manager may have no streams to them.
    ended: BTreeSet<Unit>,
    reader: CommandReader,
    /// Those that have sent their state. What they send then is for the new manager.
    connected: BTreeSet<Unit>,
    /// The operator's last word during the takeover.
    paused: Option<bool>,
}

impl<'a> StandbyProcess<'a> {
    fn new(
        config: RunConfig,
        manager: Channel,
        listener: &'a Listener,
        admission: &Admission,
    ) -> Result<StandbyProcess<'a>, ProcessError> {
        let device = super::open_device(&config)?;
        let waiter =
            CompletionWaiter::new(&device, WaitOptions { spin: config.spin, ..WaitOptions::default() })?;
        Ok(StandbyProcess {
            config,
            listener,
            waiter,
            device,
            clock: MonotonicClock::start(),
            manager: Some(manager),
            copy: None,
            unidentified: Unidentified::new(admission),
            units: BTreeMap::new(),
            closed: BTreeSet::new(),
            ended: BTreeSet::new(),
            reader: CommandReader::default(),
            connected: BTreeSet::new(),
            paused: None,
        })
    }

    /// Waits until a descriptor is ready. Returns whether `commands` is.
    fn wait(&mut self, commands: BorrowedFd<'_>, deadline: Deadline) -> Result<bool, ProcessError> {
        let mut others = vec![WaitFd::readable(&commands), WaitFd::readable(self.listener)];
        others.extend(self.manager.iter().map(WaitFd::readable));
        others.extend(self.unidentified.descriptors());
        let silent = self.units.iter().filter(|(unit, _)| !self.connected.contains(unit));
        others.extend(silent.map(|(_, (channel, _))| WaitFd::readable(channel)));
        self.waiter.wait::<ProcessError>(&[], &mut others, deadline, || Ok(false))?;
        Ok(others[0].is_ready())
    }

    /// Takes the streams of units.
    fn admit(&mut self) {
        self.unidentified.accept(self.listener, Deadline::after(Duration::ZERO));
        for request in self.unidentified.take_requests(&self.config.plan) {
            // A stranger does not take the place of a unit.
            if startup::is_our_version(&request.version) {
                self.units.entry(request.unit).or_insert((request.channel, request.data));
            }
        }
    }

    /// Keeps the manager's copy up to date until the launcher orders the takeover. False if it orders the end.
    fn wait_for_command(&mut self, commands: BorrowedFd<'_>) -> Result<bool, ProcessError> {
        loop {
            let has_command = self.wait(commands, Deadline::NEVER)?;
            self.update_copy();
            // Units say nothing before the takeover.
            let closed = &mut self.closed;
            self.units.retain(|&unit, (channel, _)| {
                let is_open = matches!(channel.try_receive::<ToManager>(), TryReceive::Pending);
                if !is_open {
                    closed.insert(unit);
                }
                is_open
            });
            self.admit();
            if has_command {
                match self.take_commands(commands) {
                    Order::End => return Ok(false),
                    Order::TakeOver => return Ok(true),
                    Order::None => {}
                }
            }
        }
    }

    fn update_copy(&mut self) {
        while let Some(manager) = &mut self.manager {
            match manager.try_receive() {
                TryReceive::Pending => return,
                TryReceive::Frame(FromManager::Copy(copy)) => {
                    if self.copy.is_none() {
                        self.clock = MonotonicClock::started(copy.elapsed);
                    }
                    self.copy = Some(*copy);
                }
                TryReceive::Frame(FromManager::Done(done)) => {
                    let replica = self.copy.iter_mut().map(|copy| &mut copy.replica);
                    replica.for_each(|replica| done.iter().for_each(|batch| replica.add_done(batch)));
                }
                TryReceive::Frame(_) | TryReceive::Closed => self.manager = None,
            }
        }
    }

    /// Carries out the launcher's commands.
    fn take_commands(&mut self, commands: BorrowedFd<'_>) -> Order {
        let Some(commands) = self.reader.read(commands) else { return Order::End };
        let mut order = Order::None;
        for command in commands {
            match command {
                ManagerCommand::TakeOver => order = Order::TakeOver,
                ManagerCommand::Pause => self.paused = Some(true),
                ManagerCommand::Resume => self.paused = Some(false),
                ManagerCommand::Ended(unit) => {
                    self.ended.insert(unit);
                }
            }
        }
        order
    }

    /// Collects the states of the units, connects to them, and makes the manager of the new term.
    fn take_over(mut self, commands: BorrowedFd<'_>) -> Result<(ManagerProcess, WaitSet), ProcessError> {
        // Whatever the lost manager sent is in the stream.
        self.update_copy();
        self.manager = None;
        let lost = |what: &str| ProcessError::Startup { unit: Unit::Manager, what: what.to_owned() };
        let copy = self.copy.take().ok_or_else(|| lost("was lost before it sent a copy of its state"))?;
        let units = copy.replica.units(self.config.plan.builders());
        let term = copy.replica.membership.term.next();
        let options = super::control_options(&self.config);
        let depth = options.completions().saturating_mul(units.len() as u32 + 1);
        let queue = self.waiter.completion_queue(depth.min(self.device.limits().completions))?;
        let membership = Membership { term, ..copy.replica.membership.clone() };
        let mut takeover = Takeover {
            units,
            membership,
            queue,
            options,
            told: BTreeSet::new(),
            gone: std::mem::take(&mut self.closed),
            silent: BTreeSet::new(),
            states: UnitStates::default(),
            controls: BTreeMap::new(),
        };
        // The other half is for the units, which wait for the manager of the new term.
        let deadline = Deadline::after(self.config.plan.recovery.takeover_timeout / 2);
        let excluding: BTreeSet<Unit> =
            copy.replica.excluding.iter().map(|&builder| Unit::Builder(builder)).collect();
        loop {
            let without_stream = self.ended.iter().filter(|unit| !self.units.contains_key(unit));
            takeover.gone.extend(without_stream);
            self.units.retain(|unit, _| takeover.units.contains(unit) || excluding.contains(unit));
            for (&unit, (channel, _)) in &mut self.units {
                if takeover.units.contains(&unit) {
                    takeover.progress(unit, channel, &self.device)?;
                }
            }
            self.units.retain(|unit, _| !takeover.gone.contains(unit));
            self.connected = takeover.controls.keys().copied().collect();
            let Some(missing) = takeover.missing() else { break };
            if deadline.passed() {
                tracing::warn!(unit = %missing, "a unit has not sent its state to the standby manager");
                break;
            }
            if self.wait(commands, deadline)? && matches!(self.take_commands(commands), Order::End) {
                return Err(ProcessError::Stopped(StopCause::Requested));
            }
            self.admit();
        }
        let now = self.clock.now();
        let plan = self.config.plan.clone();
        takeover.states.readouts.retain(|&ru, _| takeover.controls.contains_key(&Unit::Readout(ru)));
        takeover.states.builders.retain(|&bu, _| takeover.controls.contains_key(&Unit::Builder(bu)));
        let mut core = Manager::resume(plan, &copy.replica, &takeover.states, term, now)?;
        if let Some(paused) = self.paused {
            core.handle_pause(paused);
        }
        let taken = TakenOver {
            config: self.config,
            clock: self.clock,
            core,
            membership: takeover.membership,
            units: self.units,
            controls: takeover.controls,
            gone: takeover.gone,
            first_assigned: copy.first_assigned.map(|after| Instant::default() + after),
        };
        Ok(ManagerProcess::take_over(taken, self.waiter, takeover.queue, self.device))
    }
}

/// A takeover in progress.
struct Takeover {
    /// The units of the run.
    units: Vec<Unit>,
    membership: Membership,
    queue: CompletionQueue,
    options: MessageChannelOptions,
    /// Those that have got the new term.
    told: BTreeSet<Unit>,
    /// Those whose streams have ended.
    gone: BTreeSet<Unit>,
    /// Those that have sent their state, and to which there is no connection.
    silent: BTreeSet<Unit>,
    states: UnitStates,
    controls: BTreeMap<Unit, Control>,
}

impl Takeover {
    /// A unit that has not sent its state.
    fn missing(&self) -> Option<Unit> {
        self.units.iter().copied().find(|unit| !self.is_decided(*unit))
    }

    /// Whether there is a connection to the unit, or will be none.
    fn is_decided(&self, unit: Unit) -> bool {
        self.controls.contains_key(&unit) || self.gone.contains(&unit) || self.silent.contains(&unit)
    }

    /// Gives the new term to a unit, takes its state, and connects to it. A unit without a connection is lost with the
    /// manager; its batches are assigned again when its stream ends.
    fn progress(&mut self, unit: Unit, channel: &mut Channel, device: &Device) -> Result<(), ProcessError> {
        if self.is_decided(unit) {
            return Ok(());
        }
        if self.told.insert(unit) {
            let new_term = FromManager::NewTerm { membership: self.membership.clone() };
            if channel.send(&new_term).is_err() {
                self.gone.insert(unit);
                return Ok(());
            }
        }
        match (channel.try_receive(), unit) {
            (TryReceive::Pending, _) => return Ok(()),
            (TryReceive::Frame(ToManager::ReadoutState(state)), Unit::Readout(ru)) => {
                self.states.readouts.insert(ru, state);
            }
            (TryReceive::Frame(ToManager::BuilderState(state)), Unit::Builder(bu)) => {
                self.states.builders.insert(bu, *state);
            }
            (TryReceive::Frame(ToManager::Failed(why)), _) => {
                return Err(ProcessError::UnitFailed { unit, why });
            }
            (TryReceive::Frame(_), _) => return Err(startup::unexpected_frame(unit)),
            (TryReceive::Closed, _) => {
                self.gone.insert(unit);
                return Ok(());
            }
        }
        let prepared = PreparedMessageChannel::new(device, &self.queue, &self.options)?;
        let stream = channel.stream().context("use a unit's TCP stream")?;
        match prepared.connect(stream, &[], Deadline::after(CONNECT_TIMEOUT)) {
            Ok((messages, _)) => {
                self.controls.insert(unit, Control::new(messages, self.membership.term));
            }
            Err(error) => {
                tracing::warn!(%unit, %error, "no control connection to a unit");
                self.silent.insert(unit);
            }
        }
        Ok(())
    }
}

/// What the launcher orders.
enum Order {
    TakeOver,
    End,
    None,
}
