//! A builder unit without its manager, and under the manager of a new term.

use super::{Builder, Phase, Slot};
use crate::message::Message;
use crate::recovery::{Membership, ReadoutMember};
use crate::takeover::{BuilderState, GrantedSlot};
use crate::types::{Generation, Instant, RuIndex, SlotIndex, StopCause, Unit};

impl Builder {
    /// The manager ended. Without a standby manager, the unit stops.
    pub fn handle_manager_lost(&mut self, now: Instant) {
        if self.phase == Phase::Running && self.manager.manager_lost(now) {
            self.stop_without_manager(now);
        }
    }

    /// The unit has connected to a standby manager that has joined the run.
    pub fn handle_standby_joined(&mut self, now: Instant) {
        self.manager.standby_joined(now);
    }

    /// The standby manager ended.
    pub fn handle_standby_lost(&mut self, now: Instant) {
        if self.phase == Phase::Running && self.manager.standby_lost() {
            self.stop_without_manager(now);
        }
    }

    pub(super) fn stop_without_manager(&mut self, now: Instant) {
        self.stop(StopCause::Lost(Unit::Manager), now + self.plan.drain_timeout);
    }

    /// A standby manager takes over: the units of the run, with the new term. Returns what the manager needs to know; what the
    /// unit has not sent to the manager before is in it. None if the term is not later than the unit's, or the unit has
    /// stopped or knows of a later change of the run's units.
    pub fn handle_new_term(&mut self, membership: &Membership, now: Instant) -> Option<BuilderState> {
        if self.phase != Phase::Running || !self.may_follow(membership) {
            return None;
        }
        if !self.manager.begin_term(membership.term, now) {
            return None;
        }
        for member in &membership.readouts {
            let known = self.readouts[self.plan.readout_role(member.index).index()];
            if member.is_lost || known.index != member.index {
                self.exclude_readout(known.index, now);
            }
            if !member.is_lost {
                self.readout_joined(member.index, member.first_batch);
            }
        }
        self.outbox.clear();
        self.outbox.extend(self.faults.iter().map(|&cause| Message::Fault { cause }));
        let slots = self.slots.iter().enumerate().map(|(at, slot)| GrantedSlot {
            generation: slot.generation,
            batch: slot.batch.map(|batch| (batch, slot.again)),
            arrivals: self.arrivals(at),
        });
        Some(BuilderState {
            done: self.done,
            events_assigned: self.events_assigned,
            arrived: self.arrived_done.clone(),
            slots: slots.collect(),
            rebuilt: self.rebuilt.clone(),
            newest: self.newest,
        })
    }

    /// Whether the unit knows no later change of the readout units.
    fn may_follow(&self, membership: &Membership) -> bool {
        let pairs = self.readouts.iter().zip(&membership.readouts);
        let is_known = |(known, member): (&ReadoutMember, &ReadoutMember)| {
            let is_later = known.index > member.index;
            let is_lost = known.index == member.index && known.is_lost && !member.is_lost;
            self.plan.readout_role(known.index) == self.plan.readout_role(member.index)
                && !is_later
                && !is_lost
        };
        self.readouts.len() == membership.readouts.len() && pairs.into_iter().all(is_known)
    }

    /// Readout units whose packets have arrived in a slot.
    fn arrivals(&self, at: usize) -> Vec<RuIndex> {
        let row = self.cell(at, RuIndex(0));
        self.arrived[row..row + self.plan.readouts()].iter().flatten().map(|(ru, _)| *ru).collect()
    }

    /// Packets in that slot are of a batch that only lost readout units knew: they do not count.
    pub(super) fn withdraw(&mut self, slot: SlotIndex, generation: Generation) {
        let at = slot.index();
        let is_free = |slot: &Slot| slot.generation == generation && slot.batch.is_none();
        if !self.slots.get(at).is_some_and(is_free) {
            return;
        }
        let row = self.cell(at, RuIndex(0));
        for cell in row..row + self.plan.readouts() {
            if let Some((ru, fragments)) = self.arrived[cell].take() {
                self.arrived_total[ru.index()] -= u64::from(fragments);
                self.slots[at].arrivals -= 1;
            }
        }
        self.withdrawn.push_back(slot);
    }
}
