//! Starts all processes of a run on this host, and sees to it that they end.
//!
//! Every child's standard input is a pipe of the launcher, so that children end with it, however it ends.
//! Children are in process groups of their own: a Ctrl-C is the launcher's to handle, by asking the run to
//! stop, and the run still ends with its account.
//! If the manager dies, the launcher closes the account from the units' reports.

use super::builder::{BuilderEnd, BuilderStatistics};
use super::card;
use super::child::{Child, Told};
use super::error::{Doing, ProcessError};
use super::manager::{Event, Sample};
use crate::config::{Landing, Setup};
use crate::core::account::Totals;
use crate::core::report::ReadoutReport;
use crate::core::{Account, BuIndex, Ledger, RuIndex, StopCause, Unit};
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
pub enum Part {
    /// A unit.
    Unit(Unit),
    /// A card, by its name in the configuration.
    Card(String),
}

/// What happens during a run.
#[derive(Clone, Debug)]
pub enum Happening {
    /// A process was started.
    Spawned {
        /// What it is.
        part: Part,
        /// Its process id.
        process: u32,
    },
    /// All units are ready; the run starts.
    Started,
    /// How far the run is.
    Progress(Sample),
}

/// How a run went.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// The account; none if the run did not start.
    pub account: Option<Account>,
    /// From the first assignment to the last batch done; none if the manager was lost.
    pub elapsed: Option<Duration>,
    /// How far the run was, over time.
    pub samples: Vec<Sample>,
    /// What the readout units counted, by index; none from those that were lost.
    pub readouts: Vec<Option<ReadoutReport>>,
    /// What became of the batches of the builder units, by index; none from those that were lost.
    pub totals: Vec<Option<Totals>>,
    /// What the builder units saw beside, by index; none from those that were lost.
    pub builders: Vec<Option<BuilderStatistics>>,
    /// What the builder units' sinks have to tell people.
    pub sinks: Vec<(BuIndex, String)>,
    /// The processes that did not end well. Those that blame no other are in front, in the order of their
    /// ends.
    pub troubles: Vec<Trouble>,
}

/// A process that did not end well.
#[derive(Clone, Debug)]
pub struct Trouble {
    /// Which.
    pub part: Part,
    /// How it ended.
    pub status: ExitStatus,
    /// Why, as far as it told; what it wrote to standard error last, if it told nothing.
    pub said: String,
}

impl RunOutcome {
    /// Whether everything is as it should be: a whole run, all laws hold, all decisions agree, every process
    /// ended well.
    pub fn is_success(&self) -> bool {
        let agrees = |unit: &Option<BuilderStatistics>| {
            unit.as_ref().is_some_and(|statistics| statistics.agreement.is_full())
        };
        self.account.as_ref().is_some_and(Account::is_success)
            && self.builders.iter().all(agrees)
            && self.troubles.is_empty()
    }
}

/// Hears what happens, and may ask the run to stop.
pub type Watch<'a> = dyn FnMut(&Happening) -> ControlFlow<()> + 'a;

/// What reaches the launcher from its children.
enum Heard {
    Told(Part, Box<Told>),
    /// Standard output has ended, and with it the process.
    Ended(Part),
}

struct Running {
    process: std::process::Child,
    /// Held open as long as the child may live.
    lifeline: Option<ChildStdin>,
    errors: Receiver<String>,
    /// When it did, as a number in the order of ends.
    ended: Option<usize>,
    /// Why it could not do its work, and whether another process is to blame.
    failure: Option<(String, bool)>,
}

/// The state of a launched run.
struct Run<'a, 'w> {
    launcher: &'a Launcher,
    setup: &'a Setup,
    watch: &'a mut Watch<'w>,
    running: HashMap<Part, Running>,
    heard: Receiver<Heard>,
    speaker: Sender<Heard>,
    ledger: Ledger,
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
    pub fn run(&self, setup: &Setup, watch: &mut dyn FnMut(&Happening)) -> Result<RunOutcome, ProcessError> {
        self.run_while(setup, &mut |happening| {
            watch(happening);
            ControlFlow::Continue(())
        })
    }

