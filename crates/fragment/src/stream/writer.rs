//! Writing: sources one after the other, then the tables, then the header, then the name.

use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::PathBuf;

use tempfile::NamedTempFile;

use super::error::WriteError;
use super::format::{self, HeaderRepr, IndexEntry, SourceRepr};
use crate::file::{self, IoError};
use crate::{Alignment, SourceId, SourceKind};

/// A stream file in the making.
///
/// It has a temporary name, `….partial` in the same folder, until [`finish`](Self::finish) gives it its
/// own. Dropped before that, it leaves nothing behind. Memory: 24 bytes per fragment, for the index.
#[derive(Debug)]
pub struct StreamWriter {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
    alignment: Alignment,
    events: Range<u64>,
    sources: Vec<SourceRepr>,
    index: Vec<u8>,
    n_fragments: u64,
    /// Where the next fragment starts.
    offset: u64,
    /// A write has failed, so the file lacks bytes that the tables count.
    broken: bool,
}

impl StreamWriter {
    /// Starts the file that will be `path`. Each of `events` is expected from each source; an event
    /// without a fragment is one that the source missed.
    pub fn create(
        path: impl Into<PathBuf>,
        events: Range<u64>,
        alignment: Alignment,
    ) -> Result<Self, WriteError> {
        let path = path.into();
        if events.is_empty() {
            return Err(WriteError::NoEvents(events));
        }
        let file = file::create(&path)?;
        let offset = format::payload_start(alignment);
        let mut writer = Self {
            path,
            out: BufWriter::with_capacity(1 << 20, file),
            alignment,
            events,
            sources: Vec::new(),
            index: Vec::new(),
            n_fragments: 0,
            offset,
            broken: false,
        };
        // The header comes last, when its numbers are known.
        writer.zeros(offset)?;
        Ok(writer)
    }

    /// Starts the next source. Ids have to ascend; a source may stay without fragments.
    pub fn source(
        &mut self,
        id: SourceId,
        kind: SourceKind,
        name: &str,
    ) -> Result<SourceWriter<'_>, WriteError> {
        if let Some(last) = self.sources.last().map(|source| source.id).filter(|&last| last >= id) {
            return Err(WriteError::SourceOrder { last, next: id });
        }
        if !format::is_name(name) {
            return Err(WriteError::Name { source_id: id, name: name.to_owned() });
        }
        self.sources.push(SourceRepr {
            id,
            kind,
            n_fragments: 0,
            payload_offset: self.offset,
            payload_len: 0,
            first_fragment: self.n_fragments,
            max_len: 0,
            name: name.to_owned(),
        });
        let earliest = self.events.start;
        Ok(SourceWriter { writer: self, earliest })
    }

    /// Completes the file, waits until it is on the disk, and gives it its name, replacing what had it.
    pub fn finish(mut self) -> Result<(), WriteError> {
        if self.sources.is_empty() {
            return Err(WriteError::NoSources);
        }
        if self.broken {
            let cause = io::Error::other("an earlier write failed");
            return Err(IoError::of(&self.path, "finish")(cause).into());
        }
        let tables: Vec<u8> =
            self.sources.iter().flat_map(SourceRepr::emit).chain(std::mem::take(&mut self.index)).collect();
        let header = HeaderRepr {
            alignment: self.alignment,
            events: self.events.clone(),
            // More sources than u32::MAX would need more ids than there are.
            n_sources: self.sources.len() as u32,
            n_fragments: self.n_fragments,
            sources_offset: self.offset,
            tables_crc: crc32fast::hash(&tables),
        };
        self.write(&tables)?;
        self.out.seek(SeekFrom::Start(0)).map_err(IoError::of(&self.path, "seek"))?;
        self.write(&header.emit())?;

        let Self { path, out, .. } = self;
        let file = out.into_inner().map_err(|error| IoError::of(&path, "write")(error.into_error()))?;
        Ok(file::commit(file, &path)?)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.out.write_all(bytes).map_err(|cause| {
            self.broken = true;
            IoError::of(&self.path, "write")(cause).into()
        })
    }

    /// Writes `count` zeros; fewer than the greatest alignment.
    fn zeros(&mut self, count: u64) -> Result<(), WriteError> {
        const ZEROS: [u8; Alignment::MAX.get() as usize] = [0; Alignment::MAX.get() as usize];
        self.write(&ZEROS[..count as usize])
    }
}

/// Takes the fragments of one source; the source is complete when this is dropped.
#[derive(Debug)]
pub struct SourceWriter<'a> {
    writer: &'a mut StreamWriter,
    /// The least event that may come next.
    earliest: u64,
}

impl SourceWriter<'_> {
    /// Appends a fragment. Events have to ascend and to be among the file's; a payload may be empty.
    pub fn push(&mut self, event: u64, payload: &[u8]) -> Result<(), WriteError> {
        let writer = &mut *self.writer;
        let source = writer.sources.last_mut().expect("StreamWriter::source has added this source");
        let source_id = source.id;
        if !writer.events.contains(&event) {
            return Err(WriteError::EventRange { source_id, event, events: writer.events.clone() });
        }
        if event < self.earliest {
            return Err(WriteError::EventOrder { source_id, last: self.earliest - 1, next: event });
        }
        let Ok(len) = u32::try_from(payload.len()) else {
            return Err(WriteError::FragmentLen { source_id, event, len: payload.len() });
        };
        let padded = writer.alignment.padded(len);
        source.n_fragments += 1;
        source.payload_len += padded;
        source.max_len = source.max_len.max(len);
        let entry = IndexEntry { event, offset: writer.offset, len, crc: crc32fast::hash(payload) };
        writer.index.extend_from_slice(&entry.emit());
        writer.n_fragments += 1;
        writer.offset += padded;
        // Below the end of the events, so there is a next number.
        self.earliest = event + 1;
        writer.write(payload)?;
        writer.zeros(padded - u64::from(len))
    }
}
