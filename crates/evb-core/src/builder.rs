//! A builder unit: which slot is in which state, and when a batch has arrived whole.
//!
//! ```text
//!           poll_transmit: Grant        Assign, arrivals          all arrived: poll_complete_batch
//!   Free ─────────────────────► Filling ───────────────► Filling ────────────► Processing
//!    ▲                                                                             │ handle_processed
//!    └───────────────── handle_released: Done ─────────────────────────────── Releasing
//! ```
//!
//! Immediate data may arrive before the manager's `Assign`: they come from different units. A batch is
//! whole when both are there. A slot is granted again only after its release, and a batch is released
//! only after every readout unit's immediate data has arrived; since a connection delivers writes in
//! order, no write of the old generation can still arrive then. After a failure no slot is granted any more,
//! so a write that comes late can at worst fill a slot that nobody reads.

use super::account::{BatchOutcome, Totals};
use super::deadlines::Deadlines;
use super::message::{Assignment, Message};
use super::plan::{Batch, Plan};
use super::report::{BuilderReport, SlotReport, SlotState, UnfinishedCause};
use super::types::{
    BuIndex, Generation, Immediate, Nanos, ProtocolError, RuIndex, SlotIndex, StopCause, Unit,
};
use std::collections::VecDeque;

/// A batch that has arrived whole: ring the card's doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompleteBatch {
    /// Where it lies.
    pub slot: SlotIndex,
    /// The batch.
    pub batch: Batch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Finished, or never granted.
    Free,
    /// Granted, and not yet whole.
    Filling,
    /// Whole; waiting for the outcome.
    Processing,
    /// Judged; accepted events are being copied out.
    Releasing(BatchOutcome),
}

#[derive(Clone, Debug)]
struct Slot {
    generation: Generation,
    state: State,
    batch: Option<Batch>,
    arrivals: u16,
    timed_out: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Granting slots.
    Running,
    /// Arrivals still count; waiting for the manager's `Drain`, until when it is taken as given.
    Stopping { until: Nanos },
    /// What has not arrived will not; waiting for outcomes and releases, until when they are given up.
    Draining { until: Nanos },
    /// Has reported.
    Reported,
}

/// A builder unit.
#[derive(Debug)]
pub struct Builder {
    index: BuIndex,
    plan: Plan,
    slots: Vec<Slot>,
    /// Fragments arrived in the slot's present generation, by slot and readout unit.
    arrived: Vec<Option<u32>>,
    arrived_total: Vec<u64>,
    /// From assignment to arrival, then from arrival to release.
    deadlines: Deadlines,
    complete: VecDeque<SlotIndex>,
    processing: u16,
    done: Totals,
    events_assigned: u64,
    rejected: [u64; ProtocolError::ALL.len()],
    readouts_lost: Vec<bool>,
    card_lost: bool,
    phase: Phase,
    cause: StopCause,
    manager_timeout_at: Nanos,
    outbox: VecDeque<Message>,
    report: Option<BuilderReport>,
}

impl Builder {
    /// Builder unit `index` at the start of a run: all its slots are granted at once.
    pub fn new(index: BuIndex, plan: Plan, now: Nanos) -> Builder {
        let slots = usize::from(plan.slots[index.index()].get());
        let readouts = plan.readouts();
        let free = Slot {
            generation: Generation(0),
            state: State::Free,
            batch: None,
            arrivals: 0,
            timed_out: false,
        };
        let mut builder = Builder {
            index,
            slots: vec![free; slots],
            arrived: vec![None; slots * readouts],
            arrived_total: vec![0; readouts],
            deadlines: Deadlines::new(slots),
            complete: VecDeque::with_capacity(slots),
            processing: 0,
            done: Totals::default(),
            events_assigned: 0,
            rejected: [0; ProtocolError::ALL.len()],
            readouts_lost: vec![false; readouts],
            card_lost: false,
            phase: Phase::Running,
            cause: StopCause::EndOfRun,
            manager_timeout_at: now + plan.timeout,
            outbox: VecDeque::with_capacity(2 * slots + readouts),
            report: None,
            plan,
        };
        for slot in 0..slots {
            builder.grant(slot);
        }
        builder
    }

