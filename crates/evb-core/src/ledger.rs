//! Merges the units' reports into the account and checks the laws.
//!
//! Whoever survives runs it: normally the manager; if the manager is lost, whoever started the units.
//! A lost unit's part is inferred from what others witnessed:
//!
//! | lost | fragments it read or got | from |
//! |---|---|---|
//! | readout unit | read = what arrived from it | surviving builder units; the manager for batches done elsewhere |
//! | builder unit | finished batches | the manager's sums of `Done` and `Short` |
//! | builder unit | the rest of what was sent to it: discarded | each readout unit's last batch per slot |
//! | builder unit and manager | all that was sent to it: discarded | readout units' sums |
//!
//! The last line is the price of losing both: nobody is left who knows what that builder unit finished.

use super::account::{Account, Discarded, Incomplete, Law, Read, Tally, Totals, Violation};
use super::plan::Plan;
use super::report::{
    BuilderReport, BuilderView, ManagerReport, OpenCause, Posted, ReadoutReport, SlotEnd, SlotReport,
};
use super::types::{BuIndex, Bytes, Life, RuIndex, SlotIndex, StopCause, Unit};

/// The reports of one run's surviving units.
#[derive(Debug)]
pub struct Ledger {
    plan: Plan,
    manager: Option<ManagerReport>,
    readouts: Vec<Option<ReadoutReport>>,
    builders: Vec<Option<BuilderReport>>,
}

/// Fragments of one pair of units, by what became of them on the way.
#[derive(Clone, Copy, Default)]
struct Pair {
    arrived: u64,
    lost: u64,
}

impl Ledger {
    /// No reports yet: every unit counts as lost.
    pub fn new(plan: Plan) -> Ledger {
        Ledger {
            manager: None,
            readouts: (0..plan.readouts()).map(|_| None).collect(),
            builders: (0..plan.builders()).map(|_| None).collect(),
            plan,
        }
    }

    /// The manager's report. One that does not fit the plan is as good as none, as for all units.
    pub fn manager(&mut self, report: ManagerReport) {
        let fits = report.builders.len() == self.plan.builders()
            && report.builders.iter().all(|view| view.arrived.len() == self.plan.readouts());
        self.manager = fits.then_some(report);
    }

    /// A readout unit's report.
    pub fn readout(&mut self, ru: RuIndex, report: ReadoutReport) {
        let fits = report.sent.len() == self.plan.builders();
        if let Some(place) = self.readouts.get_mut(ru.index()) {
            *place = fits.then_some(report);
        }
    }

    /// A builder unit's report.
    pub fn builder(&mut self, bu: BuIndex, report: BuilderReport) {
        let fits = report.arrived.len() == self.plan.readouts()
            && self.plan.slots.get(bu.index()).is_some_and(|n| usize::from(n.get()) == report.slots.len());
        if let Some(place) = self.builders.get_mut(bu.index()) {
            *place = fits.then_some(report);
        }
    }

    /// The account of the run that ended for `cause`.
    pub fn close(&self, cause: StopCause) -> Account {
        let mut closing = Closing { ledger: self, account: empty(cause), pairs: Vec::new() };
        closing.lost_units();
        for builder in 0..self.builders.len() {
            closing.pairs = vec![Pair::default(); self.readouts.len()];
            match (&self.builders[builder], &self.manager) {
                (Some(report), _) => closing.surviving_builder(builder, report),
                (None, Some(manager)) => closing.lost_builder(builder, &manager.builders[builder]),
                (None, None) => closing.unknown_builder(builder),
            }
            closing.check_pairs(builder);
        }
        closing.readouts();
        closing.check_whole();
        closing.account
    }
}

fn empty(cause: StopCause) -> Account {
    Account {
        cause,
        lost: Vec::new(),
        read: Read::default(),
        assigned_events: None,
        built: Tally::default(),
        incomplete: Incomplete::default(),
        discarded: Discarded::default(),
        withdrawn_events: 0,
        accepted: 0,
        violations: Vec::new(),
    }
}

/// An account in the making.
struct Closing<'a> {
    ledger: &'a Ledger,
    account: Account,
    /// Of the builder unit at hand, by readout unit.
    pairs: Vec<Pair>,
}

