//! Run control: the state machine with its directory, the configuration and the present run.
//!
//! Commands come from any thread. Each run has one thread, which waits in the backend until the run has ended.

use crate::backend::{Backend, FinishedRun};
use crate::configuration::Configuration;
use crate::directory::{Directory, RunNumber, run_folder};
use crate::display;
use crate::error::ControlError;
use crate::live_run::{LiveRun, config_of_run};
use crate::logbook::{Entry, EntryKind, RunResult, now};
use crate::machine::{Action, Command, Machine, RunInput, State};
use crate::power::{EnergySum, EnergyTotals, PowerMeter, PowerReading};
use crate::request::Request;
use crate::status::{ConfigurationStatus, EndedRun, Fault, Status, UnitState, UnitStatus};
use crate::totals::{Totals, account};
use millstream_evb::config::RunConfig;
use millstream_evb::process::launcher::{self, CommandReceiver, RunCommand, RunEvent};
use serde_json::Value as Json;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::watch;

/// Faults that the status shows.
const FAULTS: usize = 100;

/// Run control. Clones share it.
#[derive(Clone)]
pub struct RunControl {
    shared: Arc<Shared>,
}

struct Shared {
    backend: Box<dyn Backend>,
    configuration: PathBuf,
    power: PowerMeter,
    energy: Mutex<EnergyTotals>,
    inner: Mutex<Inner>,
    /// Signalled when a run has ended.
    ended: Condvar,
    /// Counts changes of the status.
    changes: watch::Sender<u64>,
    /// Clients that were refused.
    clients_refused: AtomicU64,
}

struct Inner {
    machine: Machine,
    directory: Directory,
    configuration: Option<Configuration>,
    run: Option<LiveRun>,
    /// Units of the last run.
    units: Vec<UnitStatus>,
    last_run: Option<EndedRun>,
    faults: VecDeque<Fault>,
    /// Output directory of the present run.
    output: Option<PathBuf>,
    /// The latest picture of an event that was asked for.
    picture: Option<String>,
    totals: Totals,
    /// Run control is ending: no run starts any more.
    is_ending: bool,
}

impl RunControl {
    /// Run control for the configuration file, idle.
    pub fn new(
        configuration: &Path,
        directory: Directory,
        power: PowerMeter,
        backend: impl Backend,
    ) -> RunControl {
        let inner = Inner {
            machine: Machine::default(),
            directory,
            configuration: None,
            run: None,
            units: Vec::new(),
            last_run: None,
            faults: VecDeque::new(),
            output: None,
            picture: None,
            totals: Totals::default(),
            is_ending: false,
        };
        RunControl {
            shared: Arc::new(Shared {
                backend: Box::new(backend),
                configuration: configuration.to_owned(),
                energy: Mutex::new(EnergyTotals::default()),
                power,
                inner: Mutex::new(inner),
                ended: Condvar::new(),
                changes: watch::Sender::new(0),
                clients_refused: AtomicU64::new(0),
            }),
        }
    }

    /// Clients that were refused because they did not use TLS or had no valid certificate of the site.
    pub fn clients_refused(&self) -> u64 {
        self.shared.clients_refused.load(Ordering::Relaxed)
    }

    /// Counts a client that is refused. Returns their number.
    pub(crate) fn count_refused_client(&self) -> u64 {
        1 + self.shared.clients_refused.fetch_add(1, Ordering::Relaxed)
    }

    /// Reads and checks the configuration file. A refused one changes nothing.
    ///
    /// # Errors
    /// The state does not allow it, or the first problem of the configuration.
    pub fn configure(&self) -> Result<(), ControlError> {
        self.lock().machine.check(Command::Configure)?;
        // Checks inputs, which takes time; meanwhile the status can be read.
        let configuration = Configuration::load(&self.shared.configuration, &*self.shared.backend)?;
        self.install(Command::Configure, configuration, None)
    }

    /// Changes settings of the configuration for the next runs.
    ///
    /// # Errors
    /// The state does not allow it, or the first refused setting. Then none is changed.
    pub fn set(&self, changes: &BTreeMap<String, Json>) -> Result<(), ControlError> {
        let (before, configuration) = {
            let inner = self.lock();
            inner.machine.check(Command::Set)?;
            let Some(before) = &inner.configuration else { return Ok(()) };
            (before.sha256.clone(), before.clone())
        };
        let changed = configuration.with(changes, &*self.shared.backend)?;
        self.install(Command::Set, changed, Some(&before))
    }

