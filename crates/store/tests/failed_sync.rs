//! A file that cannot be synced: the kernel reports a failed write-back once, so nobody may ask again and believe the answer.

mod common;

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Files, Slot, die_in_sync, fail_syncs, listed};
use millstream_fragment::{Fragment, SourceId, SourceKind};
use millstream_store::{
    Batch, BatchEvent, BatchFileSequence, BatchOptions, BatchReader, EventFileSequence, EventReader,
    FileError, Run, Schema, SequenceOptions, Source, WriteOptions, committed_numbers, index_path, read_index,
    recover_partials,
};

const EACH_FLUSH: SequenceOptions =
    SequenceOptions { rotate_size: None, rotate_interval: None, sync_on_flush: true, replace: false };

fn event_files(base: &Path, files: &Files, options: SequenceOptions) -> EventFileSequence {
    let write = WriteOptions { events_per_write: NonZeroUsize::new(4).unwrap(), ..WriteOptions::default() };
    EventFileSequence::create(base, files.schema(1), write, options).unwrap()
}

/// Runs `body` on a thread of its own, which alone loses its disk.
fn on_thread(body: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(body).join().unwrap());
}

/// Recovers the partial files of a folder. Returns the events of each.
fn recovered(folder: &Path) -> Vec<u64> {
    recover_partials(folder).unwrap().into_iter().map(|recovered| recovered.unwrap().events).collect()
}

#[test]
fn events_of_a_failed_sync_are_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    let files = Files::open();
    on_thread(|| {
        let mut sequence = event_files(&base, &files, EACH_FLUSH);
        let events = files.events(1);
        events[..8].iter().for_each(|event| sequence.append(&event.event()).unwrap());
        sequence.flush().unwrap();
        events[8..16].iter().for_each(|event| sequence.append(&event.event()).unwrap());
        fail_syncs();
        let error = sequence.flush().unwrap_err();
        assert!(error.to_string().contains("run.h5.partial"), "{error}");
        let error = sequence.append(&events[20].event()).unwrap_err();
        assert!(error.to_string().contains("run.h5.partial"), "{error}");
        sequence.finish().unwrap_err();
    });
    assert_eq!(listed(folder.path()), ["run.h5.partial"]);
    assert_eq!(committed_numbers(&folder.path().join("run.h5.partial")).unwrap().len(), 8);
    assert_eq!(recovered(folder.path()), [8]);
    assert_eq!(EventReader::open(folder.path().join("run.recovered.h5")).unwrap().numbers().len(), 8);
}

#[test]
fn a_file_whose_first_sync_failed_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    let files = Files::open();
    on_thread(|| {
        let mut sequence = event_files(&base, &files, EACH_FLUSH);
        fail_syncs();
        sequence.append(&files.events(1)[0].event()).unwrap();
        sequence.flush().unwrap_err();
        sequence.finish().unwrap_err();
    });
    assert!(listed(folder.path()).is_empty(), "{:?}", listed(folder.path()));
}

#[test]
fn a_complete_file_that_cannot_be_synced_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    let files = Files::open();
    on_thread(|| {
        let mut sequence = event_files(&base, &files, SequenceOptions::default());
        for event in files.events(1) {
            sequence.append(&event.event()).unwrap();
        }
        sequence.flush().unwrap();
        fail_syncs();
        let error = sequence.finish().unwrap_err();
        assert!(matches!(error, FileError::NotSynced { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("run.h5: cannot sync: ") && text.ends_with("run.h5.not-synced"), "{text}");
    });
    // Neither complete, nor in an index, nor recovered by the next run.
    assert_eq!(listed(folder.path()), ["run.h5.not-synced"]);
    assert!(recovered(folder.path()).is_empty());
    // An operator who knows that the disk is sound takes it nevertheless.
    fs::rename(folder.path().join("run.h5.not-synced"), folder.path().join("run.h5.partial")).unwrap();
    assert_eq!(recovered(folder.path()), [32]);
}

#[test]
fn a_recovered_file_that_cannot_be_synced_is_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    let files = Files::open();
    let mut sequence = event_files(&base, &files, SequenceOptions::default());
    sequence.append(&files.events(1)[0].event()).unwrap();
    sequence.flush().unwrap();
    drop(sequence);
    on_thread(|| {
        fail_syncs();
        let [Err(error)] = &recover_partials(folder.path()).unwrap()[..] else { panic!("recovered") };
        assert!(matches!(error, FileError::NotSynced { .. }), "{error}");
    });
    assert_eq!(listed(folder.path()), ["run.h5.not-synced"]);
}

/// Writes batch `number` of two events of one source.
fn append(sequence: &mut BatchFileSequence, number: u64) -> Result<(), FileError> {
    let first = 2 * number;
    let payload = [number as u8; 1000];
    let fragments = [Fragment::new(first, &payload), Fragment::new(first + 1, &payload)];
    let slot = Slot::new((first, 2), &[(SourceId(1), SourceKind(7), fragments.to_vec())], 0);
    let event = |index| BatchEvent { index, incomplete: false, fragments: 1, payload: 1000 };
    let batch = Batch {
        batch: number,
        first_event: first,
        n_events: 2,
        events: &[event(0), event(1)],
        decisions: &[],
        readout_lost: false,
        packets: &slot.packets,
        memory: &slot.memory,
    };
    sequence.append(&batch).map(drop)
}

