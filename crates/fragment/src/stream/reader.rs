//! Reads stream files: map, check once, return fragments in place.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};

use super::error::{Malformed, ReadError};
use super::format::{IndexEntry, SourceRepr, index};
use super::layout::Layout;
use crate::bytes::to_u64;
use crate::file::IoError;
use crate::{Alignment, Fragment, SourceId, SourceKind};

/// An open stream file with checked offsets, lengths and counts.
///
/// `B` holds the bytes of the file: a mapping, or other bytes that do not change.
#[derive(Debug)]
pub struct Stream<B = Mmap> {
    path: PathBuf,
    bytes: B,
    layout: Layout,
}

impl Stream {
    /// Maps the file and checks everything but the payload.
    ///
    /// The file must not change until the stream is dropped: the mapping shows changes, and access behind a new, shorter
    /// end raises SIGBUS. Files written by [`StreamWriter`] or renamed into place satisfy this.
    ///
    /// [`StreamWriter`]: super::StreamWriter
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ReadError> {
        let path = path.as_ref();
        // Before opening, which blocks on a pipe without a writer.
        let kind = fs::metadata(path).map_err(IoError::of(path, "open"))?.file_type();
        if !kind.is_file() {
            let cause = std::io::Error::other("not a regular file");
            return Err(IoError::of(path, "map")(cause).into());
        }
        let file = fs::File::open(path).map_err(IoError::of(path, "open"))?;
        // SAFETY: the mapping is read-only; this function requires that the file does not change.
        let bytes = unsafe { MmapOptions::new().map(&file) }.map_err(IoError::of(path, "map"))?;
        Self::parse(path, bytes)
    }
}

impl<B: AsRef<[u8]>> Stream<B> {
    /// Checks everything except payload of a file in memory. `path` names it in errors.
    pub fn parse(path: impl Into<PathBuf>, bytes: B) -> Result<Self, ReadError> {
        let path = path.into();
        match Layout::parse(bytes.as_ref()) {
            Ok(layout) => Ok(Self { path, bytes, layout }),
            Err(what) => Err(ReadError::Malformed { path, what }),
        }
    }

    /// The path of the file, as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of the file, to be registered for sending. Offsets of fragments start here.
    pub fn mapping(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// Alignment of the fragments.
    pub fn alignment(&self) -> Alignment {
        self.layout.alignment
    }

    /// The file's events. An event without a fragment of some source is incomplete.
    pub fn events(&self) -> Range<u64> {
        self.layout.events.clone()
    }

    /// Number of fragments of all sources.
    pub fn n_fragments(&self) -> u64 {
        self.layout.sources.iter().map(|source| source.n_fragments).sum()
    }

    /// All sources, in ascending order of their ids.
    pub fn sources(&self) -> impl ExactSizeIterator<Item = Source<'_>> + Clone {
        self.layout.sources.iter().map(|repr| self.view(repr))
    }

    /// The source with this id.
    pub fn source(&self, id: SourceId) -> Option<Source<'_>> {
        let found = self.layout.sources.binary_search_by_key(&id, |source| source.id).ok()?;
        Some(self.view(&self.layout.sources[found]))
    }

    fn view<'a>(&'a self, repr: &'a SourceRepr) -> Source<'a> {
        let mapping = self.bytes.as_ref();
        let all = &mapping[self.layout.index_start..];
        let first = position(repr.first_fragment) * index::LEN;
        let index = &all[first..][..position(repr.n_fragments) * index::LEN];
        Source { repr, alignment: self.layout.alignment, index, mapping }
    }

    /// Verifies all payload: the checksum of every fragment, and zero padding.
    pub fn verify_payload(&self) -> Result<(), ReadError> {
        self.first_damage().map_or(Ok(()), |what| Err(ReadError::Malformed { path: self.path.clone(), what }))
    }

    fn first_damage(&self) -> Option<Malformed> {
        for source in self.sources() {
            for (position, fragment) in source.fragments().enumerate() {
                let entry = source.entry(position)?;
                let place = || {
                    format!("payload of fragment {position} (event {}) of {}", entry.event, source.repr.id)
                };
                let crc = crc32fast::hash(fragment.payload);
                if crc != entry.crc {
                    return Some(Malformed::new(
                        entry.offset,
                        place(),
                        format_args!("CRC-32 {crc:#010x}"),
                        format_args!("{:#010x}", entry.crc),
                    ));
                }
                let end = entry.offset + u64::from(entry.len);
                let next = entry.offset + self.layout.alignment.padded(entry.len);
                let padding = source.bytes(end..next);
                if let Some(dirty) = padding.iter().position(|&byte| byte != 0) {
                    let field = format!("padding after {}", place());
                    return Some(Malformed::new(end + to_u64(dirty), field, padding[dirty], 0));
                }
            }
        }
        None
    }
}

