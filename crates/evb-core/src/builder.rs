//! Builder unit: the state of each slot, and when a batch is complete.
//!
//! ```text
//!           poll_transmit: Grant       Assign and arrivals       complete: poll_complete_batch
//!   Free ─────────────────────► Filling ─────────────────► Filling ───────────► Processing
//!    ▲                                                                               │
//!    └─────────────── handle_processed: Done, then the next Grant ──────────────────┘
//! ```
//!
//! Immediate data may arrive before the manager's `Assign`, because different units send them. A batch is
//! complete when the assignment and the immediate data of all readout units are there. A slot is granted
//! again only after its batch was processed. A connection delivers writes in order, so no write of the old
//! generation can arrive then. After a failure no slot is granted any more: a late write can only fill a slot
//! that is not read.
//!
//! If the run goes on without a readout unit, a batch is complete without it. The caller then closes the connection, and
//! puts empty packets where those of the lost unit are missing ([`Builder::is_absent`]). A unit that joins with the same
//! sources delivers later batches; fragments are counted for the unit that they came from.

mod takeover;

use super::deadlines::Deadlines;
use super::message::{Assignment, Message};
use super::plan::{Batch, Plan};
use super::recovery::{Membership, OnReadoutLoss, ReadoutMember};
use super::report::{BuilderReport, SlotReport, SlotState, UnfinishedCause};
use super::summary::{BatchOutcome, Totals};
use super::types::{
    BatchId, BuIndex, Generation, Immediate, Instant, ProtocolError, RuIndex, SlotIndex, StopCause, Term,
    Unit,
};
use super::watch::ManagerWatch;
use std::collections::VecDeque;

/// A batch whose packets have all arrived: process it, then call [`Builder::handle_processed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompleteBatch {
    /// Its slot.
    pub slot: SlotIndex,
    /// The batch.
    pub batch: Batch,
    /// Whether a lost builder unit had the batch before, and may have stored its events.
    pub again: bool,
}

/// A readout unit's arrival in a slot, accepted by [`Builder::begin_arrival`]. Read the packets' headers there,
/// then complete it with [`Builder::complete_arrival`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "an arrival that is not completed is not counted"]
pub struct Arrival {
    readout: RuIndex,
    slot: SlotIndex,
}

impl Arrival {
    /// The slot that the packets were written to.
    pub fn slot(&self) -> SlotIndex {
        self.slot
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not granted: its batch is done, or it was never granted.
    Free,
    /// Granted; its batch is not complete.
    Filling,
    /// Complete; waiting for the outcome.
    Processing,
}

#[derive(Clone, Debug)]
struct Slot {
    generation: Generation,
    state: State,
    batch: Option<Batch>,
    again: bool,
    /// Readout units whose packets have arrived, or will not arrive.
    arrivals: u16,
    /// Readout units whose packets will not arrive.
    absent: u16,
    timed_out: bool,
    /// Whether its batch was processed and went to the software trigger or storage.
    storing: bool,
}

impl Slot {
    /// Whether its batch waits for the software trigger or storage, which a lost card does not end.
    fn is_storing(&self) -> bool {
        self.state == State::Processing && self.storing
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Granting slots.
    Running,
    /// Arrivals count; waiting for the manager's `Drain`. At `until` the unit drains without it.
    Stopping { until: Instant },
    /// No arrival counts; waiting for the outcomes of complete batches, at most until `until`.
    Draining { until: Instant },
    /// The report is made.
    Reported,
}

/// A builder unit.
#[derive(Debug)]
pub struct Builder {
    index: BuIndex,
    plan: Plan,
    slots: Vec<Slot>,
    /// Fragments that arrived in the slot's current generation and their sender, by slot and readout unit at the start.
    arrived: Vec<Option<(RuIndex, u32)>>,
    /// Whether the packets of a lost readout unit are missing in the slot's batch, by slot and readout unit at the start.
    absent: Vec<bool>,
    /// By readout unit with restarts.
    arrived_total: Vec<u64>,
    /// Of those, the ones in finished batches.
    arrived_done: Vec<u64>,
    /// Finished batches that lost builder units had before.
    rebuilt: Vec<BatchId>,
    /// The batch with the highest number that was assigned to the unit.
    newest: Option<Batch>,
    /// By readout unit at the start: the unit with its sources. The run goes on without lost ones.
    readouts: Vec<ReadoutMember>,
    /// From assignment to the last arrival, then from there to the outcome.
    deadlines: Deadlines,
    /// When the manager has to know which batches wait for the software trigger or storage; `None` if none waited then.
    storing_due: Option<Instant>,
    complete: VecDeque<SlotIndex>,
    processing: u16,
    done: Totals,
    events_assigned: u64,
    rejected: [u64; ProtocolError::ALL.len()],
    readouts_lost: Vec<bool>,
    /// Readout units that the run went on without.
    excluded: Vec<RuIndex>,
    /// Slots whose packets do not count.
    withdrawn: VecDeque<SlotIndex>,
    card_lost: bool,
    phase: Phase,
    cause: StopCause,
    manager: ManagerWatch,
    outbox: VecDeque<Message>,
    /// Faults reported so far.
    faults: Vec<StopCause>,
    report: Option<BuilderReport>,
}

impl Builder {
    /// A builder unit that joins the run.
    pub fn join(index: BuIndex, plan: Plan, membership: &Membership, now: Instant) -> Builder {
        let mut builder = Builder::new(index, plan, now);
        builder.manager = ManagerWatch::new(&builder.plan, membership.term, now);
        for (present, member) in builder.readouts.iter_mut().zip(&membership.readouts) {
            *present = *member;
        }
        for ru in 0..builder.readouts.len() {
            builder.readouts_lost[ru] = builder.readouts[ru].is_lost;
        }
        builder
    }

