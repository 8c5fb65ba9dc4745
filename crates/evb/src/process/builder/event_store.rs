//! Copies accepted events out of landing memory into the sink.

use super::landing::{LandingMemory, OutsideLandingMemory};
use super::slot_contents::SlotContents;
use crate::core::plan::Batch;
use crate::core::types::EventNumber;
use crate::layout::SlotLayout;
use crate::process::sink::{AcceptedEvent, Sink, SinkError};
use millstream_fragment::{Fragment, SourceId};

/// Stores accepted events in a sink, up to a maximum number.
pub(super) struct EventStore {
    sink: Box<dyn Sink>,
    /// Events that may still be stored.
    left: u64,
    pub(super) stored: u64,
    /// Payload of the current event.
    payload: Vec<u8>,
    /// Its fragments: source, offset in `payload`, length, checksum.
    found: Vec<(SourceId, usize, usize, u32)>,
}

/// Why an event was not stored.
pub(super) enum StoreError {
    /// A fragment lies outside of landing memory.
    Data(OutsideLandingMemory),
    /// The sink failed.
    Sink(SinkError),
}

impl From<OutsideLandingMemory> for StoreError {
    fn from(error: OutsideLandingMemory) -> StoreError {
        StoreError::Data(error)
    }
}

impl EventStore {
    /// Stores the first `max_events` events in `sink`.
    pub(super) fn new(sink: Box<dyn Sink>, max_events: u64) -> EventStore {
        EventStore { sink, left: max_events, stored: 0, payload: Vec::new(), found: Vec::new() }
    }

    /// Whether the maximum number is stored. Then no fragment index is needed.
    pub(super) fn is_full(&self) -> bool {
        self.left == 0
    }

    /// Stores an event of a batch, unless the maximum number is stored.
    pub(super) fn store(
        &mut self,
        (landing, layout, slot_offset): (&LandingMemory, &SlotLayout, u64),
        contents: &SlotContents,
        batch: &Batch,
        (number, decisions): (EventNumber, &[u8]),
    ) -> Result<(), StoreError> {
        if self.is_full() {
            return Ok(());
        }
        self.payload.clear();
        self.found.clear();
        for (position, area) in layout.packets.iter().enumerate() {
            let Some(entry) = contents.fragment(position, number.0) else { continue };
            let (start, len) = (self.payload.len(), entry.len as usize);
            self.payload.resize(start + len, 0);
            let at = slot_offset + area.offset + u64::from(entry.offset);
            landing.read(at, &mut self.payload[start..])?;
            self.found.push((SourceId(area.source), start, len, entry.crc));
        }
        self.found.sort_unstable_by_key(|(source, ..)| *source);
        let fragments: Vec<_> = self
            .found
            .iter()
            .map(|&(source, start, len, crc)| {
                let payload = &self.payload[start..start + len];
                (source, Fragment { event: number.0, payload, crc })
            })
            .collect();
        let event = AcceptedEvent { number, batch: batch.id, fragments: &fragments, decisions };
        self.sink.store(&event).map_err(StoreError::Sink)?;
        self.left -= 1;
        self.stored += 1;
        Ok(())
    }

    /// Closes the sink.
    pub(super) fn finish(self) -> Result<Option<String>, SinkError> {
        self.sink.finish()
    }
}
