//! From a complete batch to its outcome: kernel, software trigger, storage.

use super::BuilderProcess;
use super::kernel::{CardKernel, KernelCompletion};
use super::slot_contents::InvalidSlotData;
use super::storage::{Storage, StorageError, StorageJob, StoredBatch};
use super::workers::{DecidedBatch, WorkerJob};
use crate::config::{Candidates, StoredEvents};
use crate::core::builder::CompleteBatch;
use crate::core::plan::Batch;
use crate::core::recovery::OnReadoutLoss;
use crate::core::{BatchOutcome, RuIndex, SlotIndex};
use millstream_card_abi::events::EventSummary;

/// A processed batch that waits for the software trigger.
pub(super) struct UndecidedBatch {
    pub(super) complete: CompleteBatch,
    pub(super) outcome: BatchOutcome,
    /// The candidates that are delivered: built, or lacking only lost readout units.
    pub(super) delivered: Vec<u16>,
    /// Decision maps of the candidates, by event.
    pub(super) decisions: Vec<(u16, Vec<u8>)>,
}

impl BuilderProcess {
    /// Submits a complete batch to the kernel; without a kernel, finishes it.
    pub(super) fn process(&mut self, complete: CompleteBatch) {
        let CompleteBatch { slot, batch, .. } = complete;
        if !self.landing.is_leased() {
            return self.lose_card("the lease of the card has ended".to_owned());
        }
        if let Err(error) = self.fill_absent(slot, &batch) {
            return self.invalid_data(&error);
        }
        let contents = &self.contents[slot.index()];
        if !contents.is_of(&batch) {
            return self.invalid_data(&InvalidSlotData::WrongBatch { slot, batch: batch.id });
        }
        let sources = self.config.layout.packets.len();
        match &mut self.kernel {
            None => {
                self.corrupt.clear();
                if self.checksums.selects(&batch) {
                    let places = (&*self.landing, &self.config.layout, &mut self.reader);
                    match self.checksums.check(places, slot, &batch, |_| true) {
                        Ok(corrupt) => self.corrupt.extend(corrupt),
                        Err(error) => return self.invalid_data(&error),
                    }
                }
                let outcome = contents.outcome(&batch, &self.corrupt);
                self.complete_batch(&complete, outcome);
            }
            Some(kernel) => match kernel.submit(slot, &batch, sources) {
                Ok(()) => self.in_kernel[slot.index()] = Some(complete),
                Err(error) => self.lose_card(error.to_string()),
            },
        }
    }

    /// Puts empty packets into the slot where those of lost readout units are missing.
    pub(super) fn fill_absent(&mut self, slot: SlotIndex, batch: &Batch) -> Result<(), InvalidSlotData> {
        let layout = &self.config.layout;
        let contents = &mut self.contents[slot.index()];
        for ru in (0..self.config.plan.readouts()).map(|ru| RuIndex(ru as u16)) {
            if self.core.is_absent(slot, ru) {
                let slot_offset = layout.slot_offset(slot);
                let checksums = &mut self.checksums;
                let area = (layout, ru);
                contents.add_absent(&mut self.reader, &self.landing, slot_offset, area, batch, checksums)?;
            }
        }
        Ok(())
    }

    /// Takes the kernel's completions. Returns whether there was one.
    pub(super) fn take_kernel_completions(&mut self) -> bool {
        let mut any = false;
        while !self.card_lost
            && let Some(kernel) = &mut self.kernel
        {
            match kernel.poll() {
                Ok(Some(completion)) => {
                    any = true;
                    self.kernel_completed(&completion);
                }
                Ok(None) => break,
                Err(error) => self.lose_card(error.to_string()),
            }
        }
        any
    }

    pub(super) fn kernel_completed(&mut self, completion: &KernelCompletion) {
        let work = self.in_kernel.get_mut(completion.slot.index()).and_then(Option::take);
        let (Some(kernel), Some(complete)) = (&mut self.kernel, work) else {
            return self.invalid_data(&InvalidSlotData::Kernel(format!(
                "completion for {}, which has no batch in the kernel",
                completion.slot
            )));
        };
        let CompleteBatch { slot, batch, .. } = complete;
        let contents = &self.contents[slot.index()];
        let delivers = self.config.plan.recovery.readout == OnReadoutLoss::Deliver;
        let outcome = match kernel.outcome(completion, &batch, contents, delivers) {
            Ok(outcome) => outcome,
            Err(error) => return self.invalid_data(&error),
        };
        if outcome.corrupt.events > 0 {
            let places = (&*self.landing, &self.config.layout, &mut self.reader);
            let is_corrupt = |event| kernel.summary(event).corrupt > 0;
            if let Err(error) = self.checksums.check(places, slot, &batch, is_corrupt) {
                return self.invalid_data(&error);
            }
        }
        self.statistics.card_busy += completion.busy;
        self.statistics.decisions_set += completion.decisions_set;
        if let Some(reference) = &mut self.reference {
            kernel.compare(reference, &batch, contents);
        }
        self.complete_batch(&complete, outcome);
    }

