//! A file with its final name is complete, even if the writer fails or is killed.

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Lines, Read};
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use common::{Files, append_all, listed};
use hdf5_metno::types::VarLenUnicode;
use millstream_fragment::Fragment;
use millstream_store::{
    AppendError, CommittedReader, EventReader, EventWriter, FileError, Recovered, StoreSummary, WriteOptions,
    committed_numbers, recover_partial, recover_partials, refuse_earlier_events, remove_earlier_sequence,
};

const FILE: &str = "MILLSTREAM_STORE_TEST_FILE";

fn create(path: &Path) -> Result<EventWriter, FileError> {
    EventWriter::create(path, &Files::open().schema(1), &in_blocks(64))
}

fn in_blocks(events: usize) -> WriteOptions {
    WriteOptions { events_per_write: NonZeroUsize::new(events).unwrap(), ..WriteOptions::default() }
}

fn write(path: &Path, options: &WriteOptions) -> Result<StoreSummary, FileError> {
    let files = Files::open();
    let mut writer = EventWriter::create(path, &files.schema(1), options)?;
    append_all(&mut writer, &files.events(1));
    writer.finish()
}

/// The command that runs one of the ignored tests below in a child process.
fn process(test: &str, file: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture"]).env(FILE, file);
    command
}

#[test]
#[ignore = "a child process that other tests kill"]
fn write_forever() {
    let files = Files::open();
    let events = files.events(1);
    let file = PathBuf::from(std::env::var_os(FILE).unwrap());
    let mut writer = EventWriter::create(file, &files.schema(1), &in_blocks(64)).unwrap();
    loop {
        append_all(&mut writer, &events);
        println!("written {}", writer.events());
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A writer in a child process that has written some events; killed when dropped.
struct WriterProcess {
    child: Child,
    /// Kept open: the writer would fail on a closed pipe.
    _lines: Lines<BufReader<ChildStdout>>,
}

impl WriterProcess {
    fn start(file: &Path) -> Self {
        let mut child = process("write_forever", file).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().map(Result::unwrap).any(|line| line.ends_with("written 320")));
        Self { child, _lines: lines }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
    }
}

impl Drop for WriterProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks that the file holds the replayed events from the first on, at least `least`, with all their data.
fn check_prefix(path: &Path, least: usize) -> usize {
    let file = EventReader::open(path).unwrap();
    let numbers = file.numbers();
    assert!(numbers.len() >= least, "{} events", numbers.len());
    let files = Files::open();
    let events = files.events(1);
    for (row, number) in numbers.iter().enumerate() {
        let event = &events[row % events.len()];
        assert_eq!(*number, event.number);
        assert!(file.trigger(row).unwrap().unwrap().decisions == event.decisions, "row {row}");
        let traces: Vec<u8> = file.row_u8("camera/trigger_traces", row).unwrap();
        assert!(traces.iter().any(|&sample| sample != 0));
        assert!(file.row_i16("camera/waveforms", row).unwrap().iter().any(|&sample| sample != 0));
        assert_eq!(file.row_u8("events/fragment_state", row).unwrap(), [1; 30]);
    }
    numbers.len()
}

#[test]
fn events_of_a_killed_writer_are_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let partial = folder.path().join("run.h5.partial");
    let mut writer = WriterProcess::start(&path);
    // A reader sees the flushed events while the writer goes on.
    check_prefix(&partial, 320);
    writer.kill();
    assert_eq!(listed(folder.path()), ["run.h5.partial"]);

    // The next writer keeps the events of the dead one.
    assert_eq!(write(&path, &WriteOptions::default()).unwrap().events, 32);
    assert_eq!(listed(folder.path()), ["run.h5", "run.recovered.h5"]);
    assert_eq!(EventReader::open(&path).unwrap().numbers().len(), 32);
    let recovered = check_prefix(&folder.path().join("run.recovered.h5"), 320);

    // h5py reads it as well.
    let script = format!(
        "import h5py; f = h5py.File({:?}); n = f.attrs['recovered']; \
         assert n == {recovered} == len(f['events/number']) == len(f['camera/waveforms']) == len(f['trigger/bits_set']), n",
        folder.path().join("run.recovered.h5")
    );
    let python = Command::new(common::PYTHON).args(["-c", &script]).output().unwrap();
    assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
}

