//! Readout unit: which batch to send next, what was sent where, and when to stop.
//!
//! Assignments wait in one queue per builder unit. The plan's
//! [`TrafficShaping`](super::shaping::TrafficShaping) selects the queue; each queue is served in the order of
//! assignment. A batch is sent by writing the packet of each source into the slot. The last write carries the
//! batch's [`Immediate`].
//!
//! The unit has a batch until [`poll_released`](Readout::poll_released) returns it: its builder unit has then reported it
//! done, because the manager assigned its slot again, or said so after a loss. So at most one batch per slot is kept, and the batches of a lost
//! builder unit can be sent to another one.

mod takeover;

use super::message::{Assignment, Message};
use super::plan::{Batch, Plan};
use super::recovery::Membership;
use super::report::{PostedBatch, ReadoutReport, SentToBuilder};
use super::shaping::SendOrder;
use super::takeover::BatchRange;
use super::types::{
    BatchId, BuIndex, Bytes, Immediate, Instant, ProtocolError, RuIndex, SlotIndex, StopCause, Term, Unit,
};
use super::watch::ManagerWatch;
use std::collections::{BTreeMap, VecDeque};

/// A batch to send now. Return it with [`Readout::handle_posted`] or [`Readout::handle_unsent`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a batch to send has to be posted or declared unsent"]
pub struct BatchSend {
    /// The batch and its slot.
    pub assignment: Assignment,
    /// Immediate data of the last write.
    pub immediate: Immediate,
}

/// Amount of data read from the sources for one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchPayload {
    /// Fragments.
    pub fragments: u32,
    /// Payload of the fragments.
    pub bytes: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Accepting assignments.
    Running,
    /// Waiting for the completions of posted writes, at most until `until`.
    Draining { until: Instant },
    /// The report is made.
    Reported,
}

/// This readout unit's state for one slot of a builder unit.
#[derive(Clone, Debug, Default)]
struct Slot {
    /// The last assignment; `None` before the first one that this unit gets.
    assigned: Option<Assignment>,
    /// The unit does not know how often the slot was granted since: it joined the run, or a new term began.
    skips_generations: bool,
    /// The last posted batch.
    posted: Option<PostedBatch>,
    /// Posted batches whose writes have not completed. More than one if the slot was granted again before this
    /// unit polled its completion.
    outstanding: u16,
}

/// This readout unit's state for one builder unit.
#[derive(Debug)]
struct Peer {
    waiting: VecDeque<Assignment>,
    slots: Vec<Slot>,
    outstanding: u16,
    sent: SentToBuilder,
    reachable: bool,
    /// The run goes on without it.
    lost: bool,
}

/// A readout unit.
#[derive(Debug)]
pub struct Readout {
    index: RuIndex,
    plan: Plan,
    peers: Vec<Peer>,
    send_order: SendOrder,
    outstanding: u32,
    fragments_read: u64,
    bytes_read: u64,
    /// Batches that were read, but could not be posted, with their fragments.
    unsent: BTreeMap<BatchId, BatchPayload>,
    /// Batches that were posted to lost builder units and not posted again; at most one per slot.
    superseded: BTreeMap<BatchId, Batch>,
    /// Batches before this one are of an earlier unit with the same sources.
    first_batch: BatchId,
    fragments_rebuilt: u64,
    released: VecDeque<Batch>,
    phase: Phase,
    cause: StopCause,
    /// The first batch that is newer than all assigned ones, and the events of the run before it.
    next: (BatchId, u64),
    /// Batches before that one which were not assigned, after a takeover.
    skipped: Vec<BatchRange>,
    manager: ManagerWatch,
    outbox: VecDeque<Message>,
    /// Faults reported so far.
    faults: Vec<StopCause>,
    report: Option<ReadoutReport>,
}

