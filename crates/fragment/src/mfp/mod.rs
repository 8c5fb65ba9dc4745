//! Multi-fragment packets: one source's fragments of one batch of consecutive events.
//!
//! A packet is a header with the offset of each fragment, and the fragments, aligned as in a stream file. [`Packet`] reads
//! a packet in place. [`Header`] reads a header that was copied from memory that peers can write. [`Repr`] is the content
//! of a header, and [`HeaderBuilder`] writes one. `docs/formats.md`, chapter "Multi-fragment packet", is the specification.

mod build;
mod error;
mod packet;

pub use build::{HeaderBuilder, assemble};
pub use error::MfpError;
pub use packet::{Entries, Entry, Fragments, Header, Packet, peek_header_len};

use crate::{Alignment, SourceId, SourceKind};

/// Supported version of the packet format.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 4] = *b"MFPK";

/// Header fields, followed by one entry per fragment.
///
/// ```text
///  0  magic              4 B    16  source           u32    32  n_events         u32
///  4  version            u16    20  kind             u32    36  n_fragments      u32
///  6  alignment          u16    24  first_event      u64    40  reserved         u32
///  8  header_len         u32                                44  header_crc       u32
/// 12  total_len          u32
/// ```
mod field {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 4;
    pub(super) const ALIGNMENT: usize = 6;
    pub(super) const HEADER_LEN: usize = 8;
    pub(super) const TOTAL_LEN: usize = 12;
    pub(super) const SOURCE: usize = 16;
    pub(super) const KIND: usize = 20;
    pub(super) const FIRST_EVENT: usize = 24;
    pub(super) const N_EVENTS: usize = 32;
    pub(super) const N_FRAGMENTS: usize = 36;
    pub(super) const RESERVED: usize = 40;
    pub(super) const HEADER_CRC: usize = 44;
    pub(super) const LEN: usize = 48;
}

/// Fields of a fragment entry.
///
/// ```text
///  0  event_delta        u32     4  len              u32     8  crc              u32
///                                                           12  offset           u32
/// ```
mod entry {
    pub(super) const EVENT_DELTA: usize = 0;
    pub(super) const FRAGMENT_LEN: usize = 4;
    pub(super) const CRC: usize = 8;
    pub(super) const OFFSET: usize = 12;
    pub(super) const LEN: usize = 16;
}

/// Length of the fixed part of a header, in bytes. [`peek_header_len`] reads the whole length from it.
pub const FIXED_LEN: usize = field::LEN;

/// Headers are padded to a multiple of this and of the packet's alignment, in bytes.
pub const HEADER_ALIGNMENT: u32 = 64;

/// Length of the header of a packet with `n_fragments` fragments, in bytes.
///
/// 48 and 16 for each fragment, rounded up to a multiple of 64 and of the alignment.
pub const fn header_len(n_fragments: u32, alignment: Alignment) -> u64 {
    let used = field::LEN as u64 + n_fragments as u64 * entry::LEN as u64;
    let step = if alignment.get() > HEADER_ALIGNMENT { alignment.get() } else { HEADER_ALIGNMENT };
    used.next_multiple_of(step as u64)
}

/// Maximum length of the packet of any batch of `n_events` events, from a source whose longest fragment has `max_len`
/// bytes. `None` for 4 GiB or longer, which the format does not allow.
pub fn capacity(n_events: u32, max_len: u32, alignment: Alignment) -> Option<u32> {
    let payload = u64::from(n_events).checked_mul(alignment.padded(max_len))?;
    u32::try_from(header_len(n_events, alignment).checked_add(payload)?).ok()
}

/// Content of a packet's header, without its fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The source of all fragments.
    pub source: SourceId,
    /// Layout of their payload.
    pub kind: SourceKind,
    /// First event of the batch.
    pub first_event: u64,
    /// Number of events in the batch, from [`first_event`](Self::first_event).
    pub n_events: u32,
    /// Number of fragments; less than the number of events if fragments are missing.
    pub n_fragments: u32,
    /// Alignment of the fragments.
    pub alignment: Alignment,
}

impl Repr {
    /// Length of the header, in bytes.
    pub const fn header_len(&self) -> u64 {
        header_len(self.n_fragments, self.alignment)
    }

    /// Checks that a packet with this content can exist.
    fn check(&self) -> Result<(), MfpError> {
        let Self { first_event, n_events, n_fragments, .. } = *self;
        if n_events == 0 || first_event.checked_add(n_events.into()).is_none() {
            return Err(MfpError::Events { first_event, n_events });
        }
        if n_fragments > n_events {
            return Err(MfpError::FragmentCount { n_fragments, n_events });
        }
        Ok(())
    }
}

/// Computes the offsets of a packet's fragments in order.
#[derive(Clone, Copy, Debug)]
struct Spacing {
    alignment: Alignment,
    n_events: u32,
    /// Number of fragments so far.
    fragment: u32,
    /// Smallest valid event of the next fragment, relative to the first of the batch.
    earliest: u32,
    /// Offset of the next fragment; after the last one, the length of the packet.
    offset: u32,
}

impl Spacing {
    /// Starts before the first fragment.
    fn new(repr: &Repr) -> Result<Self, MfpError> {
        repr.check()?;
        let header_len = repr.header_len();
        let offset = u32::try_from(header_len).map_err(|_| MfpError::TooLong { len: header_len })?;
        Ok(Self { alignment: repr.alignment, n_events: repr.n_events, fragment: 0, earliest: 0, offset })
    }

    /// Advances past a fragment of `len` bytes and returns its offset.
    fn advance(&mut self, event_delta: u32, len: u32) -> Result<u32, MfpError> {
        let Self { fragment, earliest, n_events, offset, .. } = *self;
        if event_delta < earliest || n_events <= event_delta {
            return Err(MfpError::EventDelta { fragment, found: event_delta, earliest, n_events });
        }
        let end = u64::from(offset) + self.alignment.padded(len);
        self.offset = u32::try_from(end).map_err(|_| MfpError::TooLong { len: end })?;
        // Less than n_events, so this does not overflow.
        self.earliest = event_delta + 1;
        self.fragment += 1;
        Ok(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: Alignment = Alignment::CACHE_LINE;

    #[test]
    fn headers_are_multiples_of_64_and_of_the_alignment() {
        assert_eq!([0, 1, 2, 5, 6].map(|n| header_len(n, LINE)), [64, 64, 128, 128, 192]);
        assert_eq!(header_len(1, Alignment::MIN), 64);
        assert_eq!(header_len(1, Alignment::MAX), 4096);
        assert_eq!(header_len(u32::MAX, LINE), (1 << 36) + 64);
    }

    #[test]
    fn capacity_stops_at_4_gib() {
        assert_eq!(capacity(32, 4800, LINE), Some(576 + 32 * 4800));
        assert_eq!(capacity(1, u32::MAX, LINE), None);
        assert_eq!(capacity(u32::MAX, u32::MAX, Alignment::MAX), None);
        assert_eq!(capacity(0, 100, LINE), Some(64));
    }
}
