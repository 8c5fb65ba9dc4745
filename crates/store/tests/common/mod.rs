//! The camera's recorded data as events and as a schema, and batches in landing memory.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use millstream_camera::trigger::TriggerGeometry;
use millstream_camera::{PixelGeometry, columns};
use millstream_fragment::mfp::{self, Repr};
use millstream_fragment::stream::Stream;
use millstream_fragment::unpack::unpack;
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use millstream_shm::{Mapping, Memfd, PAGE};
use millstream_store::{Attribute, BatchPacket, Event, EventWriter, InputFile, Run, Schema, Source};

/// One event, with its fragments in the mapped files.
pub(crate) struct Recorded<'a> {
    pub(crate) number: u64,
    pub(crate) fragments: Vec<(SourceId, Fragment<'a>)>,
    pub(crate) decisions: &'a [u8],
}

impl Recorded<'_> {
    pub(crate) fn event(&self) -> Event<'_> {
        let (number, fragments) = (self.number, &self.fragments);
        Event { number, batch: number / 8, fragments, decisions: self.decisions, readout_lost: false }
    }
}

pub(crate) fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m")
}

/// The three crates' files, and the decisions of the camera's trigger.
pub(crate) struct Files {
    pub(crate) crates: Vec<Stream>,
    pub(crate) truth: Stream,
}

impl Files {
    pub(crate) fn open() -> Self {
        let unpacked = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sst1m");
        let mut streams: Vec<Stream> =
            unpack(&data(), &unpacked).unwrap().iter().map(|file| Stream::open(file).unwrap()).collect();
        let truth = streams.iter().position(|stream| stream.path().ends_with("decisions.mfs")).unwrap();
        let truth = streams.remove(truth);
        assert_eq!(streams.len(), 3);
        Self { crates: streams, truth }
    }

    pub(crate) fn schema(&self, replay: u64) -> Schema {
        let inputs = self.crates.iter().map(|stream| InputFile {
            name: stream.path().file_name().unwrap().to_str().unwrap().to_owned(),
            bytes: stream.mapping().len() as u64,
            checksum: format!("crc32:{:08x}", Fragment::new(0, stream.mapping()).crc),
        });
        let run = Run {
            name: "sst1m test".into(),
            instance: "sst1m-1".into(),
            replay,
            software: concat!("millstream ", env!("CARGO_PKG_VERSION")).into(),
            inputs: inputs.collect(),
            attributes: vec![
                ("trigger_kernel".into(), Attribute::Text("cluster7".into())),
                ("trigger_threshold".into(), Attribute::Integer(336)),
                ("sample_interval_ns".into(), Attribute::Real(4.0)),
            ],
        };
        let sources = self.crates.iter().flat_map(|stream| stream.sources()).map(Source::from).collect();
        let trigger = TriggerGeometry::load(&data().join("patches.csv")).unwrap();
        let pixels = PixelGeometry::load(&data().join("pixels.csv")).unwrap();
        columns::schema(run, sources, Some(&trigger), Some(&pixels))
    }

    /// All events, `replay` times, with consecutive numbers.
    pub(crate) fn events(&self, replay: u64) -> Vec<Recorded<'_>> {
        let recorded = self.truth.events();
        let len = recorded.end - recorded.start;
        let event = |number: u64| {
            let original = recorded.start + (number - recorded.start) % len;
            let sources = self.crates.iter().flat_map(|stream| stream.sources());
            let fragments = sources.map(|source| {
                let found = source.fragment(source.find(original).unwrap()).unwrap();
                (source.id(), Fragment { event: number, ..found })
            });
            let fragments = fragments.collect();
            let truth = self.truth.sources().next().unwrap();
            let decisions = truth.fragment(truth.find(original).unwrap()).unwrap().payload;
            Recorded { number, fragments, decisions }
        };
        (recorded.start..recorded.start + replay * len).map(event).collect()
    }
}