fn batch_files(base: &Path, options: SequenceOptions) -> BatchFileSequence {
    let schema = Schema {
        run: Run { name: "made".into(), ..Run::default() },
        sources: vec![Source { id: SourceId(1), kind: SourceKind(7), name: "source 1".into() }],
        ..Schema::default()
    };
    BatchFileSequence::create(base, schema, BatchOptions { direct: false, replace: false }, options).unwrap()
}

#[test]
fn batches_of_a_failed_sync_are_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    let create = |options| batch_files(&base, options);
    on_thread(|| {
        let mut sequence = create(EACH_FLUSH);
        append(&mut sequence, 0).unwrap();
        sequence.flush().unwrap();
        fail_syncs();
        append(&mut sequence, 1).unwrap();
        sequence.flush().unwrap_err();
        append(&mut sequence, 2).unwrap_err();
        sequence.flush().unwrap_err();
        sequence.finish().unwrap_err();
    });
    assert_eq!(listed(folder.path()), ["run.batches.partial"]);
    assert_eq!(committed_numbers(&folder.path().join("run.batches.partial")).unwrap(), [0, 1]);
    assert_eq!(recovered(folder.path()), [2]);
    fs::remove_file(folder.path().join("run.recovered.batches")).unwrap();

    on_thread(|| {
        let mut sequence = create(SequenceOptions::default());
        append(&mut sequence, 0).unwrap();
        fail_syncs();
        let error = sequence.finish().unwrap_err();
        assert!(matches!(error, FileError::NotSynced { .. }), "{error}");
    });
    assert_eq!(listed(folder.path()), ["run.batches.not-synced"]);
}

const BASE: &str = "MILLSTREAM_STORE_TEST_BASE";

/// Runs one of the ignored tests below in a child process, which dies in the sync of its second flush.
fn die_in_second_sync(test: &str, base: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let died = command.args([test, "--exact", "--ignored"]).env(BASE, base).output().unwrap();
    assert_eq!(died.status.signal(), Some(libc::SIGSYS), "{died:?}");
}

#[test]
#[ignore = "a child process of another test"]
fn write_events_and_die_in_sync() {
    let files = Files::open();
    let mut sequence = event_files(&PathBuf::from(std::env::var_os(BASE).unwrap()), &files, EACH_FLUSH);
    for events in files.events(1)[..16].chunks(8) {
        events.iter().for_each(|event| sequence.append(&event.event()).unwrap());
        if events[0].number == files.events(1)[8].number {
            die_in_sync();
        }
        sequence.flush().unwrap();
    }
}

#[test]
#[ignore = "a child process of another test"]
fn write_batches_and_die_in_sync() {
    let mut sequence = batch_files(&PathBuf::from(std::env::var_os(BASE).unwrap()), EACH_FLUSH);
    append(&mut sequence, 0).unwrap();
    append(&mut sequence, 1).unwrap();
    sequence.flush().unwrap();
    die_in_sync();
    append(&mut sequence, 2).unwrap();
    append(&mut sequence, 3).unwrap();
    sequence.flush().unwrap();
}

/// A builder unit hangs in a sync, which fails in the end, and is killed: another one must not find the events stored.
#[test]
fn events_of_a_writer_that_dies_in_a_sync_are_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    die_in_second_sync("write_events_and_die_in_sync", &base);
    assert_eq!(committed_numbers(&folder.path().join("run.h5.partial")).unwrap().len(), 8);
    assert_eq!(recovered(folder.path()), [8]);
    assert_eq!(EventReader::open(folder.path().join("run.recovered.h5")).unwrap().numbers().len(), 8);
}

#[test]
fn batches_of_a_writer_that_dies_in_a_sync_are_not_stored() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    die_in_second_sync("write_batches_and_die_in_sync", &base);
    assert_eq!(committed_numbers(&folder.path().join("run.batches.partial")).unwrap(), [0, 1, 2, 3]);
    assert_eq!(recovered(folder.path()), [4]);
    let recovered = folder.path().join("run.recovered.batches");
    assert_eq!(BatchReader::open(recovered).unwrap().numbers().unwrap().0, [0, 1, 2, 3]);
}

/// With `sync_on_flush`, an event counts as stored once it is durable, also if the writer has written it earlier.
#[test]
fn only_durable_events_are_committed() {
    let folder = tempfile::tempdir().unwrap();
    let files = Files::open();
    let events = files.events(1);
    let mut sequence = event_files(&folder.path().join("events"), &files, EACH_FLUSH);
    events[..9].iter().for_each(|event| sequence.append(&event.event()).unwrap());
    let mut batches = batch_files(&folder.path().join("batches"), EACH_FLUSH);
    (0..3).for_each(|number| append(&mut batches, number).unwrap());
    let stored = || {
        ["events.h5.partial", "batches.batches.partial"]
            .map(|name| committed_numbers(&folder.path().join(name)).unwrap().len())
    };
    assert_eq!(stored(), [0, 0]);
    sequence.flush().unwrap();
    batches.flush().unwrap();
    assert_eq!(stored(), [9, 6]);
    sequence.append(&events[9].event()).unwrap();
    append(&mut batches, 3).unwrap();
    sequence.finish().unwrap();
    batches.finish().unwrap();
    let [events, batches] = ["events.h5", "batches.batches"].map(|name| folder.path().join(name));
    assert_eq!(committed_numbers(&events).unwrap().len(), 10);
    assert_eq!(committed_numbers(&batches).unwrap(), (0..8).collect::<Vec<_>>());
    for base in ["events", "batches"] {
        let entries = read_index(&index_path(&folder.path().join(base))).unwrap();
        entries.iter().for_each(|entry| entry.verify(folder.path()).unwrap());
    }
}
