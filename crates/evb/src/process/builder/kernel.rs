//! Kernel on the builder unit's card: submits batches, takes results.

use super::reference::ReferenceDecisions;
use super::slot_contents::{InvalidSlotData, SlotContents};
use crate::config::{KernelConfig, LandingCard, RunConfig};
use crate::core::plan::Batch;
use crate::core::summary::{BatchCounts, BatchOutcome};
use crate::core::{BuIndex, SlotIndex};
use crate::layout::{KernelAreas, SlotAreas};
use crate::process::ProcessError;
use crate::process::card::unfit;
use millstream_camera::format::DECISION_BYTES;
use millstream_camera::trigger::TriggerGeometry;
use millstream_card::{Card, Ring, RingError};
use millstream_card_abi::command::{Descriptor, FLAG_VERIFY, Fault};
use millstream_card_abi::events::{
    CLUSTER7, Cluster7Args, EventSummary, FUNCTION_ARGUMENTS, FunctionArgs, PacketBuffer, STATUS_BAD_PACKET,
    VERIFY, VerifyArgs,
};
use millstream_card_abi::{AccessError, MemoryRange};
use std::time::Duration;

/// The region that runs the kernel.
const REGION: usize = 0;

/// Result of a kernel for one batch.
#[derive(Debug)]
pub(super) struct KernelCompletion {
    pub(super) slot: SlotIndex,
    /// Time that the card was busy with the batch.
    pub(super) busy: Duration,
    /// Number of decision bits set.
    pub(super) decisions_set: u64,
    status: Result<(), Fault>,
    fragments: u32,
}

/// A kernel on the builder unit's card.
pub(super) struct CardKernel {
    ring: Ring,
    config: KernelConfig,
    areas: KernelAreas,
    armed: bool,
    /// Summaries of the current batch.
    summaries: Vec<u8>,
    /// Decision maps of the current batch.
    decisions: Vec<u8>,
    args: Vec<u8>,
}

impl CardKernel {
    /// Loads the kernel on the builder unit's card; `None` without a kernel.
    pub(super) fn open(
        config: &RunConfig,
        bu: BuIndex,
        card: &Card,
    ) -> Result<Option<CardKernel>, ProcessError> {
        let crate::config::LandingTarget::Card(LandingCard { name, kernel, .. }) =
            &config.builders[bu.index()].landing
        else {
            return Ok(None);
        };
        let Some(areas) = config.kernel_areas(bu.index()) else { return Ok(None) };
        let unfit = |what: String| unfit(name, what);
        let load = |name| card.load(REGION, name).map_err(|error| unfit(error.to_string()));
        match kernel {
            KernelConfig::None => return Ok(None),
            KernelConfig::Verify => load(VERIFY)?,
            KernelConfig::Cluster7 { patches, .. } => {
                let geometry = TriggerGeometry::load(patches).map_err(|error| unfit(error.to_string()))?;
                let written = card.memory().write(areas.geometry(), &geometry.to_bytes());
                written.map_err(|error| unfit(error.to_string()))?;
                load(CLUSTER7)?;
            }
            KernelConfig::Function { module, .. } => {
                let image = std::fs::read(module)
                    .map_err(|cause| unfit(format!("cannot read {}: {cause}", module.display())))?;
                let place = areas.image();
                if image.len() as u64 != place.len {
                    return Err(unfit(format!("{} has changed: {} B", module.display(), image.len())));
                }
                let loaded = card.load_image(REGION, &image, place.offset);
                loaded.map_err(|error| unfit(format!("{}: {error}", module.display())))?;
            }
        }
        let batch = usize::from(config.plan.batch.get());
        let mut kernel = CardKernel {
            ring: Ring::open(card, areas.rings())?,
            config: kernel.clone(),
            areas,
            armed: false,
            summaries: vec![0; batch * EventSummary::BYTES],
            decisions: vec![0; batch * DECISION_BYTES],
            args: Vec::new(),
        };
        for slot in 0..config.plan.slots[bu.index()].get() {
            kernel.write_args(config, SlotIndex(slot)).map_err(|error| unfit(error.to_string()))?;
        }
        Ok(Some(kernel))
    }

