//! The fragments of a file, by source and event.

use std::collections::BTreeMap;
use std::ops::Range;

use millstream_fragment::stream::Malformed;

use crate::cursor::malformed;
use crate::{FileIndexer, Format, FormatOptions, Structure};

/// A range of a file that is a fragment, or a piece of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The event.
    pub event: u64,
    /// Offset in the file.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Piece {
    /// The bytes in the file.
    pub fn range(&self) -> Range<usize> {
        // The file is in memory, so its offsets are usize.
        self.start as usize..(self.start + self.len) as usize
    }
}

/// The fragments of one source, by event; pieces of one event are next to each other in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct SourceIndex {
    /// All pieces.
    pub pieces: Vec<Piece>,
}

impl SourceIndex {
    /// The pieces of each event.
    pub fn events(&self) -> impl Iterator<Item = &[Piece]> {
        self.pieces.chunk_by(|a, b| a.event == b.event)
    }
}

/// Number and size of structures of one sort.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// How many.
    pub count: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Where the fragments of a file are.
#[derive(Clone, Debug, Default)]
pub struct Index {
    /// By source id.
    pub sources: BTreeMap<u32, SourceIndex>,
    /// The bytes outside of fragments.
    pub structure: BTreeMap<Structure, Total>,
    /// What the format says about the events, a line each.
    pub notes: Vec<String>,
}

impl Index {
    /// Reads a file in the given format, without options.
    ///
    /// # Errors
    /// As [`read_with`](Self::read_with).
    pub fn read(format: &dyn Format, file: &[u8]) -> Result<Self, Malformed> {
        Self::read_with(format, file, FormatOptions::default())
    }

    /// Reads a file in the given format.
    ///
    /// # Errors
    /// The first field that breaks the format, two fragments of one source for one event where the format has one, or
    /// bytes after the last structure.
    pub fn read_with(format: &dyn Format, file: &[u8], options: FormatOptions) -> Result<Self, Malformed> {
        let mut indexer = FileIndexer::default();
        indexer.options = options;
        format.scan(file, &mut indexer)?;
        if indexer.end() != file.len() {
            return Err(malformed(
                indexer.end(),
                "end of the last structure",
                format!("{} more bytes", file.len() - indexer.end()),
                "the end of the file",
            ));
        }
        let mut index = indexer.index;
        for (&id, source) in &mut index.sources {
            source.pieces.sort_by_key(|piece| piece.event);
            if format.joins_pieces(id) {
                continue;
            }
            if let Some(pieces) = source.events().find(|pieces| pieces.len() > 1) {
                return Err(malformed(
                    pieces[1].range().start,
                    format!("source {id:#x} ({}), event {}", format.source_name(id), pieces[1].event),
                    "a second fragment",
                    format!("one fragment an event; the first is at byte {}", pieces[0].start),
                ));
            }
        }
        Ok(index)
    }

    /// The smallest range with all events; none if the file has no fragment.
    pub fn events(&self) -> Option<Range<u64>> {
        let first = self
            .sources
            .values()
            .filter_map(|source| source.pieces.first())
            .map(|piece| piece.event)
            .min()?;
        let last =
            self.sources.values().filter_map(|source| source.pieces.last()).map(|piece| piece.event).max()?;
        Some(first..last.saturating_add(1))
    }

    /// Bytes in fragments.
    pub fn fragment_bytes(&self) -> u64 {
        self.sources.values().flat_map(|source| &source.pieces).map(|piece| piece.len).sum()
    }

    /// Bytes outside of fragments.
    pub fn structure_bytes(&self) -> u64 {
        self.structure.values().map(|total| total.bytes).sum()
    }
}
