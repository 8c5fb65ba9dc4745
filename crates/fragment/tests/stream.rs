//! Stream files: written files are read back; all other bytes are refused.

mod common;

use common::{File, files, small};
use millstream_fragment::stream::{Malformed, ReadError, Stream, StreamWriter, WriteError};
use millstream_fragment::{Alignment, SourceId, SourceKind};
use proptest::prelude::*;

/// Offsets of the two checksums in the header.
const HEADER_CRC: usize = 76;
const TABLES_CRC: usize = 72;

fn refusal(bytes: &[u8]) -> Malformed {
    match Stream::parse("some.mfs", bytes) {
        Err(ReadError::Malformed { what, .. }) => what,
        other => panic!("not refused: {other:?}"),
    }
}

/// Replaces bytes and then the checksums.
fn forge(bytes: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let sources_offset = u64_at(&bytes, 48) as usize;
    bytes[at..at + value.len()].copy_from_slice(value);
    let tables_crc = crc32fast::hash(&bytes[sources_offset..]);
    bytes[TABLES_CRC..TABLES_CRC + 4].copy_from_slice(&tables_crc.to_le_bytes());
    let header_crc = crc32fast::hash(&bytes[..HEADER_CRC]);
    bytes[HEADER_CRC..HEADER_CRC + 4].copy_from_slice(&header_crc.to_le_bytes());
    bytes
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn assert_same(stream: &Stream<impl AsRef<[u8]>>, file: &File) {
    assert_eq!(stream.events(), file.events);
    assert_eq!(stream.alignment(), file.alignment);
    assert_eq!(stream.sources().len(), file.sources.len());
    assert_eq!(
        stream.n_fragments(),
        file.sources.iter().map(|source| source.fragments.len() as u64).sum::<u64>()
    );
    let mut end_of_last = None;
    for (source, input) in stream.sources().zip(&file.sources) {
        assert_eq!((source.id(), source.kind(), source.name()), (input.id, input.kind, &*input.name));
        assert_eq!(source.len(), input.fragments.len());
        assert_eq!(source.is_empty(), input.fragments.is_empty());
        let longest = input.fragments.iter().map(|(_, payload)| payload.len()).max();
        assert_eq!(source.max_len() as usize, longest.unwrap_or(0));
        assert!(end_of_last.is_none_or(|end| end == source.payload().start));
        end_of_last = Some(source.payload().end);

        let read: Vec<_> =
            source.fragments().map(|fragment| (fragment.event, fragment.payload.to_vec())).collect();
        assert_eq!(read, input.fragments);
        for event in file.events.clone() {
            let position = input.fragments.iter().position(|(of, _)| *of == event);
            assert_eq!(source.find(event), position);
        }
        let mut place = source.payload().start;
        for (position, fragment) in source.fragments().enumerate() {
            assert!(fragment.is_intact());
            let entry = source.entry(position).unwrap();
            assert_eq!(entry.offset, place);
            let in_mapping = &stream.mapping()[entry.offset as usize..][..entry.len as usize];
            assert_eq!(in_mapping.as_ptr(), fragment.payload.as_ptr());
            place += file.alignment.padded(entry.len);
        }
        assert_eq!(place, source.payload().end);
        assert_eq!(source.entry(source.len()), None);
    }
    stream.verify_payload().unwrap();
}

proptest! {
    #[test]
    fn what_is_written_is_read(file in files()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any.mfs");
        file.write(&path);
        let stream = Stream::open(&path).unwrap();
        assert_same(&stream, &file);
    }

    #[test]
    fn positions_are_those_of_a_filter(file in files(), from in 0..14_u64, count in 0..14_u64) {
        let stream = file.stream();
        let events = file.events.start.saturating_add(from)..file.events.start.saturating_add(from + count);
        for (source, input) in stream.sources().zip(&file.sources) {
            let inside: Vec<usize> = (0..input.fragments.len())
                .filter(|&position| events.contains(&input.fragments[position].0))
                .collect();
            let found = source.positions(events.clone());
            prop_assert_eq!(found.collect::<Vec<_>>(), inside);
        }
    }

    #[test]
    fn a_flipped_bit_is_found(file in files(), at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let mut bytes = file.bytes();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let found = Stream::parse("some.mfs", bytes).and_then(|stream| stream.verify_payload());
        prop_assert!(found.is_err(), "byte {}", at);
    }

    #[test]
    fn forged_tables_never_panic(
        file in files(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<[u8; 4]>()), 1..4),
    ) {
        let mut bytes = file.bytes();
        let sources_offset = u64_at(&bytes, 48) as usize;
        let places: Vec<usize> = (8..HEADER_CRC - 4).chain(sources_offset..bytes.len() - 4).collect();
        for (at, value) in changes {
            let at = *at.get(&places);
            let mut forged = bytes.clone();
            forged[at..at + 4].copy_from_slice(&value);
            let tables_crc = crc32fast::hash(&forged[sources_offset..]);
            forged[TABLES_CRC..][..4].copy_from_slice(&tables_crc.to_le_bytes());
            let header_crc = crc32fast::hash(&forged[..HEADER_CRC]);
            forged[HEADER_CRC..][..4].copy_from_slice(&header_crc.to_le_bytes());
            bytes = forged;
        }
        if let Ok(stream) = Stream::parse("some.mfs", bytes) {
            let lengths = stream.sources().flat_map(|source| source.fragments());
            let total: usize = lengths.map(|fragment| fragment.payload.len()).sum();
            prop_assert!(total <= stream.mapping().len());
        }
    }
}

