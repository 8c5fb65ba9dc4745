//! MIDAS files (`.mid`) of PSI and TRIUMF: events of banks.
//!
//! Fragment: the data of a bank. Source: the bank's name. Event: the serial number. Serial numbers count separately for each
//! event id, so one event id is imported, by default the file's first one; events of other ids are structure, as are begin and
//! end of run and messages.

use std::collections::BTreeMap;

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format, FormatOption};

/// Begin of run, end of run, message: event ids with this bit are no data.
const SPECIAL: u16 = 0x8000;
const BEGIN_RUN: u16 = 0x8000;
/// `trigger_mask` of special events.
const MAGIC: u16 = 0x494d;
const EVENT_HEADER: usize = 16;
/// Banks start at multiples of this.
const BANK_ALIGNMENT: usize = 8;

pub(super) struct Midas;

impl Format for Midas {
    fn name(&self) -> &'static str {
        "midas"
    }

    fn title(&self) -> &'static str {
        "MIDAS event files with banks (PSI, TRIUMF)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        cursor.u16("event_id") == Ok(BEGIN_RUN) && cursor.u16("trigger_mask") == Ok(MAGIC)
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        let mut imported = indexer.options().event_id;
        let mut counts: BTreeMap<u16, u64> = BTreeMap::new();
        while !cursor.is_at_end() {
            let start = cursor.at();
            let id = cursor.u16("event_id")?;
            cursor.u16("trigger_mask")?;
            let serial = cursor.u32("serial_number")?;
            cursor.u32("time_stamp")?;
            let len = cursor.u32("data_size")? as usize;
            let mut data = cursor.split(len, "data_size")?;
            if id & SPECIAL != 0 {
                indexer.structure("begin of run, end of run, message", start..cursor.at());
                continue;
            }
            *counts.entry(id).or_default() += 1;
            if *imported.get_or_insert(id) != id {
                indexer.structure("event of another event id", start..cursor.at());
            } else {
                indexer.structure("event header", start..start + EVENT_HEADER);
                scan_banks(u64::from(serial), &mut data, indexer)?;
            }
        }
        for (id, count) in counts {
            let what = match imported == Some(id) {
                true => "imported".to_owned(),
                false => format!("not written; --event-id {id} imports them"),
            };
            indexer.note(format!("{count} × event id {id}: {what}"));
        }
        Ok(())
    }

    /// The four bytes of the name. `/`, `\` and bytes that are no character of ASCII are `\x` and two digits.
    fn source_name(&self, source: u32) -> String {
        let escaped = |byte: u8| match byte {
            b'/' | b'\\' | ..b' ' | 0x7f.. => format!("\\x{byte:02x}"),
            _ => char::from(byte).to_string(),
        };
        source.to_be_bytes().map(escaped).concat()
    }

    fn options(&self) -> &'static [FormatOption] {
        &[FormatOption::EventId]
    }
}

/// Layout of a bank's header, from the flags of the event's bank header.
#[derive(Clone, Copy)]
enum BankHeader {
    /// Type and length of 16 bits.
    Short,
    /// Type and length of 32 bits.
    Long,
    /// As long, and a reserved word that aligns the data to 8 bytes.
    Aligned,
}

fn scan_banks(event: u64, data: &mut Cursor<'_>, indexer: &mut FileIndexer) -> Result<(), Malformed> {
    let start = data.at();
    let len = data.u32("size of all banks")? as usize;
    let flags = data.u32("flags of the banks")?;
    let layout = match flags {
        0x01 => BankHeader::Short,
        0x11 => BankHeader::Long,
        0x31 => BankHeader::Aligned,
        _ => {
            return Err(malformed(
                start + 4,
                "flags of the banks",
                format!("{flags:#x}"),
                "0x1, 0x11 or 0x31",
            ));
        }
    };
    let mut banks = data.split(len, "size of all banks")?;
    indexer.structure("bank header", start..banks.at());
    while !banks.is_at_end() {
        scan_bank(event, layout, &mut banks, indexer)?;
    }
    let rest = data.at()..data.at() + data.remaining();
    indexer.structure("padding", rest);
    Ok(())
}

fn scan_bank(
    event: u64,
    layout: BankHeader,
    banks: &mut Cursor<'_>,
    indexer: &mut FileIndexer,
) -> Result<(), Malformed> {
    let start = banks.at();
    let name = banks.take(4, "bank name")?;
    let name: [u8; 4] = banks.bytes(name).try_into().expect("the range has four bytes");
    let len = match layout {
        BankHeader::Short => {
            banks.u16("bank type")?;
            u32::from(banks.u16("bank size")?)
        }
        BankHeader::Long | BankHeader::Aligned => {
            banks.u32("bank type")?;
            banks.u32("bank size")?
        }
    };
    if matches!(layout, BankHeader::Aligned) {
        banks.u32("reserved word of the bank")?;
    }
    indexer.structure("bank header", start..banks.at());
    let data = banks.take(len as usize, "bank size")?;
    indexer.fragment(event, u32::from_be_bytes(name), data.clone());
    indexer.structure("padding", banks.padding(data.start, BANK_ALIGNMENT));
    Ok(())
}