#[test]
fn only_stale_partials_are_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let [dead, alive] = ["dead.h5", "alive.h5"].map(|name| folder.path().join(name));
    let _writing = WriterProcess::start(&alive);
    WriterProcess::start(&dead).kill();
    fs::write(folder.path().join("download.partial"), "not ours").unwrap();
    fs::create_dir(folder.path().join("folder.h5.partial")).unwrap();
    fs::write(folder.path().join("empty.h5.partial"), "").unwrap();
    // Files of other programs, also with names like ours.
    fs::write(folder.path().join("thesis.h5.partial"), "not ours").unwrap();

    let mut recovered = recover_partials(folder.path()).unwrap();
    let foreign = recovered.pop().unwrap().unwrap_err();
    assert!(foreign.to_string().contains("thesis.h5.partial"), "{foreign}");
    let recovered: Result<Vec<_>, _> = recovered.into_iter().collect();
    let [Recovered { path: Some(path), partial, events }, empty] = &recovered.unwrap()[..] else { panic!() };
    assert!(path.ends_with("dead.recovered.h5") && partial.ends_with("dead.h5.partial"));
    assert_eq!(*events as usize, check_prefix(path, 320));
    assert_eq!((empty.path.as_ref(), empty.events), (None, 0));
    let expected = [
        "alive.h5.partial",
        "dead.recovered.h5",
        "download.partial",
        "folder.h5.partial",
        "thesis.h5.partial",
    ];
    assert_eq!(listed(folder.path()), expected);

    let error = create(&alive).unwrap_err();
    assert!(matches!(&error, FileError::Busy(path) if path.ends_with("alive.h5.partial")), "{error}");
}

#[test]
fn a_partial_file_without_events_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let files = Files::open();
    let mut writer = create(&path).unwrap();
    append_all(&mut writer, &files.events(1));
    assert_eq!(listed(folder.path()), ["run.h5.partial"]);
    // 32 events are below the write size.
    drop(writer);
    assert!(listed(folder.path()).is_empty());

    let mut writer = create(&path).unwrap();
    append_all(&mut writer, &files.events(1));
    writer.flush().unwrap();
    assert!(writer.file_bytes().unwrap() > 32 * 158_400);
    drop(writer);
    assert_eq!(listed(folder.path()), ["run.h5.partial"]);
    recover_partials(folder.path()).unwrap().pop().unwrap().unwrap();
    assert_eq!(check_prefix(&folder.path().join("run.recovered.h5"), 32), 32);
}

#[test]
fn committed_events_are_read_once_and_a_new_file_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let partial = folder.path().join("run.h5.partial");
    let mut reader = CommittedReader::of_run(&partial, "sst1m-1");
    let mut other = CommittedReader::of_run(&partial, "sst1m-2");
    // The writer was killed after it had created the file, and then before the HDF5 file could be read by others.
    for len in [0, 16, 4096, 8192] {
        fs::write(&partial, vec![0; len]).unwrap();
        assert_eq!(reader.read_new().unwrap(), [0; 0], "{len} B");
        assert_eq!(committed_numbers(&partial).unwrap(), [0; 0], "{len} B");
    }
    fs::remove_file(&partial).unwrap();
    let files = Files::open();
    let events = files.events(2);
    let numbers: Vec<u64> = events.iter().map(|event| event.number).collect();
    let mut writer = create(&path).unwrap();
    assert_eq!(reader.read_new().unwrap(), [0; 0]);
    append_all(&mut writer, &events[..32]);
    writer.flush().unwrap();
    assert_eq!(reader.read_new().unwrap(), numbers[..32]);
    assert_eq!(other.read_new().unwrap(), [0; 0]);
    append_all(&mut writer, &events[32..40]);
    writer.flush().unwrap();
    append_all(&mut writer, &events[40..41]);
    assert_eq!(reader.read_new().unwrap(), numbers[32..40]);
    assert_eq!(reader.read_new().unwrap(), [0; 0]);
    writer.finish().unwrap();
    reader.renamed(&path);
    assert_eq!(reader.read_new().unwrap(), numbers[40..41]);
    assert_eq!(committed_numbers(&path).unwrap(), numbers[..41]);
}

