//! Raw data of ALICE's common readout unit: pages with a raw data header (RDH), versions 6 and 7.
//!
//! Fragment: the pages of one heartbeat frame, with their headers. Source: the header's source id and front-end id. Event: the
//! orbit of the heartbeat.

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format};

const HEADER: usize = 64;
const VERSIONS: std::ops::RangeInclusive<u8> = 6..=7;

pub(super) struct Rdh;

impl Format for Rdh {
    fn name(&self) -> &'static str {
        "rdh"
    }

    fn title(&self) -> &'static str {
        "Pages with a raw data header, versions 6 and 7 (ALICE)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        file.len() >= HEADER
            && VERSIONS.contains(&file[0])
            && usize::from(file[1]) == HEADER
            && file[6..8] == [0; 2]
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        while !cursor.is_at_end() {
            scan_page(&mut cursor, indexer)?;
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        format!("{}-{:#06x}", source >> 16, source & 0xffff)
    }

    fn joins_pieces(&self, _source: u32) -> bool {
        true
    }
}

fn scan_page(cursor: &mut Cursor<'_>, indexer: &mut FileIndexer) -> Result<(), Malformed> {
    let start = cursor.at();
    let mut ahead = cursor.clone();
    let mut header = ahead.split(HEADER, "raw data header")?;
    let version = header.u8("header version")?;
    if !VERSIONS.contains(&version) {
        return Err(malformed(start, "header version", version, "6 or 7"));
    }
    let header_len = usize::from(header.u8("header size")?);
    if header_len != HEADER {
        return Err(malformed(start + 1, "header size", header_len, HEADER));
    }
    let front_end = header.u16("FEE id")?;
    header.u8("priority bit")?;
    let source = header.u8("source id")?;
    header.u16("reserved")?;
    let next = usize::from(header.u16("offset to next packet")?);
    let len = usize::from(header.u16("memory size")?);
    if len < HEADER {
        return Err(malformed(start + 10, "memory size", len, "at least the 64 bytes of the header"));
    }
    if next < len {
        return Err(malformed(
            start + 8,
            "offset to next packet",
            next,
            format!("at least the memory size, {len}"),
        ));
    }
    // Link id, packet counter, CRU id and endpoint; bunch crossing.
    header.u32("link id, packet counter, CRU id")?;
    header.u32("bunch crossing")?;
    let orbit = header.u32("orbit")?;
    let page = cursor.take(len, "memory size")?;
    indexer.fragment(u64::from(orbit), u32::from(source) << 16 | u32::from(front_end), page);
    // The last page of a file may end at its memory size.
    let rest = (next - len).min(cursor.remaining());
    indexer.structure("rest of the page", cursor.take(rest, "offset to next packet")?);
    Ok(())
}