    /// Takes a checked configuration; if it was made from another one, only while that is present, named by its hash.
    fn install(
        &self,
        command: Command,
        configuration: Configuration,
        before: Option<&str>,
    ) -> Result<(), ControlError> {
        let mut inner = self.lock();
        let present = inner.configuration.as_ref().map(|present| present.sha256.as_str());
        if before.is_some() && before != present {
            let problem = "the configuration was changed at the same time; repeat the command".to_owned();
            return Err(ControlError::Setting { field: "all".to_owned(), problem });
        }
        inner.machine.handle_command(command)?;
        inner.configuration = Some(configuration);
        drop(inner);
        self.changed();
        Ok(())
    }

    /// Handles a command other than `configure` and `set`.
    ///
    /// # Errors
    /// The state does not allow it, or the directory cannot be written.
    pub fn command(&self, command: Command, request: &Request) -> Result<(), ControlError> {
        request.check()?;
        match command {
            Command::Configure => return self.configure(),
            Command::Set => return self.set(&BTreeMap::new()),
            _ => {}
        }
        let mut inner = self.lock();
        inner.machine.check(command)?;
        if matches!(command, Command::Prepare | Command::Start) && inner.machine.state() == State::Configured
        {
            return self.launch(inner, command, request);
        }
        let action = inner.machine.handle_command(command)?;
        if command == Command::Reset && inner.machine.state() == State::Idle {
            inner.configuration = None;
        }
        inner.send(action);
        drop(inner);
        self.changed();
        Ok(())
    }

    /// Writes a comment into the log book.
    ///
    /// # Errors
    /// The text is refused, or the log book cannot be written.
    pub fn comment(&self, request: &Request) -> Result<(), ControlError> {
        request.check()?;
        if request.comment.trim().is_empty() {
            return Err(ControlError::Text { field: "comment", problem: "is empty".to_owned() });
        }
        let mut inner = self.lock();
        let kind = EntryKind::Comment { operator: request.operator.clone(), text: request.comment.clone() };
        let run = inner.directory.last_run();
        inner.directory.logbook().append(&Entry::now(run, kind))?;
        drop(inner);
        self.changed();
        Ok(())
    }

    /// Takes a run number with its output folder, records the begin, and starts the thread of the run.
    fn launch(
        &self,
        mut inner: MutexGuard<'_, Inner>,
        command: Command,
        request: &Request,
    ) -> Result<(), ControlError> {
        if inner.is_ending {
            return Err(ControlError::Ending);
        }
        let Some(configuration) = inner.configuration.clone() else { return Ok(()) };
        let output = configuration.config.output.as_ref().map(|output| output.directory.as_path());
        let number = inner.directory.next_run(output)?;
        inner.directory.keep(&configuration)?;
        let begin = EntryKind::Begin {
            operator: request.operator.clone(),
            comment: request.comment.clone(),
            configuration: configuration.path.clone(),
            sha256: configuration.sha256.clone(),
            settings: configuration.settings.clone(),
        };
        let entry = Entry::now(number, begin);
        inner.directory.logbook().append(&entry)?;
        inner.machine.handle_command(command)?;
        let config = config_of_run(&configuration.config, number);
        let (commands, receiver) = launcher::commands();
        inner.output = config.output.as_ref().map(|output| output.directory.clone());
        inner.run = Some(LiveRun::new(number, request, entry.time, commands));
        drop(inner);
        self.changed();
        let control = self.clone();
        let thread = std::thread::Builder::new().name(run_folder(number));
        let spawned = thread.spawn(move || {
            let power = &control.shared.power;
            let mut energy = EnergySum::begin(power);
            let finished = control.carry_out(&config, receiver, &mut energy);
            energy.add(power);
            control.end(number, &finished, energy.joules());
        });
        if let Err(error) = spawned {
            let failed = Err(format!("the thread of the run cannot be started: {error}"));
            self.end(number, &failed, None);
        }
        Ok(())
    }