#[test]
fn a_second_recovery_gets_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    for expected in ["run.recovered.h5", "run.recovered-2.h5"] {
        let mut writer = create(&path).unwrap();
        append_all(&mut writer, &Files::open().events(2));
        drop(writer);
        let recovered = recover_partials(folder.path()).unwrap().pop().unwrap().unwrap();
        assert!(recovered.path.unwrap().ends_with(expected));
    }
}

/// An interrupted recovery of an earlier version, or on a file system without RENAME_NOREPLACE, left an empty file.
#[test]
fn empty_files_with_the_names_of_results_count_as_absent() {
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("run");
    for name in ["run.h5", "run.recovered.h5", "run.recovered.batches"] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    let mut writer = create(&folder.path().join("run.h5")).unwrap();
    append_all(&mut writer, &Files::open().events(2));
    drop(writer);
    let recovered = recover_partials(folder.path()).unwrap().pop().unwrap().unwrap();
    let recovered = recovered.path.unwrap();
    assert!(recovered.ends_with("run.recovered-2.h5"));
    fs::rename(recovered, folder.path().join("kept.h5")).unwrap();
    refuse_earlier_events(&base).unwrap();
    assert_eq!(write(&folder.path().join("run.h5"), &WriteOptions::default()).unwrap().events, 32);
    remove_earlier_sequence(&base, true).unwrap();
    assert_eq!(listed(folder.path()), ["kept.h5", "run.recovered.batches", "run.recovered.h5"]);
}

/// A recovery that cannot rename its file leaves nothing with the name of a result.
#[test]
fn a_recovery_that_ends_before_its_rename_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = create(&folder.path().join("run.h5")).unwrap();
    append_all(&mut writer, &Files::open().events(2));
    drop(writer);
    let killed = process("recover_without_renames", folder.path()).output().unwrap();
    assert_eq!(killed.status.signal(), Some(libc::SIGSYS), "{killed:?}");
    assert_eq!(listed(folder.path()), ["run.h5.partial"]);
    assert_eq!(recover_partials(folder.path()).unwrap().remove(0).unwrap().events, 64);
    assert_eq!(listed(folder.path()), ["run.recovered.h5"]);
}

#[test]
#[ignore = "a child process of another test"]
fn recover_without_renames() {
    common::die_in(&[libc::SYS_renameat, libc::SYS_renameat2]);
    let _ = recover_partials(Path::new(&std::env::var_os(FILE).unwrap()));
}

#[test]
fn existing_file_is_replaced_only_with_the_option() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    write(&path, &WriteOptions::default()).unwrap();
    let error = write(&path, &WriteOptions::default()).unwrap_err();
    assert!(matches!(&error, FileError::Exists(found) if *found == path), "{error}");

    let replace = WriteOptions { replace: true, ..WriteOptions::default() };
    let writer = EventWriter::create(&path, &Files::open().schema(1), &replace).unwrap();
    assert_eq!(
        EventReader::open(&path).unwrap().numbers().len(),
        32,
        "the old file remains until the new one is complete"
    );
    writer.finish().unwrap();
    assert_eq!(EventReader::open(&path).unwrap().numbers().len(), 0);
    assert_eq!(listed(folder.path()), ["run.h5"]);
}

#[test]
fn replaced_partial_file_is_not_renamed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let writer = create(&path).unwrap();
    let partial = folder.path().join("run.h5.partial");
    fs::remove_file(&partial).unwrap();
    fs::write(&partial, "somebody else's").unwrap();
    let error = writer.finish().unwrap_err();
    assert!(matches!(error, FileError::PartialReplaced(_)), "{error}");
    assert_eq!(listed(folder.path()), ["run.h5.partial"]);
    assert_eq!(fs::read(&partial).unwrap(), b"somebody else's");
}

#[test]
fn errors_name_unwritable_paths() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    for parent in [folder.path().join("none"), file, PathBuf::from("/proc/self")] {
        let path = parent.join("run.h5");
        let error = create(&path).unwrap_err();
        let shown = error.to_string();
        assert!(matches!(error, FileError::Io { .. }), "{shown}");
        assert!(shown.contains(path.to_str().unwrap()), "{shown}");
    }
    let error = create(&folder.path().join("run.hdf")).unwrap_err();
    assert!(matches!(error, FileError::WrongExtension { .. }), "{error}");
}

