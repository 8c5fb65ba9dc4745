//! How the manager goes on when a unit is lost, and when one joins.

use super::{BuilderState, CurrentReadout, Manager, PendingReport, Phase, Receivers, Slot, Transmit};
use crate::message::Message;
use crate::plan::Batch;
use crate::recovery::{Membership, OnBuilderLoss, OnReadoutLoss, ReadoutMember};
use crate::report::{BuilderReport, SlotState};
use crate::types::{BuIndex, Instant, RuIndex, SlotIndex, StopCause, Unit};

/// A batch that waits for a builder unit, because another one was lost or no unit got its assignment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rebuild {
    pub(super) batch: Batch,
    /// Its slot at the lost builder unit, in the tables over all slots; `None` if no unit had it.
    pub(super) from: Option<usize>,
    /// Whether a lost builder unit may have stored its events.
    pub(super) again: bool,
}

impl Manager {
    /// The next unit whose process has to be ended: the run goes on without it, but it may still be there.
    pub fn poll_excluded(&mut self) -> Option<Unit> {
        self.excluded.pop_front()
    }

    /// The next unit that the run went on without and that may join again: it is not there any more, or is being ended.
    pub fn poll_departed(&mut self) -> Option<Unit> {
        self.departed.pop_front()
    }

    /// The index that a unit gets if it joins now. `unit` may have any of its indices. `None` if the unit is not lost, may
    /// not join again, or the run ends.
    pub fn join_candidate(&self, unit: Unit) -> Option<Unit> {
        if self.phase != Phase::Running {
            return None;
        }
        match unit {
            Unit::Manager => None,
            Unit::Readout(ru) => {
                let current = self.current_readouts[self.plan.readout_role(ru).index()].index;
                let may_join = self.is_recovered(Unit::Readout(current));
                self.plan.next_readout(current).filter(|_| may_join).map(Unit::Readout)
            }
            Unit::Builder(bu) => {
                let mut last = self.plan.builder_role(bu);
                while let Some(next) = self.plan.next_builder(last)
                    && self.builders[next.index()].membership != BuilderState::Vacant
                {
                    last = next;
                }
                let may_join = self.builders[last.index()].membership == BuilderState::Gone;
                self.plan.next_builder(last).filter(|_| may_join).map(Unit::Builder)
            }
        }
    }

    /// Whether a unit that is in the run may join again once it is lost.
    pub fn has_restart(&self, unit: Unit) -> bool {
        let is_running = self.phase == Phase::Running;
        match unit {
            Unit::Manager => false,
            Unit::Readout(ru) => {
                let current = self.current_readouts[self.plan.readout_role(ru).index()].index;
                is_running && self.plan.next_readout(current).is_some()
            }
            Unit::Builder(bu) => {
                let role = self.plan.builder_role(bu);
                let mut vacant = (0..).map(BuIndex).zip(&self.builders);
                is_running
                    && vacant.any(|(bu, unit)| {
                        unit.membership == BuilderState::Vacant && self.plan.builder_role(bu) == role
                    })
            }
        }
    }

    /// The units of the run.
    pub fn membership(&self) -> Membership {
        let readouts = self.current_readouts.iter().map(|current| ReadoutMember {
            index: current.index,
            is_lost: self.readouts[current.index.index()].is_lost(),
            first_batch: current.first_batch,
        });
        let builders = (0..).map(BuIndex).zip(&self.builders);
        Membership {
            term: self.term,
            readouts: readouts.collect(),
            absent_builders: builders
                .filter(|(_, unit)| !unit.membership.is_present())
                .map(|(bu, _)| bu)
                .collect(),
            first_batch: self.next_batch,
            first_event: self.events_cut,
        }
    }

    /// A unit has connected to its peers and joins the run, with the index that [`join_candidate`](Self::join_candidate)
    /// gave it. Returns the units of the run with it. `None` if it cannot join any more.
    pub fn handle_joined(&mut self, unit: Unit) -> Option<Membership> {
        if self.join_candidate(unit) != Some(unit) {
            return None;
        }
        match unit {
            Unit::Manager => return None,
            Unit::Readout(ru) => {
                let role = self.plan.readout_role(ru);
                let first_batch = self.next_batch;
                self.current_readouts[role.index()] = CurrentReadout { index: ru, first_batch };
                self.first_batches[ru.index()] = first_batch;
                self.readouts[ru.index()] = PendingReport::Awaited;
                let message = Message::Joined { readout: ru, first_batch };
                self.outbox.push_back(Transmit { to: Receivers::Builders, message });
            }
            Unit::Builder(bu) => {
                let builder = &mut self.builders[bu.index()];
                builder.membership = BuilderState::Active;
                builder.report = PendingReport::Awaited;
            }
        }
        self.joined.push(unit);
        self.is_replica_due = true;
        if self.has_readout() && self.has_builder() {
            self.waits_for_unit = None;
        }
        Some(self.membership())
    }

