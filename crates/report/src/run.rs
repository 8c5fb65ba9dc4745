//! The numbers of one run.

use serde::{Deserialize, Serialize};

use millstream_quantity::{Bytes, BytesPerSecond, Seconds};

/// Version of the JSON: changes when a field changes its meaning or goes.
pub const VERSION: u32 = 1;

/// What one run did. Every number here was counted or measured; see [`Derived`] for what follows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// Name of the run.
    pub name: String,
    /// Program that ran, and its version.
    pub software: String,
    /// What ended the run early, if anything did.
    pub error: Option<String>,
    /// Events that were built whole.
    pub events: u64,
    /// Fragments of these events.
    pub fragments: u64,
    /// Their payload.
    pub payload_bytes: Bytes,
    /// From the first request to the last event.
    pub duration_s: Seconds,
    /// What a plain copy reaches on this machine.
    pub memcpy: Option<Memcpy>,
    /// The trigger's decisions, if they were compared with recorded ones.
    pub trigger: Option<TriggerCheck>,
    /// Events that the trigger accepted.
    pub accepted_events: u64,
    /// Events in the event files.
    pub stored_events: u64,
    /// Accepted events that were only counted, because no more were to be stored.
    pub counted_only_events: u64,
    /// The event files.
    pub event_files: Vec<String>,
    /// Where every fragment went.
    pub conservation: Conservation,
    /// The units of the run.
    pub units: Vec<UnitReport>,
    /// How far the run was at some times, in ascending order; the start need not be there.
    pub samples: Vec<Sample>,
}

/// A plain copy, measured in the same run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memcpy {
    /// Length of one copy.
    pub block_bytes: Bytes,
    /// Rate of the copies.
    pub bytes_per_s: BytesPerSecond,
}

/// Decisions of the trigger, compared with recorded ones, one per patch and sample.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriggerCheck {
    /// The kernel that decided.
    pub kernel: String,
    /// Decisions that were compared.
    pub compared: u64,
    /// Decisions that were as recorded.
    pub agreeing: u64,
    /// Decisions that were positive.
    pub set: u64,
}

/// The conservation law: every fragment read was built, or was left in an incomplete event, or was
/// discarded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conservation {
    /// Fragments that were read from the sources.
    pub fragments_read: u64,
    /// Where they went.
    pub terms: Vec<Term>,
    /// What the units' accounts contradict each other about.
    pub violations: Vec<String>,
}

/// Fragments that went the same way for the same cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Term {
    /// What became of them.
    pub fate: Fate,
    /// Why.
    pub cause: String,
    /// Events that they belong to.
    pub events: u64,
    /// Fragments.
    pub fragments: u64,
}

/// What became of a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fate {
    /// It is in a whole event.
    Built,
    /// It is in an event that lacks others.
    Incomplete,
    /// It is in no event.
    Discarded,
}

impl Fate {
    /// All fates, in the order of the law.
    pub const ALL: [Self; 3] = [Self::Built, Self::Incomplete, Self::Discarded];

    /// As in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Built => "built",
            Self::Incomplete => "incomplete",
            Self::Discarded => "discarded",
        }
    }
}

/// One unit of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UnitReport {
    /// Its name, as in `builder 1`.
    pub name: String,
    /// Events that it handled.
    pub events: u64,
    /// Fragments that it handled.
    pub fragments: u64,
    /// Payload that it handled.
    pub payload_bytes: Bytes,
    /// The most memory that it had at any time, if known.
    pub peak_memory_bytes: Option<Bytes>,
    /// Processor time that it took, if known.
    pub cpu_s: Option<Seconds>,
    /// How it ended, as in `done` or `killed by signal 9`.
    pub end: String,
}

/// How far the run was at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Time since the start.
    pub at_s: Seconds,
    /// Events built until then.
    pub events: u64,
    /// Payload landed until then.
    pub payload_bytes: Bytes,
}

/// What follows from the numbers of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Derived {
    /// Whether there is no problem.
    pub success: bool,
    /// Everything that is wrong, one sentence each. Fragments that were accounted for as incomplete or
    /// discarded are a loss, but not wrong.
    pub problems: Vec<String>,
    /// Payload per time.
    pub payload_bytes_per_s: Option<BytesPerSecond>,
    /// Events per second.
    pub events_per_s: Option<f64>,
    /// Fragments per second.
    pub fragments_per_s: Option<f64>,
    /// Payload per time as a fraction of the plain copy's rate.
    pub fraction_of_memcpy: Option<f64>,
}

/// The whole JSON document.
#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    #[serde(flatten)]
    report: &'a RunReport,
    derived: Derived,
}

impl Conservation {
    /// Fragments with this fate.
    pub fn fragments(&self, fate: Fate) -> u64 {
        self.of(fate).fold(0, |sum, term| sum.saturating_add(term.fragments))
    }

    /// The terms with this fate.
    pub fn of(&self, fate: Fate) -> impl Iterator<Item = &Term> {
        self.terms.iter().filter(move |term| term.fate == fate)
    }

    /// Fragments of all terms: what had to be read.
    pub fn fragments_gone(&self) -> u64 {
        Fate::ALL.iter().fold(0, |sum, &fate| sum.saturating_add(self.fragments(fate)))
    }
}

impl RunReport {
    /// What follows from the numbers.
    pub fn derived(&self) -> Derived {
        let rate = self.payload_bytes.per(self.duration_s);
        let problems = self.problems();
        Derived {
            success: problems.is_empty(),
            problems,
            payload_bytes_per_s: rate,
            events_per_s: self.duration_s.rate_of(self.events),
            fragments_per_s: self.duration_s.rate_of(self.fragments),
            fraction_of_memcpy: self.memcpy.zip(rate).and_then(|(memcpy, rate)| {
                let fraction = rate.0 / memcpy.bytes_per_s.0;
                fraction.is_finite().then_some(fraction)
            }),
        }
    }

    /// The report as JSON, with what follows from it in `derived`.
    pub fn to_json(&self) -> String {
        let document = Document { version: VERSION, report: self, derived: self.derived() };
        // Only maps with keys that are no strings, and writers that fail, make this fail.
        let mut text = serde_json::to_string_pretty(&document).expect("a report has string keys");
        text.push('\n');
        text
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        problems.extend(self.error.clone());
        let law = &self.conservation;
        let gone = law.fragments_gone();
        if law.fragments_read != gone {
            problems.push(format!("{} fragments were read, {gone} accounted for", law.fragments_read));
        }
        problems.extend(law.violations.iter().cloned());
        if let Some(trigger) = &self.trigger
            && trigger.agreeing != trigger.compared
        {
            let wrong = trigger.compared.abs_diff(trigger.agreeing);
            problems.push(format!("{wrong} of {} trigger decisions disagree", trigger.compared));
        }
        let (accepted, stored) = (self.accepted_events, self.stored_events);
        if stored.saturating_add(self.counted_only_events) != accepted {
            let counted = self.counted_only_events;
            problems.push(format!(
                "{accepted} events were accepted, {stored} stored and {counted} to be counted only"
            ));
        }
        problems
    }
}