    /// A panic fails the run. Without its end, no command would be allowed any more.
    fn carry_out(
        &self,
        config: &RunConfig,
        commands: CommandReceiver,
        energy: &mut EnergySum,
    ) -> Result<FinishedRun, String> {
        let run = || {
            let payload = self.shared.backend.payload_per_event(config);
            if let Some(run) = &mut self.lock().run {
                run.payload_per_event = payload;
            }
            self.shared.backend.run(config, commands, &mut |event| {
                self.observe(config, event);
                if energy.update(&self.shared.power) {
                    // Without a client that asks often, a counter could wrap twice.
                    self.energy();
                }
                ControlFlow::Continue(())
            })
        };
        // A panic leaves the state consistent, as `lock` says.
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            Err(format!("a fault of this program ended the run: {}", text.unwrap_or("a panic")))
        })
    }

    fn observe(&self, config: &RunConfig, event: &RunEvent) {
        if matches!(event, RunEvent::ErrorLine { .. }) {
            // The status does not show it.
            return;
        }
        let mut inner = self.lock();
        let input = match event {
            RunEvent::Started => Some(RunInput::UnitsReady),
            RunEvent::Paused(paused) => Some(RunInput::Paused(*paused)),
            _ => None,
        };
        let stopping = inner.machine.state() == State::Stopping;
        let Some(run) = &mut inner.run else { return };
        let number = run.number;
        run.observe(config, event, Instant::now());
        if !stopping {
            for name in run.take_lost(config) {
                inner.fault(number, format!("{name} ended during the run"));
            }
        }
        if let RunEvent::SourcesSilent(unit, true) = event {
            inner.fault(number, format!("the sources of {} are silent", config.unit_name(*unit)));
        }
        if let Some(input) = input {
            let before = inner.machine.state();
            let action = inner.machine.handle_run(input);
            inner.send(action);
            // A manager that takes over says it again.
            if let RunInput::Paused(paused) = input
                && inner.machine.state() != before
            {
                let kind = if paused { EntryKind::Pause } else { EntryKind::Resume };
                inner.record(number, kind);
            }
        }
        drop(inner);
        self.changed();
    }

    fn end(&self, number: RunNumber, finished: &Result<FinishedRun, String>, energy: Option<f64>) {
        let power = self.shared.power.read();
        let mut inner = self.lock();
        inner.output.take().iter().for_each(|directory| display::remove(directory));
        let stop_requested = inner.machine.state() == State::Stopping;
        let mut run = inner.run.take();
        let ended = run.as_mut().map_or_else(Vec::new, LiveRun::take_ended);
        inner.units = run.as_ref().map_or_else(Vec::new, LiveRun::units);
        let progress = run.as_ref().map(|run| run.status().progress).unwrap_or_default();
        // All processes of the run have ended. Nobody tells it of each card.
        for unit in &mut inner.units {
            (unit.state, unit.cpu_use) = (UnitState::Ended, None);
        }
        let not_started = run.is_none_or(|run| !run.started);
        let (result, problems) = match finished {
            Ok(run) if run.report.derived().success => (RunResult::Complete, Vec::new()),
            Ok(run) if stop_requested && (run.stopped_cleanly || not_started) => {
                (RunResult::Stopped, Vec::new())
            }
            Ok(run) => (RunResult::Failed, run.report.derived().problems),
            Err(error) => (RunResult::Failed, vec![error.clone()]),
        };
        let report = finished.as_ref().ok().map(|run| &run.report);
        let path = report.and_then(|report| match inner.directory.write_report(number, report) {
            Ok(path) => Some(path),
            Err(error) => {
                inner.fault(number, error.to_string());
                None
            }
        });
        let account = report.filter(|_| !not_started).map(account);
        if result == RunResult::Failed {
            ended.into_iter().for_each(|name| inner.fault(number, format!("{name} ended during the run")));
        }
        for failure in report.iter().flat_map(|report| &report.recovered_failures) {
            inner.fault(number, format!("{}: {}; the run went on without it", failure.unit, failure.cause));
        }
        problems.iter().for_each(|problem| inner.fault(number, problem.clone()));
        let last_run = EndedRun {
            number,
            result,
            problems: problems.clone(),
            events: report.map_or(0, |report| report.events),
            stored_events: report.map_or(0, |report| report.stored_events),
            duration_s: report.map_or_else(Default::default, |report| report.duration_s),
            report: path.clone(),
            energy_per_event_j: report
                .filter(|report| report.events > 0)
                .and_then(|report| Some(energy? / report.events as f64)),
        };
        let end =
            EntryKind::End { result, account, problems, report: path, energy_j: energy, power: Some(power) };
        inner.record(number, end);
        inner.totals.add(result, &progress, report);
        inner.last_run = Some(last_run);
        inner.machine.handle_run(RunInput::Ended { failed: result == RunResult::Failed });
        drop(inner);
        self.shared.ended.notify_all();
        self.changed();
    }

    /// Stops the present run, if there is one, and waits for its end. From then on no run starts.
    ///
    /// The run bounds its steps itself. Closing a large file on a slow disk may take minutes.
    pub fn shut_down(&self) {
        let mut inner = self.lock();
        inner.is_ending = true;
        if inner.machine.check(Command::Stop).is_ok()
            && let Ok(action) = inner.machine.handle_command(Command::Stop)
        {
            inner.send(action);
        }
        drop(self.shared.ended.wait_while(inner, |inner| inner.run.is_some()));
    }

    /// The status.
    pub fn status(&self) -> Status {
        self.status_and_totals().0
    }

    /// The status, and the counts over all runs that it does not show as the present one.
    pub(crate) fn status_and_totals(&self) -> (Status, Totals) {
        let inner = self.lock();
        (inner.status(), inner.totals)
    }

    /// The last entries of the log book.
    pub fn log(&self, count: usize) -> Vec<Entry> {
        self.lock().directory.logbook().recent(count)
    }

    /// The picture of the latest stored event, as SVG: of the present run or of the last.
    pub fn picture(&self) -> Option<String> {
        let directory = self.lock().output.clone();
        let newest = directory.as_deref().and_then(display::newest);
        let mut inner = self.lock();
        inner.picture = newest.or(inner.picture.take());
        inner.picture.clone()
    }

    /// Counts over all runs of this process.
    pub fn totals(&self) -> Totals {
        self.lock().totals
    }

    /// The host's power and frequency state.
    pub fn power(&self) -> PowerReading {
        self.shared.power.read()
    }

    /// Energy of each processor package \[J\], which never falls; none if the host shows none.
    pub fn energy(&self) -> Vec<(String, f64)> {
        let mut energy = self.shared.energy.lock().unwrap_or_else(PoisonError::into_inner);
        energy.read(&self.shared.power)
    }

    /// Changes of the status.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    fn changed(&self) {
        self.shared.changes.send_modify(|count| *count += 1);
    }

    /// A panic in another thread leaves the state consistent: each step writes it as a whole.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn status(&self) -> Status {
        let state = self.machine.state();
        let allowed = Command::ALL.into_iter().filter(|command| self.machine.check(*command).is_ok());
        Status {
            software: concat!("millstream ", env!("CARGO_PKG_VERSION")).to_owned(),
            state,
            allowed: allowed.collect(),
            configuration: self.configuration.as_ref().map(|configuration| ConfigurationStatus {
                file: configuration.path.clone(),
                sha256: configuration.sha256.clone(),
                name: configuration.config.name.clone(),
                settings: configuration.settings.clone(),
                events: configuration.config.plan.events.get(),
                warnings: configuration.config.warnings(),
            }),
            units: self.run.as_ref().map_or_else(|| self.units.clone(), LiveRun::units),
            run: self.run.as_ref().map(LiveRun::status),
            last_run: self.last_run.clone(),
            faults: self.faults.iter().cloned().collect(),
            run_number: self.directory.last_run(),
            log_entries: self.directory.log_entries(),
        }
    }

    fn send(&mut self, action: Option<Action>) {
        if let (Some(Action::Send(command)), Some(run)) = (action, &self.run) {
            run.commands.send(command);
            if command == RunCommand::Stop {
                tracing::info!(run = run.number.0, "stop requested");
            }
        }
    }

    fn fault(&mut self, run: RunNumber, text: String) {
        tracing::warn!(run = run.0, "{text}");
        self.totals.faults += 1;
        if self.faults.len() == FAULTS {
            self.faults.pop_front();
        }
        self.faults.push_back(Fault { time: now(), run, text });
    }

    /// Appends to the log book. A full disk must not end the run: the failure is shown as a fault.
    fn record(&mut self, run: RunNumber, kind: EntryKind) {
        if let Err(error) = self.directory.logbook().append(&Entry::now(run, kind)) {
            self.fault(run, error.to_string());
        }
    }
}
