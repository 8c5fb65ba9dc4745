//! Reading batch files: record by record, and event by event within a record. All places are checked; payload is read only
//! for the event that is asked for.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use millstream_fragment::file::IoError;
use millstream_fragment::mfp::{Entry, Header};
use millstream_fragment::{Fragment, SourceId};
use millstream_quantity::Bytes;

use super::format::{
    FILE_MAGIC, FileHeader, RECORD_MAGIC, RecordHeader, RecordPacket, SMALLEST_BLOCK, START, header_len,
};
use super::writer::checksum_text;
use crate::{FileError, Schema};

/// Problem of a header that its writer did not complete.
const CUT_SHORT: &str = "cut short in its header";

/// Whether a file was not opened because its writer has not completed its header: it has no record.
pub(crate) fn is_cut_in_its_header(error: &FileError) -> bool {
    matches!(error, FileError::WrongFormat { found, .. } if found == CUT_SHORT)
}

/// Whether a file whose header is cut short is what its writer left: otherwise the length of the header is damaged, or the file is
/// another program's.
pub(super) fn has_no_record(file: &File) -> io::Result<bool> {
    let len = file.metadata()?.len();
    let mut magic = [0; 8];
    let start = &mut magic[..len.min(8) as usize];
    file.read_exact_at(start, 0)?;
    if !FILE_MAGIC.starts_with(start) {
        return Ok(false);
    }
    for at in (SMALLEST_BLOCK.into()..len.saturating_sub(8)).step_by(SMALLEST_BLOCK as usize) {
        file.read_exact_at(&mut magic, at)?;
        if &magic == RECORD_MAGIC {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reads a batch file.
#[derive(Debug)]
pub struct BatchReader {
    path: PathBuf,
    file: File,
    header: FileHeader,
    /// Length of the file when it was opened.
    bytes: u64,
    /// Start of the next record.
    next: u64,
    number: u64,
    /// CRC-32 over the headers read.
    checksum: crc32fast::Hasher,
}

/// A record: a batch with stored events.
#[derive(Debug)]
pub struct Record<'a> {
    reader: &'a BatchReader,
    offset: u64,
    header: RecordHeader,
    /// Entries of each packet, by position.
    entries: Vec<Vec<Entry>>,
}

/// A stored event with its own copy of the payload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredEvent {
    /// Its number.
    pub number: u64,
    /// As `/events/status` of an event file, without corrupt fragments.
    pub status: u8,
    payload: Vec<u8>,
    /// Source, start and length in `payload`, and checksum.
    places: Vec<(SourceId, usize, usize, u32)>,
}

impl StoredEvent {
    /// Its fragments, in ascending order of their sources.
    pub fn fragments(&self) -> Vec<(SourceId, Fragment<'_>)> {
        let fragment = |&(source, start, len, crc): &(SourceId, usize, usize, u32)| {
            let payload = &self.payload[start..start + len];
            (source, Fragment { event: self.number, payload, crc })
        };
        self.places.iter().map(fragment).collect()
    }
}

impl BatchReader {
    /// Opens a file and checks its header.
    ///
    /// # Errors
    /// The file cannot be read, or is no batch file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FileError> {
        let path = path.as_ref().to_owned();
        let file = File::open(&path).map_err(IoError::of(&path, "open"))?;
        let bytes = file.metadata().map_err(IoError::of(&path, "read the length of"))?.len();
        let bytes_of = read_header(&file, 0, bytes, true).map_err(IoError::of(&path, "read"))?;
        let parsed = bytes_of.and_then(|header| FileHeader::parse(&header).map(|parsed| (header, parsed)));
        let (encoded, header) = parsed.map_err(|found| FileError::WrongFormat {
            path: path.clone(),
            field: "the start".to_owned(),
            found,
            expected: "the header of a batch file".to_owned(),
        })?;
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&encoded);
        let next = (encoded.len() as u64).next_multiple_of(header.block.into());
        Ok(Self { path, file, header, bytes, next, number: 0, checksum })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The schema of its events.
    pub fn schema(&self) -> &Schema {
        &self.header.schema
    }

    /// Its events, if it is the recovered file of a writer that ended early.
    pub fn recovered(&self) -> Option<u64> {
        Some(self.header.recovered).filter(|events| *events > 0)
    }

    /// Its length when it was opened.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes)
    }

    /// The header of the file, as it is written.
    pub(super) fn encoded_header(&self) -> Result<Vec<u8>, FileError> {
        let read = read_header(&self.file, 0, self.bytes, true).map_err(IoError::of(&self.path, "read"))?;
        read.map_err(|problem| self.invalid(problem))
    }

    /// End of the records read so far.
    pub(super) fn end(&self) -> u64 {
        self.next
    }

    /// Reads the header of the next record; `None` at the end of the file. A partial file may end in an incomplete record,
    /// which is an error: all records before it are whole.
    ///
    /// # Errors
    /// [`FileError::InvalidRecord`]; the reader stays before it.
    pub fn next_header(&mut self) -> Result<Option<RecordHeader>, FileError> {
        let Some((encoded, header)) = self.peek()? else { return Ok(None) };
        self.advance(&encoded, &header);
        Ok(Some(header))
    }

    fn advance(&mut self, encoded: &[u8], header: &RecordHeader) {
        self.checksum.update(encoded);
        self.next += header.record_len;
        self.number += 1;
    }

    /// The next header, as it is written and parsed.
    fn peek(&self) -> Result<Option<(Vec<u8>, RecordHeader)>, FileError> {
        if self.next >= self.bytes {
            return Ok(None);
        }
        let (encoded, header) = self.header_at(self.next)?.map_err(|problem| self.invalid(problem))?;
        if header.number != self.number {
            return Err(self.invalid(format!("its number is {}", header.number)));
        }
        if header.pending {
            return Err(self.invalid("its writer has not committed it".to_owned()));
        }
        Ok(Some((encoded, header)))
    }

    /// The header of the record at a place, as it is written and parsed; the inner error if there is no record that ends in the
    /// file.
    fn header_at(&self, at: u64) -> Result<Result<(Vec<u8>, RecordHeader), String>, FileError> {
        let read = read_header(&self.file, at, self.bytes, false).map_err(IoError::of(&self.path, "read"))?;
        Ok(read.and_then(|encoded| {
            let header = RecordHeader::parse(&encoded, self.header.block.into())?;
            let (found, left) = (header.record_len, self.bytes - at);
            if found > left {
                return Err(format!("cut short: its length is {found} B, the file has {left} B"));
            }
            Ok((encoded, header))
        }))
    }

    /// Whether the next record is one that its writer has not committed: neither are those behind it.
    pub(super) fn is_next_pending(&self) -> Result<bool, FileError> {
        Ok(
            matches!(self.header_at(self.next)?, Ok((_, header)) if header.pending && header.number == self.number),
        )
    }

    /// The first whole record behind the next one, which is invalid.
    pub(super) fn next_whole(&self) -> Result<Option<u64>, FileError> {
        let block = u64::from(self.header.block);
        let mut at = self.next + block;
        while at < self.bytes {
            if let Ok((_, header)) = self.header_at(at)?
                && header.number > self.number
                && !header.pending
                && self.entries_of(at, &header).is_ok()
            {
                return Ok(Some(at));
            }
            at += block;
        }
        Ok(None)
    }

    /// Entries of the packets of the record at a place.
    fn entries_of(&self, at: u64, header: &RecordHeader) -> Result<Vec<Vec<Entry>>, FileError> {
        header.packets.iter().map(|packet| self.packet_entries(at, header, packet)).collect()
    }

    /// Reads the next record, without its payload; `None` at the end of the file.
    ///
    /// # Errors
    /// [`FileError::InvalidRecord`], also if the header of a packet differs from the one that was stored.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, FileError> {
        let offset = self.next;
        let Some((encoded, header)) = self.peek()? else { return Ok(None) };
        let entries = self.entries_of(offset, &header)?;
        self.advance(&encoded, &header);
        Ok(Some(Record { reader: self, offset, header, entries }))
    }

    /// Numbers of the events in the whole records that were not read yet: those that
    /// [`recover_partial`](crate::recover_partial) keeps if the writer is dead. The file may have grown meanwhile. What follows
    /// an incomplete record, or one that is not committed, is not read.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn newly_committed(&mut self) -> Result<Vec<u64>, FileError> {
        self.bytes = self.file.metadata().map_err(IoError::of(&self.path, "read the length of"))?.len();
        let mut numbers = Vec::new();
        loop {
            let (encoded, header) = match self.peek() {
                Ok(Some(next)) => next,
                Ok(None) | Err(FileError::InvalidRecord { .. }) => return Ok(numbers),
                Err(error) => return Err(error),
            };
            // The writer had written a record to its end before it began the next one. Only the last one may be incomplete.
            if self.next + header.record_len >= self.bytes {
                match self.entries_of(self.next, &header) {
                    Err(FileError::InvalidRecord { .. }) => return Ok(numbers),
                    entries => _ = entries?,
                }
            }
            numbers.extend(header.numbers());
            self.advance(&encoded, &header);
        }
    }

    /// Numbers of all events, and the checksum of the index.
    ///
    /// # Errors
    /// An invalid record: the file is not as it was completed.
    pub fn numbers(mut self) -> Result<(Vec<u64>, String), FileError> {
        let mut numbers = Vec::new();
        while let Some(header) = self.next_header()? {
            numbers.extend(header.numbers());
        }
        Ok((numbers, checksum_text(self.checksum.finalize())))
    }

    /// Compares all headers, and all fragments of stored events with their checksums. Returns the checksum of the index.
    ///
    /// # Errors
    /// The first difference.
    pub fn verify(mut self) -> Result<String, FileError> {
        while let Some(record) = self.next_record()? {
            for position in 0..record.header.events.len() {
                let event = record.event(position)?;
                let corrupt = event.fragments().into_iter().find(|(_, fragment)| !fragment.is_intact());
                if let Some((source, _)) = corrupt {
                    let problem = format!(
                        "event {}: the fragment of {source} differs from its checksum: it was corrupt when it was \
                         stored, or is now",
                        event.number
                    );
                    return Err(record.reader.invalid_at(record.header.number, record.offset, problem));
                }
            }
        }
        Ok(checksum_text(self.checksum.finalize()))
    }

    /// Reads the header of a packet, and compares it with the record.
    fn packet_entries(
        &self,
        offset: u64,
        record: &RecordHeader,
        packet: &RecordPacket,
    ) -> Result<Vec<Entry>, FileError> {
        let invalid = |problem: String| {
            let problem = format!("packet of {}: {problem}", SourceId(packet.source));
            self.invalid_at(record.number, offset, problem)
        };
        let mut bytes = vec![0; packet.header_len as usize];
        self.read(&mut bytes, offset + packet.offset)?;
        let found = crc32fast::hash(&bytes);
        if found != packet.header_crc {
            return Err(invalid(format!(
                "header has CRC-32 {found:08x}, expected {:08x}",
                packet.header_crc
            )));
        }
        let header =
            Header::new_checked(&bytes[..], packet.len.into()).map_err(|error| invalid(error.to_string()))?;
        let of = (header.source().0, header.first_event(), header.n_events());
        if of != (packet.source, record.first_event, record.n_events) {
            return Err(invalid(format!("is of source {:#x}, {} events from {}", of.0, of.2, of.1)));
        }
        Ok(header.entries().collect())
    }

    fn read(&self, to: &mut [u8], at: u64) -> Result<(), FileError> {
        Ok(self.file.read_exact_at(to, at).map_err(IoError::of(&self.path, "read"))?)
    }

    fn invalid(&self, problem: String) -> FileError {
        self.invalid_at(self.number, self.next, problem)
    }

    fn invalid_at(&self, record: u64, offset: u64, problem: String) -> FileError {
        FileError::InvalidRecord { path: self.path.clone(), record, offset, problem }
    }
}

