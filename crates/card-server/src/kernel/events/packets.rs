//! Reading the packets of a batch.
//!
//! Other nodes write the packets, and a late write may still change them. Hence a packet's header is copied,
//! and the copy is checked before use. Payload is copied before its checksum is compared. `docs/formats.md`
//! has the layout of packets.

use millstream_card_abi::command::{Cause, EventCounters, Fault};
use millstream_card_abi::events::{EventSummary, MAX_EVENTS, MAX_SOURCES, PacketBuffer};
use millstream_card_abi::{AccessError, MemoryRange};
use millstream_fragment::Alignment;
use millstream_fragment::mfp::{self, Entry, Header, MfpError};

use crate::kernel::events::EventRun;
use crate::kernel::outside;
use crate::memory::Memory;

/// Counts an event, the batch's `index`th, and writes its summary into the batch's `summaries`.
pub(super) fn publish(
    summary: &EventSummary,
    run: &mut EventRun<'_, '_>,
    summaries: MemoryRange,
    index: u64,
) -> Result<(), Fault> {
    run.counters.events += 1;
    run.memory
        .write(summaries.offset + index * EventSummary::BYTES as u64, &summary.to_bytes())
        .map_err(outside(Cause::ResultOutsideMemory))?;
    run.beat()
}

/// Consecutive events, checked: none is past the greatest number, and there are 1 to [`MAX_EVENTS`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    pub(super) first_event: u64,
    pub(super) n_events: u32,
}

impl Batch {
    pub(super) fn new(first_event: u64, n_events: u32) -> Result<Batch, Fault> {
        if n_events == 0 || n_events > MAX_EVENTS {
            return Err(Fault::new(Cause::EventCount, n_events.into()));
        }
        if first_event.checked_add(n_events.into()).is_none() {
            return Err(Fault::new(Cause::EventNumberOverflow, first_event));
        }
        Ok(Batch { first_event, n_events })
    }

    /// Position in the batch and number of each event.
    pub(super) fn events(self) -> impl Iterator<Item = (u64, u64)> {
        (0..u64::from(self.n_events)).map(move |index| (index, self.first_event + index))
    }

    /// The part of the result that takes a summary per event.
    pub(super) fn summaries(self, run: &EventRun<'_, '_>) -> Result<MemoryRange, Fault> {
        let len = u64::from(self.n_events) * EventSummary::BYTES as u64;
        if run.result.len < len {
            return Err(Fault::new(Cause::ResultTooSmall, run.result.len));
        }
        Ok(MemoryRange::new(run.result.offset, len))
    }
}

/// The packet buffers after `head` bytes of arguments, checked: `n_sources` of them, in the given order.
/// Keeps its memory from command to command.
#[derive(Debug, Default)]
pub(super) struct PacketList {
    list: Vec<PacketBuffer>,
    bytes: Vec<u8>,
    ids: Vec<u32>,
}

impl PacketList {
    pub(super) fn read(
        &mut self,
        run: &EventRun<'_, '_>,
        head: usize,
        n_sources: u32,
    ) -> Result<&[PacketBuffer], Fault> {
        if n_sources == 0 || n_sources > MAX_SOURCES {
            return Err(Fault::new(Cause::SourceCount, n_sources.into()));
        }
        let len = n_sources as usize * PacketBuffer::BYTES;
        if run.args.len != (head + len) as u64 {
            return Err(Fault::new(Cause::ArgsLength, run.args.len));
        }
        self.bytes.resize(len, 0);
        let from = run.args.offset + head as u64;
        run.memory.read(from, &mut self.bytes).map_err(outside(Cause::ArgsOutsideMemory))?;
        self.list.clear();
        self.ids.clear();
        for bytes in self.bytes.as_chunks().0 {
            let packet = PacketBuffer::from_bytes(bytes);
            if packet.reserved != 0 {
                return Err(Fault::new(Cause::ReservedNotZero, packet.reserved.into()));
            }
            run.memory.check(packet.span()).map_err(outside(Cause::PacketOutsideMemory))?;
            self.list.push(packet);
            self.ids.push(packet.source);
        }
        self.ids.sort_unstable();
        if let Some(twice) = self.ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Fault::new(Cause::DuplicateSource, twice[0].into()));
        }
        Ok(&self.list)
    }
}

/// Refuses results that overlap each other, the arguments or any other input.
pub(super) fn check_disjoint(
    results: &[MemoryRange],
    inputs: impl Iterator<Item = MemoryRange> + Clone,
) -> Result<(), Fault> {
    for (index, result) in results.iter().enumerate() {
        let clash = results[..index].iter().any(|other| result.overlaps(*other))
            || inputs.clone().any(|input| result.overlaps(input));
        if clash {
            return Err(Fault::new(Cause::ResultsOverlap, result.offset));
        }
    }
    Ok(())
}

/// A private copy of the header of one source's packet, read event by event.
#[derive(Debug)]
pub(super) struct SourcePacket {
    packet: PacketBuffer,
    header: Vec<u8>,
    entries: Vec<Entry>,
    next: usize,
    kind: u32,
    is_readable: bool,
}

