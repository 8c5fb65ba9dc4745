//! Merges the units' reports into the run summary and checks the invariants.
//!
//! The manager does this. If the manager is lost, the launcher does. For a lost unit the run summary uses the
//! reports of other units:
//!
//! | lost | quantity | source |
//! |---|---|---|
//! | readout unit | fragments read = fragments that arrived from it | surviving builder units; the manager for batches done elsewhere |
//! | builder unit | finished batches | the manager's sums of `Done` and `MissingFragments` |
//! | builder unit | discarded: other fragments sent to it | each readout unit's last batch per slot |
//! | builder unit | duplicate: those of them whose batch was assigned again | the manager's list of such batches |
//! | builder unit and manager | discarded: all that was sent to it | readout units' sums |
//!
//! In the last case no surviving unit has a record of the batches that the builder unit finished.

use super::plan::Plan;
use super::report::{
    BuilderReport, BuilderView, ManagerReport, PostedBatch, ReadoutReport, RunReports, SlotReport, SlotState,
    UnfinishedBatch, UnfinishedCause,
};
use super::summary::{
    Counts, Discarded, FragmentsRead, Incomplete, Invariant, InvariantViolation, RunSummary, Totals,
};
use super::types::{BuIndex, Bytes, Generation, RuIndex, SlotIndex, StopCause, Unit};

/// Merges the reports of a run's surviving units.
#[derive(Debug)]
pub struct ReportMerger {
    plan: Plan,
    manager: Option<ManagerReport>,
    readouts: Vec<Option<ReadoutReport>>,
    builders: Vec<Option<BuilderReport>>,
}

/// Fragments from one readout unit to one builder unit.
#[derive(Clone, Copy, Default)]
struct Pair {
    arrived: u64,
    lost: u64,
}

impl ReportMerger {
    /// Starts without reports: every unit counts as lost.
    pub fn new(plan: Plan) -> ReportMerger {
        ReportMerger {
            manager: None,
            readouts: (0..plan.readout_members()).map(|_| None).collect(),
            builders: (0..plan.builders()).map(|_| None).collect(),
            plan,
        }
    }

    /// Starts with these reports.
    pub fn of(plan: Plan, reports: RunReports) -> ReportMerger {
        let mut merger = ReportMerger::new(plan);
        if let Some(report) = reports.manager {
            merger.add_manager(report);
        }
        for (ru, report) in (0..).map(RuIndex).zip(reports.readouts) {
            if let Some(report) = report {
                merger.add_readout(ru, report);
            }
        }
        for (bu, report) in (0..).map(BuIndex).zip(reports.builders) {
            if let Some(report) = report {
                merger.add_builder(bu, report);
            }
        }
        merger
    }

    /// Adds the manager's report. A report that does not match the plan is ignored, here and for all units.
    pub fn add_manager(&mut self, report: ManagerReport) {
        let fits = report.builders.len() == self.plan.builders()
            && report.builders.iter().all(|view| view.arrived.len() == self.plan.readout_members());
        self.manager = fits.then_some(report);
    }

    /// Adds a readout unit's report.
    pub fn add_readout(&mut self, ru: RuIndex, report: ReadoutReport) {
        let fits = report.sent.len() == self.plan.builders();
        if let Some(entry) = self.readouts.get_mut(ru.index()) {
            *entry = fits.then_some(report);
        }
    }

    /// Adds a builder unit's report.
    pub fn add_builder(&mut self, bu: BuIndex, report: BuilderReport) {
        let fits = report.arrived.len() == self.plan.readout_members()
            && self.plan.slots.get(bu.index()).is_some_and(|n| usize::from(n.get()) == report.slots.len());
        if let Some(entry) = self.builders.get_mut(bu.index()) {
            *entry = fits.then_some(report);
        }
    }

    /// Builds the run summary of the run that ended for `cause`.
    pub fn summary(&self, cause: StopCause) -> RunSummary {
        let readouts = (0..self.readouts.len()).map(|ru| self.readout(ru)).collect();
        let mut merge = Merge { merger: self, readouts, summary: empty(cause), pairs: Vec::new() };
        merge.lost_units();
        for builder in 0..self.builders.len() {
            merge.pairs = vec![Pair::default(); self.readouts.len()];
            match (&self.builders[builder], &self.manager) {
                (Some(report), _) => merge.surviving_builder(builder, report),
                (None, Some(manager)) => merge.lost_builder(builder, &manager.builders[builder]),
                (None, None) => merge.unknown_builder(builder),
            }
            merge.check_pairs(builder);
        }
        merge.readouts();
        merge.check_whole();
        merge.summary
    }
}

