//! The report of one event builder run.

use serde::{Deserialize, Serialize};

use millstream_quantity::{Bytes, BytesPerSecond, Seconds};

/// Version of the JSON. It changes when a field is renamed, removed or changes its meaning.
pub const VERSION: u32 = 2;

/// Counts and measurements of one run. [`Derived`] has the values computed from them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// Name of the run.
    pub name: String,
    /// Program and version.
    pub software: String,
    /// Error that ended the run early.
    pub error: Option<String>,
    /// Events built completely.
    pub events: u64,
    /// Fragments of these events.
    pub fragments: u64,
    /// Payload of these events.
    pub payload_bytes: Bytes,
    /// Time from the first request to the last event.
    pub duration_s: Seconds,
    /// Rate of a plain memory copy on this machine.
    pub memcpy_baseline: Option<MemcpyBaseline>,
    /// Comparison of the trigger's decisions with recorded ones.
    pub trigger: Option<TriggerComparison>,
    /// Events accepted by the trigger.
    pub accepted_events: u64,
    /// Events that the output selects; `None`: the accepted ones.
    #[serde(default)]
    pub selected_events: Option<u64>,
    /// Events in the event files.
    pub stored_events: u64,
    /// Selected events beyond the configured number of events to store.
    pub not_stored_events: u64,
    /// Paths of the event files.
    pub event_files: Vec<String>,
    /// Outcome of every fragment.
    pub fragment_accounting: FragmentAccounting,
    /// Sources with corrupt fragments.
    #[serde(default)]
    pub corrupt_sources: Vec<CorruptSource>,
    /// What live sources delivered and lost.
    #[serde(default)]
    pub live_sources: Vec<LiveSource>,
    /// Storage of each builder unit that stored events.
    #[serde(default)]
    pub storage: Vec<StorageReport>,
    /// Software trigger of each builder unit that has one.
    #[serde(default)]
    pub software_triggers: Vec<SoftwareTriggerReport>,
    /// Units that the run went on without.
    #[serde(default)]
    pub recovered: Vec<String>,
    /// Why processes failed that the run went on without, such as those of the units in `recovered` and their cards.
    #[serde(default)]
    pub recovered_failures: Vec<RecoveredFailure>,
    /// Units that were started again and joined the run.
    #[serde(default)]
    pub joined: Vec<String>,
    /// The units of the run.
    pub units: Vec<UnitReport>,
    /// Progress over time, in ascending order. The start may be missing.
    pub samples: Vec<ProgressSample>,
}

/// A plain memory copy, measured in the same run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemcpyBaseline {
    /// Length of one copy.
    pub block_bytes: Bytes,
    /// Rate of the copies.
    pub bytes_per_s: BytesPerSecond,
}

/// Comparison of the trigger's decisions, one per patch and sample, with recorded ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriggerComparison {
    /// Kernel that computed the decisions.
    pub kernel: String,
    /// Decisions compared.
    pub decisions_compared: u64,
    /// Decisions equal to the recorded ones.
    pub decisions_matching: u64,
    /// Positive decisions.
    pub decisions_set: u64,
}

/// Outcomes of all fragments: every fragment read is part of a built event, part of an incomplete event, or
/// discarded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FragmentAccounting {
    /// Fragments read from the sources.
    pub fragments_read: u64,
    /// Fragments sent again, because the builder unit that got them was lost.
    #[serde(default)]
    pub fragments_rebuilt: u64,
    /// Copies of fragments that were lost with a builder unit, and were sent again.
    #[serde(default)]
    pub fragments_duplicate: u64,
    /// Events of these fragments.
    #[serde(default)]
    pub events_rebuilt: u64,
    /// Fragments by outcome and reason.
    pub outcomes: Vec<OutcomeCount>,
    /// Contradictions between the counts of different units.
    pub inconsistencies: Vec<String>,
}

/// Number of fragments with the same outcome and reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutcomeCount {
    /// Their outcome.
    pub outcome: FragmentOutcome,
    /// The reason.
    pub reason: String,
    /// Number of events of these fragments.
    pub events: u64,
    /// Number of fragments.
    pub fragments: u64,
}

