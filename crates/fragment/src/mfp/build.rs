//! Writes packets: only the header, or header and payload.

use super::packet::{header_crc, need};
use super::{MAGIC, MfpError, Repr, Spacing, VERSION, entry, field};
use crate::Fragment;
use crate::bytes::{put, to_u64};

/// Writes the header of a packet whose payload is sent from other memory.
///
/// Fragments are added in order, [`Repr::n_fragments`] of them. Their payload must follow the header in the same order,
/// each padded to the alignment.
#[derive(Debug)]
pub struct HeaderBuilder<'a> {
    header: &'a mut [u8],
    repr: Repr,
    spacing: Spacing,
}

impl<'a> HeaderBuilder<'a> {
    /// Starts a header in `buffer`, which must have [`Repr::header_len`] bytes.
    pub fn new(buffer: &'a mut [u8], repr: Repr) -> Result<Self, MfpError> {
        let spacing = Spacing::new(&repr)?;
        need("header", spacing.offset.into(), to_u64(buffer.len()))?;
        let header = &mut buffer[..spacing.offset as usize];
        let table_end = field::LEN + repr.n_fragments as usize * entry::LEN;
        header[table_end..].fill(0);
        Ok(Self { header, repr, spacing })
    }

    /// Adds the next fragment, of `len` bytes with checksum `crc`. Returns its offset in the packet, in bytes.
    pub fn push(&mut self, event: u64, len: u32, crc: u32) -> Result<u32, MfpError> {
        let Repr { first_event, n_events, n_fragments, .. } = self.repr;
        let fragment = self.spacing.fragment;
        if fragment == n_fragments {
            let pushed = fragment.saturating_add(1);
            return Err(MfpError::WrongFragmentCount { pushed, n_fragments });
        }
        // An event outside of the batch saturates to the number of events and is refused.
        let event_delta = u32::try_from(event.wrapping_sub(first_event)).unwrap_or(n_events);
        let offset = self.spacing.advance(event_delta, len)?;
        let at = field::LEN + fragment as usize * entry::LEN;
        let entry = &mut self.header[at..][..entry::LEN];
        put(entry, entry::EVENT_DELTA, event_delta.to_le_bytes());
        put(entry, entry::FRAGMENT_LEN, len.to_le_bytes());
        put(entry, entry::CRC, crc.to_le_bytes());
        put(entry, entry::OFFSET, offset.to_le_bytes());
        Ok(offset)
    }

    /// Completes the header. Returns the length of the packet, in bytes.
    pub fn finish(self) -> Result<u32, MfpError> {
        let Self { header, repr, spacing } = self;
        let Repr { source, kind, first_event, n_events, n_fragments, alignment } = repr;
        if spacing.fragment != n_fragments {
            return Err(MfpError::WrongFragmentCount { pushed: spacing.fragment, n_fragments });
        }
        let total_len = spacing.offset;
        // Both fit: `Spacing` computed the header's length as u32, and the maximum alignment is 4096.
        let header_len = header.len() as u32;
        let alignment = alignment.get() as u16;
        put(header, field::MAGIC, MAGIC);
        put(header, field::VERSION, VERSION.to_le_bytes());
        put(header, field::ALIGNMENT, alignment.to_le_bytes());
        put(header, field::HEADER_LEN, header_len.to_le_bytes());
        put(header, field::TOTAL_LEN, total_len.to_le_bytes());
        put(header, field::SOURCE, source.0.to_le_bytes());
        put(header, field::KIND, kind.0.to_le_bytes());
        put(header, field::FIRST_EVENT, first_event.to_le_bytes());
        put(header, field::N_EVENTS, n_events.to_le_bytes());
        put(header, field::N_FRAGMENTS, n_fragments.to_le_bytes());
        put(header, field::RESERVED, 0_u32.to_le_bytes());
        let crc = header_crc(header);
        put(header, field::HEADER_CRC, crc.to_le_bytes());
        Ok(total_len)
    }
}

/// Writes a whole packet with payload to `buffer` and returns its length, in bytes. Checksums are those of the given
/// fragments. [`Repr::n_fragments`] must be their number.
pub fn assemble(buffer: &mut [u8], repr: Repr, fragments: &[Fragment<'_>]) -> Result<u32, MfpError> {
    let mut end = Spacing::new(&repr)?;
    for &Fragment { event, payload, crc: _ } in fragments {
        let len = payload_len(payload)?;
        end.advance(u32::try_from(event.wrapping_sub(repr.first_event)).unwrap_or(repr.n_events), len)?;
    }
    need("packet", end.offset.into(), to_u64(buffer.len()))?;

    let (header, rest) = buffer.split_at_mut(repr.header_len() as usize);
    let header_len = header.len();
    let mut builder = HeaderBuilder::new(header, repr)?;
    for &Fragment { event, payload, crc } in fragments {
        let len = payload_len(payload)?;
        let at = builder.push(event, len, crc)? as usize - header_len;
        let padded = &mut rest[at..][..repr.alignment.padded(len) as usize];
        let (place, padding) = padded.split_at_mut(payload.len());
        place.copy_from_slice(payload);
        padding.fill(0);
    }
    builder.finish()
}

fn payload_len(payload: &[u8]) -> Result<u32, MfpError> {
    u32::try_from(payload.len()).map_err(|_| MfpError::TooLong { len: to_u64(payload.len()) })
}
