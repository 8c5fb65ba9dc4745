//! What every format does: its samples are read as specified, damaged ones are refused with offset and field, and every byte
//! of a file is in exactly one part.

mod samples;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::Path;

use millstream_formats::{FormatOptions, Import, ImportError, Index, all, by_name, recognise};
use millstream_fragment::Alignment;
use millstream_fragment::stream::Stream;
use proptest::prelude::*;

use samples::Sample;

fn import_of<'a>(input: &'a Path, output: &'a Path) -> Import<'a> {
    let (alignment, options) = (Alignment::default(), FormatOptions::default());
    Import { input, output, events: None, alignment, options }
}

fn import(sample: &Sample, file: &[u8]) -> Result<Vec<(u32, u64, Vec<u8>)>, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("raw"), folder.path().join("out.mfs"));
    std::fs::write(&input, file).expect("the sample is written");
    let import = import_of(&input, &output);
    let imported = import.run(by_name(sample.format)).map_err(|error| error.to_string())?;
    let stream = Stream::open(&output).expect("the import is a stream file");
    stream.verify_payload().expect("checksums match");
    let mut fragments = Vec::new();
    for source in stream.sources() {
        assert!(!source.name().is_empty() && !source.name().contains('/'), "{:?}", source.name());
        fragments.extend(
            source.fragments().map(|fragment| (source.id().0, fragment.event, fragment.payload.to_vec())),
        );
    }
    assert_eq!(imported.fragments, fragments.len() as u64, "{}", sample.format);
    let structure: u64 = imported.structure.values().map(|total| total.bytes).sum();
    assert_eq!(imported.fragment_bytes + structure, file.len() as u64, "{}", sample.format);
    Ok(fragments)
}

#[test]
fn samples_are_read_as_specified() {
    for sample in samples::all() {
        let mut expected = sample.fragments.clone();
        expected.sort();
        assert_eq!(import(&sample, &sample.file).as_ref(), Ok(&expected), "{}", sample.format);
    }
}

#[test]
fn every_format_has_a_sample_and_is_recognised_by_its_start() {
    let samples = samples::all();
    for format in all() {
        assert!(samples.iter().any(|sample| sample.format == format.name()), "{}", format.name());
    }
    for sample in &samples {
        assert_eq!(recognise(&sample.file).map(|format| format.name()), Some(sample.format));
    }
    for bytes in [&b""[..], b"MSTREAM\0", &[0; 100], &[0xff; 100]] {
        assert!(recognise(bytes).is_none(), "{bytes:?}");
    }
}

#[test]
fn truncated_files_are_refused_or_hold_a_part_of_the_events() {
    for sample in samples::all() {
        let format = by_name(sample.format).expect("a format");
        for len in 0..sample.file.len() {
            match Index::read(format, &sample.file[..len]) {
                Ok(index) => {
                    assert_eq!(
                        index.fragment_bytes() + index.structure_bytes(),
                        len as u64,
                        "{} at {len}",
                        sample.format
                    );
                }
                Err(error) => {
                    assert!(error.offset <= len as u64, "{} at {len}: {error}", sample.format);
                    assert!(!error.field.is_empty() && !error.expected.is_empty(), "{error}");
                }
            }
        }
    }
}

#[test]
fn a_file_of_no_known_format_is_refused_with_the_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let input = folder.path().join("notes.txt");
    std::fs::write(&input, "not raw data").expect("written");
    let output = folder.path().join("out.mfs");
    let import = import_of(&input, &output);
    let error = import.run(None).expect_err("no format").to_string();
    assert!(
        error.contains("notes.txt")
            && error.contains("evio, frd, hld, mdf, microslices, midas, msa, pcapng, rdh, tsa"),
        "{error}"
    );
    assert!(!output.exists());
}

#[test]
fn a_selection_of_events_is_written_and_the_rest_is_counted() {
    let sample = samples::all().into_iter().find(|sample| sample.format == "hld").expect("a sample");
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("raw"), folder.path().join("out.mfs"));
    std::fs::write(&input, &sample.file).expect("written");
    let mut import = Import { events: Some(8..10), ..import_of(&input, &output) };
    let imported = import.run(None).expect("an import");
    assert_eq!((imported.events.clone(), imported.fragments, imported.outside.count), (8..10, 2, 3));
    let structure: u64 = imported.structure.values().map(|total| total.bytes).sum();
    assert_eq!(imported.fragment_bytes + imported.outside.bytes + structure, sample.file.len() as u64);
    std::fs::remove_file(&output).expect("removed");

    import.events = Some(100..200);
    assert!(matches!(import.run(None), Err(ImportError::Empty { .. })));
    assert!(!output.exists());
}

