//! Event manager: cuts the run into batches, assigns each to a granted slot, and ends the run.
//!
//! A granted slot is a credit. The manager spends credits round-robin over builder units, so consecutive
//! batches go to different builder units. A builder unit without credits is skipped. Without a credit nothing
//! is assigned, so memory is bounded everywhere.
//!
//! If events become available over time, a batch is assigned when it is full, or shorter when its events have waited for
//! the plan's `batch_timeout`.
//!
//! The private module `recovery` has the rules for lost units that the run goes on without, and for units that join;
//! `takeover` makes the manager of a new term; `reports` has the final reports.

mod recovery;
mod reports;
mod takeover;

use super::deadlines::Deadlines;
use super::message::{Assignment, Message};
use super::plan::{Batch, Plan};
use super::report::{BuilderReport, ReadoutReport};
use super::shaping::{RoundRobin, TrafficShaping};
use super::summary::{BatchOutcome, RunSummary, Totals};
use super::takeover::DoneBatch;
use super::types::{
    BatchId, BuIndex, EventNumber, Generation, Instant, ProtocolError, RuIndex, SlotIndex, StopCause, Term,
    Unit,
};
use recovery::Rebuild;
use reports::PendingReport;
use std::collections::VecDeque;

/// Receivers of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receivers {
    /// Every unit.
    All,
    /// Every builder unit.
    Builders,
    /// Every readout unit.
    Readouts,
    /// This unit.
    Unit(Unit),
    /// Every readout unit and this builder unit.
    ReadoutsAnd(BuIndex),
}

impl Receivers {
    /// Whether this unit receives the message.
    pub fn includes(self, unit: Unit) -> bool {
        match (self, unit) {
            (_, Unit::Manager) => false,
            (Receivers::All, _)
            | (Receivers::Readouts | Receivers::ReadoutsAnd(_), Unit::Readout(_))
            | (Receivers::Builders, Unit::Builder(_)) => true,
            (Receivers::Builders, _) | (Receivers::Readouts, _) => false,
            (Receivers::ReadoutsAnd(bu), unit) => unit == Unit::Builder(bu),
            (Receivers::Unit(only), unit) => only == unit,
        }
    }
}

/// A message to send. The sender skips receivers that are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Its receivers.
    pub to: Receivers,
    /// The message.
    pub message: Message,
}

/// Progress of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Batches assigned so far.
    pub assigned: u64,
    /// Outcomes of the batches that are done, with those that a lost builder unit had finished.
    pub done: Totals,
}

/// State of a slot at the manager. The generation stored with it is the slot's current or last one.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// Not granted: its last batch is done, or it was never granted (generation 0).
    Busy,
    /// Granted: a credit.
    Granted,
    /// Assigned to this batch.
    Assigned(Batch),
    /// Of a lost builder unit: was assigned to this batch, which waits for another one, or was assigned `again`.
    Moved { batch: Batch, again: bool },
}

/// Whether a builder unit gets batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BuilderState {
    /// A restart that has not joined.
    Vacant,
    Active,
    /// Not before another builder unit is lost.
    Spare,
    /// Not any more. Its batches are assigned again when it has reported or ended, or the run stops at `until`.
    Excluded {
        cause: StopCause,
        until: Instant,
    },
    /// Not any more. It stores no event, and its batches were assigned again.
    Gone,
}

impl BuilderState {
    /// Whether the unit is there, and gets batches or will.
    fn is_present(self) -> bool {
        matches!(self, BuilderState::Active | BuilderState::Spare)
    }
}

/// Phase of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Assigning batches.
    Running,
    /// Waiting for the readout units' reports; after `until` they count as lost.
    StoppingReadouts { until: Instant },
    /// Waiting for the builder units' reports; after `until` they count as lost.
    StoppingBuilders { until: Instant },
    /// The run summary is final.
    Finished,
}

/// Manager's state for one builder unit.
#[derive(Debug)]
struct Builder {
    /// Index of its first slot in the tables over all slots.
    base: usize,
    membership: BuilderState,
    credits: VecDeque<SlotIndex>,
    events_assigned: u64,
    done: Totals,
    /// Fragments in batches done, by readout unit with restarts.
    arrived: Vec<u64>,
    /// `MissingFragments` messages whose `Done` has not arrived.
    missing_reports: Vec<(RuIndex, u32)>,
    report: PendingReport<BuilderReport>,
}

