//! Reads packets in place. All fields are checked once; then the accessors cannot fail.

use super::{FIXED_LEN, MAGIC, MfpError, Repr, Spacing, VERSION, entry, field};
use crate::bytes::{VERIFY_CHECKSUMS, array_at, to_u64, u16_at, u32_at, u64_at};
use crate::{Alignment, Fragment, SourceId, SourceKind};

/// Length of the header, in bytes, from its first [`FIXED_LEN`] bytes. Checks only magic and version: compare the length
/// with the available memory, read that much, and continue with [`Header::new_checked`].
pub fn peek_header_len(start: &[u8]) -> Result<u32, MfpError> {
    check_start(start)?;
    Ok(u32_at(start, field::HEADER_LEN))
}

/// A fragment's entry in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its event number.
    pub event: u64,
    /// Offset of its payload in the packet, in bytes.
    pub offset: u32,
    /// Length of its payload, in bytes.
    pub len: u32,
    /// CRC-32 of its payload.
    pub crc: u32,
}

/// A checked header.
///
/// The bytes must not change while this exists. Copy memory that a peer can write before the check.
#[derive(Clone, Copy, Debug)]
pub struct Header<T> {
    bytes: T,
}

impl<T: AsRef<[u8]>> Header<T> {
    /// Checks a header and the offsets of all its fragments. `bytes` starts with the header and may be longer. `room` is the
    /// size of the memory from the packet's start, in bytes.
    pub fn new_checked(bytes: T, room: u64) -> Result<Self, MfpError> {
        check(bytes.as_ref(), room)?;
        Ok(Self { bytes })
    }

    /// Content of the header, without its fragments.
    pub fn repr(&self) -> Repr {
        repr(self.bytes.as_ref()).expect("checked by new_checked")
    }

    /// The source of all fragments.
    pub fn source(&self) -> SourceId {
        SourceId(self.u32(field::SOURCE))
    }

    /// Layout of their payload.
    pub fn kind(&self) -> SourceKind {
        SourceKind(self.u32(field::KIND))
    }

    /// First event of the batch.
    pub fn first_event(&self) -> u64 {
        u64_at(self.bytes.as_ref(), field::FIRST_EVENT)
    }

    /// Number of events in the batch; at least one.
    pub fn n_events(&self) -> u32 {
        self.u32(field::N_EVENTS)
    }

    /// Number of fragments.
    pub fn n_fragments(&self) -> u32 {
        self.u32(field::N_FRAGMENTS)
    }

    /// Length of the header, which is the offset of the first fragment, in bytes.
    pub fn header_len(&self) -> u32 {
        self.u32(field::HEADER_LEN)
    }

    /// Length of the packet, in bytes.
    pub fn total_len(&self) -> u32 {
        self.u32(field::TOTAL_LEN)
    }

    /// Entries of all fragments, in ascending order of events.
    pub fn entries(&self) -> Entries<'_> {
        let table = &self.bytes.as_ref()[field::LEN..][..self.n_fragments() as usize * entry::LEN];
        Entries { first_event: self.first_event(), table: table.chunks_exact(entry::LEN) }
    }

    fn u32(&self, at: usize) -> u32 {
        u32_at(self.bytes.as_ref(), at)
    }
}

/// Entries of a header; see [`Header::entries`].
#[derive(Clone, Debug)]
pub struct Entries<'a> {
    first_event: u64,
    table: std::slice::ChunksExact<'a, u8>,
}

impl Iterator for Entries<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        let entry = self.table.next()?;
        Some(Entry {
            event: self.first_event + u64::from(u32_at(entry, entry::EVENT_DELTA)),
            offset: u32_at(entry, entry::OFFSET),
            len: u32_at(entry, entry::FRAGMENT_LEN),
            crc: u32_at(entry, entry::CRC),
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.table.size_hint()
    }
}

impl ExactSizeIterator for Entries<'_> {}

/// A checked packet. The bytes must not change while this exists.
#[derive(Clone, Copy, Debug)]
pub struct Packet<T> {
    header: Header<T>,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Checks the packet at the start of `bytes`, which may be longer. Does not verify payload checksums; see
    /// [`Fragment::is_intact`].
    pub fn new_checked(bytes: T) -> Result<Self, MfpError> {
        let room = to_u64(bytes.as_ref().len());
        Ok(Self { header: Header::new_checked(bytes, room)? })
    }