fn sample(format: &str) -> Sample {
    samples::all().into_iter().find(|sample| sample.format == format).expect("a sample")
}

/// A file that lacks every second microslice has another greatest common divisor than the others of its run.
#[test]
fn files_of_one_run_are_imported_with_one_divisor() {
    let options =
        |divisor| FormatOptions { index_divisor: NonZeroU64::new(divisor), ..FormatOptions::default() };
    for format in ["msa", "microslices"] {
        let sample = sample(format);
        let format = by_name(format).expect("a format");
        let index = Index::read(format, &sample.file).expect("no damage");
        assert_eq!(index.notes, ["event = index / 1280000; files of one run need the same --index-divisor"]);
        let index = Index::read_with(format, &sample.file, options(640_000)).expect("a divisor");
        assert_eq!(index.events(), Some(2000..2005));
        let error = Index::read_with(format, &sample.file, options(2_560_000)).expect_err("no divisor");
        assert_eq!((&*error.found, &*error.expected), ("1281280000", "a multiple of the divisor 2560000"));
    }
}

#[test]
fn the_event_id_of_midas_files_is_chosen() {
    let sample = sample("midas");
    let format = by_name("midas").expect("a format");
    let index = Index::read(format, &sample.file).expect("no damage");
    let other = "1 × event id 2: not written; --event-id 2 imports them";
    assert_eq!(index.notes, ["2 × event id 1: imported", other]);
    let options = FormatOptions { event_id: Some(2), ..FormatOptions::default() };
    let index = Index::read_with(format, &sample.file, options).expect("no damage");
    assert_eq!((index.events(), index.sources.len()), (Some(3..4), 2));
}

#[test]
fn any_four_bytes_are_the_name_of_a_midas_bank() {
    let sample = sample("midas");
    let mut file = sample.file.clone();
    let at = file.windows(4).position(|bytes| bytes == b"TDC1").expect("its name");
    file[at..at + 4].copy_from_slice(&[b'T', b'_', b'/', 0]);
    let fragments = import(&sample, &file).expect("any name");
    assert!(fragments.iter().any(|(source, ..)| *source == u32::from_be_bytes([b'T', b'_', b'/', 0])));
    let format = by_name("midas").expect("a format");
    let name = |bytes: &[u8; 4]| format.source_name(u32::from_be_bytes(*bytes));
    assert_eq!(name(b"T_ 1"), "T_ 1");
    assert_eq!(name(b"T/\\\0"), r"T\x2f\x5c\x00");
    assert!(name(&[0xff; 4]).len() <= 16);
}

#[test]
fn inputs_that_cannot_be_imported_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (raw, output) = (folder.path().join("run.mid"), folder.path().join("out.mfs"));
    std::fs::write(&raw, sample("midas").file).expect("written");
    let link = folder.path().join("link.mid");
    std::fs::hard_link(&raw, &link).expect("a link");
    for output in [&raw, &link] {
        let error = import_of(&raw, output).run(None).expect_err("one file");
        assert!(matches!(error, ImportError::SameFile(_)), "{error}");
    }
    assert_eq!(std::fs::read(&raw).expect("the raw file"), sample("midas").file);

    let options = FormatOptions { index_divisor: NonZeroU64::new(2), ..FormatOptions::default() };
    let error = Import { options, ..import_of(&raw, &output) }.run(None).expect_err("no such option");
    assert!(error.to_string().ends_with("run.mid: midas files have no --index-divisor"), "{error}");

    // Opening a pipe would wait for a writer.
    let pipe = folder.path().join("pipe");
    let (pipe_type, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, pipe_type, mode, 0).expect("a pipe");
    for input in [&*pipe, folder.path()] {
        let error = import_of(input, &output).run(None).expect_err("no file");
        assert!(matches!(error, ImportError::NotAFile(_)), "{error}");
    }

    let capture = folder.path().join("run.pcap");
    for magic in [0xa1b2_c3d4_u32, 0xa1b2_3c4d].into_iter().flat_map(|magic| [magic, magic.swap_bytes()]) {
        std::fs::write(&capture, magic.to_le_bytes()).expect("written");
        for format in [None, by_name("pcapng")] {
            let error = import_of(&capture, &output).run(format).expect_err("pcap").to_string();
            assert!(error.contains("editcap -F pcapng"), "{error}");
        }
    }
    assert!(!output.exists());
}

