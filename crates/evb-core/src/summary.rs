//! The summary of a run: fragments read, built, incomplete and discarded, by cause.
//!
//! The conservation law is `fragments read + rebuilt = built + incomplete + discarded + duplicate`. Fragments that are
//! sent a second time, because the builder unit that got them was lost, are `rebuilt`; the copies that were lost with it
//! are `duplicate`. Each term is counted where it happens. No term is computed from the others; [`ReportMerger`](super::ReportMerger) compares them.

use super::types::{Bytes, StopCause, Term, Unit};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::AddAssign;

/// Events of one batch, and the fragments of them that are present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchCounts {
    /// Events.
    pub events: u16,
    /// Their fragments.
    pub fragments: u32,
}

/// Outcome of one batch. Each event of the batch is in exactly one of the counts, with all of its fragments
/// that arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchOutcome {
    /// Events with all fragments, none corrupt.
    pub built: BatchCounts,
    /// Incomplete events: at least one source has no fragment.
    pub missing: BatchCounts,
    /// Discarded events: at least one fragment has a wrong checksum.
    pub corrupt: BatchCounts,
    /// Incomplete events of batches without the packets of a lost readout unit.
    pub readout_lost: BatchCounts,
    /// Built events that the kernel accepted.
    pub accepted: u16,
    /// Events that the output selects, also beyond the maximum to store.
    pub selected: u16,
}

impl BatchOutcome {
    /// The counts, in the order of the control message.
    pub fn counts(&self) -> [BatchCounts; 4] {
        [self.built, self.missing, self.corrupt, self.readout_lost]
    }

    /// Number of events in all counts.
    pub fn events(&self) -> u32 {
        self.counts().iter().map(|t| u32::from(t.events)).sum()
    }

    /// Number of fragments in all counts.
    pub fn fragments(&self) -> u64 {
        self.counts().iter().map(|t| u64::from(t.fragments)).sum()
    }

    /// Whether the outcome is possible for a batch of that many events. Events without the sources of a lost readout
    /// unit may be accepted.
    pub fn covers(&self, events: u16) -> bool {
        let deliverable = u32::from(self.built.events) + u32::from(self.readout_lost.events);
        self.events() == u32::from(events)
            && u32::from(self.accepted) <= deliverable
            && self.selected <= events
    }
}

/// Events, and the fragments of them that are present, summed over batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Events.
    pub events: u64,
    /// Their fragments.
    pub fragments: u64,
}

impl Counts {
    fn since(self, earlier: Counts) -> Counts {
        Counts {
            events: self.events.saturating_sub(earlier.events),
            fragments: self.fragments.saturating_sub(earlier.fragments),
        }
    }
}

impl AddAssign<BatchCounts> for Counts {
    fn add_assign(&mut self, batch: BatchCounts) {
        self.events += u64::from(batch.events);
        self.fragments += u64::from(batch.fragments);
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.events += other.events;
        self.fragments += other.fragments;
    }
}

/// Sum of batch outcomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Batches.
    pub batches: u64,
    /// See [`BatchOutcome::built`].
    pub built: Counts,
    /// See [`BatchOutcome::missing`].
    pub missing: Counts,
    /// See [`BatchOutcome::corrupt`].
    pub corrupt: Counts,
    /// See [`BatchOutcome::readout_lost`].
    #[serde(default)]
    pub readout_lost: Counts,
    /// See [`BatchOutcome::accepted`].
    pub accepted: u64,
    /// See [`BatchOutcome::selected`].
    #[serde(default)]
    pub selected: u64,
}

impl Totals {
    fn counts(&self) -> [Counts; 4] {
        [self.built, self.missing, self.corrupt, self.readout_lost]
    }

    /// Number of events in all counts.
    pub fn events(&self) -> u64 {
        self.counts().iter().map(|counts| counts.events).sum()
    }

    /// Number of fragments in all counts.
    pub fn fragments(&self) -> u64 {
        self.counts().iter().map(|counts| counts.fragments).sum()
    }

    /// What was added since an earlier sum.
    pub fn since(&self, earlier: &Totals) -> Totals {
        Totals {
            batches: self.batches.saturating_sub(earlier.batches),
            built: self.built.since(earlier.built),
            missing: self.missing.since(earlier.missing),
            corrupt: self.corrupt.since(earlier.corrupt),
            readout_lost: self.readout_lost.since(earlier.readout_lost),
            accepted: self.accepted.saturating_sub(earlier.accepted),
            selected: self.selected.saturating_sub(earlier.selected),
        }
    }
}

impl AddAssign<BatchOutcome> for Totals {
    fn add_assign(&mut self, outcome: BatchOutcome) {
        self.batches += 1;
        self.built += outcome.built;
        self.missing += outcome.missing;
        self.corrupt += outcome.corrupt;
        self.readout_lost += outcome.readout_lost;
        self.accepted += u64::from(outcome.accepted);
        self.selected += u64::from(outcome.selected);
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Totals) {
        self.batches += other.batches;
        self.built += other.built;
        self.missing += other.missing;
        self.corrupt += other.corrupt;
        self.readout_lost += other.readout_lost;
        self.accepted += other.accepted;
        self.selected += other.selected;
    }
}