/// Outcome of a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FragmentOutcome {
    /// Part of a complete event.
    Built,
    /// Part of an event that lacks fragments.
    Incomplete,
    /// Part of no event.
    Discarded,
}

impl FragmentOutcome {
    /// All outcomes, in the order of the sum.
    pub const ALL: [Self; 3] = [Self::Built, Self::Incomplete, Self::Discarded];

    /// Its name in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Built => "built",
            Self::Incomplete => "incomplete",
            Self::Discarded => "discarded",
        }
    }
}

/// Corrupt fragments of one source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorruptSource {
    /// The source, as in `source 0x101`.
    pub source: String,
    /// Its fragments with a wrong checksum.
    pub fragments: u64,
    /// Its fragments that were compared with their checksum.
    #[serde(default)]
    pub checked: u64,
}

/// What one live source delivered and lost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveSource {
    /// The source, as in `source 0x101`.
    pub source: String,
    /// Fragments received.
    pub received: u64,
    /// Datagrams lost on the way.
    pub lost: u64,
    /// Fragments of events that had been sent without them.
    pub late: u64,
    /// Fragments received twice.
    pub duplicate: u64,
    /// Fragments dropped because the buffer was full.
    pub overflow: u64,
    /// Fragments that are invalid.
    pub invalid: u64,
    /// Attempts of the front end that were refused because the readout unit was busy.
    #[serde(default)]
    pub refused: u64,
    /// Time from a refused fragment to the next accepted one.
    #[serde(default)]
    pub dead_time_s: Seconds,
}

impl LiveSource {
    /// Each loss with its name in tables.
    pub(crate) fn losses(&self) -> [(&'static str, u64); 5] {
        [
            ("lost on the way", self.lost),
            ("late", self.late),
            ("received twice", self.duplicate),
            ("dropped, buffer full", self.overflow),
            ("invalid", self.invalid),
        ]
    }
}

/// Storage of one builder unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StorageReport {
    /// The builder unit.
    pub builder: String,
    /// Batches with events to store.
    pub batches: u64,
    /// Payload stored.
    pub payload_bytes: Bytes,
    /// Bytes of whole packets, with the rest of their blocks, that the storage device read from landing memory.
    #[serde(default)]
    pub direct_bytes: Bytes,
    /// Such bytes that a processor copied first.
    #[serde(default)]
    pub copied_bytes: Bytes,
    /// Flushes to the files; batches that wait at the same time share one.
    pub flushes: u64,
    /// Time that the storage thread was busy.
    pub busy_s: Seconds,
    /// Maximum number of batches that waited for storage.
    pub longest_queue: u64,
    /// Time that all slots waited for storage: back-pressure on the readout units.
    pub all_slots_waiting_s: Seconds,
}

/// Software trigger of one builder unit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SoftwareTriggerReport {
    /// The builder unit.
    pub builder: String,
    /// Batches decided.
    pub batches: u64,
    /// Events decided.
    pub events: u64,
    /// Events accepted.
    pub accepted: u64,
    /// Workers that ended or did not answer in time.
    pub workers_lost: u64,
    /// Maximum number of batches that waited for a worker.
    pub longest_queue: u64,
    /// Time that all workers had all their credits in use: back-pressure on the readout units.
    pub all_credits_used_s: Seconds,
}

/// A process that failed, and that the run went on without.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveredFailure {
    /// Its unit, as in `builder bu0`, or a card.
    pub unit: String,
    /// Its exit status, and its error if it has reported one.
    pub cause: String,
}

/// Counts of one unit of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnitReport {
    /// Its name, as in `builder 1`.
    pub name: String,
    /// Events handled.
    pub events: u64,
    /// Fragments handled.
    pub fragments: u64,
    /// Payload handled.
    pub payload_bytes: Bytes,
    /// Peak memory use, if known.
    pub peak_memory_bytes: Option<Bytes>,
    /// Processor time, if known.
    pub cpu_time_s: Option<Seconds>,
    /// How the process ended, as in `done` or `killed by signal 9`.
    pub exit_status: String,
}