/// Offset of the first descriptor in the sample of microslice archives.
const MSA: usize = 96;

/// Damage that each format must find, with a part of the error.
#[test]
fn damage_is_named() {
    let damage: [(&str, usize, u8, &str); 21] = [
        ("hld", 32 + 4 + 2, 9, "byte 36: decoding: found 0x90001"),
        ("hld", 32 + 32 + 3, 9, "byte 64: subEvtSize: found 9, expected at least the 16 bytes"),
        ("midas", 16 + 6 + 16 + 4, 3, "byte 42: flags of the banks: found 0x3, expected 0x1, 0x11 or 0x31"),
        ("mdf", 4, 1, "byte 0: size: found [76, 1, 76], expected three equal copies"),
        ("mdf", 16, 2, "byte 16: compression: found 2, expected 0: decompress the file first"),
        ("frd", 32 + 24 + 8, 99, "byte 52: crc32c"),
        ("rdh", 80, 5, "byte 80: header version: found 5, expected 6 or 7"),
        ("evio", 56 + 20, 4, "byte 76: version: found 4, expected 6"),
        (
            "evio",
            56 + 12,
            2,
            "byte 68: event count of record 1: found 2, expected 3, the events in the record",
        ),
        ("pcapng", 28, 2, "interface id: found 1, expected less than 1"),
        ("pcapng", 28 + 12, 4, "original packet length: found 47, expected at most 4, the snap length"),
        ("msa", 30, 9, "byte 30: version of the archive library: found 9, expected 10 to 20"),
        ("msa", MSA, 0xda, "byte 96: hdr_id: found 0xda, expected 0xdd"),
        ("msa", MSA + 40, b'F', "byte 112: crc: found"),
        (
            "msa",
            MSA + 32,
            6,
            "byte 128: size of the content: found 6, expected the size in the descriptor, 5",
        ),
        ("microslices", 0, 0xda, "byte 0: hdr_id: found 0xda, expected 0xdd"),
        ("microslices", 37 + 1, 2, "byte 38: hdr_ver: found 2, expected 1"),
        ("microslices", 32, b'F', "byte 16: crc: found"),
        (
            "microslices",
            37 + 32 + 20 + 3,
            1,
            "byte 101: content: found 16777223 bytes, expected at most 76 bytes, the rest of the file",
        ),
        ("tsa", 49, 1, "byte 49: archive compression: found 1, expected 0, none"),
        ("tsa", 45, 2, "byte 45: archive type: found 2, expected 0, Timeslices"),
    ];
    for (format, at, value, expected) in damage {
        let sample = samples::all().into_iter().find(|sample| sample.format == format).expect("a sample");
        let mut file = sample.file.clone();
        file[at] = value;
        let error = import(&sample, &file).expect_err(format);
        assert!(error.contains(expected), "{format}: {error}");
    }
}

#[test]
fn datagrams_of_a_wrong_length_are_counted() {
    let sample = samples::all().into_iter().find(|sample| sample.format == "pcapng").expect("a sample");
    // The length field of the first datagram, of 11 bytes.
    let at = 28 + 20 + 20 + 28 + 14 + 20 + 4;
    assert_eq!(sample.file[at..at + 2], [0, 11]);
    for length in [0, 7, 12, 0x1000_u16] {
        let mut file = sample.file.clone();
        file[at..at + 2].copy_from_slice(&length.to_be_bytes());
        let format = by_name("pcapng").expect("a format");
        let index = Index::read(format, &file).expect("a capture");
        assert_eq!(index.structure["UDP datagram of a wrong length"].count, 1, "length {length}");
        let fragments: Vec<_> = index.sources.values().map(|source| source.events().count()).collect();
        assert_eq!(fragments, [2, 1], "length {length}");
        assert_eq!(index.structure["packet in an obsolete block (type 2)"].count, 1);
    }
}

#[test]
fn a_second_fragment_of_a_source_and_event_is_refused() {
    let sample = samples::all().into_iter().find(|sample| sample.format == "frd").expect("a sample");
    let mut file = sample.file.clone();
    // The second event gets the number of the first one; its FED 1200 has a fragment there.
    let second = 32 + 24 + 48;
    file[second + 12] = 40;
    let error = import(&sample, &file).expect_err("two fragments");
    assert!(error.contains("source 0x4b0 (FED 1200), event 40: found a second fragment"), "{error}");
}

