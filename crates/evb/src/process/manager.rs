//! Process of the event manager. `manager/replication.rs` has its side of the standby manager.

mod replication;

use super::ProcessError;
use super::admission::{Admission, ReportRefused};
use super::availability::Availability;
use super::builder::BuilderStatistics;
use super::clock::MonotonicClock;
use super::commands::{CommandReader, ManagerCommand};
use super::control::{Control, Received};
use super::error::IoContext;
use super::joining::{JoinEvent, Joinable, JoinedUnit, Joining};
use super::rendezvous::Rendezvous;
use super::startup::{Channel, FromManager, ToManager, TryReceive};
use crate::config::RunConfig;
use crate::core::manager::{Manager, Transmit};
use crate::core::recovery::Membership;
use crate::core::report::RunReports;
use crate::core::summary::Totals;
use crate::core::{BuIndex, Instant, Message, RuIndex, RunSummary, Term, Unit};
use millstream_rdma::Qpn;
use millstream_rdma::connect::{Listener, listen};
use millstream_rdma::message::PreparedMessageChannel;
use millstream_rdma::wait::{CompletionWaiter, WaitOptions};
use millstream_rdma::{Completion, CompletionQueue, Device, WaitFd};
use millstream_tls::Security;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Completions per poll.
const POLL: usize = 64;
/// Interval of progress samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Events that the manager reports to its parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ManagerEvent {
    /// Units can join.
    Listening {
        /// The address.
        address: String,
    },
    /// All units are ready; the run starts.
    Started,
    /// The run was paused (`true`) or resumed.
    Paused(bool),
    /// Progress of the run.
    Progress(ProgressSample),
    /// The run goes on without this unit, whose process has to be ended.
    Excluded(Unit),
    /// The run went on without this unit, which is not there any more or is being ended. It may be started again.
    Departed(Unit),
    /// A unit that was started again has joined the run, with this index.
    Joined(Unit),
    /// The sources of a readout unit have fallen silent, while others have later events (`true`), or send again.
    SourcesSilent(Unit, bool),
    /// A standby manager can take over: units are connected to it, or will be before they notice that the manager is lost.
    StandbyJoined {
        /// Where it listens.
        address: String,
    },
    /// The standby manager takes no message, and its process has to be ended.
    StandbyLost {
        /// Where it listens.
        address: String,
    },
    /// The standby manager has taken over.
    TookOver {
        /// Where it listens.
        address: String,
        /// Its term.
        term: Term,
    },
    /// The run is over.
    Finished(Box<RunResult>),
}

/// Progress of a run at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressSample {
    /// Time since the start.
    pub elapsed: Duration,
    /// Batches assigned.
    pub assigned: u64,
    /// Outcomes of the batches that are done.
    pub done: Totals,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// The run summary.
    pub summary: RunSummary,
    /// The reports that it merges.
    pub reports: RunReports,
    /// From the first assignment to the last batch done.
    pub elapsed: Duration,
    /// Statistics of the surviving builder units, by index, before they close their sinks.
    pub builders: Vec<Option<BuilderStatistics>>,
}

/// Runs the event manager from the rendezvous to the run summary.
///
/// `commands` has the commands of the launcher; the run stops when it is closed. Before the start, the run stops
/// when it becomes readable. `notify` is called for each [`ManagerEvent`]. The last event
/// has the returned result. `report_refused` is called for each connection that is refused.
///
/// # Errors
/// The startup or the RDMA device failed.
pub fn run(
    config: &RunConfig,
    security: &Security,
    commands: BorrowedFd<'_>,
    report_refused: ReportRefused,
    mut notify: impl FnMut(&ManagerEvent),
) -> Result<RunResult, ProcessError> {
    config.plan.check()?;
    let listener = listen(&config.listen)?;
    let admission = Admission::new(config.security.apply(security.clone())?, report_refused);
    notify(&ManagerEvent::Listening { address: listener.address().to_string() });
    let (process, queues) = ManagerProcess::start(config, &admission, &listener, commands)?;
    if let Some((_, address)) = &process.standby {
        notify(&ManagerEvent::StandbyJoined { address: address.clone() });
    }
    notify(&ManagerEvent::Started);
    let finished = process.work(queues, commands, Joining::new(&listener, &admission), &mut notify)?;
    notify(&ManagerEvent::Finished(Box::new(finished.clone())));
    Ok(finished)
}

