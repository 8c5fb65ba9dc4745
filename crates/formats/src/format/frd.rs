//! FED raw data (FRD) of CMS, event versions 5 and 6, with or without a file header.
//!
//! Fragment: the data of a front-end driver (FED), with its header and trailer. Source: the FED's id. Event: the event number.
//! The CRC-32C of each event is compared, unless it is 0. FEDs are found from the end of the event, by their trailers.

use std::ops::Range;

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format};

const FILE_ID: &[u8] = b"RAW_";
/// Length of a FED's header, and of its trailer.
const WORD: usize = 8;
/// Bits 60 to 63 of a header and of a trailer.
const HEADER_MARK: u64 = 0x5;
const TRAILER_MARK: u64 = 0xa;

pub(super) struct Frd;

impl Format for Frd {
    fn name(&self) -> &'static str {
        "frd"
    }

    fn title(&self) -> &'static str {
        "FED raw data, versions 5 and 6 (CMS)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        file.starts_with(FILE_ID)
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        if file.starts_with(FILE_ID) {
            file_header(file, &mut cursor)?;
            indexer.structure("file header", 0..cursor.at());
        }
        while !cursor.is_at_end() {
            scan_event(file, &mut cursor, indexer)?;
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        format!("FED {source}")
    }
}

fn file_header(file: &[u8], cursor: &mut Cursor<'_>) -> Result<(), Malformed> {
    cursor.take(FILE_ID.len(), "id")?;
    let version = cursor.take(4, "version")?;
    let (len, fields): (u16, usize) = match cursor.bytes(version) {
        b"0001" => (24, 6),
        b"0002" => (32, 14),
        other => return Err(malformed(4, "version", String::from_utf8_lossy(other), "0001 or 0002")),
    };
    let found = cursor.u16("headerSize")?;
    if found != len {
        return Err(malformed(8, "headerSize", found, len));
    }
    // Data type, number of events, run and luminosity section.
    cursor.take(fields, "numbers of events, run and luminosity section")?;
    let at = cursor.at();
    let size = cursor.u64("fileSize")?;
    if size != file.len() as u64 {
        return Err(malformed(at, "fileSize", size, format!("{}, the length of the file", file.len())));
    }
    Ok(())
}

fn scan_event(file: &[u8], cursor: &mut Cursor<'_>, indexer: &mut FileIndexer) -> Result<(), Malformed> {
    let start = cursor.at();
    let version = cursor.u16("version")?;
    let flags = cursor.u16("flags")?;
    if !(version == 5 && flags == 0 || version == 6) {
        return Err(malformed(start, "version", version, "5 or 6"));
    }
    cursor.u32("run")?;
    cursor.u32("lumi")?;
    let event = u64::from(cursor.u32("event")?);
    let len = cursor.u32("eventSize")? as usize;
    let crc_at = cursor.at();
    let crc = cursor.u32("crc32c")?;
    indexer.structure("event header", start..cursor.at());
    let payload = cursor.take(len, "eventSize")?;
    let found = crc32c::crc32c(&file[payload.clone()]);
    if crc != 0 && crc != found && !cfg!(fuzzing) {
        return Err(malformed(
            crc_at,
            "crc32c",
            format!("{crc:#010x}"),
            format!("{found:#010x}, that of the data"),
        ));
    }
    for (fed, range) in feds(file, payload)? {
        indexer.fragment(event, fed, range);
    }
    Ok(())
}

/// The FEDs of an event in the order of the file.
fn feds(file: &[u8], payload: Range<usize>) -> Result<Vec<(u32, Range<usize>)>, Malformed> {
    let word =
        |at: usize| u64::from_le_bytes(file[at..at + WORD].try_into().expect("a word has eight bytes"));
    let mut feds = Vec::new();
    let mut end = payload.end;
    while end > payload.start {
        let Some(trailer_at) = end.checked_sub(WORD).filter(|&at| at >= payload.start + WORD) else {
            return Err(malformed(
                payload.start,
                "FED header",
                format!("{} bytes", end - payload.start),
                "a header and a trailer of 8 bytes",
            ));
        };
        let trailer = word(trailer_at);
        if trailer >> 60 != TRAILER_MARK {
            return Err(malformed(
                trailer_at,
                "FED trailer",
                format!("{trailer:#018x}"),
                "0xa in bits 60 to 63",
            ));
        }
        let len = (trailer >> 32 & 0xff_ffff) as usize * WORD;
        if len < 2 * WORD || len > end - payload.start {
            return Err(malformed(
                trailer_at,
                "FED trailer, length",
                len,
                format!("16 to {} bytes", end - payload.start),
            ));
        }
        let header_at = end - len;
        let header = word(header_at);
        if header >> 60 != HEADER_MARK {
            return Err(malformed(
                header_at,
                "FED header",
                format!("{header:#018x}"),
                "0x5 in bits 60 to 63",
            ));
        }
        feds.push(((header >> 8 & 0xfff) as u32, header_at..end));
        end = header_at;
    }
    feds.reverse();
    Ok(feds)
}
