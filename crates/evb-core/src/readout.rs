//! A readout unit: which batch to send next, what was sent where, and when to stop.
//!
//! The unit's assignments wait in one queue per builder unit. The plan's [`Shape`](super::shape::Shape) decides
//! whose queue is served next; within a queue the order is the manager's. A batch is sent by writing the packet of each source
//! to its place in the slot, the last write carrying the batch's [`Immediate`].

use super::message::{Assignment, Message};
use super::plan::Plan;
use super::report::{Posted, ReadoutReport, Sent};
use super::shape::Turns;
use super::types::{BuIndex, Bytes, Immediate, Life, Nanos, RuIndex, Rule, SlotIndex, StopCause, Unit};
use std::collections::VecDeque;

/// A batch to send now. Give it back with [`Readout::handle_posted`] or [`Readout::handle_unsent`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a batch taken has to be posted or declared unsent"]
pub struct Send {
    /// The batch and its slot.
    pub assignment: Assignment,
    /// Immediate data of its last write.
    pub immediate: Immediate,
}

/// What was taken from the sources for one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Fragments.
    pub fragments: u32,
    /// Their payload.
    pub bytes: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Taking assignments.
    Running,
    /// Finishing posted writes, until when they are given up.
    Draining { until: Nanos },
    /// Has reported.
    Reported,
}

/// A builder unit's slot as seen from here.
#[derive(Clone, Debug, Default)]
struct Slot {
    /// The last life assigned.
    assigned: Life,
    /// The last batch posted.
    posted: Option<Posted>,
    /// Batches posted whose writes are outstanding. More than one if the slot's next life was faster
    /// than our own completion.
    outstanding: u16,
}

/// One builder unit as seen from here.
#[derive(Debug)]
struct Peer {
    waiting: VecDeque<Assignment>,
    slots: Vec<Slot>,
    outstanding: u16,
    sent: Sent,
    reachable: bool,
}

/// A readout unit.
#[derive(Debug)]
pub struct Readout {
    index: RuIndex,
    plan: Plan,
    peers: Vec<Peer>,
    turns: Turns,
    outstanding: u32,
    fragments_read: u64,
    bytes_read: u64,
    fragments_unsent: u64,
    phase: Phase,
    cause: StopCause,
    silent_at: Nanos,
    outbox: VecDeque<Message>,
    report: Option<ReadoutReport>,
}

impl Readout {
    /// Readout unit `index` at the start of a run.
    pub fn new(index: RuIndex, plan: Plan, now: Nanos) -> Readout {
        let peers = plan.slots.iter().map(|slots| {
            let slots = usize::from(slots.get());
            Peer {
                waiting: VecDeque::with_capacity(slots),
                slots: vec![Slot::default(); slots],
                outstanding: 0,
                sent: Sent::default(),
                reachable: true,
            }
        });
        Readout {
            index,
            peers: peers.collect(),
            turns: Turns::new(plan.shape, plan.builders(), index.index()),
            outstanding: 0,
            fragments_read: 0,
            bytes_read: 0,
            fragments_unsent: 0,
            phase: Phase::Running,
            cause: StopCause::EndOfRun,
            silent_at: now + plan.timeout,
            outbox: VecDeque::with_capacity(4),
            report: None,
            plan,
        }
    }

    /// A message from the manager.
    pub fn handle_message(&mut self, message: Message, now: Nanos) {
        if self.phase != Phase::Running {
            return;
        }
        self.silent_at = now + self.plan.timeout;
        match message {
            Message::Assign(assignment) => {
                if let Err(rule) = self.assign(assignment) {
                    self.fault(StopCause::Protocol { by: Unit::Manager, rule });
                }
            }
            Message::Stop { cause } => self.stop(cause, now),
            Message::Alive => {}
            _ => self.fault(StopCause::Protocol { by: Unit::Manager, rule: Rule::NotYours }),
        }
    }

    /// Bytes from the manager did not decode.
    pub fn handle_malformed(&mut self) {
        self.fault(StopCause::Protocol { by: Unit::Manager, rule: Rule::Malformed });
    }

    /// The manager died: stop without being told.
    pub fn handle_manager_lost(&mut self, now: Nanos) {
        self.stop(StopCause::Lost(Unit::Manager), now);
    }