impl ReportMerger {
    /// The report of a readout unit. That of a unit that the run went on without does not say what arrived before.
    fn readout(&self, ru: usize) -> Option<&ReadoutReport> {
        let index = RuIndex(ru as u16);
        let recovered = self.manager.iter().any(|report| report.recovered.contains(&Unit::Readout(index)));
        let excluded = self.builders.iter().flatten().any(|report| report.excluded.contains(&index));
        self.readouts[ru].as_ref().filter(|_| !recovered && !excluded)
    }
}

fn empty(cause: StopCause) -> RunSummary {
    RunSummary {
        cause,
        lost: Vec::new(),
        recovered: Vec::new(),
        joined: Vec::new(),
        read: FragmentsRead::default(),
        assigned_events: None,
        rebuilt: Counts::default(),
        duplicate: Counts::default(),
        built: Counts::default(),
        incomplete: Incomplete::default(),
        discarded: Discarded::default(),
        withdrawn_events: 0,
        accepted: 0,
        violations: Vec::new(),
    }
}

/// A run summary under construction.
struct Merge<'a> {
    merger: &'a ReportMerger,
    readouts: Vec<Option<&'a ReadoutReport>>,
    summary: RunSummary,
    /// For the current builder unit, by readout unit.
    pairs: Vec<Pair>,
}