/// Fragments that readout units read from their sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FragmentsRead {
    /// Counted by the readout units that reported.
    pub reported: u64,
    /// For readout units without a report: fragments that arrived from them at builder units.
    pub inferred: u64,
    /// Payload of the reported fragments.
    pub bytes: Bytes,
}

/// Incomplete events by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incomplete {
    /// A source had no fragment for the event.
    pub missing_at_source: Counts,
    /// A readout unit was lost before its fragments arrived.
    pub readout_lost: Counts,
    /// Not all readout units delivered in time.
    pub timed_out: Counts,
    /// The run stopped before all readout units delivered.
    pub stopped: Counts,
}

/// Discarded events by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Discarded {
    /// A fragment's checksum was wrong.
    pub corrupt: Counts,
    /// Complete, but without an outcome when the run stopped or its card was lost.
    pub unprocessed: Counts,
    /// Sent to a builder unit that was lost before it reported `Done`.
    pub builder_lost: Counts,
    /// Sent, but not received by the builder unit when the run stopped.
    pub in_flight: Counts,
    /// Read, but not sent when the run stopped.
    pub unsent: Counts,
}

impl Incomplete {
    /// Each cause with its name in tables.
    pub fn by_cause(&self) -> [(&'static str, Counts); 4] {
        [
            ("fragment missing at source", self.missing_at_source),
            ("readout unit lost", self.readout_lost),
            ("timed out", self.timed_out),
            ("run stopped", self.stopped),
        ]
    }
}

impl Discarded {
    /// Each cause with its name in tables.
    pub fn by_cause(&self) -> [(&'static str, Counts); 5] {
        [
            ("corrupt", self.corrupt),
            ("not processed", self.unprocessed),
            ("builder unit lost", self.builder_lost),
            ("in flight at stop", self.in_flight),
            ("read but not sent", self.unsent),
        ]
    }
}

fn sum<const N: usize>(causes: [(&'static str, Counts); N]) -> Counts {
    let mut total = Counts::default();
    for (_, counts) in causes {
        total += counts;
    }
    total
}

/// An equation between independently counted values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Invariant {
    /// The conservation law, in fragments.
    Fragments,
    /// Events assigned + rebuilt = built + incomplete + discarded + duplicate + withdrawn.
    Events,
    /// One readout unit: read + rebuilt = sent + unsent.
    Readout,
    /// One readout unit and one builder unit: sent = arrived + lost in flight.
    UnitPair,
    /// One builder unit's fragments: arrived = in outcomes + in unfinished slots.
    BuilderFragments,
    /// One builder unit's events: assigned = in outcomes + in unfinished slots.
    BuilderEvents,
    /// One slot: no sender's generation is newer than the builder unit's.
    Slot,
    /// At the end of a complete run nothing is lost, and the manager's and the builder units' sums agree.
    CompleteRun,
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Invariant::Fragments => "fragments read + rebuilt = built + incomplete + discarded + duplicate",
            Invariant::Events => {
                "events assigned + rebuilt = built + incomplete + discarded + duplicate + withdrawn"
            }
            Invariant::Readout => "fragments read + rebuilt = sent + unsent",
            Invariant::UnitPair => "fragments sent = arrived + lost in flight",
            Invariant::BuilderFragments => "fragments arrived = in outcomes + in unfinished slots",
            Invariant::BuilderEvents => "events assigned = in outcomes + in unfinished slots",
            Invariant::Slot => "generation at the sender <= generation at the builder unit",
            Invariant::CompleteRun => "complete run: expected = counted",
        })
    }
}

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvariantViolation {
    /// The invariant.
    pub invariant: Invariant,
    /// The units, the slot or the sum that it covers.
    pub at: String,
    /// Its left side.
    pub left: u64,
    /// Its right side.
    pub right: u64,
}

impl fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {} against {}", self.at, self.invariant, self.left, self.right)
    }
}

/// The summary of a run: its counters, the units lost, and the conservation check. [`Display`](fmt::Display) prints it as a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSummary {
    /// Why the run ended.
    pub cause: StopCause,
    /// Units without a report.
    pub lost: Vec<Unit>,
    /// Units that the run went on without, in the order of their losses.
    #[serde(default)]
    pub recovered: Vec<Unit>,
    /// Restarts of such units that joined the run, in order.
    #[serde(default)]
    pub joined: Vec<Unit>,
    /// Fragments read.
    pub read: FragmentsRead,
    /// Events that the manager assigned; `None` if the manager is lost.
    pub assigned_events: Option<u64>,
    /// Events of batches that were assigned again, and their fragments that were sent again.
    #[serde(default)]
    pub rebuilt: Counts,
    /// The same events at the lost builder units, and the fragments that were sent to those.
    #[serde(default)]
    pub duplicate: Counts,
    /// Events built.
    pub built: Counts,
    /// Events without all fragments.
    pub incomplete: Incomplete,
    /// Events dropped.
    pub discarded: Discarded,
    /// Assigned events without a fragment read by a surviving unit when the run stopped.
    pub withdrawn_events: u64,
    /// Built events that the kernels accepted and the builder units stored.
    pub accepted: u64,
    /// Invariants that do not hold.
    pub violations: Vec<InvariantViolation>,
}