pub(crate) fn append_all(writer: &mut EventWriter, events: &[Recorded<'_>]) {
    for event in events {
        writer.append(&event.event()).unwrap();
    }
}

/// A slot of landing memory with the packets of a batch.
pub(crate) struct Slot {
    pub(crate) memory: Mapping,
    pub(crate) packets: Vec<BatchPacket>,
}

impl Slot {
    /// The packets of the sources, with a gap before each.
    pub(crate) fn new(
        (first_event, n_events): (u64, u32),
        sources: &[(SourceId, SourceKind, Vec<Fragment<'_>>)],
        gap: usize,
    ) -> Slot {
        let mut bytes = vec![0xee; PAGE];
        let mut packets = Vec::new();
        for (source, kind, fragments) in sources {
            let (source, kind, n_fragments) = (*source, *kind, fragments.len() as u32);
            let alignment = Alignment::CACHE_LINE;
            let repr = Repr { source, kind, first_event, n_events, n_fragments, alignment };
            let room: usize = fragments.iter().map(|fragment| fragment.payload.len() + 64).sum();
            let mut packet = vec![0; repr.header_len() as usize + room];
            let len = mfp::assemble(&mut packet, repr, fragments).unwrap();
            let header_len = repr.header_len() as u32;
            let header_crc = crc32fast::hash(&packet[..header_len as usize]);
            bytes.resize((bytes.len() + gap).next_multiple_of(64), 0xee);
            let offset = bytes.len();
            packets.push(BatchPacket { source: source.0, kind: kind.0, offset, len, header_len, header_crc });
            bytes.extend(&packet[..len as usize]);
        }
        bytes.resize(bytes.len().next_multiple_of(PAGE), 0xee);
        let file = Memfd::sealed("slot", bytes.len()).unwrap();
        File::from(file.as_fd().try_clone_to_owned().unwrap()).write_all_at(&bytes, 0).unwrap();
        Slot { memory: file.map().unwrap(), packets }
    }
}

/// Names of the files in a folder.
pub(crate) fn listed(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

const SYNCS: [libc::c_long; 2] = [libc::SYS_fsync, libc::SYS_fdatasync];

/// From here on, fsync(2) and fdatasync(2) of this thread, and of threads that it starts, fail with EIO, as on a disk that fails.
pub(crate) fn fail_syncs() {
    answer(&SYNCS, libc::SECCOMP_RET_ERRNO | libc::EIO as u32);
}

/// From here on, fsync(2) and fdatasync(2) of this thread kill the process, as a signal does that came while they waited.
pub(crate) fn die_in_sync() {
    die_in(&SYNCS);
}

/// From here on, these system calls of this thread kill the process.
pub(crate) fn die_in(calls: &[libc::c_long]) {
    answer(calls, libc::SECCOMP_RET_KILL_PROCESS);
}

/// Answers these system calls of this thread, and of threads that it starts.
fn answer(calls: &[libc::c_long], with: u32) {
    let [load, equal, answer] = [
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    ]
    .map(|code| code as u16);
    let step = |code, k, jt| libc::sock_filter { code, jt, jf: 0, k };
    // The number of the system call is the first field.
    let mut filter = vec![step(load, 0, 0)];
    // The answer follows the comparisons and the permission.
    let distance = |position: usize| (calls.len() - position) as u8;
    filter.extend(calls.iter().enumerate().map(|(at, &call)| step(equal, call as u32, distance(at))));
    filter.extend([step(answer, libc::SECCOMP_RET_ALLOW, 0), step(answer, with, 0)]);
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter applies to this thread, and the kernel copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// Debian's Python, with h5py.
pub(crate) const PYTHON: &str = "/usr/bin/python3";

/// Runs `compare.py` with h5py. Returns its error output.
pub(crate) fn compare(file: &Path, replay: u32, streams: &[&Path]) -> Result<(), String> {
    let has_h5py = Command::new(PYTHON).args(["-c", "import h5py, numpy"]).output();
    assert!(
        has_h5py.is_ok_and(|ran| ran.status.success()),
        "{PYTHON} has no h5py: apt-get install python3-h5py"
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compare.py");
    let mut command = Command::new(PYTHON);
    command.arg(script).arg(file).arg(replay.to_string()).args(streams);
    let ran = command.output().unwrap();
    if ran.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&ran.stderr).into_owned()) }
}
