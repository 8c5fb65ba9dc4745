//! The manager of a new term: its state, from the copy of the lost manager and the states of the units.

use super::recovery::Rebuild;
use super::{BuilderState, CurrentReadout, Manager, PendingReport, Phase, Receivers, Slot, Transmit};
use crate::message::{Assignment, Message};
use crate::plan::{Batch, Plan};
use crate::takeover::{
    BatchRange, BuilderRecord, BuilderState as State, LostBuilder, ManagerReplica, ReadoutState,
    ReplicaUpdate, TakeoverError, UnitStates,
};
use crate::types::{
    BatchId, BuIndex, EventNumber, Generation, Instant, RuIndex, SlotIndex, StopCause, Term, Unit,
};
use std::collections::BTreeSet;

impl Manager {
    /// The manager's term.
    pub fn term(&self) -> Term {
        self.term
    }

    /// What has changed since the standby manager's last copy. Send it before the messages of
    /// [`poll_transmit`](Self::poll_transmit).
    pub fn poll_replica(&mut self) -> Option<ReplicaUpdate> {
        let done = std::mem::take(&mut self.done_since_replica);
        if std::mem::take(&mut self.is_replica_due) {
            return Some(ReplicaUpdate::Whole(Box::new(self.replica())));
        }
        (!done.is_empty()).then_some(ReplicaUpdate::Done(done))
    }

    /// Whether a standby manager may join the run in progress.
    pub fn admits_standby(&self) -> bool {
        self.phase == Phase::Running && self.plan.recovery.has_standby()
    }

    /// A standby manager has joined the run: it gets a copy next.
    pub fn handle_standby_joined(&mut self) {
        self.is_replica_due = true;
    }

    /// A copy for the standby manager.
    pub fn replica(&self) -> ManagerReplica {
        let builders = || (0..).map(BuIndex).zip(&self.builders);
        let lost = builders().filter(|(_, unit)| {
            matches!(unit.membership, BuilderState::Gone | BuilderState::Excluded { .. })
        });
        ManagerReplica {
            membership: self.membership(),
            spares: builders()
                .filter(|(_, unit)| unit.membership == BuilderState::Spare)
                .map(|(bu, _)| bu)
                .collect(),
            excluding: builders()
                .filter(|(_, unit)| matches!(unit.membership, BuilderState::Excluded { .. }))
                .map(|(bu, _)| bu)
                .collect(),
            builders: builders()
                .filter(|(_, unit)| unit.membership.is_present())
                .map(|(bu, _)| self.record(bu))
                .collect(),
            lost_builders: lost
                .map(|(builder, unit)| LostBuilder {
                    builder,
                    view: self.view(builder),
                    report: unit.report.received().cloned(),
                })
                .collect(),
            events_settled: self.events_settled,
            first_batches: self.first_batches.clone(),
            recovered: self.recovered.clone(),
            joined: self.joined.clone(),
            is_paused: self.paused,
        }
    }

    /// The record of a builder unit that is there.
    fn record(&self, builder: BuIndex) -> BuilderRecord {
        let unit = &self.builders[builder.index()];
        let slots = unit.base..unit.base + usize::from(self.plan.slots[builder.index()].get());
        let finished = self.slots[slots].iter().map(|&(generation, slot)| match slot {
            Slot::Busy => generation,
            _ => Generation(generation.0.wrapping_sub(1)),
        });
        BuilderRecord {
            builder,
            done: unit.done,
            arrived: unit.arrived.clone(),
            finished: finished.collect(),
        }
    }