/// The readout unit that has one set of sources, or had them last.
#[derive(Clone, Copy, Debug)]
struct CurrentReadout {
    index: RuIndex,
    /// Batches before this one are of an earlier unit.
    first_batch: BatchId,
}

/// The event manager.
#[derive(Debug)]
pub struct Manager {
    plan: Plan,
    term: Term,
    /// Whether units were lost or joined since the standby manager's last copy.
    is_replica_due: bool,
    /// Batches that are done since then, if there is a standby manager.
    done_since_replica: Vec<DoneBatch>,
    next_batch: BatchId,
    /// Events of the run in batches before `next_batch`.
    events_cut: u64,
    /// Events of the run that are there, from its first.
    available: u64,
    /// Since when events are there that are in no batch.
    waiting_since: Option<Instant>,
    /// No batch is assigned.
    paused: bool,
    events_done: u64,
    /// Of those, events of batches that lost builder units had finished, but not reported done.
    events_settled: u64,
    /// Batches to assign before new ones, in order: those of lost builder units, and those of an earlier term that reached no
    /// unit.
    rebuild: VecDeque<Rebuild>,
    /// Readout units keep batches before this one until all are done, because a builder unit was lost.
    release: Option<BatchId>,
    /// Units that the run goes on without, in the order of their losses.
    recovered: Vec<Unit>,
    /// Those whose processes have to be ended.
    excluded: VecDeque<Unit>,
    /// Those whose restarts may join.
    departed: VecDeque<Unit>,
    done: Totals,
    slots: Vec<(Generation, Slot)>,
    deadlines: Deadlines,
    builders: Vec<Builder>,
    /// By readout unit with restarts.
    readouts: Vec<PendingReport<ReadoutReport>>,
    /// By readout unit at the start.
    current_readouts: Vec<CurrentReadout>,
    /// First batches of readout units that were replaced, by readout unit with restarts.
    first_batches: Vec<BatchId>,
    /// Restarts that have joined.
    joined: Vec<Unit>,
    /// The run has no readout unit or no builder unit, and waits for one until then.
    waits_for_unit: Option<(Instant, StopCause)>,
    round_robin: RoundRobin,
    phase: Phase,
    cause: StopCause,
    next_heartbeat: Instant,
    outbox: VecDeque<Transmit>,
    summary: Option<RunSummary>,
}

impl Manager {
    /// A manager at the start of a run: no slot is granted yet.
    pub fn new(plan: Plan, now: Instant) -> Manager {
        let mut base = 0;
        let builders: Vec<_> = plan
            .slots
            .iter()
            .zip((0..).map(BuIndex))
            .map(|(slots, bu)| {
                let slots = usize::from(slots.get());
                let builder = Builder {
                    base,
                    membership: match plan.is_restart(Unit::Builder(bu)) {
                        true => BuilderState::Vacant,
                        false if plan.is_spare(bu) => BuilderState::Spare,
                        false => BuilderState::Active,
                    },
                    credits: VecDeque::with_capacity(slots),
                    events_assigned: 0,
                    done: Totals::default(),
                    arrived: vec![0; plan.readout_members()],
                    missing_reports: Vec::with_capacity(plan.readouts()),
                    report: match plan.is_restart(Unit::Builder(bu)) {
                        true => PendingReport::Vacant,
                        false => PendingReport::Awaited,
                    },
                };
                base += slots;
                builder
            })
            .collect();
        Manager {
            next_batch: BatchId(0),
            events_cut: 0,
            available: u64::MAX,
            waiting_since: None,
            paused: false,
            events_done: 0,
            events_settled: 0,
            term: Term::FIRST,
            is_replica_due: true,
            done_since_replica: Vec::new(),
            rebuild: VecDeque::new(),
            release: None,
            recovered: Vec::new(),
            excluded: VecDeque::new(),
            departed: VecDeque::new(),
            done: Totals::default(),
            slots: vec![(Generation(0), Slot::Busy); base],
            deadlines: Deadlines::new(base),
            round_robin: RoundRobin::new(builders.len(), 0),
            builders,
            readouts: (0..plan.readout_members())
                .map(|ru| match plan.is_restart(Unit::Readout(RuIndex(ru as u16))) {
                    true => PendingReport::Vacant,
                    false => PendingReport::Awaited,
                })
                .collect(),
            current_readouts: (0..plan.readouts())
                .map(|ru| CurrentReadout { index: RuIndex(ru as u16), first_batch: BatchId(0) })
                .collect(),
            first_batches: vec![BatchId(0); plan.readout_members()],
            joined: Vec::new(),
            waits_for_unit: None,
            phase: Phase::Running,
            cause: StopCause::EndOfRun,
            next_heartbeat: now,
            outbox: VecDeque::with_capacity(4),
            summary: None,
            plan,
        }
    }

