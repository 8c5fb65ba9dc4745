//! h5py reads the files; every byte is compared with the input.

mod common;

use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;

use common::{Files, PYTHON, append_all, compare};
use millstream_fragment::stream::{Stream, StreamWriter};
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use millstream_store::{Compression, Event, EventWriter, InputFile, Run, Schema, Source, WriteOptions};

#[test]
fn camera_events_equal_their_input() {
    let files = Files::open();
    let events = files.events(2);
    let folder = tempfile::tempdir().unwrap();
    // A write size that divides the number of events, and one that does not.
    for (block, compression) in [(64, Compression::None), (7, Compression::Gzip(1))] {
        let path = folder.path().join(format!("block{block}.h5"));
        let options = WriteOptions {
            events_per_write: NonZeroUsize::new(block).unwrap(),
            compression,
            ..WriteOptions::default()
        };
        let mut writer = EventWriter::create(&path, &files.schema(2), &options).unwrap();
        append_all(&mut writer, &events);
        let stored = writer.finish().unwrap();
        assert_eq!((stored.events, stored.fragments), (64, 64 * 30));
        assert_eq!(stored.payload_bytes, 64 * 158_400);
        assert_eq!((stored.missing, stored.corrupt), (0, 0));
        compare(&path, 2, &streams(&files)).unwrap();
    }
}

fn streams(files: &Files) -> Vec<&Path> {
    files.crates.iter().chain([&files.truth]).map(Stream::path).collect()
}

#[test]
fn comparison_finds_a_wrong_bit() {
    let files = Files::open();
    let mut events = files.events(1);
    let mut payload = events[20].fragments[13].1.payload.to_vec();
    payload[4000] ^= 1;
    events[20].fragments[13].1.payload = &payload;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let mut writer = EventWriter::create(&path, &files.schema(1), &WriteOptions::default()).unwrap();
    append_all(&mut writer, &events);
    assert_eq!(writer.finish().unwrap().corrupt, 1);
    let complaint = compare(&path, 1, &streams(&files)).unwrap_err();
    assert!(complaint.contains("AssertionError: state: "), "{complaint}");
}

/// As of a time-of-flight detector: fragments of variable length, some empty, some missing.
#[test]
fn variable_length_fragments_equal_their_input() {
    const EVENTS: u64 = 150;
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("input.mfs");
    let payload = |event: u64, source: u64| -> Option<Vec<u8>> {
        let len = event.wrapping_mul(7919 + source) % 311;
        (len % 13 != 1).then(|| (0..len.saturating_sub(20)).map(|k| (k * event + source) as u8).collect())
    };
    let mut stream = StreamWriter::create(&input, 5..5 + EVENTS, Alignment::CACHE_LINE).unwrap();
    for source in 0..3 {
        let (id, kind) = (SourceId(source + 10), SourceKind(40 + source));
        let mut fragments = stream.source(id, kind, &format!("tdc {source}")).unwrap();
        for event in 5..5 + EVENTS {
            if let Some(payload) = payload(event, source.into()) {
                fragments.push(event, &payload).unwrap();
            }
        }
    }
    stream.finish().unwrap();

    let stream = Stream::open(&input).unwrap();
    let run = Run {
        name: "tof".into(),
        instance: String::new(),
        replay: 1,
        software: "millstream test".into(),
        inputs: vec![InputFile {
            name: "input.mfs".into(),
            bytes: stream.mapping().len() as u64,
            checksum: format!("crc32:{:08x}", Fragment::new(0, stream.mapping()).crc),
        }],
        attributes: Vec::new(),
    };
    let schema = Schema { run, sources: stream.sources().map(Source::from).collect(), ..Schema::default() };
    let path = folder.path().join("events.h5");
    let mut writer = EventWriter::create(&path, &schema, &WriteOptions::default()).unwrap();
    let mut missing = 0;
    for number in stream.events() {
        let found = stream.sources().filter_map(|source| {
            Some((source.id(), source.fragment(source.find(number)?).expect("an entry has a fragment")))
        });
        let fragments: Vec<_> = found.collect();
        missing += 3 - fragments.len() as u64;
        let event =
            Event { number, batch: number / 8, fragments: &fragments, decisions: &[], readout_lost: false };
        writer.append(&event).unwrap();
    }
    let stored = writer.finish().unwrap();
    assert!(missing > 0);
    assert_eq!((stored.events, stored.missing), (EVENTS, missing));
    compare(&path, 1, &[&input]).unwrap();
}

#[test]
fn the_example_in_the_documentation_runs() {
    let text = include_str!("../../../docs/output.md");
    let start = text.find("    import h5py").unwrap();
    let code = text[start..].lines().map_while(|line| line.strip_prefix("    "));
    let code: String = code.flat_map(|line| [line, "\n"]).collect();

    let files = Files::open();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let mut writer = EventWriter::create(path, &files.schema(1), &WriteOptions::default()).unwrap();
    append_all(&mut writer, &files.events(1));
    writer.finish().unwrap();
    let ran = Command::new(PYTHON).args(["-c", &code]).current_dir(&folder).output().unwrap();
    let shown = String::from_utf8(ran.stdout).unwrap();
    let printed: Vec<i64> = shown.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(ran.status.success() && printed.len() == 3, "{shown}{}", String::from_utf8_lossy(&ran.stderr));
    assert!((1_027_888..1_027_920).contains(&printed[0]), "{printed:?}");
}
