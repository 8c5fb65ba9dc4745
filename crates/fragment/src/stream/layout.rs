//! Checks the header and the tables of a file. Each number is compared with the length of the file before use.

use std::ops::Range;

use super::error::Malformed;
use super::format::{self, IndexEntry, MAGIC, SourceRepr, VERSION, header, index, source};
use crate::bytes::{VERIFY_CHECKSUMS, array_at, to_u64, u16_at, u32_at, u64_at};
use crate::{Alignment, SourceId, SourceKind};

type Checked<T = ()> = Result<T, Malformed>;

/// Layout of a valid file.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) alignment: Alignment,
    /// The file's events; at least one.
    pub(super) events: Range<u64>,
    /// In ascending order of their ids; at least one.
    pub(super) sources: Vec<SourceRepr>,
    /// Offset of the fragment index, which ends at the end of the file.
    pub(super) index_start: usize,
}

impl Layout {
    /// Reads and checks the header, the source table and the fragment index of the file `bytes`.
    pub(super) fn parse(bytes: &[u8]) -> Checked<Self> {
        let header = check_header(bytes)?;
        let tables = &bytes[header.sources_offset..];
        let tables_crc = u32_at(bytes, header::TABLES_CRC);
        if !checksum_holds(tables, tables_crc) {
            return Err(Malformed::new(
                to_u64(header::TABLES_CRC),
                "tables_crc",
                format_args!("{tables_crc:#010x}"),
                format_args!("{:#010x}, the CRC-32 of the tables", crc32fast::hash(tables)),
            ));
        }
        let (source_table, index_table) = tables.split_at(header.index_start - header.sources_offset);
        let mut walker =
            TableWalker { header: &header, index_table, offset: header.payload_start, fragment: 0 };
        let mut sources: Vec<SourceRepr> = Vec::with_capacity(source_table.len() / source::LEN);
        for (position, entry) in source_table.chunks_exact(source::LEN).enumerate() {
            let at = header.sources_offset + position * source::LEN;
            let last = sources.last().map(|source| source.id);
            sources.push(walker.check_source(entry, TableEntry { at, position }, last)?);
        }
        walker.check_end()?;
        let Header { alignment, events, index_start, .. } = header;
        Ok(Self { alignment, events, sources, index_start })
    }
}

/// Header fields, as offsets and counts in memory.
struct Header {
    alignment: Alignment,
    events: Range<u64>,
    n_fragments: u64,
    payload_start: u64,
    sources_offset: usize,
    index_start: usize,
}