    /// Writes a slot's arguments with its packet areas. Only their header changes from batch to batch.
    fn write_args(&mut self, config: &RunConfig, slot: SlotIndex) -> Result<(), AccessError> {
        let start = config.layout.slot_offset(slot);
        let places: Vec<_> = config
            .layout
            .packets
            .iter()
            .map(|area| PacketBuffer {
                offset: start + area.offset,
                capacity: area.capacity.into(),
                source: area.source,
                reserved: 0,
            })
            .collect();
        self.args.clear();
        let areas = self.areas.of_slot(slot);
        match self.config {
            KernelConfig::Cluster7 { .. } => self.cluster7(0, 1, areas).append_to(&places, &mut self.args),
            KernelConfig::Function { .. } => self.function(0, 1).append_to(&places, &mut self.args),
            KernelConfig::None | KernelConfig::Verify => {
                VerifyArgs { first_event: 0, n_events: 1, n_sources: 0 }.append_to(&places, &mut self.args);
            }
        }
        self.ring.card().memory().write(areas.args, &self.args)
    }

    fn cluster7(&self, first_event: u64, n_events: u32, areas: SlotAreas) -> Cluster7Args {
        let (threshold, trace_sources) = match &self.config {
            KernelConfig::Cluster7 { threshold, traces, .. } => (*threshold, *traces),
            _ => (0, [0; 3]),
        };
        Cluster7Args {
            first_event,
            n_events,
            n_sources: 0,
            trace_sources,
            threshold,
            geometry: self.areas.geometry(),
            decisions: areas.decisions,
            reserved: [0; 2],
        }
    }

    fn function(&self, first_event: u64, n_events: u32) -> FunctionArgs {
        let mut arguments = [0; FUNCTION_ARGUMENTS];
        if let KernelConfig::Function { arguments: given, .. } = &self.config {
            arguments.iter_mut().zip(given).for_each(|(word, given)| *word = *given);
        }
        FunctionArgs { first_event, n_events, n_sources: 0, arguments }
    }

    /// Submits a batch.
    pub(super) fn submit(&mut self, slot: SlotIndex, batch: &Batch, sources: usize) -> Result<(), RingError> {
        let areas = self.areas.of_slot(slot);
        let (first_event, n_events) = (batch.first_event.0, u32::from(batch.events));
        let n_sources = sources as u32;
        let memory = self.ring.card().memory();
        let (head, flags) = match self.config {
            KernelConfig::Cluster7 { verify, .. } => {
                let args = Cluster7Args { n_sources, ..self.cluster7(first_event, n_events, areas) };
                memory.write(areas.args, &args.to_bytes())?;
                (Cluster7Args::BYTES, if verify { FLAG_VERIFY } else { 0 })
            }
            KernelConfig::Function { verify, .. } => {
                let args = FunctionArgs { n_sources, ..self.function(first_event, n_events) };
                memory.write(areas.args, &args.to_bytes())?;
                (FunctionArgs::BYTES, if verify { FLAG_VERIFY } else { 0 })
            }
            KernelConfig::None | KernelConfig::Verify => {
                memory.write(areas.args, &VerifyArgs { first_event, n_events, n_sources }.to_bytes())?;
                (VerifyArgs::BYTES, 0)
            }
        };
        let descriptor = Descriptor {
            region: REGION as u32,
            flags,
            args: MemoryRange::new(areas.args, (head + sources * PacketBuffer::BYTES) as u64),
            result: MemoryRange::new(areas.summaries, areas.summaries_len),
            cookie: slot.0.into(),
        };
        self.ring.submit(&descriptor).map(drop)
    }

    /// Takes the next completion. Without one, but with batches in the kernel, arms the card's interrupt.
    pub(super) fn poll(&mut self) -> Result<Option<KernelCompletion>, RingError> {
        if self.ring.in_flight() == 0 {
            return Ok(None);
        }
        let mut completion = self.ring.poll()?;
        if completion.is_none() && !self.armed {
            self.ring.arm_interrupt();
            self.armed = true;
            // The completion may have arrived before the interrupt was armed.
            completion = self.ring.poll()?;
        }
        let Some(completion) = completion else { return Ok(None) };
        self.armed = false;
        Ok(Some(KernelCompletion {
            // The cookie is the slot.
            slot: SlotIndex(completion.cookie as u16),
            busy: completion.busy,
            decisions_set: completion.counters.decisions_set.into(),
            status: completion.outcome,
            fragments: completion.counters.fragments,
        }))
    }