/// Completion queues and descriptors to wait for.
pub(super) struct WaitSet {
    waiter: CompletionWaiter,
    control: CompletionQueue,
    device: Device,
    /// TCP streams of the units; `None` once closed, or for a restart that has not joined.
    channels: Vec<Option<Channel>>,
}

/// The parts of a manager that has taken over.
pub(super) struct TakenOver {
    pub(super) config: RunConfig,
    pub(super) clock: MonotonicClock,
    pub(super) core: Manager,
    /// The units of the run.
    pub(super) membership: Membership,
    /// Their streams, and where builder units accept data connections.
    pub(super) units: BTreeMap<Unit, (Channel, Option<String>)>,
    pub(super) controls: BTreeMap<Unit, Control>,
    /// Units whose streams have ended.
    pub(super) gone: BTreeSet<Unit>,
    /// When the first batch was assigned.
    pub(super) first_assigned: Option<Instant>,
}

/// State of the process. Units are in one order everywhere: readout units by index, then builder units by index, both with
/// restarts.
pub(super) struct ManagerProcess {
    config: RunConfig,
    clock: MonotonicClock,
    core: Manager,
    units: Vec<Unit>,
    /// `None` for a restart that has not joined.
    controls: Vec<Option<Control>>,
    control_of: HashMap<Qpn, usize>,
    /// Readout units with restarts.
    readouts: usize,
    /// The last readout unit with each set of sources.
    current: Vec<RuIndex>,
    /// Where the builder units accept data connections, by index.
    addresses: Vec<Option<String>>,
    /// The stream of the standby manager, and where it listens.
    standby: Option<(Channel, String)>,
    /// Where a standby manager listened that takes no message.
    lost_standby: Option<String>,
    statistics: Vec<Option<BuilderStatistics>>,
    /// Time of the last iteration.
    now: Instant,
    first_assigned: Option<Instant>,
    availability: Availability,
    /// When the last frame of each of the current readout units arrived.
    heard: Vec<Instant>,
    /// Builder units that were excluded because they are cut off, and when they have stopped themselves.
    cut_off: Vec<(Unit, Instant)>,
    last_done: Instant,
    batches_done: u64,
    completions: [Completion; POLL],
}

