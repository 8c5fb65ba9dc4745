//! The event manager: cuts the run into batches, assigns each to a granted slot, and ends the run.
//!
//! Credits are granted slots. The manager holds them by builder unit and spends them in rotation, so
//! that consecutive batches go to different builder units; a builder unit that is slow to grant is
//! simply passed over. Without a credit nothing is assigned, so memory is bounded everywhere.

use super::account::{Account, Totals, Verdict};
use super::deadlines::Deadlines;
use super::ledger::Ledger;
use super::message::{Assignment, Message};
use super::plan::{Batch, Plan};
use super::report::{BuilderReport, BuilderView, ManagerReport, OpenBatch, ReadoutReport};
use super::shape::{Rotation, Shape};
use super::types::{BatchId, BuIndex, Life, Nanos, RuIndex, Rule, SlotIndex, StopCause, Unit};
use std::collections::VecDeque;

/// Receivers of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// Every unit.
    Units,
    /// Every builder unit.
    Builders,
    /// Every readout unit and this builder unit.
    ReadoutsAnd(BuIndex),
}

/// A message to send. Receivers that are lost are skipped by whoever sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Who gets it.
    pub to: To,
    /// The message.
    pub message: Message,
}

/// How far the run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Batches assigned so far.
    pub assigned: u64,
    /// What became of the batches that are done.
    pub done: Totals,
}

/// A slot as the manager sees it; the life is the slot's present or last one.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// Not granted since its last batch was done, or never (life 0).
    Busy,
    /// A credit.
    Granted,
    /// Taking this batch.
    Assigned(Batch),
}

/// When the manager acts without being told anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Assigning.
    Running,
    /// Waiting for the readout units' reports, until when they count as lost.
    StoppingReadouts { until: Nanos },
    /// Waiting for the builder units' reports, until when they count as lost.
    StoppingBuilders { until: Nanos },
    /// The account is closed.
    Finished,
}

/// What is known of one builder unit.
#[derive(Debug)]
struct Builder {
    /// Its first slot in the tables over all slots.
    base: usize,
    credits: VecDeque<SlotIndex>,
    events_assigned: u64,
    done: Totals,
    /// Fragments that lacked in batches done, by readout unit.
    missing: Vec<u64>,
    /// `Short` messages that wait for their `Done`.
    shorts: Vec<(RuIndex, u32)>,
    answer: Answer<BuilderReport>,
}

/// Whether a unit has reported, which it does at its end.
#[derive(Debug)]
enum Answer<Report> {
    Awaited,
    Given(Report),
    /// Never: the unit died, or its time was up.
    Lost,
}

impl<Report> Answer<Report> {
    fn is_awaited(&self) -> bool {
        matches!(self, Answer::Awaited)
    }

    fn is_lost(&self) -> bool {
        matches!(self, Answer::Lost)
    }

    /// Takes a report, unless the unit counts as lost already.
    fn give(&mut self, report: Report) -> bool {
        if self.is_lost() {
            return false;
        }
        *self = Answer::Given(report);
        true
    }

    /// The report, if there is one. Nobody asks again.
    fn take(&mut self) -> Option<Report> {
        match std::mem::replace(self, Answer::Lost) {
            Answer::Given(report) => Some(report),
            Answer::Awaited | Answer::Lost => None,
        }
    }

    /// Gives the unit up, unless it has reported.
    fn lose(&mut self) -> bool {
        if matches!(self, Answer::Given(_)) {
            return false;
        }
        *self = Answer::Lost;
        true
    }
}

/// The event manager.
#[derive(Debug)]
pub struct Manager {
    plan: Plan,
    next_batch: BatchId,
    /// Batches before this one may be assigned.
    released: u64,
    batches_done: u64,
    done: Totals,
    slots: Vec<(Life, Slot)>,
    deadlines: Deadlines,
    builders: Vec<Builder>,
    readouts: Vec<Answer<ReadoutReport>>,
    rotation: Rotation,
    phase: Phase,
    cause: StopCause,
    next_alive: Nanos,
    outbox: VecDeque<Transmit>,
    account: Option<Account>,
}