    /// The next batch to send, if there is one whose builder unit has room in its window, and fewer are under way
    /// than may be.
    pub fn poll_send(&mut self) -> Option<Send> {
        if self.phase != Phase::Running || self.outstanding >= self.plan.under_way.get() {
            return None;
        }
        let turn = self.turns.take()?;
        let peer = &mut self.peers[turn];
        let assignment =
            peer.waiting.pop_front().expect("a builder unit is ready only while a batch waits for it");
        peer.outstanding += 1;
        self.outstanding += 1;
        self.update_ready(assignment.builder);
        Some(Send { assignment, immediate: Immediate::new(assignment.slot, assignment.life) })
    }

    /// All writes of the batch are posted; `taken` is what they carry.
    pub fn handle_posted(&mut self, send: Send, taken: Taken) {
        let Assignment { batch, builder, slot, life } = send.assignment;
        self.fragments_read += u64::from(taken.fragments);
        self.bytes_read += taken.bytes.0;
        let peer = &mut self.peers[builder.index()];
        peer.sent.batches += 1;
        peer.sent.events += u64::from(batch.events);
        peer.sent.fragments += u64::from(taken.fragments);
        let place = &mut peer.slots[slot.index()];
        place.posted = Some(Posted { slot, life, batch, fragments: taken.fragments });
        place.outstanding += 1;
        if !peer.reachable {
            // Its writes have been flushed: no completion will follow.
            self.settle(builder, slot);
        }
    }

    /// The batch was taken from the sources, but not a single write of it was posted.
    pub fn handle_unsent(&mut self, send: Send, taken: Taken) {
        self.fragments_read += u64::from(taken.fragments);
        self.bytes_read += taken.bytes.0;
        self.fragments_unsent += u64::from(taken.fragments);
        let builder = send.assignment.builder;
        self.peers[builder.index()].outstanding -= 1;
        self.outstanding -= 1;
        self.handle_unreachable(builder);
    }

    /// The last write of the batch in that slot has completed.
    pub fn handle_completed(&mut self, builder: BuIndex, slot: SlotIndex) {
        self.settle(builder, slot);
        self.finish_if_drained();
    }

    /// Writes to that builder unit fail; all that are outstanding are flushed.
    pub fn handle_unreachable(&mut self, builder: BuIndex) {
        let peer = &mut self.peers[builder.index()];
        if std::mem::replace(&mut peer.reachable, false) {
            for slot in &mut peer.slots {
                let flushed = std::mem::take(&mut slot.outstanding);
                peer.outstanding -= flushed;
                self.outstanding -= u32::from(flushed);
            }
            self.update_ready(builder);
            self.fault(StopCause::Unreachable { by: self.index, peer: builder });
        }
        self.finish_if_drained();
    }

