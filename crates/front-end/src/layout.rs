//! Layout of ring memory. All numbers are little-endian.
//!
//! ```text
//!   0            4096              4096 + table           + capacity
//!   │ control    │ source table    │ records …            │
//! ```

use millstream_shm::PAGE;

/// First word of ring memory: `MSRB`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"MSRB");
/// Version of the layout.
pub const VERSION: u32 = 1;

/// Offsets of the control words.
pub mod control {
    /// u32: the magic.
    pub const MAGIC: usize = 0;
    /// u32: the version.
    pub const VERSION: usize = 4;
    /// u64: bytes of the ring, a power of two.
    pub const CAPACITY: usize = 8;
    /// u32: longest payload.
    pub const MAX_LEN: usize = 16;
    /// u32: id of the first source.
    pub const FIRST_SOURCE: usize = 20;
    /// u32: number of sources.
    pub const SOURCES: usize = 24;
    /// u64: bytes written, by the producer.
    pub const HEAD: usize = 64;
    /// u64: bytes read, by the consumer.
    pub const TAIL: usize = 128;
    /// u32: 1 while the producer must not write, set by the consumer.
    pub const BUSY: usize = 136;
    /// u32: 1 if the consumer sleeps; the producer that clears it signals the wake-up descriptor.
    pub const WAITING: usize = 192;
}

/// Offset of the source table.
pub const TABLE: usize = PAGE;
/// Length of an entry.
pub const ENTRY: usize = 32;
/// Offsets in an entry of the source table.
pub mod entry {
    /// u64: fragments accepted.
    pub const PUSHED: usize = 0;
    /// u64: fragments refused.
    pub const REFUSED: usize = 8;
    /// u64: dead time (ns).
    pub const DEAD_NS: usize = 16;
}

/// Length of a record's header; records start at multiples of it.
pub const RECORD: usize = 32;
/// Source of a record that fills the rest of the ring before its start.
pub const FILLER: u32 = u32::MAX;

/// The header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// The source.
    pub source: u32,
    /// Length of the payload.
    pub len: u32,
    /// The event.
    pub event: u64,
    /// CRC-32 (IEEE) of the payload.
    pub crc: u32,
}

impl RecordHeader {
    /// Encodes the header.
    pub fn encode(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..4].copy_from_slice(&self.source.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.event.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.crc.to_le_bytes());
        bytes
    }

    /// Decodes the header.
    pub fn decode(bytes: &[u8; RECORD]) -> RecordHeader {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let event = u64::from(word(8)) | u64::from(word(12)) << 32;
        RecordHeader { source: word(0), len: word(4), event, crc: word(16) }
    }

    /// Length of the record with its padding.
    pub fn record_len(&self) -> u64 {
        (RECORD as u64 + u64::from(self.len)).next_multiple_of(RECORD as u64)
    }
}

/// Offset of the records behind the table of `sources` entries.
pub fn records(sources: u32) -> usize {
    TABLE + (sources as usize * ENTRY).next_multiple_of(PAGE)
}

/// Abstract address at which a readout unit waits for the front ends of `name`, for processes of user `uid`.
pub fn address(name: &str, uid: u32) -> String {
    format!("millstream-front-end/{uid}/{name}")
}
