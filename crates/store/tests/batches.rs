//! Batch files: what is written is read and unpacked, and what was cut or changed is noticed.

mod common;

use std::fs::{self, File};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use common::{Files, Slot, compare};
use millstream_fragment::{Fragment, SourceId, SourceKind};
use millstream_quantity::Bytes;
use millstream_shm::{Mapping, PAGE};
use millstream_store::{
    Batch, BatchEvent, BatchFileSequence, BatchOptions, BatchReader, BatchWriter, CommittedReader, FileError,
    IndexEntry, Run, Schema, SequenceOptions, Source, WriteOptions, append_to_index, committed_numbers,
    index_path, partials, read_index, recover_partials, unpack,
};
use proptest::prelude::*;
use tempfile::TempDir;

const OPTIONS: BatchOptions = BatchOptions { direct: true, replace: false };

/// Memory whose pages the kernel pins for nobody (memfd_secret(2)), as those of a PCIe BAR. None if the kernel has it switched
/// off, or RLIMIT_MEMLOCK is too small for it.
fn unpinnable(bytes: &[u8]) -> Option<Mapping> {
    // SAFETY: the call takes flags only and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_memfd_secret, 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the descriptor is new, and nothing else owns it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    assert!(file.as_raw_fd() == fd && bytes.len().is_multiple_of(PAGE));
    file.set_len(bytes.len() as u64).unwrap();
    let memory = Mapping::new(file.as_fd(), 0, bytes.len(), true).ok()?;
    for (word, bytes) in memory.words64(0, bytes.len() / 8).iter().zip(bytes.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
    }
    Some(memory)
}

/// A mounted file system that refuses `O_DIRECT` (ramfs); unmounted when dropped, also by a failed test.
struct Ramfs<'p>(&'p Path);

impl<'p> Ramfs<'p> {
    /// None if it cannot be mounted.
    fn mount(at: &'p Path) -> Option<Self> {
        let mounted = Command::new("mount").args(["-t", "ramfs", "none"]).arg(at).status();
        mounted.is_ok_and(|status| status.success()).then(|| Ramfs(at))
    }
}

impl Drop for Ramfs<'_> {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

/// A schema with two sources of bytes.
fn schema() -> Schema {
    let source = |id: u32| Source { id: SourceId(id), kind: SourceKind(7), name: format!("source {id}") };
    Schema {
        run: Run { name: "made".into(), ..Run::default() },
        sources: vec![source(1), source(2)],
        ..Schema::default()
    }
}

/// Starts with event and source, so that no other payload contains it.
fn payload(source: u32, event: u64) -> Vec<u8> {
    let rest = (0..200 + event % 5 * 900).map(|at| (u64::from(source) * 31 + event * 7 + at) as u8);
    event.to_le_bytes().into_iter().chain(source.to_le_bytes()).chain(rest).collect()
}

/// Writes batch `number` of four events, of which the second and the last are stored. Source 2 lacks the last one.
fn append(writer: &mut impl FnMut(&Batch<'_>), number: u64) {
    let first = 4 * number;
    let payloads: Vec<Vec<Vec<u8>>> =
        [1, 2].map(|source| (first..first + 4).map(|event| payload(source, event)).collect()).to_vec();
    let fragments = |source: usize, events: u64| {
        (first..first + events)
            .zip(&payloads[source])
            .map(|(event, payload)| Fragment::new(event, payload))
            .collect()
    };
    let sources =
        [(SourceId(1), SourceKind(7), fragments(0, 4)), (SourceId(2), SourceKind(7), fragments(1, 3))];
    let slot = Slot::new((first, 4), &sources, number as usize * 1000);
    let event =
        |index: u32, fragments| BatchEvent { index, incomplete: fragments < 2, fragments, payload: 0 };
    writer(&Batch {
        batch: number,
        first_event: first,
        n_events: 4,
        events: &[event(1, 2), event(3, 1)],
        decisions: &[],
        readout_lost: false,
        packets: &slot.packets,
        memory: &slot.memory,
    });
}

/// A folder on a file system with direct I/O.
fn folder() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Writes batches 0 to `batches` into a partial file, which a writer that has ended leaves.
fn partial(folder: &Path, batches: u64) -> PathBuf {
    let mut writer = BatchWriter::create(folder.join("made.batches"), &schema(), OPTIONS).unwrap();
    for number in 0..batches {
        let mut add = |batch: &Batch<'_>| {
            writer.append(batch).unwrap();
        };
        append(&mut add, number);
    }
    writer.path()
}