impl ManagerProcess {
    /// The startup, up to the start of the run.
    fn start(
        config: &RunConfig,
        admission: &Admission,
        listener: &Listener,
        stop: BorrowedFd<'_>,
    ) -> Result<(ManagerProcess, WaitSet), ProcessError> {
        let device = super::open_device(config)?;
        let (readouts, builders) = (config.plan.readouts(), config.plan.initial_builders());
        let units = readouts + builders;
        let waiter =
            CompletionWaiter::new(&device, WaitOptions { spin: config.spin, ..WaitOptions::default() })?;
        let mut rendezvous = Rendezvous::new(config, admission, waiter);
        rendezvous.admit_all(listener, stop)?;
        let mut addresses: Vec<Option<String>> =
            rendezvous.joined[readouts..].iter().map(|joined| joined.as_ref()?.1.clone()).collect();
        addresses.resize(config.plan.builders(), None);
        if let Some((channel, _)) = &mut rendezvous.standby {
            let welcome = FromManager::welcome_standby(config);
            channel.send(&welcome).context("send the configuration to the standby manager")?;
            channel
                .set_send_timeout(config.plan.timeout / 4)
                .context("use the standby manager's TCP stream")?;
        }
        for position in 0..units {
            let welcome = FromManager::Welcome {
                config: Box::new(config.clone()),
                unit: rendezvous.unit(position),
                builders: addresses.clone(),
                readouts: (0..readouts).map(|ru| RuIndex(ru as u16)).collect(),
                standby: rendezvous.standby.as_ref().map(|(_, address)| address.clone()),
            };
            if let Some((channel, _)) = &mut rendezvous.joined[position] {
                channel.send(&welcome).context("send the configuration to a unit")?;
            }
        }
        rendezvous.await_all(stop, "prepared", |frame| matches!(frame, ToManager::Prepared))?;
        let options = super::control_options(config);
        // Of a unit and its restart, one has a connection at a time.
        let depth = options.completions().saturating_mul(units as u32 + 1);
        let control = rendezvous.waiter.completion_queue(depth.min(device.limits().completions))?;
        let mut controls = Vec::with_capacity(units);
        for (channel, _) in rendezvous.joined.iter_mut().flatten() {
            let prepared = PreparedMessageChannel::new(&device, &control, &options)?;
            let (messages, _) = prepared.connect(
                channel.stream().context("use a unit's TCP stream")?,
                &[],
                rendezvous.deadline,
            )?;
            controls.push(Control::new(messages, Term::FIRST));
        }
        rendezvous.await_all(stop, "ready", |frame| matches!(frame, ToManager::Ready))?;
        let mut channels = Vec::with_capacity(units);
        for (mut channel, _) in rendezvous.joined.into_iter().flatten() {
            channel.send(&FromManager::Start { membership: None }).context("start a unit")?;
            channels.push(Some(channel));
        }
        let control_of = controls.iter().map(|control: &Control| control.qpn()).collect::<Vec<_>>();
        let mut controls: Vec<Option<Control>> = controls.into_iter().map(Some).collect();
        let (readout_restarts, builder_restarts) =
            (config.plan.readout_members() - readouts, config.plan.builders() - builders);
        channels.splice(readouts..readouts, (0..readout_restarts).map(|_| None));
        channels.extend((0..builder_restarts).map(|_| None));
        controls.splice(readouts..readouts, (0..readout_restarts).map(|_| None));
        controls.extend((0..builder_restarts).map(|_| None));
        let position = |at: usize| if at < readouts { at } else { at + readout_restarts };
        let units = units_of(config);
        let clock = MonotonicClock::start();
        let mut core = Manager::new(config.plan.clone(), clock.now());
        core.handle_pause(config.starts_paused);
        let mut process = ManagerProcess {
            clock,
            core,
            control_of: control_of.into_iter().enumerate().map(|(at, qpn)| (qpn, position(at))).collect(),
            statistics: vec![None; config.plan.builders()],
            units,
            controls,
            readouts: config.plan.readout_members(),
            current: (0..readouts).map(|ru| RuIndex(ru as u16)).collect(),
            addresses,
            standby: rendezvous.standby,
            lost_standby: None,
            now: Instant::default(),
            first_assigned: None,
            availability: Availability::new(config),
            heard: vec![clock.now(); readouts],
            cut_off: Vec::new(),
            config: config.clone(),
            last_done: Instant::default(),
            batches_done: 0,
            completions: [Completion::EMPTY; POLL],
        };
        process.update_available();
        Ok((process, WaitSet { waiter: rendezvous.waiter, control, device, channels }))
    }

    /// The process after the takeover.
    pub(super) fn take_over(
        taken: TakenOver,
        waiter: CompletionWaiter,
        control: CompletionQueue,
        device: Device,
    ) -> (ManagerProcess, WaitSet) {
        let TakenOver {
            config, clock, core, membership, units: mut streams, controls: mut connected, ..
        } = taken;
        let units = units_of(&config);
        let mut addresses = vec![None; config.plan.builders()];
        let mut channels: Vec<Option<Channel>> = Vec::with_capacity(units.len());
        for unit in &units {
            let (channel, address) = streams.remove(unit).unzip();
            if let Unit::Builder(bu) = unit {
                addresses[bu.index()] = address.flatten();
            }
            channels.push(channel);
        }
        let controls: Vec<Option<Control>> = units.iter().map(|unit| connected.remove(unit)).collect();
        let qpns = controls.iter().enumerate();
        let control_of = qpns.filter_map(|(at, control)| Some((control.as_ref()?.qpn(), at))).collect();
        let now = clock.now();
        let batches_done = core.progress().done.batches;
        let mut process = ManagerProcess {
            clock,
            core,
            control_of,
            statistics: vec![None; config.plan.builders()],
            units,
            controls,
            readouts: config.plan.readout_members(),
            current: membership.readouts.iter().map(|member| member.index).collect(),
            addresses,
            standby: None,
            lost_standby: None,
            now,
            first_assigned: taken.first_assigned,
            availability: Availability::new(&config),
            heard: vec![now; config.plan.readouts()],
            cut_off: Vec::new(),
            last_done: now,
            batches_done,
            completions: [Completion::EMPTY; POLL],
            config,
        };
        // Their streams have ended already.
        for unit in taken.gone {
            process.core.handle_lost(unit, now);
        }
        process.update_available();
        (process, WaitSet { waiter, control, device, channels })
    }