    /// A message from a unit. A violation of the protocol stops the run; the cause names the sender and the violation.
    pub fn handle_message(&mut self, from: Unit, message: Message, now: Instant) {
        if self.phase == Phase::Finished || self.is_lost(from) {
            return;
        }
        let result = match (from, message) {
            (Unit::Builder(bu), Message::Grant { builder, slot, generation }) if bu == builder => {
                self.grant(builder, slot, generation)
            }
            (
                Unit::Builder(bu),
                Message::MissingFragments { builder, slot, generation, readout, missing },
            ) if bu == builder => self.missing_fragments(builder, slot, generation, readout, missing),
            (Unit::Builder(bu), Message::Done { builder, slot, generation, batch, outcome })
                if bu == builder =>
            {
                self.done(builder, slot, generation, batch, outcome, now)
            }
            (Unit::Builder(bu), Message::Storing { builder, slot, generation }) if bu == builder => {
                self.storing(builder, slot, generation, now)
            }
            (_, Message::Fault { cause }) => {
                self.fault(from, cause, now);
                Ok(())
            }
            _ => Err(ProtocolError::UnexpectedMessage),
        };
        if let Err(error) = result {
            self.stop(StopCause::Protocol { by: from, error }, now);
        }
    }

    /// Bytes from that unit did not decode.
    pub fn handle_malformed(&mut self, from: Unit, now: Instant) {
        self.stop(StopCause::Protocol { by: from, error: ProtocolError::Malformed }, now);
    }

    /// A unit died, or is silent and counts as dead. No effect if the unit has reported, because it may then exit.
    pub fn handle_lost(&mut self, unit: Unit, now: Instant) {
        if self.phase == Phase::Finished {
            return;
        }
        let (lost, goes_on) = match unit {
            Unit::Manager => (false, false),
            Unit::Readout(ru) => {
                let goes_on = !self.readouts[ru.index()].is_received()
                    && self.exclude_readout(ru, StopCause::Lost(unit), now);
                (self.readouts[ru.index()].mark_lost(), goes_on)
            }
            // The manager of a new term is told of units that were lost before it.
            Unit::Builder(bu) if self.builders[bu.index()].membership == BuilderState::Gone => return,
            Unit::Builder(bu) => {
                let lost = self.builders[bu.index()].report.mark_lost();
                (lost, lost && self.remove_builder(bu, now))
            }
        };
        if !lost || goes_on {
            return;
        }
        if matches!((self.cause, unit), (StopCause::Unreachable { peer, .. }, Unit::Builder(bu)) if peer == bu)
        {
            // The failed write was the first symptom of this death.
            self.cause = StopCause::Lost(unit);
        }
        self.stop(StopCause::Lost(unit), now);
        self.advance(now);
    }

    /// A unit's host does not answer. A builder unit may go on and store events: it is excluded, as one that does not respond. The
    /// caller handles it as lost when it has ended or has stopped itself. False if the unit counts as lost at once.
    pub fn handle_cut_off(&mut self, unit: Unit, now: Instant) -> bool {
        let Unit::Builder(bu) = unit else { return false };
        let is_present = self.builders[bu.index()].membership.is_present();
        self.phase == Phase::Running && is_present && self.exclude_builder(bu, StopCause::Lost(unit), now)
    }

    /// The first `events` events of the run are available. Without a call, all events are available from the start.
    ///
    /// With the barrel shifter, batches are assigned in rounds of one for each builder unit (see [`shaping`](super::shaping)).
    pub fn handle_available(&mut self, events: u64, now: Instant) {
        self.available = events;
        if events <= self.events_cut {
            self.waiting_since = None;
        } else {
            self.waiting_since.get_or_insert(now);
        }
    }

    /// Events of the run in batches that were assigned.
    pub fn events_assigned(&self) -> u64 {
        self.events_cut
    }

