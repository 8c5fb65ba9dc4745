//! The account of a run: what was read, and what became of it.
//!
//! The conservation law is `fragments read = built + incomplete + discarded`, each by cause. No term is
//! computed from the others: each is counted where it happens, and [`Ledger`](super::Ledger) compares.

use super::types::{Bytes, StopCause, Unit};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::AddAssign;

/// Events and the fragments that were present of them, in one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchTally {
    /// Events.
    pub events: u16,
    /// Their fragments.
    pub fragments: u32,
}

/// What became of one batch. Every event of the batch is in exactly one of the tallies, with all of its
/// fragments that arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Events with all their fragments, every one sound.
    pub built: BatchTally,
    /// Incomplete events: at least one source had no fragment.
    pub missing: BatchTally,
    /// Discarded events: at least one fragment's checksum was wrong.
    pub corrupt: BatchTally,
    /// Of the built events, those that the kernel accepted.
    pub accepted: u16,
}

impl Verdict {
    /// Events that the verdict covers.
    pub fn events(&self) -> u32 {
        [self.built, self.missing, self.corrupt].iter().map(|t| u32::from(t.events)).sum()
    }

    /// Fragments that the verdict covers.
    pub fn fragments(&self) -> u64 {
        [self.built, self.missing, self.corrupt].iter().map(|t| u64::from(t.fragments)).sum()
    }
}

/// Events and the fragments that were present of them, summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Events.
    pub events: u64,
    /// Their fragments.
    pub fragments: u64,
}

impl AddAssign<BatchTally> for Tally {
    fn add_assign(&mut self, batch: BatchTally) {
        self.events += u64::from(batch.events);
        self.fragments += u64::from(batch.fragments);
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.events += other.events;
        self.fragments += other.fragments;
    }
}

/// Sum of verdicts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Batches.
    pub batches: u64,
    /// See [`Verdict::built`].
    pub built: Tally,
    /// See [`Verdict::missing`].
    pub missing: Tally,
    /// See [`Verdict::corrupt`].
    pub corrupt: Tally,
    /// See [`Verdict::accepted`].
    pub accepted: u64,
}

impl Totals {
    /// Events in all verdicts.
    pub fn events(&self) -> u64 {
        self.built.events + self.missing.events + self.corrupt.events
    }

    /// Fragments in all verdicts.
    pub fn fragments(&self) -> u64 {
        self.built.fragments + self.missing.fragments + self.corrupt.fragments
    }
}

impl AddAssign<Verdict> for Totals {
    fn add_assign(&mut self, verdict: Verdict) {
        self.batches += 1;
        self.built += verdict.built;
        self.missing += verdict.missing;
        self.corrupt += verdict.corrupt;
        self.accepted += u64::from(verdict.accepted);
    }
}

/// Fragments that readout units took from their sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// Counted by the readout units themselves.
    pub reported: u64,
    /// Of readout units that did not live to report: what builder units saw arrive from them.
    pub witnessed: u64,
    /// Payload of the reported ones.
    pub bytes: Bytes,
}

/// Incomplete events by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incomplete {
    /// A source had no fragment for the event.
    pub missing_at_source: Tally,
    /// A readout unit was lost before its fragments arrived.
    pub readout_lost: Tally,
    /// Not all readout units delivered in time.
    pub timed_out: Tally,
    /// The run stopped before all readout units delivered.
    pub stopped: Tally,
}

/// Discarded events by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Discarded {
    /// A fragment's checksum was wrong.
    pub corrupt: Tally,
    /// Arrived whole, but there was no verdict when the run stopped, or its card was lost.
    pub unprocessed: Tally,
    /// Sent to a builder unit that was lost before it reported the batch done.
    pub builder_lost: Tally,
    /// Sent, but not seen by the builder unit when the run stopped.
    pub in_flight: Tally,
    /// Read, but not sent when the run stopped.
    pub unsent: Tally,
}

