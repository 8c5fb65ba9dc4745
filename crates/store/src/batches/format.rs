//! Headers of a batch file: the file's, and one of each record. Numbers are little-endian; a header without its padding is
//! covered by a CRC-32.
//!
//! ```text
//!  file header                                    record, from a multiple of a block
//!   0  8  "MSBATCHF"                               0  8  "MSBATCHR"
//!   8  4  length of the header                     8  4  length of the header
//!  12  4  CRC-32 of all other bytes of it         12  4  CRC-32 of all other bytes of it
//!  16  4  version: 1                              16  8  length of the record, in whole blocks
//!  20  4  block                                   24  8  number of the record, from 0
//!  24  8  events, if recovered; else 0            32  8  batch
//!  32  …  schema as JSON                          40  8  first event of the batch
//!                                                 48  4  events of the batch
//!                                                 52  4  stored events
//!                                                 56  4  packets
//!                                                 60  4  length of a decision map
//!                                                 64  4  flags: 1: a readout unit was lost; 2: not committed
//!                                                 68  4  0
//!                                                 72  …  packets, 32 B each
//!                                                     …  stored events, 8 B each
//!                                                     …  decision maps of the stored events
//!                                                     …  zeros up to a block, then pages of the slot
//! ```

use crate::Schema;

/// Length up to which all headers are alike: magic, length, CRC-32.
pub(super) const START: usize = 16;
pub(super) const FILE_MAGIC: &[u8; 8] = b"MSBATCHF";
pub(super) const RECORD_MAGIC: &[u8; 8] = b"MSBATCHR";
const VERSION: u32 = 1;
const FILE_FIXED: usize = 32;
const RECORD_FIXED: usize = 72;
const PACKET: usize = 32;
const EVENT: usize = 8;
const READOUT_LOST: u32 = 1;
const PENDING: u32 = 2;
/// Longest header.
pub(super) const MAX_HEADER: u32 = 256 << 20;
pub(super) const SMALLEST_BLOCK: u32 = 4096;
/// Smallest and largest block.
const BLOCKS: std::ops::RangeInclusive<u32> = SMALLEST_BLOCK..=65_536;

/// Status of a stored event: a fragment is missing.
pub(super) const MISSING: u8 = 1;
/// Status of a stored event: a readout unit was lost.
pub(super) const LOST: u8 = 4;

/// The header of a file.
#[derive(Clone, Debug)]
pub(super) struct FileHeader {
    pub(super) block: u32,
    /// Events, if the file was recovered.
    pub(super) recovered: u64,
    pub(super) schema: Schema,
}

/// A packet of one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordPacket {
    /// Its source.
    pub source: u32,
    /// Kind of the source.
    pub kind: u32,
    /// Its place in the record \[bytes\].
    pub offset: u64,
    /// Its length \[bytes\].
    pub len: u32,
    /// Length of its header \[bytes\].
    pub header_len: u32,
    /// CRC-32 of its header.
    pub header_crc: u32,
}

/// A stored event of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordEvent {
    /// Counted from the first event of the batch.
    pub index: u32,
    /// As `/events/status` of an event file, without corrupt fragments.
    pub status: u8,
}

/// The header of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordHeader {
    /// Length of the record \[bytes\].
    pub record_len: u64,
    /// Number of the record in the file, from 0.
    pub number: u64,
    /// The batch.
    pub batch: u64,
    /// Its first event.
    pub first_event: u64,
    /// Its number of events.
    pub n_events: u32,
    /// Whether it was built without the sources of a lost readout unit.
    pub readout_lost: bool,
    /// Whether its writer has not committed it: its data may be lost, and a reader ends before it.
    pub pending: bool,
    /// The packets of all sources.
    pub packets: Vec<RecordPacket>,
    /// The stored events, ascending.
    pub events: Vec<RecordEvent>,
    /// Their decision maps, one after the other.
    pub decisions: Vec<u8>,
}

