//! Writing batch files.

use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use millstream_fragment::file::IoError;
use millstream_quantity::Bytes;
use millstream_shm::Mapping;
use millstream_shm::direct::{self, AlignedBuffer, Part, write_parts};

use super::EXTENSION;
use super::format::{FileHeader, LOST, MISSING, RecordEvent, RecordHeader, RecordPacket};
use crate::layout::FileLayout;
use crate::partial::PartialFile;
use crate::{FileError, Schema, StoreSummary, WriteOptions};

/// Packets that cannot be pinned are copied in pieces of this length.
const COPY: usize = 4 << 20;

/// Options for writing a batch file.
#[derive(Clone, Copy, Debug)]
pub struct BatchOptions {
    /// Whether to write past the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Whether the finished file may replace an existing one.
    pub replace: bool,
}

/// A batch in landing memory.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    /// Its number.
    pub batch: u64,
    /// Its first event.
    pub first_event: u64,
    /// Its number of events.
    pub n_events: u32,
    /// The events to store, ascending.
    pub events: &'a [BatchEvent],
    /// Their decision maps, one after the other; empty if the schema has no decisions.
    pub decisions: &'a [u8],
    /// Whether it was built without the sources of a lost readout unit.
    pub readout_lost: bool,
    /// The packets of all sources, ascending in memory.
    pub packets: &'a [BatchPacket],
    /// The memory that holds them.
    pub memory: &'a Mapping,
}

/// An event to store.
#[derive(Clone, Copy, Debug)]
pub struct BatchEvent {
    /// Counted from the first event of the batch.
    pub index: u32,
    /// Whether a fragment is missing.
    pub incomplete: bool,
    /// Its fragments.
    pub fragments: u64,
    /// Payload of its fragments \[bytes\].
    pub payload: u64,
}

/// A packet in landing memory.
#[derive(Clone, Copy, Debug)]
pub struct BatchPacket {
    /// Its source.
    pub source: u32,
    /// Kind of the source.
    pub kind: u32,
    /// Its place in the mapping.
    pub offset: usize,
    /// Its length \[bytes\].
    pub len: u32,
    /// Length of its header \[bytes\].
    pub header_len: u32,
    /// CRC-32 of its header.
    pub header_crc: u32,
}

/// Bytes of packets that were written, with the rest of their blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBytes {
    /// Read by the storage device from the pages of landing memory.
    pub direct: u64,
    /// Copied by a processor first.
    pub copied: u64,
}

/// Writes a batch file.
///
/// A record that [`append`](Self::append) has written survives this process. With [`commit_on_sync`](Self::commit_on_sync), it
/// counts as stored once [`sync`](Self::sync) has made it durable. The file has its final name after
/// [`complete`](ClosedBatches::complete). A dropped writer leaves its partial file if it has
/// committed events.
#[derive(Debug)]
pub struct BatchWriter {
    partial: PartialFile,
    direct: bool,
    /// Whether the pages of landing memory can be pinned, as far as known.
    pins: bool,
    block: usize,
    sources: usize,
    decision_bytes: usize,
    header: AlignedBuffer,
    /// End of the last record.
    end: u64,
    /// End of the last record that is durable; 0 if none is.
    synced: u64,
    records: u64,
    commits_on_sync: bool,
    /// Records that are not committed: the place of each, and the first block of its committed header.
    pending: Vec<(u64, Vec<u8>)>,
    /// CRC-32 over all headers.
    checksum: crc32fast::Hasher,
    stored: StoreSummary,
    failed: bool,
}

