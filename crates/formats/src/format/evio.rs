//! EVIO version 6 of Jefferson Lab: records of events, an event is a bank.
//!
//! CODA's built physics events (tags 0xFF50 to 0xFF8F) are banks of banks: fragment is a child bank with its header, source its
//! tag, event the number in the trigger bank. Other events of such a file are structure. In a file without built events
//! each event is a fragment, its tag the source, its position in the file from 0 the event. Compressed records are refused.

use std::ops::Range;

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format};

/// "EVIO", the file type.
const FILE_TYPE: u32 = 0x4556_494f;
const MAGIC: u32 = 0xc0da_0100;
/// Words of a file header and of a record header.
const HEADER_WORDS: u32 = 14;
const WORD: usize = 4;
const VERSION: u32 = 6;
const BUILT: std::ops::RangeInclusive<u16> = 0xff50..=0xff8f;
const TRIGGER_BANK: std::ops::RangeInclusive<u16> = 0xff20..=0xff2f;
/// Content types of a bank.
const BANKS: [u8; 2] = [0x0e, 0x10];
const UINT64: u8 = 0x0a;

pub(super) struct Evio;

impl Format for Evio {
    fn name(&self) -> &'static str {
        "evio"
    }

    fn title(&self) -> &'static str {
        "EVIO version 6 (Jefferson Lab, CODA)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        order(file).is_ok_and(|order| Cursor::new(file, order).u32("file type") == Ok(FILE_TYPE))
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let layout = Layout::read(file)?;
        let built = layout.events.iter().any(|event| BUILT.contains(&event.tag));
        let mut at = 0;
        for (position, event) in layout.events.iter().enumerate() {
            indexer.structure("file and record headers", at..event.range.start);
            at = event.range.end;
            match (built, BUILT.contains(&event.tag)) {
                (true, true) => scan_built(file, layout.order, event, indexer)?,
                (true, false) => {
                    indexer.structure("event that is no built physics event", event.range.clone())
                }
                (false, _) => indexer.fragment(position as u64, u32::from(event.tag), event.range.clone()),
            }
        }
        indexer.structure("file and record headers", at..file.len());
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        format!("bank {source:#06x}")
    }
}

/// The byte order in which the magic number is right.
fn order(file: &[u8]) -> Result<ByteOrder, Malformed> {
    let mut cursor = Cursor::new(file, ByteOrder::Little);
    cursor.take(7 * WORD, "file header")?;
    match cursor.u32("magic number")? {
        MAGIC => Ok(ByteOrder::Little),
        swapped if swapped.swap_bytes() == MAGIC => Ok(ByteOrder::Big),
        other => Err(malformed(7 * WORD, "magic number", format!("{other:#x}"), format!("{MAGIC:#x}"))),
    }
}

struct Event {
    tag: u16,
    range: Range<usize>,
}

struct Layout {
    order: ByteOrder,
    events: Vec<Event>,
}

/// The fields of a file header or of a record header that both have.
struct Header {
    start: usize,
    first: u32,
    number: u32,
    count: u32,
    index_len: usize,
    user_len: usize,
    compression: u32,
}

impl Header {
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, Malformed> {
        let start = cursor.at();
        let first = cursor.u32("first word of the header")?;
        let number = cursor.u32("number")?;
        let words = cursor.u32("header length")?;
        if words != HEADER_WORDS {
            return Err(malformed(start + 8, "header length", words, HEADER_WORDS));
        }
        let count = cursor.u32("event count")?;
        let index_len = cursor.u32("index array length")? as usize;
        let version = cursor.u32("version")? & 0xff;
        if version != VERSION {
            return Err(malformed(start + 20, "version", version, VERSION));
        }
        let user_len = (cursor.u32("user header length")? as usize).next_multiple_of(WORD);
        let magic = cursor.u32("magic number")?;
        if magic != MAGIC {
            return Err(malformed(start + 28, "magic number", format!("{magic:#x}"), format!("{MAGIC:#x}")));
        }
        cursor.u32("uncompressed data length")?;
        let compression = cursor.u32("compression type")? >> 28;
        cursor.take(4 * WORD, "registers")?;
        Ok(Self { start, first, number, count, index_len, user_len, compression })
    }
}