#[test]
fn the_small_file_is_as_specified() {
    let file = small();
    let bytes = file.bytes();
    // Header 80, payload 8 + 16 + 8, three sources of 64, four index entries of 24.
    assert_eq!(bytes.len(), 80 + 32 + 3 * 64 + 4 * 24);
    assert_eq!(&bytes[..16], b"MSTREAM\0\x01\0\x50\0\x08\0\0\0");
    assert_eq!([24, 32, 40, 48, 56, 64].map(|at| u64_at(&bytes, at)), [4, 1000, 4, 112, 304, 400]);
    assert_eq!(&bytes[80..112], b"alpha\0\0\0beta and more\0\0\0delta\0\0\0");
    assert_same(&file.stream(), &file);
}

#[test]
fn every_truncation_is_refused() {
    let bytes = small().bytes();
    for len in 0..bytes.len() {
        let what = refusal(&bytes[..len]);
        let field = match len {
            0..8 => "magic",
            8..80 => "header",
            _ => "file_len",
        };
        assert_eq!(what.field, field, "{len} bytes: {what}");
    }
    let mut longer = bytes;
    longer.push(0);
    assert_eq!(
        refusal(&longer).to_string(),
        "byte 64: file_len: found 400, expected 401, the length of the file"
    );
}

#[test]
fn a_corrupt_byte_anywhere_is_refused() {
    let bytes = small().bytes();
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        let what = match Stream::parse("some.mfs", damaged).and_then(|stream| stream.verify_payload()) {
            Err(ReadError::Malformed { what, .. }) => what,
            other => panic!("byte {at}: not refused: {other:?}"),
        };
        let field = match at {
            0..8 => "magic",
            8..10 => "version",
            10..12 => "header_len",
            12..80 => "header_crc",
            85..88 | 101..104 | 109..112 => "padding after payload",
            80..88 => "payload of fragment 0 (event 1000) of source 0x1",
            88..104 => "payload of fragment 1 (event 1001) of source 0x1",
            104..112 => "payload of fragment 2 (event 1003) of source 0x1",
            _ => "tables_crc",
        };
        assert!(what.field.starts_with(field), "byte {at}: {what}");
        if (80..112).contains(&at) && field.starts_with("padding") {
            assert_eq!(what.offset, at as u64);
        }
    }
}

