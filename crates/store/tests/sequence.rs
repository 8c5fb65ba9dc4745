//! Rotation of event files, and their index.

mod common;

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use common::Files;
use millstream_quantity::Bytes;
use millstream_store::{
    EventFileSequence, EventReader, FileError, IndexEntry, SequenceOptions, WriteOptions, append_to_index,
    index_path, read_index,
};

/// Writes the camera's 32 events in blocks of 4, flushing after each.
fn write(base: &Path, options: SequenceOptions) -> Vec<IndexEntry> {
    let files = Files::open();
    let write = WriteOptions { events_per_write: NonZeroUsize::new(4).unwrap(), ..WriteOptions::default() };
    let mut sequence = EventFileSequence::create(base, files.schema(1), write, options).unwrap();
    for block in files.events(1).chunks(4) {
        for event in block {
            sequence.append(&event.event()).unwrap();
        }
        sequence.flush().unwrap();
    }
    let stored = sequence.finish().unwrap();
    let entries = read_index(&index_path(base)).unwrap();
    let counts = |entry: &IndexEntry| (entry.events, entry.first_event, entry.last_event);
    assert_eq!(
        stored
            .iter()
            .map(|stored| (stored.events, stored.first_event, stored.last_event))
            .collect::<Vec<_>>(),
        entries.iter().map(counts).collect::<Vec<_>>()
    );
    entries
}

#[test]
fn files_rotate_by_size_and_the_index_lists_them() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run.bu0");
    let options = SequenceOptions { rotate_size: Some(Bytes(1_500_000)), ..SequenceOptions::default() };
    let entries = write(&base, options);
    assert!(entries.len() >= 3, "{entries:#?}");
    let mut next = 1_027_888;
    for (number, entry) in (1..).zip(&entries) {
        assert_eq!(entry.file, format!("run.bu0.{number:04}.h5"));
        assert_eq!(entry.first_event, Some(next));
        next = entry.last_event.unwrap() + 1;
        entry.verify(folder.path()).unwrap();
        let reader = EventReader::open(folder.path().join(&entry.file)).unwrap();
        assert_eq!((reader.numbers().len() as u64, entry.recovered), (entry.events, false));
        // A file is closed at the first flush above the size.
        assert!(entry.bytes.0 < 1_500_000 + 5 * 200_000, "{entry:?}");
    }
    assert_eq!(next, 1_027_920);
    let names = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(names, entries.len() + 1, "nothing but the files and the index");
}

#[test]
fn files_rotate_by_time() {
    let folder = tempfile::tempdir().unwrap();
    // Every flush is late.
    let options =
        SequenceOptions { rotate_interval: Some(Duration::from_nanos(1)), ..SequenceOptions::default() };
    let entries = write(&folder.path().join("run"), options);
    assert_eq!(entries.iter().map(|entry| entry.events).collect::<Vec<_>>(), [4; 8]);
}

#[test]
fn without_rotation_there_is_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let options = SequenceOptions { sync_on_flush: true, replace: true, ..SequenceOptions::default() };
    let base = folder.path().join("run");
    // The second sequence replaces the first.
    for _ in 0..2 {
        let entries = write(&base, options);
        let [entry] = &entries[..] else { panic!("{entries:?}") };
        assert_eq!((entry.file.as_str(), entry.events), ("run.h5", 32));
    }
}