#[test]
fn a_second_microslice_of_an_index_is_refused() {
    // Bytes from the last descriptor to the end of the file.
    for (format, last) in [("msa", 32 + 8 + 4), ("microslices", 32 + 4)] {
        let sample = samples::all().into_iter().find(|sample| sample.format == format).expect("a sample");
        let mut file = sample.file.clone();
        // The last microslice gets the index of the first one of its equipment.
        let last = file.len() - last;
        file[last + 8..last + 16].copy_from_slice(&1_280_000_000_u64.to_le_bytes());
        let error = import(&sample, &file).expect_err("two microslices");
        assert!(
            error
                .contains(&format!("byte {}: idx of TOF-01-000b: found 1280000000, a second time", last + 8)),
            "{error}"
        );
    }
}

#[test]
fn a_microslice_stream_with_a_damaged_content_is_still_recognised() {
    let sample = samples::all().into_iter().find(|sample| sample.format == "microslices").expect("a sample");
    let mut file = sample.file.clone();
    file[33] ^= 1;
    assert_eq!(recognise(&file).map(|format| format.name()), Some("microslices"));
    // Another byte than the start of a descriptor after the content.
    file[37] = 0;
    assert!(recognise(&file).is_none());
}

#[test]
fn a_microslice_outside_its_timeslice_component_is_refused() {
    let sample = samples::all().into_iter().find(|sample| sample.format == "tsa").expect("a sample");
    let component = &sample.fragments[0].2;
    let start = sample.file.windows(component.len()).position(|bytes| bytes == component).expect("its bytes");
    // Size of the third microslice, offset of the second one.
    for (at, value, expected) in [
        (64 + 20, 6, "found 6 bytes at 4099, expected a range between 4099 and 4104"),
        (32 + 24, 2, "found 0 bytes at 4098, expected a range between 4099 and 4104"),
    ] {
        let mut file = sample.file.clone();
        file[start + at] = value;
        let error = import(&sample, &file).expect_err("a microslice outside");
        let at = start + at / 32 * 32 + 20;
        assert!(error.contains(&format!("byte {at}: size and offset: {expected}")), "{error}");
    }
}

proptest! {
    /// No damage makes a reader panic, and what is read still covers all bytes.
    #[test]
    fn damaged_files_are_read_or_refused(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let samples = samples::all();
        let sample = which.get(&samples);
        let mut file = sample.file.clone();
        for (at, value) in changes {
            let at = at.index(file.len());
            file[at] = value;
        }
        file.truncate(file.len() - cut.index(file.len() / 4));
        let format = by_name(sample.format).expect("a format");
        if let Ok(index) = Index::read(format, &file) {
            prop_assert_eq!(index.fragment_bytes() + index.structure_bytes(), file.len() as u64);
        }
    }

    /// Arbitrary bytes are refused or covered in every format.
    #[test]
    fn arbitrary_bytes_are_read_or_refused(file in prop::collection::vec(any::<u8>(), 0..300)) {
        for format in all() {
            if let Ok(index) = Index::read(*format, &file) {
                prop_assert_eq!(index.fragment_bytes() + index.structure_bytes(), file.len() as u64);
            }
        }
    }
}

/// The J-PET file of `../shared/data`: 4,115 events of seven sources; all fragments in order give the file again.
#[test]
fn the_jpet_file_is_rebuilt_byte_for_byte() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/jpet/xx14099113231.hld");
    let Ok(file) = std::fs::read(path) else {
        eprintln!("skipped: no file {path}");
        return;
    };
    let format = recognise(&file).expect("a format");
    assert_eq!(format.name(), "hld");
    let index = Index::read(format, &file).expect("no damage");
    let fragments: usize = index.sources.values().map(|source| source.events().count()).sum();
    assert_eq!((index.sources.len(), fragments, index.events()), (7, 28_805, Some(1..4116)));
    assert_eq!(index.structure["padding"].bytes, 8348);

    let mut rebuilt = vec![0; file.len()];
    let mut pieces = BTreeMap::new();
    for piece in index.sources.values().flat_map(|source| &source.pieces) {
        pieces.insert(piece.start, piece.range());
    }
    for range in pieces.into_values() {
        rebuilt[range.clone()].copy_from_slice(&file[range]);
    }
    // The begin-run record belongs to no event.
    rebuilt[..32].copy_from_slice(&file[..32]);
    let hash: String = sha2::Digest::finalize(<sha2::Sha256 as sha2::Digest>::new_with_prefix(&rebuilt))
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(hash, "e3f631757b6180b45475f98ce33ed40d99e48249a6dd0516ed1012044640aaad");
}