/// Every field, with an invalid value and right checksums.
#[test]
fn every_invalid_field_is_named() {
    let bytes = small().bytes();
    let (table, index) = (112, 304);
    let huge = u64::MAX.to_le_bytes();
    let cases: &[(usize, &[u8], &str)] = &[
        (0, b"\x89HDF\r\n\x1a\n", "magic"),
        (8, &[2, 0], "version"),
        (10, &[96, 0], "header_len"),
        (12, &[48, 0, 0, 0], "alignment"),
        (12, &[0, 0, 0, 0], "alignment"),
        (12, &[16, 0, 0, 0], "offset of fragment 1 of source 0x1"),
        (16, &[0, 0, 0, 0], "n_sources"),
        (16, &[2, 0, 0, 0], "index_offset"),
        (16, &[255; 4], "n_sources"),
        (20, &[1], "reserved"),
        (24, &[5], "n_fragments"),
        (24, &huge, "n_fragments"),
        // 24 times this overflows to 96, the right length.
        (24, &(4 + (1_u64 << 61)).to_le_bytes(), "n_fragments"),
        (32, &huge, "n_events"),
        (32, &1001_u64.to_le_bytes(), "event of fragment 0 of source 0x1"),
        (40, &0_u64.to_le_bytes(), "n_events"),
        (40, &huge, "n_events"),
        (40, &3_u64.to_le_bytes(), "event of fragment 2 of source 0x1"),
        (48, &113_u64.to_le_bytes(), "sources_offset"),
        (48, &72_u64.to_le_bytes(), "sources_offset"),
        (48, &huge, "sources_offset"),
        (56, &huge, "index_offset"),
        (64, &huge, "file_len"),
        (table + 64, &1_u32.to_le_bytes(), "source of source table entry 1"),
        (table + 8, &5_u64.to_le_bytes(), "n_fragments of source table entry 0"),
        (table + 8, &huge, "n_fragments of source table entry 0"),
        (table + 8, &2_u64.to_le_bytes(), "payload_len of source table entry 0"),
        (table + 16, &88_u64.to_le_bytes(), "payload_offset of source table entry 0"),
        (table + 24, &40_u64.to_le_bytes(), "payload_len of source table entry 0"),
        (table + 32, &1_u64.to_le_bytes(), "first_fragment of source table entry 0"),
        (table + 40, &14_u32.to_le_bytes(), "max_len of source table entry 0"),
        (table + 44, &[1], "reserved of source table entry 0"),
        (table + 48, b"\n", "name of source table entry 0"),
        (table + 48, b"\xff", "name of source table entry 0"),
        (table + 48 + 15, b"x", "name of source table entry 0"),
        (table + 2 * 64 + 8, &1_u64.to_le_bytes(), "n_fragments of source table entry 2"),
        (index, &999_u64.to_le_bytes(), "event of fragment 0 of source 0x1"),
        (index + 24, &1000_u64.to_le_bytes(), "event of fragment 1 of source 0x1"),
        (index + 2 * 24, &huge, "event of fragment 2 of source 0x1"),
        (index + 24 + 8, &80_u64.to_le_bytes(), "offset of fragment 1 of source 0x1"),
        (index + 24 + 8, &huge, "offset of fragment 1 of source 0x1"),
        (index + 24 + 16, &[255; 4], "len of fragment 1 of source 0x1"),
        (index + 24 + 16, &[0; 4], "offset of fragment 2 of source 0x1"),
        (index + 3 * 24 + 16, &[1], "len of fragment 0 of source 0x2"),
    ];
    for &(at, value, field) in cases {
        let what = refusal(&forge(&bytes, at, value));
        assert_eq!(what.field, field, "{value:?} at byte {at}: {what}");
    }
}

