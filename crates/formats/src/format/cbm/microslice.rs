//! Microslice descriptors: 32 bytes, the time and the size of a microslice's content.
//!
//! ```text
//!  0  u8   hdr_id   0xDD
//!  1  u8   hdr_ver  1
//!  2  u16  eq_id    equipment identifier
//!  4  u16  flags    bit 0: crc is valid
//!  6  u8   sys_id   subsystem
//!  7  u8   sys_ver  format of the content
//!  8  u64  idx      index or start time
//! 16  u32  crc      CRC-32C of the content
//! 20  u32  size     length of the content
//! 24  u64  offset   of the content in the stream of the equipment
//! ```

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::ops::Range;

use millstream_fragment::stream::Malformed;

use crate::FileIndexer;
use crate::cursor::{Cursor, malformed};

/// Length of a descriptor.
pub(super) const DESCRIPTOR: usize = 32;
const HEADER_ID: u8 = 0xdd;
const HEADER_VERSION: u8 = 1;
/// The first bytes of a descriptor.
pub(super) const START: [u8; 2] = [HEADER_ID, HEADER_VERSION];
const CRC_VALID: u16 = 1;

/// A descriptor, and where it is in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    /// Offset in the file.
    pub(super) at: usize,
    /// Id of the stream file's source: subsystem, format of the content and equipment.
    pub(super) source: u32,
    pub(super) idx: u64,
    pub(super) size: usize,
    /// Offset of the content in the stream of the equipment.
    pub(super) offset: u64,
    /// CRC-32C of the content, if it is valid.
    crc: Option<u32>,
}

impl Descriptor {
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Self, Malformed> {
        let at = cursor.at();
        let mut fields = cursor.split(DESCRIPTOR, "microslice descriptor")?;
        let id = fields.u8("hdr_id")?;
        if id != HEADER_ID {
            return Err(malformed(at, "hdr_id", format!("{id:#04x}"), "0xdd"));
        }
        let version = fields.u8("hdr_ver")?;
        if version != HEADER_VERSION {
            return Err(malformed(at + 1, "hdr_ver", version, HEADER_VERSION));
        }
        let equipment = fields.u16("eq_id")?;
        let flags = fields.u16("flags")?;
        let system = fields.u8("sys_id")?;
        let content = fields.u8("sys_ver")?;
        let idx = fields.u64("idx")?;
        let crc = fields.u32("crc")?;
        Ok(Self {
            at,
            source: u32::from_be_bytes([system, content, 0, 0]) | u32::from(equipment),
            idx,
            size: fields.u32("size")? as usize,
            offset: fields.u64("offset")?,
            crc: (flags & CRC_VALID != 0).then_some(crc),
        })
    }

    /// Compares the checksum of the content, if there is one.
    pub(super) fn check_content(&self, file: &[u8], content: Range<usize>) -> Result<(), Malformed> {
        let Some(expected) = self.crc else { return Ok(()) };
        let found = crc32c::crc32c(&file[content]);
        if found == expected || cfg!(fuzzing) {
            return Ok(());
        }
        Err(malformed(
            self.at + 16,
            "crc",
            format!("{expected:#010x}"),
            format!("the CRC-32C of the content, {found:#010x}"),
        ))
    }
}

/// The event of each microslice of a file: its index divided by a divisor, by default the greatest common divisor of the file's
/// indices. Real indices are start times, so the divisor is the duration of a microslice, and a lost microslice is a missing event.
/// A file that lacks many has a multiple of the duration, so files of one run need one divisor.
pub(super) fn events<'a>(
    descriptors: impl Iterator<Item = &'a Descriptor> + Clone,
    indexer: &mut FileIndexer,
) -> Result<Vec<u64>, Malformed> {
    let given = indexer.options().index_divisor.map(NonZeroU64::get);
    let divisor =
        given.unwrap_or_else(|| descriptors.clone().fold(0, |divisor, found| gcd(divisor, found.idx)));
    indexer.note(format!("event = index / {divisor}; files of one run need the same --index-divisor"));
    let mut seen = HashMap::new();
    let mut events = Vec::new();
    for descriptor in descriptors {
        let event = descriptor.idx.checked_div(divisor).unwrap_or(0);
        if event * divisor != descriptor.idx {
            return Err(malformed(
                descriptor.at + 8,
                format!("idx of {}", source_name(descriptor.source)),
                descriptor.idx,
                format!("a multiple of the divisor {divisor}"),
            ));
        }
        if let Some(first) = seen.insert((descriptor.source, event), descriptor.at) {
            return Err(malformed(
                descriptor.at + 8,
                format!("idx of {}", source_name(descriptor.source)),
                format!("{}, a second time", descriptor.idx),
                format!("one microslice an index; the first is at byte {first}"),
            ));
        }
        events.push(event);
    }
    Ok(events)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Name of a source: subsystem, format of the content, equipment.
pub(super) fn source_name(source: u32) -> String {
    let [system, content, ..] = source.to_be_bytes();
    let equipment = source & 0xffff;
    let system = match system {
        0x10 => "STS",
        0x20 => "MVD",
        0x30 => "RICH",
        0x40 => "TRD",
        0x48 => "TRD2D",
        0x50 => "MUCH",
        0x58 => "MUST",
        0x60 => "TOF",
        0x70 => "ECAL",
        0x80 => "PSD",
        0x81 => "FSD",
        0x90 => "BMON",
        0xe0 => "TRB3",
        0xf0 => "FLES",
        _ => return format!("{system:02x}-{content:02x}-{equipment:04x}"),
    };
    format!("{system}-{content:02x}-{equipment:04x}")
}

/// Layout of a source's content: subsystem and its format.
pub(super) fn kind(source: u32) -> u32 {
    source >> 16
}