#[test]
#[ignore = "a child process with a file size limit"]
fn write_beyond_the_limit() {
    let files = Files::open();
    let events = files.events(4);
    let file = PathBuf::from(std::env::var_os(FILE).unwrap());
    let mut writer = EventWriter::create(&file, &files.schema(1), &in_blocks(8)).unwrap();
    let failed = events.iter().find_map(|event| writer.append(&event.event()).err());
    let Some(AppendError::File(error)) = failed else { panic!("{failed:?}") };
    println!("first: {error}");
    let Err(AppendError::File(error)) = writer.append(&events[0].event()) else {
        panic!("a failed writer accepted an event")
    };
    println!("then: {error}");
    println!("last: {}", writer.finish().unwrap_err());
    assert!(!file.exists());
}

#[test]
fn full_disk_is_reported_with_file_and_dataset() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let child = process("write_beyond_the_limit", &path);
    // A file size limit fails writes like a full disk, without root: 8,000 blocks of 512 B.
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"trap "" XFSZ; ulimit -f 8000; exec "$@""#, "sh"]);
    shell.arg(child.get_program()).args(child.get_args()).env(FILE, &path);
    let mut child = shell.stdout(Stdio::piped()).spawn().unwrap();
    let mut shown = String::new();
    child.stdout.take().unwrap().read_to_string(&mut shown).unwrap();
    assert!(child.wait().unwrap().success(), "{shown}");

    let line = |start: &str| shown.lines().find_map(|line| line.split_once(start)).unwrap().1;
    let partial = folder.path().join("run.h5.partial");
    let file = partial.to_str().unwrap();
    let first = line("first: ");
    let object = first.strip_prefix(&format!("{file}: cannot write ")).unwrap_or_else(|| panic!("{first}"));
    assert!(object.ends_with(": File too large"), "{first}");
    assert_eq!(line("then: "), format!("{file}: incomplete, because an earlier write failed"));
    assert_eq!(line("last: "), line("then: "));
    assert_eq!(listed(folder.path()), ["run.h5.partial"]);
    // 4,096,000 B hold up to 25 events, written in blocks of 8.
    let recovered = recover_partials(folder.path()).unwrap().pop().unwrap().unwrap();
    assert!([16, 24].contains(&recovered.events), "{recovered:?}");
    assert_eq!(listed(folder.path()), ["run.recovered.h5"]);
    check_prefix(&folder.path().join("run.recovered.h5"), 16);
}

#[test]
fn event_error_leaves_the_writer_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let files = Files::open();
    let mut events = files.events(1);
    let mut writer = create(&path).unwrap();
    append_all(&mut writer, &events[..2]);

    let mut refuse = |change: &dyn Fn(&mut common::Recorded<'_>), expected: &str| {
        let mut event = common::Recorded { fragments: events[2].fragments.clone(), ..events[2] };
        change(&mut event);
        let Err(AppendError::Event(refusal)) = writer.append(&event.event()) else { panic!("{expected}") };
        assert_eq!(refusal.to_string(), expected);
    };
    refuse(&|event| event.fragments[7].0.0 = 0x108, "event 1027890: two fragments of source 0x108");
    refuse(&|event| event.fragments[7].0.0 = 0x99, "event 1027890: the schema has no source 0x99");
    refuse(
        &|event| event.fragments[29].1.event = 4,
        "event 1027890: the fragment of source 0x30f belongs to event 4",
    );
    refuse(&|event| event.decisions = &[], "event 1027890: the decision map has 0 bytes, expected 2700");

    let damaged = vec![0xA5; 4800];
    events[3].fragments[0].1.payload = &damaged;
    events[4].fragments.remove(5);
    // Of another length than its part of the array, with a correct checksum.
    let short = Fragment::new(events[5].number, &events[5].fragments[7].1.payload[1..]);
    events[5].fragments[7].1 = short;
    append_all(&mut writer, &events[3..6]);
    let stored = writer.finish().unwrap();
    assert_eq!((stored.events, stored.corrupt, stored.missing), (5, 2, 1));

    let file = EventReader::open(&path).unwrap();
    assert_eq!(file.numbers(), [1027888, 1027889, 1027891, 1027892, 1027893]);
    let status: Vec<u8> = (0..5).map(|row| file.row_u8("events/status", row).unwrap()[0]).collect();
    assert_eq!(status, [0, 0, 2, 1, 2]);
    assert_eq!(file.row_u8("events/fragment_state", 4).unwrap()[6..9], [1, 2, 1]);
    let waveforms = file.row_i16("camera/waveforms", 4).unwrap();
    assert!(waveforms[7 * 2400..8 * 2400].iter().all(|&sample| sample == 0));
    assert!(waveforms[8 * 2400..9 * 2400].iter().any(|&sample| sample != 0));
    assert_eq!(file.row_u8("events/fragment_state", 2).unwrap()[..2], [2, 1]);
    assert_eq!(file.row_u8("events/fragment_state", 3).unwrap()[4..7], [1, 0, 1]);
    let waveforms = file.row_i16("camera/waveforms", 3).unwrap();
    assert!(waveforms[5 * 2400..6 * 2400].iter().all(|&sample| sample == 0));
    let expected = events[4].fragments[5].1.payload.chunks_exact(2);
    let expected: Vec<i16> = expected.map(|bytes| i16::from_le_bytes([bytes[0], bytes[1]])).collect();
    assert_eq!(waveforms[6 * 2400..7 * 2400], expected);
    let trigger = file.trigger(0).unwrap().unwrap();
    assert_eq!(trigger.decisions, events[0].decisions);
}