impl RunSummary {
    /// Whether all invariants hold.
    pub fn is_balanced(&self) -> bool {
        self.violations.is_empty()
    }

    /// Whether all events were processed, all invariants hold, and no unit was lost that the run could not go on without.
    pub fn is_success(&self) -> bool {
        let is_tolerated = self.lost.iter().all(|unit| self.recovered.contains(unit));
        self.cause.is_success() && is_tolerated && self.is_balanced()
    }

    /// Whether the unit is a restart that did not join. `initial` units of its kind started the run.
    pub fn is_vacant(&self, unit: Unit, initial: usize) -> bool {
        let is_restart = match unit {
            Unit::Manager => false,
            Unit::Readout(ru) => ru.index() >= initial,
            Unit::Builder(bu) => bu.index() >= initial,
        };
        is_restart && !self.joined.contains(&unit)
    }

    /// Fragments read: reported and inferred.
    pub fn fragments_read(&self) -> u64 {
        self.read.reported + self.read.inferred
    }

    /// Incomplete events over all causes.
    pub fn incomplete_total(&self) -> Counts {
        sum(self.incomplete.by_cause())
    }

    /// Discarded events over all causes.
    pub fn discarded_total(&self) -> Counts {
        sum(self.discarded.by_cause())
    }

    /// The names of the units that the run went on without, as `name` gives them. Managers after the first one have their terms
    /// as well.
    pub fn recovered_with<'a>(
        &'a self,
        name: impl Fn(&Unit) -> String + 'a,
    ) -> impl Iterator<Item = String> + 'a {
        let mut term = Term(0);
        self.recovered.iter().map(move |unit| {
            if *unit == Unit::Manager {
                term = term.next();
            }
            match unit {
                Unit::Manager if term > Term::FIRST => format!("{} ({term})", name(unit)),
                _ => name(unit),
            }
        })
    }
}

impl fmt::Display for RunSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, events: Option<u64>, fragments: u64| {
            let events = events.map_or_else(|| "-".to_owned(), |n| n.to_string());
            writeln!(f, "{name:<32} {events:>14} {fragments:>16}")
        };
        let causes = |f: &mut fmt::Formatter<'_>, causes: &[(&str, Counts)]| {
            causes.iter().filter(|(_, counts)| *counts != Counts::default()).try_for_each(|(name, counts)| {
                row(f, &format!("  {name}"), Some(counts.events), counts.fragments)
            })
        };
        writeln!(f, "run ended: {}", self.cause)?;
        if !self.lost.is_empty() {
            let names: Vec<_> = self.lost.iter().map(Unit::to_string).collect();
            writeln!(f, "units lost: {}", names.join(", "))?;
        }
        if !self.recovered.is_empty() {
            let names: Vec<_> = self.recovered_with(Unit::to_string).collect();
            writeln!(f, "run went on without: {}", names.join(", "))?;
        }
        if !self.joined.is_empty() {
            let names: Vec<_> = self.joined.iter().map(Unit::to_string).collect();
            writeln!(f, "joined again as: {}", names.join(", "))?;
        }
        writeln!(f, "{:<32} {:>14} {:>16}", "", "events", "fragments")?;
        row(f, "read", self.assigned_events, self.fragments_read())?;
        if self.read.inferred > 0 {
            row(f, "  inferred from arrivals", None, self.read.inferred)?;
        }
        if self.rebuilt != Counts::default() {
            row(f, "rebuilt: sent again", Some(self.rebuilt.events), self.rebuilt.fragments)?;
        }
        row(f, "built", Some(self.built.events), self.built.fragments)?;
        row(f, "  accepted", Some(self.accepted), 0)?;
        let incomplete = self.incomplete_total();
        row(f, "incomplete", Some(incomplete.events), incomplete.fragments)?;
        causes(f, &self.incomplete.by_cause())?;
        let discarded = self.discarded_total();
        row(f, "discarded", Some(discarded.events), discarded.fragments)?;
        causes(f, &self.discarded.by_cause())?;
        if self.duplicate != Counts::default() {
            row(f, "duplicate: lost, then rebuilt", Some(self.duplicate.events), self.duplicate.fragments)?;
        }
        if self.withdrawn_events > 0 {
            row(f, "withdrawn before reading", Some(self.withdrawn_events), 0)?;
        }
        if self.is_balanced() {
            return f.write_str("conservation law: holds");
        }
        write!(f, "conservation law: BROKEN")?;
        self.violations.iter().try_for_each(|violation| write!(f, "\n  {violation}"))
    }
}
