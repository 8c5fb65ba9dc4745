//! What clients see of run control, as JSON.

use crate::directory::RunNumber;
use crate::logbook::RunResult;
use crate::machine::{Command, State};
use millstream_report::{Bytes, BytesPerSecond, Seconds};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// State of run control at one time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Program and version.
    pub software: String,
    /// The state.
    pub state: State,
    /// Commands that the state allows.
    pub allowed: Vec<Command>,
    /// The configuration of the next or present run.
    pub configuration: Option<ConfigurationStatus>,
    /// The present run.
    pub run: Option<RunStatus>,
    /// The last run that ended.
    pub last_run: Option<EndedRun>,
    /// The units of the present run, or of the last.
    pub units: Vec<UnitStatus>,
    /// The last faults, oldest first.
    pub faults: Vec<Fault>,
    /// Number of the present run, or of the last one in the log book.
    #[serde(default)]
    pub run_number: RunNumber,
    /// Number of entries of the log book.
    #[serde(default)]
    pub log_entries: u64,
}

/// The configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConfigurationStatus {
    /// The file.
    pub file: PathBuf,
    /// SHA-256 of its text with the changed settings.
    pub sha256: String,
    /// Name of its runs.
    pub name: String,
    /// Settings that differ from the file.
    pub settings: BTreeMap<String, Json>,
    /// Events of a run.
    pub events: u64,
    /// What is valid, but probably not intended.
    pub warnings: Vec<String>,
}

/// The present run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Its number.
    pub number: RunNumber,
    /// Who started it.
    pub operator: String,
    /// The operator's comment.
    pub comment: String,
    /// When its processes were started, in UTC.
    pub began: String,
    /// Time since all units were ready.
    pub elapsed_s: Seconds,
    /// Progress.
    #[serde(flatten)]
    pub progress: RunProgress,
    /// Events per second, over the last second.
    pub events_per_s: f64,
    /// Payload of built events per second, over the last second, from the mean size of the inputs' events.
    pub payload_bytes_per_s: BytesPerSecond,
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunProgress {
    /// Batches assigned.
    pub batches_assigned: u64,
    /// Batches done.
    pub batches_done: u64,
    /// Events built.
    pub events_built: u64,
    /// Built events that were accepted.
    pub events_accepted: u64,
    /// Events without all fragments.
    pub events_incomplete: u64,
    /// Events with a corrupt fragment.
    pub events_corrupt: u64,
    /// Fragments of built events.
    pub fragments_built: u64,
}

/// A run that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndedRun {
    /// Its number.
    pub number: RunNumber,
    /// How it ended.
    pub result: RunResult,
    /// Its problems.
    pub problems: Vec<String>,
    /// Events built.
    pub events: u64,
    /// Events in its files.
    pub stored_events: u64,
    /// From the first assignment to the last batch done.
    pub duration_s: Seconds,
    /// Its report, in the directory of run control.
    pub report: Option<PathBuf>,
    /// Energy per built event \[J\]; `None` if the host measures none.
    pub energy_per_event_j: Option<f64>,
}

/// State of a process of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnitState {
    /// Not yet ready.
    Starting,
    /// In the run.
    Running,
    /// Ended.
    Ended,
}

/// A process of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnitStatus {
    /// Its name in the configuration.
    pub name: String,
    /// `manager`, `readout`, `builder` or `card`.
    pub role: String,
    /// Its process id on this host.
    pub pid: u32,
    /// Its state.
    pub state: UnitState,
    /// Processor time.
    pub cpu_s: Option<Seconds>,
    /// Processor use over the last second; 1 is one processor.
    pub cpu_use: Option<f64>,
    /// Resident memory with shared pages.
    pub memory_bytes: Option<Bytes>,
    /// Connections that it has refused; `None` of a process that accepts none, and of a card, which counts in its register
    /// `clients_refused`.
    #[serde(default)]
    pub connections_refused: Option<u64>,
}

/// A fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// When it was seen, in UTC.
    pub time: String,
    /// Its run.
    pub run: RunNumber,
    /// What happened.
    pub text: String,
}
