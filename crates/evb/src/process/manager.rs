//! Process of the event manager.

use super::ProcessError;
use super::builder::BuilderStatistics;
use super::clock::MonotonicClock;
use super::control::{Control, Received};
use super::error::IoContext;
use super::rendezvous::Rendezvous;
use super::startup::{Channel, FromManager, ToManager, TryReceive};
use crate::config::RunConfig;
use crate::core::manager::{Manager, Transmit};
use crate::core::report::RunReports;
use crate::core::summary::Totals;
use crate::core::{BuIndex, Instant, Message, RuIndex, RunSummary, Unit};
use millstream_rdma::Qpn;
use millstream_rdma::connect::{Listener, listen};
use millstream_rdma::message::PreparedMessageChannel;
use millstream_rdma::wait::{CompletionWaiter, WaitOptions};
use millstream_rdma::{Completion, CompletionQueue, WaitFd};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Completions per poll.
const POLL: usize = 64;
/// Interval of progress samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);

/// Command: assign no further batch.
pub const PAUSE: &str = "pause";
/// Command: assign batches again.
pub const RESUME: &str = "resume";

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
/// `commands` has [`PAUSE`] and [`RESUME`], one in a line; the run stops when it is closed. Before the start, the run stops
/// when it becomes readable. `notify` is called for each [`ManagerEvent`]. The last event
/// has the returned result.
///
/// # Errors
/// The startup or the RDMA device failed.
pub fn run(
    config: &RunConfig,
    commands: BorrowedFd<'_>,
    mut notify: impl FnMut(&ManagerEvent),
) -> Result<RunResult, ProcessError> {
    config.plan.check()?;
    let listener = listen(&config.listen)?;
    notify(&ManagerEvent::Listening { address: listener.address().to_string() });
    let (process, queues) = ManagerProcess::start(config, &listener, commands)?;
    notify(&ManagerEvent::Started);
    let finished = process.work(queues, commands, &mut notify)?;
    notify(&ManagerEvent::Finished(Box::new(finished.clone())));
    Ok(finished)
}

/// Completion queues and descriptors to wait for.
struct WaitSet {
    waiter: CompletionWaiter,
    control: CompletionQueue,
    /// TCP streams of the units; `None` once closed.
    channels: Vec<Option<Channel>>,
}

/// State of the process. Units are in one order everywhere: readout units by index, then builder units by index.
struct ManagerProcess {
    clock: MonotonicClock,
    core: Manager,
    units: Vec<Unit>,
    controls: Vec<Control>,
    control_of: HashMap<Qpn, usize>,
    readouts: usize,
    statistics: Vec<Option<BuilderStatistics>>,
    /// Time of the last iteration.
    now: Instant,
    first_assigned: Option<Instant>,
    /// Events that each readout unit has, counted from the run's first.
    available: Vec<u64>,
    /// When the last frame of each readout unit arrived, and how long one may be silent.
    heard: Vec<Instant>,
    timeout: Duration,
    /// Events of the run, and of a batch.
    events: u64,
    batch: u16,
    last_done: Instant,
    batches_done: u64,
    completions: [Completion; POLL],
}