    /// Counts the payload of a processed batch, and stores its events before it frees its slot.
    pub(super) fn complete_batch(&mut self, complete: &CompleteBatch, mut outcome: BatchOutcome) {
        let CompleteBatch { slot, batch, .. } = *complete;
        if self.workers.is_none() && self.config.builders[self.index.index()].trigger.is_some() {
            // The software trigger has failed. Without its decision the batch is not done, and another unit builds it again.
            return;
        }
        if self.config.output.as_ref().is_some_and(|output| output.events != StoredEvents::Accepted) {
            let delivered = (0..batch.events).filter(|&event| self.is_delivered(slot, event.into()));
            outcome.accepted = delivered.count() as u16;
        }
        let contents = &self.contents[slot.index()];
        let built = (0..batch.events.into()).filter(|&event| self.is_built(slot, event));
        let payload: u64 = built.map(|event| contents.payload(event).0).sum();
        self.statistics.payload_built.0 += payload;
        if self.workers.is_some() {
            return self.submit_to_workers(complete, outcome);
        }
        let events = self.config.output.as_ref().map(|output| output.events);
        let wanted = |event: &u16| events.is_some_and(|events| self.is_wanted(events, slot, (*event).into()));
        let events: Vec<u16> = (0..batch.events).filter(wanted).collect();
        let decisions = events.iter().flat_map(|&event| self.kernel_decisions(event)).copied().collect();
        self.store_or_finish(complete, outcome, events, decisions);
    }

    /// Gives the batch to the software trigger.
    pub(super) fn submit_to_workers(&mut self, complete: &CompleteBatch, mut outcome: BatchOutcome) {
        let CompleteBatch { slot, batch, .. } = *complete;
        let candidates: Vec<u16> =
            (0..batch.events).filter(|&event| self.is_candidate(slot, event.into())).collect();
        // Counted again from its decisions.
        outcome.accepted = 0;
        if candidates.is_empty() {
            return self.store_or_finish(complete, outcome, Vec::new(), Vec::new());
        }
        let delivered =
            candidates.iter().copied().filter(|&event| self.is_delivered(slot, event.into())).collect();
        let decisions =
            candidates.iter().map(|&event| (event, self.kernel_decisions(event).to_vec())).collect();
        self.in_workers[slot.index()] =
            Some(UndecidedBatch { complete: *complete, outcome, delivered, decisions });
        self.core.handle_storing(slot, self.clock.now());
        if let Some(workers) = &mut self.workers {
            workers.submit(WorkerJob { slot, batch, candidates });
        }
    }

    /// Whether the software trigger decides on an event of the processed batch in the slot.
    pub(super) fn is_candidate(&self, slot: SlotIndex, event: usize) -> bool {
        if self.is_discarded(slot) {
            return false;
        }
        let trigger = self.config.builders[self.index.index()].trigger.as_ref();
        match trigger.map(|trigger| trigger.candidates) {
            Some(Candidates::All) => true,
            Some(Candidates::Accepted) if self.kernel.as_ref().is_some_and(CardKernel::decides) => {
                self.is_wanted(StoredEvents::Accepted, slot, event)
            }
            _ => self.is_delivered(slot, event),
        }
    }

    /// Takes decisions of the software trigger. Returns whether there was one.
    pub(super) fn take_decided(&mut self) -> bool {
        let mut any = false;
        while let Some(workers) = &mut self.workers {
            match workers.poll() {
                Ok(Some(DecidedBatch { slot, accepted })) => {
                    any = true;
                    self.decided(slot, accepted);
                }
                Ok(None) => break,
                Err(error) => {
                    self.statistics.error.get_or_insert_with(|| error.to_string());
                    self.core.handle_output_failed();
                    self.statistics.workers = workers.counts();
                    self.workers = None;
                }
            }
        }
        any
    }

    pub(super) fn decided(&mut self, slot: SlotIndex, accepted: Vec<u16>) {
        let Some(undecided) = self.in_workers[slot.index()].take() else { return };
        let UndecidedBatch { complete, mut outcome, delivered, decisions } = undecided;
        let accepted_and_delivered = accepted.iter().filter(|event| delivered.contains(event)).count();
        // At most the events of a batch.
        outcome.accepted = accepted_and_delivered as u16;
        let maps = decisions.into_iter().filter(|(event, _)| accepted.contains(event));
        let maps = maps.flat_map(|(_, map)| map).collect();
        self.store_or_finish(&complete, outcome, accepted, maps);
    }

    /// Stores events of a processed batch, or finishes it if there are none to store.
    pub(super) fn store_or_finish(
        &mut self,
        complete: &CompleteBatch,
        mut outcome: BatchOutcome,
        events: Vec<u16>,
        decisions: Vec<u8>,
    ) {
        let slot = complete.slot;
        // At most the events of a batch.
        outcome.selected = events.len() as u16;
        if !self.submit_to_storage(complete, outcome, events, decisions) {
            self.finish_batch(slot, outcome);
        }
    }