    /// The manager of a new term. `states` are the units' answers to the replica's membership with that term. The run
    /// goes on without units that have not answered: builder units among them, and those that the lost manager was excluding,
    /// are excluded until [`handle_lost`](Self::handle_lost).
    ///
    /// # Errors
    /// The run cannot go on: it ends as without a standby manager.
    pub fn resume(
        plan: Plan,
        replica: &ManagerReplica,
        states: &UnitStates,
        term: Term,
        now: Instant,
    ) -> Result<Manager, TakeoverError> {
        let mut manager = Manager::new(plan, now);
        (manager.term, manager.paused) = (term, replica.is_paused);
        manager.restore_units(replica, now)?;
        let mut missing = Vec::new();
        for unit in replica.units(manager.plan.builders()) {
            let state = match unit {
                Unit::Builder(bu) => states.builders.get(&bu),
                _ => None,
            };
            match (unit, state) {
                (Unit::Builder(bu), Some(state)) => manager.restore_builder(bu, state)?,
                (Unit::Builder(bu), None) => {
                    manager.restore_record(bu, replica)?;
                    missing.push(unit);
                }
                (Unit::Readout(ru), _) if states.readouts.contains_key(&ru) => {}
                _ => missing.push(unit),
            }
        }
        missing.iter().try_for_each(|&unit| manager.go_on_without(unit, now))?;
        let mut again = manager.restore_assignments(states)?;
        again.extend(states.builders.values().flat_map(|state| state.rebuilt.iter().copied()));
        manager.restore_rebuild(&again);
        let is_builder = |unit: &Unit| matches!(unit, Unit::Builder(_));
        // With this manager, or with one before it.
        let was_lost_with_manager = missing.iter().any(is_builder)
            || replica.recovered.contains(&Unit::Manager) && replica.recovered.iter().any(is_builder);
        manager.cut_unknown_batches(states, was_lost_with_manager)?;
        manager.go_on(now);
        Ok(manager)
    }

    /// A unit that has not sent its state is lost together with the manager.
    fn go_on_without(&mut self, unit: Unit, now: Instant) -> Result<(), TakeoverError> {
        let cause = StopCause::Lost(unit);
        let goes_on = match unit {
            Unit::Manager => false,
            Unit::Readout(ru) => self.exclude_readout(ru, cause, now),
            Unit::Builder(bu) => self.exclude_builder(bu, cause, now),
        };
        // It follows no manager of this term.
        self.outbox.retain(|transmit| transmit.to != Receivers::Unit(unit));
        goes_on.then_some(()).ok_or(TakeoverError::NoState(unit))
    }

    /// Which units are there, and the records of lost builder units.
    fn restore_units(&mut self, replica: &ManagerReplica, now: Instant) -> Result<(), TakeoverError> {
        let readouts = &replica.membership.readouts;
        let members = self.plan.readout_members();
        let is_member =
            |(role, ru): (usize, RuIndex)| ru.index() < members && self.plan.readout_role(ru).index() == role;
        if readouts.len() != self.plan.readouts()
            || replica.first_batches.len() != members
            || !readouts.iter().map(|member| member.index).enumerate().all(is_member)
        {
            return Err(TakeoverError::Replica);
        }
        for (current, member) in self.current_readouts.iter_mut().zip(readouts) {
            *current = CurrentReadout { index: member.index, first_batch: member.first_batch };
        }
        self.first_batches.clone_from(&replica.first_batches);
        (self.recovered, self.joined) = (replica.recovered.clone(), replica.joined.clone());
        for (ru, report) in (0..).map(|ru| Unit::Readout(RuIndex(ru))).zip(&mut self.readouts) {
            if replica.recovered.contains(&ru) {
                *report = PendingReport::Lost;
            } else if replica.joined.contains(&ru) {
                *report = PendingReport::Awaited;
            }
        }
        for (bu, unit) in (0..).map(BuIndex).zip(&mut self.builders) {
            if replica.membership.absent_builders.contains(&bu) {
                continue;
            }
            unit.report = PendingReport::Awaited;
            let is_spare = replica.spares.contains(&bu);
            unit.membership = if is_spare { BuilderState::Spare } else { BuilderState::Active };
        }
        self.events_settled = replica.events_settled;
        self.events_done = replica.events_settled;
        replica.lost_builders.iter().try_for_each(|lost| self.restore_lost(lost))?;
        replica.excluding.iter().try_for_each(|&bu| self.restore_excluded(bu, now))
    }

    /// A builder unit that the lost manager was excluding: its batches are assigned again once it has ended.
    fn restore_excluded(&mut self, bu: BuIndex, now: Instant) -> Result<(), TakeoverError> {
        let state = self.excluded_state(StopCause::Lost(Unit::Builder(bu)), now);
        let unit = self.builders.get_mut(bu.index()).ok_or(TakeoverError::Replica)?;
        (unit.membership, unit.report) = (state, PendingReport::Awaited);
        let slots = unit.base..unit.base + usize::from(self.plan.slots[bu.index()].get());
        for (_, slot) in &mut self.slots[slots] {
            if let Slot::Moved { batch, again: false } = *slot {
                *slot = Slot::Assigned(batch);
            }
        }
        Ok(())
    }