impl Incomplete {
    /// Each cause with its name.
    pub fn by_cause(&self) -> [(&'static str, Tally); 4] {
        [
            ("fragment missing at source", self.missing_at_source),
            ("readout unit lost", self.readout_lost),
            ("timed out", self.timed_out),
            ("run stopped", self.stopped),
        ]
    }
}

impl Discarded {
    /// Each cause with its name.
    pub fn by_cause(&self) -> [(&'static str, Tally); 5] {
        [
            ("corrupt", self.corrupt),
            ("not processed", self.unprocessed),
            ("builder unit lost", self.builder_lost),
            ("in flight at stop", self.in_flight),
            ("read but not sent", self.unsent),
        ]
    }
}

fn sum<const N: usize>(causes: [(&'static str, Tally); N]) -> Tally {
    let mut total = Tally::default();
    for (_, tally) in causes {
        total += tally;
    }
    total
}

/// An equation that has to hold between independent counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Law {
    /// The conservation law, in fragments.
    Fragments,
    /// The same in events: assigned = built + incomplete + discarded + withdrawn.
    Events,
    /// One readout unit: read = sent + unsent.
    Readout,
    /// One pair of units: sent = arrived + lost on the way.
    Pair,
    /// One builder unit's fragments: arrived = in verdicts + in unfinished slots.
    BuilderFragments,
    /// One builder unit's events: assigned = in verdicts + in unfinished slots.
    BuilderEvents,
    /// One slot: what its readout units and the manager say about its life fits what its builder unit says.
    Slot,
    /// At the end of a whole run nothing is lost, and the manager's and the builder units' sums agree.
    WholeRun,
}

impl fmt::Display for Law {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Law::Fragments => "fragments read = built + incomplete + discarded",
            Law::Events => "events assigned = built + incomplete + discarded + withdrawn",
            Law::Readout => "fragments read = sent + unsent",
            Law::Pair => "fragments sent = arrived + lost on the way",
            Law::BuilderFragments => "fragments arrived = in verdicts + in unfinished slots",
            Law::BuilderEvents => "events assigned = in verdicts + in unfinished slots",
            Law::Slot => "life of the slot at the sender <= at the receiver",
            Law::WholeRun => "whole run: expected = counted",
        })
    }
}

/// A law that did not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// The law.
    pub law: Law,
    /// Which units, slot or sum.
    pub at: String,
    /// Its left side.
    pub left: u64,
    /// Its right side.
    pub right: u64,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {} against {}", self.at, self.law, self.left, self.right)
    }
}

/// The account of a run. [`Display`](fmt::Display) prints it as a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// Why the run ended.
    pub cause: StopCause,
    /// Units that did not live to report.
    pub lost: Vec<Unit>,
    /// Fragments read.
    pub read: Read,
    /// Events that the manager assigned; none if the manager is lost.
    pub assigned_events: Option<u64>,
    /// Events built.
    pub built: Tally,
    /// Events that lack fragments.
    pub incomplete: Incomplete,
    /// Events thrown away.
    pub discarded: Discarded,
    /// Events that were assigned, but of which no surviving unit had read anything when the run stopped.
    pub withdrawn_events: u64,
    /// Of the built events, those that the kernels accepted and the builder units stored.
    pub accepted: u64,
    /// Laws that did not hold.
    pub violations: Vec<Violation>,
}

impl Account {
    /// Whether all laws hold.
    pub fn is_closed(&self) -> bool {
        self.violations.is_empty()
    }

    /// Whether the run did all it was asked to, and all laws hold.
    pub fn is_success(&self) -> bool {
        self.cause.is_success() && self.lost.is_empty() && self.is_closed()
    }

    /// Fragments read, by whoever counted them.
    pub fn fragments_read(&self) -> u64 {
        self.read.reported + self.read.witnessed
    }

    /// Incomplete events of all causes.
    pub fn incomplete_total(&self) -> Tally {
        sum(self.incomplete.by_cause())
    }

    /// Discarded events of all causes.
    pub fn discarded_total(&self) -> Tally {
        sum(self.discarded.by_cause())
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, events: Option<u64>, fragments: u64| {
            let events = events.map_or_else(|| "-".to_owned(), |n| n.to_string());
            writeln!(f, "{name:<32} {events:>14} {fragments:>16}")
        };
        let causes = |f: &mut fmt::Formatter<'_>, causes: &[(&str, Tally)]| {
            causes.iter().filter(|(_, tally)| *tally != Tally::default()).try_for_each(|(name, tally)| {
                row(f, &format!("  {name}"), Some(tally.events), tally.fragments)
            })
        };
        writeln!(f, "run ended: {}", self.cause)?;
        if !self.lost.is_empty() {
            let names: Vec<_> = self.lost.iter().map(Unit::to_string).collect();
            writeln!(f, "units lost: {}", names.join(", "))?;
        }
        writeln!(f, "{:<32} {:>14} {:>16}", "", "events", "fragments")?;
        row(f, "read", self.assigned_events, self.fragments_read())?;
        if self.read.witnessed > 0 {
            row(f, "  witnessed by builder units", None, self.read.witnessed)?;
        }
        row(f, "built", Some(self.built.events), self.built.fragments)?;
        row(f, "  accepted", Some(self.accepted), 0)?;
        let incomplete = self.incomplete_total();
        row(f, "incomplete", Some(incomplete.events), incomplete.fragments)?;
        causes(f, &self.incomplete.by_cause())?;
        let discarded = self.discarded_total();
        row(f, "discarded", Some(discarded.events), discarded.fragments)?;
        causes(f, &self.discarded.by_cause())?;
        if self.withdrawn_events > 0 {
            row(f, "withdrawn before reading", Some(self.withdrawn_events), 0)?;
        }
        if self.is_closed() {
            return f.write_str("conservation law: holds");
        }
        write!(f, "conservation law: BROKEN")?;
        self.violations.iter().try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}
