//! From a stream file to packets: the header of a batch, and the byte extents that follow it on the wire.
//!
//! A readout unit registers the mapped file once. For each batch it asks a [`Packetizer`] for the packet's
//! header, which goes into a small buffer, and for the [`FileExtent`]s of the file that are its payload. Header
//! and extents, in this order, are the scatter/gather list of one RDMA WRITE; the payload is never copied
//! on the way.

use std::ops::Range;

use crate::mfp::{self, HeaderBuilder, MfpError, Repr};
use crate::stream::Source;

/// Events of a file, repeated for ever under running numbers.
///
/// The running event `base + k` is the file's event `first + (k mod E)`, where `E` is the number of
/// the file's events. Sources that are to agree on their events need the same replay, and with it files
/// of the same events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    file: Range<u64>,
    base: u64,
}

impl Replay {
    /// Repeats the events `file`, the first time as `base` and those after it. `None` if there are no
    /// events.
    pub fn new(file: Range<u64>, base: u64) -> Option<Self> {
        (!file.is_empty()).then_some(Self { file, base })
    }

    /// The file's events under their own numbers, then again as those that follow. `None` if there are
    /// no events.
    pub fn continuing(file: Range<u64>) -> Option<Self> {
        let base = file.start;
        Self::new(file, base)
    }

    /// Number of events in one pass; at least one.
    pub fn events_per_pass(&self) -> u64 {
        self.file.end - self.file.start
    }

    /// Number of the first running event.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The file's event that is sent under the number `running`; `None` before the first.
    pub fn file_event(&self, running: u64) -> Option<u64> {
        let passed = running.checked_sub(self.base)?;
        Some(self.file.start + passed % self.events_per_pass())
    }

    /// Cuts a batch where the file starts again. `None` if it starts before the first running event or
    /// goes past the greatest number.
    fn pieces(&self, first: u64, n_events: u32) -> Option<PassPieces<'_>> {
        let passed = first.checked_sub(self.base)?;
        first.checked_add(n_events.into())?;
        Some(PassPieces {
            replay: self,
            running: first,
            position: passed % self.events_per_pass(),
            left: n_events.into(),
        })
    }
}

/// A part of a batch that lies within one pass.
struct PassPiece {
    file: Range<u64>,
    /// Number under which the first of them is sent.
    running: u64,
}

struct PassPieces<'a> {
    replay: &'a Replay,
    running: u64,
    /// Events from the start of the file.
    position: u64,
    /// Events of the batch that are left.
    left: u64,
}

impl Iterator for PassPieces<'_> {
    type Item = PassPiece;

    fn next(&mut self) -> Option<PassPiece> {
        if self.left == 0 {
            return None;
        }
        let start = self.replay.file.start + self.position;
        let take = self.left.min(self.replay.file.end - start);
        let piece = PassPiece { file: start..start + take, running: self.running };
        self.running += take;
        self.left -= take;
        self.position = 0;
        Some(piece)
    }
}

/// Consecutive bytes of a stream file: fragments that are neighbours in the file and in the packet,
/// each with its padding. Never empty: adapters read a length of zero as 2 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Where it starts in [`Stream::mapping`](crate::stream::Stream::mapping), in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub len: u32,
}

/// A packet that is ready to be sent; its header is in the buffer and its extents are in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketLayout {
    /// Length of the header, in bytes.
    pub header_len: u32,
    /// Length of the packet: the header and all extents, in bytes.
    pub total_len: u32,
    /// Number of fragments in it.
    pub n_fragments: u32,
}

/// Why there is no packet for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketizeError {
    /// The batch is not within the running events.
    #[error("{n_events} events from event {first} on: running events start at {base}")]
    Events {
        /// First event of the batch.
        first: u64,
        /// Number of events in the batch.
        n_events: u32,
        /// The first running event.
        base: u64,
    },
    /// The packet cannot be made; [`MfpError::Truncated`] if the header does not fit into the buffer.
    #[error(transparent)]
    Packet(#[from] MfpError),
}

/// Makes the packets of one source.
#[derive(Clone, Debug)]
pub struct Packetizer<'a> {
    source: Source<'a>,
    replay: Replay,
}

impl<'a> Packetizer<'a> {
    /// Makes packets of `source`, with the file's events as `replay` repeats them.
    pub fn new(source: Source<'a>, replay: Replay) -> Self {
        Self { source, replay }
    }

    /// The source whose packets these are.
    pub fn source(&self) -> Source<'a> {
        self.source
    }

    /// The most extents that a batch of `n_events` events has: with the header, one less than the
    /// scatter/gather entries that it needs.
    pub fn max_extents(&self, n_events: u32) -> u64 {
        let per_pass = self.replay.events_per_pass();
        // In the worst case the batch starts with the last event of a pass.
        if n_events == 0 { 0 } else { 1 + u64::from(n_events - 1).div_ceil(per_pass) }
    }

    /// Length of the longest header that a batch of `n_events` events has, in bytes.
    pub fn max_header_len(&self, n_events: u32) -> u64 {
        mfp::header_len(n_events, self.source.alignment())
    }

    /// Room, in bytes, that suffices for the packet of any batch of `n_events` events; see
    /// [`mfp::capacity`].
    pub fn max_total_len(&self, n_events: u32) -> Option<u32> {
        mfp::capacity(n_events, self.source.max_len(), self.source.alignment())
    }

    /// Makes the packet of the running events `first` and those after it, `n_events` of them.
    ///
    /// The header is written to the start of `header`, and `extents` is replaced by the payload's. Nothing
    /// is allocated once `extents` has held [`max_extents`](Self::max_extents). After an error both have
    /// unspecified contents.
    pub fn packet(
        &self,
        first: u64,
        n_events: u32,
        header: &mut [u8],
        extents: &mut Vec<FileExtent>,
    ) -> Result<PacketLayout, PacketizeError> {
        let Self { source, ref replay } = *self;
        let pieces = || {
            replay.pieces(first, n_events).ok_or(PacketizeError::Events {
                first,
                n_events,
                base: replay.base,
            })
        };
        let n_fragments: usize = pieces()?.map(|piece| source.positions(piece.file).len()).sum();
        let repr = Repr {
            source: source.id(),
            kind: source.kind(),
            first_event: first,
            n_events,
            // At most one per event.
            n_fragments: n_fragments as u32,
            alignment: source.alignment(),
        };

        extents.clear();
        let mut packet = HeaderBuilder::new(header, repr)?;
        for PassPiece { file, running } in pieces()? {
            let mut extent: Option<Range<u64>> = None;
            for entry in source.entries(source.positions(file.clone())) {
                packet.push(running + (entry.event - file.start), entry.len, entry.crc)?;
                let end = entry.offset + source.alignment().padded(entry.len);
                extent = Some(extent.map_or(entry.offset, |extent| extent.start)..end);
            }
            if let Some(Range { start, end }) = extent.filter(|extent| !extent.is_empty()) {
                // Part of a packet, whose length the builder has found to fit.
                extents.push(FileExtent { offset: start, len: (end - start) as u32 });
            }
        }
        let header_len = repr.header_len() as u32;
        let total_len = packet.finish()?;
        let payload_len: u64 = extents.iter().map(|extent| u64::from(extent.len)).sum();
        debug_assert_eq!(u64::from(total_len), u64::from(header_len) + payload_len);
        Ok(PacketLayout { header_len, total_len, n_fragments: repr.n_fragments })
    }
}
