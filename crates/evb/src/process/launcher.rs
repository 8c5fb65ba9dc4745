//! Starts all processes of a run on this host, and sees to it that they end.
//!
//! Every child's standard input is a pipe of the launcher, so that children end with it, however it exits.
//! Children are in process groups of their own: a Ctrl-C is the launcher's to handle, by asking the run to
//! stop, and the run still exits with its account.
//! If the manager dies, the launcher closes the account from the units' reports.

use super::builder::{BuilderEnd, BuilderStatistics};
use super::card;
use super::child::{Child, ChildMessage};
use super::error::{IoContext, ProcessError};
use super::manager::{ManagerEvent, ProgressSample};
use crate::config::{LandingTarget, Setup};
use crate::core::account::Totals;
use crate::core::report::ReadoutReport;
use crate::core::{Account, BuIndex, ReportMerger, RuIndex, StopCause, Unit};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Starts the processes of a run.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program that can be a [`Child`].
    pub program: PathBuf,
    /// What it gets in front of the child's own arguments.
    pub arguments: Vec<OsString>,
}

/// A process of the run, for people and for tests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RunProcess {
    /// A unit.
    Unit(Unit),
    /// A card, by its name in the configuration.
    Card(String),
}

/// What happens during a run.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// A process was started.
    Spawned {
        /// What it is.
        process: RunProcess,
        /// Its process id.
        pid: u32,
    },
    /// All units are ready; the run starts.
    Started,
    /// How far the run is.
    Progress(ProgressSample),
}

/// How a run went.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// The account; none if the run did not start.
    pub account: Option<Account>,
    /// From the first assignment to the last batch done; none if the manager was lost.
    pub elapsed: Option<Duration>,
    /// How far the run was, over time.
    pub samples: Vec<ProgressSample>,
    /// What the readout units counted, by index; none from those that were lost.
    pub readouts: Vec<Option<ReadoutReport>>,
    /// What became of the batches of the builder units, by index; none from those that were lost.
    pub totals: Vec<Option<Totals>>,
    /// What the builder units saw beside, by index; none from those that were lost.
    pub builders: Vec<Option<BuilderStatistics>>,
    /// What the builder units' sinks have to tell people.
    pub sinks: Vec<(BuIndex, String)>,
    /// The processes that did not end well. Those that blame no other are in front, in the order of their
    /// exits.
    pub failures: Vec<ProcessFailure>,
}

/// A process that did not end well.
#[derive(Clone, Debug)]
pub struct ProcessFailure {
    /// Which.
    pub process: RunProcess,
    /// How it ended.
    pub status: ExitStatus,
    /// Why, as far as it message; what it wrote to standard error last, if it message nothing.
    pub reason: String,
}

impl RunOutcome {
    /// Whether everything is as it should be: a whole run, all laws hold, all decisions agree, every process
    /// ended well.
    pub fn is_success(&self) -> bool {
        let agrees = |unit: &Option<BuilderStatistics>| {
            unit.as_ref().is_some_and(|statistics| statistics.comparison.is_full())
        };
        self.account.as_ref().is_some_and(Account::is_success)
            && self.builders.iter().all(agrees)
            && self.failures.is_empty()
    }
}

/// Hears what happens, and may ask the run to stop.
pub type RunObserver<'a> = dyn FnMut(&RunEvent) -> ControlFlow<()> + 'a;

/// What reaches the launcher from its children.
enum ChildOutput {
    Message(RunProcess, Box<ChildMessage>),
    /// Standard output has ended, and with it the process.
    Ended(RunProcess),
}

struct ChildProcess {
    process: std::process::Child,
    /// Held open as long as the child may live.
    parent_pipe: Option<ChildStdin>,
    errors: Receiver<String>,
    /// When it did, as a number in the order of exits.
    ended: Option<usize>,
    /// Why it could not do its work, and whether another process is to blame.
    failure: Option<(String, bool)>,
}

/// The state of a launched run.
struct LaunchedRun<'a, 'w> {
    launcher: &'a Launcher,
    setup: &'a Setup,
    watch: &'a mut RunObserver<'w>,
    running: HashMap<RunProcess, ChildProcess>,
    outputs: Receiver<ChildOutput>,
    output_sender: Sender<ChildOutput>,
    merger: ReportMerger,
    started: bool,
    outcome: RunOutcome,
}

impl Launcher {
    /// Runs the setup on this host: cards, manager, readout units, builder units, one process each.
    ///
    /// `watch` hears what happens. Returns when all processes have ended.
    ///
    /// # Errors
    /// A process could not be started. What goes wrong afterwards is in the outcome.
    pub fn run(&self, setup: &Setup, watch: &mut dyn FnMut(&RunEvent)) -> Result<RunOutcome, ProcessError> {
        self.run_while(setup, &mut |event| {
            watch(event);
            ControlFlow::Continue(())
        })
    }