    /// Builder unit `index` at the start of a run: all its slots are granted at once.
    pub fn new(index: BuIndex, plan: Plan, now: Instant) -> Builder {
        let slots = usize::from(plan.slots[index.index()].get());
        let readouts = plan.readouts();
        let free = Slot {
            generation: Generation(0),
            state: State::Free,
            batch: None,
            again: false,
            arrivals: 0,
            absent: 0,
            timed_out: false,
            storing: false,
        };
        let mut builder = Builder {
            index,
            slots: vec![free; slots],
            arrived: vec![None; slots * readouts],
            absent: vec![false; slots * readouts],
            arrived_total: vec![0; plan.readout_members()],
            arrived_done: vec![0; plan.readout_members()],
            rebuilt: Vec::new(),
            newest: None,
            readouts: (0..readouts)
                .map(|ru| ReadoutMember {
                    index: RuIndex(ru as u16),
                    is_lost: false,
                    first_batch: BatchId(0),
                })
                .collect(),
            deadlines: Deadlines::new(slots),
            storing_due: None,
            complete: VecDeque::with_capacity(slots),
            processing: 0,
            done: Totals::default(),
            events_assigned: 0,
            rejected: [0; ProtocolError::ALL.len()],
            readouts_lost: vec![false; readouts],
            excluded: Vec::new(),
            withdrawn: VecDeque::new(),
            card_lost: false,
            phase: Phase::Running,
            cause: StopCause::EndOfRun,
            manager: ManagerWatch::new(&plan, Term::FIRST, now),
            outbox: VecDeque::with_capacity(2 * slots + readouts),
            faults: Vec::new(),
            report: None,
            plan,
        };
        for slot in 0..slots {
            builder.grant(slot);
        }
        builder
    }