/// Files with a commit record whose datasets do not fit together.
#[test]
fn partial_files_with_wrong_shapes_are_kept_and_named() {
    let folder = tempfile::tempdir().unwrap();
    for (name, sources, columns, rows) in [("none", 0, 0, 1), ("few", 2, 1, 1), ("many", 1, 1, 1 << 50)] {
        let path = folder.path().join(format!("{name}.h5.partial"));
        let file = hdf5_metno::File::with_options()
            .with_fapl(|access| access.libver_v110())
            .with_fcpl(|create| create.userblock(4096))
            .create(&path)
            .unwrap();
        let group = file.create_group("sources").unwrap();
        let datasets: Vec<VarLenUnicode> = (0..sources).map(|_| "array".parse().unwrap()).collect();
        group.new_dataset_builder().with_data(&datasets).create("dataset").unwrap();
        let array = file.new_dataset::<u8>().chunk((1, 2)).shape((rows, 2)).create("array").unwrap();
        let dimensions: [VarLenUnicode; 2] = ["event".parse().unwrap(), "place".parse().unwrap()];
        array.new_attr_builder().with_data(&dimensions).create("dimensions").unwrap();
        let events = file.create_group("events").unwrap();
        let plain = events.new_dataset::<u8>().chunk(1).shape(rows).create("status").unwrap();
        plain.new_attr_builder().with_data(&dimensions[..1]).create("dimensions").unwrap();
        let state = events.new_dataset::<u8>().chunk((1, 1)).shape((rows, columns)).create("fragment_state");
        state.unwrap().new_attr_builder().with_data(&dimensions).create("dimensions").unwrap();
        for name in ["fragment_length", "fragment_crc32"] {
            let of_source = events.new_dataset::<u32>().chunk((1, 1)).shape((rows, columns)).create(name);
            of_source.unwrap().new_attr_builder().with_data(&dimensions).create("dimensions").unwrap();
        }
        file.close().unwrap();
        let record = File::options().write(true).open(&path).unwrap();
        record.write_all_at(b"MSEVENTS\x01\0\0\0\0\0\0\0", 0).unwrap();
        let recovered = recover_partial(&path);
        assert!(recovered.is_err() || name == "many", "{recovered:?}");
    }
    assert_eq!(listed(folder.path())[..1], ["few.h5.partial"]);
}

/// All data of each row of a file.
type Rows = Vec<(u64, Vec<i16>, Vec<u8>, Vec<u8>)>;

fn rows(path: &Path) -> Rows {
    let file = EventReader::open(path).unwrap();
    let row = |(row, &number): (usize, &u64)| {
        let waveforms = file.row_i16("camera/waveforms", row).unwrap();
        let traces = file.row_u8("camera/trigger_traces", row).unwrap();
        (number, waveforms, traces, file.trigger(row).unwrap().unwrap().decisions)
    };
    file.numbers().iter().enumerate().map(row).collect()
}

