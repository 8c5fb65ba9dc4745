//! Binary format of stream files: header, source table, fragment index.
//!
//! Offsets are named as in `docs/formats.md`. All integers are little-endian.

use std::ops::Range;

use crate::bytes::{array_at, put, u32_at, u64_at};
use crate::{Alignment, SourceId, SourceKind};

/// Supported version of the format.
pub const VERSION: u16 = 1;

/// Maximum length of a source's name, in bytes of UTF-8.
pub const NAME_BYTES: usize = 16;

pub(super) const MAGIC: [u8; 8] = *b"MSTREAM\0";

/// Header fields.
///
/// ```text
///  0  magic              8 B    24  n_fragments      u64    56  index_offset     u64
///  8  version            u16    32  first_event      u64    64  file_len         u64
/// 10  header_len         u16    40  n_events         u64    72  tables_crc       u32
/// 12  alignment          u32    48  sources_offset   u64    76  header_crc       u32
/// 16  n_sources          u32
/// 20  reserved           u32
/// ```
pub(super) mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 8;
    pub(crate) const HEADER_LEN: usize = 10;
    pub(crate) const ALIGNMENT: usize = 12;
    pub(crate) const N_SOURCES: usize = 16;
    pub(crate) const RESERVED: usize = 20;
    pub(crate) const N_FRAGMENTS: usize = 24;
    pub(crate) const FIRST_EVENT: usize = 32;
    pub(crate) const N_EVENTS: usize = 40;
    pub(crate) const SOURCES_OFFSET: usize = 48;
    pub(crate) const INDEX_OFFSET: usize = 56;
    pub(crate) const FILE_LEN: usize = 64;
    pub(crate) const TABLES_CRC: usize = 72;
    pub(crate) const HEADER_CRC: usize = 76;
    pub(crate) const LEN: usize = 80;
}

/// Source table entry fields.
///
/// ```text
///  0  source             u32    16  payload_offset   u64    40  max_len          u32
///  4  kind               u32    24  payload_len      u64    44  reserved         u32
///  8  n_fragments        u64    32  first_fragment   u64    48  name            16 B
/// ```
pub(super) mod source {
    pub(crate) const SOURCE: usize = 0;
    pub(crate) const KIND: usize = 4;
    pub(crate) const N_FRAGMENTS: usize = 8;
    pub(crate) const PAYLOAD_OFFSET: usize = 16;
    pub(crate) const PAYLOAD_LEN: usize = 24;
    pub(crate) const FIRST_FRAGMENT: usize = 32;
    pub(crate) const MAX_LEN: usize = 40;
    pub(crate) const RESERVED: usize = 44;
    pub(crate) const NAME: usize = 48;
    pub(crate) const LEN: usize = 64;
}

/// Fragment index entry fields.
///
/// ```text
///  0  event              u64     8  offset           u64    16  len              u32
///                                                           20  crc              u32
/// ```
pub(super) mod index {
    pub(crate) const EVENT: usize = 0;
    pub(crate) const OFFSET: usize = 8;
    pub(crate) const FRAGMENT_LEN: usize = 16;
    pub(crate) const CRC: usize = 20;
    pub(crate) const LEN: usize = 24;
}

/// Offset of the first source's payload, in bytes.
pub(super) fn payload_start(alignment: Alignment) -> u64 {
    alignment.padded(header::LEN as u32)
}

/// Content of the header that does not follow from the rest of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeaderRepr {
    pub(super) alignment: Alignment,
    pub(super) events: Range<u64>,
    pub(super) n_sources: u32,
    pub(super) n_fragments: u64,
    pub(super) sources_offset: u64,
    pub(super) tables_crc: u32,
}