    /// The kernel's decision map of an event of the processed batch; empty without a trigger kernel.
    pub(super) fn kernel_decisions(&self, event: u16) -> &[u8] {
        self.kernel.as_ref().map_or(&[], |kernel| kernel.decisions(event.into()))
    }

    /// Whether an event of the processed batch in the slot is complete and intact.
    pub(super) fn is_built(&self, slot: SlotIndex, event: usize) -> bool {
        self.contents[slot.index()].is_complete(event) && !self.is_corrupt(event)
    }

    /// Whether an event of the processed batch in the slot is built, or lacks only the sources of lost readout units and is
    /// delivered all the same.
    pub(super) fn is_delivered(&self, slot: SlotIndex, event: usize) -> bool {
        let delivers = self.config.plan.recovery.readout == OnReadoutLoss::Deliver;
        let is_present = self.contents[slot.index()].is_complete_but_lost(event);
        self.is_built(slot, event) || delivers && is_present && !self.is_corrupt(event)
    }

    /// Whether an event of the processed batch has a corrupt fragment.
    pub(super) fn is_corrupt(&self, event: usize) -> bool {
        match &self.kernel {
            Some(kernel) => kernel.summary(event).corrupt > 0,
            None => self.corrupt.get(event).is_some_and(|&fragments| fragments > 0),
        }
    }

    /// The kernel's summary of an event of the processed batch; zero without a kernel.
    pub(super) fn kernel_summary(&self, event: usize) -> EventSummary {
        self.kernel.as_ref().map(|kernel| kernel.summary(event)).unwrap_or_default()
    }

    /// Whether the run stores an event of the processed batch in the slot.
    pub(super) fn is_wanted(&self, wanted: StoredEvents, slot: SlotIndex, event: usize) -> bool {
        if self.is_discarded(slot) {
            return false;
        }
        match wanted {
            StoredEvents::Accepted => {
                let incomplete = self.kernel.as_ref().is_some_and(CardKernel::accepts_incomplete);
                self.kernel_summary(event).accepted != 0 && (incomplete || self.is_delivered(slot, event))
            }
            StoredEvents::Built => self.is_delivered(slot, event),
            StoredEvents::All => true,
        }
    }

    /// Whether the events of the processed batch in the slot are only counted, because they lack a lost readout unit.
    fn is_discarded(&self, slot: SlotIndex) -> bool {
        self.config.plan.recovery.readout == OnReadoutLoss::Discard
            && self.contents[slot.index()].lacks_readout_unit()
    }

    /// Queues events of a processed batch for storage, with their decision maps. False if none is to be stored.
    pub(super) fn submit_to_storage(
        &mut self,
        complete: &CompleteBatch,
        outcome: BatchOutcome,
        mut events: Vec<u16>,
        mut decisions: Vec<u8>,
    ) -> bool {
        let CompleteBatch { slot, batch, again } = *complete;
        let Some(storage) = &self.storage else { return false };
        let map = decisions.len().checked_div(events.len()).unwrap_or(0);
        events.truncate(storage.admit(events.len()));
        decisions.truncate(events.len() * map);
        if events.is_empty() {
            return false;
        }
        let contents = std::mem::take(&mut self.contents[slot.index()]);
        self.in_storage[slot.index()] = Some(outcome);
        self.core.handle_storing(slot, self.clock.now());
        if let Some(storage) = &mut self.storage {
            storage.submit(StorageJob { slot, batch, again, contents, events, decisions });
        }
        true
    }

    /// Finishes batches that were stored. Returns whether there was one.
    pub(super) fn take_stored(&mut self) -> bool {
        let mut any = false;
        while let Some(result) = self.storage.as_mut().and_then(Storage::poll) {
            any = true;
            self.finish_stored(result);
        }
        any
    }

    /// Waits until no batch waits for storage.
    pub(super) fn drain_storage(&mut self) {
        while let Some(result) = self.storage.as_mut().and_then(Storage::wait) {
            self.finish_stored(result);
        }
    }

    pub(super) fn finish_stored(&mut self, result: Result<StoredBatch, StorageError>) {
        match result {
            Ok(StoredBatch { slot, contents, .. }) => {
                self.contents[slot.index()] = contents;
                if let Some(outcome) = self.in_storage[slot.index()].take() {
                    self.finish_batch(slot, outcome);
                }
            }
            Err(StorageError::Data(error)) => self.invalid_data(&error),
            Err(StorageError::Sink(error)) => {
                self.statistics.error.get_or_insert_with(|| error.to_string());
                self.core.handle_output_failed();
            }
        }
    }

    pub(super) fn finish_batch(&mut self, slot: SlotIndex, outcome: BatchOutcome) {
        self.contents[slot.index()].clear();
        if let Err(error) = self.core.handle_processed(slot, outcome) {
            self.invalid_data(&InvalidSlotData::Kernel(error.to_string()));
        }
    }
}
