//! Starts all processes of a run on this host, and ends them.
//!
//! Standard input of each child is a pipe from the launcher, so children end when the launcher ends. Each
//! child has its own process group, so Ctrl-C reaches only the launcher. The launcher then requests the stop
//! of the run, which ends with its summary. The launcher makes the summary from the reports of all units, when
//! all have ended.
//!
//! A unit that the run goes on without is started again while `recovery.restarts` permits, a builder unit with its card. Its
//! process has the index of the restart ([`Plan`](crate::core::Plan)).

mod ending;
mod error_lines;
mod restarts;
mod samples;
mod takeover;

use super::builder::{BuilderEnd, BuilderStatistics};
use super::card::{self, CardProcess};
use super::child::{Child, ChildMessage};
use super::commands::ManagerCommand;
use super::error::{IoContext, ProcessError};
use super::manager::{ManagerEvent, ProgressSample};
use super::startup;
use crate::config::{LandingCard, LandingTarget, RunConfig};
use crate::core::report::{ReadoutReport, RunReports};
use crate::core::summary::Totals;
use crate::core::{BuIndex, RuIndex, RunSummary, StopCause, Term, Unit};
use crate::source::SourceStatistics;
use error_lines::ErrorLines;
use millstream_rdma::loader::{ENV_DEVICE, ENV_PATH};
use millstream_tls::ENV_KEYS;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use samples::Samples;
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime};

/// Interval of looking for processes that have ended while a child of theirs holds their standard output.
const EXIT_INTERVAL: Duration = Duration::from_millis(250);
/// How long such a child may go on until it is killed.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(1);
/// When the process counts as ended though something still holds its standard output.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest silence of a builder unit that closes its files. It reports each second that it does.
const CLOSING_SILENCE: Duration = Duration::from_secs(10);

/// Starts the processes of a run.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// The program to start; it must call [`Child::run`].
    pub program: PathBuf,
    /// Arguments before those of the child's role.
    pub arguments: Vec<OsString>,
}

/// A process of the run.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RunProcess {
    /// A unit.
    Unit(Unit),
    /// A standby manager. That of the start is 0; each that is started later has the next number.
    Standby(u16),
    /// A card, by its name in the configuration.
    Card(String),
}

/// Events of a run.
#[derive(Clone, Debug)]
pub enum RunEvent {
    /// A process was started.
    Spawned {
        /// Its role.
        process: RunProcess,
        /// Its process id.
        pid: u32,
    },
    /// All units are ready; the run starts.
    Started,
    /// The run was paused (`true`) or resumed.
    Paused(bool),
    /// Progress of the run.
    Progress(ProgressSample),
    /// A unit that was started again has joined the run.
    Joined(Unit),
    /// The sources of a readout unit have fallen silent, while others have later events (`true`), or send again. The run
    /// waits for them or goes on without them, according to [`RunConfig::source_timeout`].
    SourcesSilent(Unit, bool),
    /// A standby manager can take over.
    StandbyJoined,
    /// The standby manager has taken over.
    TookOver {
        /// Its term.
        term: Term,
    },
    /// A process has refused a connection.
    Refused {
        /// Its role.
        process: RunProcess,
        /// Connections that it has refused so far.
        connections: u64,
    },
    /// A process ended.
    Ended {
        /// Its role.
        process: RunProcess,
    },
    /// A line of a process's standard error, also of its software trigger: at most 100 a second. A further line says how many were
    /// dropped.
    ErrorLine {
        /// Its role.
        process: RunProcess,
        /// The line.
        line: String,
    },
    /// Nothing: sent every 250 ms, also before the run starts, so that the observer can request the stop.
    Waiting,
}

/// A command of an operator to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunCommand {
    /// Assign no further batch; batches in flight are finished.
    Pause,
    /// Assign batches again.
    Resume,
    /// Stop the run, which ends with its summary.
    Stop,
}

/// Sends commands to a run.
#[derive(Clone, Debug)]
pub struct RunCommands {
    sender: Sender<ChildOutput>,
}