/// Ends of the records of a file.
fn ends(path: &Path) -> Vec<u64> {
    let mut reader = BatchReader::open(path).unwrap();
    let mut lens = Vec::new();
    while let Some(header) = reader.next_header().unwrap() {
        lens.push(header.record_len);
    }
    let start = reader.bytes().0 - lens.iter().sum::<u64>();
    lens.iter()
        .scan(start, |end, len| {
            *end += len;
            Some(*end)
        })
        .collect()
}

#[test]
fn camera_events_are_unpacked_as_they_were_recorded() {
    let files = Files::open();
    let folder = folder();
    let recorded = files.events(2);
    let mut kinds: Vec<Source> = files.schema(2).sources;
    kinds.sort_by_key(|source| source.id);
    for direct in [true, false] {
        let path = folder.path().join("camera.batches");
        let options = BatchOptions { direct, replace: true };
        let mut writer = BatchWriter::create(&path, &files.schema(2), options).unwrap();
        let (mut direct_bytes, mut copied) = (0, 0);
        for events in recorded.chunks(8) {
            let sources: Vec<_> = kinds
                .iter()
                .enumerate()
                .map(|(at, source)| {
                    let fragments = events.iter().map(|event| event.fragments[at].1).collect();
                    (source.id, source.kind, fragments)
                })
                .collect();
            let slot = Slot::new((events[0].number, events.len() as u32), &sources, 0);
            let stored = (0..events.len() as u32)
                .map(|index| BatchEvent { index, incomplete: false, fragments: 30, payload: 0 })
                .collect::<Vec<_>>();
            let decisions: Vec<u8> = events.iter().flat_map(|event| event.decisions).copied().collect();
            let written = writer.append(&Batch {
                batch: events[0].number / 8,
                first_event: events[0].number,
                n_events: events.len() as u32,
                events: &stored,
                decisions: &decisions,
                readout_lost: false,
                packets: &slot.packets,
                memory: &slot.memory,
            });
            let written = written.unwrap();
            direct_bytes += written.direct;
            copied += written.copied;
        }
        let (stored, bytes, checksum) = writer.close().unwrap().complete().unwrap();
        assert_eq!((stored.events, stored.fragments, stored.missing), (64, 64 * 30, 0));
        assert_eq!(bytes.0, fs::metadata(&path).unwrap().len());
        assert_eq!(BatchReader::open(&path).unwrap().verify().unwrap(), checksum);
        assert_eq!((direct_bytes > 0, copied > 0), (direct, !direct));

        let unpacked = folder.path().join("camera.h5");
        let summary =
            unpack(&path, &unpacked, &WriteOptions { replace: true, ..WriteOptions::default() }).unwrap();
        assert_eq!((summary.events, summary.fragments, summary.corrupt), (64, 64 * 30, 0));
        let crates = files.crates.iter().map(|stream| stream.path());
        let streams: Vec<&Path> = crates.chain([files.truth.path()]).collect();
        compare(&unpacked, 2, &streams).unwrap();
    }
}

