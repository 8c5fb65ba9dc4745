//! A readout unit: which batch to send next, what was sent where, and when to stop.
//!
//! The unit's assignments wait in one queue per builder unit. [`Rotation`] decides whose queue is served
//! next; within a queue the order is the manager's. A batch is sent by writing the packet of each source
//! to its place in the slot, the last write carrying the batch's [`Immediate`].

use super::message::{Assignment, Message};
use super::plan::Plan;
use super::report::{Posted, ReadoutReport, Sent};
use super::shape::Rotation;
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
    rotation: Rotation,
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
            rotation: Rotation::new(plan.builders(), index.index()),
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

    /// The next batch to send, if there is one whose builder unit has room in its window.
    pub fn poll_send(&mut self) -> Option<Send> {
        if self.phase != Phase::Running {
            return None;
        }
        let turn = self.rotation.take_turn()?;
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
        self.update_ready(builder);
        Ok(())
    }

    fn update_ready(&mut self, builder: BuIndex) {
        let peer = &self.peers[builder.index()];
        let ready = peer.reachable && !peer.waiting.is_empty() && peer.outstanding < self.plan.window.get();
        self.rotation.set_ready(builder.index(), ready);
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