#[test]
fn all_of_the_payload_belongs_to_a_source() {
    // Without its last source, the small file has the same payload; without its last fragment, 8 bytes belong to no source.
    let mut shorter = small();
    shorter.sources[0].fragments.pop();
    let short = shorter.bytes();
    let mut bytes = short[..104].to_vec();
    bytes.extend([0; 8]);
    bytes.extend(&short[104..]);
    for at in [48, 56, 64] {
        let moved = u64_at(&short, at) + 8;
        bytes[at..at + 8].copy_from_slice(&moved.to_le_bytes());
    }
    // The second source starts at the end of the first one, so its offset is the same.
    assert_eq!(
        refusal(&forge(&bytes, 20, &[0])).to_string(),
        "byte 48: sources_offset: found 112, expected 104"
    );
}

#[test]
fn non_zero_padding_after_the_header_is_refused() {
    let mut file = small();
    file.alignment = Alignment::CACHE_LINE;
    let mut bytes = file.bytes();
    bytes[100] = 3;
    assert_eq!(refusal(&bytes).to_string(), "byte 100: padding after the header: found 3, expected 0");
}

#[test]
fn errors_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("photo.png");
    std::fs::write(&path, b"\x89PNG\r\n\x1a\n and more").unwrap();
    let error = Stream::open(&path).unwrap_err().to_string();
    let expected =
        r#"photo.png: byte 0: magic: found "\x89PNG\r\n\x1a\n", expected "MSTREAM\x00"; not a stream file"#;
    assert!(error.ends_with(expected), "{error}");

    std::fs::write(&path, b"").unwrap();
    let error = Stream::open(&path).unwrap_err().to_string();
    assert!(error.contains("photo.png: byte 0: magic: found \"\""), "{error}");

    let error = Stream::open(folder.path().join("none.mfs")).unwrap_err().to_string();
    assert!(error.contains("none.mfs: cannot open: No such file"), "{error}");
    let error = Stream::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("cannot map: not a regular file"), "{error}");
}

#[test]
fn the_writer_refuses_what_the_reader_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("never.mfs");
    let create = || StreamWriter::create(&path, 10..20, Alignment::default()).unwrap();

    let error = StreamWriter::create(&path, 10..10, Alignment::default()).unwrap_err();
    assert!(matches!(error, WriteError::NoEvents(_)), "{error}");
    assert!(matches!(create().finish().unwrap_err(), WriteError::NoSources));

    let mut writer = create();
    let kind = SourceKind(0);
    let name = "seventeen letters";
    let error = writer.source(SourceId(3), kind, name).unwrap_err();
    assert!(matches!(error, WriteError::Name { .. }), "{error}");
    let mut source = writer.source(SourceId(3), kind, "").unwrap();
    source.push(11, b"x").unwrap();
    assert_eq!(
        source.push(11, b"x").unwrap_err().to_string(),
        "source 0x3: event 11 after event 11: events must ascend"
    );
    assert_eq!(
        source.push(20, b"x").unwrap_err().to_string(),
        "source 0x3: event 20 is outside of the file's events 10 to 19"
    );
    let error = writer.source(SourceId(3), kind, "").unwrap_err();
    assert_eq!(error.to_string(), "source 0x3 after source 0x3: source ids must ascend");

    drop(writer);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "a dropped writer leaves nothing");
    let error = StreamWriter::create(folder.path().join("no/folder.mfs"), 0..1, Alignment::MIN).unwrap_err();
    assert!(error.to_string().contains("no/folder.mfs: cannot create"), "{error}");
}

#[test]
fn a_file_is_replaced_atomically() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.mfs");
    small().write(&path);
    let old = Stream::open(&path).unwrap();
    let mut writer = StreamWriter::create(&path, 0..1, Alignment::MAX).unwrap();
    writer.source(SourceId(9), SourceKind(0), "new").unwrap().push(0, b"new").unwrap();
    assert_same(&Stream::open(&path).unwrap(), &small());
    writer.finish().unwrap();
    assert_eq!(Stream::open(&path).unwrap().sources().next().unwrap().name(), "new");
    assert_same(&old, &small());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
}