/// Reads the header at `at` of a file of `bytes` bytes; the inner error if there is none.
fn read_header(file: &File, at: u64, bytes: u64, is_file: bool) -> io::Result<Result<Vec<u8>, String>> {
    let mut start = [0; START];
    match file.read_exact_at(&mut start, at) {
        Err(cause) if cause.kind() == ErrorKind::UnexpectedEof => return Ok(Err(CUT_SHORT.to_owned())),
        read => read?,
    }
    let len = match header_len(start, is_file) {
        Ok(len) if u64::from(len) <= bytes.saturating_sub(at) => len,
        Ok(_) => return Ok(Err(CUT_SHORT.to_owned())),
        Err(problem) => return Ok(Err(problem)),
    };
    let mut header = vec![0; len as usize];
    match file.read_exact_at(&mut header, at) {
        Err(cause) if cause.kind() == ErrorKind::UnexpectedEof => Ok(Err(CUT_SHORT.to_owned())),
        read => read.map(|()| Ok(header)),
    }
}

impl Record<'_> {
    /// Its header.
    pub fn header(&self) -> &RecordHeader {
        &self.header
    }

    /// The decision map of the event at a position of the header's `events`; empty without decisions.
    pub fn decisions(&self, position: usize) -> &[u8] {
        self.header.decisions_of(position)
    }

    /// Reads the event at a position of the header's `events`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn event(&self, position: usize) -> Result<StoredEvent, FileError> {
        let stored = self.header.events[position];
        let number = self.header.first_event + u64::from(stored.index);
        let mut event = StoredEvent { number, status: stored.status, ..StoredEvent::default() };
        for (packet, entries) in self.header.packets.iter().zip(&self.entries) {
            let Ok(found) = entries.binary_search_by_key(&number, |entry| entry.event) else { continue };
            let entry = entries[found];
            let (start, len) = (event.payload.len(), entry.len as usize);
            event.payload.resize(start + len, 0);
            let at = self.offset + packet.offset + u64::from(entry.offset);
            self.reader.read(&mut event.payload[start..], at)?;
            event.places.push((SourceId(packet.source), start, len, entry.crc));
        }
        event.places.sort_unstable_by_key(|(source, ..)| *source);
        Ok(event)
    }
}