    /// Whether a readout unit is there. Without one, no batch is assigned.
    pub(super) fn has_readout(&self) -> bool {
        self.current_readouts.iter().any(|current| !self.readouts[current.index.index()].is_lost())
    }

    fn has_builder(&self) -> bool {
        self.builders.iter().any(|unit| unit.membership == BuilderState::Active)
    }

    /// Waits for a restart if no unit of a kind is left.
    pub(super) fn wait_if_alone(&mut self, cause: StopCause, now: Instant) {
        if !self.has_readout() || !self.has_builder() {
            self.waits_for_unit.get_or_insert((now + self.plan.recovery.join_timeout, cause));
        }
    }

    /// Whether the run goes on without that unit.
    pub fn is_recovered(&self, unit: Unit) -> bool {
        self.recovered.contains(&unit)
    }

    /// A unit reports that the run cannot continue as it is.
    pub(super) fn fault(&mut self, from: Unit, cause: StopCause, now: Instant) {
        let goes_on = match (from, cause) {
            (Unit::Builder(_), StopCause::Lost(Unit::Readout(ru))) => self.exclude_readout(ru, cause, now),
            (Unit::Builder(bu), StopCause::ReadoutLate { by, readout }) if by == bu => {
                self.exclude_readout(readout, cause, now)
            }
            (Unit::Readout(_), StopCause::Unreachable { peer, .. }) => self.exclude_builder(peer, cause, now),
            (
                Unit::Builder(bu),
                StopCause::CardLost(of)
                | StopCause::OutputFailed(of)
                | StopCause::TimedOut { by: Unit::Builder(of), .. },
            ) if of == bu => self.exclude_builder(bu, cause, now),
            _ => false,
        };
        if !goes_on {
            self.stop(cause, now);
        }
    }

    /// The batch of that slot was not done in time.
    pub(super) fn batch_timed_out(&mut self, at: usize, batch: Batch, now: Instant) {
        let cause = StopCause::TimedOut { by: Unit::Manager, batch: batch.id };
        let builder = self.builders.partition_point(|unit| unit.base <= at) - 1;
        if !self.exclude_builder(BuIndex(builder as u16), cause, now) {
            self.stop(cause, now);
        }
    }

    /// Stops using a builder unit that may still be there. Its batches are assigned again once it has reported or ended.
    /// False if the run cannot go on without it.
    pub(super) fn exclude_builder(&mut self, bu: BuIndex, cause: StopCause, now: Instant) -> bool {
        let Some(unit) = self.builders.get(bu.index()) else { return false };
        if matches!(unit.membership, BuilderState::Excluded { .. } | BuilderState::Gone) {
            return self.phase == Phase::Running;
        }
        if !self.can_go_on_without_builder(bu) {
            return false;
        }
        self.leave(bu, self.excluded_state(cause, now), cause, now);
        let to = Receivers::Unit(Unit::Builder(bu));
        self.outbox.push_back(Transmit { to, message: Message::Stop { cause } });
        self.outbox.push_back(Transmit { to, message: Message::Drain });
        self.excluded.push_back(Unit::Builder(bu));
        true
    }

    /// State of a builder unit that is excluded at that time.
    pub(super) fn excluded_state(&self, cause: StopCause, now: Instant) -> BuilderState {
        let until = now + 2 * self.plan.timeout + 4 * self.plan.drain_timeout;
        BuilderState::Excluded { cause, until }
    }

    /// A builder unit ended. False if the run cannot go on without it.
    pub(super) fn remove_builder(&mut self, bu: BuIndex, now: Instant) -> bool {
        let membership = self.builders[bu.index()].membership;
        let is_excluded = matches!(membership, BuilderState::Excluded { .. }) && self.phase == Phase::Running;
        if !is_excluded {
            if !self.can_go_on_without_builder(bu) {
                return false;
            }
            self.leave(bu, BuilderState::Gone, StopCause::Lost(Unit::Builder(bu)), now);
        }
        self.assign_again(bu);
        true
    }

    /// An excluded builder unit reported: batches that it finished are done, though their `Done` may not have arrived.
    pub(super) fn settle_builder(&mut self, bu: BuIndex, report: &BuilderReport, now: Instant) {
        self.done += report.done.since(&self.builders[bu.index()].done);
        let base = self.builders[bu.index()].base;
        for (position, slot) in report.slots.iter().enumerate() {
            if !self.plan.has_slot(bu, SlotIndex(position as u16)) {
                continue;
            }
            let (generation, state) = self.slots[base + position];
            let is_finished = slot.generation > generation
                || (slot.generation == generation && slot.state == SlotState::Finished);
            if let Slot::Assigned(batch) = state
                && is_finished
            {
                self.slots[base + position].1 = Slot::Busy;
                self.events_done += u64::from(batch.events);
                self.events_settled += u64::from(batch.events);
            }
        }
        self.assign_again(bu);
        self.release_batches();
        self.finish_if_all_done(now);
    }