impl Manager {
    /// A manager at the start of a run: no slot is granted yet.
    pub fn new(plan: Plan, now: Nanos) -> Manager {
        let mut base = 0;
        let builders: Vec<_> = plan
            .slots
            .iter()
            .map(|slots| {
                let slots = usize::from(slots.get());
                let builder = Builder {
                    base,
                    credits: VecDeque::with_capacity(slots),
                    events_assigned: 0,
                    done: Totals::default(),
                    missing: vec![0; plan.readouts()],
                    shorts: Vec::with_capacity(plan.readouts()),
                    answer: Answer::Awaited,
                };
                base += slots;
                builder
            })
            .collect();
        Manager {
            next_batch: BatchId(0),
            released: u64::MAX,
            batches_done: 0,
            done: Totals::default(),
            slots: vec![(Life(0), Slot::Busy); base],
            deadlines: Deadlines::new(base),
            rotation: Rotation::new(builders.len(), 0),
            builders,
            readouts: (0..plan.readouts()).map(|_| Answer::Awaited).collect(),
            phase: Phase::Running,
            cause: StopCause::EndOfRun,
            next_alive: now,
            outbox: VecDeque::with_capacity(4),
            account: None,
            plan,
        }
    }

    /// A message from a unit. Breaking a rule stops the run; the cause names the sender and the rule.
    pub fn handle_message(&mut self, from: Unit, message: Message, now: Nanos) {
        if self.phase == Phase::Finished || self.is_lost(from) {
            return;
        }
        let result = match (from, message) {
            (Unit::Builder(bu), Message::Grant { builder, slot, life }) if bu == builder => {
                self.grant(builder, slot, life)
            }
            (Unit::Builder(bu), Message::Short { builder, slot, life, readout, missing })
                if bu == builder =>
            {
                self.short(builder, slot, life, readout, missing)
            }
            (Unit::Builder(bu), Message::Done { builder, slot, life, batch, verdict }) if bu == builder => {
                self.done(builder, slot, life, batch, verdict, now)
            }
            (_, Message::Fault { cause }) => {
                self.stop(cause, now);
                Ok(())
            }
            _ => Err(Rule::NotYours),
        };
        if let Err(rule) = result {
            self.stop(StopCause::Protocol { by: from, rule }, now);
        }
    }

    /// Bytes from that unit did not decode.
    pub fn handle_malformed(&mut self, from: Unit, now: Nanos) {
        self.stop(StopCause::Protocol { by: from, rule: Rule::Malformed }, now);
    }