    /// The packet's header.
    pub fn header(&self) -> &Header<T> {
        &self.header
    }

    /// The packet without bytes behind it.
    pub fn as_bytes(&self) -> &[u8] {
        &self.header.bytes.as_ref()[..self.header.total_len() as usize]
    }

    /// All fragments, in ascending order of events.
    pub fn fragments(&self) -> Fragments<'_> {
        Fragments { entries: self.header.entries(), packet: self.as_bytes() }
    }
}

/// Fragments of a packet; see [`Packet::fragments`].
#[derive(Clone, Debug)]
pub struct Fragments<'a> {
    entries: Entries<'a>,
    packet: &'a [u8],
}

impl<'a> Iterator for Fragments<'a> {
    type Item = Fragment<'a>;

    fn next(&mut self) -> Option<Fragment<'a>> {
        let Entry { event, offset, len, crc } = self.entries.next()?;
        Some(Fragment { event, payload: &self.packet[offset as usize..][..len as usize], crc })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.entries.size_hint()
    }
}

impl ExactSizeIterator for Fragments<'_> {}

fn check_start(bytes: &[u8]) -> Result<(), MfpError> {
    need("fixed part of the header", FIXED_LEN as u64, to_u64(bytes.len()))?;
    let magic = array_at(bytes, field::MAGIC);
    if magic != MAGIC {
        return Err(MfpError::Magic(magic));
    }
    let version = u16_at(bytes, field::VERSION);
    if version != VERSION {
        return Err(MfpError::Version(version));
    }
    Ok(())
}

/// Reads the content of a header whose fixed part is available.
fn repr(bytes: &[u8]) -> Result<Repr, MfpError> {
    Ok(Repr {
        source: SourceId(u32_at(bytes, field::SOURCE)),
        kind: SourceKind(u32_at(bytes, field::KIND)),
        first_event: u64_at(bytes, field::FIRST_EVENT),
        n_events: u32_at(bytes, field::N_EVENTS),
        n_fragments: u32_at(bytes, field::N_FRAGMENTS),
        alignment: Alignment::new(u16_at(bytes, field::ALIGNMENT).into())?,
    })
}

fn check(bytes: &[u8], room: u64) -> Result<(), MfpError> {
    check_start(bytes)?;
    let repr = repr(bytes)?;
    let mut spacing = Spacing::new(&repr)?;
    let header_len = u32_at(bytes, field::HEADER_LEN);
    if u64::from(header_len) != repr.header_len() {
        return Err(MfpError::HeaderLen { found: header_len, expected: repr.header_len() });
    }
    need("header", header_len.into(), to_u64(bytes.len()))?;
    let header = &bytes[..header_len as usize];
    let found = u32_at(header, field::HEADER_CRC);
    if VERIFY_CHECKSUMS {
        let expected = header_crc(header);
        if found != expected {
            return Err(MfpError::HeaderCrc { found, expected });
        }
    }
    let reserved = u32_at(header, field::RESERVED);
    if reserved != 0 {
        return Err(MfpError::Reserved(reserved));
    }

    let table = &header[field::LEN..][..repr.n_fragments as usize * entry::LEN];
    for (fragment, entry) in (0..).zip(table.chunks_exact(entry::LEN)) {
        let event_delta = u32_at(entry, entry::EVENT_DELTA);
        let expected = spacing.advance(event_delta, u32_at(entry, entry::FRAGMENT_LEN))?;
        let found = u32_at(entry, entry::OFFSET);
        if found != expected {
            return Err(MfpError::Offset { fragment, found, expected });
        }
    }
    let total_len = u32_at(header, field::TOTAL_LEN);
    if total_len != spacing.offset {
        return Err(MfpError::TotalLen { found: total_len, expected: spacing.offset });
    }
    need("packet", total_len.into(), room)
}

pub(super) fn need(part: &'static str, need: u64, have: u64) -> Result<(), MfpError> {
    if have < need { Err(MfpError::Truncated { part, need, have }) } else { Ok(()) }
}

/// CRC-32 of a header without the checksum field.
pub(super) fn header_crc(header: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&header[..field::HEADER_CRC]);
    crc.update(&header[field::LEN..]);
    crc.finalize()
}