impl RunCommands {
    /// Sends a command. Commands to a run that has ended are ignored.
    pub fn send(&self, command: RunCommand) {
        let _ = self.sender.send(ChildOutput::Command(command));
    }
}

/// The run's end of its commands, for [`Launcher::run_with_commands`].
#[derive(Debug)]
pub struct CommandReceiver {
    sender: Sender<ChildOutput>,
    receiver: Receiver<ChildOutput>,
}

impl CommandReceiver {
    /// Waits for a command, for launchers other than [`Launcher`].
    pub fn receive(&self, timeout: Duration) -> Option<RunCommand> {
        match self.receiver.recv_timeout(timeout) {
            Ok(ChildOutput::Command(command)) => Some(command),
            _ => None,
        }
    }
}

/// The two ends of a run's commands.
pub fn commands() -> (RunCommands, CommandReceiver) {
    let (sender, receiver) = mpsc::channel();
    (RunCommands { sender: sender.clone() }, CommandReceiver { sender, receiver })
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// The run summary; `None` if the run did not start.
    pub summary: Option<RunSummary>,
    /// From the first assignment to the last batch done; `None` if the manager was lost.
    pub elapsed: Option<Duration>,
    /// Progress over time.
    pub samples: Vec<ProgressSample>,
    /// The readout units' reports, by index; `None` for lost units.
    pub readouts: Vec<Option<ReadoutReport>>,
    /// Outcomes of the builder units' batches, by index. Those of a lost unit are from the manager; `None` without one.
    pub totals: Vec<Option<Totals>>,
    /// Statistics of the builder units, by index; `None` for lost units.
    pub builders: Vec<Option<BuilderStatistics>>,
    /// Builder units that started the run.
    pub initial_builders: usize,
    /// The largest fraction of corrupt fragments that the run permits of a source.
    pub max_corrupt: f64,
    /// What live sources delivered.
    pub sources: Vec<SourceStatistics>,
    /// Results of the builder units' sinks.
    pub sinks: Vec<(BuIndex, String)>,
    /// Failed processes in the order of their exits: primary failures, then secondary ones.
    pub failures: Vec<ProcessFailure>,
    /// Standby managers that were started.
    pub standbys: u16,
}

/// A process that failed.
#[derive(Clone, Debug)]
pub struct ProcessFailure {
    /// Its role.
    pub process: RunProcess,
    /// Its exit status.
    pub status: ExitStatus,
    /// Its error; without one, the last lines of its standard error.
    pub reason: String,
    /// Whether the run went on without it.
    pub is_recovered: bool,
}

impl RunOutcome {
    /// Whether the run succeeded: all events processed, all invariants hold, all decisions match, every process
    /// succeeded except those that the run went on without, and no source is too corrupt.
    pub fn is_success(&self) -> bool {
        let Some(summary) = &self.summary else { return false };
        let recovered = |bu| summary.recovered.contains(&Unit::Builder(BuIndex(bu)));
        let agrees = |(bu, unit): (u16, &Option<BuilderStatistics>)| match unit {
            Some(statistics) => statistics.comparison.is_full(),
            None => recovered(bu) || summary.is_vacant(Unit::Builder(BuIndex(bu)), self.initial_builders),
        };
        summary.is_success()
            && (0..).zip(&self.builders).all(agrees)
            && self.failures.iter().all(|failure| failure.is_recovered)
            && self.too_corrupt().is_empty()
    }
}

/// Called for each event of a run; can request the stop of the run.
pub type RunObserver<'a> = dyn FnMut(&RunEvent) -> ControlFlow<()> + 'a;

/// What the launcher waits for.
#[derive(Debug)]
enum ChildOutput {
    Command(RunCommand),
    Message(RunProcess, Box<ChildMessage>),
    /// A line of its standard error.
    ErrorLine(RunProcess, String),
    /// Standard output of the process with that id ended, and so did the process.
    Ended(RunProcess, u32),
}

