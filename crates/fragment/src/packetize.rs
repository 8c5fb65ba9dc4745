//! Packets from stream files: the header of a batch, and the file extents with its payload.
//!
//! A readout unit registers the mapped file once. For each batch, a [`Packetizer`] writes the packet's header into a buffer
//! and returns the [`FileExtent`]s with its payload. Header and extents, in this order, are the scatter/gather list of one
//! RDMA WRITE. The payload is not copied.

use std::ops::Range;

use crate::mfp::{self, HeaderBuilder, MfpError, Repr};
use crate::stream::Source;

/// Repeats the events of a file under consecutive numbers.
///
/// Event `base + k` is the file's event `first + (k mod E)` with `E` events in the file. All sources of a run need the same
/// replay and files with the same events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    file: Range<u64>,
    base: u64,
}

impl Replay {
    /// Repeats the events `file`, numbered from `base`. `None` if there are no events.
    pub fn new(file: Range<u64>, base: u64) -> Option<Self> {
        (!file.is_empty()).then_some(Self { file, base })
    }

    /// Repeats the events `file`, numbered from the file's first event. `None` if there are no events.
    pub fn continuing(file: Range<u64>) -> Option<Self> {
        let base = file.start;
        Self::new(file, base)
    }

    /// Number of events in one pass, at least one.
    pub fn events_per_pass(&self) -> u64 {
        self.file.end - self.file.start
    }

    /// Number of the first event.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The file's event that is sent as event number `running`; `None` before the first.
    pub fn file_event(&self, running: u64) -> Option<u64> {
        let passed = running.checked_sub(self.base)?;
        Some(self.file.start + passed % self.events_per_pass())
    }

    /// Splits a batch at the passes of the file. `None` before the first event or on overflow.
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

/// The part of a batch within one pass.
struct PassPiece {
    file: Range<u64>,
    /// Number of its first event in the run.
    running: u64,
}

struct PassPieces<'a> {
    replay: &'a Replay,
    running: u64,
    /// Position in the file's events.
    position: u64,
    /// Remaining events of the batch.
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

/// Consecutive bytes of a stream file: fragments with padding that are consecutive in file and packet. Never empty, because
/// adapters interpret a length of zero as 2 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Offset in [`Stream::mapping`](crate::stream::Stream::mapping), in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub len: u32,
}

/// Sizes of a packet whose header and extents were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketLayout {
    /// Length of the header, in bytes.
    pub header_len: u32,
    /// Length of the packet, in bytes.
    pub total_len: u32,
    /// Number of its fragments.
    pub n_fragments: u32,
    /// Length of its fragments without padding, in bytes.
    pub payload_len: u32,
}

/// Why a batch has no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketizeError {
    /// The batch is outside of the run's events.
    #[error("{n_events} events from event {first} are outside of the run, which starts with event {base}")]
    Events {
        /// First event of the batch.
        first: u64,
        /// Number of events in the batch.
        n_events: u32,
        /// The run's first event.
        base: u64,
    },
    /// The packet is invalid; [`MfpError::Truncated`] if the header exceeds the buffer.
    #[error(transparent)]
    Packet(#[from] MfpError),
}

/// Makes the packets of a source.
#[derive(Clone, Debug)]
pub struct Packetizer<'a> {
    source: Source<'a>,
    replay: Replay,
}

impl<'a> Packetizer<'a> {
    /// Makes packets of `source`, with the events of `replay`.
    pub fn new(source: Source<'a>, replay: Replay) -> Self {
        Self { source, replay }
    }

    /// The source.
    pub fn source(&self) -> Source<'a> {
        self.source
    }

    /// Maximum number of extents of a batch with `n_events` events. The scatter/gather list has one element more, the header.
    pub fn max_extents(&self, n_events: u32) -> u64 {
        let per_pass = self.replay.events_per_pass();
        // In the worst case the batch starts with the last event of a pass.
        if n_events == 0 { 0 } else { 1 + u64::from(n_events - 1).div_ceil(per_pass) }
    }

    /// Maximum length of the header of a batch with `n_events` events, in bytes.
    pub fn max_header_len(&self, n_events: u32) -> u64 {
        mfp::header_len(n_events, self.source.alignment())
    }

    /// Maximum length of the packet of a batch with `n_events` events, in bytes; see [`mfp::capacity`].
    pub fn max_total_len(&self, n_events: u32) -> Option<u32> {
        mfp::capacity(n_events, self.source.max_len(), self.source.alignment())
    }

    /// Makes the packet of the events from `first`, `n_events` of them.
    ///
    /// Writes the header to the start of `header` and replaces `extents`. Does not allocate once `extents` has held
    /// [`max_extents`](Self::max_extents). After an error, both are unspecified.
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
            // At most one per event, so it fits.
            n_fragments: n_fragments as u32,
            alignment: source.alignment(),
        };

        extents.clear();
        let mut payload_len = 0;
        let mut packet = HeaderBuilder::new(header, repr)?;
        for PassPiece { file, running } in pieces()? {
            let mut extent: Option<Range<u64>> = None;
            for entry in source.entries(source.positions(file.clone())) {
                packet.push(running + (entry.event - file.start), entry.len, entry.crc)?;
                payload_len += entry.len;
                let end = entry.offset + source.alignment().padded(entry.len);
                extent = Some(extent.map_or(entry.offset, |extent| extent.start)..end);
            }
            if let Some(Range { start, end }) = extent.filter(|extent| !extent.is_empty()) {
                // A part of a packet, whose length was checked.
                extents.push(FileExtent { offset: start, len: (end - start) as u32 });
            }
        }
        let header_len = repr.header_len() as u32;
        let total_len = packet.finish()?;
        let padded_len: u64 = extents.iter().map(|extent| u64::from(extent.len)).sum();
        debug_assert_eq!(u64::from(total_len), u64::from(header_len) + padded_len);
        Ok(PacketLayout { header_len, total_len, n_fragments: repr.n_fragments, payload_len })
    }
}