    /// A builder unit that is lost together with the manager: what it had done, and that all its slots were granted.
    fn restore_record(&mut self, bu: BuIndex, replica: &ManagerReplica) -> Result<(), TakeoverError> {
        let record = replica.builders.iter().find(|record| record.builder == bu);
        let record = record.ok_or(TakeoverError::Replica)?;
        let unit = &mut self.builders[bu.index()];
        let slots = usize::from(self.plan.slots[bu.index()].get());
        if record.finished.len() != slots || record.arrived.len() != unit.arrived.len() {
            return Err(TakeoverError::Replica);
        }
        (unit.events_assigned, unit.done) = (record.done.events(), record.done);
        unit.arrived.clone_from(&record.arrived);
        for (slot, finished) in self.slots[unit.base..unit.base + slots].iter_mut().zip(&record.finished) {
            *slot = (finished.next(), Slot::Granted);
        }
        self.done += record.done;
        self.events_done += record.done.events();
        Ok(())
    }

    fn restore_lost(&mut self, lost: &LostBuilder) -> Result<(), TakeoverError> {
        let LostBuilder { builder: bu, view, report } = lost;
        let Some(unit) =
            self.builders.get_mut(bu.index()).filter(|unit| unit.arrived.len() == view.arrived.len())
        else {
            return Err(TakeoverError::Replica);
        };
        unit.membership = BuilderState::Gone;
        unit.report = report.clone().map_or(PendingReport::Lost, PendingReport::Received);
        (unit.events_assigned, unit.done) = (view.events_assigned, view.done);
        unit.arrived.clone_from(&view.arrived);
        // Of an excluded unit that has reported, with the batches that it had finished and not reported done.
        self.done += report.as_ref().map_or(view.done, |report| report.done);
        self.events_done += view.done.events();
        for unfinished in &view.unfinished {
            let at = self.slot_at(*bu, unfinished.slot).map_err(|_| TakeoverError::Replica)?;
            let moved = Slot::Moved { batch: unfinished.batch, again: unfinished.again };
            self.slots[at] = (unfinished.generation, moved);
        }
        Ok(())
    }

    fn restore_builder(&mut self, bu: BuIndex, state: &State) -> Result<(), TakeoverError> {
        let unit = &mut self.builders[bu.index()];
        let slots = usize::from(self.plan.slots[bu.index()].get());
        if state.slots.len() != slots || state.arrived.len() != unit.arrived.len() {
            return Err(TakeoverError::Mismatch(Unit::Builder(bu)));
        }
        (unit.events_assigned, unit.done) = (state.events_assigned, state.done);
        unit.arrived.clone_from(&state.arrived);
        self.done += state.done;
        self.events_done += state.done.events();
        for (at, slot) in (unit.base..).zip(&state.slots) {
            let is = slot.batch.map_or(Slot::Granted, |(batch, _)| Slot::Assigned(batch));
            self.slots[at] = (slot.generation, is);
        }
        Ok(())
    }