#[test]
fn packets_that_cannot_be_pinned_are_copied() {
    let folder = folder();
    let expected = partial(folder.path(), 3);
    let expected = fs::read(expected).unwrap();
    let other = folder.path().join("other");
    fs::create_dir(&other).unwrap();
    let mut writer = BatchWriter::create(other.join("made.batches"), &schema(), OPTIONS).unwrap();
    let mut written = Vec::new();
    for number in 0..3 {
        let mut add = |batch: &Batch<'_>| {
            let mut bytes = vec![0; batch.memory.len()];
            assert!(batch.memory.copy_to_slice(0, &mut bytes));
            // The first batch can be pinned; the first one that cannot is written again.
            let secret = (number > 0).then(|| unpinnable(&bytes));
            let memory = match &secret {
                None => batch.memory,
                Some(Some(memory)) => memory,
                Some(None) => return,
            };
            written.push(writer.append(&Batch { memory, ..batch.clone() }).unwrap());
        };
        append(&mut add, number);
    }
    if written.len() < 3 {
        println!(
            "not run: no memory that cannot be pinned; that needs secretmem.enable=1 and RLIMIT_MEMLOCK"
        );
        return;
    }
    assert!(written[0].direct > 0 && written[0].copied == 0, "{written:?}");
    assert!(written[1..].iter().all(|bytes| bytes.direct == 0 && bytes.copied > 0), "{written:?}");
    assert_eq!(fs::read(writer.path()).unwrap(), expected);
}

#[test]
fn a_file_system_without_direct_io_is_named_and_written_through_the_page_cache() {
    let folder = folder();
    let place = folder.path().join("ramfs");
    fs::create_dir(&place).unwrap();
    let Some(_mounted) = Ramfs::mount(&place) else {
        println!("not run: no file system without direct I/O (ramfs) can be mounted; that needs root");
        return;
    };
    let path = place.join("made.batches");
    let refused = BatchWriter::create(&path, &schema(), OPTIONS).unwrap_err();
    let left = fs::read_dir(&place).unwrap().count();
    let mut writer =
        BatchWriter::create(&path, &schema(), BatchOptions { direct: false, ..OPTIONS }).unwrap();
    let mut copied = 0;
    append(&mut |batch: &Batch<'_>| copied = writer.append(batch).unwrap().copied, 0);
    let (stored, ..) = writer.close().unwrap().complete().unwrap();
    let numbers = BatchReader::open(&path).unwrap().next_header().unwrap().map(|header| header.first_event);
    assert!(matches!(&refused, FileError::NoDirectIo(at) if at.starts_with(&place)), "{refused}");
    assert!(refused.to_string().contains("direct = false"), "{refused}");
    assert_eq!((left, stored.events, numbers), (0, 2, Some(0)));
    assert!(copied > 0);
}

#[test]
fn stored_events_are_read_with_their_status() {
    let folder = folder();
    let path = partial(folder.path(), 3);
    let mut reader = BatchReader::open(&path).unwrap();
    assert_eq!(reader.schema().run.name, "made");
    let mut numbers = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        let first = record.header().first_event;
        assert_eq!(record.header().events.iter().map(|event| event.status).collect::<Vec<_>>(), [0, 1]);
        let whole = record.event(0).unwrap();
        let expected = [1, 2].map(|source| (SourceId(source), payload(source, first + 1)));
        let found: Vec<_> =
            whole.fragments().iter().map(|(source, found)| (*source, found.payload.to_vec())).collect();
        assert_eq!(found, expected);
        let incomplete = record.event(1).unwrap();
        assert_eq!(incomplete.fragments().iter().map(|(source, _)| source.0).collect::<Vec<_>>(), [1]);
        numbers.extend([whole.number, incomplete.number]);
    }
    assert_eq!(numbers, [1, 3, 5, 7, 9, 11]);
}