    /// As [`run`](Self::run); `watch` may also ask the run to stop, which then ends with its account. It hears
    /// of progress every tenth of a second.
    ///
    /// # Errors
    /// As there.
    pub fn run_while(&self, setup: &Setup, watch: &mut Watch<'_>) -> Result<RunOutcome, ProcessError> {
        let mut setup = setup.clone();
        setup.instance = format!("{}-{}", setup.name, std::process::id());
        let (speaker, heard) = mpsc::channel();
        let outcome = RunOutcome {
            account: None,
            elapsed: None,
            samples: Vec::new(),
            readouts: vec![None; setup.plan.readouts()],
            totals: vec![None; setup.plan.builders()],
            builders: vec![None; setup.plan.builders()],
            sinks: Vec::new(),
            troubles: Vec::new(),
        };
        let mut run = Run {
            launcher: self,
            ledger: Ledger::new(setup.plan.clone()),
            setup: &setup,
            watch,
            running: HashMap::new(),
            heard,
            speaker,
            started: false,
            outcome,
        };
        let result = run.start().and_then(|()| run.attend());
        run.end();
        result.map(|()| run.outcome)
    }
}

impl Run<'_, '_> {
    /// Starts the cards and the manager; the units follow when it listens.
    fn start(&mut self) -> Result<(), ProcessError> {
        for unit in &self.setup.builders {
            if let Landing::Card(setup) = &unit.landing {
                let name = card::name(self.setup, setup)?;
                let child = Child::Card { name, memory: setup.memory, spin: self.setup.spin };
                self.spawn(Part::Card(setup.name.clone()), &child)?;
            }
        }
        let manager = Part::Unit(Unit::Manager);
        self.spawn(manager.clone(), &Child::Manager)?;
        let mut line =
            serde_json::to_vec(self.setup).map_err(std::io::Error::from).doing("write the setup")?;
        line.push(b'\n');
        if let Some(lifeline) = self.running.get_mut(&manager).and_then(|running| running.lifeline.as_mut()) {
            lifeline.write_all(&line).doing("hand the setup to the manager")?;
        }
        Ok(())
    }

