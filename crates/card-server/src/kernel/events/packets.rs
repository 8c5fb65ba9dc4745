//! What kernels for events have in common: a slot of card memory with the multi-fragment packets of
//! one batch, one packet per source, each in its place.
//!
//! Packets are written by other nodes, and a late write may still change them. Hence the header of a
//! packet is copied and the copy checked before any of it is used; payload is copied before its
//! checksum is compared. `docs/formats.md` has the layout of packets.

use millstream_fragment::Alignment;
use millstream_fragment::mfp::{self, Entry, Header, MfpError};

use crate::command::{Cause, Fault, Tally, bits};
use crate::kernel::{Job, outside};
use crate::layout::layout;
use crate::memory::{Memory, Span};

/// Most events of one command.
pub const MAX_EVENTS: u32 = 4096;

/// Most sources of one command.
pub const MAX_SOURCES: u32 = 1024;

layout! {
    /// Where the packet of one source is. A list of these follows the arguments of a kernel.
    pub struct Place[24] {
        0 offset: u64 = "where the packet starts in card memory [bytes]";
        8 capacity: u64 = "room for it [bytes]";
        16 source: u32 = "id of the source";
        20 reserved: u32 = "zero";
    }
}

layout! {
    /// What a kernel found out about one event.
    pub struct Summary[32] {
        0 event: u64 = "event number";
        8 status: u32 = "zero, or what is wrong with the event; see Event status";
        12 decisions_set: u32 = "decision bits set";
        16 accepted: u32 = "one if any decision bit is set, else zero";
        20 first_sample: u16 = "first sample with a decision bit set, 65535: none";
        22 first_patch: u16 = "patch of the lowest decision position set in that sample, 65535: none";
        24 missing: u16 = "fragments that are not there";
        26 corrupt: u16 = "fragments with a wrong checksum";
        28 reserved: u32 = "zero";
    }
}

bits! {
    /// Every bit of an event's status, for the documentation.
    EVENT_STATUSES: u32 {
        0 STATUS_MISSING = "a source has no fragment for the event";
        1 STATUS_BAD_PACKET = "a source's packet is damaged, or belongs to another batch or source; its fragments count as missing";
        2 STATUS_CORRUPT = "a fragment has a wrong checksum";
        3 STATUS_UNDECIDED = "a trace fragment is missing, corrupt, or of a wrong length, so that there are no decisions; the decision map is zero";
    }
}

impl Summary {
    /// Nothing known yet about `event`.
    pub(crate) fn of(event: u64) -> Summary {
        Summary { event, first_sample: u16::MAX, first_patch: u16::MAX, ..Summary::default() }
    }

    fn note_missing(&mut self, bad_packet: bool) {
        self.missing = self.missing.saturating_add(1);
        self.status |= STATUS_MISSING | if bad_packet { STATUS_BAD_PACKET } else { 0 };
    }

    pub(crate) fn note_corrupt(&mut self, tally: &mut Tally) {
        self.corrupt = self.corrupt.saturating_add(1);
        self.status |= STATUS_CORRUPT;
        tally.corrupt_fragments += 1;
    }

    /// Counts the event, which is the batch's `index`th, and writes this to its place among the
    /// batch's `summaries`.
    pub(crate) fn publish(&self, job: &mut Job<'_>, summaries: Span, index: u64) -> Result<(), Fault> {
        job.tally.events += 1;
        job.memory
            .write(summaries.offset + index * Summary::BYTES as u64, &self.to_bytes())
            .map_err(outside(Cause::ResultOutsideMemory))?;
        job.beat()
    }
}

/// Consecutive events, checked: none is past the greatest number, and there are 1 to [`MAX_EVENTS`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    pub(crate) first_event: u64,
    pub(crate) n_events: u32,
}

impl Batch {
    pub(crate) fn new(first_event: u64, n_events: u32) -> Result<Batch, Fault> {
        if n_events == 0 || n_events > MAX_EVENTS {
            return Err(Fault::new(Cause::EventCount, n_events.into()));
        }
        if first_event.checked_add(n_events.into()).is_none() {
            return Err(Fault::new(Cause::EventNumberOverflow, first_event));
        }
        Ok(Batch { first_event, n_events })
    }