impl Readout {
    /// A readout unit that joins the run: it sends the batches from the membership's first one.
    pub fn join(index: RuIndex, plan: Plan, membership: &Membership, now: Instant) -> Readout {
        let mut readout = Readout::new(index, plan, now);
        readout.first_batch = membership.first_batch;
        readout.next = (membership.first_batch, membership.first_event);
        readout.manager = ManagerWatch::new(&readout.plan, membership.term, now);
        let slots = readout.peers.iter_mut().flat_map(|peer| &mut peer.slots);
        slots.for_each(|slot| slot.skips_generations = true);
        for builder in &membership.absent_builders {
            // A restart that has not joined is not lost: it may join later.
            if let Some(peer) = readout.peers.get_mut(builder.index()) {
                peer.lost = !readout.plan.is_restart(Unit::Builder(*builder));
            }
        }
        readout
    }

    /// Readout unit `index` at the start of a run.
    pub fn new(index: RuIndex, plan: Plan, now: Instant) -> Readout {
        let peers = plan.slots.iter().map(|slots| {
            let slots = usize::from(slots.get());
            Peer {
                waiting: VecDeque::with_capacity(slots),
                slots: vec![Slot::default(); slots],
                outstanding: 0,
                sent: SentToBuilder::default(),
                reachable: true,
                lost: false,
            }
        });
        Readout {
            index,
            peers: peers.collect(),
            send_order: SendOrder::new(
                plan.traffic_shaping,
                plan.builders(),
                plan.readout_role(index).index(),
            ),
            outstanding: 0,
            fragments_read: 0,
            bytes_read: 0,
            unsent: BTreeMap::new(),
            superseded: BTreeMap::new(),
            first_batch: BatchId(0),
            fragments_rebuilt: 0,
            released: VecDeque::new(),
            phase: Phase::Running,
            cause: StopCause::EndOfRun,
            next: (BatchId(0), 0),
            skipped: Vec::new(),
            manager: ManagerWatch::new(&plan, Term::FIRST, now),
            outbox: VecDeque::with_capacity(4),
            faults: Vec::new(),
            report: None,
            plan,
        }
    }

    /// A message from the manager of that term.
    pub fn handle_message(&mut self, term: Term, message: Message, now: Instant) {
        if self.phase != Phase::Running || !self.manager.heard(term, now) {
            return;
        }
        match message {
            Message::Assign(assignment) => {
                if let Err(error) = self.assign(assignment) {
                    self.fault(StopCause::Protocol { by: Unit::Manager, error });
                }
            }
            Message::Stop { cause } => self.stop(cause, now),
            Message::Heartbeat => {}
            Message::Release { before } => {
                let later = self.superseded.split_off(&before);
                let done = std::mem::replace(&mut self.superseded, later);
                self.released.extend(done.into_values());
            }
            Message::Lost { unit: Unit::Builder(bu) } if bu.index() < self.peers.len() => {
                self.lose_builder(bu);
            }
            _ => {
                self.fault(StopCause::Protocol { by: Unit::Manager, error: ProtocolError::UnexpectedMessage })
            }
        }
    }

    /// Bytes from the manager did not decode.
    pub fn handle_malformed(&mut self) {
        self.fault(StopCause::Protocol { by: Unit::Manager, error: ProtocolError::Malformed });
    }

    /// The next batch to send: its builder unit's window is not full, and fewer than the maximum are in flight.
    pub fn poll_send(&mut self) -> Option<BatchSend> {
        if self.phase != Phase::Running || self.outstanding >= self.plan.max_in_flight.get() {
            return None;
        }
        let turn = self.send_order.take()?;
        let peer = &mut self.peers[turn];
        let assignment =
            peer.waiting.pop_front().expect("a builder unit is ready only while a batch waits for it");
        peer.outstanding += 1;
        self.outstanding += 1;
        self.update_ready(assignment.builder);
        Some(BatchSend { assignment, immediate: Immediate::new(assignment.slot, assignment.generation) })
    }