    /// A message from the manager.
    pub fn handle_message(&mut self, message: Message, now: Nanos) {
        self.manager_timeout_at = now + self.plan.timeout;
        match message {
            Message::Assign(assignment) => {
                if let Err(error) = self.assign(assignment, now) {
                    self.fault(StopCause::Protocol { by: Unit::Manager, error });
                }
            }
            Message::Stop { cause } => self.stop(cause, now + 3 * self.plan.drain_timeout),
            Message::Drain => self.drain(now),
            Message::Heartbeat => {}
            _ => {
                self.fault(StopCause::Protocol { by: Unit::Manager, error: ProtocolError::UnexpectedMessage })
            }
        }
    }

    /// Bytes from the manager did not decode.
    pub fn handle_malformed(&mut self) {
        self.fault(StopCause::Protocol { by: Unit::Manager, error: ProtocolError::Malformed });
    }

    /// The slot that the immediate data is about, if it may arrive now. Read the packets' headers there,
    /// then call [`handle_arrival`](Self::handle_arrival).
    ///
    /// # Errors
    /// The error that the arrival breaks. Nothing is counted yet.
    pub fn locate(&self, ru: RuIndex, immediate: Immediate) -> Result<SlotIndex, ProtocolError> {
        let at = immediate.slot.index();
        let slot = self.slots.get(at).ok_or(ProtocolError::UnknownSlotOrUnit)?;
        if !immediate.is_of(slot.generation) {
            return Err(ProtocolError::StaleArrival);
        }
        if self.arrived[self.cell(at, ru)].is_some() {
            return Err(ProtocolError::DuplicateArrival);
        }
        if slot.state != State::Filling {
            return Err(ProtocolError::ArrivalInUngrantedSlot);
        }
        Ok(immediate.slot)
    }

    /// All packets of that readout unit for the slot's batch are in place; they hold `fragments`.
    ///
    /// # Errors
    /// The error that the arrival breaks: it is counted under the error, its fragments are not, and the
    /// run will be stopped.
    pub fn handle_arrival(
        &mut self,
        ru: RuIndex,
        immediate: Immediate,
        fragments: u32,
        now: Nanos,
    ) -> Result<(), ProtocolError> {
        let result =
            self.locate(ru, immediate).and_then(|slot| self.arrive(ru, slot.index(), fragments, now));
        if let Err(error) = result {
            self.rejected[error as usize - 1] += 1;
            self.fault(StopCause::Protocol { by: Unit::Readout(ru), error });
        }
        result
    }

    /// Landed data is not what it must be (a packet's header, a decision): the run cannot go on.
    pub fn handle_invalid_data(&mut self) {
        self.fault(StopCause::InvalidData(self.index));
    }

    /// Accepted events cannot be stored: the run cannot go on.
    pub fn handle_output_failed(&mut self) {
        self.fault(StopCause::OutputFailed(self.index));
    }

    /// The batch in that slot has been judged. Copy its accepted events out, then release the slot.
    ///
    /// # Errors
    /// A slot that is not being processed, or a outcome that does not cover the batch's events: the
    /// caller's mistake, and nothing changes.
    pub fn handle_processed(&mut self, slot: SlotIndex, outcome: BatchOutcome) -> Result<(), ProtocolError> {
        let place = self.slots.get_mut(slot.index()).ok_or(ProtocolError::UnknownSlotOrUnit)?;
        if place.state != State::Processing {
            return Err(ProtocolError::SlotNotAssigned);
        }
        let events = place.batch.map_or(0, |batch| u32::from(batch.events));
        if outcome.events() != events || outcome.accepted > outcome.built.events {
            return Err(ProtocolError::WrongEventCount);
        }
        place.state = State::Releasing(outcome);
        Ok(())
    }

    /// The accepted events of the batch in that slot are stored; the slot is free.
    ///
    /// # Errors
    /// A slot that has no outcome: the caller's mistake, and nothing changes.
    pub fn handle_released(&mut self, slot: SlotIndex) -> Result<(), ProtocolError> {
        let at = slot.index();
        let place = self.slots.get_mut(at).ok_or(ProtocolError::UnknownSlotOrUnit)?;
        let (State::Releasing(outcome), Some(batch)) = (place.state, place.batch) else {
            return Err(ProtocolError::SlotNotAssigned);
        };
        place.state = State::Free;
        let generation = place.generation;
        self.processing -= 1;
        self.deadlines.stop(at);
        self.done += outcome;
        for ru in 0..self.plan.readouts() {
            let ru = RuIndex(ru as u16);
            let missing =
                self.plan.expected_fragments(ru, batch.events) - self.arrived[self.cell(at, ru)].unwrap_or(0);
            if missing > 0 {
                self.outbox.push_back(Message::MissingFragments {
                    builder: self.index,
                    slot,
                    generation,
                    readout: ru,
                    missing,
                });
            }
        }
        self.outbox.push_back(Message::Done {
            builder: self.index,
            slot,
            generation,
            batch: batch.id,
            outcome,
        });
        if self.phase == Phase::Running {
            self.grant(at);
        }
        self.finish_if_drained();
        Ok(())
    }