    /// The next batch of the run that may be assigned.
    fn cut_batch(&self, now: Instant) -> Option<Batch> {
        let full = u64::from(self.plan.batch.get());
        let run = self.plan.events.get();
        let end = self.available.min(run);
        let waiting = end.checked_sub(self.events_cut).filter(|&events| events > 0)?;
        let first_event = EventNumber(self.plan.first_event.0 + self.events_cut);
        let batch = |events: u64| Batch { id: self.next_batch, first_event, events: events.min(full) as u16 };
        let is_due = self.batch_due().is_some_and(|due| due <= now);
        if end == run || is_due {
            return Some(batch(waiting));
        }
        let mut batches = self.next_batch.0 + waiting / full;
        if self.plan.traffic_shaping == TrafficShaping::BarrelShifter {
            let active = self.builders.iter().filter(|unit| unit.membership == BuilderState::Active).count();
            batches -= batches % active.max(1) as u64;
        }
        (self.next_batch.0 < batches).then(|| batch(full))
    }

    /// When events that wait are assigned in a shorter batch.
    fn batch_due(&self) -> Option<Instant> {
        Some(self.waiting_since? + self.plan.batch_timeout?)
    }

    /// Whether the operator has paused the run.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// The operator pauses or resumes the run. While it is paused, batches in flight are finished and no batch is assigned.
    pub fn handle_pause(&mut self, paused: bool) {
        self.paused = paused;
        self.is_replica_due = true;
    }

    /// The operator requests the end of the run.
    pub fn handle_stop_request(&mut self, now: Instant) {
        self.stop(StopCause::Requested, now);
    }

    /// A readout unit's final report.
    pub fn handle_readout_report(&mut self, ru: RuIndex, report: ReadoutReport, now: Instant) {
        let cause = report.cause;
        if self.phase != Phase::Finished && !self.is_recovered(Unit::Readout(ru)) {
            self.readouts[ru.index()].receive(report);
            self.stop(cause, now);
            self.advance(now);
        }
    }

    /// A builder unit's final report.
    pub fn handle_builder_report(&mut self, bu: BuIndex, report: BuilderReport, now: Instant) {
        let cause = report.cause;
        if self.phase == Phase::Finished || self.builders[bu.index()].membership == BuilderState::Gone {
            return;
        }
        let is_excluded = matches!(self.builders[bu.index()].membership, BuilderState::Excluded { .. });
        if is_excluded && self.phase == Phase::Running {
            self.settle_builder(bu, &report, now);
            self.builders[bu.index()].report.receive(report);
            return self.advance(now);
        }
        self.builders[bu.index()].report.receive(report);
        self.stop(cause, now);
        self.advance(now);
    }