    /// A unit died. Losing one that has reported is nothing: it was free to go.
    pub fn handle_lost(&mut self, unit: Unit, now: Nanos) {
        if self.phase == Phase::Finished {
            return;
        }
        let lost = match unit {
            Unit::Manager => false,
            Unit::Readout(ru) => self.readouts[ru.index()].lose(),
            Unit::Builder(bu) => self.builders[bu.index()].answer.lose(),
        };
        if !lost {
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

    /// Data taking: the events of so many batches have been taken, no later ones. Whoever never says so has all
    /// events at hand from the start.
    ///
    /// Where traffic is shaped, batches are given out in rounds, one for each builder unit (see [`shape`](super::shape)).
    pub fn handle_taken(&mut self, batches: u64) {
        let all = self.plan.batches().get();
        self.released = match self.plan.shape {
            Shape::Rotation if batches < all => batches - batches % self.builders.len() as u64,
            _ => batches,
        };
    }

    /// Someone wants the run to end.
    pub fn handle_stop_request(&mut self, now: Nanos) {
        self.stop(StopCause::Requested, now);
    }

    /// A readout unit's report; it may go.
    pub fn handle_readout_report(&mut self, ru: RuIndex, report: ReadoutReport, now: Nanos) {
        let cause = report.cause;
        if self.phase != Phase::Finished && self.readouts[ru.index()].give(report) {
            self.stop(cause, now);
            self.advance(now);
        }
    }

    /// A builder unit's report; it may go.
    pub fn handle_builder_report(&mut self, bu: BuIndex, report: BuilderReport, now: Nanos) {
        let cause = report.cause;
        if self.phase != Phase::Finished && self.builders[bu.index()].answer.give(report) {
            self.stop(cause, now);
            self.advance(now);
        }
    }

    /// What there is to send: a stop before anything else, then as many assignments as credits allow.
    pub fn poll_transmit(&mut self, now: Nanos) -> Option<Transmit> {
        if let Some(transmit) = self.outbox.pop_front() {
            return Some(transmit);
        }
        if self.phase != Phase::Running || self.next_batch.0 >= self.released {
            return None;
        }
        let batch = self.plan.batch(self.next_batch)?;
        let party = self.rotation.take_turn()?;
        let builder = BuIndex(party as u16);
        let unit = &mut self.builders[party];
        let slot = unit.credits.pop_front().expect("a builder unit is ready only while it has credits");
        self.rotation.set_ready(party, !unit.credits.is_empty());
        unit.events_assigned += u64::from(batch.events);
        let at = unit.base + slot.index();
        self.slots[at].1 = Slot::Assigned(batch);
        // One timeout to arrive and one to be processed, which the builder unit watches more closely;
        // the third is for its answer.
        self.deadlines.start(at, now + 3 * self.plan.timeout);
        self.next_batch.0 += 1;
        let assignment = Assignment { batch, builder, slot, life: self.slots[at].0 };
        Some(Transmit { to: To::ReadoutsAnd(builder), message: Message::Assign(assignment) })
    }

    /// When [`handle_timeout`](Self::handle_timeout) has to be called next.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        let due = match self.phase {
            Phase::Running => self.deadlines.earliest().map_or(self.next_alive, |at| at.min(self.next_alive)),
            Phase::StoppingReadouts { until } | Phase::StoppingBuilders { until } => {
                until.min(self.next_alive)
            }
            Phase::Finished => return None,
        };
        Some(due)
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Nanos) {
        if self.phase == Phase::Finished {
            return;
        }
        if self.next_alive <= now {
            self.next_alive = now + self.plan.timeout / 4;
            self.outbox.push_back(Transmit { to: To::Units, message: Message::Alive });
        }
        match self.phase {
            Phase::Running => {
                if let Some(at) = self.deadlines.pop_due(now)
                    && let Slot::Assigned(batch) = self.slots[at].1
                {
                    self.stop(StopCause::TimedOut { by: Unit::Manager, batch: batch.id }, now);
                }
            }
            Phase::StoppingReadouts { until } if until <= now => {
                self.readouts.iter_mut().for_each(|answer| _ = answer.lose());
                self.advance(now);
            }
            Phase::StoppingBuilders { until } if until <= now => {
                self.builders.iter_mut().for_each(|unit| _ = unit.answer.lose());
                self.advance(now);
            }
            _ => {}
        }
    }

    /// The account, once, when the run is over.
    pub fn poll_finished(&mut self) -> Option<Account> {
        self.account.take()
    }

    /// How far the run is.
    pub fn progress(&self) -> Progress {
        Progress { assigned: self.next_batch.0, done: self.done }
    }

    fn is_lost(&self, unit: Unit) -> bool {
        match unit {
            Unit::Manager => false,
            Unit::Readout(ru) => self.readouts.get(ru.index()).is_none_or(Answer::is_lost),
            Unit::Builder(bu) => self.builders.get(bu.index()).is_none_or(|unit| unit.answer.is_lost()),
        }
    }

    fn slot_at(&self, builder: BuIndex, slot: SlotIndex) -> Result<usize, Rule> {
        let known = self.plan.has_slot(builder, slot);
        known.then(|| self.builders[builder.index()].base + slot.index()).ok_or(Rule::Unknown)
    }