    /// The manager's term.
    pub(super) fn term(&self) -> Term {
        self.core.term()
    }

    /// Whether the operator has paused the run.
    pub(super) fn is_paused(&self) -> bool {
        self.core.is_paused()
    }

    /// The run, up to the run summary.
    pub(super) fn work(
        mut self,
        mut queues: WaitSet,
        commands: BorrowedFd<'_>,
        mut joining: Joining<'_>,
        notify: &mut impl FnMut(&ManagerEvent),
    ) -> Result<RunResult, ProcessError> {
        let mut reader = CommandReader::default();
        let mut next_sample = self.clock.now() + SAMPLE_INTERVAL;
        let mut can_stop = true;
        loop {
            if self.wait(&mut queues, &joining, can_stop.then_some(commands), next_sample)? {
                can_stop = match reader.read(commands) {
                    Some(commands) => {
                        commands.into_iter().for_each(|command| self.carry_out(command, &queues, notify));
                        true
                    }
                    None => {
                        self.core.handle_stop_request(self.now);
                        false
                    }
                };
            }
            for at in 0..queues.channels.len() {
                self.receive(at, &mut queues.channels[at]);
            }
            // After the frames that arrived while this process itself was stopped.
            self.exclude_silent_readouts();
            self.lose_cut_off();
            self.admit(&mut joining, &mut queues, notify);
            // Sends the messages that the frames caused.
            self.progress(&queues.control)?;
            while let Some(unit) = self.core.poll_excluded() {
                notify(&ManagerEvent::Excluded(unit));
                self.update_available();
            }
            if let Some(address) = self.lost_standby.take() {
                notify(&ManagerEvent::StandbyLost { address });
            }
            while let Some(unit) = self.core.poll_departed() {
                notify(&ManagerEvent::Departed(unit));
            }
            while let Some((role, is_silent)) = self.availability.poll_change() {
                notify(&ManagerEvent::SourcesSilent(Unit::Readout(self.current[role]), is_silent));
            }
            if self.now >= next_sample {
                next_sample = self.now + SAMPLE_INTERVAL;
                // Time passes also if no unit says anything new.
                self.update_available();
                notify(&ManagerEvent::Progress(self.sample()));
            }
            if let Some(summary) = self.core.poll_finished() {
                notify(&ManagerEvent::Progress(self.sample()));
                let first = self.first_assigned.unwrap_or_default();
                let elapsed = self.last_done.since(first);
                let reports = self.core.reports();
                return Ok(RunResult { summary, reports, elapsed, builders: self.statistics });
            }
        }
    }

    /// Makes progress until a stream is readable, a sample is due, or the run is over. Returns whether `stop` is readable.
    fn wait(
        &mut self,
        queues: &mut WaitSet,
        joining: &Joining<'_>,
        stop: Option<BorrowedFd<'_>>,
        until: Instant,
    ) -> Result<bool, ProcessError> {
        let WaitSet { waiter, control, channels, .. } = queues;
        let mut others: Vec<_> = channels.iter().flatten().map(WaitFd::readable).collect();
        others.extend(joining.descriptors());
        others.extend(stop.as_ref().map(WaitFd::readable));
        loop {
            let due = self.core.poll_timeout().map_or(until, |at| at.min(until));
            waiter
                .wait(&[control], &mut others, self.clock.deadline(Some(due)), || self.progress(control))?;
            let ready = others.iter().any(WaitFd::is_ready);
            // A finished core has no timeout.
            if ready || self.now >= until || self.core.poll_timeout().is_none() {
                return Ok(stop.is_some() && others.last().is_some_and(WaitFd::is_ready));
            }
        }
    }