    /// All writes of the batch are posted; `payload` is the data they carry.
    pub fn handle_posted(&mut self, send: BatchSend, payload: BatchPayload) {
        let Assignment { batch, builder, slot, generation, .. } = send.assignment;
        self.unsent.remove(&batch.id);
        if self.superseded.remove(&batch.id).is_some() {
            self.fragments_rebuilt += u64::from(payload.fragments);
        } else {
            self.count_read(payload);
        }
        let peer = &mut self.peers[builder.index()];
        peer.sent.batches += 1;
        peer.sent.events += u64::from(batch.events);
        peer.sent.fragments += u64::from(payload.fragments);
        let place = &mut peer.slots[slot.index()];
        place.posted = Some(PostedBatch { slot, generation, batch, fragments: payload.fragments });
        place.outstanding += 1;
        if !peer.reachable {
            // Its writes are flushed: no completion will follow.
            self.retire(builder, slot);
        }
    }

    /// The batch was read from the sources, but none of its writes was posted.
    pub fn handle_unsent(&mut self, send: BatchSend, payload: BatchPayload) {
        let Assignment { batch, builder, .. } = send.assignment;
        if !self.superseded.contains_key(&batch.id) {
            self.unsent.insert(batch.id, payload);
        }
        self.peers[builder.index()].outstanding -= 1;
        self.outstanding -= 1;
        self.handle_unreachable(builder);
    }

    fn count_read(&mut self, payload: BatchPayload) {
        self.fragments_read += u64::from(payload.fragments);
        self.bytes_read += payload.bytes.0;
    }

    /// The last write of the batch in that slot completed.
    pub fn handle_completed(&mut self, builder: BuIndex, slot: SlotIndex) {
        self.retire(builder, slot);
        self.finish_if_drained();
    }

    /// Writes to that builder unit fail; all outstanding ones are flushed.
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

    /// The next batch that is done: it will not be sent again.
    pub fn poll_released(&mut self) -> Option<Batch> {
        self.released.pop_front()
    }

    /// Whether the run goes on without that builder unit. Nothing is sent to it any more.
    pub fn is_lost(&self, builder: BuIndex) -> bool {
        self.peers[builder.index()].lost
    }

