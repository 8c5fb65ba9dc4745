//! The present run, as its events show it.

use crate::directory::{RunNumber, run_folder};
use crate::request::Request;
use crate::status::{RunProgress, RunStatus, UnitState, UnitStatus};
use millstream_evb::config::RunConfig;
use millstream_evb::core::Unit;
use millstream_evb::process::launcher::{RunCommands, RunEvent, RunProcess};
use millstream_evb::process::manager::ProgressSample;
use millstream_evb::process::usage;
use millstream_report::{Bytes, BytesPerSecond, Seconds};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time over which rates are means.
const WINDOW: Duration = Duration::from_secs(1);
/// Interval of reading the processes' usage.
const USAGE_INTERVAL: Duration = Duration::from_millis(900);

/// The present run.
pub(crate) struct LiveRun {
    pub(crate) number: RunNumber,
    pub(crate) commands: RunCommands,
    pub(crate) payload_per_event: Bytes,
    /// All units were ready.
    pub(crate) started: bool,
    operator: String,
    comment: String,
    began: String,
    /// Samples of the last [`WINDOW`].
    samples: VecDeque<ProgressSample>,
    units: Vec<(RunProcess, UnitStatus)>,
    usage_read: Option<Instant>,
    /// Processes that ended, with the samples since.
    ended: Vec<(String, u32)>,
}

impl LiveRun {
    pub(crate) fn new(number: RunNumber, request: &Request, began: String, commands: RunCommands) -> LiveRun {
        LiveRun {
            number,
            commands,
            payload_per_event: Bytes(0),
            started: false,
            operator: request.operator.clone(),
            comment: request.comment.clone(),
            began,
            samples: VecDeque::new(),
            units: Vec::new(),
            usage_read: None,
            ended: Vec::new(),
        }
    }

    pub(crate) fn observe(&mut self, config: &RunConfig, event: &RunEvent, now: Instant) {
        match event {
            RunEvent::Spawned { process, pid } => {
                let unit = UnitStatus {
                    name: unit_name(config, process),
                    role: role(process).to_owned(),
                    pid: *pid,
                    // A card serves as soon as it is there.
                    state: match (self.started, process) {
                        (true, RunProcess::Card(_)) => UnitState::Running,
                        _ => UnitState::Starting,
                    },
                    cpu_s: None,
                    cpu_use: None,
                    memory_bytes: None,
                    connections_refused: accepts_connections(process).then_some(0),
                };
                // The card of a builder unit that is started again.
                self.units.retain(|(known, _)| known != process);
                self.units.push((process.clone(), unit));
            }
            RunEvent::Started => {
                self.started = true;
                let starting = self.units.iter_mut().filter(|(_, unit)| unit.state == UnitState::Starting);
                starting.for_each(|(_, unit)| unit.state = UnitState::Running);
            }
            RunEvent::Progress(sample) => self.sample(*sample),
            RunEvent::Ended { process } => {
                let ended = self.units.iter_mut().filter(|(known, _)| known == process);
                ended.for_each(|(_, unit)| unit.state = UnitState::Ended);
                self.ended.push((unit_name(config, process), 0));
            }
            RunEvent::Refused { process, connections } => {
                let refusing = self.units.iter_mut().filter(|(known, _)| known == process);
                refusing.for_each(|(_, unit)| unit.connections_refused = Some(*connections));
            }
            RunEvent::Joined(joined) => {
                let process = RunProcess::Unit(*joined);
                let joined = self.units.iter_mut().filter(|(known, _)| *known == process);
                joined.for_each(|(_, unit)| unit.state = UnitState::Running);
            }
            RunEvent::Paused(_)
            | RunEvent::SourcesSilent(..)
            | RunEvent::StandbyJoined
            | RunEvent::ErrorLine { .. }
            | RunEvent::Waiting
            | RunEvent::TookOver { .. } => {}
        }
        self.read_usage(now);
    }

    fn sample(&mut self, sample: ProgressSample) {
        self.ended.iter_mut().for_each(|(_, samples)| *samples += 1);
        self.samples.push_back(sample);
        // One sample before the window stays, so that the samples span it.
        while self.samples.get(1).is_some_and(|second| second.elapsed + WINDOW <= sample.elapsed) {
            self.samples.pop_front();
        }
    }