/// Finishes a header: its length, and its CRC-32.
fn seal(mut bytes: Vec<u8>, magic: &[u8; 8]) -> Vec<u8> {
    let len = bytes.len() as u32;
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    let crc = crc_of(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// CRC-32 of a header without its field for it.
fn crc_of(header: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header[..12]);
    crc.update(&header[START..]);
    crc.finalize()
}

/// Length of the header that starts with these bytes. Checks only the magic.
pub(super) fn header_len(start: [u8; START], is_file: bool) -> Result<u32, String> {
    let magic = if is_file { FILE_MAGIC } else { RECORD_MAGIC };
    if &start[..8] != magic {
        let expected = String::from_utf8_lossy(magic);
        return Err(format!("starts with {:02x?}, expected {expected:?}", &start[..8]));
    }
    let len = u32_at(&start, 8);
    let fixed = if is_file { FILE_FIXED } else { RECORD_FIXED };
    if !(fixed as u32..=MAX_HEADER).contains(&len) {
        return Err(format!("its header has {len} B, expected {fixed} to {MAX_HEADER}"));
    }
    Ok(len)
}

fn check_crc(header: &[u8]) -> Result<(), String> {
    let (found, expected) = (crc_of(header), u32_at(header, 12));
    if found != expected {
        return Err(format!("its header has CRC-32 {found:08x}, expected {expected:08x}"));
    }
    Ok(())
}

impl FileHeader {
    /// The header without padding.
    pub(super) fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = vec![0; START];
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.block.to_le_bytes());
        bytes.extend(self.recovered.to_le_bytes());
        serde_json::to_writer(&mut bytes, &self.schema)?;
        Ok(seal(bytes, FILE_MAGIC))
    }

    /// Checks and reads a header of the length that [`header_len`] gave.
    pub(super) fn parse(header: &[u8]) -> Result<FileHeader, String> {
        check_crc(header)?;
        let (version, block) = (u32_at(header, 16), u32_at(header, 20));
        if version != VERSION {
            return Err(format!("has version {version}, expected {VERSION}"));
        }
        if !BLOCKS.contains(&block) || !block.is_power_of_two() {
            return Err(format!("has blocks of {block} B, expected a power of two in {BLOCKS:?}"));
        }
        let schema =
            serde_json::from_slice(&header[FILE_FIXED..]).map_err(|cause| format!("schema: {cause}"))?;
        Ok(FileHeader { block, recovered: u64_at(header, 24), schema })
    }
}

/// Sets the number of events of a recovered file in its header.
pub(super) fn mark_recovered(header: &mut [u8], events: u64) {
    header[24..32].copy_from_slice(&events.to_le_bytes());
    let crc = crc_of(header);
    header[12..16].copy_from_slice(&crc.to_le_bytes());
}

impl RecordHeader {
    /// Length without padding.
    pub(super) fn len(&self) -> usize {
        RECORD_FIXED + PACKET * self.packets.len() + EVENT * self.events.len() + self.decisions.len()
    }

    /// The header without padding.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        bytes.resize(START, 0);
        for field in [self.record_len, self.number, self.batch, self.first_event] {
            bytes.extend(field.to_le_bytes());
        }
        let map = self.decisions.len().checked_div(self.events.len()).unwrap_or(0);
        let flags = if self.readout_lost { READOUT_LOST } else { 0 } | if self.pending { PENDING } else { 0 };
        let counts = [self.events.len(), self.packets.len(), map].map(|count| count as u32);
        for field in [self.n_events, counts[0], counts[1], counts[2], flags, 0] {
            bytes.extend(field.to_le_bytes());
        }
        for packet in &self.packets {
            bytes.extend(packet.source.to_le_bytes());
            bytes.extend(packet.kind.to_le_bytes());
            bytes.extend(packet.offset.to_le_bytes());
            for field in [packet.len, packet.header_len, packet.header_crc, 0] {
                bytes.extend(field.to_le_bytes());
            }
        }
        for event in &self.events {
            bytes.extend(event.index.to_le_bytes());
            bytes.extend([event.status, 0, 0, 0]);
        }
        bytes.extend(&self.decisions);
        seal(bytes, RECORD_MAGIC)
    }

    /// Checks and reads a header of the length that [`header_len`] gave; all places are then inside of the record.
    pub(super) fn parse(header: &[u8], block: u64) -> Result<RecordHeader, String> {
        check_crc(header)?;
        let [events, packets, map] = [52, 56, 60].map(|at| u64::from(u32_at(header, at)));
        let expected = RECORD_FIXED as u64 + PACKET as u64 * packets + EVENT as u64 * events;
        let expected = map.checked_mul(events).and_then(|maps| maps.checked_add(expected));
        if expected != Some(header.len() as u64) {
            let found = header.len();
            return Err(format!("{packets} packets and {events} events do not make a header of {found} B"));
        }
        // Both parts are inside of the header, as just checked.
        let (table, rest) = header[RECORD_FIXED..].split_at(PACKET * packets as usize);
        let (stored, decisions) = rest.split_at(EVENT * events as usize);
        let record = RecordHeader {
            record_len: u64_at(header, 16),
            number: u64_at(header, 24),
            batch: u64_at(header, 32),
            first_event: u64_at(header, 40),
            n_events: u32_at(header, 48),
            readout_lost: u32_at(header, 64) & READOUT_LOST != 0,
            pending: u32_at(header, 64) & PENDING != 0,
            packets: table.chunks_exact(PACKET).map(packet).collect(),
            events: stored
                .chunks_exact(EVENT)
                .map(|event| RecordEvent { index: u32_at(event, 0), status: event[4] })
                .collect(),
            decisions: decisions.to_vec(),
        };
        record.check((header.len() as u64).next_multiple_of(block), block).map(|()| record)
    }

    fn check(&self, data: u64, block: u64) -> Result<(), String> {
        let len = self.record_len;
        if !len.is_multiple_of(block) || len < data {
            return Err(format!(
                "its length is {len} B, expected whole blocks of {block} B, at least {data} B"
            ));
        }
        if self.first_event.checked_add(self.n_events.into()).is_none() {
            return Err(format!("{} events from {} exceed all numbers", self.n_events, self.first_event));
        }
        for packet in &self.packets {
            let end = packet.offset.checked_add(packet.len.into());
            if packet.offset < data || end.is_none_or(|end| end > len) || packet.header_len > packet.len {
                return Err(format!("the packet of source {:#x} is outside of it", packet.source));
            }
        }
        // Otherwise a short file could have any number of packet entries.
        let mut ranges: Vec<_> = self.packets.iter().map(|packet| (packet.offset, packet.len)).collect();
        ranges.sort_unstable();
        if ranges.windows(2).any(|pair| pair[0].0 + u64::from(pair[0].1) > pair[1].0) {
            return Err("its packets overlap".to_owned());
        }
        let ascends = self.events.windows(2).all(|pair| pair[0].index < pair[1].index);
        if !ascends || self.events.last().is_some_and(|event| event.index >= self.n_events) {
            return Err("its events are not ascending events of the batch".to_owned());
        }
        Ok(())
    }

    /// Numbers of the stored events.
    pub fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.events.iter().map(|event| self.first_event + u64::from(event.index))
    }

    /// The decision map of the event at a position of `events`; empty without decisions.
    pub(super) fn decisions_of(&self, position: usize) -> &[u8] {
        let map = self.decisions.len().checked_div(self.events.len()).unwrap_or(0);
        &self.decisions[position * map..(position + 1) * map]
    }
}