    /// The next message to send: stop messages first, then as many assignments as credits allow.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Transmit> {
        if let Some(transmit) = self.outbox.pop_front() {
            return Some(transmit);
        }
        if self.phase != Phase::Running {
            return None;
        }
        let rebuild = self.rebuild.front().copied();
        let batch = match rebuild {
            Some(rebuild) => rebuild.batch,
            None if self.paused || !self.has_readout() => return None,
            None => self.cut_batch(now)?,
        };
        let builder_at = self.round_robin.next_ready()?;
        let builder = BuIndex(builder_at as u16);
        let unit = &mut self.builders[builder_at];
        let slot = unit.credits.pop_front().expect("a builder unit is ready only while it has credits");
        self.round_robin.set_ready(builder_at, !unit.credits.is_empty());
        unit.events_assigned += u64::from(batch.events);
        let at = unit.base + slot.index();
        self.slots[at].1 = Slot::Assigned(batch);
        self.deadlines.start(at, now + self.plan.done_timeout());
        match rebuild {
            Some(Rebuild { batch, from, .. }) => {
                self.rebuild.pop_front();
                if let Some(from) = from {
                    self.slots[from].1 = Slot::Moved { batch, again: true };
                }
            }
            None => {
                self.next_batch.0 += 1;
                self.events_cut += u64::from(batch.events);
                // The events that are left may have come at any time before.
                self.waiting_since =
                    self.waiting_since.filter(|_| self.events_cut < self.available).map(|_| now);
            }
        }
        let again = rebuild.is_some_and(|rebuild| rebuild.again);
        let assignment = Assignment { batch, builder, slot, generation: self.slots[at].0, again };
        Some(Transmit { to: Receivers::ReadoutsAnd(builder), message: Message::Assign(assignment) })
    }

    /// When [`handle_timeout`](Self::handle_timeout) has to be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let due = match self.phase {
            Phase::Running => {
                let exclusion = self.exclusion_timeout().map(|(until, _)| until);
                let due = exclusion.into_iter().chain(self.assignable_batch_due());
                self.deadlines.earliest().into_iter().chain(due).fold(self.next_heartbeat, Instant::min)
            }
            Phase::StoppingReadouts { until } | Phase::StoppingBuilders { until } => {
                until.min(self.next_heartbeat)
            }
            Phase::Finished => return None,
        };
        Some(due)
    }

    /// A timer may have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.phase == Phase::Finished {
            return;
        }
        if self.next_heartbeat <= now {
            self.next_heartbeat = now + self.plan.timeout / 4;
            self.outbox.push_back(Transmit { to: Receivers::All, message: Message::Heartbeat });
        }
        match self.phase {
            Phase::Running => {
                if let Some(at) = self.deadlines.pop_due(now)
                    && let Slot::Assigned(batch) = self.slots[at].1
                {
                    self.batch_timed_out(at, batch, now);
                }
                if let Some((until, cause)) = self.exclusion_timeout()
                    && until <= now
                {
                    self.stop(cause, now);
                }
            }
            Phase::StoppingReadouts { until } if until <= now => {
                self.readouts.iter_mut().for_each(|report| _ = report.mark_lost());
                self.advance(now);
            }
            Phase::StoppingBuilders { until } if until <= now => {
                self.builders.iter_mut().for_each(|unit| _ = unit.report.mark_lost());
                self.advance(now);
            }
            _ => {}
        }
    }

    /// The run summary, once, when the run is over.
    pub fn poll_finished(&mut self) -> Option<RunSummary> {
        self.summary.take()
    }

    /// Progress of the run.
    pub fn progress(&self) -> Progress {
        Progress { assigned: self.next_batch.0, done: self.done }
    }

    fn is_lost(&self, unit: Unit) -> bool {
        match unit {
            Unit::Manager => false,
            Unit::Readout(ru) => self.readouts.get(ru.index()).is_none_or(PendingReport::is_lost),
            Unit::Builder(bu) => self
                .builders
                .get(bu.index())
                .is_none_or(|unit| unit.report.is_lost() || unit.membership == BuilderState::Gone),
        }
    }

    /// [`batch_due`](Self::batch_due) while a batch could be assigned.
    fn assignable_batch_due(&self) -> Option<Instant> {
        let is_idle = self.paused || !self.has_readout() || !self.round_robin.has_ready();
        self.batch_due().filter(|_| !is_idle)
    }

    fn slot_at(&self, builder: BuIndex, slot: SlotIndex) -> Result<usize, ProtocolError> {
        let known = self.plan.has_slot(builder, slot);
        known
            .then(|| self.builders[builder.index()].base + slot.index())
            .ok_or(ProtocolError::UnknownSlotOrUnit)
    }

    fn grant(
        &mut self,
        builder: BuIndex,
        slot: SlotIndex,
        generation: Generation,
    ) -> Result<(), ProtocolError> {
        let at = self.slot_at(builder, slot)?;
        let (last, state) = &mut self.slots[at];
        if !matches!(state, Slot::Busy) {
            return Err(ProtocolError::GrantOfBusySlot);
        }
        if generation != last.next() {
            return Err(ProtocolError::WrongGeneration);
        }
        (*last, *state) = (generation, Slot::Granted);
        let unit = &mut self.builders[builder.index()];
        if unit.membership.is_present() {
            unit.credits.push_back(slot);
            self.round_robin.set_ready(builder.index(), unit.membership == BuilderState::Active);
        }
        Ok(())
    }

    /// The batch that is assigned to the slot's generation.
    fn assigned(&self, at: usize, generation: Generation) -> Result<Batch, ProtocolError> {
        match self.slots[at] {
            (present, Slot::Assigned(batch)) if present == generation => Ok(batch),
            (_, Slot::Assigned(_)) => Err(ProtocolError::WrongGeneration),
            _ => Err(ProtocolError::SlotNotAssigned),
        }
    }

    fn missing_fragments(
        &mut self,
        builder: BuIndex,
        slot: SlotIndex,
        generation: Generation,
        readout: RuIndex,
        missing: u32,
    ) -> Result<(), ProtocolError> {
        let batch = self.assigned(self.slot_at(builder, slot)?, generation)?;
        if readout.index() >= self.plan.readouts() {
            return Err(ProtocolError::UnknownSlotOrUnit);
        }
        let missing_reports = &mut self.builders[builder.index()].missing_reports;
        if missing > self.plan.expected_fragments(readout, batch.events)
            || missing_reports.len() == self.plan.readouts()
        {
            return Err(ProtocolError::TooManyFragments);
        }
        missing_reports.push((readout, missing));
        Ok(())
    }

    /// The builder unit waits for the software trigger or storage, and not for us: both may take longer than any timeout.
    fn storing(
        &mut self,
        builder: BuIndex,
        slot: SlotIndex,
        generation: Generation,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        let at = self.slot_at(builder, slot)?;
        self.assigned(at, generation)?;
        if self.builders[builder.index()].membership.is_present() {
            self.deadlines.start(at, now + self.plan.done_timeout());
        }
        Ok(())
    }

    fn done(
        &mut self,
        builder: BuIndex,
        slot: SlotIndex,
        generation: Generation,
        id: BatchId,
        outcome: BatchOutcome,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        let at = self.slot_at(builder, slot)?;
        let batch = self.assigned(at, generation)?;
        if batch.id != id {
            return Err(ProtocolError::SlotNotAssigned);
        }
        if !outcome.covers(batch.events) {
            return Err(ProtocolError::WrongEventCount);
        }
        self.slots[at].1 = Slot::Busy;
        self.deadlines.stop(at);
        let mut missing_reports = std::mem::take(&mut self.builders[builder.index()].missing_reports);
        let mut arrivals = Vec::new();
        for role in (0..self.plan.readouts()).map(|ru| RuIndex(ru as u16)) {
            let missing: u32 =
                missing_reports.iter().filter(|(ru, _)| *ru == role).map(|(_, missing)| missing).sum();
            let sender = self.sender_of(role, id);
            let expected = self.plan.expected_fragments(role, batch.events);
            let arrived = u64::from(expected.saturating_sub(missing));
            self.builders[builder.index()].arrived[sender.index()] += arrived;
            if self.plan.recovery.has_standby() {
                arrivals.push((sender, arrived));
            }
        }
        if self.plan.recovery.has_standby() {
            let done = DoneBatch { builder, slot, generation, batch: id, outcome, arrived: arrivals };
            self.done_since_replica.push(done);
        }
        missing_reports.clear();
        let unit = &mut self.builders[builder.index()];
        unit.missing_reports = missing_reports;
        unit.done += outcome;
        self.done += outcome;
        self.events_done += u64::from(batch.events);
        self.release_batches();
        self.finish_if_all_done(now);
        Ok(())
    }

    fn finish_if_all_done(&mut self, now: Instant) {
        if self.events_done == self.plan.events.get() {
            self.stop(StopCause::EndOfRun, now);
        }
    }

    /// The readout unit that sends a batch's packets of the sources of `role`.
    fn sender_of(&self, role: RuIndex, batch: BatchId) -> RuIndex {
        let mut member = self.current_readouts[role.index()].index;
        let n = self.plan.readouts();
        while member.index() >= n && batch < self.first_batches[member.index()] {
            member = RuIndex(member.0 - n as u16);
        }
        member
    }

    /// Starts the stopping sequence if it is not running. The first cause counts.
    fn stop(&mut self, cause: StopCause, now: Instant) {
        if self.phase != Phase::Running {
            return;
        }
        self.cause = cause;
        // Readout units bound their own drain; twice that includes the transfer of their reports.
        self.phase = Phase::StoppingReadouts { until: now + 2 * self.plan.drain_timeout };
        self.outbox.push_back(Transmit { to: Receivers::All, message: Message::Stop { cause } });
        self.advance(now);
    }

    /// Advances the stopping sequence when all awaited units have reported or are lost.
    fn advance(&mut self, now: Instant) {
        if matches!(self.phase, Phase::StoppingReadouts { .. })
            && !self.readouts.iter().any(PendingReport::is_awaited)
        {
            self.phase = Phase::StoppingBuilders { until: now + 2 * self.plan.drain_timeout };
            self.outbox.push_back(Transmit { to: Receivers::Builders, message: Message::Drain });
        }
        if matches!(self.phase, Phase::StoppingBuilders { .. })
            && !self.builders.iter().any(|unit| unit.report.is_awaited())
        {
            self.phase = Phase::Finished;
            self.summary = Some(self.close());
        }
    }
}

#[cfg(test)]
mod tests;