    fn grant(&mut self, builder: BuIndex, slot: SlotIndex, life: Life) -> Result<(), Rule> {
        let at = self.slot_at(builder, slot)?;
        let (last, state) = &mut self.slots[at];
        if !matches!(state, Slot::Busy) {
            return Err(Rule::GrantOfBusySlot);
        }
        if life != last.next() {
            return Err(Rule::WrongLife);
        }
        (*last, *state) = (life, Slot::Granted);
        self.builders[builder.index()].credits.push_back(slot);
        self.rotation.set_ready(builder.index(), true);
        Ok(())
    }

    /// The batch that the slot holds in that life.
    fn assigned(&self, at: usize, life: Life) -> Result<Batch, Rule> {
        match self.slots[at] {
            (present, Slot::Assigned(batch)) if present == life => Ok(batch),
            (_, Slot::Assigned(_)) => Err(Rule::WrongLife),
            _ => Err(Rule::NotAssigned),
        }
    }

    fn short(
        &mut self,
        builder: BuIndex,
        slot: SlotIndex,
        life: Life,
        readout: RuIndex,
        missing: u32,
    ) -> Result<(), Rule> {
        let batch = self.assigned(self.slot_at(builder, slot)?, life)?;
        if readout.index() >= self.readouts.len() {
            return Err(Rule::Unknown);
        }
        let shorts = &mut self.builders[builder.index()].shorts;
        if missing > self.plan.nominal_fragments(readout, batch.events) || shorts.len() == self.readouts.len()
        {
            return Err(Rule::TooManyFragments);
        }
        shorts.push((readout, missing));
        Ok(())
    }

    fn done(
        &mut self,
        builder: BuIndex,
        slot: SlotIndex,
        life: Life,
        id: BatchId,
        verdict: Verdict,
        now: Nanos,
    ) -> Result<(), Rule> {
        let at = self.slot_at(builder, slot)?;
        let batch = self.assigned(at, life)?;
        if batch.id != id {
            return Err(Rule::NotAssigned);
        }
        if verdict.events() != u32::from(batch.events) || verdict.accepted > verdict.built.events {
            return Err(Rule::WrongEventCount);
        }
        self.slots[at].1 = Slot::Busy;
        self.deadlines.stop(at);
        let unit = &mut self.builders[builder.index()];
        unit.done += verdict;
        for (ru, missing) in unit.shorts.drain(..) {
            unit.missing[ru.index()] += u64::from(missing);
        }
        self.done += verdict;
        self.batches_done += 1;
        if self.batches_done == self.plan.batches().get() {
            self.stop(StopCause::EndOfRun, now);
        }
        Ok(())
    }

    /// Begins the stopping sequence if it has not begun. The first cause counts.
    fn stop(&mut self, cause: StopCause, now: Nanos) {
        if self.phase != Phase::Running {
            return;
        }
        self.cause = cause;
        // Readout units bound their own drain; twice that includes their answers' way.
        self.phase = Phase::StoppingReadouts { until: now + 2 * self.plan.drain };
        self.outbox.push_back(Transmit { to: To::Units, message: Message::Stop { cause } });
        self.advance(now);
    }

    /// Goes on with the stopping sequence when all whom it waits for have reported or are lost.
    fn advance(&mut self, now: Nanos) {
        if matches!(self.phase, Phase::StoppingReadouts { .. })
            && !self.readouts.iter().any(Answer::is_awaited)
        {
            self.phase = Phase::StoppingBuilders { until: now + 2 * self.plan.drain };
            self.outbox.push_back(Transmit { to: To::Builders, message: Message::Settle });
        }
        if matches!(self.phase, Phase::StoppingBuilders { .. })
            && !self.builders.iter().any(|unit| unit.answer.is_awaited())
        {
            self.phase = Phase::Finished;
            self.account = Some(self.close());
        }
    }

    /// What this manager knows of the builder units.
    pub fn report(&self) -> ManagerReport {
        let views = self.builders.iter().zip(&self.plan.slots).map(|(unit, slots)| {
            let open = (0..slots.get()).filter_map(|slot| match self.slots[unit.base + usize::from(slot)] {
                (life, Slot::Assigned(batch)) => Some(OpenBatch { slot: SlotIndex(slot), life, batch }),
                _ => None,
            });
            let events = unit.done.events();
            let arrived = self.plan.sources.iter().zip(&unit.missing);
            BuilderView {
                events_assigned: unit.events_assigned,
                done: unit.done,
                arrived: arrived.map(|(n, missing)| events * u64::from(n.get()) - missing).collect(),
                open: open.collect(),
            }
        });
        ManagerReport { cause: self.cause, builders: views.collect() }
    }

