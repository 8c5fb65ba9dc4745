//! The container of flesnet's archives: a binary archive of the Boost serialization library, 64-bit and little-endian.
//!
//! ```text
//!  0  u64    22, the length of the signature
//!  8         "serialization::archive"
//! 30  u16    version of the library's format
//! 32  4 × u8 sizes of int, long, float and double: 4, 8, 4, 8
//! 36  u32    1
//! 40         archive descriptor: type and compression (i32), time (i64), host and user (strings)
//! ```
//!
//! The first object of a class follows its class information: tracking (u8, 0 for objects that no pointer refers to) and
//! version (u32). Strings and vectors start with their length (u64). Vectors of classes have the elements' version (u32)
//! after it.

use millstream_fragment::stream::Malformed;

use crate::cursor::{ByteOrder, Cursor, malformed};

const SIGNATURE: &[u8] = b"serialization::archive";
/// Versions of the library's format with this layout: Boost 1.54 to 1.88.
const LIBRARY: std::ops::RangeInclusive<u16> = 10..=20;
const SIZES: [u8; 4] = [4, 8, 4, 8];

/// What an archive holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArchiveType {
    Timeslices,
    Microslices,
}

impl ArchiveType {
    fn code(self) -> u32 {
        match self {
            ArchiveType::Timeslices => 0,
            ArchiveType::Microslices => 1,
        }
    }
}

/// Whether a file starts as an archive of a type.
pub(super) fn recognises(file: &[u8], archive_type: ArchiveType) -> bool {
    open(file, archive_type).is_ok()
}

/// Reads the headers. The cursor stands at the first object.
pub(super) fn open(file: &[u8], archive_type: ArchiveType) -> Result<Cursor<'_>, Malformed> {
    let mut cursor = Cursor::new(file, ByteOrder::Little);
    read_signature(&mut cursor)?;
    let version = class_version(&mut cursor, "ArchiveDescriptor", 2)?;
    let at = cursor.at();
    // Archives of the oldest version hold timeslices.
    let found = if version > 0 { cursor.u32("archive type")? } else { ArchiveType::Timeslices.code() };
    if found != archive_type.code() {
        let expected = format!("{}, {archive_type:?}", archive_type.code());
        return Err(malformed(at, "archive type", found, expected));
    }
    let at = cursor.at();
    let compression = if version > 1 { cursor.u32("archive compression")? } else { 0 };
    if compression != 0 {
        return Err(malformed(
            at,
            "archive compression",
            compression,
            "0, none: write the archive without compression (tsclient, output without c=zstd)",
        ));
    }
    cursor.u64("time of creation")?;
    for field in ["host name", "user name"] {
        let len = length(&mut cursor, field)?;
        cursor.take(len, field)?;
    }
    Ok(cursor)
}

fn read_signature(cursor: &mut Cursor<'_>) -> Result<(), Malformed> {
    let len = length(cursor, "length of the signature")?;
    if len != SIGNATURE.len() {
        return Err(malformed(0, "length of the signature", len, SIGNATURE.len()));
    }
    let at = cursor.at();
    let signature = cursor.take(len, "signature")?;
    if cursor.bytes(signature) != SIGNATURE {
        return Err(malformed(at, "signature", "other bytes", "\"serialization::archive\""));
    }
    let at = cursor.at();
    let library = cursor.u16("version of the archive library")?;
    if !LIBRARY.contains(&library) {
        return Err(malformed(
            at,
            "version of the archive library",
            library,
            format!("{} to {} (Boost 1.54 to 1.88)", LIBRARY.start(), LIBRARY.end()),
        ));
    }
    let at = cursor.at();
    let sizes = cursor.take(SIZES.len(), "sizes of int, long, float and double")?;
    let sizes = cursor.bytes(sizes);
    if sizes != SIZES {
        return Err(malformed(
            at,
            "sizes of int, long, float and double",
            format!("{sizes:?}"),
            "4, 8, 4, 8",
        ));
    }
    let at = cursor.at();
    match cursor.u32("byte order")? {
        1 => Ok(()),
        other => Err(malformed(at, "byte order", format!("{other:#x}"), "1, written in little-endian order")),
    }
}

/// The version in a class information, at most `newest`.
pub(super) fn class_version(cursor: &mut Cursor<'_>, class: &str, newest: u32) -> Result<u32, Malformed> {
    let at = cursor.at();
    let tracking = cursor.u8(&format!("{class}, tracking"))?;
    if tracking != 0 {
        return Err(malformed(at, format!("{class}, tracking"), tracking, "0: no pointer refers to objects"));
    }
    let at = cursor.at();
    let version = cursor.u32(&format!("{class}, class version"))?;
    if version > newest {
        return Err(malformed(at, format!("{class}, class version"), version, format!("at most {newest}")));
    }
    Ok(version)
}

/// The length of a string or a vector. A length beyond the address space cannot fit the file either.
pub(super) fn length(cursor: &mut Cursor<'_>, field: &str) -> Result<usize, Malformed> {
    Ok(usize::try_from(cursor.u64(field)?).unwrap_or(usize::MAX))
}