    /// The card died or failed: batches without a outcome will get none.
    pub fn handle_card_lost(&mut self) {
        self.card_lost = true;
        self.fault(StopCause::CardLost(self.index));
        self.finish_if_drained();
    }

    /// A readout unit died. What it had not delivered will be accounted to its loss. Once the run stops
    /// this means nothing: readout units are free to go then.
    pub fn handle_readout_lost(&mut self, ru: RuIndex) {
        if self.phase == Phase::Running && !std::mem::replace(&mut self.readouts_lost[ru.index()], true) {
            self.fault(StopCause::Lost(Unit::Readout(ru)));
        }
    }

    /// The manager died: stop without being told.
    pub fn handle_manager_lost(&mut self, now: Nanos) {
        self.stop(StopCause::Lost(Unit::Manager), now + self.plan.drain_timeout);
    }

    /// The next batch for the card, in order of completion.
    pub fn poll_complete_batch(&mut self) -> Option<CompleteBatch> {
        if self.phase == Phase::Reported {
            return None;
        }
        let slot = self.complete.pop_front()?;
        let batch = self.slots[slot.index()].batch.expect("a batch is whole only once it is assigned");
        Some(CompleteBatch { slot, batch })
    }

    /// What there is to send to the manager.
    pub fn poll_transmit(&mut self) -> Option<Message> {
        self.outbox.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) has to be called next.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Running => Some(
                self.deadlines
                    .earliest()
                    .map_or(self.manager_timeout_at, |at| at.min(self.manager_timeout_at)),
            ),
            Phase::Stopping { until } | Phase::Draining { until } => Some(until),
            Phase::Reported => None,
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Nanos) {
        match self.phase {
            Phase::Running if self.manager_timeout_at <= now => self.handle_manager_lost(now),
            Phase::Running => {
                while let Some(at) = self.deadlines.pop_due(now) {
                    self.slots[at].timed_out = true;
                    if let Some(batch) = self.slots[at].batch {
                        self.fault(StopCause::TimedOut { by: Unit::Builder(self.index), batch: batch.id });
                    }
                }
            }
            Phase::Stopping { until } if until <= now => self.drain(now),
            Phase::Draining { until } if until <= now => self.finish(),
            _ => {}
        }
    }

    /// The report, once, when the unit has stopped: for the manager, or for whoever started the unit if
    /// the manager is lost.
    pub fn poll_report(&mut self) -> Option<BuilderReport> {
        self.report.take()
    }

    fn cell(&self, slot: usize, ru: RuIndex) -> usize {
        slot * self.plan.readouts() + ru.index()
    }

    fn grant(&mut self, at: usize) {
        let first = self.cell(at, RuIndex(0));
        self.arrived[first..first + self.plan.readouts()].fill(None);
        let generation = self.slots[at].generation.next();
        self.slots[at] =
            Slot { generation, state: State::Filling, batch: None, arrivals: 0, timed_out: false };
        let slot = SlotIndex(at as u16);
        self.outbox.push_back(Message::Grant { builder: self.index, slot, generation });
    }

    fn assign(&mut self, assignment: Assignment, now: Nanos) -> Result<(), ProtocolError> {
        let Assignment { batch, builder, slot, generation } = assignment;
        if builder != self.index || slot.index() >= self.slots.len() {
            return Err(ProtocolError::UnknownSlotOrUnit);
        }
        if matches!(self.phase, Phase::Draining { .. } | Phase::Reported) {
            return Ok(());
        }
        let at = slot.index();
        let place = &mut self.slots[at];
        if place.generation != generation {
            return Err(ProtocolError::WrongGeneration);
        }
        if place.state != State::Filling || place.batch.is_some() {
            return Err(ProtocolError::AssignOfBusySlot);
        }
        place.batch = Some(batch);
        self.events_assigned += u64::from(batch.events);
        self.deadlines.start(at, now + self.plan.timeout);
        self.queue_if_complete(at, now);
        Ok(())
    }

    fn arrive(&mut self, ru: RuIndex, at: usize, fragments: u32, now: Nanos) -> Result<(), ProtocolError> {
        if matches!(self.phase, Phase::Draining { .. } | Phase::Reported) {
            // Settled: whoever sends now is lost to the run, and its fragments are in flight at stop.
            return Ok(());
        }
        let events = self.slots[at].batch.map_or(self.plan.batch.get(), |batch| batch.events);
        if fragments > self.plan.expected_fragments(ru, events) {
            return Err(ProtocolError::TooManyFragments);
        }
        let cell = self.cell(at, ru);
        self.arrived[cell] = Some(fragments);
        self.arrived_total[ru.index()] += u64::from(fragments);
        self.slots[at].arrivals += 1;
        self.queue_if_complete(at, now);
        Ok(())
    }

    fn queue_if_complete(&mut self, at: usize, now: Nanos) {
        let place = &self.slots[at];
        let Some(batch) = place.batch.filter(|_| usize::from(place.arrivals) == self.plan.readouts()) else {
            return;
        };
        // Fragments that arrived before the assignment could only be checked against a full batch.
        for ru in (0..self.plan.readouts()).map(|ru| RuIndex(ru as u16)) {
            if self.arrived[self.cell(at, ru)] > Some(self.plan.expected_fragments(ru, batch.events)) {
                let error = ProtocolError::TooManyFragments;
                return self.fault(StopCause::Protocol { by: Unit::Readout(ru), error });
            }
        }
        self.slots[at].state = State::Processing;
        self.processing += 1;
        self.deadlines.start(at, now + self.plan.timeout);
        self.complete.push_back(SlotIndex(at as u16));
    }

    /// Tells the manager, which will stop the run.
    fn fault(&mut self, cause: StopCause) {
        if self.phase == Phase::Running {
            self.outbox.push_back(Message::Fault { cause });
        }
    }

    fn stop(&mut self, cause: StopCause, until: Nanos) {
        if self.phase == Phase::Running {
            self.cause = cause;
            self.phase = Phase::Stopping { until };
            if let StopCause::Lost(Unit::Readout(ru)) = cause
                && let Some(lost) = self.readouts_lost.get_mut(ru.index())
            {
                *lost = true;
            }
        }
    }

    fn drain(&mut self, now: Nanos) {
        if matches!(self.phase, Phase::Running | Phase::Stopping { .. }) {
            self.phase = Phase::Draining { until: now + self.plan.drain_timeout };
            self.finish_if_drained();
        }
    }

    fn finish_if_drained(&mut self) {
        if matches!(self.phase, Phase::Draining { .. }) && (self.processing == 0 || self.card_lost) {
            self.finish();
        }
    }

    fn finish(&mut self) {
        self.phase = Phase::Reported;
        let slots = (0..self.slots.len()).map(|at| self.report_slot(at)).collect();
        let rejected = ProtocolError::ALL.into_iter().zip(self.rejected).filter(|(_, count)| *count > 0);
        self.report = Some(BuilderReport {
            cause: self.cause,
            done: self.done,
            events_assigned: self.events_assigned,
            arrived: self.arrived_total.clone(),
            slots,
            rejected_arrivals: rejected.collect(),
        });
    }

    fn report_slot(&self, at: usize) -> SlotReport {
        let slot = &self.slots[at];
        let row = self.cell(at, RuIndex(0));
        let arrived = &self.arrived[row..row + self.plan.readouts()];
        let cause = match slot.state {
            State::Free => return SlotReport { generation: slot.generation, state: SlotState::Finished },
            State::Processing | State::Releasing(_) => UnfinishedCause::Unprocessed,
            State::Filling if slot.timed_out => UnfinishedCause::TimedOut,
            State::Filling
                if arrived.iter().zip(&self.readouts_lost).any(|(a, &lost)| lost && a.is_none()) =>
            {
                UnfinishedCause::ReadoutLost
            }
            State::Filling => UnfinishedCause::Stopped,
        };
        let indexed = arrived.iter().enumerate();
        let arrived = indexed.filter_map(|(ru, count)| count.map(|count| (RuIndex(ru as u16), count)));
        let state = SlotState::Unfinished { batch: slot.batch, arrived: arrived.collect(), cause };
        SlotReport { generation: slot.generation, state }
    }
}