    fn close(&mut self) -> Account {
        let mut ledger = Ledger::new(self.plan.clone());
        ledger.manager(self.report());
        for (i, answer) in self.readouts.iter_mut().enumerate() {
            if let Some(report) = answer.take() {
                ledger.readout(RuIndex(i as u16), report);
            }
        }
        for (b, unit) in self.builders.iter_mut().enumerate() {
            if let Some(report) = unit.answer.take() {
                ledger.builder(BuIndex(b as u16), report);
            }
        }
        ledger.close(self.cause)
    }
}

#[cfg(test)]
mod tests {
    use super::super::account::BatchTally;
    use super::super::plan::small;
    use super::*;

    const NOW: Nanos = Nanos(1_000);

    /// A manager of one readout unit with 2 sources and of builder units with these slots.
    fn manager(slots: &[u16]) -> Manager {
        Manager::new(small(&[2], slots, 12, 4), NOW)
    }

    fn grant(manager: &mut Manager, builder: u16, slot: u16, life: u32) {
        let grant = Message::Grant { builder: BuIndex(builder), slot: SlotIndex(slot), life: Life(life) };
        manager.handle_message(Unit::Builder(BuIndex(builder)), grant, NOW);
    }

    fn done(builder: u16, slot: u16, life: u32, batch: u64) -> Message {
        let built = BatchTally { events: 4, fragments: 8 };
        let verdict = Verdict { built, ..Verdict::default() };
        let (builder, slot, batch) = (BuIndex(builder), SlotIndex(slot), BatchId(batch));
        Message::Done { builder, slot, life: Life(life), batch, verdict }
    }

    fn sent(manager: &mut Manager) -> Vec<Message> {
        std::iter::from_fn(|| manager.poll_transmit(NOW)).map(|transmit| transmit.message).collect()
    }

    fn assigned(manager: &mut Manager) -> Vec<(u64, u16, u16)> {
        let place = |message| match message {
            Message::Assign(a) => (a.batch.id.0, a.builder.0, a.slot.0),
            other => panic!("expected an assignment, not {other:?}"),
        };
        sent(manager).into_iter().map(place).collect()
    }

    #[test]
    fn nothing_is_assigned_without_a_credit_and_builder_units_take_turns() {
        let mut manager = manager(&[2, 1]);
        assert_eq!(assigned(&mut manager), []);
        grant(&mut manager, 0, 1, 1);
        grant(&mut manager, 0, 0, 1);
        grant(&mut manager, 1, 0, 1);
        assert_eq!(assigned(&mut manager), [(0, 0, 1), (1, 1, 0), (2, 0, 0)]);
        assert_eq!(manager.progress().assigned, 3);
    }

    #[test]
    fn what_has_been_taken_is_given_out_in_rounds_and_the_last_may_be_short() {
        let mut manager = manager(&[3, 3]);
        (0..3).for_each(|slot| (0..2).for_each(|builder| grant(&mut manager, builder, slot, 1)));
        manager.handle_taken(1);
        assert_eq!(assigned(&mut manager), []);
        manager.handle_taken(2);
        assert_eq!(assigned(&mut manager), [(0, 0, 0), (1, 1, 0)]);
        manager.handle_taken(3);
        assert_eq!(assigned(&mut manager), [(2, 0, 1)]);
    }

    fn rule_broken_by(messages: &[(u16, Message)]) -> Rule {
        let mut manager = manager(&[2, 1]);
        grant(&mut manager, 0, 0, 1);
        assert_eq!(assigned(&mut manager), [(0, 0, 0)]);
        for (from, message) in messages {
            manager.handle_message(Unit::Builder(BuIndex(*from)), *message, NOW);
        }
        match sent(&mut manager)[..] {
            [Message::Stop { cause: StopCause::Protocol { by: Unit::Builder(_), rule } }] => rule,
            ref other => panic!("expected a stop for a broken rule, not {other:?}"),
        }
    }