    /// As [`run`](Self::run); `watch` may also ask the run to stop, which then exits with its account. It hears
    /// of progress every tenth of a second.
    ///
    /// # Errors
    /// As there.
    pub fn run_while(&self, setup: &Setup, watch: &mut RunObserver<'_>) -> Result<RunOutcome, ProcessError> {
        let mut setup = setup.clone();
        setup.instance = format!("{}-{}", setup.name, std::process::id());
        let (output_sender, outputs) = mpsc::channel();
        let outcome = RunOutcome {
            account: None,
            elapsed: None,
            samples: Vec::new(),
            readouts: vec![None; setup.plan.readouts()],
            totals: vec![None; setup.plan.builders()],
            builders: vec![None; setup.plan.builders()],
            sinks: Vec::new(),
            failures: Vec::new(),
        };
        let mut run = LaunchedRun {
            launcher: self,
            merger: ReportMerger::new(setup.plan.clone()),
            setup: &setup,
            watch,
            running: HashMap::new(),
            outputs,
            output_sender,
            started: false,
            outcome,
        };
        let result = run.start().and_then(|()| run.supervise());
        run.end();
        result.map(|()| run.outcome)
    }
}

impl LaunchedRun<'_, '_> {
    /// Starts the cards and the manager; the units follow when it listens.
    fn start(&mut self) -> Result<(), ProcessError> {
        for unit in &self.setup.builders {
            if let LandingTarget::Card(setup) = &unit.landing {
                let name = card::name(self.setup, setup)?;
                let child = Child::Card { name, memory: setup.memory, spin: self.setup.spin };
                self.spawn(RunProcess::Card(setup.name.clone()), &child)?;
            }
        }
        let manager = RunProcess::Unit(Unit::Manager);
        self.spawn(manager.clone(), &Child::Manager)?;
        let mut line =
            serde_json::to_vec(self.setup).map_err(std::io::Error::from).context("write the setup")?;
        line.push(b'\n');
        if let Some(parent_pipe) =
            self.running.get_mut(&manager).and_then(|running| running.parent_pipe.as_mut())
        {
            parent_pipe.write_all(&line).context("hand the setup to the manager")?;
        }
        Ok(())
    }

