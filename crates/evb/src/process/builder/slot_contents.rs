//! What lies in a slot, as the packets' headers say. Payload is not looked at.

use super::landing::LandingMemory;
use crate::core::RuIndex;
use crate::core::account::{BatchOutcome, BatchTally};
use crate::core::plan::Batch;
use crate::layout::{PacketArea, SlotLayout};
use millstream_fragment::mfp::{Header, MfpError};
use millstream_fragment::{Alignment, mfp};

/// Landed data that is not what it must be.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidSlotData {
    /// A packet that is none.
    #[error("packet of source {source_id:#x}: {error}")]
    Packet {
        /// The source whose place it is.
        source_id: u32,
        /// What is wrong.
        error: MfpError,
    },
    /// A packet of another source, or of another batch than its neighbours.
    #[error(
        "packet of source {found:#x} for {found_events} events from {found_first} on, in the place of source \
         {expected:#x} for {events} events from {first} on"
    )]
    Misplaced {
        /// The packet's source.
        found: u32,
        /// Its first event.
        found_first: u64,
        /// Its events.
        found_events: u32,
        /// The source of the place.
        expected: u32,
        /// First event of the batch.
        first: u64,
        /// Events of the batch.
        events: u32,
    },
    /// A place that is not in landing memory.
    #[error(transparent)]
    OutsideLandingMemory(#[from] super::landing::OutsideLandingMemory),
    /// What the kernel says does not fit what is in the slot.
    #[error("kernel: {0}")]
    Kernel(String),
}

/// What lies in one slot.
#[derive(Debug, Default)]
pub(super) struct SlotContents {
    /// First event and number of events, as the first header says.
    batch: Option<(u64, u32)>,
    /// Sources with a fragment for every event of the batch.
    whole_sources: u32,
    /// By event of the batch: fragments of the other sources. Empty while there are none.
    others: Vec<u32>,
    /// Packets read.
    packets: usize,
}

/// Reads headers; keeps its buffer.
#[derive(Debug)]
pub(super) struct HeaderReader {
    buffer: Vec<u8>,
    batch: u16,
}

impl HeaderReader {
    /// For batches of up to `batch` events.
    pub(super) fn new(batch: u16) -> HeaderReader {
        let longest = mfp::header_len(batch.into(), Alignment::MAX);
        HeaderReader { buffer: vec![0; longest as usize], batch }
    }

    /// Copies the header of the packet in `place` of the slot at `slot_offset` and checks it.
    pub(super) fn read(
        &mut self,
        landing: &LandingMemory,
        slot_offset: u64,
        area: &PacketArea,
    ) -> Result<Header<&[u8]>, InvalidSlotData> {
        // The longest header that fits here; only a packet with a greater alignment than expected has a
        // longer one, and then the checks below find the rest missing.
        let most = mfp::header_len(self.batch.into(), Alignment::CACHE_LINE).min(area.capacity.into());
        let source_id = area.source;
        let bad = |error| InvalidSlotData::Packet { source_id, error };
        landing.read(slot_offset + area.offset, &mut self.buffer[..most as usize])?;
        let header_len = u64::from(mfp::peek_header_len(&self.buffer[..most as usize]).map_err(bad)?);
        let whole = header_len.min(area.capacity.into()).min(self.buffer.len() as u64);
        if whole > most {
            landing.read(slot_offset + area.offset, &mut self.buffer[..whole as usize])?;
        }
        Header::new_checked(&self.buffer[..whole.max(most) as usize], area.capacity.into()).map_err(bad)
    }
}

impl SlotContents {
    /// Takes note of the packets of a readout unit. Returns the fragments in them.
    pub(super) fn add(
        &mut self,
        reader: &mut HeaderReader,
        landing: &LandingMemory,
        slot_offset: u64,
        (layout, ru): (&SlotLayout, RuIndex),
    ) -> Result<u32, InvalidSlotData> {
        let mut fragments = 0;
        for area in layout.of_readout(ru) {
            let header = reader.read(landing, slot_offset, area)?;
            let (first, events) = *self.batch.get_or_insert((header.first_event(), header.n_events()));
            if (header.source().0, header.first_event(), header.n_events()) != (area.source, first, events) {
                return Err(InvalidSlotData::Misplaced {
                    found: header.source().0,
                    found_first: header.first_event(),
                    found_events: header.n_events(),
                    expected: area.source,
                    first,
                    events,
                });
            }
            fragments += header.n_fragments();
            self.packets += 1;
            if header.n_fragments() == events {
                self.whole_sources += 1;
                continue;
            }
            if self.others.is_empty() {
                self.others.resize(events as usize, 0);
            }
            for entry in header.entries() {
                // In range: the header was checked against its own number of events.
                self.others[(entry.event - first) as usize] += 1;
            }
        }
        Ok(fragments)
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.batch = None;
        self.whole_sources = 0;
        self.others.clear();
        self.packets = 0;
    }

    /// Whether all packets are of this batch.
    pub(super) fn is_of(&self, batch: &Batch) -> bool {
        self.batch == Some((batch.first_event.0, batch.events.into()))
    }

    /// Fragments of an event, counted from the first of the batch.
    pub(super) fn fragments(&self, event: usize) -> u32 {
        self.whole_sources + self.others.get(event).copied().unwrap_or(0)
    }

    /// Whether no source lacks a fragment of the event.
    pub(super) fn is_complete(&self, event: usize) -> bool {
        self.fragments(event) as usize == self.packets
    }

    /// The outcome if nobody looks at the payload: what is complete is built.
    pub(super) fn outcome(&self, batch: &Batch) -> BatchOutcome {
        let mut outcome = BatchOutcome::default();
        if self.others.is_empty() {
            let fragments = self.whole_sources * u32::from(batch.events);
            outcome.built = BatchTally { events: batch.events, fragments };
            return outcome;
        }
        for event in 0..batch.events.into() {
            let tally = if self.is_complete(event) { &mut outcome.built } else { &mut outcome.missing };
            tally.events += 1;
            tally.fragments += self.fragments(event);
        }
        outcome
    }
}