struct ChildProcess {
    process: std::process::Child,
    /// Write end of the child's standard input, open while the child may live.
    parent_pipe: Option<ChildStdin>,
    errors: Option<ErrorLines>,
    /// When it was first seen to have ended, though its standard output is open: a child of it may live. The launcher starts
    /// a program that starts the unit if `--launcher` names one.
    exited: Option<Instant>,
    /// When it is killed, because the run goes on without it.
    kill_at: Option<Instant>,
    /// Position in the order of exits.
    ended: Option<usize>,
    /// Its error, and whether that is a consequence of another failure.
    failure: Option<(String, bool)>,
}

impl ChildProcess {
    /// Kills the process and its children, which are in its process group.
    fn kill(&self) {
        // No other process gets the group's id before the process is waited for.
        if let Some((group, _)) = self.state() {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    fn has_exited(&self) -> bool {
        self.state().is_none_or(|(_, has_exited)| has_exited)
    }

    /// Its id, which is that of its process group, and whether it has ended. `None` once it was waited for.
    fn state(&self) -> Option<(Pid, bool)> {
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw)?;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        Some((pid, waitid(WaitId::Pid(pid), options).ok()?.is_some()))
    }
}

/// State of a launched run.
struct LaunchedRun<'a, 'w> {
    launcher: &'a Launcher,
    config: &'a RunConfig,
    watch: &'a mut RunObserver<'w>,
    running: HashMap<RunProcess, ChildProcess>,
    outputs: Receiver<ChildOutput>,
    output_sender: Sender<ChildOutput>,
    /// All final reports: from the units, and those that only the manager has.
    reports: RunReports,
    /// Why the run ended, from the manager.
    cause: Option<StopCause>,
    /// Builder units whose reports do not count, because their batches were assigned again without one.
    superseded: Vec<BuIndex>,
    /// The manager's address.
    manager: String,
    /// The process that is the manager.
    manager_process: RunProcess,
    /// Where the standby manager listens; `None` while none can take over.
    standby_address: Option<String>,
    /// Whether the operator has ordered the stop of the run.
    is_stopping: bool,
    /// Units that may be started again once their processes have ended.
    departed: HashSet<Unit>,
    /// Restarts that have joined.
    joined: HashSet<Unit>,
    /// Number of times that a restart was started, and when it is started again because it could not join.
    attempts: HashMap<Unit, u32>,
    start_at: Vec<(Instant, Unit)>,
    started: bool,
    /// When the manager is killed if it does not listen by then, or does not start the run after that.
    start_by: Instant,
    /// When all processes are killed, because a stop was requested before the run started.
    stop_by: Option<Instant>,
    /// When the manager's last message came.
    manager_alive: Instant,
    samples: Samples,
    outcome: RunOutcome,
}

impl Launcher {
    /// Starts the run on this host, one process for each card, manager, readout unit and builder unit.
    ///
    /// `watch` is called for each event. Returns when all processes have ended.
    ///
    /// # Errors
    /// A process could not be started. Later failures are in the outcome.
    pub fn run(
        &self,
        config: &RunConfig,
        watch: &mut dyn FnMut(&RunEvent),
    ) -> Result<RunOutcome, ProcessError> {
        self.run_while(config, &mut |event| {
            watch(event);
            ControlFlow::Continue(())
        })
    }

    /// Runs as [`run`](Self::run) does; `watch` may request the stop. The run then ends with its
    /// summary. `watch` is called for progress every 100 ms, and at least every 250 ms from the start of the processes on.
    ///
    /// # Errors
    /// A process could not be started.
    pub fn run_while(
        &self,
        config: &RunConfig,
        watch: &mut RunObserver<'_>,
    ) -> Result<RunOutcome, ProcessError> {
        self.run_with_commands(config, commands().1, watch)
    }