/// HDF5 overwrites metadata in place: a crash of the host during a write leaves some pages from before and some from after it.
#[test]
fn a_file_with_pages_of_different_times_is_recovered_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let partial = folder.path().join("run.h5.partial");
    let recovered = folder.path().join("run.recovered.h5");
    let files = Files::open();
    let events = files.events(1);
    let mut writer = create(&path).unwrap().commit_on_sync();
    append_all(&mut writer, &events[..10]);
    writer.flush().unwrap();
    writer.sync().unwrap();
    let durable = fs::read(&partial).unwrap();
    append_all(&mut writer, &events[10..]);
    writer.flush().unwrap();
    let written = fs::read(&partial).unwrap();
    drop(writer);
    assert_eq!(recover_partials(folder.path()).unwrap().remove(0).unwrap().events, 10);
    let whole = rows(&recovered);
    assert_eq!(whole.len(), 10);
    let pages = (0..durable.len().min(written.len())).step_by(4096).map(|at| at..at + 4096);
    let changed: Vec<_> =
        pages.filter(|page| durable.get(page.clone()) != written.get(page.clone())).collect();
    // One page from before, one from after, and random halves of the pages.
    let single = (0..changed.len()).map(|page| (0..changed.len()).map(|other| page == other).collect());
    let mut newer: Vec<Vec<bool>> = single.collect();
    newer
        .extend(newer.clone().into_iter().map(|pages| pages.into_iter().map(|is_newer| !is_newer).collect()));
    let mut random = 1u64;
    newer.extend((0..20).map(|_| {
        let next = |random: u64| random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut is_newer = || {
            random = next(random);
            random >> 63 == 1
        };
        changed.iter().map(|_| is_newer()).collect()
    }));
    let images = newer.len();
    let mut refused = Vec::new();
    for newer in newer {
        let mut image = durable.clone();
        image.resize(written.len(), 0);
        image[durable.len()..].copy_from_slice(&written[durable.len()..]);
        for page in changed.iter().zip(newer).filter_map(|(page, is_newer)| is_newer.then_some(page)) {
            image[page.clone()].copy_from_slice(&written[page.clone()]);
        }
        fs::write(&partial, &image).unwrap();
        let _ = fs::remove_file(&recovered);
        match recover_partials(folder.path()).unwrap().remove(0) {
            Ok(_) => assert!(rows(&recovered) == whole),
            Err(error) => {
                assert!(error.to_string().starts_with(partial.to_str().unwrap()), "{error}");
                let is_unchanged = fs::read(&partial).unwrap().starts_with(&image);
                assert!(is_unchanged || !matches!(error, FileError::UnreadableRow { .. }), "{error}");
                refused.push(error);
            }
        }
    }
    assert!(!refused.is_empty() && refused.len() < images, "{images} images: {refused:#?}");
}

/// As `docs/output.md` says: the rows before a damaged one are recovered once the record is that of these rows.
#[test]
fn a_damaged_event_is_named_and_those_before_it_can_be_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.h5");
    let partial = folder.path().join("run.h5.partial");
    let files = Files::open();
    let mut writer = create(&path).unwrap();
    append_all(&mut writer, &files.events(1));
    writer.flush().unwrap();
    drop(writer);
    let mut image = fs::read(&partial).unwrap();
    // Part of one fragment of the event in row 7.
    let fragment = &files.events(1)[7].fragments[3].1.payload[..64];
    let place = image.windows(64).position(|window| window == fragment).unwrap();
    image[place] ^= 1;
    fs::write(&partial, &image).unwrap();
    let error = recover_partials(folder.path()).unwrap().remove(0).unwrap_err();
    assert!(matches!(error, FileError::UnreadableRow { row: 7, rows: 32, .. }), "{error}");
    assert!(
        error.to_string().contains("camera/waveforms has no fragment with the recorded CRC-32"),
        "{error}"
    );
    assert!(fs::read(&partial).unwrap() == image);
    let error = create(&path).unwrap_err();
    assert!(matches!(error, FileError::UnreadableRow { .. }), "{error}");

    image[8..16].copy_from_slice(&7u64.to_le_bytes());
    fs::write(&partial, &image).unwrap();
    assert_eq!(recover_partials(folder.path()).unwrap().remove(0).unwrap().events, 7);
    assert_eq!(rows(&folder.path().join("run.recovered.h5")).len(), 7);
}
