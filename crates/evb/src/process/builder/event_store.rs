//! Copying accepted events out of landing memory and into the sink.

use super::landing::LandingMemory;
use super::slot_contents::{HeaderReader, InvalidSlotData};
use crate::core::plan::Batch;
use crate::core::types::EventNumber;
use crate::layout::SlotLayout;
use crate::process::sink::{AcceptedEvent, Sink, SinkError};
use millstream_fragment::{Fragment, SourceId};

/// The way of accepted events to storage.
pub(super) struct EventStore {
    sink: Box<dyn Sink>,
    /// Events that may still be stored.
    left: u64,
    pub(super) stored: u64,
    /// Payload of the event at hand.
    payload: Vec<u8>,
    /// Its fragments: source, place in the payload, length, checksum.
    found: Vec<(SourceId, usize, usize, u32)>,
}

/// Why an event was not stored.
pub(super) enum StoreError {
    /// The slot does not hold what it has to.
    Data(InvalidSlotData),
    /// The sink does not take it.
    Sink(SinkError),
}

impl From<InvalidSlotData> for StoreError {
    fn from(error: InvalidSlotData) -> StoreError {
        StoreError::Data(error)
    }
}

impl EventStore {
    /// Stores the first `keep` events in `sink`.
    pub(super) fn new(sink: Box<dyn Sink>, keep: u64) -> EventStore {
        EventStore { sink, left: keep, stored: 0, payload: Vec::new(), found: Vec::new() }
    }

    /// Stores an event of a batch, unless enough are stored already.
    pub(super) fn store(
        &mut self,
        (landing, layout, slot_offset): (&LandingMemory, &SlotLayout, u64),
        reader: &mut HeaderReader,
        batch: &Batch,
        (number, decisions): (EventNumber, &[u8]),
    ) -> Result<(), StoreError> {
        if self.left == 0 {
            return Ok(());
        }
        self.payload.clear();
        self.found.clear();
        for area in &layout.packets {
            let header = reader.read(landing, slot_offset, area)?;
            let Some(entry) = header.entries().find(|entry| entry.event == number.0) else { continue };
            let (start, len) = (self.payload.len(), entry.len as usize);
            self.payload.resize(start + len, 0);
            let at = slot_offset + area.offset + u64::from(entry.offset);
            landing.read(at, &mut self.payload[start..]).map_err(InvalidSlotData::from)?;
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