#[test]
fn damaged_files_and_indexes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    let [entry] = &write(&base, SequenceOptions::default())[..] else { panic!() };
    let path = folder.path().join("run.h5");
    let mut bytes = fs::read(&path).unwrap();
    bytes[100_000] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = entry.verify(folder.path()).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: checksum is crc32:", path.display())), "{error}");
    bytes.pop();
    fs::write(&path, &bytes).unwrap();
    let error = entry.verify(folder.path()).unwrap_err().to_string();
    assert!(error.contains(": length is "), "{error}");

    let index = index_path(&base);
    let mut text = fs::read_to_string(&index).unwrap();
    text.push_str("{\"file\":\"cut sho");
    fs::write(&index, &text).unwrap();
    assert_eq!(read_index(&index).unwrap().len(), 1, "a line that is cut short is left out");
    let other = IndexEntry { file: "run.recovered.h5".to_owned(), ..entry.clone() };
    append_to_index(&index, &other).unwrap();
    assert_eq!(read_index(&index).unwrap(), [entry.clone(), other], "the next entry replaces it");
    text.push('\n');
    fs::write(&index, &text).unwrap();
    let error = read_index(&index).unwrap_err();
    assert!(matches!(&error, FileError::WrongFormat { field, .. } if field == "line 2"), "{error}");
    assert_eq!(read_index(&index_path(&folder.path().join("none"))).unwrap(), []);
}

/// `evb files --recover` beside a run adds the file that the run has just completed.
#[test]
fn processes_append_to_an_index_at_the_same_time() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    let [entry] = &write(&base, SequenceOptions::default())[..] else { panic!() };
    let index = index_path(&base);
    let of = |number: usize| IndexEntry { file: format!("run.{number:04}.h5"), ..entry.clone() };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|number| append_to_index(&index, &of(number)).unwrap()));
        }
        scope.spawn(|| (50..100).for_each(|number| append_to_index(&index, &of(number)).unwrap()));
    });
    let mut files: Vec<String> = read_index(&index).unwrap().into_iter().map(|entry| entry.file).collect();
    files.sort();
    let mut expected: Vec<String> =
        (0..100).map(|number| of(number).file).chain([entry.file.clone()]).collect();
    expected.sort();
    assert_eq!(files, expected);
}

#[test]
fn events_of_an_earlier_run_are_refused_or_removed() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run.bu0");
    let rotating = SequenceOptions { rotate_size: Some(Bytes(1_500_000)), ..SequenceOptions::default() };
    let create =
        |options| EventFileSequence::create(&base, Files::open().schema(1), WriteOptions::default(), options);
    let names = || {
        let mut names: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    let first = write(&base, rotating);
    let before = names();
    for options in [rotating, SequenceOptions::default()] {
        let error = create(options).unwrap_err();
        assert!(
            matches!(&error, FileError::EarlierEvents { path, .. } if path.ends_with(&first[0].file)),
            "{error}"
        );
        assert!(error.to_string().contains("replace = true"), "{error}");
    }
    assert_eq!(names(), before);

    // The files of a sequence whose base name starts with this one are another run's.
    let other = folder.path().join("run.bu0.east");
    write(&other, SequenceOptions::default());
    let replacing = SequenceOptions { replace: true, ..SequenceOptions::default() };
    drop(create(replacing).unwrap());
    assert_eq!(names(), ["run.bu0.east.h5", "run.bu0.east.index.jsonl"]);

    // Without files, the index alone is that of a run; files without events are replaced.
    let index = index_path(&base);
    append_to_index(&index, &first[0]).unwrap();
    let error = create(rotating).unwrap_err();
    assert!(matches!(&error, FileError::EarlierEvents { path, .. } if *path == index), "{error}");
    fs::remove_file(&index).unwrap();
    for _ in 0..2 {
        let stored = create(SequenceOptions::default()).unwrap().finish().unwrap();
        assert_eq!(stored[0].events, 0);
    }
    // The partial file of a killed run is recovered, and its events are not mixed with those of the next one.
    let mut killed = create(SequenceOptions::default()).unwrap();
    let files = Files::open();
    killed.append(&files.events(1)[0].event()).unwrap();
    killed.flush().unwrap();
    drop(killed);
    let error = create(SequenceOptions::default()).unwrap_err();
    assert!(
        matches!(&error, FileError::EarlierEvents { path, events: 1, .. } if path.ends_with("run.bu0.recovered.h5")),
        "{error}"
    );
    let [entry] = &read_index(&index).unwrap()[..] else { panic!("the recovered file is not in the index") };
    assert!(entry.recovered && entry.file == "run.bu0.recovered.h5", "{entry:?}");
    entry.verify(folder.path()).unwrap();
}