    /// Adds the assignments that readout units know and builder units do not, and assigns all of them again. Returns the
    /// batches in slots.
    fn restore_assignments(&mut self, states: &UnitStates) -> Result<BTreeSet<BatchId>, TakeoverError> {
        let known = states.readouts.values().flat_map(|state| &state.assigned);
        for &Assignment { batch, builder, slot, generation, .. } in known {
            let conflict = TakeoverError::Conflict { builder, slot };
            let at = self.slot_at(builder, slot).map_err(|_| conflict.clone())?;
            let present = &mut self.slots[at];
            match present.1 {
                Slot::Granted if present.0 == generation => {
                    present.1 = Slot::Assigned(batch);
                    self.builders[builder.index()].events_assigned += u64::from(batch.events);
                }
                Slot::Assigned(other) if present.0 == generation && other != batch => return Err(conflict),
                Slot::Granted | Slot::Assigned(_) if generation.is_after(present.0) => return Err(conflict),
                // Done, or at a lost builder unit.
                _ => {}
            }
        }
        let mut again: BTreeSet<(BuIndex, SlotIndex, Generation)> = states
            .readouts
            .values()
            .flat_map(|state| &state.assigned)
            .filter(|known| known.again)
            .map(|known| (known.builder, known.slot, known.generation))
            .collect();
        for (&bu, state) in &states.builders {
            let slots = (0..).map(SlotIndex).zip(&state.slots);
            let own = slots.filter(|(_, slot)| slot.batch.is_some_and(|(_, again)| again));
            again.extend(own.map(|(at, slot)| (bu, at, slot.generation)));
        }
        let (mut assignments, mut withdrawn) = (Vec::new(), Vec::new());
        for (&builder, state) in &states.builders {
            let base = self.builders.get(builder.index()).map_or(0, |unit| unit.base);
            for ((at, slot), granted) in (base..).zip((0..).map(SlotIndex)).zip(&state.slots) {
                match self.slots[at] {
                    (generation, Slot::Assigned(batch)) => {
                        let again = again.contains(&(builder, slot, generation));
                        assignments.push(Assignment { batch, builder, slot, generation, again });
                    }
                    (_, Slot::Granted)
                        if granted.arrivals.iter().any(|ru| states.readouts.contains_key(ru)) =>
                    {
                        return Err(TakeoverError::Conflict { builder, slot });
                    }
                    // Only readout units that are lost knew the batch.
                    (generation, Slot::Granted) if !granted.arrivals.is_empty() => {
                        withdrawn.push(Message::Withdraw { builder, slot, generation });
                    }
                    _ => {}
                }
            }
        }
        assignments.sort_unstable_by_key(|assignment| assignment.batch.id);
        self.outbox.push_back(Transmit { to: Receivers::All, message: Message::Heartbeat });
        for &assignment in &assignments {
            let to = Receivers::ReadoutsAnd(assignment.builder);
            self.outbox.push_back(Transmit { to, message: Message::Assign(assignment) });
        }
        for message in withdrawn {
            if let Message::Withdraw { builder, .. } = message {
                let to = Receivers::Unit(Unit::Builder(builder));
                self.outbox.push_back(Transmit { to, message });
            }
        }
        let in_slots = self.slots.iter().filter_map(|(_, slot)| match slot {
            Slot::Assigned(batch) => Some(batch.id),
            _ => None,
        });
        Ok(in_slots.collect())
    }

    /// Queues the batches of lost builder units that are not `again` in a slot or done.
    fn restore_rebuild(&mut self, again: &BTreeSet<BatchId>) {
        for (at, (_, slot)) in self.slots.iter_mut().enumerate() {
            let Slot::Moved { batch, again: is_again @ false } = slot else { continue };
            match again.contains(&batch.id) {
                true => *is_again = true,
                false => self.rebuild.push_back(Rebuild { batch: *batch, from: Some(at), again: true }),
            }
        }
    }

    /// Cuts the batches again that reached no unit. A batch that a readout unit does not know is not done; so it is in a slot,
    /// waits for another builder unit, or reached nobody. Without any readout unit, only the batches after the newest one of a
    /// builder unit are known to be missing. A builder unit that is lost may have stored such a batch of readout units that are
    /// lost as well, hence `again`.
    fn cut_unknown_batches(&mut self, states: &UnitStates, again: bool) -> Result<(), TakeoverError> {
        let first_event = self.plan.first_event.0;
        let start = |batch: &Batch| (batch.id, batch.first_event.0.wrapping_sub(first_event));
        let end = |batch: &Batch| (BatchId(batch.id.0 + 1), start(batch).1 + u64::from(batch.events));
        let newest = states.builders.values().filter_map(|state| state.newest).max_by_key(|batch| batch.id);
        let readouts = || states.readouts.values();
        let next = readouts().map(|state| (state.next_batch, state.next_event)).max();
        let next = next.or_else(|| newest.as_ref().map(end)).unwrap_or_default();
        let assigned = self.slots.iter().filter_map(|(_, slot)| match slot {
            Slot::Assigned(batch) => Some(*batch),
            _ => None,
        });
        let mut known: Vec<Batch> =
            assigned.chain(self.rebuild.iter().map(|rebuild| rebuild.batch)).collect();
        known.sort_unstable_by_key(|batch| batch.id);
        let last = known.last().map(end).into_iter().fold(next, Ord::max);
        let not_assigned = |state: &ReadoutState| {
            let newer = BatchRange { start: (state.next_batch, state.next_event), end: last };
            state.skipped.clone().into_iter().chain([newer])
        };
        let ranges = readouts().flat_map(not_assigned).chain([BatchRange { start: next, end: last }]);
        let in_batches: u64 = known.iter().map(|batch| u64::from(batch.events)).sum();
        let mut found = self.events_done + in_batches;
        for range in BatchRange::union(ranges) {
            let is_inside = |batch: &&Batch| (range.start.0..range.end.0).contains(&batch.id);
            let mut from = range.start;
            for batch in known.iter().filter(is_inside) {
                found += self.cut_between(from, start(batch), found, again)?;
                from = end(batch);
            }
            found += self.cut_between(from, range.end, found, again)?;
        }
        let newest = newest.map(|batch| batch.id);
        if found != last.1 || found > self.plan.events.get() || newest >= Some(last.0) {
            return Err(TakeoverError::Events { found, expected: last.1 });
        }
        self.rebuild.make_contiguous().sort_unstable_by_key(|rebuild| rebuild.batch.id);
        (self.next_batch, self.events_cut) = last;
        Ok(())
    }

