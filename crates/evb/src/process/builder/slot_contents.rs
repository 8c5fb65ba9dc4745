//! Contents of a slot: the packets' headers, parsed once when they arrive. Payload is not read here.

use super::checksums::ChecksumChecker;
use super::landing::LandingMemory;
use crate::core::plan::Batch;
use crate::core::summary::{BatchCounts, BatchOutcome};
use crate::core::{Bytes, RuIndex};
use crate::layout::{PacketArea, SlotLayout};
use crate::process::sink::PacketPlace;
use millstream_fragment::mfp::{Entry, Header, HeaderBuilder, MfpError, Repr};
use millstream_fragment::{Alignment, SourceId, SourceKind};

/// Why a slot's packets or a kernel's result are invalid.
#[derive(Debug, thiserror::Error)]
pub(super) enum InvalidSlotData {
    /// A packet that does not parse.
    #[error("packet of source {source_id:#x}: {error}")]
    Packet {
        /// The source that owns the area.
        source_id: u32,
        /// The first invalid field.
        error: MfpError,
    },
    /// A packet of another source, or of another batch than the other packets of the slot.
    #[error(
        "area of source {expected:#x}, {events} events from {first}: found a packet of source {found:#x}, \
         {found_events} events from {found_first}"
    )]
    WrongPacket {
        /// The packet's source.
        found: u32,
        /// Its first event.
        found_first: u64,
        /// Its number of events.
        found_events: u32,
        /// The source that owns the area.
        expected: u32,
        /// First event of the batch.
        first: u64,
        /// Number of events of the batch.
        events: u32,
    },
    /// An area outside of landing memory.
    #[error(transparent)]
    OutsideLandingMemory(#[from] super::landing::OutsideLandingMemory),
    /// The packets are of another batch than the assigned one.
    #[error("{slot} holds packets of another batch than {batch}")]
    WrongBatch {
        /// The slot.
        slot: crate::core::SlotIndex,
        /// The batch that is assigned to the slot.
        batch: crate::core::BatchId,
    },
    /// The kernel's result does not match the slot.
    #[error("kernel: {0}")]
    Kernel(String),
}

/// Reads packet headers out of landing memory. The buffer is reused.
#[derive(Debug)]
pub(super) struct HeaderReader {
    buffer: Vec<u8>,
}

impl HeaderReader {
    pub(super) fn new(layout: &SlotLayout) -> HeaderReader {
        let longest = layout.packets.iter().map(|area| area.header_len).max().unwrap_or(0);
        HeaderReader { buffer: vec![0; longest as usize] }
    }

    /// Copies and parses the header of the packet in `area` of the slot at `slot_offset`.
    ///
    /// Peers can write the slot at any time, so the header is copied before it is checked.
    pub(super) fn read(
        &mut self,
        landing: &LandingMemory,
        slot_offset: u64,
        area: &PacketArea,
    ) -> Result<Header<&[u8]>, InvalidSlotData> {
        let header = &mut self.buffer[..area.header_len as usize];
        landing.read(slot_offset + area.offset, header)?;
        Header::new_checked(&*header, area.capacity.into())
            .map_err(|error| InvalidSlotData::Packet { source_id: area.source, error })
    }

    /// Reads the header of the packet in `area` again, and returns where the packet is in landing memory.
    pub(super) fn place(
        &mut self,
        landing: &LandingMemory,
        slot_offset: u64,
        area: &PacketArea,
    ) -> Result<PacketPlace, InvalidSlotData> {
        let header = self.read(landing, slot_offset, area)?;
        let (source, kind) = (header.source(), header.kind());
        let (len, header_len) = (header.total_len(), header.header_len());
        let header_crc = crc32fast::hash(&self.buffer[..header_len as usize]);
        let offset = (slot_offset + area.offset) as usize;
        Ok(PacketPlace { source, kind, offset, len, header_len, header_crc })
    }
}

/// Where accepted events find their fragments: the entries of all packets of a slot.
#[derive(Debug, Default)]
struct FragmentIndex {
    entries: Vec<Entry>,
    /// By position of the packet in the layout: start and number of its entries. Empty without an index.
    packets: Vec<(usize, usize)>,
}

/// Parsed headers of the packets in one slot.
#[derive(Debug, Default)]
pub(super) struct SlotContents {
    /// First event and number of events, from the first header.
    batch: Option<(u64, u32)>,
    /// Packets with a fragment for every event of the batch.
    complete_packets: u32,
    /// Fragments of the other packets, by event of the batch. Empty if there are none.
    partial: Vec<u32>,
    /// Payload by event of the batch, without padding (bytes).
    payload: Vec<u64>,
    /// Packets parsed.
    packets: usize,
    /// Those of lost readout units, without fragments.
    absent_packets: usize,
    index: FragmentIndex,
}