impl BatchWriter {
    /// Creates the partial file of `path`, which must end in `.batches`.
    ///
    /// # Errors
    /// [`FileError::NoDirectIo`] if the file system has no direct I/O. Otherwise the schema is invalid, or the file cannot be
    /// written.
    pub fn create(path: impl AsRef<Path>, schema: &Schema, options: BatchOptions) -> Result<Self, FileError> {
        let path = path.as_ref();
        let layout = FileLayout::check(schema, &WriteOptions::default())
            .map_err(|cause| FileError::Schema { path: path.to_owned(), cause })?;
        let flags = if options.direct { direct::OPEN_FLAG } else { 0 };
        let partial = PartialFile::create_as(path, EXTENSION, options.replace, flags)?;
        let block = match options.direct {
            true => direct::block_size(partial.file().as_fd()),
            false => Ok(millstream_shm::PAGE),
        };
        let block = block.map_err(IoError::of(partial.path(), "write past the page cache to"))?;
        // At most 64 KiB.
        let header = FileHeader { block: block as u32, recovered: 0, schema: schema.clone() };
        let encoded = header.encode().map_err(io::Error::from);
        let encoded = encoded.map_err(IoError::of(partial.path(), "encode the schema of"))?;
        let mut writer = Self {
            partial,
            direct: options.direct,
            pins: true,
            block,
            sources: layout.slots.len(),
            decision_bytes: layout.decision_bytes,
            header: AlignedBuffer::zeroed(0),
            end: 0,
            synced: 0,
            records: 0,
            commits_on_sync: false,
            pending: Vec::new(),
            checksum: crc32fast::Hasher::new(),
            stored: StoreSummary::default(),
            failed: false,
        };
        writer.set_header(&encoded);
        write_parts(writer.partial.file().as_fd(), &[Part::Bytes(writer.header.bytes())], 0)
            .map_err(|cause| writer.write_error(cause))?;
        writer.end = writer.header.bytes().len() as u64;
        writer.checksum.update(&encoded);
        Ok(writer)
    }

    /// Only a sync commits records: nobody takes events for stored that the disk then fails to take.
    pub fn commit_on_sync(self) -> Self {
        Self { commits_on_sync: true, ..self }
    }

    /// Whether only a sync commits records.
    pub(crate) fn commits_on_sync(&self) -> bool {
        self.commits_on_sync
    }