impl Layout {
    fn read(file: &[u8]) -> Result<Self, Malformed> {
        let order = order(file)?;
        let mut cursor = Cursor::new(file, order);
        let header = Header::read(&mut cursor)?;
        if header.first != FILE_TYPE {
            return Err(malformed(0, "file type", format!("{:#x}", header.first), format!("{FILE_TYPE:#x}")));
        }
        cursor.take(header.index_len, "index array length")?;
        cursor.take(header.user_len, "user header length")?;
        let mut events = Vec::new();
        while !cursor.is_at_end() {
            record(&mut cursor, &mut events)?;
        }
        Ok(Self { order, events })
    }
}

fn record(cursor: &mut Cursor<'_>, events: &mut Vec<Event>) -> Result<(), Malformed> {
    let header = Header::read(&mut cursor.clone())?;
    let len = (header.first as usize).saturating_mul(WORD);
    if header.first < HEADER_WORDS {
        return Err(malformed(
            header.start,
            "record length",
            header.first,
            "at least the 14 words of the header",
        ));
    }
    let mut record = cursor.split(len, "record length")?;
    if header.compression != 0 {
        return Err(malformed(
            header.start + 36,
            "compression type",
            header.compression,
            "0: decompress the file first",
        ));
    }
    record.take(HEADER_WORDS as usize * WORD, "record header")?;
    record.take(header.index_len, "index array length")?;
    record.take(header.user_len, "user header length")?;
    for _ in 0..header.count {
        let start = record.at();
        let (_, tag, _) = bank(&mut record)?;
        events.push(Event { tag, range: start..record.at() });
    }
    let mut held = header.count;
    while !record.is_at_end() {
        bank(&mut record)?;
        held += 1;
    }
    if held != header.count {
        let field = format!("event count of record {}", header.number);
        let expected = format!("{held}, the events in the record");
        return Err(malformed(header.start + 12, field, header.count, expected));
    }
    Ok(())
}

/// Reads a bank, which the cursor passes. Returns its data, tag and content type.
fn bank<'a>(cursor: &mut Cursor<'a>) -> Result<(Cursor<'a>, u16, u8), Malformed> {
    let start = cursor.at();
    let words = cursor.u32("bank length")? as usize;
    if words == 0 {
        return Err(malformed(start, "bank length", 0, "at least the second word of the header"));
    }
    let header = cursor.u32("bank tag and type")?;
    let data = cursor.split((words - 1).saturating_mul(WORD), "bank length")?;
    Ok((data, (header >> 16) as u16, (header >> 8 & 0x3f) as u8))
}

fn scan_built(
    file: &[u8],
    order: ByteOrder,
    event: &Event,
    indexer: &mut FileIndexer,
) -> Result<(), Malformed> {
    let mut cursor = Cursor::new(file, order);
    cursor.take(event.range.start, "event")?;
    let (mut children, _, kind) = bank(&mut cursor)?;
    if !BANKS.contains(&kind) {
        return Err(malformed(
            event.range.start + 4,
            "type of the event",
            format!("{kind:#x}"),
            "0xe or 0x10, banks",
        ));
    }
    indexer.structure("event header", event.range.start..children.at());
    let number = event_number(children.clone())?;
    while !children.is_at_end() {
        let start = children.at();
        let (_, tag, _) = bank(&mut children)?;
        indexer.fragment(number, u32::from(tag), start..children.at());
    }
    Ok(())
}

/// The event number: the first number of the first segment of the trigger bank, which is the first child.
fn event_number(mut children: Cursor<'_>) -> Result<u64, Malformed> {
    let start = children.at();
    let (mut trigger, tag, _) = bank(&mut children)?;
    if !TRIGGER_BANK.contains(&tag) {
        return Err(malformed(
            start + 4,
            "tag of the first bank",
            format!("{tag:#x}"),
            "0xff20 to 0xff2f, the trigger bank",
        ));
    }
    let at = trigger.at();
    let segment = trigger.u32("segment of the trigger bank")?;
    let kind = (segment >> 16 & 0x3f) as u8;
    if kind != UINT64 {
        return Err(malformed(
            at,
            "type of the trigger bank's first segment",
            format!("{kind:#x}"),
            "0xa, 64-bit numbers",
        ));
    }
    trigger.u64("event number")
}