    #[test]
    fn broken_rules_stop_the_run_by_name() {
        let grant =
            |slot, life| Message::Grant { builder: BuIndex(0), slot: SlotIndex(slot), life: Life(life) };
        let short = |readout, missing| Message::Short {
            builder: BuIndex(0),
            slot: SlotIndex(0),
            life: Life(1),
            readout: RuIndex(readout),
            missing,
        };
        let verdict = Verdict { built: BatchTally { events: 3, fragments: 6 }, ..Verdict::default() };
        let (builder, slot) = (BuIndex(0), SlotIndex(0));
        let partial = Message::Done { builder, slot, life: Life(1), batch: BatchId(0), verdict };
        assert_eq!(rule_broken_by(&[(0, grant(0, 2))]), Rule::GrantOfBusySlot);
        assert_eq!(rule_broken_by(&[(0, grant(1, 2))]), Rule::WrongLife);
        assert_eq!(rule_broken_by(&[(0, grant(2, 1))]), Rule::Unknown);
        assert_eq!(rule_broken_by(&[(1, grant(0, 1))]), Rule::NotYours);
        assert_eq!(rule_broken_by(&[(0, Message::Settle)]), Rule::NotYours);
        assert_eq!(rule_broken_by(&[(0, done(0, 0, 2, 0))]), Rule::WrongLife);
        assert_eq!(rule_broken_by(&[(0, done(0, 0, 1, 1))]), Rule::NotAssigned);
        assert_eq!(rule_broken_by(&[(0, done(0, 1, 0, 0))]), Rule::NotAssigned);
        assert_eq!(rule_broken_by(&[(0, partial)]), Rule::WrongEventCount);
        assert_eq!(rule_broken_by(&[(0, short(1, 1))]), Rule::Unknown);
        assert_eq!(rule_broken_by(&[(0, short(0, 9))]), Rule::TooManyFragments);
        assert_eq!(rule_broken_by(&[(0, short(0, 1)), (0, short(0, 1))]), Rule::TooManyFragments);
    }

    #[test]
    fn nothing_is_assigned_once_the_run_stops() {
        let mut manager = manager(&[2]);
        grant(&mut manager, 0, 0, 1);
        manager.handle_stop_request(NOW);
        assert_eq!(sent(&mut manager), [Message::Stop { cause: StopCause::Requested }]);
        grant(&mut manager, 0, 1, 1);
        assert_eq!(sent(&mut manager), []);
    }

    #[test]
    fn a_death_explains_the_write_that_failed_before_it() {
        let mut manager = manager(&[1]);
        let cause = StopCause::Unreachable { by: RuIndex(0), peer: BuIndex(0) };
        manager.handle_message(Unit::Readout(RuIndex(0)), Message::Fault { cause }, NOW);
        manager.handle_lost(Unit::Builder(BuIndex(0)), NOW);
        manager.handle_lost(Unit::Readout(RuIndex(0)), NOW);
        let account = manager.poll_finished().unwrap();
        assert_eq!(account.cause, StopCause::Lost(Unit::Builder(BuIndex(0))));
        assert!(account.is_closed() && !account.is_success());
        assert_eq!(manager.poll_finished(), None);
    }

    #[test]
    fn units_that_do_not_answer_are_lost_after_a_bounded_time() {
        let mut manager = manager(&[1]);
        manager.handle_stop_request(NOW);
        let mut waits = Vec::new();
        while let Some(at) = manager.poll_timeout() {
            manager.handle_timeout(at);
            waits.push(at);
        }
        assert!(waits.last() <= Some(&(NOW + 4 * manager.plan.drain)), "{waits:?}");
        let lost = manager.poll_finished().unwrap().lost;
        assert_eq!(lost, [Unit::Readout(RuIndex(0)), Unit::Builder(BuIndex(0))]);
    }
}