    /// What there is to send to the manager.
    pub fn poll_transmit(&mut self) -> Option<Message> {
        self.outbox.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) has to be called next.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Running => Some(self.silent_at),
            Phase::Draining { until } => Some(until),
            Phase::Reported => None,
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Nanos) {
        match self.phase {
            Phase::Running if self.silent_at <= now => self.handle_manager_lost(now),
            Phase::Draining { until } if until <= now => self.finish(),
            _ => {}
        }
    }

    /// The report, once, when the unit has stopped: for the manager, or for whoever started the unit if
    /// the manager is lost.
    pub fn poll_report(&mut self) -> Option<ReadoutReport> {
        self.report.take()
    }

    fn assign(&mut self, assignment: Assignment) -> Result<(), Rule> {
        let Assignment { builder, slot, life, .. } = assignment;
        if !self.plan.has_slot(builder, slot) {
            return Err(Rule::Unknown);
        }
        let peer = &mut self.peers[builder.index()];
        let place = &mut peer.slots[slot.index()];
        if place.posted.map_or(Life(0), |posted| posted.life) != place.assigned {
            return Err(Rule::AssignOfBusySlot);
        }
        if life != place.assigned.next() {
            return Err(Rule::WrongLife);
        }
        place.assigned = life;
        peer.waiting.push_back(assignment);
        self.turns.add(builder.index());
        self.update_ready(builder);
        Ok(())
    }

    fn update_ready(&mut self, builder: BuIndex) {
        let peer = &self.peers[builder.index()];
        let ready = peer.reachable && !peer.waiting.is_empty() && peer.outstanding < self.plan.window.get();
        self.turns.set_ready(builder.index(), ready);
    }

    /// The writes of one batch to that slot are no longer outstanding.
    fn settle(&mut self, builder: BuIndex, slot: SlotIndex) {
        let peer = &mut self.peers[builder.index()];
        let place = &mut peer.slots[slot.index()];
        if place.outstanding > 0 {
            place.outstanding -= 1;
            peer.outstanding -= 1;
            self.outstanding -= 1;
            self.update_ready(builder);
        }
    }

    /// Tells the manager, which will stop the run.
    fn fault(&mut self, cause: StopCause) {
        if self.phase == Phase::Running {
            self.outbox.push_back(Message::Fault { cause });
        }
    }

    fn stop(&mut self, cause: StopCause, now: Nanos) {
        if self.phase == Phase::Running {
            self.cause = cause;
            self.phase = Phase::Draining { until: now + self.plan.drain };
            self.finish_if_drained();
        }
    }

    fn finish_if_drained(&mut self) {
        if matches!(self.phase, Phase::Draining { .. }) && self.outstanding == 0 {
            self.finish();
        }
    }

    fn finish(&mut self) {
        self.phase = Phase::Reported;
        let sent = self.peers.iter_mut().map(|peer| {
            let mut sent = std::mem::take(&mut peer.sent);
            sent.last = peer.slots.iter().filter_map(|slot| slot.posted).collect();
            sent
        });
        self.report = Some(ReadoutReport {
            cause: self.cause,
            fragments_read: self.fragments_read,
            bytes_read: Bytes(self.bytes_read),
            fragments_unsent: self.fragments_unsent,
            sent: sent.collect(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::small;
    use super::super::types::BatchId;
    use super::*;

    const NOW: Nanos = Nanos(1_000);

    /// Readout unit 1 of 2, with two builder units of 2 slots; the window is 1 batch.
    fn readout() -> Readout {
        let mut plan = small(&[2, 3], &[2, 2], 100, 4);
        plan.window = std::num::NonZeroU16::MIN;
        Readout::new(RuIndex(1), plan, NOW)
    }

    fn assign(readout: &mut Readout, batch: u64, builder: u16, slot: u16, life: u32) {
        let batch = readout.plan.batch(BatchId(batch)).unwrap();
        let (builder, slot, life) = (BuIndex(builder), SlotIndex(slot), Life(life));
        readout.handle_message(Message::Assign(Assignment { batch, builder, slot, life }), NOW);
    }

    fn post(readout: &mut Readout) -> Option<u64> {
        let send = readout.poll_send()?;
        let batch = send.assignment.batch.id.0;
        readout.handle_posted(send, Taken { fragments: 12, bytes: Bytes(1200) });
        Some(batch)
    }

    fn stop(readout: &mut Readout) {
        readout.handle_message(Message::Stop { cause: StopCause::Requested }, NOW);
    }

    #[test]
    fn it_starts_with_its_own_builder_unit_and_keeps_the_window() {
        let mut readout = readout();
        for (batch, builder, slot) in [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)] {
            assign(&mut readout, batch, builder, slot, 1);
        }
        assert_eq!([post(&mut readout), post(&mut readout), post(&mut readout)], [Some(1), Some(0), None]);
        readout.handle_completed(BuIndex(0), SlotIndex(0));
        assert_eq!([post(&mut readout), post(&mut readout)], [Some(2), None]);
        readout.handle_completed(BuIndex(1), SlotIndex(0));
        assert_eq!(post(&mut readout), Some(3));
    }

    #[test]
    fn no_more_is_under_way_than_may_be() {
        let mut readout = readout();
        readout.plan.under_way = std::num::NonZeroU32::MIN;
        assign(&mut readout, 0, 0, 0, 1);
        assign(&mut readout, 1, 1, 0, 1);
        assert_eq!([post(&mut readout), post(&mut readout)], [Some(1), None]);
        readout.handle_completed(BuIndex(1), SlotIndex(0));
        assert_eq!([post(&mut readout), post(&mut readout)], [Some(0), None]);
    }

    #[test]
    fn without_a_shape_the_order_is_that_of_assignment_past_full_windows() {
        let mut plan = small(&[2, 3], &[3, 2], 100, 4);
        (plan.shape, plan.window) = (super::super::shape::Shape::Assignment, std::num::NonZeroU16::MIN);
        let mut readout = Readout::new(RuIndex(1), plan, NOW);
        for (batch, builder, slot) in [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 0, 2)] {
            assign(&mut readout, batch, builder, slot, 1);
        }
        assert_eq!([post(&mut readout), post(&mut readout), post(&mut readout)], [Some(0), Some(2), None]);
        readout.handle_completed(BuIndex(0), SlotIndex(0));
        assert_eq!([post(&mut readout), post(&mut readout)], [Some(1), None]);
    }

    #[test]
    fn a_slot_reused_before_its_completion_is_polled_keeps_both_outstanding() {
        let mut readout = readout();
        readout.plan.window = std::num::NonZeroU16::new(2).unwrap();
        assign(&mut readout, 0, 0, 0, 1);
        post(&mut readout);
        assign(&mut readout, 1, 0, 0, 2);
        post(&mut readout);
        stop(&mut readout);
        readout.handle_completed(BuIndex(0), SlotIndex(0));
        assert_eq!(readout.poll_report(), None);
        readout.handle_completed(BuIndex(0), SlotIndex(0));
        let report = readout.poll_report().unwrap();
        let sent = &report.sent[0];
        assert_eq!((sent.batches, sent.events, sent.fragments, sent.last.len()), (2, 8, 24, 1));
        assert_eq!((sent.last[0].life, report.fragments_read), (Life(2), 24));
    }

    #[test]
    fn stopping_drops_what_waits_and_finishes_what_is_posted() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        assign(&mut readout, 1, 0, 1, 1);
        post(&mut readout);
        stop(&mut readout);
        assert_eq!((post(&mut readout), readout.poll_report()), (None, None));
        readout.handle_completed(BuIndex(0), SlotIndex(0));
        assert_eq!(readout.poll_report().unwrap().fragments_read, 12);
    }

    #[test]
    fn draining_is_bounded() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        post(&mut readout);
        stop(&mut readout);
        let until = readout.poll_timeout().unwrap();
        assert_eq!(until, NOW + readout.plan.drain);
        readout.handle_timeout(until);
        assert_eq!(readout.poll_report().unwrap().sent[0].fragments, 12);
    }

    #[test]
    fn an_unreachable_builder_unit_holds_nothing_up() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        assign(&mut readout, 1, 0, 1, 1);
        assign(&mut readout, 2, 1, 0, 1);
        let (first, second) = (readout.poll_send().unwrap(), readout.poll_send().unwrap());
        assert_eq!(first.assignment.builder, BuIndex(1));
        readout.handle_posted(first, Taken::default());
        readout.handle_unreachable(BuIndex(1));
        readout.handle_unreachable(BuIndex(1));
        let cause = StopCause::Unreachable { by: RuIndex(1), peer: BuIndex(1) };
        assert_eq!(readout.poll_transmit(), Some(Message::Fault { cause }));
        assert_eq!(readout.poll_transmit(), None);
        // A batch that was being posted when its builder unit went is sent and flushed.
        readout.handle_unreachable(BuIndex(0));
        readout.handle_posted(second, Taken { fragments: 12, bytes: Bytes(1) });
        stop(&mut readout);
        assert_eq!(readout.poll_report().unwrap().sent[0].fragments, 12);
    }

    #[test]
    fn what_could_not_be_posted_is_read_but_unsent() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        let send = readout.poll_send().unwrap();
        readout.handle_unsent(send, Taken { fragments: 12, bytes: Bytes(7) });
        stop(&mut readout);
        let report = readout.poll_report().unwrap();
        assert_eq!((report.fragments_read, report.fragments_unsent, report.sent[0].fragments), (12, 12, 0));
    }

    #[test]
    fn wrong_assignments_are_refused_by_name() {
        for (builder, slot, life, rule) in [
            (2, 0, 1, Rule::Unknown),
            (0, 2, 1, Rule::Unknown),
            (0, 1, 2, Rule::WrongLife),
            (0, 0, 2, Rule::AssignOfBusySlot),
        ] {
            let mut readout = readout();
            assign(&mut readout, 0, 0, 0, 1);
            assign(&mut readout, 1, builder, slot, life);
            let cause = StopCause::Protocol { by: Unit::Manager, rule };
            assert_eq!(readout.poll_transmit(), Some(Message::Fault { cause }), "{rule}");
        }
    }

    #[test]
    fn a_silent_manager_is_lost() {
        let mut readout = readout();
        readout.handle_message(Message::Alive, NOW + readout.plan.timeout / 2);
        readout.handle_timeout(NOW + readout.plan.timeout);
        assert_eq!(readout.poll_report(), None);
        readout.handle_timeout(readout.poll_timeout().unwrap());
        assert_eq!(readout.poll_report().unwrap().cause, StopCause::Lost(Unit::Manager));
    }
}