    /// Stops using a builder unit, and starts to use a spare one.
    fn leave(&mut self, bu: BuIndex, membership: BuilderState, cause: StopCause, now: Instant) {
        self.is_replica_due = true;
        let unit = &mut self.builders[bu.index()];
        unit.membership = membership;
        unit.credits.clear();
        let slots = unit.base..unit.base + usize::from(self.plan.slots[bu.index()].get());
        slots.for_each(|at| self.deadlines.stop(at));
        self.round_robin.set_ready(bu.index(), false);
        self.recovered.push(Unit::Builder(bu));
        self.release = Some(self.next_batch);
        let message = Message::Lost { unit: Unit::Builder(bu) };
        self.outbox.push_back(Transmit { to: Receivers::Readouts, message });
        if let Some(spare) = self.builders.iter().position(|unit| unit.membership == BuilderState::Spare) {
            let unit = &mut self.builders[spare];
            unit.membership = BuilderState::Active;
            self.round_robin.set_ready(spare, !unit.credits.is_empty());
        }
        self.wait_if_alone(cause, now);
    }

    /// Queues the unfinished batches of a builder unit that stores no event any more.
    fn assign_again(&mut self, bu: BuIndex) {
        self.is_replica_due = true;
        self.builders[bu.index()].membership = BuilderState::Gone;
        self.departed.push_back(Unit::Builder(bu));
        let base = self.builders[bu.index()].base;
        for from in base..base + usize::from(self.plan.slots[bu.index()].get()) {
            if let (_, Slot::Assigned(batch)) = self.slots[from] {
                self.slots[from].1 = Slot::Moved { batch, again: false };
                self.rebuild.push_back(Rebuild { batch, from: Some(from), again: true });
            }
        }
        self.rebuild.make_contiguous().sort_unstable_by_key(|rebuild| rebuild.batch.id);
    }

    /// After a loss, tells readout units that they need not keep the batches from before it, once all are done.
    pub(super) fn release_batches(&mut self) {
        let Some(before) = self.release else { return };
        let is_before = |batch: &Batch| batch.id < before;
        let assigned = |slot: &(_, Slot)| matches!(&slot.1, Slot::Assigned(batch) if is_before(batch));
        if self.rebuild.iter().any(|rebuild| is_before(&rebuild.batch)) || self.slots.iter().any(assigned) {
            return;
        }
        self.release = None;
        self.outbox.push_back(Transmit { to: Receivers::Readouts, message: Message::Release { before } });
    }

    fn can_go_on_without_builder(&self, bu: BuIndex) -> bool {
        let others = self.builders.iter().enumerate().filter(|(other, _)| *other != bu.index());
        let mut others = others.map(|(_, unit)| unit);
        self.phase == Phase::Running
            && self.plan.recovery.builder == OnBuilderLoss::Rebuild
            && others.any(|unit| unit.membership.is_present() || unit.membership == BuilderState::Vacant)
    }

    /// The run goes on without a readout unit: builder units close its connection and do not wait for it. False if the
    /// run cannot go on.
    pub(super) fn exclude_readout(&mut self, ru: RuIndex, cause: StopCause, now: Instant) -> bool {
        if self.phase != Phase::Running || ru.index() >= self.readouts.len() {
            return false;
        }
        let unit = Unit::Readout(ru);
        if self.is_recovered(unit) {
            return true;
        }
        let current = self.current_readouts.iter().map(|current| current.index);
        if !current.clone().any(|current| current == ru) {
            return false;
        }
        let mut others = current.filter(|other| *other != ru);
        let may_go_on = others.any(|other| !self.readouts[other.index()].is_lost())
            || self.plan.next_readout(ru).is_some();
        if self.plan.recovery.readout == OnReadoutLoss::Stop || !may_go_on {
            return false;
        }
        // A report that comes later does not say what arrived before it was excluded.
        self.readouts[ru.index()].mark_lost();
        self.is_replica_due = true;
        self.recovered.push(unit);
        self.excluded.push_back(unit);
        self.departed.push_back(unit);
        self.outbox.push_back(Transmit { to: Receivers::Builders, message: Message::Lost { unit } });
        self.outbox.push_back(Transmit { to: Receivers::Unit(unit), message: Message::Stop { cause } });
        self.wait_if_alone(cause, now);
        true
    }

    /// When an excluded builder unit has to have reported or ended, or a missing unit has to have joined.
    pub(super) fn exclusion_timeout(&self) -> Option<(Instant, StopCause)> {
        let excluded = self.builders.iter().filter_map(|unit| match unit.membership {
            BuilderState::Excluded { cause, until } => Some((until, cause)),
            _ => None,
        });
        excluded.chain(self.waits_for_unit).min_by_key(|(until, _)| *until)
    }
}