    /// Position in the batch and number of each event.
    pub(crate) fn events(self) -> impl Iterator<Item = (u64, u64)> {
        (0..u64::from(self.n_events)).map(move |index| (index, self.first_event + index))
    }

    /// The part of the result that takes a summary per event.
    pub(crate) fn summaries(self, job: &Job<'_>) -> Result<Span, Fault> {
        let len = u64::from(self.n_events) * Summary::BYTES as u64;
        if job.result.len < len {
            return Err(Fault::new(Cause::ResultTooSmall, job.result.len));
        }
        Ok(Span::new(job.result.offset, len))
    }
}

/// The list of places behind `head` bytes of arguments, which has to be `n_sources` long: checked, in
/// the order given, and reused from command to command.
#[derive(Debug, Default)]
pub(crate) struct Places {
    list: Vec<Place>,
    bytes: Vec<u8>,
    ids: Vec<u32>,
}

impl Places {
    pub(crate) fn read(&mut self, job: &Job<'_>, head: usize, n_sources: u32) -> Result<&[Place], Fault> {
        if n_sources == 0 || n_sources > MAX_SOURCES {
            return Err(Fault::new(Cause::SourceCount, n_sources.into()));
        }
        let len = n_sources as usize * Place::BYTES;
        if job.args.len != (head + len) as u64 {
            return Err(Fault::new(Cause::ArgsLength, job.args.len));
        }
        self.bytes.resize(len, 0);
        let from = job.args.offset + head as u64;
        job.memory.read(from, &mut self.bytes).map_err(outside(Cause::ArgsOutsideMemory))?;
        self.list.clear();
        self.ids.clear();
        for bytes in self.bytes.as_chunks().0 {
            let place = Place::from_bytes(bytes);
            if place.reserved != 0 {
                return Err(Fault::new(Cause::ReservedNotZero, place.reserved.into()));
            }
            job.memory.check(place.span()).map_err(outside(Cause::PlaceOutsideMemory))?;
            self.list.push(place);
            self.ids.push(place.source);
        }
        self.ids.sort_unstable();
        if let Some(twice) = self.ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Fault::new(Cause::SourceTwice, twice[0].into()));
        }
        Ok(&self.list)
    }
}

impl Place {
    /// The card memory of this place.
    pub fn span(&self) -> Span {
        Span::new(self.offset, self.capacity)
    }
}

/// Refuses results that overlap each other, the arguments or any other input.
pub(crate) fn check_apart(results: &[Span], inputs: impl Iterator<Item = Span> + Clone) -> Result<(), Fault> {
    for (index, result) in results.iter().enumerate() {
        let clash = results[..index].iter().any(|other| result.overlaps(*other))
            || inputs.clone().any(|input| result.overlaps(input));
        if clash {
            return Err(Fault::new(Cause::ResultsOverlap, result.offset));
        }
    }
    Ok(())
}

/// One source's packet: a private copy of what its header says, read event by event.
#[derive(Debug)]
pub(crate) struct Source {
    place: Place,
    header: Vec<u8>,
    entries: Vec<Entry>,
    next: usize,
    readable: bool,
}

/// A fragment in card memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Where its payload is.
    pub(crate) payload: Span,
    /// CRC-32 that the payload should have.
    pub(crate) crc: u32,
}

impl Source {
    /// Id of the source.
    pub(crate) fn id(&self) -> u32 {
        self.place.source
    }

    /// The fragment of the summary's event, counted; the summary notes one that is missing. Events
    /// have to be asked for in ascending order.
    pub(crate) fn fragment(&mut self, summary: &mut Summary, tally: &mut Tally) -> Option<Found> {
        let found = self.find(summary.event);
        match found {
            Some(found) => {
                tally.fragments += 1;
                tally.payload_bytes += found.payload.len;
            }
            // A packet that cannot be read lacks all its fragments.
            None => summary.note_missing(!self.readable),
        }
        found
    }