fn packet(bytes: &[u8]) -> RecordPacket {
    RecordPacket {
        source: u32_at(bytes, 0),
        kind: u32_at(bytes, 4),
        offset: u64_at(bytes, 8),
        len: u32_at(bytes, 16),
        header_len: u32_at(bytes, 20),
        header_crc: u32_at(bytes, 24),
    }
}

/// The caller has checked the length.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |field| u32::from_le_bytes(*field))
}

/// The caller has checked the length.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |field| u64::from_le_bytes(*field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> impl Strategy<Value = RecordHeader> {
        let packets = prop::collection::vec((any::<u32>(), 1u32..4096), 0..6);
        let events = prop::collection::btree_set(0u32..64, 1..6);
        (packets, events, 0usize..4, any::<[u32; 2]>(), any::<[bool; 2]>()).prop_map(
            |(packets, events, map, [batch, first_event], [readout_lost, pending])| RecordHeader {
                record_len: 12 * 4096,
                number: 3,
                batch: batch.into(),
                first_event: first_event.into(),
                n_events: 64,
                readout_lost,
                pending,
                packets: packets
                    .into_iter()
                    .zip(1..)
                    .map(|((source, len), page)| RecordPacket {
                        source,
                        kind: 1,
                        offset: 4096 * page,
                        len,
                        header_len: len / 2,
                        header_crc: source,
                    })
                    .collect(),
                decisions: vec![5; map * events.len()],
                events: events.into_iter().map(|index| RecordEvent { index, status: MISSING }).collect(),
            },
        )
    }

    proptest! {
        #[test]
        fn headers_round_trip_and_damaged_ones_stay_inside_of_their_record(
            record in record(),
            damage in prop::collection::vec((0usize..400, any::<u8>()), 0..4),
        ) {
            let mut header = record.encode();
            prop_assert_eq!(header.len(), record.len());
            prop_assert_eq!(&RecordHeader::parse(&header, 4096).unwrap(), &record);
            // A writer of any fields, with a correct checksum.
            let len = header.len();
            damage.iter().for_each(|&(at, value)| header[at % len] = value);
            let crc = crc_of(&header);
            header[12..16].copy_from_slice(&crc.to_le_bytes());
            if let Ok(parsed) = RecordHeader::parse(&header, 4096) {
                for packet in &parsed.packets {
                    prop_assert!(packet.offset + u64::from(packet.len) <= parsed.record_len);
                    prop_assert!(packet.header_len <= packet.len && packet.offset >= header.len() as u64);
                }
                for (position, event) in parsed.events.iter().enumerate() {
                    prop_assert!(event.index < parsed.n_events);
                    prop_assert!(parsed.decisions_of(position).len() <= parsed.decisions.len());
                }
                prop_assert!(parsed.numbers().is_sorted());
            }
        }

        #[test]
        fn any_bytes_are_no_header_or_a_checked_one(bytes in prop::collection::vec(any::<u8>(), START..300)) {
            let start = *bytes.first_chunk().unwrap();
            for is_file in [false, true] {
                if let Ok(len) = header_len(start, is_file) {
                    prop_assert!((FILE_FIXED.min(RECORD_FIXED) as u32..=MAX_HEADER).contains(&len));
                }
            }
        }
    }
}