    /// Arms the interrupt again after it was raised.
    pub(super) fn acknowledge(&mut self) {
        self.ring.arm_interrupt();
        self.armed = true;
    }

    /// The outcome of a batch, from the kernel's summaries and the slot's contents. With `delivers_incomplete`, events that
    /// lack only the sources of lost readout units can be accepted.
    pub(super) fn outcome(
        &mut self,
        completion: &KernelCompletion,
        batch: &Batch,
        contents: &SlotContents,
        delivers_incomplete: bool,
    ) -> Result<BatchOutcome, InvalidSlotData> {
        completion.status.map_err(|fault| InvalidSlotData::Kernel(fault.to_string()))?;
        let events = usize::from(batch.events);
        let areas = self.areas.of_slot(completion.slot);
        let outside = |error: AccessError| InvalidSlotData::Kernel(error.to_string());
        let memory = self.ring.card().memory();
        memory.read(areas.summaries, &mut self.summaries[..events * EventSummary::BYTES]).map_err(outside)?;
        if let KernelConfig::Cluster7 { .. } = self.config {
            memory.read(areas.decisions, &mut self.decisions[..events * DECISION_BYTES]).map_err(outside)?;
        }
        let mut outcome = BatchOutcome::default();
        for event in 0..events {
            let summary = self.summary(event);
            let number = batch.first_event.0 + event as u64;
            if summary.event != number || summary.status & STATUS_BAD_PACKET != 0 {
                let (found, status) = (summary.event, summary.status);
                return Err(InvalidSlotData::Kernel(format!(
                    "summary {event} is of event {found} with status {status:#x}, expected event {number}"
                )));
            }
            let counts = if summary.corrupt > 0 {
                &mut outcome.corrupt
            } else if !contents.is_complete(event) {
                let is_delivered = delivers_incomplete && contents.is_complete_but_lost(event);
                outcome.accepted += u16::from(is_delivered && summary.accepted != 0);
                &mut outcome.missing
            } else {
                outcome.accepted += u16::from(summary.accepted != 0);
                &mut outcome.built
            };
            *counts = BatchCounts {
                events: counts.events + 1,
                fragments: counts.fragments + contents.fragments(event),
            };
        }
        if self.config.verifies_checksums() && u64::from(completion.fragments) != outcome.fragments() {
            let found = completion.fragments;
            return Err(InvalidSlotData::Kernel(format!(
                "found {found} of {} fragments",
                outcome.fragments()
            )));
        }
        Ok(outcome)
    }

    /// Whether the kernel accepts events.
    pub(super) fn decides(&self) -> bool {
        self.config.decides()
    }

    /// Whether incomplete and corrupt events that the kernel accepts are stored.
    pub(super) fn accepts_incomplete(&self) -> bool {
        self.config.accepts_incomplete()
    }

    /// The summary of an event of the current batch.
    pub(super) fn summary(&self, event: usize) -> EventSummary {
        let bytes = self.summaries.as_chunks().0.get(event);
        bytes.map_or_else(EventSummary::default, EventSummary::from_bytes)
    }

    /// The decision map of an event of the current batch; empty without a trigger kernel.
    pub(super) fn decisions(&self, event: usize) -> &[u8] {
        match self.config {
            KernelConfig::Cluster7 { .. } => {
                &self.decisions[event * DECISION_BYTES..(event + 1) * DECISION_BYTES]
            }
            _ => &[],
        }
    }

    /// Compares the decisions of the current batch with the reference, for complete events without errors.
    pub(super) fn compare(&self, reference: &mut ReferenceDecisions, batch: &Batch, contents: &SlotContents) {
        for event in 0..usize::from(batch.events) {
            if contents.is_complete(event) && self.summary(event).status == 0 {
                reference.compare(batch.first_event.0 + event as u64, self.decisions(event));
            }
        }
    }
}