impl SlotContents {
    /// Parses the packets of a readout unit and returns the number of their fragments. With `index`, also
    /// keeps the fragments' entries for [`fragment`](Self::fragment).
    pub(super) fn add(
        &mut self,
        reader: &mut HeaderReader,
        landing: &LandingMemory,
        slot_offset: u64,
        (layout, ru): (&SlotLayout, RuIndex),
        index: bool,
        checksums: &mut ChecksumChecker,
    ) -> Result<u32, InvalidSlotData> {
        let mut fragments = 0;
        for position in layout.positions_of_readout(ru) {
            let area = &layout.packets[position];
            let header = reader.read(landing, slot_offset, area)?;
            let (first, events) = *self.batch.get_or_insert((header.first_event(), header.n_events()));
            if (header.source().0, header.first_event(), header.n_events()) != (area.source, first, events) {
                return Err(InvalidSlotData::WrongPacket {
                    found: header.source().0,
                    found_first: header.first_event(),
                    found_events: header.n_events(),
                    expected: area.source,
                    first,
                    events,
                });
            }
            fragments += header.n_fragments();
            checksums.note_arrived(position, header.n_fragments());
            self.packets += 1;
            self.payload.resize(events as usize, 0);
            let is_complete = header.n_fragments() == events;
            if is_complete {
                self.complete_packets += 1;
            } else {
                self.partial.resize(events as usize, 0);
            }
            let start = self.index.entries.len();
            for entry in header.entries() {
                // In range: the header was checked against its own number of events.
                let event = (entry.event - first) as usize;
                self.payload[event] += u64::from(entry.len);
                if !is_complete {
                    self.partial[event] += 1;
                }
                if index {
                    self.index.entries.push(entry);
                }
            }
            if index {
                self.index.packets.resize(layout.packets.len(), (0, 0));
                self.index.packets[position] = (start, header.n_fragments() as usize);
            }
        }
        Ok(fragments)
    }

    /// Writes packets without fragments where those of a lost readout unit are missing, and adds them.
    pub(super) fn add_absent(
        &mut self,
        reader: &mut HeaderReader,
        landing: &LandingMemory,
        slot_offset: u64,
        (layout, ru): (&SlotLayout, RuIndex),
        batch: &Batch,
        checksums: &mut ChecksumChecker,
    ) -> Result<(), InvalidSlotData> {
        for area in layout.of_readout(ru) {
            let repr = Repr {
                source: SourceId(area.source),
                kind: SourceKind(area.kind),
                first_event: batch.first_event.0,
                n_events: batch.events.into(),
                n_fragments: 0,
                alignment: Alignment::default(),
            };
            let mut header = vec![0; repr.header_len() as usize];
            HeaderBuilder::new(&mut header, repr)
                .and_then(HeaderBuilder::finish)
                .map_err(|error| InvalidSlotData::Packet { source_id: area.source, error })?;
            landing.write(slot_offset + area.offset, &header)?;
        }
        self.absent_packets += layout.of_readout(ru).len();
        self.add(reader, landing, slot_offset, (layout, ru), false, checksums).map(drop)
    }

    /// Removes everything, for the slot's next generation.
    pub(super) fn clear(&mut self) {
        self.batch = None;
        self.complete_packets = 0;
        self.partial.clear();
        self.payload.clear();
        (self.packets, self.absent_packets) = (0, 0);
        self.index.entries.clear();
        self.index.packets.clear();
    }

    /// Whether all packets are of this batch.
    pub(super) fn is_of(&self, batch: &Batch) -> bool {
        self.batch == Some((batch.first_event.0, batch.events.into()))
    }

    /// Number of fragments of an event, counted from the first of the batch.
    pub(super) fn fragments(&self, event: usize) -> u32 {
        self.complete_packets + self.partial.get(event).copied().unwrap_or(0)
    }

    /// Whether every source has a fragment of the event.
    pub(super) fn is_complete(&self, event: usize) -> bool {
        self.fragments(event) as usize == self.packets
    }

    /// Whether every source has a fragment of the event, except those of lost readout units.
    pub(super) fn is_complete_but_lost(&self, event: usize) -> bool {
        self.fragments(event) as usize + self.absent_packets == self.packets
    }

    /// Whether the packets of a lost readout unit are missing.
    pub(super) fn lacks_readout_unit(&self) -> bool {
        self.absent_packets > 0
    }

    /// Payload of an event, without padding.
    pub(super) fn payload(&self, event: usize) -> Bytes {
        Bytes(self.payload.get(event).copied().unwrap_or(0))
    }

    /// The fragment of event number `event` in the packet at `position` of the layout, if it was indexed.
    pub(super) fn fragment(&self, position: usize, event: u64) -> Option<Entry> {
        let &(start, len) = self.index.packets.get(position)?;
        let entries = &self.index.entries[start..start + len];
        let found = entries.binary_search_by_key(&event, |entry| entry.event).ok()?;
        Some(entries[found])
    }

    /// The outcome without a kernel: complete events without corrupt fragments are built. `corrupt` counts these by event;
    /// it is empty if payload was not checked.
    pub(super) fn outcome(&self, batch: &Batch, corrupt: &[u32]) -> BatchOutcome {
        let mut outcome = BatchOutcome::default();
        if self.partial.is_empty() && corrupt.iter().all(|&fragments| fragments == 0) {
            let fragments = self.complete_packets * u32::from(batch.events);
            outcome.built = BatchCounts { events: batch.events, fragments };
            return outcome;
        }
        for event in 0..batch.events.into() {
            let counts = if corrupt.get(event).is_some_and(|&fragments| fragments > 0) {
                &mut outcome.corrupt
            } else if self.is_complete(event) {
                &mut outcome.built
            } else {
                &mut outcome.missing
            };
            counts.events += 1;
            counts.fragments += self.fragments(event);
        }
        outcome
    }
}