/// A number that the layout has bounded by the length of the bytes.
fn position(bounded: u64) -> usize {
    usize::try_from(bounded).expect("bounded by the length of a slice")
}

/// A source of an open stream file.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    repr: &'a SourceRepr,
    alignment: Alignment,
    /// Index entries of this source alone.
    index: &'a [u8],
    mapping: &'a [u8],
}

impl<'a> Source<'a> {
    /// Its identifier.
    pub fn id(&self) -> SourceId {
        self.repr.id
    }

    /// Layout of its payload.
    pub fn kind(&self) -> SourceKind {
        self.repr.kind
    }

    /// Its name for humans; may be empty.
    pub fn name(&self) -> &'a str {
        &self.repr.name
    }

    /// Alignment of its fragments.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Number of fragments.
    pub fn len(&self) -> usize {
        self.index.len() / index::LEN
    }

    /// Whether it has no fragments.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Length of the longest fragment, in bytes; 0 without fragments.
    pub fn max_len(&self) -> u32 {
        self.repr.max_len
    }

    /// Range of its payload with padding in the file, in bytes.
    pub fn payload(&self) -> Range<u64> {
        self.repr.payload_offset..self.repr.payload_offset + self.repr.payload_len
    }

    /// The index entry of the fragment at `position`, counted from 0.
    pub fn entry(&self, position: usize) -> Option<IndexEntry> {
        (position < self.len()).then(|| self.entry_at(position))
    }

    fn entry_at(&self, position: usize) -> IndexEntry {
        IndexEntry::parse(&self.index[position * index::LEN..])
    }

    /// Index entries of the fragments at `positions`, as far as they exist.
    pub fn entries(&self, positions: Range<usize>) -> impl ExactSizeIterator<Item = IndexEntry> + use<'a> {
        let end = positions.end.min(self.len());
        let start = positions.start.min(end);
        self.index[start * index::LEN..end * index::LEN].chunks_exact(index::LEN).map(IndexEntry::parse)
    }

    /// The fragment at `position`, counted from 0.
    pub fn fragment(&self, position: usize) -> Option<Fragment<'a>> {
        self.entry(position).map(|entry| self.resolve(entry))
    }

    /// All fragments, in ascending order of their events.
    pub fn fragments(&self) -> Fragments<'a> {
        Fragments { source: *self, positions: 0..self.len() }
    }

    /// Position of the event's fragment; `None` if it is missing.
    pub fn find(&self, event: u64) -> Option<usize> {
        let position = self.lower_bound(event);
        (self.entry(position)?.event == event).then_some(position)
    }

    /// Positions of the fragments of these events.
    pub fn positions(&self, events: Range<u64>) -> Range<usize> {
        let start = self.lower_bound(events.start);
        start..self.lower_bound(events.end).max(start)
    }

    /// Number of fragments of earlier events.
    fn lower_bound(&self, event: u64) -> usize {
        let len = self.len();
        if len == 0 {
            return 0;
        }
        // Without missing fragments, the position is the distance from the first event.
        let first = self.entry_at(0).event;
        if self.entry_at(len - 1).event - first == to_u64(len - 1) {
            return event.saturating_sub(first).min(to_u64(len)) as usize;
        }
        let (mut low, mut high) = (0, len);
        while low < high {
            let middle = low.midpoint(high);
            if self.entry_at(middle).event < event { low = middle + 1 } else { high = middle }
        }
        low
    }

    fn resolve(&self, entry: IndexEntry) -> Fragment<'a> {
        let payload = self.bytes(entry.offset..entry.offset + u64::from(entry.len));
        Fragment { event: entry.event, payload, crc: entry.crc }
    }

    fn bytes(&self, range: Range<u64>) -> &'a [u8] {
        &self.mapping[position(range.start)..position(range.end)]
    }
}

/// The fragments of one source; see [`Source::fragments`].
#[derive(Clone, Debug)]
pub struct Fragments<'a> {
    source: Source<'a>,
    positions: Range<usize>,
}

impl<'a> Iterator for Fragments<'a> {
    type Item = Fragment<'a>;

    fn next(&mut self) -> Option<Fragment<'a>> {
        self.positions.next().and_then(|position| self.source.fragment(position))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.positions.size_hint()
    }
}

impl ExactSizeIterator for Fragments<'_> {}