    /// Queues batches from one place of the run to another: of each, the number and the events before it. Returns their
    /// events. It is an error if these cannot be in so many batches; `found` events are in known ones.
    fn cut_between(
        &mut self,
        from: (BatchId, u64),
        to: (BatchId, u64),
        found: u64,
        again: bool,
    ) -> Result<u64, TakeoverError> {
        let full = u64::from(self.plan.batch.get());
        let sizes = to.0.0.checked_sub(from.0.0).zip(to.1.checked_sub(from.1));
        let possible =
            sizes.filter(|(batches, events)| (*batches..=batches.saturating_mul(full)).contains(events));
        let (_, events) = possible.ok_or(TakeoverError::Events { found, expected: to.1 })?;
        let mut left = events;
        for id in from.0.0..to.0.0 {
            // Each later batch has an event at least.
            let own = full.min(left - (to.0.0 - id - 1));
            let first_event = EventNumber(self.plan.first_event.0 + to.1 - left);
            let batch = Batch { id: BatchId(id), first_event, events: own as u16 };
            self.rebuild.push_back(Rebuild { batch, from: None, again });
            left -= own;
        }
        Ok(events)
    }

    /// Starts the term.
    fn go_on(&mut self, now: Instant) {
        for (at, unit) in self.builders.iter_mut().enumerate() {
            if unit.membership.is_present() {
                let slots = unit.base..unit.base + usize::from(self.plan.slots[at].get());
                for slot in slots.filter(|&slot| matches!(self.slots[slot].1, Slot::Assigned(_))) {
                    self.deadlines.start(slot, now + self.plan.done_timeout());
                }
                let slots = (0..self.plan.slots[at].get()).map(SlotIndex);
                let granted =
                    slots.filter(|slot| matches!(self.slots[unit.base + slot.index()].1, Slot::Granted));
                unit.credits.extend(granted);
                let is_ready = unit.membership == BuilderState::Active && !unit.credits.is_empty();
                self.round_robin.set_ready(at, is_ready);
            }
        }
        // The lost manager may not have said that these may be released, ended and started again.
        let lost: Vec<Unit> = self.recovered.iter().copied().filter(|unit| *unit != Unit::Manager).collect();
        if lost.iter().any(|unit| matches!(unit, Unit::Builder(_))) {
            self.release = Some(self.next_batch);
        }
        for &unit in &lost {
            if !self.excluded.contains(&unit) {
                self.excluded.push_back(unit);
            }
            if !self.departed.contains(&unit) && !self.is_excluding(unit) && !self.has_successor(unit) {
                self.departed.push_back(unit);
            }
        }
        let cause = lost.last().map_or(StopCause::Lost(Unit::Manager), |unit| StopCause::Lost(*unit));
        self.recovered.push(Unit::Manager);
        self.wait_if_alone(cause, now);
        self.release_batches();
        self.finish_if_all_done(now);
    }

    /// Whether the unit is an excluded builder unit, which departs once it has ended.
    fn is_excluding(&self, unit: Unit) -> bool {
        let Unit::Builder(bu) = unit else { return false };
        matches!(self.builders[bu.index()].membership, BuilderState::Excluded { .. })
    }

    /// Whether the restart that follows a lost unit has joined.
    fn has_successor(&self, unit: Unit) -> bool {
        let next = match unit {
            Unit::Manager => None,
            Unit::Readout(ru) => self.plan.next_readout(ru).map(Unit::Readout),
            Unit::Builder(bu) => self.plan.next_builder(bu).map(Unit::Builder),
        };
        next.is_some_and(|next| self.joined.contains(&next))
    }
}

#[cfg(test)]
mod tests;