/// A fragment in card memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundFragment {
    /// Where its payload is.
    pub(super) payload: MemoryRange,
    /// CRC-32 that the payload should have.
    pub(super) crc: u32,
}

impl SourcePacket {
    /// Id of the source.
    pub(super) fn id(&self) -> u32 {
        self.packet.source
    }

    /// Kind of the source's payload; zero if the packet cannot be read.
    pub(super) fn kind(&self) -> u32 {
        self.kind
    }

    /// Finds and counts the fragment of the summary's event; notes a missing one in the summary. Call it with
    /// ascending event numbers.
    pub(super) fn fragment(
        &mut self,
        summary: &mut EventSummary,
        counters: &mut EventCounters,
    ) -> Option<FoundFragment> {
        let found = self.find(summary.event);
        match found {
            Some(found) => {
                counters.fragments += 1;
                counters.payload_bytes += found.payload.len;
            }
            // A packet that cannot be read lacks all its fragments.
            None => summary.note_missing(!self.is_readable),
        }
        found
    }

    fn find(&mut self, event: u64) -> Option<FoundFragment> {
        while let Some(entry) = self.entries.get(self.next) {
            if entry.event > event {
                return None;
            }
            self.next += 1;
            if entry.event == event {
                let offset = self.packet.offset + u64::from(entry.offset);
                return Some(FoundFragment {
                    payload: MemoryRange::new(offset, entry.len.into()),
                    crc: entry.crc,
                });
            }
        }
        None
    }

    fn open(&mut self, memory: &Memory, packet: PacketBuffer, batch: Batch) {
        self.packet = packet;
        self.next = 0;
        self.kind = 0;
        self.entries.clear();
        self.is_readable = self.read_header(memory, batch).is_ok();
    }

    fn read_header(&mut self, memory: &Memory, batch: Batch) -> Result<(), Unreadable> {
        if self.packet.capacity < mfp::FIXED_LEN as u64 {
            return Err(Unreadable);
        }
        let fixed = memory.read_array::<{ mfp::FIXED_LEN }>(self.packet.offset)?;
        let header_len = mfp::peek_header_len(&fixed)?;
        let longest = mfp::header_len(MAX_EVENTS, Alignment::MAX);
        if u64::from(header_len) > self.packet.capacity.min(longest) {
            return Err(Unreadable);
        }
        self.header.resize(header_len as usize, 0);
        memory.read(self.packet.offset, &mut self.header)?;
        let header = Header::new_checked(&self.header, self.packet.capacity)?;
        // A stale packet of an earlier use of the slot, or a packet of another source.
        if header.source().0 != self.packet.source
            || header.first_event() != batch.first_event
            || header.n_events() != batch.n_events
        {
            return Err(Unreadable);
        }
        self.kind = header.kind().0;
        self.entries.extend(header.entries());
        Ok(())
    }
}

/// The bytes are no packet, or not the expected one.
struct Unreadable;

impl From<MfpError> for Unreadable {
    fn from(_: MfpError) -> Unreadable {
        Unreadable
    }
}

impl From<AccessError> for Unreadable {
    fn from(_: AccessError) -> Unreadable {
        Unreadable
    }
}

/// The packets of a batch. Keeps its memory from command to command.
#[derive(Debug, Default)]
pub(super) struct Packets {
    sources: Vec<SourcePacket>,
}

impl Packets {
    /// Reads the headers of the packets at `packets`.
    pub(super) fn open(
        &mut self,
        memory: &Memory,
        buffers: impl Iterator<Item = PacketBuffer>,
        batch: Batch,
    ) -> &mut [SourcePacket] {
        let mut used = 0;
        for packet in buffers {
            if used == self.sources.len() {
                self.sources.push(SourcePacket {
                    packet,
                    header: Vec::new(),
                    entries: Vec::new(),
                    next: 0,
                    kind: 0,
                    is_readable: false,
                });
            }
            self.sources[used].open(memory, packet, batch);
            used += 1;
        }
        &mut self.sources[..used]
    }
}

/// Compares payload with its checksum, through a private buffer.
#[derive(Debug)]
pub(super) struct ChecksumChecker {
    chunk: Vec<u8>,
}

impl ChecksumChecker {
    /// Large enough for common fragments in one piece, small enough for the first-level cache.
    const CHUNK: usize = 16 << 10;

    pub(super) fn new() -> ChecksumChecker {
        ChecksumChecker { chunk: vec![0; ChecksumChecker::CHUNK] }
    }

    /// Whether the payload of `found` matches its checksum. Advances the heartbeat meanwhile, because payload
    /// may be long.
    pub(super) fn is_intact(&mut self, run: &EventRun<'_, '_>, found: FoundFragment) -> Result<bool, Fault> {
        let mut crc = crc32fast::Hasher::new();
        let mut at = found.payload.offset;
        let mut left = found.payload.len;
        while left != 0 {
            let len = left.min(ChecksumChecker::CHUNK as u64);
            let chunk = &mut self.chunk[..len as usize];
            run.memory.read(at, chunk).map_err(outside(Cause::PacketOutsideMemory))?;
            crc.update(chunk);
            run.beat()?;
            at += len;
            left -= len;
        }
        Ok(crc.finalize() == found.crc)
    }
}