impl HeaderRepr {
    pub(super) fn emit(&self) -> [u8; header::LEN] {
        let index_offset = self.sources_offset + u64::from(self.n_sources) * source::LEN as u64;
        let file_len = index_offset + self.n_fragments * index::LEN as u64;
        let mut bytes = [0; header::LEN];
        put(&mut bytes, header::MAGIC, MAGIC);
        put(&mut bytes, header::VERSION, VERSION.to_le_bytes());
        put(&mut bytes, header::HEADER_LEN, (header::LEN as u16).to_le_bytes());
        put(&mut bytes, header::ALIGNMENT, self.alignment.get().to_le_bytes());
        put(&mut bytes, header::N_SOURCES, self.n_sources.to_le_bytes());
        put(&mut bytes, header::N_FRAGMENTS, self.n_fragments.to_le_bytes());
        put(&mut bytes, header::FIRST_EVENT, self.events.start.to_le_bytes());
        put(&mut bytes, header::N_EVENTS, (self.events.end - self.events.start).to_le_bytes());
        put(&mut bytes, header::SOURCES_OFFSET, self.sources_offset.to_le_bytes());
        put(&mut bytes, header::INDEX_OFFSET, index_offset.to_le_bytes());
        put(&mut bytes, header::FILE_LEN, file_len.to_le_bytes());
        put(&mut bytes, header::TABLES_CRC, self.tables_crc.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..header::HEADER_CRC]);
        put(&mut bytes, header::HEADER_CRC, crc.to_le_bytes());
        bytes
    }
}

/// An entry of the source table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourceRepr {
    pub(super) id: SourceId,
    pub(super) kind: SourceKind,
    pub(super) n_fragments: u64,
    pub(super) payload_offset: u64,
    pub(super) payload_len: u64,
    pub(super) first_fragment: u64,
    pub(super) max_len: u32,
    pub(super) name: String,
}

impl SourceRepr {
    pub(super) fn emit(&self) -> [u8; source::LEN] {
        let mut bytes = [0; source::LEN];
        put(&mut bytes, source::SOURCE, self.id.0.to_le_bytes());
        put(&mut bytes, source::KIND, self.kind.0.to_le_bytes());
        put(&mut bytes, source::N_FRAGMENTS, self.n_fragments.to_le_bytes());
        put(&mut bytes, source::PAYLOAD_OFFSET, self.payload_offset.to_le_bytes());
        put(&mut bytes, source::PAYLOAD_LEN, self.payload_len.to_le_bytes());
        put(&mut bytes, source::FIRST_FRAGMENT, self.first_fragment.to_le_bytes());
        put(&mut bytes, source::MAX_LEN, self.max_len.to_le_bytes());
        bytes[source::NAME..][..self.name.len()].copy_from_slice(self.name.as_bytes());
        bytes
    }
}

/// Whether a source may have this name: at most [`NAME_BYTES`] without control characters.
pub(super) fn is_name(name: &str) -> bool {
    name.len() <= NAME_BYTES && !name.chars().any(char::is_control)
}

/// The name in a source table entry; `None` if it is invalid.
pub(super) fn parse_name(field: &[u8]) -> Option<&str> {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let (name, rest) = field.split_at(end);
    let name = std::str::from_utf8(name).ok()?;
    (is_name(name) && rest.iter().all(|&byte| byte == 0)).then_some(name)
}

/// An entry of the fragment index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// Its event number.
    pub event: u64,
    /// Offset of its payload in the file, a multiple of the alignment, in bytes.
    pub offset: u64,
    /// Length of its payload, in bytes.
    pub len: u32,
    /// CRC-32 of its payload.
    pub crc: u32,
}

impl IndexEntry {
    /// Parses the entry at the start of `bytes`.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let bytes: [u8; index::LEN] = array_at(bytes, 0);
        Self {
            event: u64_at(&bytes, index::EVENT),
            offset: u64_at(&bytes, index::OFFSET),
            len: u32_at(&bytes, index::FRAGMENT_LEN),
            crc: u32_at(&bytes, index::CRC),
        }
    }

    pub(super) fn emit(&self) -> [u8; index::LEN] {
        let mut bytes = [0; index::LEN];
        put(&mut bytes, index::EVENT, self.event.to_le_bytes());
        put(&mut bytes, index::OFFSET, self.offset.to_le_bytes());
        put(&mut bytes, index::FRAGMENT_LEN, self.len.to_le_bytes());
        put(&mut bytes, index::CRC, self.crc.to_le_bytes());
        bytes
    }
}
