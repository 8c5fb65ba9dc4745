//! A fragment and the names of its origin.

use std::fmt;

/// Which source a fragment comes from. The experiment chooses the numbers; `data/README.md` lists
/// those of the data in this repository.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub u32);

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "source {:#x}", self.0)
    }
}

/// How a source's payload is laid out. The experiment chooses the numbers, as for [`SourceId`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceKind(pub u32);

impl fmt::Display for SourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kind {}", self.0)
    }
}

/// One fragment in place: in a mapped file or in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment<'a> {
    /// The event that it belongs to.
    pub event: u64,
    /// Its bytes. None at all is a fragment too: the source was read and had nothing to say.
    pub payload: &'a [u8],
    /// CRC-32 (IEEE) of the payload, as it was when the fragment was recorded.
    pub crc: u32,
}

impl<'a> Fragment<'a> {
    /// A new fragment, with the checksum of its payload as it is now.
    pub fn new(event: u64, payload: &'a [u8]) -> Self {
        Self { event, payload, crc: crc32fast::hash(payload) }
    }

    /// Whether the payload still has its checksum.
    pub fn is_intact(&self) -> bool {
        crc32fast::hash(self.payload) == self.crc
    }
}