    fn read_usage(&mut self, now: Instant) {
        let since = self.usage_read.map(|at| now.saturating_duration_since(at));
        if since.is_some_and(|since| since < USAGE_INTERVAL) {
            return;
        }
        self.usage_read = Some(now);
        for (_, unit) in self.units.iter_mut().filter(|(_, unit)| unit.state != UnitState::Ended) {
            let cpu = usage::cpu_time(unit.pid);
            if let (Some(before), Some(cpu), Some(since)) = (unit.cpu_s, cpu, since) {
                unit.cpu_use = Some(((cpu.0 - before.0) / since.as_secs_f64()).max(0.0));
            }
            unit.cpu_s = cpu.or(unit.cpu_s);
            unit.memory_bytes = usage::resident_memory(unit.pid).or(unit.memory_bytes);
        }
    }

    /// Takes the processes that ended while the run goes on.
    ///
    /// Messages of different processes overtake each other: the first sample after an end may be older than the end.
    pub(crate) fn take_lost(&mut self, config: &RunConfig) -> Vec<String> {
        if self.is_complete(config) {
            return Vec::new();
        }
        let lost: Vec<_> = self.ended.extract_if(.., |(_, samples)| *samples >= 2).collect();
        lost.into_iter().map(|(name, _)| name).collect()
    }

    /// Takes the processes that ended and were not taken before.
    pub(crate) fn take_ended(&mut self) -> Vec<String> {
        std::mem::take(&mut self.ended).into_iter().map(|(name, _)| name).collect()
    }

    /// Whether all events of the run are processed. Units may then end.
    fn is_complete(&self, config: &RunConfig) -> bool {
        self.samples.back().is_some_and(|last| last.done.events() >= config.plan.events.get())
    }

    pub(crate) fn units(&self) -> Vec<UnitStatus> {
        self.units.iter().map(|(_, unit)| unit.clone()).collect()
    }

    pub(crate) fn status(&self) -> RunStatus {
        let last = self.samples.back().copied().unwrap_or_default();
        let first = self.samples.front().copied().unwrap_or_default();
        let span = last.elapsed.saturating_sub(first.elapsed).as_secs_f64();
        let rate = |now: u64, before: u64| if span > 0.0 { (now - before) as f64 / span } else { 0.0 };
        let built_per_s = rate(last.done.built.events, first.done.built.events);
        RunStatus {
            number: self.number,
            operator: self.operator.clone(),
            comment: self.comment.clone(),
            began: self.began.clone(),
            elapsed_s: Seconds(last.elapsed.as_secs_f64()),
            progress: progress(&last),
            events_per_s: rate(last.done.events(), first.done.events()),
            payload_bytes_per_s: BytesPerSecond(built_per_s * self.payload_per_event.0 as f64),
        }
    }
}

fn progress(sample: &ProgressSample) -> RunProgress {
    RunProgress {
        batches_assigned: sample.assigned,
        batches_done: sample.done.batches,
        events_built: sample.done.built.events,
        events_accepted: sample.done.accepted,
        events_incomplete: sample.done.missing.events + sample.done.readout_lost.events,
        events_corrupt: sample.done.corrupt.events,
        fragments_built: sample.done.built.fragments,
    }
}

fn role(process: &RunProcess) -> &'static str {
    match process {
        RunProcess::Card(_) => "card",
        RunProcess::Unit(Unit::Manager) => "manager",
        RunProcess::Standby(_) => "standby",
        RunProcess::Unit(Unit::Readout(_)) => "readout",
        RunProcess::Unit(Unit::Builder(_)) => "builder",
    }
}

/// Whether a process listens, and reports what it refuses.
fn accepts_connections(process: &RunProcess) -> bool {
    match process {
        RunProcess::Unit(Unit::Manager | Unit::Builder(_)) | RunProcess::Standby(_) => true,
        RunProcess::Unit(Unit::Readout(_)) | RunProcess::Card(_) => false,
    }
}

/// The configuration of one run: it waits for its start, and has its own output directory.
pub(crate) fn config_of_run(config: &RunConfig, number: RunNumber) -> RunConfig {
    let mut config = config.clone();
    config.starts_paused = true;
    if let Some(output) = &mut config.output {
        output.directory.push(run_folder(number));
    }
    config
}

/// The name of a process in the configuration.
pub(crate) fn unit_name(config: &RunConfig, process: &RunProcess) -> String {
    match process {
        RunProcess::Card(name) => name.clone(),
        RunProcess::Standby(0) => "standby".to_owned(),
        RunProcess::Standby(restart) => format!("standby+{restart}"),
        RunProcess::Unit(unit) => config.unit_name(*unit),
    }
}