#[cfg(test)]
mod tests {
    use super::super::account::BatchTally;
    use super::super::plan::small;
    use super::super::types::BatchId;
    use super::*;

    const START: Nanos = Nanos(1_000);
    const SLOT: SlotIndex = SlotIndex(0);

    /// A builder unit with two slots, waiting for two readout units with 2 and 3 sources.
    fn builder() -> Builder {
        let mut builder = Builder::new(BuIndex(0), small(&[2, 3], &[2], 100, 4), START);
        while builder.poll_transmit().is_some() {}
        builder
    }

    fn assign(builder: &mut Builder, slot: u16, generation: u32, batch: u64) {
        let batch = builder.plan.batch(BatchId(batch)).unwrap();
        let (slot, generation) = (SlotIndex(slot), Generation(generation));
        builder.handle_message(
            Message::Assign(Assignment { batch, builder: BuIndex(0), slot, generation }),
            START,
        );
    }

    fn arrive(
        builder: &mut Builder,
        ru: u16,
        slot: u16,
        generation: u32,
        fragments: u32,
    ) -> Result<(), ProtocolError> {
        let immediate = Immediate::new(SlotIndex(slot), Generation(generation));
        builder.handle_arrival(RuIndex(ru), immediate, fragments, START)
    }

    fn outcome() -> BatchOutcome {
        BatchOutcome {
            built: BatchTally { events: 3, fragments: 15 },
            missing: BatchTally { events: 1, fragments: 4 },
            corrupt: BatchTally::default(),
            accepted: 2,
        }
    }