fn check_header(bytes: &[u8]) -> Checked<Header> {
    let magic = &bytes[..bytes.len().min(MAGIC.len())];
    if magic != MAGIC {
        return Err(Malformed::new(
            0,
            "magic",
            format_args!("\"{}\"", magic.escape_ascii()),
            format_args!("\"{}\"; not a stream file", MAGIC.escape_ascii()),
        ));
    }
    if bytes.len() < header::LEN {
        let expected = format_args!("at least {}", header::LEN);
        return Err(Malformed::new(0, "header", format_args!("{} B", bytes.len()), expected));
    }
    expect("version", header::VERSION, u16_at(bytes, header::VERSION), VERSION)?;
    expect("header_len", header::HEADER_LEN, u16_at(bytes, header::HEADER_LEN), header::LEN as u16)?;
    let header_crc = u32_at(bytes, header::HEADER_CRC);
    let covered = &bytes[..header::HEADER_CRC];
    if !checksum_holds(covered, header_crc) {
        return Err(Malformed::new(
            to_u64(header::HEADER_CRC),
            "header_crc",
            format_args!("{header_crc:#010x}"),
            format_args!("{:#010x}, the CRC-32 of the header", crc32fast::hash(covered)),
        ));
    }

    let alignment = u32_at(bytes, header::ALIGNMENT);
    let alignment = Alignment::new(alignment).map_err(|_| {
        let expected =
            format_args!("a power of two from {} to {}", Alignment::MIN.get(), Alignment::MAX.get());
        Malformed::new(to_u64(header::ALIGNMENT), "alignment", alignment, expected)
    })?;
    let n_sources = u32_at(bytes, header::N_SOURCES);
    if n_sources == 0 {
        return Err(Malformed::new(to_u64(header::N_SOURCES), "n_sources", 0, "at least one source"));
    }
    expect("reserved", header::RESERVED, u32_at(bytes, header::RESERVED), 0)?;
    let first_event = u64_at(bytes, header::FIRST_EVENT);
    let n_events = u64_at(bytes, header::N_EVENTS);
    let most = u64::MAX - first_event;
    if n_events == 0 || n_events > most {
        return Err(Malformed::new(
            to_u64(header::N_EVENTS),
            "n_events",
            n_events,
            format_args!("1 to {most} events from event {first_event} on"),
        ));
    }

    let len = to_u64(bytes.len());
    let file_len = u64_at(bytes, header::FILE_LEN);
    if file_len != len {
        let expected = format_args!("{len}, the length of the file");
        return Err(Malformed::new(to_u64(header::FILE_LEN), "file_len", file_len, expected));
    }
    let payload_start = format::payload_start(alignment);
    let sources_offset = u64_at(bytes, header::SOURCES_OFFSET);
    let in_place = payload_start <= sources_offset && sources_offset <= len;
    if !in_place || !sources_offset.is_multiple_of(u64::from(alignment.get())) {
        return Err(Malformed::new(
            to_u64(header::SOURCES_OFFSET),
            "sources_offset",
            sources_offset,
            format_args!("a multiple of {} from {payload_start} to {len}", alignment.get()),
        ));
    }
    let tables_len = len - sources_offset;
    let source_table_len = u64::from(n_sources) * to_u64(source::LEN);
    if source_table_len > tables_len {
        return Err(Malformed::new(
            to_u64(header::N_SOURCES),
            "n_sources",
            n_sources,
            format_args!("at most {}, for the {tables_len} B of tables", tables_len / to_u64(source::LEN)),
        ));
    }
    let index_offset = sources_offset + source_table_len;
    expect("index_offset", header::INDEX_OFFSET, u64_at(bytes, header::INDEX_OFFSET), index_offset)?;
    let n_fragments = u64_at(bytes, header::N_FRAGMENTS);
    let index_len = tables_len - source_table_len;
    if n_fragments.checked_mul(to_u64(index::LEN)) != Some(index_len) {
        return Err(Malformed::new(
            to_u64(header::N_FRAGMENTS),
            "n_fragments",
            n_fragments,
            format_args!("{}, for the {index_len} B of index", index_len / to_u64(index::LEN)),
        ));
    }
    let padding = &bytes[header::LEN..payload_start as usize];
    if let Some(dirty) = padding.iter().position(|&byte| byte != 0) {
        return Err(Malformed::new(
            to_u64(header::LEN + dirty),
            "padding after the header",
            padding[dirty],
            0,
        ));
    }
    Ok(Header {
        alignment,
        events: first_event..first_event + n_events,
        n_fragments,
        payload_start,
        // Both are at most the length of `bytes`.
        sources_offset: sources_offset as usize,
        index_start: index_offset as usize,
    })
}

fn expect<T: PartialEq + std::fmt::Display>(
    field: &'static str,
    at: usize,
    found: T,
    expected: T,
) -> Checked {
    if found == expected { Ok(()) } else { Err(Malformed::new(to_u64(at), field, found, expected)) }
}

fn checksum_holds(bytes: &[u8], crc: u32) -> bool {
    !VERIFY_CHECKSUMS || crc32fast::hash(bytes) == crc
}

/// Location of a source table entry.
#[derive(Clone, Copy)]
struct TableEntry {
    /// Offset in the file.
    at: usize,
    /// Position in the table.
    position: usize,
}

impl TableEntry {
    fn wrong(
        self,
        field: &'static str,
        field_at: usize,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Malformed {
        let name = format!("{field} of source table entry {}", self.position);
        Malformed::new(to_u64(self.at + field_at), name, found, expected)
    }
}

/// Checks payload offsets and index entries, source by source.
struct TableWalker<'a> {
    header: &'a Header,
    index_table: &'a [u8],
    /// Offset of the next fragment's payload.
    offset: u64,
    /// Index of the next fragment over all sources.
    fragment: u64,
}