impl ManagerProcess {
    /// The startup, up to the start of the run.
    fn start(
        config: &RunConfig,
        listener: &Listener,
        stop: BorrowedFd<'_>,
    ) -> Result<(ManagerProcess, WaitSet), ProcessError> {
        let device = super::open_device(config)?;
        let readouts = config.plan.readouts();
        let units = readouts + config.plan.builders();
        let waiter =
            CompletionWaiter::new(&device, WaitOptions { spin: config.spin, ..WaitOptions::default() })?;
        let mut rendezvous = Rendezvous::new(config, waiter);
        rendezvous.admit_all(listener, stop)?;
        let builders: Vec<String> =
            rendezvous.joined[readouts..].iter().flatten().filter_map(|(_, data)| data.clone()).collect();
        let welcome = FromManager::Welcome { config: Box::new(config.clone()), builders };
        for (channel, _) in rendezvous.joined.iter_mut().flatten() {
            channel.send(&welcome).context("send the configuration to a unit")?;
        }
        rendezvous.await_all(stop, "prepared", |frame| matches!(frame, ToManager::Prepared))?;
        let options = super::control_options(config);
        let depth = options.completions().saturating_mul(units as u32);
        let control = rendezvous.waiter.completion_queue(depth.min(device.limits().completions))?;
        let mut controls = Vec::with_capacity(units);
        for (channel, _) in rendezvous.joined.iter_mut().flatten() {
            let prepared = PreparedMessageChannel::new(&device, &control, &options)?;
            let (messages, _) = prepared.connect(
                channel.stream().context("use a unit's TCP stream")?,
                &[],
                rendezvous.deadline,
            )?;
            controls.push(Control::new(messages));
        }
        rendezvous.await_all(stop, "ready", |frame| matches!(frame, ToManager::Ready))?;
        let mut channels = Vec::with_capacity(units);
        let units: Vec<_> = (0..units).map(|position| rendezvous.unit(position)).collect();
        for (mut channel, _) in rendezvous.joined.into_iter().flatten() {
            channel.send(&FromManager::Start).context("start a unit")?;
            channels.push(Some(channel));
        }
        let clock = MonotonicClock::start();
        let mut core = Manager::new(config.plan.clone(), clock.now());
        core.handle_pause(config.starts_paused);
        let mut process = ManagerProcess {
            clock,
            core,
            control_of: controls.iter().enumerate().map(|(at, control)| (control.qpn(), at)).collect(),
            statistics: vec![None; config.plan.builders()],
            units,
            controls,
            readouts,
            now: Instant::default(),
            first_assigned: None,
            available: config
                .readouts
                .iter()
                .map(|unit| if unit.input.file().is_some() { u64::MAX } else { 0 })
                .collect(),
            heard: vec![clock.now(); readouts],
            timeout: config.plan.timeout,
            events: config.plan.events.get(),
            batch: config.plan.batch.get(),
            last_done: Instant::default(),
            batches_done: 0,
            completions: [Completion::EMPTY; POLL],
        };
        process.update_available();
        Ok((process, WaitSet { waiter: rendezvous.waiter, control, channels }))
    }