    /// Carries out a command of the launcher.
    fn carry_out(
        &mut self,
        command: ManagerCommand,
        queues: &WaitSet,
        notify: &mut impl FnMut(&ManagerEvent),
    ) {
        match command {
            ManagerCommand::Pause | ManagerCommand::Resume => {
                let paused = command == ManagerCommand::Pause;
                self.core.handle_pause(paused);
                notify(&ManagerEvent::Paused(paused));
            }
            // The end of a unit's stream, after its last frames, comes first.
            ManagerCommand::Ended(unit) => {
                let at = self.units.iter().position(|known| *known == unit);
                if at.is_some_and(|at| queues.channels[at].is_none()) {
                    self.core.handle_lost(unit, self.now);
                }
            }
            ManagerCommand::TakeOver => {}
        }
    }

    /// Handles the frames of a unit's stream.
    fn receive(&mut self, at: usize, place: &mut Option<Channel>) {
        while let Some(channel) = place {
            match channel.try_receive() {
                TryReceive::Pending => return,
                TryReceive::Frame(ToManager::Available { events }) if at < self.readouts => {
                    let role = at % self.current.len();
                    if self.current[role].index() == at {
                        self.availability.set(role, events);
                        self.heard[role] = self.now;
                        self.update_available();
                    }
                }
                TryReceive::Frame(ToManager::Readout(report)) if at < self.readouts => {
                    self.core.handle_readout_report(RuIndex(at as u16), report, self.now);
                }
                TryReceive::Frame(ToManager::Builder(end)) if at >= self.readouts => {
                    let bu = BuIndex((at - self.readouts) as u16);
                    self.statistics[bu.index()] = Some(end.statistics);
                    self.core.handle_builder_report(bu, end.report, self.now);
                }
                // Of a unit that the run goes on without, and that is being ended.
                TryReceive::Frame(_) if self.core.is_recovered(self.units[at]) => {}
                TryReceive::Frame(_) => self.core.handle_malformed(self.units[at], self.now),
                TryReceive::Closed => {
                    let is_cut_off = channel.is_cut_off();
                    *place = None;
                    self.controls[at].iter_mut().for_each(Control::close);
                    let unit = self.units[at];
                    let plan = &self.config.plan;
                    // A drain timeout before the run would stop for it.
                    let until = self.now + 2 * plan.timeout + 3 * plan.drain_timeout;
                    match is_cut_off && self.core.handle_cut_off(unit, self.now) {
                        true => self.cut_off.push((unit, until)),
                        false => self.core.handle_lost(unit, self.now),
                    }
                }
            }
        }
    }

    /// Handles readout units that are silent as lost. No other timeout notices one whose input is live once the batches of
    /// all its events are done: without its events, no further batch is assigned.
    fn exclude_silent_readouts(&mut self) {
        for (&ru, &heard) in self.current.iter().zip(&self.heard) {
            if self.now >= heard + self.config.plan.timeout {
                self.core.handle_lost(Unit::Readout(ru), self.now);
            }
        }
    }

    /// Handles builder units as lost that are cut off and have stopped themselves, if the launcher has not said so before.
    fn lose_cut_off(&mut self) {
        let now = self.now;
        for (unit, _) in self.cut_off.extract_if(.., |(_, until)| *until <= now) {
            self.core.handle_lost(unit, now);
        }
    }

    /// Lets units join.
    fn admit(
        &mut self,
        joining: &mut Joining<'_>,
        queues: &mut WaitSet,
        notify: &mut impl FnMut(&ManagerEvent),
    ) {
        loop {
            let mut run = Joinable {
                config: &self.config,
                core: &mut self.core,
                device: &queues.device,
                queue: &queues.control,
                builders: &self.addresses,
                standby: &mut self.standby,
            };
            match joining.progress(&mut run) {
                None => return,
                Some(JoinEvent::Connect { unit: Unit::Builder(builder), address }) => {
                    let connect = FromManager::Connect { builder, address };
                    for ru in &self.current {
                        if let Some(channel) = &mut queues.channels[ru.index()]
                            && !self.core.is_recovered(Unit::Readout(*ru))
                        {
                            // A unit that has ended is noticed by the end of its stream.
                            let _ = channel.send(&connect);
                        }
                    }
                }
                // Nobody connects to a readout unit.
                Some(JoinEvent::Connect { .. }) => {}
                Some(JoinEvent::Standby { channel, address }) => {
                    self.standby_joined(channel, &address, queues);
                    notify(&ManagerEvent::StandbyJoined { address });
                }
                Some(JoinEvent::Joined(joined)) => {
                    let unit = joined.unit;
                    self.joined(*joined, queues);
                    notify(&ManagerEvent::Joined(unit));
                }
            }
        }
    }