    fn find(&mut self, event: u64) -> Option<Found> {
        while let Some(entry) = self.entries.get(self.next) {
            if entry.event > event {
                return None;
            }
            self.next += 1;
            if entry.event == event {
                let offset = self.place.offset + u64::from(entry.offset);
                return Some(Found { payload: Span::new(offset, entry.len.into()), crc: entry.crc });
            }
        }
        None
    }

    fn open(&mut self, memory: &Memory, place: Place, batch: Batch) {
        self.place = place;
        self.next = 0;
        self.entries.clear();
        self.readable = self.read_header(memory, batch).is_ok();
    }

    fn read_header(&mut self, memory: &Memory, batch: Batch) -> Result<(), Unreadable> {
        if self.place.capacity < mfp::FIXED_LEN as u64 {
            return Err(Unreadable);
        }
        let fixed = memory.read_array::<{ mfp::FIXED_LEN }>(self.place.offset)?;
        let header_len = mfp::peek_header_len(&fixed)?;
        let longest = mfp::header_len(MAX_EVENTS, Alignment::MAX);
        if u64::from(header_len) > self.place.capacity.min(longest) {
            return Err(Unreadable);
        }
        self.header.resize(header_len as usize, 0);
        memory.read(self.place.offset, &mut self.header)?;
        let header = Header::new_checked(&self.header, self.place.capacity)?;
        // A packet of an earlier life of the slot, or of somebody else.
        if header.source().0 != self.place.source
            || header.first_event() != batch.first_event
            || header.n_events() != batch.n_events
        {
            return Err(Unreadable);
        }
        self.entries.extend(header.entries());
        Ok(())
    }
}

/// The packet is none, or not the one that belongs here.
struct Unreadable;

impl From<MfpError> for Unreadable {
    fn from(_: MfpError) -> Unreadable {
        Unreadable
    }
}

impl From<crate::memory::AccessError> for Unreadable {
    fn from(_: crate::memory::AccessError) -> Unreadable {
        Unreadable
    }
}

/// The packets of a batch. Keeps its memory from command to command.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    sources: Vec<Source>,
}

impl Slot {
    /// Reads the headers of the packets at `places`.
    pub(crate) fn open(
        &mut self,
        memory: &Memory,
        places: impl Iterator<Item = Place>,
        batch: Batch,
    ) -> &mut [Source] {
        let mut used = 0;
        for place in places {
            if used == self.sources.len() {
                self.sources.push(Source {
                    place,
                    header: Vec::new(),
                    entries: Vec::new(),
                    next: 0,
                    readable: false,
                });
            }
            self.sources[used].open(memory, place, batch);
            used += 1;
        }
        &mut self.sources[..used]
    }
}

/// Compares payload with its checksum, through a private buffer.
#[derive(Debug)]
pub(crate) struct Checker {
    chunk: Vec<u8>,
}

impl Checker {
    /// Large enough for common fragments in one piece, small enough for the first-level cache.
    const CHUNK: usize = 16 << 10;

    pub(crate) fn new() -> Checker {
        Checker { chunk: vec![0; Checker::CHUNK] }
    }

    /// Whether the payload of `found` has its checksum. Shows that the kernel is alive meanwhile:
    /// payload may be long.
    pub(crate) fn is_intact(&mut self, job: &Job<'_>, found: Found) -> Result<bool, Fault> {
        let mut crc = crc32fast::Hasher::new();
        let mut at = found.payload.offset;
        let mut left = found.payload.len;
        while left != 0 {
            let len = left.min(Checker::CHUNK as u64);
            let chunk = &mut self.chunk[..len as usize];
            job.memory.read(at, chunk).map_err(outside(Cause::PlaceOutsideMemory))?;
            crc.update(chunk);
            job.beat()?;
            at += len;
            left -= len;
        }
        Ok(crc.finalize() == found.crc)
    }
}