    /// The run, up to the run summary.
    fn work(
        mut self,
        mut queues: WaitSet,
        commands: BorrowedFd<'_>,
        notify: &mut impl FnMut(&ManagerEvent),
    ) -> Result<RunResult, ProcessError> {
        let mut next_sample = self.clock.now() + SAMPLE_INTERVAL;
        let mut can_stop = true;
        loop {
            if self.wait(&mut queues, can_stop.then_some(commands), next_sample)? {
                can_stop = self.take_commands(commands, notify);
            }
            for at in 0..queues.channels.len() {
                self.receive(at, &mut queues.channels[at]);
            }
            // After the frames that arrived while this process itself was stopped.
            self.exclude_silent_readouts();
            // Sends the messages that the frames caused.
            self.progress(&queues.control)?;
            while let Some(unit) = self.core.poll_excluded() {
                notify(&ManagerEvent::Excluded(unit));
                self.update_available();
            }
            if self.now >= next_sample {
                next_sample = self.now + SAMPLE_INTERVAL;
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
        stop: Option<BorrowedFd<'_>>,
        until: Instant,
    ) -> Result<bool, ProcessError> {
        let WaitSet { waiter, control, channels } = queues;
        let mut others: Vec<_> = channels.iter().flatten().map(WaitFd::readable).collect();
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

    /// Carries out the launcher's commands. False if there will be no more, which stops the run.
    fn take_commands(&mut self, commands: BorrowedFd<'_>, notify: &mut impl FnMut(&ManagerEvent)) -> bool {
        let mut bytes = [0; 256];
        let length = match rustix::io::read(commands, &mut bytes) {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return true,
            Err(_) | Ok(0) => {
                self.core.handle_stop_request(self.now);
                return false;
            }
            Ok(length) => length,
        };
        // The launcher writes a line at once, so that none is cut.
        for command in bytes[..length].split(|&byte| byte == b'\n') {
            let paused = match command {
                command if command == PAUSE.as_bytes() => true,
                command if command == RESUME.as_bytes() => false,
                _ => continue,
            };
            self.core.handle_pause(paused);
            notify(&ManagerEvent::Paused(paused));
        }
        true
    }

    /// Handles the frames of a unit's stream.
    fn receive(&mut self, at: usize, place: &mut Option<Channel>) {
        while let Some(channel) = place {
            match channel.try_receive() {
                TryReceive::Pending => return,
                TryReceive::Frame(ToManager::Available { events }) if at < self.readouts => {
                    self.available[at] = events;
                    self.heard[at] = self.now;
                    self.update_available();
                }
                TryReceive::Frame(ToManager::Readout(report)) if at < self.readouts => {
                    self.core.handle_readout_report(RuIndex(at as u16), report, self.now);
                }
                TryReceive::Frame(ToManager::Builder(end)) if at >= self.readouts => {
                    let bu = BuIndex((at - self.readouts) as u16);
                    self.statistics[bu.index()] = Some(end.statistics);
                    self.core.handle_builder_report(bu, end.report, self.now);
                }
                TryReceive::Frame(_) => self.core.handle_malformed(self.units[at], self.now),
                TryReceive::Closed => {
                    *place = None;
                    self.controls[at].close();
                    self.core.handle_lost(self.units[at], self.now);
                }
            }
        }
    }

    /// Handles readout units that are silent as lost. No other timeout notices one whose input is live once the batches of
    /// all its events are done: without its events, no further batch is assigned.
    fn exclude_silent_readouts(&mut self) {
        for (ru, &heard) in (0..).map(RuIndex).zip(&self.heard) {
            if self.now >= heard + self.timeout {
                self.core.handle_lost(Unit::Readout(ru), self.now);
            }
        }
    }

    /// Lets the core assign the batches whose events all readout units have.
    fn update_available(&mut self) {
        let readouts = (0..).map(|ru| Unit::Readout(RuIndex(ru))).zip(&self.available);
        let present = readouts.filter(|(unit, _)| !self.core.is_recovered(*unit));
        let events = present.map(|(_, &events)| events).min().unwrap_or(u64::MAX);
        let batch = u64::from(self.batch);
        let batches = if events >= self.events { events.div_ceil(batch) } else { events / batch };
        self.core.handle_available(batches);
    }

    /// Handles completions and messages, and sends the core's output. Returns whether there was a completion.
    fn progress(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        self.now = self.clock.now();
        let any = self.take_completions(queue)?;
        for (unit, control) in self.units.iter().zip(&mut self.controls) {
            loop {
                match control.receive() {
                    Received::Message(message) => self.core.handle_message(*unit, message, self.now),
                    Received::Malformed => self.core.handle_malformed(*unit, self.now),
                    Received::Nothing => break,
                }
            }
        }
        if self.core.poll_timeout().is_some_and(|at| at <= self.now) {
            self.core.handle_timeout(self.now);
        }
        let mut sent = any;
        while let Some(Transmit { to, message }) = self.core.poll_transmit(self.now) {
            sent = true;
            if matches!(message, Message::Assign(_)) {
                self.first_assigned.get_or_insert(self.now);
            }
            for (unit, control) in self.units.iter().zip(&mut self.controls) {
                if to.includes(*unit) {
                    control.send(message);
                }
            }
        }
        if sent {
            self.controls.iter_mut().for_each(Control::flush);
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
                if let Some(&at) = self.control_of.get(&completion.qpn()) {
                    self.controls[at].handle(completion);
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