    fn spawn(&mut self, part: Part, child: &Child) -> Result<(), ProcessError> {
        let mut command = Command::new(&self.launcher.program);
        command.args(&self.launcher.arguments).args(child.to_arguments());
        if self.setup.device != "auto" {
            command.env(millstream_rdma::loader::ENV_DEVICE, &self.setup.device);
        }
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().doing("start a process of the run")?;
        let spawned = Happening::Spawned { part: part.clone(), process: process.id() };
        let (errors_in, errors) = mpsc::channel();
        if let Some(stderr) = process.stderr.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                    let _ = errors_in.send(line);
                }
            });
        }
        if let Some(stdout) = process.stdout.take() {
            let (speaker, part) = (self.speaker.clone(), part.clone());
            std::thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if let Ok(told) = serde_json::from_str(&line) {
                        let _ = speaker.send(Heard::Told(part.clone(), Box::new(told)));
                    }
                }
                let _ = speaker.send(Heard::Ended(part));
            });
        }
        let lifeline = process.stdin.take();
        self.running.insert(part, Running { process, lifeline, errors, ended: None, failure: None });
        self.show(&spawned);
        Ok(())
    }

    /// Shows what happens; closes the manager's standard input, which stops the run, if asked to.
    fn show(&mut self, happening: &Happening) {
        if (self.watch)(happening).is_break()
            && let Some(manager) = self.running.get_mut(&Part::Unit(Unit::Manager))
        {
            manager.lifeline = None;
        }
    }

    /// Takes what children tell until all units have ended, or had the time to.
    fn attend(&mut self) -> Result<(), ProcessError> {
        let mut patience: Option<Instant> = None;
        while self.units_running() {
            let wait = patience
                .map_or(Duration::from_secs(3600), |until| until.saturating_duration_since(Instant::now()));
            match self.heard.recv_timeout(wait) {
                Ok(Heard::Told(part, told)) => self.take(&part, *told)?,
                Ok(Heard::Ended(part)) => {
                    self.note_end(&part);
                    // Before the start a process that does not come up ends the run.
                    if part == Part::Unit(Unit::Manager) || !self.started {
                        let grace =
                            if self.outcome.account.is_some() { self.closing() } else { self.grace() };
                        patience.get_or_insert(Instant::now() + grace);
                    }
                }
                Err(RecvTimeoutError::Timeout) if patience.is_some() => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        Ok(())
    }

    fn units_running(&self) -> bool {
        self.running.iter().any(|(part, running)| matches!(part, Part::Unit(_)) && running.ended.is_none())
    }

    /// What units need to stop by themselves when the manager is gone.
    fn grace(&self) -> Duration {
        4 * self.setup.plan.drain + Duration::from_millis(500)
    }

    /// What builder units may need to close their files.
    fn closing(&self) -> Duration {
        if self.setup.output.is_some() { Duration::from_secs(60) } else { self.grace() }
    }

    fn take(&mut self, part: &Part, told: Told) -> Result<(), ProcessError> {
        match (told, part) {
            (Told::Manager(event), Part::Unit(Unit::Manager)) => match event {
                Event::Listening { address } => self.spawn_units(&address)?,
                Event::Started => {
                    self.started = true;
                    self.show(&Happening::Started);
                }
                Event::Progress(sample) => {
                    self.outcome.samples.push(sample);
                    self.show(&Happening::Progress(sample));
                }
                Event::Finished(finished) => {
                    self.outcome.account = Some(finished.account);
                    self.outcome.elapsed = Some(finished.elapsed);
                    for (known, told) in self.outcome.builders.iter_mut().zip(finished.builders) {
                        *known = known.take().or(told);
                    }
                }
            },
            (Told::Failed { why, about_another }, part) => {
                if let Some(running) = self.running.get_mut(part) {
                    running.failure = Some((why, about_another));
                }
            }
            (Told::Readout(report), Part::Unit(Unit::Readout(ru))) => self.readout_ended(*ru, report),
            (Told::Builder { end, sink }, Part::Unit(Unit::Builder(bu))) => {
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
        self.ledger.readout(ru, report);
    }

    fn builder_ended(&mut self, bu: BuIndex, end: BuilderEnd, sink: Option<String>) {
        if let Some(place) = self.outcome.totals.get_mut(bu.index()) {
            *place = Some(end.report.done);
        }
        self.ledger.builder(bu, end.report);
        if let Some(place) = self.outcome.builders.get_mut(bu.index()) {
            *place = Some(end.statistics);
        }
        self.outcome.sinks.extend(sink.map(|told| (bu, told)));
    }

    fn spawn_units(&mut self, manager: &str) -> Result<(), ProcessError> {
        for index in (0..self.setup.plan.readouts()).map(|index| RuIndex(index as u16)) {
            let child = Child::Readout { index, manager: manager.to_owned() };
            self.spawn(Part::Unit(Unit::Readout(index)), &child)?;
        }
        for index in (0..self.setup.plan.builders()).map(|index| BuIndex(index as u16)) {
            let child = Child::Builder { index, manager: manager.to_owned() };
            self.spawn(Part::Unit(Unit::Builder(index)), &child)?;
        }
        Ok(())
    }

    /// Ends what still runs, and closes the account if the manager has not.
    fn end(&mut self) {
        let mut ends = Vec::new();
        for (part, running) in &mut self.running {
            // Cards end by the end of their standard input; units had their time.
            running.lifeline = None;
            if matches!(part, Part::Unit(_)) && running.ended.is_none() {
                let _ = running.process.kill();
                running.failure = Some(("did not end by itself".to_owned(), true));
            }
        }
        for (part, running) in &mut self.running {
            if let Ok(status) = wait_or_kill(&mut running.process) {
                ends.push((part.clone(), status));
            }
        }
        self.hear_out();
        let mut troubles = Vec::new();
        for (part, status) in ends.into_iter().filter(|(_, status)| !status.success()) {
            let Some(running) = self.running.remove(&part) else { continue };
            let lines: Vec<String> = running.errors.iter().collect();
            let last = lines[lines.len().saturating_sub(10)..].join("\n");
            let (said, about_another) = running.failure.unwrap_or((last, false));
            let rank = (about_another, running.ended.unwrap_or(usize::MAX));
            troubles.push((rank, Trouble { part, status, said }));
        }
        troubles.sort_by_key(|(rank, _)| *rank);
        self.outcome.troubles = troubles.into_iter().map(|(_, trouble)| trouble).collect();
        if self.started && self.outcome.account.is_none() {
            self.outcome.account = Some(self.ledger.close(StopCause::Lost(Unit::Manager)));
        }
    }

    /// Takes what the children, which have all ended, told last.
    fn hear_out(&mut self) {
        while self.running.values().any(|running| running.ended.is_none()) {
            match self.heard.recv_timeout(Duration::from_secs(1)) {
                // Nothing is started any more.
                Ok(Heard::Told(_, told)) if matches!(*told, Told::Manager(Event::Listening { .. })) => {}
                Ok(Heard::Told(part, told)) => {
                    let _ = self.take(&part, *told);
                }
                Ok(Heard::Ended(part)) => self.note_end(&part),
                Err(_) => return,
            }
        }
    }

    fn note_end(&mut self, part: &Part) {
        let order = self.running.values().filter_map(|running| running.ended).count();
        if let Some(running) = self.running.get_mut(part) {
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
