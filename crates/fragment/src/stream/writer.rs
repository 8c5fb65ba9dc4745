//! Writes stream files: sources, then tables, then the header; then renames the file.

use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::PathBuf;

use tempfile::NamedTempFile;

use super::error::WriteError;
use super::format::{self, HeaderRepr, IndexEntry, SourceRepr};
use crate::file::{self, IoError};
use crate::{Alignment, Fragment, SourceId, SourceKind};

/// Writes a stream file.
///
/// The file has a temporary name, `….partial` in the same directory, until [`finish`](Self::finish) renames it. If dropped
/// before, it is removed. Needs 24 bytes of memory per fragment, for the index.
#[derive(Debug)]
pub struct StreamWriter {
    path: PathBuf,
    out: BufWriter<NamedTempFile>,
    alignment: Alignment,
    events: Range<u64>,
    sources: Vec<SourceRepr>,
    index: Vec<u8>,
    n_fragments: u64,
    /// Offset of the next fragment.
    offset: u64,
    /// A write failed, so the file lacks bytes that the tables count.
    broken: bool,
}

impl StreamWriter {
    /// Creates the temporary file that becomes `path`. Each source should have a fragment for each of
    /// `events`; others count as missing.
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
        // The header is written last, when its values are known.
        writer.zeros(offset)?;
        Ok(writer)
    }

    /// Starts the next source. Ids must ascend; a source may have no fragments.
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

    /// Completes the file, syncs it, and renames it, replacing an existing file.
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
            // There are at most u32::MAX source ids.
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

    /// Writes `count` zero bytes, less than the maximum alignment.
    fn zeros(&mut self, count: u64) -> Result<(), WriteError> {
        const ZEROS: [u8; Alignment::MAX.get() as usize] = [0; Alignment::MAX.get() as usize];
        self.write(&ZEROS[..count as usize])
    }
}

/// Writes the fragments of one source. Dropping it completes the source.
#[derive(Debug)]
pub struct SourceWriter<'a> {
    writer: &'a mut StreamWriter,
    /// Smallest valid event of the next fragment.
    earliest: u64,
}

impl SourceWriter<'_> {
    /// Appends a fragment. Events must ascend and be in the file's range; a payload may be empty.
    pub fn push(&mut self, event: u64, payload: &[u8]) -> Result<(), WriteError> {
        self.push_fragment(Fragment::new(event, payload))
    }

    /// As [`SourceWriter::push`], with the checksum that the fragment has: a copy shows whether the payload has changed since
    /// the recording.
    pub fn push_fragment(&mut self, fragment: Fragment<'_>) -> Result<(), WriteError> {
        let Fragment { event, payload, crc } = fragment;
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
        let entry = IndexEntry { event, offset: writer.offset, len, crc };
        writer.index.extend_from_slice(&entry.emit());
        writer.n_fragments += 1;
        writer.offset += padded;
        // Less than the end of the events, so this does not overflow.
        self.earliest = event + 1;
        writer.write(payload)?;
        writer.zeros(padded - u64::from(len))
    }
}