    /// The next message to the manager. None while the unit waits for the next term.
    pub fn poll_transmit(&mut self) -> Option<Message> {
        if self.manager.is_waiting() && self.phase == Phase::Running {
            return None;
        }
        self.outbox.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) has to be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.phase {
            Phase::Running => Some(self.manager.due()),
            Phase::Draining { until } => Some(until),
            Phase::Reported => None,
        }
    }

    /// A timer may have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        match self.phase {
            Phase::Running if self.manager.handle_timeout(now) => {
                self.stop(StopCause::Lost(Unit::Manager), now);
            }
            Phase::Draining { until } if until <= now => self.finish(),
            _ => {}
        }
    }

    /// The report, once, when the unit has stopped. It goes to the manager, or to the launcher if the manager is
    /// lost.
    pub fn poll_report(&mut self) -> Option<ReadoutReport> {
        self.report.take()
    }

    fn assign(&mut self, assignment: Assignment) -> Result<(), ProtocolError> {
        let Assignment { batch, builder, slot, generation, .. } = assignment;
        if !self.plan.has_slot(builder, slot) {
            return Err(ProtocolError::UnknownSlotOrUnit);
        }
        let peer = &mut self.peers[builder.index()];
        if peer.lost {
            return Err(ProtocolError::UnknownSlotOrUnit);
        }
        let place = &mut peer.slots[slot.index()];
        if place.assigned == Some(assignment) && self.manager.term() > Term::FIRST {
            // From an earlier term.
            return Ok(());
        }
        let last = place.assigned.map(|last| last.generation);
        if place.posted.map(|posted| posted.generation) != last {
            return Err(ProtocolError::AssignOfBusySlot);
        }
        let is_valid = match place.skips_generations {
            true => last.is_none_or(|last| generation.is_after(last)),
            false => generation == last.unwrap_or_default().next(),
        };
        if !is_valid {
            return Err(ProtocolError::WrongGeneration);
        }
        (place.assigned, place.skips_generations) = (Some(assignment), false);
        // The slot is granted again, so its last batch is done.
        self.released
            .extend(place.posted.map(|posted| posted.batch).filter(|done| done.id >= self.first_batch));
        if batch.id < self.first_batch {
            // Assigned again: it stays without this unit's sources.
            place.posted = Some(PostedBatch { slot, generation, batch, fragments: 0 });
            return Ok(());
        }
        peer.waiting.push_back(assignment);
        self.note_assigned(&batch);
        self.send_order.add(builder.index());
        self.update_ready(builder);
        Ok(())
    }

    fn update_ready(&mut self, builder: BuIndex) {
        let peer = &self.peers[builder.index()];
        let ready = peer.reachable && !peer.waiting.is_empty() && peer.outstanding < self.plan.window.get();
        self.send_order.set_ready(builder.index(), ready);
    }

    /// The run goes on without that builder unit: its batches will be assigned again.
    fn lose_builder(&mut self, builder: BuIndex) {
        let peer = &mut self.peers[builder.index()];
        if std::mem::replace(&mut peer.lost, true) {
            return;
        }
        peer.reachable = false;
        peer.waiting.clear();
        for slot in &mut peer.slots {
            let flushed = std::mem::take(&mut slot.outstanding);
            peer.outstanding -= flushed;
            self.outstanding -= u32::from(flushed);
            // Those that are done are not assigned again.
            let posted = slot.posted.filter(|posted| posted.batch.id >= self.first_batch);
            self.superseded.extend(posted.map(|posted| (posted.batch.id, posted.batch)));
        }
        self.send_order.remove(builder.index());
        self.update_ready(builder);
        self.finish_if_drained();
    }

    /// One batch to that slot is no longer in flight.
    fn retire(&mut self, builder: BuIndex, slot: SlotIndex) {
        let peer = &mut self.peers[builder.index()];
        let place = &mut peer.slots[slot.index()];
        if place.outstanding > 0 {
            place.outstanding -= 1;
            peer.outstanding -= 1;
            self.outstanding -= 1;
            self.update_ready(builder);
        }
    }

    /// Reports a fault to the manager, which stops the run.
    fn fault(&mut self, cause: StopCause) {
        if self.phase == Phase::Running {
            self.outbox.push_back(Message::Fault { cause });
            if !self.faults.contains(&cause) {
                self.faults.push(cause);
            }
        }
    }

    fn stop(&mut self, cause: StopCause, now: Instant) {
        if self.phase == Phase::Running {
            self.cause = cause;
            self.phase = Phase::Draining { until: now + self.plan.drain_timeout };
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
        let unsent: Vec<_> = std::mem::take(&mut self.unsent).into_values().collect();
        unsent.iter().for_each(|&payload| self.count_read(payload));
        let sent = self.peers.iter_mut().map(|peer| {
            let mut sent = std::mem::take(&mut peer.sent);
            sent.last = peer.slots.iter().filter_map(|slot| slot.posted).collect();
            sent
        });
        self.report = Some(ReadoutReport {
            cause: self.cause,
            fragments_read: self.fragments_read,
            bytes_read: Bytes(self.bytes_read),
            fragments_unsent: unsent.iter().map(|payload| u64::from(payload.fragments)).sum(),
            fragments_rebuilt: self.fragments_rebuilt,
            sent: sent.collect(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::small;
    use super::super::types::{BatchId, Generation};
    use super::*;

    const NOW: Instant = Instant::from_nanos(1_000);

    /// Readout unit 1 of 2, with two builder units of 2 slots; the window is 1 batch.
    fn readout() -> Readout {
        let mut plan = small(&[2, 3], &[2, 2], 100, 4);
        plan.window = std::num::NonZeroU16::MIN;
        Readout::new(RuIndex(1), plan, NOW)
    }

    fn assign(readout: &mut Readout, batch: u64, builder: u16, slot: u16, generation: u32) {
        let batch = readout.plan.batch(BatchId(batch)).unwrap();
        let (builder, slot, generation) = (BuIndex(builder), SlotIndex(slot), Generation(generation));
        let again = false;
        readout.handle_message(
            Term::FIRST,
            Message::Assign(Assignment { batch, builder, slot, generation, again }),
            NOW,
        );
    }

    fn post(readout: &mut Readout) -> Option<u64> {
        let send = readout.poll_send()?;
        let batch = send.assignment.batch.id.0;
        readout.handle_posted(send, BatchPayload { fragments: 12, bytes: Bytes(1200) });
        Some(batch)
    }

    fn stop(readout: &mut Readout) {
        readout.handle_message(Term::FIRST, Message::Stop { cause: StopCause::Requested }, NOW);
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
    fn batches_in_flight_are_limited() {
        let mut readout = readout();
        readout.plan.max_in_flight = std::num::NonZeroU32::MIN;
        assign(&mut readout, 0, 0, 0, 1);
        assign(&mut readout, 1, 1, 0, 1);
        assert_eq!([post(&mut readout), post(&mut readout)], [Some(1), None]);
        readout.handle_completed(BuIndex(1), SlotIndex(0));
        assert_eq!([post(&mut readout), post(&mut readout)], [Some(0), None]);
    }

    #[test]
    fn unshaped_batches_go_in_order_of_assignment_past_full_windows() {
        let mut plan = small(&[2, 3], &[3, 2], 100, 4);
        (plan.traffic_shaping, plan.window) =
            (super::super::shaping::TrafficShaping::Unshaped, std::num::NonZeroU16::MIN);
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
        assert_eq!((sent.last[0].generation, report.fragments_read), (Generation(2), 24));
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
        assert_eq!(until, NOW + readout.plan.drain_timeout);
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
        readout.handle_posted(first, BatchPayload::default());
        readout.handle_unreachable(BuIndex(1));
        readout.handle_unreachable(BuIndex(1));
        let cause = StopCause::Unreachable { by: RuIndex(1), peer: BuIndex(1) };
        assert_eq!(readout.poll_transmit(), Some(Message::Fault { cause }));
        assert_eq!(readout.poll_transmit(), None);
        // A batch that was being posted when its builder unit was lost counts as sent.
        readout.handle_unreachable(BuIndex(0));
        readout.handle_posted(second, BatchPayload { fragments: 12, bytes: Bytes(1) });
        stop(&mut readout);
        assert_eq!(readout.poll_report().unwrap().sent[0].fragments, 12);
    }

    #[test]
    fn batches_of_a_lost_builder_unit_are_sent_again_and_counted_as_rebuilt() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        assign(&mut readout, 1, 0, 1, 1);
        assert_eq!(post(&mut readout), Some(0));
        let unit = Unit::Builder(BuIndex(0));
        readout.handle_message(Term::FIRST, Message::Lost { unit }, NOW);
        // A completion that comes late changes nothing; what waits for the lost unit is not sent to it.
        readout.handle_completed(BuIndex(0), SlotIndex(0));
        assert_eq!(post(&mut readout), None);
        assign(&mut readout, 0, 1, 0, 1);
        assign(&mut readout, 1, 1, 1, 1);
        assert_eq!(post(&mut readout), Some(0));
        readout.handle_completed(BuIndex(1), SlotIndex(0));
        assert_eq!((post(&mut readout), readout.poll_transmit()), (Some(1), None));
        readout.handle_completed(BuIndex(1), SlotIndex(1));
        stop(&mut readout);
        let report = readout.poll_report().unwrap();
        assert_eq!((report.fragments_read, report.fragments_rebuilt, report.fragments_unsent), (24, 12, 0));
        assert_eq!((report.sent[0].fragments, report.sent[1].fragments), (12, 24));
    }

    #[test]
    fn batches_that_a_lost_builder_unit_had_done_are_released_by_the_manager() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        post(&mut readout);
        readout.handle_message(Term::FIRST, Message::Lost { unit: Unit::Builder(BuIndex(0)) }, NOW);
        assert_eq!(readout.poll_released(), None);
        readout.handle_message(Term::FIRST, Message::Release { before: BatchId(1) }, NOW);
        assert_eq!(readout.poll_released().map(|batch| batch.id), Some(BatchId(0)));
    }

    #[test]
    fn a_batch_is_released_when_its_slot_is_assigned_again() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        post(&mut readout);
        readout.handle_completed(BuIndex(0), SlotIndex(0));
        assert_eq!(readout.poll_released(), None);
        assign(&mut readout, 1, 0, 0, 2);
        assert_eq!(readout.poll_released().map(|batch| batch.id), Some(BatchId(0)));
        assert_eq!(readout.poll_released(), None);
    }

    #[test]
    fn batches_that_could_not_be_posted_are_read_but_unsent() {
        let mut readout = readout();
        assign(&mut readout, 0, 0, 0, 1);
        let send = readout.poll_send().unwrap();
        readout.handle_unsent(send, BatchPayload { fragments: 12, bytes: Bytes(7) });
        stop(&mut readout);
        let report = readout.poll_report().unwrap();
        assert_eq!((report.fragments_read, report.fragments_unsent, report.sent[0].fragments), (12, 12, 0));
    }

    #[test]
    fn a_unit_that_joins_sends_from_its_first_batch_at_any_generation() {
        let mut plan = small(&[2, 3], &[2, 2], 100, 4);
        plan.recovery.restarts = 1;
        plan.slots.extend(plan.slots.clone());
        let membership = Membership {
            absent_builders: vec![BuIndex(1), BuIndex(2), BuIndex(3)],
            first_batch: BatchId(5),
            term: Term::FIRST,
            ..Membership::default()
        };
        let mut readout = Readout::join(RuIndex(3), plan, &membership, NOW);
        assert!(readout.is_lost(BuIndex(1)) && !readout.is_lost(BuIndex(3)));
        assign(&mut readout, 4, 0, 0, 7);
        assert_eq!(post(&mut readout), None);
        assign(&mut readout, 5, 0, 1, 9);
        assign(&mut readout, 6, 0, 0, 8);
        assign(&mut readout, 7, 3, 0, 1);
        let mut posted: Vec<_> = std::iter::from_fn(|| post(&mut readout)).collect();
        posted.sort_unstable();
        assert_eq!((posted, readout.poll_released(), readout.poll_transmit()), (vec![5, 6, 7], None, None));
        assign(&mut readout, 8, 0, 1, 11);
        let cause = StopCause::Protocol { by: Unit::Manager, error: ProtocolError::WrongGeneration };
        assert_eq!(readout.poll_transmit(), Some(Message::Fault { cause }));
    }

    #[test]
    fn wrong_assignments_are_refused_by_name() {
        for (builder, slot, generation, error) in [
            (2, 0, 1, ProtocolError::UnknownSlotOrUnit),
            (0, 2, 1, ProtocolError::UnknownSlotOrUnit),
            (0, 1, 2, ProtocolError::WrongGeneration),
            (0, 0, 2, ProtocolError::AssignOfBusySlot),
        ] {
            let mut readout = readout();
            assign(&mut readout, 0, 0, 0, 1);
            assign(&mut readout, 1, builder, slot, generation);
            let cause = StopCause::Protocol { by: Unit::Manager, error };
            assert_eq!(readout.poll_transmit(), Some(Message::Fault { cause }), "{error}");
        }
    }

    #[test]
    fn a_silent_manager_is_lost() {
        let mut readout = readout();
        readout.handle_message(Term::FIRST, Message::Heartbeat, NOW + readout.plan.timeout / 2);
        readout.handle_timeout(NOW + readout.plan.timeout);
        assert_eq!(readout.poll_report(), None);
        readout.handle_timeout(readout.poll_timeout().unwrap());
        assert_eq!(readout.poll_report().unwrap().cause, StopCause::Lost(Unit::Manager));
    }
}
