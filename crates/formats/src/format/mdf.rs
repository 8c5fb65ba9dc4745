//! Master data format (MDF) of LHCb: events of raw banks.
//!
//! Fragment: the data of a raw bank. Source: bank type and source id of the bank. Kind: the bank type. Event: its position
//! in the file, from 0, since the header has no event number. The checksum is not compared.

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format};

/// The header without the part that depends on its type.
const HEADER: usize = 20;
const BANK_HEADER: usize = 8;
/// The data type of an event of raw banks.
const BANKS: u8 = 1;
const BANK_MAGIC: u16 = 0xcbcb;
const BANK_ALIGNMENT: usize = 4;

pub(super) struct Mdf;

impl Format for Mdf {
    fn name(&self) -> &'static str {
        "mdf"
    }

    fn title(&self) -> &'static str {
        "Master data format with raw banks (LHCb)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        event(&mut cursor).is_ok_and(|(_, mut banks)| banks.u16("bank magic") == Ok(BANK_MAGIC))
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        let mut number = 0;
        while !cursor.is_at_end() {
            let (start, mut banks) = event(&mut cursor)?;
            indexer.structure("event header", start..banks.at());
            while !banks.is_at_end() {
                scan_bank(number, &mut banks, indexer)?;
            }
            number += 1;
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        format!("type {}-{:#06x}", self.kind(source), source & 0xffff)
    }

    fn kind(&self, source: u32) -> u32 {
        source >> 16
    }
}

/// Reads the header of an event. Returns the event's offset and its banks.
fn event<'a>(cursor: &mut Cursor<'a>) -> Result<(usize, Cursor<'a>), Malformed> {
    let start = cursor.at();
    let sizes = [cursor.u32("size")?, cursor.u32("size, second copy")?, cursor.u32("size, third copy")?];
    if sizes.iter().any(|&size| size != sizes[0]) {
        return Err(malformed(start, "size", format!("{sizes:?}"), "three equal copies"));
    }
    cursor.u32("checksum")?;
    let compression = cursor.u8("compression")?;
    if compression != 0 {
        return Err(malformed(start + 16, "compression", compression, "0: decompress the file first"));
    }
    let specific = usize::from(cursor.u8("header type")? & 0xf) * 4;
    let data_type = cursor.u8("data type")?;
    if data_type != BANKS {
        return Err(malformed(start + 18, "data type", data_type, "1, raw banks"));
    }
    cursor.u8("spare")?;
    cursor.take(specific, "header type, length of the specific header")?;
    let Some(len) = (sizes[0] as usize).checked_sub(HEADER + specific) else {
        return Err(malformed(
            start,
            "size",
            sizes[0],
            format!("at least the {} bytes of the header", HEADER + specific),
        ));
    };
    Ok((start, cursor.split(len, "size")?))
}

fn scan_bank(event: u64, banks: &mut Cursor<'_>, indexer: &mut FileIndexer) -> Result<(), Malformed> {
    let start = banks.at();
    let magic = banks.u16("bank magic")?;
    if magic != BANK_MAGIC {
        return Err(malformed(start, "bank magic", format!("{magic:#06x}"), format!("{BANK_MAGIC:#06x}")));
    }
    let size = usize::from(banks.u16("bank size")?);
    let kind = banks.u8("bank type")?;
    banks.u8("bank version")?;
    let source = banks.u16("bank source id")?;
    indexer.structure("bank header", start..banks.at());
    let Some(len) = size.checked_sub(BANK_HEADER) else {
        return Err(malformed(start + 2, "bank size", size, "at least the 8 bytes of the bank's header"));
    };
    let data = banks.take(len, "bank size")?;
    indexer.fragment(event, u32::from(kind) << 16 | u32::from(source), data);
    indexer.structure("padding", banks.padding(start, BANK_ALIGNMENT));
    Ok(())
}
