//! Rules that span units: a slot holds one batch at a time, and the processed batch is the assigned one.

use millstream_evb::core::message::{Assignment, Message};
use millstream_evb::core::plan::{Batch, Plan};
use millstream_evb::core::{BatchId, BuIndex, Generation, RuIndex, SlotIndex};
use std::collections::BTreeMap;

#[derive(Clone)]
struct Slot {
    /// Granted and not done, by the messages that reached the manager.
    granted: bool,
    assigned: Option<Assignment>,
    /// Content of the slot, by readout unit.
    content: Vec<Option<(BatchId, Generation)>>,
    processing: Option<Assignment>,
}

/// Monitors all slots.
pub struct SlotMonitor {
    slots: Vec<Vec<Slot>>,
    window: u16,
    readouts: usize,
    outstanding: BTreeMap<(RuIndex, BuIndex), u16>,
    /// Violations detected.
    pub violations: Vec<String>,
}

impl SlotMonitor {
    /// Starts with empty slots.
    pub fn new(plan: &Plan) -> SlotMonitor {
        let empty =
            Slot { granted: false, assigned: None, content: vec![None; plan.readouts()], processing: None };
        SlotMonitor {
            slots: plan.slots.iter().map(|n| vec![empty.clone(); usize::from(n.get())]).collect(),
            window: plan.window.get(),
            readouts: plan.readouts(),
            outstanding: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    fn slot(&mut self, bu: BuIndex, slot: SlotIndex) -> &mut Slot {
        &mut self.slots[bu.index()][slot.index()]
    }

    /// A message reached the manager.
    pub fn reaches_manager(&mut self, message: &Message) {
        match *message {
            Message::Grant { builder, slot, .. } => self.slot(builder, slot).granted = true,
            Message::Done { builder, slot, .. } => {
                let slot = self.slot(builder, slot);
                (slot.granted, slot.assigned) = (false, None);
            }
            _ => {}
        }
    }

    /// A manager of a new term assigns the batches in the slots of that builder unit again; all slots are granted.
    pub fn take_over(&mut self, bu: BuIndex) {
        for slot in &mut self.slots[bu.index()] {
            (slot.granted, slot.assigned) = (true, None);
        }
    }

    /// The manager assigned a batch.
    pub fn assign(&mut self, assignment: &Assignment) {
        let slot = self.slot(assignment.builder, assignment.slot);
        let (granted, busy) = (slot.granted, slot.assigned.is_some());
        slot.assigned = Some(*assignment);
        if !granted {
            self.violations.push(format!("assigned without a credit: {assignment:?}"));
        }
        if busy {
            self.violations.push(format!("second batch in a slot: {assignment:?}"));
        }
    }

    /// A readout unit posted a batch.
    pub fn post(&mut self, ru: RuIndex, bu: BuIndex) {
        let outstanding = self.outstanding.entry((ru, bu)).or_default();
        *outstanding += 1;
        if *outstanding > self.window {
            self.violations.push(format!("{ru} has {outstanding} batches outstanding to {bu}"));
        }
    }

    /// A readout unit polled the completion of a batch.
    pub fn complete(&mut self, ru: RuIndex, bu: BuIndex) {
        *self.outstanding.get_mut(&(ru, bu)).expect("completions are of posted batches") -= 1;
    }

    /// A packet landed in a slot.
    pub fn land(&mut self, ru: RuIndex, to: &Assignment) {
        let role = ru.index() % self.readouts;
        let slot = self.slot(to.builder, to.slot);
        let overwrites = slot.processing.is_some();
        slot.content[role] = Some((to.batch.id, to.generation));
        if overwrites {
            self.violations.push(format!("{ru} wrote into a slot in use: {to:?}"));
        }
    }

    /// A builder unit started the kernel.
    ///
    /// The packets of `absent` readout units are not in the slot, because they are lost.
    pub fn process(&mut self, bu: BuIndex, at: SlotIndex, batch: &Batch, absent: &[bool]) {
        let slot = self.slot(bu, at);
        let assigned = slot.assigned;
        let content = slot.content.clone();
        slot.processing = assigned;
        let right = assigned.is_some_and(|a| {
            let holds = |c: &Option<_>| *c == Some((a.batch.id, a.generation));
            a.batch == *batch && content.iter().zip(absent).all(|(c, absent)| *absent || holds(c))
        });
        if !right {
            self.violations
                .push(format!("{bu} {at} processes {batch:?}, holds {content:?}, assigned {assigned:?}"));
        }
    }

    /// The batch is processed; returns what the slot held.
    pub fn finish(&mut self, bu: BuIndex, at: SlotIndex) -> Assignment {
        self.slot(bu, at).processing.take().expect("the kernel was started")
    }
}