    /// Writes a batch. Its memory may change afterwards.
    ///
    /// # Errors
    /// The batch does not match the schema, or the file cannot be written. Records before it are kept.
    pub fn append(&mut self, batch: &Batch<'_>) -> Result<WrittenBytes, FileError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()));
        }
        self.check(batch)?;
        let (mut record, ranges) = self.record(batch);
        record.pending = self.commits_on_sync;
        self.set_header(&record.encode());
        record.pending = false;
        let mut encoded = record.encode();
        let written = self.write(batch.memory, &ranges).map_err(|cause| {
            self.failed = true;
            // Frees the blocks of the record's part, on a full disk for the index; a reader would end before it all the same.
            let _ = self.partial.file().set_len(self.end);
            self.write_error(cause)
        })?;
        self.checksum.update(&encoded);
        if self.commits_on_sync {
            // The two headers differ only in the flag and the checksum, which are in the first 512 B.
            encoded.truncate(self.block);
            self.pending.push((self.end, encoded));
        } else {
            self.partial.keep(true);
        }
        self.end += record.record_len;
        self.records += 1;
        for (event, number) in batch.events.iter().zip(record.numbers()) {
            let stored = &mut self.stored;
            stored.events += 1;
            stored.fragments += event.fragments;
            stored.payload_bytes += event.payload;
            stored.missing += (self.sources as u64).saturating_sub(event.fragments);
            stored.first_event = Some(stored.first_event.map_or(number, |first| first.min(number)));
            stored.last_event = Some(stored.last_event.map_or(number, |last| last.max(number)));
        }
        Ok(written)
    }

    fn check(&self, batch: &Batch<'_>) -> Result<(), FileError> {
        let wrong = |field: &str, found: String, expected: String| {
            let path = self.partial.path().to_owned();
            let field = format!("{field} of batch {}", batch.batch);
            Err(FileError::WrongFormat { path, field, found, expected })
        };
        let (found, expected) = (batch.decisions.len(), batch.events.len() * self.decision_bytes);
        if found != expected {
            return wrong("length of the decisions", format!("{found} B"), format!("{expected} B"));
        }
        if batch.packets.windows(2).any(|pair| pair[0].offset + pair[0].len as usize > pair[1].offset) {
            return wrong("order of the packets", "overlapping".to_owned(), "ascending".to_owned());
        }
        Ok(())
    }

    /// The record's header, and the ranges of memory that follow it.
    fn record(&self, batch: &Batch<'_>) -> (RecordHeader, Vec<Range<usize>>) {
        let block = self.block;
        let status = |event: &BatchEvent| {
            (if event.incomplete { MISSING } else { 0 }) | (if batch.readout_lost { LOST } else { 0 })
        };
        let mut record = RecordHeader {
            record_len: 0,
            number: self.records,
            batch: batch.batch,
            first_event: batch.first_event,
            n_events: batch.n_events,
            readout_lost: batch.readout_lost,
            pending: false,
            packets: vec![EMPTY_PACKET; batch.packets.len()],
            events: batch
                .events
                .iter()
                .map(|event| RecordEvent { index: event.index, status: status(event) })
                .collect(),
            decisions: batch.decisions.to_vec(),
        };
        let mut end = record.len().next_multiple_of(block) as u64;
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for (place, packet) in record.packets.iter_mut().zip(batch.packets) {
            let begin = packet.offset / block * block;
            let stop = (packet.offset + packet.len as usize).next_multiple_of(block).min(batch.memory.len());
            match ranges.last_mut().filter(|range| range.end >= begin) {
                Some(range) => {
                    end += stop.saturating_sub(range.end) as u64;
                    range.end = range.end.max(stop);
                }
                None => {
                    ranges.push(begin..stop);
                    end += (stop - begin) as u64;
                }
            }
            // The range of the packet is the last one, which ends at `end`.
            let range_end = ranges.last().map_or(stop, |range| range.end);
            *place = RecordPacket {
                source: packet.source,
                kind: packet.kind,
                offset: end - (range_end - packet.offset) as u64,
                len: packet.len,
                header_len: packet.header_len,
                header_crc: packet.header_crc,
            };
        }
        record.record_len = end.next_multiple_of(block as u64);
        (record, ranges)
    }

    /// Puts a header into whole blocks of the buffer.
    fn set_header(&mut self, encoded: &[u8]) {
        let len = encoded.len().next_multiple_of(self.block);
        if self.header.bytes().len() != len {
            self.header = AlignedBuffer::zeroed(len);
        }
        let (header, padding) = self.header.bytes_mut().split_at_mut(encoded.len());
        header.copy_from_slice(encoded);
        padding.fill(0);
    }

    /// Writes the header in the buffer, and the ranges behind it.
    fn write(&mut self, memory: &Mapping, ranges: &[Range<usize>]) -> io::Result<WrittenBytes> {
        let len: usize = ranges.iter().map(Range::len).sum();
        // Larger blocks than a page: slots start between them. Otherwise only the last range may end at the mapping's end.
        let is_aligned = |range: &Range<usize>| {
            (memory.base().addr() + range.start).is_multiple_of(self.block)
                && range.len().is_multiple_of(self.block)
        };
        // The kernel neither pins nor quickly copies memory that a driver has mapped.
        if memory.is_write_combining() || self.direct && !(self.pins && ranges.iter().all(is_aligned)) {
            return self.write_copied(memory, ranges);
        }
        let header = std::iter::once(Part::Bytes(self.header.bytes()));
        let parts: Vec<_> =
            header.chain(ranges.iter().map(|range| Part::Mapped(memory, range.clone()))).collect();
        match write_parts(self.partial.file().as_fd(), &parts, self.end) {
            Ok(()) if self.direct => Ok(WrittenBytes { direct: len as u64, copied: 0 }),
            // The kernel copies into the page cache.
            Ok(()) => Ok(WrittenBytes { direct: 0, copied: len as u64 }),
            Err(cause) if self.direct && direct::cannot_pin(&cause) => {
                self.pins = false;
                self.write_copied(memory, ranges)
            }
            Err(cause) => Err(cause),
        }
    }

    fn write_copied(&self, memory: &Mapping, ranges: &[Range<usize>]) -> io::Result<WrittenBytes> {
        let file = self.partial.file().as_fd();
        write_parts(file, &[Part::Bytes(self.header.bytes())], self.end)?;
        let total: usize = ranges.iter().map(Range::len).sum();
        let total = total.next_multiple_of(self.block);
        let mut buffer = AlignedBuffer::zeroed(total.min(COPY));
        let mut at = self.end + self.header.bytes().len() as u64;
        let mut filled = 0;
        let mut left = total;
        for range in ranges {
            let mut from = range.start;
            while from < range.end {
                let piece = (range.end - from).min(buffer.bytes().len() - filled);
                if !memory.copy_to_slice(from, &mut buffer.bytes_mut()[filled..][..piece]) {
                    return Err(ErrorKind::InvalidInput.into());
                }
                (from, filled) = (from + piece, filled + piece);
                if filled == buffer.bytes().len() {
                    write_parts(file, &[Part::Bytes(buffer.bytes())], at)?;
                    at += filled as u64;
                    left -= filled;
                    filled = 0;
                }
            }
        }
        if left > 0 {
            buffer.bytes_mut()[filled..left].fill(0);
            write_parts(file, &[Part::Bytes(&buffer.bytes()[..left])], at)?;
        }
        Ok(WrittenBytes { direct: 0, copied: total as u64 })
    }

    fn write_error(&self, cause: io::Error) -> FileError {
        IoError::of(self.partial.path(), "write")(cause).into()
    }

    /// Stored events.
    pub fn events(&self) -> u64 {
        self.stored.events
    }

    /// Length of the file \[bytes\].
    pub fn file_bytes(&self) -> u64 {
        self.end
    }

    /// Makes all records durable.
    ///
    /// # Errors
    /// The file cannot be synced. It keeps the records of the syncs before, and takes no other.
    pub fn sync(&mut self) -> Result<(), FileError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()));
        }
        if self.synced == self.end {
            return Ok(());
        }
        self.partial.sync().inspect_err(|_| {
            self.failed = true;
            // The next sync would succeed: the kernel reports a failed write-back once.
            let _ = self.partial.file().set_len(self.synced);
            self.partial.keep(self.synced > 0);
        })?;
        // Committed headers of durable records stay if they cannot be synced themselves: others may have read them.
        self.commit_pending().inspect_err(|_| self.failed = true)?;
        if self.records > 0 {
            self.synced = self.end;
        }
        Ok(())
    }

    /// Commits the records that are durable, in their order: a reader ends before the first one that is not committed.
    fn commit_pending(&mut self) -> Result<(), FileError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        for (at, block) in std::mem::take(&mut self.pending) {
            self.set_header(&block);
            write_parts(self.partial.file().as_fd(), &[Part::Bytes(self.header.bytes())], at)
                .map_err(|cause| self.write_error(cause))?;
            self.partial.keep(true);
        }
        self.partial.sync()
    }

    /// Ends the file, which keeps its partial name until it is completed.
    pub fn close(mut self) -> Result<ClosedBatches, FileError> {
        if self.failed {
            return Err(FileError::Incomplete(self.partial.path().to_owned()));
        }
        if self.commits_on_sync {
            self.sync()?;
        }
        let Self { partial, end, checksum, stored, .. } = self;
        Ok(ClosedBatches { partial, bytes: Bytes(end), checksum: checksum_text(checksum.finalize()), stored })
    }

    /// The partial file.
    pub fn path(&self) -> PathBuf {
        self.partial.path().to_owned()
    }
}

const EMPTY_PACKET: RecordPacket =
    RecordPacket { source: 0, kind: 0, offset: 0, len: 0, header_len: 0, header_crc: 0 };

/// The checksum of a batch file in its index: CRC-32 over all headers.
pub(super) fn checksum_text(crc: u32) -> String {
    format!("headers-crc32:{crc:08x}")
}

/// A batch file without further records that has its partial name.
#[derive(Debug)]
pub struct ClosedBatches {
    partial: PartialFile,
    bytes: Bytes,
    checksum: String,
    stored: StoreSummary,
}

impl ClosedBatches {
    /// Syncs the file and gives it its final name. Returns its counts, length and checksum.
    pub fn complete(mut self) -> Result<(StoreSummary, Bytes, String), FileError> {
        self.stored.path = self.partial.commit()?;
        Ok((self.stored, self.bytes, self.checksum))
    }
}