    fn spawn(&mut self, role: RunProcess, child: &Child) -> Result<(), ProcessError> {
        let mut command = Command::new(&self.launcher.program);
        command.args(&self.launcher.arguments).args(child.to_arguments());
        if self.setup.device != "auto" {
            command.env(millstream_rdma::loader::ENV_DEVICE, &self.setup.device);
        }
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().context("start a process of the run")?;
        let spawned = RunEvent::Spawned { process: role.clone(), pid: process.id() };
        let (errors_in, errors) = mpsc::channel();
        if let Some(stderr) = process.stderr.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    let _ = errors_in.send(line);
                }
            });
        }
        if let Some(stdout) = process.stdout.take() {
            let (output_sender, role) = (self.output_sender.clone(), role.clone());
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if let Ok(message) = serde_json::from_str(&line) {
                        let _ = output_sender.send(ChildOutput::Message(role.clone(), Box::new(message)));
                    }
                }
                let _ = output_sender.send(ChildOutput::Ended(role));
            });
        }
        let parent_pipe = process.stdin.take();
        self.running.insert(role, ChildProcess { process, parent_pipe, errors, ended: None, failure: None });
        self.notify(&spawned);
        Ok(())
    }

    /// Shows what happens; closes the manager's standard input, which stops the run, if asked to.
    fn notify(&mut self, event: &RunEvent) {
        if (self.watch)(event).is_break()
            && let Some(manager) = self.running.get_mut(&RunProcess::Unit(Unit::Manager))
        {
            manager.parent_pipe = None;
        }
    }

    /// Takes what children tell until all units have ended, or had the time to.
    fn supervise(&mut self) -> Result<(), ProcessError> {
        let mut give_up_at: Option<Instant> = None;
        while self.units_running() {
            let wait = give_up_at
                .map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            match self.outputs.recv_timeout(wait) {
                Ok(ChildOutput::Message(role, message)) => self.take(&role, *message)?,
                Ok(ChildOutput::Ended(role)) => {
                    self.record_end(&role);
                    // Before the start a process that does not come up exits the run.
                    if role == RunProcess::Unit(Unit::Manager) || !self.started {
                        let grace =
                            if self.outcome.account.is_some() { self.closing() } else { self.grace() };
                        give_up_at.get_or_insert(Instant::now() + grace);
                    }
                }
                Err(RecvTimeoutError::Timeout) if give_up_at.is_some() => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        Ok(())
    }

    fn units_running(&self) -> bool {
        self.running
            .iter()
            .any(|(role, running)| matches!(role, RunProcess::Unit(_)) && running.ended.is_none())
    }

    /// What units need to stop by themselves when the manager is gone.
    fn grace(&self) -> Duration {
        4 * self.setup.plan.drain_timeout + Duration::from_millis(500)
    }

    /// What builder units may need to close their files.
    fn closing(&self) -> Duration {
        if self.setup.output.is_some() { Duration::from_secs(60) } else { self.grace() }
    }

    fn take(&mut self, role: &RunProcess, message: ChildMessage) -> Result<(), ProcessError> {
        match (message, role) {
            (ChildMessage::Manager(event), RunProcess::Unit(Unit::Manager)) => match event {
                ManagerEvent::Listening { address } => self.spawn_units(&address)?,
                ManagerEvent::Started => {
                    self.started = true;
                    self.notify(&RunEvent::Started);
                }
                ManagerEvent::Progress(sample) => {
                    self.outcome.samples.push(sample);
                    self.notify(&RunEvent::Progress(sample));
                }
                ManagerEvent::Finished(finished) => {
                    self.outcome.account = Some(finished.account);
                    self.outcome.elapsed = Some(finished.elapsed);
                    for (known, message) in self.outcome.builders.iter_mut().zip(finished.builders) {
                        *known = known.take().or(message);
                    }
                }
            },
            (ChildMessage::Failed { reason, is_secondary }, role) => {
                if let Some(running) = self.running.get_mut(role) {
                    running.failure = Some((reason, is_secondary));
                }
            }
            (ChildMessage::Readout(report), RunProcess::Unit(Unit::Readout(ru))) => {
                self.readout_ended(*ru, report)
            }
            (ChildMessage::Builder { end, sink }, RunProcess::Unit(Unit::Builder(bu))) => {
                self.builder_ended(*bu, *end, sink)
            }
            _ => {}
        }
        Ok(())
    }

    fn readout_ended(&mut self, ru: RuIndex, report: ReadoutReport) {
        if let Some(place) = self.outcome.readouts.get_mut(ru.index()) {
            *place = Some(report.clone());
        }
        self.merger.add_readout(ru, report);
    }

    fn builder_ended(&mut self, bu: BuIndex, end: BuilderEnd, sink: Option<String>) {
        if let Some(place) = self.outcome.totals.get_mut(bu.index()) {
            *place = Some(end.report.done);
        }
        self.merger.add_builder(bu, end.report);
        if let Some(place) = self.outcome.builders.get_mut(bu.index()) {
            *place = Some(end.statistics);
        }
        self.outcome.sinks.extend(sink.map(|message| (bu, message)));
    }

    fn spawn_units(&mut self, manager: &str) -> Result<(), ProcessError> {
        for index in (0..self.setup.plan.readouts()).map(|index| RuIndex(index as u16)) {
            let child = Child::Readout { index, manager: manager.to_owned() };
            self.spawn(RunProcess::Unit(Unit::Readout(index)), &child)?;
        }
        for index in (0..self.setup.plan.builders()).map(|index| BuIndex(index as u16)) {
            let child = Child::Builder { index, manager: manager.to_owned() };
            self.spawn(RunProcess::Unit(Unit::Builder(index)), &child)?;
        }
        Ok(())
    }

    /// Ends what still runs, and closes the account if the manager has not.
    fn end(&mut self) {
        let mut exits = Vec::new();
        for (role, running) in &mut self.running {
            // Cards end by the end of their standard input; units had their time.
            running.parent_pipe = None;
            if matches!(role, RunProcess::Unit(_)) && running.ended.is_none() {
                let _ = running.process.kill();
                running.failure = Some(("did not end by itself".to_owned(), true));
            }
        }
        for (role, running) in &mut self.running {
            if let Ok(status) = wait_or_kill(&mut running.process) {
                exits.push((role.clone(), status));
            }
        }
        self.take_last_messages();
        let mut failures = Vec::new();
        for (role, status) in exits.into_iter().filter(|(_, status)| !status.success()) {
            let Some(running) = self.running.remove(&role) else { continue };
            let lines: Vec<String> = running.errors.iter().collect();
            let last = lines[lines.len().saturating_sub(10)..].join("\n");
            let (reason, is_secondary) = running.failure.unwrap_or((last, false));
            let rank = (is_secondary, running.ended.unwrap_or(usize::MAX));
            failures.push((rank, ProcessFailure { process: role, status, reason }));
        }
        failures.sort_by_key(|(rank, _)| *rank);
        self.outcome.failures = failures.into_iter().map(|(_, failure)| failure).collect();
        if self.started && self.outcome.account.is_none() {
            self.outcome.account = Some(self.merger.account(StopCause::Lost(Unit::Manager)));
        }
    }

    /// Takes what the children, which have all ended, message last.
    fn take_last_messages(&mut self) {
        while self.running.values().any(|running| running.ended.is_none()) {
            match self.outputs.recv_timeout(Duration::from_secs(1)) {
                // Nothing is started any more.
                Ok(ChildOutput::Message(_, message))
                    if matches!(*message, ChildMessage::Manager(ManagerEvent::Listening { .. })) => {}
                Ok(ChildOutput::Message(role, message)) => {
                    let _ = self.take(&role, *message);
                }
                Ok(ChildOutput::Ended(role)) => self.record_end(&role),
                Err(_) => return,
            }
        }
    }

    fn record_end(&mut self, role: &RunProcess) {
        let order = self.running.values().filter_map(|running| running.ended).count();
        if let Some(running) = self.running.get_mut(role) {
            running.ended = Some(order);
        }
    }
}

/// A card has a moment to see the end of its standard input.
fn wait_or_kill(process: &mut std::process::Child) -> std::io::Result<ExitStatus> {
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        if let Some(status) = process.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    process.kill()?;
    process.wait()
}