    /// A unit has joined.
    fn joined(&mut self, joined: JoinedUnit, queues: &mut WaitSet) {
        let JoinedUnit { unit, mut channel, control, data, membership } = joined;
        // The standby manager knows the unit before anybody else.
        self.replicate();
        // A unit that has ended is noticed by the end of its stream.
        let _ = channel.send(&FromManager::Start { membership: Some(membership.clone()) });
        let Some(at) = self.units.iter().position(|known| *known == unit) else { return };
        self.control_of.insert(control.qpn(), at);
        self.controls[at] = Some(control);
        queues.channels[at] = Some(channel);
        match unit {
            Unit::Manager => {}
            Unit::Builder(bu) => self.addresses[bu.index()] = data,
            Unit::Readout(ru) => {
                let role = self.config.plan.readout_role(ru).index();
                self.current[role] = ru;
                // Until it says which events it has.
                self.availability.join(role, membership.first_event);
                self.heard[role] = self.now;
                self.update_available();
            }
        }
    }

    /// Lets the core assign the batches whose events all readout units have.
    fn update_available(&mut self) {
        let is_present = |role: usize| !self.core.is_recovered(Unit::Readout(self.current[role]));
        let events = self.availability.events(is_present, self.core.events_assigned(), self.now);
        self.core.handle_available(events, self.now);
    }

    /// Handles completions and messages, and sends the core's output. Returns whether there was a completion.
    fn progress(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        self.now = self.clock.now();
        let any = self.take_completions(queue)?;
        for (unit, control) in self.units.iter().zip(&mut self.controls) {
            while let Some(control) = control {
                match control.receive() {
                    Received::Message(_, message) => self.core.handle_message(*unit, message, self.now),
                    Received::Malformed => self.core.handle_malformed(*unit, self.now),
                    Received::Nothing => break,
                }
            }
        }
        if self.core.poll_timeout().is_some_and(|at| at <= self.now) {
            self.core.handle_timeout(self.now);
        }
        let mut sent = any;
        self.replicate();
        while let Some(Transmit { to, message }) = self.core.poll_transmit(self.now) {
            sent = true;
            if matches!(message, Message::Assign(_)) && self.first_assigned.is_none() {
                self.first_assigned = Some(self.now);
                let replica = self.core.replica();
                self.copy_to_standby(replica);
            }
            for (unit, control) in self.units.iter().zip(&mut self.controls) {
                if to.includes(*unit)
                    && let Some(control) = control
                {
                    control.send(message);
                }
            }
        }
        if sent {
            self.controls.iter_mut().flatten().for_each(Control::flush);
        }
        let done = self.core.progress().done.batches;
        if done != self.batches_done {
            self.batches_done = done;
            self.last_done = self.now;
        }
        Ok(any)
    }

    fn take_completions(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        let mut any = false;
        loop {
            let taken = queue.poll(&mut self.completions)?;
            for completion in taken {
                if let Some(&at) = self.control_of.get(&completion.qpn())
                    && let Some(control) = &mut self.controls[at]
                {
                    control.handle(completion);
                }
            }
            any |= !taken.is_empty();
            if taken.len() < POLL {
                return Ok(any);
            }
        }
    }

    fn sample(&self) -> ProgressSample {
        let progress = self.core.progress();
        let elapsed = self.now.since(Instant::default());
        ProgressSample { elapsed, assigned: progress.assigned, done: progress.done }
    }
}

/// All units with their restarts: readout units, then builder units.
fn units_of(config: &RunConfig) -> Vec<Unit> {
    let readouts = (0..config.plan.readout_members()).map(|ru| Unit::Readout(RuIndex(ru as u16)));
    readouts.chain((0..config.plan.builders()).map(|bu| Unit::Builder(BuIndex(bu as u16)))).collect()
}
