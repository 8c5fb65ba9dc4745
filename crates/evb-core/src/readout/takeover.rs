//! A readout unit without its manager, and under the manager of a new term.

use super::{Phase, Readout};
use crate::message::Message;
use crate::plan::Batch;
use crate::recovery::Membership;
use crate::takeover::{BatchRange, ReadoutState};
use crate::types::{BatchId, BuIndex, Instant, StopCause, Unit};

impl Readout {
    /// The manager ended. Without a standby manager, the unit stops.
    pub fn handle_manager_lost(&mut self, now: Instant) {
        if self.phase == Phase::Running && self.manager.manager_lost(now) {
            self.stop(StopCause::Lost(Unit::Manager), now);
        }
    }

    /// The unit has connected to a standby manager that has joined the run.
    pub fn handle_standby_joined(&mut self, now: Instant) {
        self.manager.standby_joined(now);
    }

    /// The standby manager ended.
    pub fn handle_standby_lost(&mut self, now: Instant) {
        if self.phase == Phase::Running && self.manager.standby_lost() {
            self.stop(StopCause::Lost(Unit::Manager), now);
        }
    }

    /// A standby manager takes over: the units of the run, with the new term. Returns what the manager needs to know. None
    /// if the term is not later than the unit's, or the unit has stopped or knows of a later loss.
    pub fn handle_new_term(&mut self, membership: &Membership, now: Instant) -> Option<ReadoutState> {
        let absent = |bu| membership.absent_builders.contains(&bu);
        let mut peers = (0..).map(BuIndex).zip(&self.peers);
        if self.phase != Phase::Running || peers.any(|(bu, peer)| peer.lost && !absent(bu)) {
            return None;
        }
        if !self.manager.begin_term(membership.term, now) {
            return None;
        }
        for bu in (0..self.peers.len()).map(|bu| BuIndex(bu as u16)).filter(|&bu| absent(bu)) {
            // A restart that has not joined is not lost: it may join later.
            let was_there = self.peers[bu.index()].slots.iter().any(|slot| slot.assigned.is_some());
            if was_there || !self.plan.is_restart(Unit::Builder(bu)) {
                self.lose_builder(bu);
            }
        }
        self.outbox.clear();
        self.outbox.extend(self.faults.iter().map(|&cause| Message::Fault { cause }));
        let slots = self.peers.iter_mut().flat_map(|peer| &mut peer.slots);
        slots.for_each(|slot| slot.skips_generations = true);
        let present = self.peers.iter().filter(|peer| !peer.lost);
        let assigned = present.flat_map(|peer| &peer.slots).filter_map(|slot| slot.assigned);
        Some(ReadoutState {
            assigned: assigned.collect(),
            next_batch: self.next.0,
            next_event: self.next.1,
            skipped: self.skipped.clone(),
        })
    }

    /// Remembers which batches before the next one were not assigned.
    pub(super) fn note_assigned(&mut self, batch: &Batch) {
        let start = (batch.id, batch.first_event.0.saturating_sub(self.plan.first_event.0));
        let end = (BatchId(batch.id.0 + 1), start.1 + u64::from(batch.events));
        if batch.id < self.next.0 {
            if let Some(at) = self.skipped.iter().position(|range| range.start <= start && end <= range.end) {
                let BatchRange { start: first, end: last } = self.skipped[at];
                let rest = [BatchRange { start: first, end: start }, BatchRange { start: end, end: last }];
                self.skipped.splice(at..=at, rest.into_iter().filter(|range| !range.is_empty()));
            }
            return;
        }
        let skipped = BatchRange { start: self.next, end: start };
        self.skipped.extend((!skipped.is_empty()).then_some(skipped));
        self.next = end;
    }
}