impl Merge<'_> {
    /// Whether the unit is a restart that did not join, as far as the reports say.
    fn has_not_joined(&self, unit: Unit) -> bool {
        let merger = self.merger;
        let joined = merger.manager.iter().any(|manager| manager.joined.contains(&unit));
        let has_traffic = match unit {
            Unit::Manager => true,
            Unit::Readout(ru) => {
                merger.builders.iter().flatten().any(|report| report.arrived[ru.index()] > 0)
            }
            Unit::Builder(bu) => {
                self.readouts.iter().flatten().any(|report| report.sent[bu.index()].batches > 0)
            }
        };
        merger.plan.is_restart(unit) && !joined && (merger.manager.is_some() || !has_traffic)
    }

    fn lost_units(&mut self) {
        let merger = self.merger;
        let has_not_joined: Vec<Unit> = (0..self.readouts.len())
            .map(|ru| Unit::Readout(RuIndex(ru as u16)))
            .chain((0..merger.builders.len()).map(|bu| Unit::Builder(BuIndex(bu as u16))))
            .filter(|unit| self.has_not_joined(*unit))
            .collect();
        let lost = &mut self.summary.lost;
        if merger.manager.is_none() {
            lost.push(Unit::Manager);
        }
        if let Some(manager) = &merger.manager {
            self.summary.recovered.clone_from(&manager.recovered);
            self.summary.joined.clone_from(&manager.joined);
        }
        let missing = |k: usize, gone: bool| gone.then_some(k as u16);
        let readouts = self.readouts.iter().enumerate().filter_map(|(k, r)| missing(k, r.is_none()));
        lost.extend(readouts.map(|k| Unit::Readout(RuIndex(k))));
        let builders = merger.builders.iter().enumerate().filter_map(|(k, r)| missing(k, r.is_none()));
        lost.extend(builders.map(|k| Unit::Builder(BuIndex(k))));
        lost.retain(|unit| !has_not_joined.contains(unit));
    }

    fn expect_equal(&mut self, invariant: Invariant, at: impl Into<String>, left: u64, right: u64) {
        if left != right {
            self.summary.violations.push(InvariantViolation { invariant, at: at.into(), left, right });
        }
    }

    /// Adds the batches that a builder unit finished.
    fn add_done(&mut self, done: &Totals) {
        self.summary.built += done.built;
        self.summary.incomplete.missing_at_source += done.missing;
        self.summary.discarded.corrupt += done.corrupt;
        self.summary.incomplete.readout_lost += done.readout_lost;
        self.summary.accepted += done.accepted;
    }

    /// The last batches that surviving readout units posted to that builder unit's slots.
    fn posted(&self, builder: usize) -> impl Iterator<Item = (usize, PostedBatch)> + '_ {
        let reports = self.readouts.iter().enumerate();
        reports
            .filter_map(|(ru, report)| Some((ru, (*report)?)))
            .flat_map(move |(ru, report)| report.sent[builder].last.iter().map(move |&posted| (ru, posted)))
    }

    /// The batch that the manager assigned to that slot and generation, if it is not done there.
    fn unfinished_at_manager(
        &self,
        builder: usize,
        slot: SlotIndex,
        generation: Generation,
    ) -> Option<UnfinishedBatch> {
        let view = &self.merger.manager.as_ref()?.builders[builder];
        let mut unfinished = view.unfinished.iter();
        unfinished.find(|unfinished| (unfinished.slot, unfinished.generation) == (slot, generation)).copied()
    }

    fn surviving_builder(&mut self, builder: usize, report: &BuilderReport) {
        self.add_done(&report.done);
        for (pair, &arrived) in self.pairs.iter_mut().zip(&report.arrived) {
            pair.arrived = arrived;
        }
        let mut unfinished = Counts::default();
        for (at, slot) in report.slots.iter().enumerate() {
            unfinished += self.surviving_slot(builder, SlotIndex(at as u16), slot);
        }
        for (_, posted) in self.posted(builder).collect::<Vec<_>>() {
            let generation =
                report.slots.get(posted.slot.index()).map_or(Generation(0), |slot| slot.generation);
            if posted.generation > generation {
                let at = format!("{} {}", BuIndex(builder as u16), posted.slot);
                let (left, right) = (u64::from(posted.generation.0), u64::from(generation.0));
                self.summary.violations.push(InvariantViolation {
                    invariant: Invariant::Slot,
                    at,
                    left,
                    right,
                });
            }
        }
        let name = BuIndex(builder as u16).to_string();
        let arrived = report.arrived.iter().sum();
        self.expect_equal(
            Invariant::BuilderFragments,
            &name,
            arrived,
            report.done.fragments() + unfinished.fragments,
        );
        self.expect_equal(
            Invariant::BuilderEvents,
            &name,
            report.events_assigned,
            report.done.events() + unfinished.events,
        );
    }

    /// Accounts for the slot's last generation if it is unfinished. Returns the events of its batch, if the builder
    /// unit has them, and the fragments that arrived.
    fn surviving_slot(&mut self, builder: usize, slot: SlotIndex, report: &SlotReport) -> Counts {
        let SlotState::Unfinished { batch, arrived, cause } = &report.state else {
            return Counts::default();
        };
        let mut missed = 0;
        let mut posted_events = None;
        for (ru, posted) in self.posted(builder).collect::<Vec<_>>() {
            if (posted.slot, posted.generation) != (slot, report.generation) {
                continue;
            }
            posted_events = Some(u64::from(posted.batch.events));
            if !arrived.iter().any(|(from, _)| from.index() == ru) {
                missed += u64::from(posted.fragments);
                self.pairs[ru].lost += u64::from(posted.fragments);
            }
        }
        let own_events = batch.map(|batch| u64::from(batch.events));
        let at_manager = self.unfinished_at_manager(builder, slot, report.generation);
        let events = own_events
            .or_else(|| at_manager.map(|unfinished| u64::from(unfinished.batch.events)))
            .or(posted_events)
            .unwrap_or(0);
        let fragments = arrived.iter().map(|(_, count)| u64::from(*count)).sum();
        let own = Counts { events: own_events.unwrap_or(0), fragments };
        if at_manager.is_some_and(|unfinished| unfinished.again) {
            self.summary.duplicate += Counts { events, fragments: fragments + missed };
            return own;
        }
        let (incomplete, discarded) = (&mut self.summary.incomplete, &mut self.summary.discarded);
        discarded.in_flight.fragments += missed;
        if !arrived.is_empty() {
            let entry = match cause {
                UnfinishedCause::ReadoutLost => &mut incomplete.readout_lost,
                UnfinishedCause::TimedOut => &mut incomplete.timed_out,
                UnfinishedCause::Stopped => &mut incomplete.stopped,
                UnfinishedCause::Unprocessed => &mut discarded.unprocessed,
            };
            *entry += Counts { events, fragments };
        } else if posted_events.is_some() {
            discarded.in_flight.events += events;
        } else {
            self.summary.withdrawn_events += events;
        }
        own
    }

    fn lost_builder(&mut self, builder: usize, view: &BuilderView) {
        self.add_done(&view.done);
        for (pair, &arrived) in self.pairs.iter_mut().zip(&view.arrived) {
            pair.arrived = arrived;
        }
        let posted: Vec<_> = self.posted(builder).collect();
        for unfinished in &view.unfinished {
            let events = u64::from(unfinished.batch.events);
            let mut sent = unfinished.again;
            let summary = &mut self.summary;
            let lost = match unfinished.again {
                true => &mut summary.duplicate,
                false => &mut summary.discarded.builder_lost,
            };
            for (ru, posted) in posted
                .iter()
                .filter(|(_, p)| (p.slot, p.generation) == (unfinished.slot, unfinished.generation))
            {
                sent = true;
                self.pairs[*ru].lost += u64::from(posted.fragments);
                lost.fragments += u64::from(posted.fragments);
            }
            if sent {
                lost.events += events;
            } else {
                self.summary.withdrawn_events += events;
            }
        }
        let unfinished_events: u64 =
            view.unfinished.iter().map(|unfinished| u64::from(unfinished.batch.events)).sum();
        let name = BuIndex(builder as u16).to_string();
        self.expect_equal(
            Invariant::BuilderEvents,
            &name,
            view.events_assigned,
            view.done.events() + unfinished_events,
        );
        self.expect_equal(
            Invariant::BuilderFragments,
            &name,
            view.arrived.iter().sum(),
            view.done.fragments(),
        );
    }

    /// Builder unit and manager are lost: only what was sent to the builder unit is known.
    fn unknown_builder(&mut self, builder: usize) {
        let mut events = 0;
        for (ru, report) in self.readouts.iter().enumerate() {
            let Some(report) = report else { continue };
            let sent = &report.sent[builder];
            // Every readout unit sends a part of every event, so the maximum is the best estimate.
            events = events.max(sent.events);
            self.pairs[ru].lost = sent.fragments;
            self.summary.discarded.builder_lost.fragments += sent.fragments;
        }
        self.summary.discarded.builder_lost.events += events;
    }

    /// Compares with what the readout units sent; for lost readout units, uses the arrivals instead.
    fn check_pairs(&mut self, builder: usize) {
        for (ru, pair) in std::mem::take(&mut self.pairs).into_iter().enumerate() {
            match self.readouts[ru] {
                Some(report) => {
                    let at = format!("{} to {}", RuIndex(ru as u16), BuIndex(builder as u16));
                    let sent = report.sent[builder].fragments;
                    self.expect_equal(Invariant::UnitPair, at, sent, pair.arrived + pair.lost);
                }
                None => self.summary.read.inferred += pair.arrived,
            }
        }
    }

    fn readouts(&mut self) {
        for (ru, report) in self.readouts.clone().into_iter().enumerate() {
            let Some(report) = report else { continue };
            let read = &mut self.summary.read;
            read.reported += report.fragments_read;
            read.bytes = Bytes(read.bytes.0 + report.bytes_read.0);
            self.summary.discarded.unsent.fragments += report.fragments_unsent;
            self.summary.rebuilt.fragments += report.fragments_rebuilt;
            let sent: u64 = report.sent.iter().map(|sent| sent.fragments).sum();
            let name = RuIndex(ru as u16).to_string();
            self.expect_equal(
                Invariant::Readout,
                name,
                report.fragments_read + report.fragments_rebuilt,
                sent + report.fragments_unsent,
            );
        }
    }

    fn check_whole(&mut self) {
        let summary = &self.summary;
        let (incomplete, discarded) = (summary.incomplete_total(), summary.discarded_total());
        let duplicate = summary.duplicate;
        let fates =
            summary.built.fragments + incomplete.fragments + discarded.fragments + duplicate.fragments;
        let events = summary.built.events
            + incomplete.events
            + discarded.events
            + duplicate.events
            + summary.withdrawn_events;
        let sent = summary.fragments_read() + summary.rebuilt.fragments;
        self.expect_equal(Invariant::Fragments, "run", sent, fates);
        let Some(manager) = &self.merger.manager else { return };
        let unfinished = manager.builders.iter().flat_map(|view| &view.unfinished);
        let again = unfinished.filter(|unfinished| unfinished.again);
        let rebuilt: u64 = again.map(|unfinished| u64::from(unfinished.batch.events)).sum();
        let assignments: u64 = manager.builders.iter().map(|view| view.events_assigned).sum();
        let assigned = assignments.saturating_sub(rebuilt);
        self.summary.rebuilt.events = rebuilt;
        self.summary.assigned_events = Some(assigned);
        self.expect_equal(Invariant::Events, "run", assignments, events);
        if self.summary.cause.is_success() {
            self.check_success(manager, assigned);
        }
    }

    /// At the end of a complete run nothing is in flight, and both records of a builder unit agree.
    fn check_success(&mut self, manager: &ManagerReport, assigned: u64) {
        self.expect_equal(Invariant::CompleteRun, "events", self.merger.plan.events.get(), assigned);
        let mut done = 0;
        for (b, view) in manager.builders.iter().enumerate() {
            let name = BuIndex(b as u16);
            let Some(report) = &self.merger.builders[b] else {
                done += view.done.events();
                continue;
            };
            done += report.done.events();
            if manager.recovered.contains(&Unit::Builder(name)) {
                // Its last `Done` messages may not have arrived.
                continue;
            }
            self.expect_equal(
                Invariant::CompleteRun,
                format!("{name} events"),
                view.done.events(),
                report.done.events(),
            );
            let (seen, own) = (view.done.fragments(), report.done.fragments());
            self.expect_equal(Invariant::CompleteRun, format!("{name} fragments"), seen, own);
            for (ru, (&seen, &own)) in view.arrived.iter().zip(&report.arrived).enumerate() {
                let at = format!("{} to {name}", RuIndex(ru as u16));
                self.expect_equal(Invariant::CompleteRun, at, seen, own);
            }
        }
        self.expect_equal(Invariant::CompleteRun, "events done", assigned, done);
    }
}