#[test]
fn recovery_keeps_whole_records_and_cuts_what_follows() {
    let folder = folder();
    let path = partial(folder.path(), 4);
    let whole = fs::read(&path).unwrap();
    let ends = ends(&path);
    let block = PAGE as u64;
    let header_end = ends[0] - (ends[1] - ends[0]).min(ends[0] - block);
    for cut in
        [0, 10, header_end, ends[0] - 1, ends[0], ends[1] - block, ends[2] + 1, ends[2] + block, ends[3]]
    {
        fs::write(&path, &whole[..cut as usize]).unwrap();
        let kept = ends.iter().filter(|end| **end <= cut).count() as u64;
        let expected: Vec<u64> = (0..kept).flat_map(|number| [4 * number + 1, 4 * number + 3]).collect();
        assert_eq!(committed_numbers(&path).unwrap(), expected, "cut at {cut}");
        let recovered = recover_partials(folder.path()).unwrap().remove(0).unwrap();
        assert_eq!(recovered.events, 2 * kept, "cut at {cut}");
        assert!(!path.exists() && partials(folder.path()).unwrap().is_empty());
        let Some(to) = recovered.path else {
            assert_eq!(kept, 0);
            continue;
        };
        assert!(to.to_string_lossy().ends_with("made.recovered.batches"), "{}", to.display());
        let reader = BatchReader::open(&to).unwrap();
        assert_eq!(reader.recovered(), Some(2 * kept));
        assert_eq!(reader.numbers().unwrap().0, expected);
        let entry = IndexEntry::of_file(&to).unwrap();
        assert!(entry.recovered);
        entry.verify(folder.path()).unwrap();
        fs::remove_file(to).unwrap();
    }
}