    /// Runs as [`run_while`](Self::run_while) does, under the commands of an operator.
    ///
    /// # Errors
    /// A process could not be started.
    pub fn run_with_commands(
        &self,
        config: &RunConfig,
        commands: CommandReceiver,
        watch: &mut RunObserver<'_>,
    ) -> Result<RunOutcome, ProcessError> {
        let mut config = config.clone();
        config.instance = format!("{}-{}", config.name, std::process::id());
        config.started = Some(SystemTime::now());
        let CommandReceiver { sender: output_sender, receiver: outputs } = commands;
        let outcome = RunOutcome {
            summary: None,
            elapsed: None,
            samples: Vec::new(),
            initial_builders: config.plan.initial_builders(),
            readouts: vec![None; config.plan.readout_members()],
            totals: vec![None; config.plan.builders()],
            builders: vec![None; config.plan.builders()],
            max_corrupt: config.max_corrupt,
            sources: Vec::new(),
            sinks: Vec::new(),
            failures: Vec::new(),
            standbys: 0,
        };
        let mut run = LaunchedRun {
            launcher: self,
            reports: RunReports::none(config.plan.readout_members(), config.plan.builders()),
            cause: None,
            superseded: Vec::new(),
            config: &config,
            watch,
            running: HashMap::new(),
            outputs,
            output_sender,
            manager: String::new(),
            manager_process: RunProcess::Unit(Unit::Manager),
            standby_address: None,
            is_stopping: false,
            departed: HashSet::new(),
            joined: HashSet::new(),
            attempts: HashMap::new(),
            start_at: Vec::new(),
            started: false,
            start_by: Instant::now() + startup::timeout(&config),
            stop_by: None,
            manager_alive: Instant::now(),
            samples: Samples::default(),
            outcome,
        };
        let result = run.start().and_then(|()| run.supervise());
        run.end();
        run.outcome.samples = std::mem::take(&mut run.samples).into_vec();
        result.map(|()| run.outcome)
    }
}

impl LaunchedRun<'_, '_> {
    /// Starts the cards and the manager. The units follow when the manager listens.
    fn start(&mut self) -> Result<(), ProcessError> {
        for unit in self.config.initial_builders() {
            if let LandingTarget::Card(config) = &unit.landing {
                self.spawn_card(config)?;
            }
        }
        let manager = RunProcess::Unit(Unit::Manager);
        self.spawn(manager.clone(), &Child::Manager)?;
        let mut line = serde_json::to_vec(self.config)
            .map_err(std::io::Error::from)
            .context("write the configuration")?;
        line.push(b'\n');
        if let Some(pipe) = self.running.get(&manager).and_then(|running| running.parent_pipe.as_ref()) {
            let pipe = pipe.as_fd().try_clone_to_owned().context("hand the configuration to the manager")?;
            // It may not fit into the pipe, and a manager that hangs does not read. An error is ignored: the end of the manager
            // is handled as any other.
            std::thread::spawn(move || File::from(pipe).write_all(&line));
        }
        Ok(())
    }

    fn spawn_card(&mut self, config: &LandingCard) -> Result<(), ProcessError> {
        let child = Child::Card(CardProcess {
            name: card::name(self.config, config)?,
            memory: config.memory,
            kind: config.kind.clone(),
            spin: self.config.spin,
        });
        self.spawn(RunProcess::Card(config.name.clone()), &child)
    }

