//! HADES list-mode data (HLD) of TRB3 boards: HADES, J-PET.
//!
//! Events of a 32-byte header and subevents; a subevent has a 16-byte header and blocks, one per board. Fragment: a block
//! with its header word. Source: the subevent's id and the board's address. The headers of event and subevents are a source
//! of their own, so that the file can be rebuilt. Event: the sequence number.

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format};

/// Source of event and subevent headers.
const HEADERS: u32 = 0;
const EVENT_HEADER: usize = 32;
const SUBEVENT_HEADER: usize = 16;
/// Event ids of the records at the begin and end of a run.
const BEGIN_RUN: u32 = 0x10002;
const END_RUN: u32 = 0x10003;

pub(super) struct Hld;

impl Format for Hld {
    fn name(&self) -> &'static str {
        "hld"
    }

    fn title(&self) -> &'static str {
        "HADES list-mode data of TRB3 boards (HADES, J-PET)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        let Ok(header) = event_header(&mut Cursor::new(file, ByteOrder::Little)) else { return false };
        header.id == BEGIN_RUN
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        while !cursor.is_at_end() {
            let start = cursor.at();
            let header = event_header(&mut cursor)?;
            let mut body = cursor.split(header.len - EVENT_HEADER, "evtSize")?;
            match header.id {
                BEGIN_RUN => indexer.structure("begin-run record", start..body.at() + body.remaining()),
                END_RUN => indexer.structure("end-run record", start..body.at() + body.remaining()),
                _ => scan_event(&header, start, &mut body, indexer)?,
            }
            indexer.structure("padding", cursor.padding(start, header.alignment));
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        if source == HEADERS {
            "headers".into()
        } else {
            format!("{:04x}-{:04x}", source >> 16, source & 0xffff)
        }
    }

    fn joins_pieces(&self, source: u32) -> bool {
        source == HEADERS
    }
}

struct EventHeader {
    len: usize,
    id: u32,
    sequence: u64,
    alignment: usize,
}

/// The decoding word has the exponent of the alignment in its third byte and is small in the right byte order.
fn alignment(at: usize, decoding: u32) -> Result<usize, Malformed> {
    match decoding >> 16 {
        exponent @ 0..=4 => Ok(1 << exponent),
        _ => Err(malformed(
            at,
            "decoding",
            format!("{decoding:#x}"),
            "the exponent of an alignment of 1 to 16 bytes in bits 16 to 31",
        )),
    }
}

fn event_header(cursor: &mut Cursor<'_>) -> Result<EventHeader, Malformed> {
    let start = cursor.at();
    cursor.order = ByteOrder::Little;
    let decoding_is_small = cursor.clone().split(8, "evtSize").and_then(|mut ahead| {
        ahead.u32("evtSize")?;
        Ok(ahead.u32("evtDecoding")? <= 0xff_ffff)
    })?;
    if !decoding_is_small {
        cursor.order = ByteOrder::Big;
    }
    let len = cursor.u32("evtSize")? as usize;
    let at = cursor.at();
    let decoding = cursor.u32("evtDecoding")?;
    let header = EventHeader {
        len,
        id: cursor.u32("evtId")?,
        sequence: u64::from(cursor.u32("evtSeqNr")?),
        alignment: alignment(at, decoding)?,
    };
    for field in ["evtDate", "evtTime", "runNr", "expId"] {
        cursor.u32(field)?;
    }
    if len < EVENT_HEADER {
        return Err(malformed(start, "evtSize", len, "at least the 32 bytes of the header"));
    }
    Ok(header)
}

fn scan_event(
    header: &EventHeader,
    start: usize,
    body: &mut Cursor<'_>,
    indexer: &mut FileIndexer,
) -> Result<(), Malformed> {
    indexer.fragment(header.sequence, HEADERS, start..body.at());
    while !body.is_at_end() {
        scan_subevent(header, body, indexer)?;
    }
    Ok(())
}

fn scan_subevent(
    event: &EventHeader,
    body: &mut Cursor<'_>,
    indexer: &mut FileIndexer,
) -> Result<(), Malformed> {
    let start = body.at();
    body.order = ByteOrder::Big;
    let len = body.u32("subEvtSize")? as usize;
    let decoding = body.u32("subEvtDecoding")?;
    let alignment = alignment(start + 4, decoding)?;
    let id = body.u32("subEvtId")?;
    body.u32("subEvtTrigNr")?;
    if len < SUBEVENT_HEADER {
        return Err(malformed(start, "subEvtSize", len, "at least the 16 bytes of the header"));
    }
    if id > 0xffff {
        return Err(malformed(start + 8, "subEvtId", format!("{id:#x}"), "at most 0xffff"));
    }
    indexer.fragment(event.sequence, HEADERS, start..body.at());
    let mut blocks = body.split(len - SUBEVENT_HEADER, "subEvtSize")?;
    while !blocks.is_at_end() {
        let block = blocks.at();
        let word = blocks.u32("block header")?;
        let data = blocks.take((word >> 16) as usize * 4, "block header, length in words")?;
        indexer.fragment(event.sequence, id << 16 | word & 0xffff, block..data.end);
    }
    indexer.structure("padding", body.padding(start, alignment.max(event.alignment)));
    Ok(())
}