#[test]
fn a_damaged_record_before_whole_ones_is_not_cut() {
    let folder = folder();
    let path = partial(folder.path(), 4);
    let ends = ends(&path);
    let good = fs::read(&path).unwrap();
    let mut reader = BatchReader::open(&path).unwrap();
    reader.next_header().unwrap();
    let packet = reader.next_header().unwrap().unwrap().packets[0].offset;
    // The header of the second record, its magic, and the header of a packet.
    for place in [50, 0, packet + 8] {
        let mut bytes = good.clone();
        bytes[(ends[0] + place) as usize] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let error = recover_partials(folder.path()).unwrap().remove(0).unwrap_err();
        let FileError::RecordsBehindDamage { next, .. } = &error else { panic!("{place}: {error}") };
        assert_eq!(*next, ends[1], "{place}");
        assert!(error.to_string().contains(&format!("record 1 at {}", ends[0])), "{error}");
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
    // As the page says: the records before are recovered from the file cut there.
    File::options().write(true).open(&path).unwrap().set_len(ends[0]).unwrap();
    assert_eq!(recover_partials(folder.path()).unwrap().remove(0).unwrap().events, 2);
}

#[test]
fn a_batch_file_that_cannot_be_unpacked_leaves_no_event_file() {
    let folder = folder();
    let path = partial(folder.path(), 4);
    let last = ends(&path)[2];
    let batches = path.with_extension("");
    fs::rename(&path, &batches).unwrap();
    File::options().write(true).open(&batches).unwrap().write_all_at(b"x", last + 50).unwrap();
    let options = WriteOptions { events_per_write: NonZeroUsize::MIN, ..WriteOptions::default() };
    let error = unpack(&batches, &folder.path().join("made.h5"), &options).unwrap_err();
    assert!(error.to_string().contains("CRC-32"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_partial_file_with_a_damaged_header_is_kept() {
    let folder = folder();
    let path = partial(folder.path(), 2);
    let file = File::options().write(true).open(&path).unwrap();
    // A byte of the schema; the length of the header, which is then beyond the end of the file.
    for (at, problem) in [(40, "CRC-32"), (10, "cut short in its header")] {
        file.write_all_at(b"x", at).unwrap();
        let error = recover_partials(folder.path()).unwrap().remove(0).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
        assert!(path.exists());
    }
}

#[test]
fn a_batch_file_that_was_just_created_is_removed_and_one_of_others_is_kept() {
    let folder = folder();
    let partial = |name: &str| folder.path().join(format!("{name}.batches.partial"));
    fs::write(partial("created"), b"").unwrap();
    fs::write(partial("cut"), b"MSBATCHF\xff\0\0\0").unwrap();
    fs::write(partial("letter"), b"Dear").unwrap();
    let recovered = recover_partials(folder.path()).unwrap();
    assert!(matches!(&recovered[..], [Ok(_), Ok(_), Err(_)]), "{recovered:?}");
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(left, [partial("letter")]);
}

#[test]
fn a_writer_that_lives_is_left_alone() {
    let folder = folder();
    let mut writer = BatchWriter::create(folder.path().join("made.batches"), &schema(), OPTIONS).unwrap();
    append(
        &mut |batch| {
            writer.append(batch).unwrap();
        },
        0,
    );
    assert!(recover_partials(folder.path()).unwrap().is_empty());
    assert_eq!(committed_numbers(&writer.path()).unwrap(), [1, 3]);
    let (stored, ..) = writer.close().unwrap().complete().unwrap();
    assert_eq!((stored.events, stored.missing), (2, 1));
    let error = BatchWriter::create(folder.path().join("made.batches"), &schema(), OPTIONS).unwrap_err();
    assert!(matches!(error, FileError::Exists(_)), "{error}");
}

#[test]
fn what_a_writer_commits_is_read_once() {
    let folder = folder();
    let path = folder.path().join("made.batches");
    let partial = folder.path().join("made.batches.partial");
    fs::write(&partial, b"").unwrap();
    let mut reader = CommittedReader::of_run(&partial, "");
    let mut other = CommittedReader::of_run(&partial, "another");
    // The writer has just created the file.
    assert_eq!(reader.read_new().unwrap(), [0; 0]);
    fs::remove_file(&partial).unwrap();
    let mut writer = BatchWriter::create(&path, &schema(), OPTIONS).unwrap();
    let mut add = |number| append(&mut |batch| _ = writer.append(batch).unwrap(), number);
    add(0);
    add(1);
    assert_eq!(reader.read_new().unwrap(), [1, 3, 5, 7]);
    assert_eq!(reader.read_new().unwrap(), [0; 0]);
    assert_eq!(other.read_new().unwrap(), [0; 0]);
    add(2);
    writer.close().unwrap().complete().unwrap();
    reader.renamed(&path);
    assert_eq!(reader.read_new().unwrap(), [9, 11]);
    assert_eq!(committed_numbers(&path).unwrap(), [1, 3, 5, 7, 9, 11]);
}

#[test]
fn files_rotate_and_the_index_finds_damage() {
    let folder = folder();
    let base = folder.path().join("run.bu0");
    let options = SequenceOptions { rotate_size: Some(Bytes(20 << 10)), ..SequenceOptions::default() };
    let mut sequence = BatchFileSequence::create(&base, schema(), OPTIONS, options).unwrap();
    for number in 0..9 {
        append(
            &mut |batch| {
                sequence.append(batch).unwrap();
            },
            number,
        );
        sequence.flush().unwrap();
    }
    let files = sequence.finish().unwrap();
    assert!(files.len() > 2, "{files:?}");
    let entries = read_index(&index_path(&base)).unwrap();
    assert_eq!(entries.iter().map(|entry| entry.events).sum::<u64>(), 18);
    assert!(entries[1].file == "run.bu0.0002.batches" && entries[1].checksum.starts_with("headers-crc32:"));
    entries.iter().for_each(|entry| entry.verify(folder.path()).unwrap());

    let path = folder.path().join(&entries[1].file);
    let good = fs::read(&path).unwrap();
    let place = |event: u64| {
        let needle = payload(1, event);
        good.windows(needle.len()).position(|window| window == needle).unwrap()
    };
    let stored = entries[1].first_event.unwrap();
    // The first event of the batch is not stored; its fragment follows the header of the packet.
    let (at, unstored) = (place(stored), place(stored - 1));
    // A fragment, the header of its packet, the header of its record, and the length of the file.
    for (place, expected) in [
        (at + 9, "differs from its checksum"),
        (unstored - 1, "packet of"),
        (PAGE + 50, "CRC-32"),
        (50, "CRC-32"),
    ] {
        let mut bytes = good.clone();
        bytes[place] ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = entries[1].verify(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("0002.batches"), "{place}: {error}");
    }
    fs::write(&path, &good[..good.len() - PAGE]).unwrap();
    let error = entries[1].verify(folder.path()).unwrap_err().to_string();
    assert!(error.contains("length"), "{error}");
    append_to_index(&index_path(&base), &entries[0]).unwrap();
    assert_eq!(read_index(&index_path(&base)).unwrap(), entries, "an entry is listed once");
}

#[test]
fn a_batch_that_does_not_match_the_schema_is_refused_and_the_file_goes_on() {
    let folder = folder();
    let mut writer = BatchWriter::create(folder.path().join("made.batches"), &schema(), OPTIONS).unwrap();
    append(
        &mut |batch| {
            writer.append(batch).unwrap();
        },
        0,
    );
    append(
        &mut |batch| {
            let error =
                writer.append(&Batch { decisions: &[1, 2], ..batch.clone() }).unwrap_err().to_string();
            assert!(error.contains("decisions of batch 1 is 2 B, expected 0 B"), "{error}");
            let mut packets = batch.packets.to_vec();
            packets.reverse();
            assert!(writer.append(&Batch { packets: &packets, ..batch.clone() }).is_err());
            writer.append(batch).unwrap();
        },
        1,
    );
    writer.close().unwrap().complete().unwrap();
    let reader = BatchReader::open(folder.path().join("made.batches")).unwrap();
    assert_eq!(reader.numbers().unwrap().0, [1, 3, 5, 7]);
}

#[test]
fn other_files_are_no_batch_files() {
    let folder = folder();
    let path = folder.path().join("other.batches");
    for content in [&b""[..], b"MSBATCHF", b"MSBATCHF\xff\xff\xff\x0f\0\0\0\0", &[0; 8192]] {
        fs::write(&path, content).unwrap();
        assert!(matches!(BatchReader::open(&path), Err(FileError::WrongFormat { .. })));
        assert!(unpack(&path, &folder.path().join("other.h5"), &WriteOptions::default()).is_err());
        assert!(!folder.path().join("other.h5").exists());
    }
}

/// Reads everything of a file; only errors may come of it.
fn read_all(path: &Path) -> Vec<u64> {
    let mut numbers = Vec::new();
    let Ok(mut reader) = BatchReader::open(path) else { return numbers };
    while let Ok(Some(record)) = reader.next_record() {
        for position in 0..record.header().events.len() {
            let event = record.event(position).unwrap();
            assert!(event.fragments().len() <= 2);
            numbers.push(event.number);
        }
    }
    numbers
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn damaged_files_give_whole_events_or_errors(
        cut in 0usize..60_000,
        damage in prop::collection::vec((0usize..60_000, any::<u8>()), 0..4),
    ) {
        let folder = folder();
        let path = partial(folder.path(), 3);
        let mut bytes = fs::read(&path).unwrap();
        bytes.truncate(cut.max(1));
        let len = bytes.len();
        damage.iter().for_each(|&(at, value)| bytes[at % len] = value);
        fs::write(&path, bytes).unwrap();
        let found = read_all(&path);
        // Records are whole or refused, so that the events are the first ones.
        prop_assert_eq!(&found[..], &[1, 3, 5, 7, 9, 11][..found.len()]);
        let _ = unpack(&path, &folder.path().join("made.h5"), &WriteOptions::default());
        for recovered in recover_partials(folder.path()).unwrap().into_iter().flatten() {
            prop_assert_eq!(recovered.events, found.len() as u64);
        }
    }
}