    /// A message from the manager of that term.
    pub fn handle_message(&mut self, term: Term, message: Message, now: Instant) {
        let was_waiting = self.manager.is_waiting();
        if !self.manager.heard(term, now) {
            return;
        }
        if was_waiting {
            // Some readout units get the assignments of their batches only now.
            self.deadlines.restart(now + self.plan.timeout);
        }
        match message {
            Message::Assign(assignment) => {
                if let Err(error) = self.assign(assignment, now) {
                    self.fault(StopCause::Protocol { by: Unit::Manager, error });
                }
            }
            Message::Stop { cause } => self.stop(cause, now + 3 * self.plan.drain_timeout),
            Message::Drain => self.drain(now),
            Message::Heartbeat => {}
            Message::Lost { unit: Unit::Readout(ru) } if ru.index() < self.arrived_total.len() => {
                self.exclude_readout(ru, now);
            }
            Message::Joined { readout, first_batch } if readout.index() < self.arrived_total.len() => {
                self.readout_joined(readout, first_batch);
            }
            Message::Withdraw { builder, slot, generation } if builder == self.index => {
                self.withdraw(slot, generation);
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

    /// Immediate data arrived: all packets of that readout unit for the slot's batch are in place.
    ///
    /// # Errors
    /// The violation of the protocol. It is counted and reported to the manager, which stops the run.
    pub fn begin_arrival(&mut self, ru: RuIndex, immediate: Immediate) -> Result<Arrival, ProtocolError> {
        if self.is_excluded(ru) {
            // Its connection is being closed.
            return Err(ProtocolError::StaleArrival);
        }
        self.check_arrival(ru, immediate).map_err(|error| self.reject(ru, error))
    }

    /// The packets of the arrival have valid headers, with that many fragments.
    ///
    /// # Errors
    /// More fragments than possible: counted and reported as in [`begin_arrival`](Self::begin_arrival).
    pub fn complete_arrival(
        &mut self,
        arrival: Arrival,
        fragments: u32,
        now: Instant,
    ) -> Result<(), ProtocolError> {
        let Arrival { readout, slot } = arrival;
        self.arrive(readout, slot.index(), fragments, now).map_err(|error| self.reject(readout, error))
    }

    /// A packet in a slot or a kernel's result is invalid: the run cannot continue.
    pub fn handle_invalid_data(&mut self) {
        self.fault(StopCause::InvalidData(self.index));
    }

    /// Accepted events cannot be stored: the run cannot continue.
    pub fn handle_output_failed(&mut self) {
        self.fault(StopCause::OutputFailed(self.index));
    }

    /// The batch in that slot is processed and waits for the software trigger or storage. They have no deadline of their own, also
    /// at the manager: it is told from time to time that the batch waits.
    pub fn handle_storing(&mut self, slot: SlotIndex, now: Instant) {
        let entry = self.slots.get_mut(slot.index());
        if let Some(entry) = entry.filter(|entry| entry.state == State::Processing) {
            entry.storing = true;
            self.deadlines.stop(slot.index());
            self.storing_due.get_or_insert(now + self.plan.timeout / 4);
        }
    }

    /// Whether the batch in that slot is complete without the packets of that readout unit's sources, because it was lost.
    pub fn is_absent(&self, slot: SlotIndex, ru: RuIndex) -> bool {
        self.absent[self.cell(slot.index(), ru)]
    }

    /// Whether the run goes on without that readout unit. Its connection must not deliver any more.
    pub fn is_excluded(&self, ru: RuIndex) -> bool {
        let member = self.readouts[self.plan.readout_role(ru).index()];
        member.is_lost || member.index != ru
    }

    /// The readout unit that has the sources of readout unit `role` at the start of the run, or had them last.
    pub fn readout_member(&self, role: RuIndex) -> ReadoutMember {
        self.readouts[role.index()]
    }

    /// Whether the unit waits only for the outcomes of complete batches.
    pub fn is_draining(&self) -> bool {
        matches!(self.phase, Phase::Draining { .. })
    }

    /// The batch in that slot is processed and its accepted events are stored. Frees the slot and grants it again.
    ///
    /// # Errors
    /// The slot is not being processed, or the outcome does not cover the batch's events. This is a mistake of the
    /// caller; nothing changes.
    pub fn handle_processed(&mut self, slot: SlotIndex, outcome: BatchOutcome) -> Result<(), ProtocolError> {
        let at = slot.index();
        let entry = self.slots.get_mut(at).ok_or(ProtocolError::UnknownSlotOrUnit)?;
        let (State::Processing, Some(batch)) = (entry.state, entry.batch) else {
            return Err(ProtocolError::SlotNotAssigned);
        };
        let mut outcome = outcome;
        if entry.absent > 0 {
            // Every event lacks the lost unit's sources.
            outcome.readout_lost = std::mem::take(&mut outcome.missing);
        }
        if !outcome.covers(batch.events) {
            return Err(ProtocolError::WrongEventCount);
        }
        entry.state = State::Free;
        let generation = entry.generation;
        self.processing -= 1;
        self.deadlines.stop(at);
        self.done += outcome;
        if entry.again {
            self.rebuilt.push(batch.id);
        }
        let row = self.cell(at, RuIndex(0));
        for &(by, fragments) in self.arrived[row..row + self.plan.readouts()].iter().flatten() {
            self.arrived_done[by.index()] += u64::from(fragments);
        }
        for ru in 0..self.plan.readouts() {
            let ru = RuIndex(ru as u16);
            let arrived = self.arrived[self.cell(at, ru)].map_or(0, |(_, fragments)| fragments);
            let missing = self.plan.expected_fragments(ru, batch.events) - arrived;
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

    /// The card died or failed: batches that the kernel processes get no outcome. Those that wait for storage do: they may be
    /// stored already.
    pub fn handle_card_lost(&mut self) {
        self.card_lost = true;
        self.fault(StopCause::CardLost(self.index));
        self.finish_if_drained();
    }

    /// A readout unit died. Its undelivered fragments count as lost with it. Ignored once the run stops,
    /// because readout units may then exit.
    pub fn handle_readout_lost(&mut self, ru: RuIndex) {
        let role = self.plan.readout_role(ru).index();
        let is_present = !self.is_excluded(ru);
        if self.phase == Phase::Running
            && is_present
            && !std::mem::replace(&mut self.readouts_lost[role], true)
        {
            self.fault(StopCause::Lost(Unit::Readout(ru)));
        }
    }

    /// The next complete batch, in order of completion.
    pub fn poll_complete_batch(&mut self) -> Option<CompleteBatch> {
        if self.phase == Phase::Reported {
            return None;
        }
        let slot = self.complete.pop_front()?;
        let entry = &self.slots[slot.index()];
        let batch = entry.batch.expect("a batch is complete only once it is assigned");
        Some(CompleteBatch { slot, batch, again: entry.again })
    }

    /// The next slot whose packets do not count any more: a batch that only lost readout units knew.
    pub fn poll_withdrawn(&mut self) -> Option<SlotIndex> {
        self.withdrawn.pop_front()
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
            Phase::Running if self.manager.is_waiting() => Some(self.manager.due()),
            Phase::Running => {
                let due = self.deadlines.earliest().into_iter().chain(self.storing_due);
                Some(due.fold(self.manager.due(), Instant::min))
            }
            Phase::Stopping { until } | Phase::Draining { until } => Some(until),
            Phase::Reported => None,
        }
    }

    /// A timer may have expired.
    pub fn handle_timeout(&mut self, now: Instant) {
        match self.phase {
            Phase::Running if self.manager.handle_timeout(now) => self.stop_without_manager(now),
            // A batch that is late may lack an assignment that the lost manager did not send to all.
            Phase::Running if self.manager.is_waiting() => {}
            Phase::Running => {
                while let Some(at) = self.deadlines.pop_due(now) {
                    self.slots[at].timed_out = true;
                    if let Some(batch) = self.slots[at].batch {
                        self.report_late(at, batch);
                    }
                }
                if self.storing_due.is_some_and(|due| due <= now) {
                    self.report_storing(now);
                }
            }
            Phase::Stopping { until } if until <= now => self.drain(now),
            Phase::Draining { until } if until <= now => self.finish(),
            _ => {}
        }
    }

    /// The report, once, when the unit has stopped. It goes to the manager, or to the launcher if the manager is
    /// lost.
    pub fn poll_report(&mut self) -> Option<BuilderReport> {
        self.report.take()
    }

    fn cell(&self, slot: usize, ru: RuIndex) -> usize {
        slot * self.plan.readouts() + self.plan.readout_role(ru).index()
    }

    fn check_arrival(&self, ru: RuIndex, immediate: Immediate) -> Result<Arrival, ProtocolError> {
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
        Ok(Arrival { readout: ru, slot: immediate.slot })
    }

    #[cold]
    fn reject(&mut self, ru: RuIndex, error: ProtocolError) -> ProtocolError {
        self.rejected[error as usize - 1] += 1;
        self.fault(StopCause::Protocol { by: Unit::Readout(ru), error });
        error
    }

    /// A batch did not arrive, or was not processed, in time.
    fn report_late(&mut self, at: usize, batch: Batch) {
        let present = self.readouts.iter().filter(|member| !member.is_lost);
        let present = present.filter(|member| !self.absent[self.cell(at, member.index)]);
        let present: Vec<RuIndex> = present.map(|member| member.index).collect();
        let late: Vec<RuIndex> =
            present.iter().copied().filter(|ru| self.arrived[self.cell(at, *ru)].is_none()).collect();
        // If no unit has delivered, none of them is to blame more than others.
        let is_single = self.slots[at].state == State::Filling && late.len() < present.len();
        if is_single && self.plan.recovery.readout != OnReadoutLoss::Stop {
            for readout in late {
                self.fault(StopCause::ReadoutLate { by: self.index, readout });
            }
        } else {
            self.fault(StopCause::TimedOut { by: Unit::Builder(self.index), batch: batch.id });
        }
    }

    /// Tells the manager which batches wait for the software trigger or storage.
    fn report_storing(&mut self, now: Instant) {
        let slots = (0..).map(SlotIndex).zip(&self.slots).filter(|(_, slot)| slot.is_storing());
        let before = self.outbox.len();
        let builder = self.index;
        self.outbox.extend(slots.map(|(at, slot)| Message::Storing {
            builder,
            slot: at,
            generation: slot.generation,
        }));
        self.storing_due = (self.outbox.len() > before).then(|| now + self.plan.timeout / 4);
    }

    /// A readout unit has the sources of one that was lost, from that batch on.
    fn readout_joined(&mut self, ru: RuIndex, first_batch: BatchId) {
        let role = self.plan.readout_role(ru).index();
        if self.readouts[role].index == ru {
            // From an earlier term.
            return;
        }
        self.readouts[role] = ReadoutMember { index: ru, is_lost: false, first_batch };
        self.readouts_lost[role] = false;
    }

    /// The run goes on without that readout unit.
    fn exclude_readout(&mut self, ru: RuIndex, now: Instant) {
        if self.is_excluded(ru) {
            return;
        }
        let role = self.plan.readout_role(ru).index();
        self.readouts[role].is_lost = true;
        self.readouts_lost[role] = true;
        self.excluded.push(ru);
        for at in 0..self.slots.len() {
            if self.slots[at].state == State::Filling && self.slots[at].batch.is_some() {
                self.mark_absent(at, ru);
                self.queue_if_complete(at, now);
            }
        }
    }

    /// A batch that has not got the packets of that readout unit does not wait for them.
    fn mark_absent(&mut self, at: usize, ru: RuIndex) {
        let cell = self.cell(at, ru);
        if self.arrived[cell].is_none() && !std::mem::replace(&mut self.absent[cell], true) {
            self.slots[at].arrivals += 1;
            self.slots[at].absent += 1;
        }
    }

    fn grant(&mut self, at: usize) {
        let first = self.cell(at, RuIndex(0));
        self.arrived[first..first + self.plan.readouts()].fill(None);
        self.absent[first..first + self.plan.readouts()].fill(false);
        let generation = self.slots[at].generation.next();
        self.slots[at] = Slot {
            generation,
            state: State::Filling,
            batch: None,
            again: false,
            arrivals: 0,
            absent: 0,
            timed_out: false,
            storing: false,
        };
        let slot = SlotIndex(at as u16);
        self.outbox.push_back(Message::Grant { builder: self.index, slot, generation });
    }

    fn assign(&mut self, assignment: Assignment, now: Instant) -> Result<(), ProtocolError> {
        let Assignment { batch, builder, slot, generation, again } = assignment;
        if builder != self.index || slot.index() >= self.slots.len() {
            return Err(ProtocolError::UnknownSlotOrUnit);
        }
        if matches!(self.phase, Phase::Draining { .. } | Phase::Reported) {
            return Ok(());
        }
        let at = slot.index();
        let entry = &mut self.slots[at];
        let is_known = entry.generation == generation && entry.batch == Some(batch);
        if self.manager.term() > Term::FIRST && (is_known || entry.generation.is_after(generation)) {
            // Assigned in an earlier term, and perhaps done meanwhile.
            return Ok(());
        }
        if entry.generation != generation {
            return Err(ProtocolError::WrongGeneration);
        }
        if entry.state != State::Filling || entry.batch.is_some() {
            return Err(ProtocolError::AssignOfBusySlot);
        }
        (entry.batch, entry.again) = (Some(batch), again);
        self.newest = self.newest.into_iter().chain([batch]).max_by_key(|batch| batch.id);
        self.events_assigned += u64::from(batch.events);
        self.deadlines.start(at, now + self.plan.timeout);
        for role in 0..self.readouts.len() {
            let member = self.readouts[role];
            if member.is_lost || batch.id < member.first_batch {
                self.mark_absent(at, member.index);
            }
        }
        self.queue_if_complete(at, now);
        Ok(())
    }

    fn arrive(&mut self, ru: RuIndex, at: usize, fragments: u32, now: Instant) -> Result<(), ProtocolError> {
        if matches!(self.phase, Phase::Draining { .. } | Phase::Reported) {
            // Its fragments are accounted as in flight at stop.
            return Ok(());
        }
        let events = self.slots[at].batch.map_or(self.plan.batch.get(), |batch| batch.events);
        if fragments > self.plan.expected_fragments(ru, events) {
            return Err(ProtocolError::TooManyFragments);
        }
        let cell = self.cell(at, ru);
        self.arrived[cell] = Some((ru, fragments));
        self.arrived_total[ru.index()] += u64::from(fragments);
        self.slots[at].arrivals += 1;
        self.queue_if_complete(at, now);
        Ok(())
    }

    fn queue_if_complete(&mut self, at: usize, now: Instant) {
        let entry = &self.slots[at];
        let Some(batch) = entry.batch.filter(|_| usize::from(entry.arrivals) == self.plan.readouts()) else {
            return;
        };
        // Fragments that arrived before the assignment were checked against a full batch only.
        for ru in (0..self.plan.readouts()).map(|ru| RuIndex(ru as u16)) {
            if let Some((by, fragments)) = self.arrived[self.cell(at, ru)]
                && fragments > self.plan.expected_fragments(ru, batch.events)
            {
                let error = ProtocolError::TooManyFragments;
                return self.fault(StopCause::Protocol { by: Unit::Readout(by), error });
            }
        }
        self.slots[at].state = State::Processing;
        self.processing += 1;
        self.deadlines.start(at, now + self.plan.timeout);
        self.complete.push_back(SlotIndex(at as u16));
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

    fn stop(&mut self, cause: StopCause, until: Instant) {
        if self.phase == Phase::Running {
            self.cause = cause;
            self.phase = Phase::Stopping { until };
            if let StopCause::Lost(Unit::Readout(ru)) = cause
                && !self.is_excluded(ru)
                && let Some(lost) = self.readouts_lost.get_mut(self.plan.readout_role(ru).index())
            {
                *lost = true;
            }
        }
    }

    fn drain(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Running | Phase::Stopping { .. }) {
            self.phase = Phase::Draining { until: now + self.plan.drain_timeout };
            self.finish_if_drained();
        }
    }

    fn finish_if_drained(&mut self) {
        let waits = match self.card_lost {
            false => self.processing > 0,
            true => self.slots.iter().any(Slot::is_storing),
        };
        if matches!(self.phase, Phase::Draining { .. }) && !waits {
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
            excluded: self.excluded.clone(),
        });
    }

    fn report_slot(&self, at: usize) -> SlotReport {
        let slot = &self.slots[at];
        let row = self.cell(at, RuIndex(0));
        let arrived = &self.arrived[row..row + self.plan.readouts()];
        let cause = match slot.state {
            State::Free => return SlotReport { generation: slot.generation, state: SlotState::Finished },
            State::Processing => UnfinishedCause::Unprocessed,
            State::Filling if slot.timed_out => UnfinishedCause::TimedOut,
            State::Filling
                if arrived.iter().zip(&self.readouts_lost).any(|(a, &lost)| lost && a.is_none()) =>
            {
                UnfinishedCause::ReadoutLost
            }
            State::Filling => UnfinishedCause::Stopped,
        };
        let arrived = arrived.iter().flatten().copied().collect();
        let state = SlotState::Unfinished { batch: slot.batch, arrived, cause };
        SlotReport { generation: slot.generation, state }
    }
}

#[cfg(test)]
mod tests;