/// Progress of the run at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProgressSample {
    /// Time since the start.
    pub elapsed_s: Seconds,
    /// Events built so far.
    pub events: u64,
    /// Payload received so far.
    pub payload_bytes: Bytes,
}

/// Values computed from the counts and measurements of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Derived {
    /// Whether there are no problems.
    pub success: bool,
    /// Problems, one sentence each. Incomplete and discarded fragments are losses, not problems.
    pub problems: Vec<String>,
    /// Payload rate.
    pub payload_bytes_per_s: Option<BytesPerSecond>,
    /// Event rate \[1/s\].
    pub events_per_s: Option<f64>,
    /// Fragment rate \[1/s\].
    pub fragments_per_s: Option<f64>,
    /// Payload rate divided by the rate of the plain memory copy.
    pub memcpy_ratio: Option<f64>,
}

/// The JSON document.
#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    #[serde(flatten)]
    report: &'a RunReport,
    derived: Derived,
}

impl FragmentAccounting {
    /// Number of fragments with this outcome.
    pub fn fragments(&self, outcome: FragmentOutcome) -> u64 {
        self.of(outcome).fold(0, |sum, count| sum.saturating_add(count.fragments))
    }

    /// The counts of this outcome, by reason.
    pub fn of(&self, outcome: FragmentOutcome) -> impl Iterator<Item = &OutcomeCount> {
        self.outcomes.iter().filter(move |count| count.outcome == outcome)
    }

    /// Number of fragments with an outcome, without those that were sent again; equals the fragments read if none is lost.
    pub fn fragments_accounted(&self) -> u64 {
        let outcomes = FragmentOutcome::ALL
            .iter()
            .fold(0, |sum: u64, &outcome| sum.saturating_add(self.fragments(outcome)));
        outcomes.saturating_add(self.fragments_duplicate).saturating_sub(self.fragments_rebuilt)
    }

    /// Whether every fragment read has one outcome, and all units agree.
    pub fn is_consistent(&self) -> bool {
        self.fragments_read == self.fragments_accounted() && self.inconsistencies.is_empty()
    }
}

impl RunReport {
    /// The derived values.
    pub fn derived(&self) -> Derived {
        let rate = self.payload_bytes.per(self.duration_s);
        let problems = self.problems();
        Derived {
            success: problems.is_empty(),
            problems,
            payload_bytes_per_s: rate,
            events_per_s: self.duration_s.rate_of(self.events),
            fragments_per_s: self.duration_s.rate_of(self.fragments),
            memcpy_ratio: self.memcpy_baseline.zip(rate).and_then(|(memcpy, rate)| {
                let ratio = rate.0 / memcpy.bytes_per_s.0;
                ratio.is_finite().then_some(ratio)
            }),
        }
    }

    /// The report as JSON, with the derived values in `derived`.
    pub fn to_json(&self) -> String {
        let document = Document { version: VERSION, report: self, derived: self.derived() };
        // Serialisation fails only for maps with other keys than strings.
        let mut text = serde_json::to_string_pretty(&document).expect("a report has string keys");
        text.push('\n');
        text
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        problems.extend(self.error.clone());
        let accounting = &self.fragment_accounting;
        let (read, accounted) = (accounting.fragments_read, accounting.fragments_accounted());
        if read != accounted {
            problems.push(format!("{read} fragments read, but {accounted} accounted for"));
        }
        problems.extend(accounting.inconsistencies.iter().cloned());
        if let Some(trigger) = &self.trigger
            && trigger.decisions_matching != trigger.decisions_compared
        {
            let different = trigger.decisions_compared.abs_diff(trigger.decisions_matching);
            let compared = trigger.decisions_compared;
            problems
                .push(format!("{different} of {compared} trigger decisions differ from the recorded ones"));
        }
        let (selected, stored) = (self.selected_events.unwrap_or(self.accepted_events), self.stored_events);
        if stored.saturating_add(self.not_stored_events) != selected {
            let verb = if self.selected_events.is_some() { "selected" } else { "accepted" };
            let beyond = self.not_stored_events;
            problems.push(format!(
                "{selected} events {verb}, but {stored} stored and {beyond} beyond the configured number"
            ));
        }
        problems
    }
}