    #[test]
    fn a_batch_is_whole_when_assigned_and_arrived_in_any_order() {
        let mut builder = builder();
        arrive(&mut builder, 1, 0, 1, 11).unwrap();
        assign(&mut builder, 0, 1, 7);
        assert_eq!(builder.poll_complete_batch(), None);
        arrive(&mut builder, 0, 0, 1, 8).unwrap();
        let process = builder.poll_complete_batch().unwrap();
        assert_eq!((process.slot, process.batch.id), (SLOT, BatchId(7)));
        assert_eq!(builder.poll_complete_batch(), None);
    }

    #[test]
    fn release_reports_short_readout_units_then_done_then_the_next_grant() {
        let mut builder = builder();
        assign(&mut builder, 0, 1, 7);
        arrive(&mut builder, 0, 0, 1, 8).unwrap();
        arrive(&mut builder, 1, 0, 1, 11).unwrap();
        assert_eq!(builder.handle_released(SLOT), Err(ProtocolError::SlotNotAssigned));
        builder.handle_processed(SLOT, outcome()).unwrap();
        assert_eq!(builder.poll_transmit(), None);
        builder.handle_released(SLOT).unwrap();
        let (me, generation) = (BuIndex(0), Generation(1));
        let short = Message::MissingFragments {
            builder: me,
            slot: SLOT,
            generation,
            readout: RuIndex(1),
            missing: 1,
        };
        let done =
            Message::Done { builder: me, slot: SLOT, generation, batch: BatchId(7), outcome: outcome() };
        let grant = Message::Grant { builder: me, slot: SLOT, generation: Generation(2) };
        let sent: Vec<_> = std::iter::from_fn(|| builder.poll_transmit()).collect();
        assert_eq!(sent, [short, done, grant]);
    }

    #[test]
    fn every_wrong_arrival_is_refused_by_name_and_counted() {
        let mut builder = builder();
        assign(&mut builder, 0, 1, 7);
        arrive(&mut builder, 0, 0, 1, 8).unwrap();
        assert_eq!(arrive(&mut builder, 0, 0, 1, 8), Err(ProtocolError::DuplicateArrival));
        assert_eq!(arrive(&mut builder, 1, 0, 0, 8), Err(ProtocolError::StaleArrival));
        assert_eq!(arrive(&mut builder, 1, 2, 1, 8), Err(ProtocolError::UnknownSlotOrUnit));
        assert_eq!(arrive(&mut builder, 1, 0, 1, 13), Err(ProtocolError::TooManyFragments));
        arrive(&mut builder, 1, 0, 1, 12).unwrap();
        builder.handle_processed(SLOT, outcome()).unwrap();
        builder.handle_released(SLOT).unwrap();
        assert_eq!(arrive(&mut builder, 1, 0, 1, 12), Err(ProtocolError::StaleArrival));
        builder.handle_message(Message::Stop { cause: StopCause::EndOfRun }, START);
        builder.handle_message(Message::Drain, START);
        let report = builder.poll_report().unwrap();
        let rejected = [
            (ProtocolError::UnknownSlotOrUnit, 1),
            (ProtocolError::StaleArrival, 2),
            (ProtocolError::DuplicateArrival, 1),
            (ProtocolError::TooManyFragments, 1),
        ];
        assert_eq!(report.rejected_arrivals, rejected);
        assert_eq!(report.arrived, [8, 12]);
    }