    fn spawn(&mut self, role: RunProcess, child: &Child) -> Result<(), ProcessError> {
        let mut command = Command::new(&self.launcher.program);
        command.args(&self.launcher.arguments).args(child.to_arguments());
        if self.config.device != "auto" {
            command.env(ENV_DEVICE, &self.config.device);
        }
        // The kernel copies between processes in ordinary memory only. With packets, the builder unit stores to its card itself.
        let on_gpu = self.config.builders.iter().any(|builder| builder.landing.is_gpu());
        if on_gpu && std::env::var_os(ENV_PATH).is_none() {
            command.env(ENV_PATH, "wire");
        }
        if let Some(keys) = &self.config.security.keys {
            command.env(ENV_KEYS, keys.to_variable());
        }
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = |cause| ProcessError::Start { program: self.launcher.program.clone(), cause };
        millstream_shm::descriptors::restore_limit(&mut command);
        let mut process = command.spawn().map_err(start)?;
        let pid = process.id();
        let spawned = RunEvent::Spawned { process: role.clone(), pid: process.id() };
        let errors = process.stderr.take();
        let errors = errors.map(|stderr| ErrorLines::read(stderr, role.clone(), self.output_sender.clone()));
        if let Some(stdout) = process.stdout.take() {
            let (output_sender, role) = (self.output_sender.clone(), role.clone());
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if let Ok(message) = serde_json::from_str(&line) {
                        let _ = output_sender.send(ChildOutput::Message(role.clone(), Box::new(message)));
                    }
                }
                let _ = output_sender.send(ChildOutput::Ended(role, pid));
            });
        }
        let parent_pipe = process.stdin.take();
        self.running.insert(
            role,
            ChildProcess {
                process,
                parent_pipe,
                errors,
                exited: None,
                kill_at: None,
                ended: None,
                failure: None,
            },
        );
        self.notify(&spawned);
        Ok(())
    }

    /// Calls the observer. If it requests the stop, closes the manager's standard input, which stops the run.
    fn notify(&mut self, event: &RunEvent) {
        if (self.watch)(event).is_break() {
            self.command(RunCommand::Stop);
        }
    }

    /// Passes a command to the manager. Before the start, only [`RunCommand::Stop`] has an effect.
    fn command(&mut self, command: RunCommand) {
        if command == RunCommand::Stop {
            self.is_stopping = true;
            self.stop_by = self.stop_by.or(Some(Instant::now() + self.grace()));
        }
        let Some(manager) = self.running.get_mut(&self.manager_process) else { return };
        match command {
            RunCommand::Stop => manager.parent_pipe = None,
            RunCommand::Pause => self.tell_manager(ManagerCommand::Pause),
            RunCommand::Resume => self.tell_manager(ManagerCommand::Resume),
        }
    }

    /// Passes a command to the manager once the run has started.
    fn tell_manager(&mut self, command: ManagerCommand) {
        if let Some(manager) = self.running.get_mut(&self.manager_process)
            && let Some(pipe) = &mut manager.parent_pipe
            && self.started
        {
            // Errors are ignored: the end of the manager is handled as any other.
            let _ = pipe.write_all(command.line().as_bytes());
        }
    }

    /// Handles children's messages until all units have ended or their time is up.
    fn supervise(&mut self) -> Result<(), ProcessError> {
        let mut end_by: Option<Instant> = None;
        let mut look_at = Instant::now();
        while self.units_running() {
            if look_at <= Instant::now() {
                look_at = Instant::now() + EXIT_INTERVAL;
                self.end_orphans();
                self.notify(&RunEvent::Waiting);
            }
            let give_up_at = end_by.or(self.stop_by.filter(|_| !self.started));
            let wait =
                give_up_at.unwrap_or_else(|| self.manager_due()).saturating_duration_since(Instant::now());
            let kill = self.running.values().filter(|running| running.ended.is_none());
            let kill = kill.filter_map(|running| running.kill_at).min();
            let wait = kill.map_or(wait, |at| wait.min(at.saturating_duration_since(Instant::now())));
            let start = self.start_at.iter().map(|(at, _)| *at).min();
            let wait = start.map_or(wait, |at| wait.min(at.saturating_duration_since(Instant::now())));
            let wait = wait.min(look_at.saturating_duration_since(Instant::now()));
            match self.outputs.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) if kill.is_some_and(|at| at <= Instant::now()) => {
                    self.kill_excluded();
                }
                Err(RecvTimeoutError::Timeout) if start.is_some_and(|at| at <= Instant::now()) => {
                    self.start_due();
                }
                Ok(ChildOutput::Command(command)) => self.command(command),
                Ok(ChildOutput::ErrorLine(process, line)) => {
                    self.notify(&RunEvent::ErrorLine { process, line });
                }
                Ok(ChildOutput::Message(role, message)) => {
                    if matches!(*message, ChildMessage::Closing) {
                        let until = Instant::now() + CLOSING_SILENCE;
                        end_by = end_by.map(|at| at.max(until));
                    }
                    self.take(&role, *message)?;
                }
                Ok(ChildOutput::Ended(role, pid)) => {
                    if !self.record_end(&role, pid) {
                        continue;
                    }
                    self.notify(&RunEvent::Ended { process: role.clone() });
                    if let RunProcess::Unit(unit) = role {
                        self.tell_manager(ManagerCommand::Ended(unit));
                        self.retry_join(unit);
                        self.restart(unit);
                    }
                    self.replace_standby(&role);
                    let is_manager = role == self.manager_process;
                    if is_manager && self.take_over() {
                        continue;
                    }
                    if is_manager {
                        self.kill_joining();
                    }
                    // Before the start, the end of any process ends the run.
                    if is_manager || !self.started {
                        let grace = if self.cause.is_some() { self.closing() } else { self.grace() };
                        end_by.get_or_insert(Instant::now() + grace);
                    }
                }
                Err(RecvTimeoutError::Timeout) => match give_up_at {
                    Some(at) if at <= Instant::now() => return Ok(()),
                    Some(_) => {}
                    None => self.end_silent_manager(),
                },
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        Ok(())
    }

    /// When the manager is killed, or the standby manager takes over, unless it reports something before.
    fn manager_due(&self) -> Instant {
        if self.started { self.silent_at() } else { self.start_by }
    }

    /// Lets the standby manager take over if the manager is silent: it is stopped or hangs. Without one, and before the start,
    /// kills the manager; its end is handled as any other.
    fn end_silent_manager(&mut self) {
        if self.manager_due() > Instant::now() || self.take_over() {
            return;
        }
        let timeout = startup::timeout(self.config);
        let why = match (self.started, self.manager.is_empty()) {
            (true, _) => "was silent and was killed".to_owned(),
            (false, true) => format!("did not listen within {timeout:?} and was killed"),
            (false, false) => format!("did not start the run within {timeout:?} and was killed"),
        };
        if let Some(manager) = self.running.get_mut(&self.manager_process) {
            tracing::warn!("the event manager {why}");
            manager.kill();
            manager.failure = Some((why, false));
            let now = Instant::now();
            (self.manager_alive, self.start_by) = (now, now + timeout);
        }
    }

    /// Ends what processes left that were killed, or ended, while children of theirs hold their standard output.
    fn end_orphans(&mut self) {
        let now = Instant::now();
        for (role, running) in self.running.iter_mut().filter(|(_, running)| running.ended.is_none()) {
            if running.exited.is_none() && running.has_exited() {
                running.exited = Some(now);
            }
            let Some(exited) = running.exited else { continue };
            if now >= exited + ORPHAN_TIMEOUT {
                running.kill();
            }
            if now >= exited + OUTPUT_TIMEOUT {
                // A child that is in no process group of the run.
                let _ = self.output_sender.send(ChildOutput::Ended(role.clone(), running.process.id()));
            }
        }
    }

    /// Whether the run lasts until this process has ended.
    fn is_unit(&self, role: &RunProcess) -> bool {
        match (role, &self.manager_process) {
            (RunProcess::Unit(_), _) => true,
            // It is the manager, or was one.
            (RunProcess::Standby(standby), RunProcess::Standby(manager)) => standby <= manager,
            _ => false,
        }
    }

    fn units_running(&self) -> bool {
        self.running.iter().any(|(role, running)| self.is_unit(role) && running.ended.is_none())
    }

    /// Time for units to stop after the manager is lost.
    fn grace(&self) -> Duration {
        4 * self.config.plan.drain_timeout + Duration::from_millis(500)
    }

    /// Time for builder units to begin to close their files.
    fn closing(&self) -> Duration {
        if self.config.output.is_some() { self.grace().max(CLOSING_SILENCE) } else { self.grace() }
    }

    fn take(&mut self, role: &RunProcess, message: ChildMessage) -> Result<(), ProcessError> {
        let is_manager = *role == self.manager_process;
        if is_manager {
            self.manager_alive = self.manager_alive.max(Instant::now());
        }
        match (message, role) {
            (ChildMessage::Manager(event), _) if is_manager => match event {
                ManagerEvent::Listening { address } => {
                    self.manager.clone_from(&address);
                    // The manager bounds the start itself, by the same time from here on.
                    self.start_by = Instant::now() + startup::timeout(self.config) + self.grace();
                    if !self.is_stopping {
                        self.spawn_units(&address)?;
                    }
                }
                ManagerEvent::Started => {
                    self.started = true;
                    self.notify(&RunEvent::Started);
                }
                ManagerEvent::Paused(paused) => self.notify(&RunEvent::Paused(paused)),
                ManagerEvent::Progress(sample) => {
                    self.samples.push(sample);
                    self.notify(&RunEvent::Progress(sample));
                }
                ManagerEvent::Excluded(unit) => {
                    let kill_at = Instant::now() + self.grace();
                    if let Some(running) = self.running.get_mut(&RunProcess::Unit(unit)) {
                        running.kill_at.get_or_insert(kill_at);
                    }
                }
                ManagerEvent::Departed(unit) => {
                    self.departed.insert(unit);
                    self.restart(unit);
                }
                ManagerEvent::Joined(unit) => {
                    self.joined.insert(unit);
                    self.notify(&RunEvent::Joined(unit));
                }
                ManagerEvent::SourcesSilent(unit, is_silent) => {
                    self.notify(&RunEvent::SourcesSilent(unit, is_silent));
                }
                ManagerEvent::StandbyJoined { address } => {
                    self.standby_address = Some(address);
                    self.notify(&RunEvent::StandbyJoined);
                }
                ManagerEvent::StandbyLost { address } => self.end_standby(&address),
                ManagerEvent::TookOver { address, term } => {
                    (self.manager, self.manager_alive) = (address, Instant::now());
                    self.notify(&RunEvent::TookOver { term });
                    self.start_standby();
                }
                ManagerEvent::Finished(finished) => {
                    let recovered = &finished.summary.recovered;
                    for bu in (0..self.config.builders.len()).map(|bu| BuIndex(bu as u16)) {
                        let has_no_report =
                            finished.reports.builders.get(bu.index()).is_none_or(Option::is_none);
                        if has_no_report && recovered.contains(&Unit::Builder(bu)) {
                            // Its batches were assigned again, whatever it reports later.
                            self.superseded.push(bu);
                        }
                    }
                    self.cause = Some(finished.summary.cause);
                    self.reports.complete_with(finished.reports);
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
            (ChildMessage::Refused(connections), role) => {
                self.notify(&RunEvent::Refused { process: role.clone(), connections });
            }
            (ChildMessage::Sources(sources), RunProcess::Unit(Unit::Readout(_))) => {
                self.outcome.sources.extend(sources);
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
        if let Some(place) = self.reports.readouts.get_mut(ru.index()) {
            *place = Some(report);
        }
    }

    fn builder_ended(&mut self, bu: BuIndex, end: BuilderEnd, sink: Option<String>) {
        if let Some(place) = self.reports.builders.get_mut(bu.index()) {
            *place = Some(end.report);
        }
        if let Some(place) = self.outcome.builders.get_mut(bu.index()) {
            *place = Some(end.statistics);
        }
        self.outcome.sinks.extend(sink.map(|message| (bu, message)));
    }

    fn spawn_units(&mut self, manager: &str) -> Result<(), ProcessError> {
        if self.config.plan.recovery.has_standby() {
            self.spawn_standby()?;
        }
        for index in (0..self.config.plan.readouts()).map(|index| RuIndex(index as u16)) {
            let child = Child::Readout { index, manager: manager.to_owned() };
            self.spawn(RunProcess::Unit(Unit::Readout(index)), &child)?;
        }
        for index in (0..self.config.plan.initial_builders()).map(|index| BuIndex(index as u16)) {
            let child = Child::Builder { index, manager: manager.to_owned() };
            self.spawn(RunProcess::Unit(Unit::Builder(index)), &child)?;
        }
        Ok(())
    }

    /// Records the end of a process. False if it is recorded already, or another one has taken its place.
    fn record_end(&mut self, role: &RunProcess, pid: u32) -> bool {
        let order = self.running.values().filter_map(|running| running.ended).count();
        let running = self.running.get_mut(role);
        let running = running.filter(|running| running.process.id() == pid && running.ended.is_none());
        running.map(|running| running.ended = Some(order)).is_some()
    }
}
