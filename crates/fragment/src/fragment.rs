//! Fragments and their sources.

use std::fmt;

/// Identifier of a source. The experiment assigns the numbers; `data/README.md` lists those of the data in this
/// repository.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub u32);

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "source {:#x}", self.0)
    }
}

/// Layout of a source's payload. The experiment assigns the numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceKind(pub u32);

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kind {}", self.0)
    }
}

/// A fragment in a mapped file or in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment<'a> {
    /// Its event number.
    pub event: u64,
    /// Its payload. An empty payload is valid: the source was read and has no data.
    pub payload: &'a [u8],
    /// CRC-32 (IEEE) of the payload when it was recorded.
    pub crc: u32,
}

impl<'a> Fragment<'a> {
    /// Creates a fragment and computes the checksum of its payload.
    pub fn new(event: u64, payload: &'a [u8]) -> Self {
        Self { event, payload, crc: crc32fast::hash(payload) }
    }

    /// Whether the payload matches its checksum.
    pub fn is_intact(&self) -> bool {
        crc32fast::hash(self.payload) == self.crc
    }
}