    #[test]
    fn fragments_beyond_a_short_last_batch_are_noticed_at_its_assignment() {
        let mut builder = Builder::new(BuIndex(0), small(&[2], &[1], 5, 4), START);
        while builder.poll_transmit().is_some() {}
        arrive(&mut builder, 0, 0, 1, 8).unwrap();
        assign(&mut builder, 0, 1, 1);
        assert_eq!(builder.poll_complete_batch(), None);
        let cause =
            StopCause::Protocol { by: Unit::Readout(RuIndex(0)), error: ProtocolError::TooManyFragments };
        assert_eq!(builder.poll_transmit(), Some(Message::Fault { cause }));
    }

    #[test]
    fn a_verdict_has_to_cover_the_batch() {
        let mut builder = builder();
        assign(&mut builder, 0, 1, 7);
        assert_eq!(builder.handle_processed(SLOT, outcome()), Err(ProtocolError::SlotNotAssigned));
        arrive(&mut builder, 0, 0, 1, 8).unwrap();
        arrive(&mut builder, 1, 0, 1, 11).unwrap();
        let short = BatchOutcome { missing: BatchTally::default(), ..outcome() };
        assert_eq!(builder.handle_processed(SLOT, short), Err(ProtocolError::WrongEventCount));
        let eager = BatchOutcome { accepted: 4, ..outcome() };
        assert_eq!(builder.handle_processed(SLOT, eager), Err(ProtocolError::WrongEventCount));
        builder.handle_processed(SLOT, outcome()).unwrap();
    }

    #[test]
    fn settling_waits_for_what_is_being_processed() {
        let mut builder = builder();
        assign(&mut builder, 0, 1, 7);
        arrive(&mut builder, 0, 0, 1, 8).unwrap();
        arrive(&mut builder, 1, 0, 1, 11).unwrap();
        assign(&mut builder, 1, 1, 8);
        arrive(&mut builder, 1, 1, 1, 10).unwrap();
        let lost = StopCause::Lost(Unit::Readout(RuIndex(0)));
        builder.handle_message(Message::Stop { cause: lost }, START);
        builder.handle_message(Message::Drain, START);
        assert_eq!(builder.poll_report(), None);
        builder.handle_processed(SLOT, outcome()).unwrap();
        builder.handle_released(SLOT).unwrap();
        let report = builder.poll_report().unwrap();
        assert_eq!((report.done.batches, report.cause), (1, lost));
        assert_eq!(report.slots[0], SlotReport { generation: Generation(1), state: SlotState::Finished });
        let SlotState::Unfinished { arrived, cause, .. } = &report.slots[1].state else {
            panic!("slot 1 is unfinished: {report:?}")
        };
        assert_eq!((arrived.as_slice(), *cause), (&[(RuIndex(1), 10)][..], UnfinishedCause::ReadoutLost));
    }

    #[test]
    fn a_lost_card_leaves_its_batches_unprocessed() {
        let mut builder = builder();
        assign(&mut builder, 0, 1, 7);
        arrive(&mut builder, 0, 0, 1, 8).unwrap();
        arrive(&mut builder, 1, 0, 1, 11).unwrap();
        builder.handle_card_lost();
        assert_eq!(builder.poll_transmit(), Some(Message::Fault { cause: StopCause::CardLost(BuIndex(0)) }));
        builder.handle_message(Message::Stop { cause: StopCause::CardLost(BuIndex(0)) }, START);
        builder.handle_message(Message::Drain, START);
        let report = builder.poll_report().unwrap();
        assert!(matches!(
            report.slots[0].state,
            SlotState::Unfinished { cause: UnfinishedCause::Unprocessed, .. }
        ));
    }
}