impl Closing<'_> {
    fn lost_units(&mut self) {
        let ledger = self.ledger;
        let lost = &mut self.account.lost;
        if ledger.manager.is_none() {
            lost.push(Unit::Manager);
        }
        let missing = |k: usize, gone: bool| gone.then_some(k as u16);
        let readouts = ledger.readouts.iter().enumerate().filter_map(|(k, r)| missing(k, r.is_none()));
        lost.extend(readouts.map(|k| Unit::Readout(RuIndex(k))));
        let builders = ledger.builders.iter().enumerate().filter_map(|(k, r)| missing(k, r.is_none()));
        lost.extend(builders.map(|k| Unit::Builder(BuIndex(k))));
    }

    fn expect_equal(&mut self, law: Law, at: impl Into<String>, left: u64, right: u64) {
        if left != right {
            self.account.violations.push(Violation { law, at: at.into(), left, right });
        }
    }

    /// Batches that the builder unit finished.
    fn add_done(&mut self, done: &Totals) {
        self.account.built += done.built;
        self.account.incomplete.missing_at_source += done.missing;
        self.account.discarded.corrupt += done.corrupt;
        self.account.accepted += done.accepted;
    }

    /// What surviving readout units posted last to that builder unit's slots.
    fn posted(&self, builder: usize) -> impl Iterator<Item = (usize, Posted)> + '_ {
        let reports = self.ledger.readouts.iter().enumerate();
        reports
            .filter_map(|(ru, report)| Some((ru, report.as_ref()?)))
            .flat_map(move |(ru, report)| report.sent[builder].last.iter().map(move |&posted| (ru, posted)))
    }

    /// Events of the batch that the manager assigned to that life of that slot.
    fn open_at_manager(&self, builder: usize, slot: SlotIndex, life: Life) -> Option<u64> {
        let view = &self.ledger.manager.as_ref()?.builders[builder];
        let open = view.open.iter().find(|open| (open.slot, open.life) == (slot, life))?;
        Some(u64::from(open.batch.events))
    }

    fn surviving_builder(&mut self, builder: usize, report: &BuilderReport) {
        self.add_done(&report.done);
        for (pair, &arrived) in self.pairs.iter_mut().zip(&report.arrived) {
            pair.arrived = arrived;
        }
        let mut unfinished = Tally::default();
        for (at, slot) in report.slots.iter().enumerate() {
            unfinished += self.surviving_slot(builder, SlotIndex(at as u16), slot);
        }
        for (_, posted) in self.posted(builder).collect::<Vec<_>>() {
            let life = report.slots.get(posted.slot.index()).map_or(Life(0), |slot| slot.life);
            if posted.life > life {
                let at = format!("{} {}", BuIndex(builder as u16), posted.slot);
                let (left, right) = (u64::from(posted.life.0), u64::from(life.0));
                self.account.violations.push(Violation { law: Law::Slot, at, left, right });
            }
        }
        let name = BuIndex(builder as u16).to_string();
        let arrived = report.arrived.iter().sum();
        self.expect_equal(
            Law::BuilderFragments,
            &name,
            arrived,
            report.done.fragments() + unfinished.fragments,
        );
        self.expect_equal(
            Law::BuilderEvents,
            &name,
            report.events_assigned,
            report.done.events() + unfinished.events,
        );
    }

    /// Accounts for the slot's last life if it is unfinished. Returns the builder unit's part: events of
    /// its batch if it knew of it, and fragments that arrived.
    fn surviving_slot(&mut self, builder: usize, slot: SlotIndex, report: &SlotReport) -> Tally {
        let SlotEnd::Open { batch, arrived, cause } = &report.state else {
            return Tally::default();
        };
        let mut missed = 0;
        let mut posted_events = None;
        for (ru, posted) in self.posted(builder).collect::<Vec<_>>() {
            if (posted.slot, posted.life) != (slot, report.life) {
                continue;
            }
            posted_events = Some(u64::from(posted.batch.events));
            if !arrived.iter().any(|(from, _)| from.index() == ru) {
                missed += u64::from(posted.fragments);
                self.pairs[ru].lost += u64::from(posted.fragments);
            }
        }
        let own_events = batch.map(|batch| u64::from(batch.events));
        let events = own_events
            .or_else(|| self.open_at_manager(builder, slot, report.life))
            .or(posted_events)
            .unwrap_or(0);
        let fragments = arrived.iter().map(|(_, count)| u64::from(*count)).sum();
        let (incomplete, discarded) = (&mut self.account.incomplete, &mut self.account.discarded);
        discarded.in_flight.fragments += missed;
        if !arrived.is_empty() {
            let place = match cause {
                OpenCause::ReadoutLost => &mut incomplete.readout_lost,
                OpenCause::TimedOut => &mut incomplete.timed_out,
                OpenCause::Stopped => &mut incomplete.stopped,
                OpenCause::Unprocessed => &mut discarded.unprocessed,
            };
            *place += Tally { events, fragments };
        } else if posted_events.is_some() {
            discarded.in_flight.events += events;
        } else {
            self.account.withdrawn_events += events;
        }
        Tally { events: own_events.unwrap_or(0), fragments }
    }

    fn lost_builder(&mut self, builder: usize, view: &BuilderView) {
        self.add_done(&view.done);
        for (pair, &arrived) in self.pairs.iter_mut().zip(&view.arrived) {
            pair.arrived = arrived;
        }
        let posted: Vec<_> = self.posted(builder).collect();
        for open in &view.open {
            let events = u64::from(open.batch.events);
            let mut sent = false;
            for (ru, posted) in posted.iter().filter(|(_, p)| (p.slot, p.life) == (open.slot, open.life)) {
                sent = true;
                self.pairs[*ru].lost += u64::from(posted.fragments);
                self.account.discarded.builder_lost.fragments += u64::from(posted.fragments);
            }
            if sent {
                self.account.discarded.builder_lost.events += events;
            } else {
                self.account.withdrawn_events += events;
            }
        }
        let in_open: u64 = view.open.iter().map(|open| u64::from(open.batch.events)).sum();
        let name = BuIndex(builder as u16).to_string();
        self.expect_equal(Law::BuilderEvents, &name, view.events_assigned, view.done.events() + in_open);
        self.expect_equal(Law::BuilderFragments, &name, view.arrived.iter().sum(), view.done.fragments());
    }

    /// Builder unit and manager are lost: what was sent there is all that is known.
    fn unknown_builder(&mut self, builder: usize) {
        let mut events = 0;
        for (ru, report) in self.ledger.readouts.iter().enumerate() {
            let Some(report) = report else { continue };
            let sent = &report.sent[builder];
            // Every readout unit sends part of every event, so the one that got furthest knows most.
            events = events.max(sent.events);
            self.pairs[ru].lost = sent.fragments;
            self.account.discarded.builder_lost.fragments += sent.fragments;
        }
        self.account.discarded.builder_lost.events += events;
    }

    /// Against what the readout units sent, or in place of it.
    fn check_pairs(&mut self, builder: usize) {
        for (ru, pair) in std::mem::take(&mut self.pairs).into_iter().enumerate() {
            match &self.ledger.readouts[ru] {
                Some(report) => {
                    let at = format!("{} to {}", RuIndex(ru as u16), BuIndex(builder as u16));
                    let sent = report.sent[builder].fragments;
                    self.expect_equal(Law::Pair, at, sent, pair.arrived + pair.lost);
                }
                None => self.account.read.witnessed += pair.arrived,
            }
        }
    }

    fn readouts(&mut self) {
        for (ru, report) in self.ledger.readouts.iter().enumerate() {
            let Some(report) = report else { continue };
            let read = &mut self.account.read;
            read.reported += report.fragments_read;
            read.bytes = Bytes(read.bytes.0 + report.bytes_read.0);
            self.account.discarded.unsent.fragments += report.fragments_unsent;
            let sent: u64 = report.sent.iter().map(|sent| sent.fragments).sum();
            let name = RuIndex(ru as u16).to_string();
            self.expect_equal(Law::Readout, name, report.fragments_read, sent + report.fragments_unsent);
        }
    }

    fn check_whole(&mut self) {
        let account = &self.account;
        let (incomplete, discarded) = (account.incomplete_total(), account.discarded_total());
        let fates = account.built.fragments + incomplete.fragments + discarded.fragments;
        let events = account.built.events + incomplete.events + discarded.events + account.withdrawn_events;
        self.expect_equal(Law::Fragments, "run", self.account.fragments_read(), fates);
        let Some(manager) = &self.ledger.manager else { return };
        let assigned = manager.builders.iter().map(|view| view.events_assigned).sum();
        self.account.assigned_events = Some(assigned);
        self.expect_equal(Law::Events, "run", assigned, events);
        if self.account.cause.is_success() {
            self.check_success(manager, assigned);
        }
    }

    /// At the end of a whole run nothing may be under way, and both views of a builder unit agree.
    fn check_success(&mut self, manager: &ManagerReport, assigned: u64) {
        self.expect_equal(Law::WholeRun, "events", self.ledger.plan.events.get(), assigned);
        let done: u64 = manager.builders.iter().map(|view| view.done.events()).sum();
        self.expect_equal(Law::WholeRun, "events done", assigned, done);
        for (b, view) in manager.builders.iter().enumerate() {
            let Some(report) = &self.ledger.builders[b] else { continue };
            let name = BuIndex(b as u16);
            self.expect_equal(
                Law::WholeRun,
                format!("{name} events"),
                view.done.events(),
                report.done.events(),
            );
            let (seen, own) = (view.done.fragments(), report.done.fragments());
            self.expect_equal(Law::WholeRun, format!("{name} fragments"), seen, own);
            for (ru, (&seen, &own)) in view.arrived.iter().zip(&report.arrived).enumerate() {
                let at = format!("{} to {name}", RuIndex(ru as u16));
                self.expect_equal(Law::WholeRun, at, seen, own);
            }
        }
    }
}