impl TableWalker<'_> {
    fn check_source(
        &mut self,
        entry: &[u8],
        table_entry: TableEntry,
        last: Option<SourceId>,
    ) -> Checked<SourceRepr> {
        let id = SourceId(u32_at(entry, source::SOURCE));
        if let Some(last) = last.filter(|&last| last >= id) {
            let expected = format_args!("more than {:#x}, the source before", last.0);
            return Err(table_entry.wrong("source", source::SOURCE, format_args!("{:#x}", id.0), expected));
        }
        let first_fragment = u64_at(entry, source::FIRST_FRAGMENT);
        if first_fragment != self.fragment {
            return Err(table_entry.wrong(
                "first_fragment",
                source::FIRST_FRAGMENT,
                first_fragment,
                self.fragment,
            ));
        }
        let n_fragments = u64_at(entry, source::N_FRAGMENTS);
        let left = self.header.n_fragments - self.fragment;
        if n_fragments > left {
            let expected = format_args!("at most {left}, the fragments left in the index");
            return Err(table_entry.wrong("n_fragments", source::N_FRAGMENTS, n_fragments, expected));
        }
        let payload_offset = u64_at(entry, source::PAYLOAD_OFFSET);
        if payload_offset != self.offset {
            return Err(table_entry.wrong(
                "payload_offset",
                source::PAYLOAD_OFFSET,
                payload_offset,
                self.offset,
            ));
        }
        let reserved = u32_at(entry, source::RESERVED);
        if reserved != 0 {
            return Err(table_entry.wrong("reserved", source::RESERVED, reserved, 0));
        }
        let name: [u8; format::NAME_BYTES] = array_at(entry, source::NAME);
        let Some(name) = format::parse_name(&name) else {
            let found = format!("\"{}\"", name.escape_ascii());
            let expected = "UTF-8 without control characters, filled up with zeros";
            return Err(table_entry.wrong("name", source::NAME, found, expected));
        };

        let max_len = self.check_fragments(id, n_fragments)?;
        let payload_len = u64_at(entry, source::PAYLOAD_LEN);
        let expected = self.offset - payload_offset;
        if payload_len != expected {
            return Err(table_entry.wrong("payload_len", source::PAYLOAD_LEN, payload_len, expected));
        }
        let found = u32_at(entry, source::MAX_LEN);
        if found != max_len {
            return Err(table_entry.wrong("max_len", source::MAX_LEN, found, max_len));
        }
        Ok(SourceRepr {
            id,
            kind: SourceKind(u32_at(entry, source::KIND)),
            n_fragments,
            payload_offset,
            payload_len,
            first_fragment,
            max_len,
            name: name.to_owned(),
        })
    }

    /// Checks the next `count` index entries, which exist. Returns the maximum length.
    fn check_fragments(&mut self, id: SourceId, count: u64) -> Checked<u32> {
        let Header { alignment, ref events, sources_offset, index_start, .. } = *self.header;
        let payload_end = to_u64(sources_offset);
        let mut earliest = events.start;
        let mut max_len = 0;
        for number in 0..count {
            let at = self.fragment as usize * index::LEN;
            let entry = IndexEntry::parse(&self.index_table[at..]);
            let wrong = |field: &str, field_at: usize, found: u64, expected: std::fmt::Arguments<'_>| {
                let name = format!("{field} of fragment {number} of {id}");
                Malformed::new(to_u64(index_start + at + field_at), name, found, expected)
            };
            if entry.event < earliest || events.end <= entry.event {
                let expected = format_args!("{earliest} to {}", events.end - 1);
                return Err(wrong("event", index::EVENT, entry.event, expected));
            }
            if entry.offset != self.offset {
                return Err(wrong("offset", index::OFFSET, entry.offset, format_args!("{}", self.offset)));
            }
            let room = payload_end - self.offset;
            if alignment.padded(entry.len) > room {
                let expected = format_args!("at most {room}, the payload left");
                return Err(wrong("len", index::FRAGMENT_LEN, entry.len.into(), expected));
            }
            self.offset += alignment.padded(entry.len);
            self.fragment += 1;
            // Less than the end of the events, so this does not overflow.
            earliest = entry.event + 1;
            max_len = max_len.max(entry.len);
        }
        Ok(max_len)
    }

    /// Checks that nothing follows the last source.
    fn check_end(&self) -> Checked {
        expect("n_fragments", header::N_FRAGMENTS, self.header.n_fragments, self.fragment)?;
        expect("sources_offset", header::SOURCES_OFFSET, to_u64(self.header.sources_offset), self.offset)
    }
}
