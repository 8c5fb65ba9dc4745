//! How the manager goes on when a unit is lost.

use super::{Manager, Membership, Phase, Receivers, Slot, Transmit};
use crate::message::Message;
use crate::plan::Batch;
use crate::recovery::{OnBuilderLoss, OnReadoutLoss};
use crate::report::{BuilderReport, SlotState};
use crate::types::{BuIndex, Instant, RuIndex, SlotIndex, StopCause, Unit};

/// A batch of a lost builder unit that waits for another one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rebuild {
    pub(super) batch: Batch,
    /// Its slot at the lost builder unit, in the tables over all slots.
    pub(super) from: usize,
}

impl Manager {
    /// The next unit whose process has to be ended: the run goes on without it, but it may still be there.
    pub fn poll_excluded(&mut self) -> Option<Unit> {
        self.excluded.pop_front()
    }

    /// Whether the run goes on without that unit.
    pub fn is_recovered(&self, unit: Unit) -> bool {
        self.recovered.contains(&unit)
    }

    /// A unit reports that the run cannot continue as it is.
    pub(super) fn fault(&mut self, from: Unit, cause: StopCause, now: Instant) {
        let goes_on = match (from, cause) {
            (Unit::Builder(_), StopCause::Lost(Unit::Readout(ru))) => self.exclude_readout(ru, cause),
            (Unit::Builder(bu), StopCause::ReadoutLate { by, readout }) if by == bu => {
                self.exclude_readout(readout, cause)
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
    fn exclude_builder(&mut self, bu: BuIndex, cause: StopCause, now: Instant) -> bool {
        let Some(unit) = self.builders.get(bu.index()) else { return false };
        if matches!(unit.membership, Membership::Excluded { .. } | Membership::Gone) {
            return self.phase == Phase::Running;
        }
        if !self.can_go_on_without_builder(bu) {
            return false;
        }
        let until = now + 2 * self.plan.timeout + 4 * self.plan.drain_timeout;
        self.leave(bu, Membership::Excluded { cause, until });
        let to = Receivers::Unit(Unit::Builder(bu));
        self.outbox.push_back(Transmit { to, message: Message::Stop { cause } });
        self.outbox.push_back(Transmit { to, message: Message::Drain });
        self.excluded.push_back(Unit::Builder(bu));
        true
    }

    /// A builder unit ended. False if the run cannot go on without it.
    pub(super) fn remove_builder(&mut self, bu: BuIndex) -> bool {
        let membership = self.builders[bu.index()].membership;
        let is_excluded = matches!(membership, Membership::Excluded { .. }) && self.phase == Phase::Running;
        if !is_excluded {
            if !self.can_go_on_without_builder(bu) {
                return false;
            }
            self.leave(bu, Membership::Gone);
        }
        self.assign_again(bu);
        true
    }

    /// An excluded builder unit reported: batches that it finished are done, though their `Done` may not have arrived.
    pub(super) fn settle_builder(&mut self, bu: BuIndex, report: &BuilderReport, now: Instant) {
        let base = self.builders[bu.index()].base;
        for (position, slot) in report.slots.iter().enumerate() {
            if !self.plan.has_slot(bu, SlotIndex(position as u16)) {
                continue;
            }
            let (generation, state) = self.slots[base + position];
            let is_finished = slot.generation > generation
                || (slot.generation == generation && slot.state == SlotState::Finished);
            if matches!(state, Slot::Assigned(_)) && is_finished {
                self.slots[base + position].1 = Slot::Busy;
                self.batches_done += 1;
            }
        }
        self.assign_again(bu);
        self.release_batches();
        if self.batches_done == self.plan.batches().get() {
            self.stop(StopCause::EndOfRun, now);
        }
    }

    /// Stops using a builder unit, and starts to use a spare one.
    fn leave(&mut self, bu: BuIndex, membership: Membership) {
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
        if let Some(spare) = self.builders.iter().position(|unit| unit.membership == Membership::Spare) {
            let unit = &mut self.builders[spare];
            unit.membership = Membership::Active;
            self.round_robin.set_ready(spare, !unit.credits.is_empty());
        }
    }

    /// Queues the unfinished batches of a builder unit that stores no event any more.
    fn assign_again(&mut self, bu: BuIndex) {
        self.builders[bu.index()].membership = Membership::Gone;
        let base = self.builders[bu.index()].base;
        for from in base..base + usize::from(self.plan.slots[bu.index()].get()) {
            if let (_, Slot::Assigned(batch)) = self.slots[from] {
                self.slots[from].1 = Slot::Moved { batch, again: false };
                self.rebuild.push_back(Rebuild { batch, from });
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
            && others.any(|unit| matches!(unit.membership, Membership::Active | Membership::Spare))
    }

    /// The run goes on without a readout unit: builder units close its connection and do not wait for it. False if the
    /// run cannot go on.
    pub(super) fn exclude_readout(&mut self, ru: RuIndex, cause: StopCause) -> bool {
        if self.phase != Phase::Running || ru.index() >= self.readouts.len() {
            return false;
        }
        let unit = Unit::Readout(ru);
        if self.is_recovered(unit) {
            return true;
        }
        let mut others = (0..self.readouts.len()).filter(|&other| other != ru.index());
        let has_others = others.any(|other| !self.readouts[other].is_lost());
        if self.plan.recovery.readout == OnReadoutLoss::Stop || !has_others {
            return false;
        }
        // A report that comes later does not say what arrived before it was excluded.
        self.readouts[ru.index()].mark_lost();
        self.recovered.push(unit);
        self.excluded.push_back(unit);
        self.outbox.push_back(Transmit { to: Receivers::Builders, message: Message::Lost { unit } });
        self.outbox.push_back(Transmit { to: Receivers::Unit(unit), message: Message::Stop { cause } });
        true
    }

    /// When an excluded builder unit has to have reported or ended.
    pub(super) fn exclusion_timeout(&self) -> Option<(Instant, StopCause)> {
        let excluded = self.builders.iter().filter_map(|unit| match unit.membership {
            Membership::Excluded { cause, until } => Some((until, cause)),
            _ => None,
        });
        excluded.min_by_key(|(until, _)| *until)
    }
}
