//! The event kernels on packets with every kind of damage, against the expected summaries.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use millstream_camera::format::{DECISION_BYTES, PATCHES, TRACE_BYTES};
use millstream_camera::trigger::{GEOMETRY_BYTES, TriggerGeometry, reference_decisions};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, EventCounters, FLAG_VERIFY, Fault};
use millstream_card_abi::events::{
    Cluster7Args, EventSummary, MAX_EVENTS, MAX_SOURCES, PacketBuffer, STATUS_BAD_PACKET, STATUS_CORRUPT,
    STATUS_MISSING, STATUS_UNDECIDED, VerifyArgs,
};
use millstream_card_abi::registers::{KERNEL_WORDS, KernelWords};
use millstream_fragment::mfp::{self, Repr};
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use proptest::prelude::*;
use tempfile::TempDir;

use super::{cluster7, verify};
use crate::backing::{self, AllocationOptions, BackingKind, DevicePaths};
use crate::kernel::{GrantedBanks, Kernel, KernelRun, RunControl, StandaloneControl};
use crate::memory::Memory;

#[path = "../../../tests/card/gpu_driver.rs"]
mod gpu_driver;

const ARGS: u64 = 0;
const GEOMETRY: u64 = 64 << 10;
const RESULT: u64 = 80 << 10;
const DECISIONS: u64 = 128 << 10;
const SLOT: u64 = 256 << 10;
const MEMORY: u64 = 2 << 20;

const FIRST_EVENT: u64 = 1_027_888;
const TRACE_SOURCES: [u32; 3] = [0x10f, 0x20f, 0x30f];

/// Runs a kernel on `args`, which are first written to card memory.
fn run(
    kernel: &mut dyn Kernel,
    memory: &Memory,
    flags: u32,
    args: &[u8],
    result: MemoryRange,
) -> (Result<(), Fault>, EventCounters) {
    run_under(&StandaloneControl::default(), kernel, memory, flags, args, result)
}

fn run_under(
    control: &dyn RunControl,
    kernel: &mut dyn Kernel,
    memory: &Memory,
    flags: u32,
    args: &[u8],
    result: MemoryRange,
) -> (Result<(), Fault>, EventCounters) {
    memory.write(ARGS, args).unwrap();
    let mut arguments: KernelWords = [0; KERNEL_WORDS];
    arguments[..5].copy_from_slice(&[ARGS, args.len() as u64, result.offset, result.len, flags.into()]);
    let mut run = KernelRun::new(GrantedBanks::new(memory, memory.size(), 1), arguments, control);
    let outcome = kernel.run(&mut run);
    (outcome, EventCounters::from_words(run.results()))
}

/// Each patch and the two next to it, by trace position.
fn geometry() -> TriggerGeometry {
    let mut bytes = Vec::new();
    for position in 0..PATCHES as i16 {
        let right = if position + 1 < PATCHES as i16 { position + 1 } else { -1 };
        let row = [position, position - 1, right, -1, -1, -1, -1, (position + 7) % PATCHES as i16];
        bytes.extend(row.iter().flat_map(|entry| entry.to_le_bytes()));
    }
    let bytes: [u8; GEOMETRY_BYTES] = bytes.try_into().unwrap();
    TriggerGeometry::from_bytes(&bytes).unwrap()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Good,
    Missing,
    Corrupt,
    Short,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PacketCondition {
    Good,
    Damaged,
    OtherBatch,
    OtherSource,
    NoRoom,
    Absent,
}

/// One source: the condition of its packet, and of its fragment of each event.
#[derive(Clone, Debug)]
struct SourceCase {
    id: u32,
    packet: PacketCondition,
    fragments: Vec<Condition>,
    seed: u8,
}

impl SourceCase {
    fn is_trace(&self) -> bool {
        TRACE_SOURCES.contains(&self.id)
    }

    fn payload(&self, event: usize) -> Vec<u8> {
        let full = if self.is_trace() { TRACE_BYTES } else { 40_000 };
        let len = if self.fragments[event] == Condition::Short { full / 2 } else { full };
        let mut state = u32::from(self.seed) << 8 | event as u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..len).map(|_| random()).collect()
    }

    /// Writes the packet to card memory at `offset`; returns its buffer and the offset for the next packet.
    fn write(&self, memory: &Memory, offset: u64) -> (PacketBuffer, u64) {
        let payloads: Vec<_> = (0..self.fragments.len()).map(|event| self.payload(event)).collect();
        let fragments: Vec<_> = payloads
            .iter()
            .enumerate()
            .filter(|(event, _)| self.fragments[*event] != Condition::Missing)
            .map(|(event, payload)| {
                let mut fragment = Fragment::new(FIRST_EVENT + event as u64, payload);
                if self.fragments[event] == Condition::Corrupt {
                    fragment.crc ^= 1 << 31;
                }
                fragment
            })
            .collect();
        let mut repr = Repr {
            source: SourceId(self.id),
            kind: SourceKind(1),
            first_event: FIRST_EVENT,
            n_events: self.fragments.len() as u32,
            n_fragments: fragments.len() as u32,
            alignment: Alignment::CACHE_LINE,
        };
        match self.packet {
            PacketCondition::OtherSource => repr.source.0 += 1,
            PacketCondition::OtherBatch => repr.n_events += 1,
            _ => {}
        }
        let mut packet = vec![0; 256 << 10];
        let len = mfp::assemble(&mut packet, repr, &fragments).unwrap();
        packet.truncate(len as usize);
        let mut capacity = u64::from(len);
        match self.packet {
            PacketCondition::Damaged => packet[24] ^= 1,
            PacketCondition::Absent => packet.fill(0),
            PacketCondition::NoRoom => capacity -= 64,
            _ => {}
        }
        memory.write(offset, &packet).unwrap();
        let buffer = PacketBuffer { offset, capacity, source: self.id, reserved: 0 };
        (buffer, offset + packet.len() as u64)
    }

    /// The condition of a fragment as a kernel can see it.
    fn seen(&self, event: usize) -> Condition {
        match self.packet {
            PacketCondition::Good => self.fragments[event],
            _ => Condition::Missing,
        }
    }
}

fn any_sources() -> impl Strategy<Value = Vec<SourceCase>> {
    use Condition::{Corrupt, Good, Missing, Short};
    let condition = prop_oneof![8 => Just(Good), 1 => Just(Missing), 1 => Just(Corrupt), 1 => Just(Short)];
    let packet = prop_oneof![
        12 => Just(PacketCondition::Good),
        1 => Just(PacketCondition::Damaged),
        1 => Just(PacketCondition::OtherBatch),
        1 => Just(PacketCondition::OtherSource),
        1 => Just(PacketCondition::NoRoom),
        1 => Just(PacketCondition::Absent),
    ];
    (1usize..5, Just([TRACE_SOURCES.as_slice(), &[0x101, 0x102]].concat())).prop_flat_map(
        move |(n_events, ids)| {
            let fragments = proptest::collection::vec(condition.clone(), n_events);
            let source = (packet.clone(), fragments, any::<u8>());
            let sources = proptest::collection::vec(source, ids.len());
            (sources, Just(ids).prop_shuffle()).prop_map(|(sources, ids)| {
                let cases = ids.into_iter().zip(sources);
                cases
                    .map(|(id, (packet, fragments, seed))| SourceCase { id, packet, fragments, seed })
                    .collect()
            })
        },
    )
}

/// The summary that a kernel should write for `event`, without decisions.
fn expected_summary(
    sources: &[&SourceCase],
    event: usize,
    verify: bool,
    counters: &mut EventCounters,
) -> EventSummary {
    let mut summary = EventSummary::of(FIRST_EVENT + event as u64);
    counters.events += 1;
    for source in sources {
        if source.seen(event) == Condition::Missing {
            summary.missing += 1;
            summary.status |= STATUS_MISSING;
            if source.packet != PacketCondition::Good {
                summary.status |= STATUS_BAD_PACKET;
            }
            continue;
        }
        counters.fragments += 1;
        counters.payload_bytes += source.payload(event).len() as u64;
        if verify && source.seen(event) == Condition::Corrupt {
            counters.corrupt_fragments += 1;
            summary.corrupt += 1;
            summary.status |= STATUS_CORRUPT;
        }
    }
    summary
}

fn write_all(memory: &Memory, sources: &[SourceCase]) -> Vec<PacketBuffer> {
    let mut offset = SLOT;
    let mut packets = Vec::new();
    for source in sources {
        let (packet, next) = source.write(memory, offset);
        packets.push(packet);
        offset = next;
    }
    packets
}

fn summary_at(memory: &Memory, event: usize) -> EventSummary {
    let offset = RESULT + (event * EventSummary::BYTES) as u64;
    EventSummary::from_bytes(&memory.read_array(offset).unwrap())
}

/// Memory of the host, or of the GPU of `gpu_driver.cpp`, whose kernels then do the work.
fn memory_of(on_gpu: bool) -> Memory {
    static DRIVER: LazyLock<(TempDir, DevicePaths)> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        let library = gpu_driver::build(folder.path()).to_str().unwrap().to_owned();
        (folder, DevicePaths { cuda: library.clone(), vulkan: library, ..DevicePaths::default() })
    });
    if !on_gpu {
        return Memory::anonymous(MEMORY).unwrap();
    }
    let kind = BackingKind::Cuda(0);
    Memory::new(backing::open(&kind, &DRIVER.1, AllocationOptions::small(MEMORY)).unwrap())
}

#[test]
fn the_kernels_of_the_gpu_are_compiled_from_their_source() {
    let source = [&include_bytes!("../gpu/gpu.h")[..], include_bytes!("../gpu/events.cu")].concat();
    let compiled = include_str!("../gpu/events.ptx");
    let hash = millstream_card_abi::image::image_hash(&source);
    let expected =
        format!("// Compiled by `make gpu-kernels` from gpu.h and events.cu with the hash {hash:016x}.");
    assert_eq!(compiled.lines().next(), Some(&expected[..]), "events.cu has changed: make gpu-kernels");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn verify_finds_all_damage(sources in any_sources(), on_gpu: bool) {
        let memory = memory_of(on_gpu);
        let packets = write_all(&memory, &sources);
        let n_events = sources[0].fragments.len();
        let mut args = Vec::new();
        VerifyArgs { first_event: FIRST_EVENT, n_events: n_events as u32, n_sources: 0 }
            .append_to(&packets, &mut args);
        let result = MemoryRange::new(RESULT, (n_events * EventSummary::BYTES) as u64);
        let (outcome, counters) = run(&mut *(verify::BUILTIN.make)(), &memory, 0, &args, result);
        prop_assert_eq!(outcome, Ok(()));
        let all: Vec<_> = sources.iter().collect();
        let mut expected_counters = EventCounters::default();
        for event in 0..n_events {
            let expected = expected_summary(&all, event, true, &mut expected_counters);
            prop_assert_eq!(summary_at(&memory, event), expected);
        }
        prop_assert_eq!(counters, expected_counters);
    }

    #[test]
    fn cluster7_decides_on_intact_traces(
        sources in any_sources(), verify: bool, threshold in 200u32..760, on_gpu: bool,
    ) {
        let memory = memory_of(on_gpu);
        let packets = write_all(&memory, &sources);
        let geometry = geometry();
        memory.write(GEOMETRY, &geometry.to_bytes()).unwrap();
        let n_events = sources[0].fragments.len();
        let mut args = Vec::new();
        Cluster7Args {
            first_event: FIRST_EVENT,
            n_events: n_events as u32,
            trace_sources: TRACE_SOURCES,
            threshold,
            geometry: GEOMETRY,
            decisions: DECISIONS,
            ..Cluster7Args::default()
        }
        .append_to(&packets, &mut args);
        let result = MemoryRange::new(RESULT, (n_events * EventSummary::BYTES) as u64);
        let flags = if verify { FLAG_VERIFY } else { 0 };
        let mut kernel = (cluster7::BUILTIN.make)();
        // Twice: what a kernel keeps from the first run must not show in the second.
        for _ in 0..2 {
            memory.write(DECISIONS, &vec![0xee; n_events * DECISION_BYTES]).unwrap();
            let (outcome, counters) = run(&mut *kernel, &memory, flags, &args, result);
            prop_assert_eq!(outcome, Ok(()));
            let inspected: Vec<_> = sources.iter().filter(|one| verify || one.is_trace()).collect();
            let traces = TRACE_SOURCES.map(|id| sources.iter().find(|one| one.id == id).unwrap());
            let mut expected_counters = EventCounters::default();
            for event in 0..n_events {
                let mut expected = expected_summary(&inspected, event, verify, &mut expected_counters);
                let sound = traces.iter().all(|source| match source.seen(event) {
                    Condition::Good => true,
                    Condition::Corrupt => !verify,
                    Condition::Missing | Condition::Short => false,
                });
                let mut map = vec![0; DECISION_BYTES];
                if sound {
                    let payloads = traces.map(|source| source.payload(event));
                    let slices = [&payloads[0][..], &payloads[1], &payloads[2]];
                    let (decisions, outcome) = reference_decisions(slices, &geometry, threshold);
                    map = decisions;
                    expected.decisions_set = outcome.bits_set;
                    expected.accepted = u32::from(outcome.bits_set > 0);
                    if let Some((sample, position)) = outcome.first {
                        expected.first_sample = sample;
                        expected.first_patch = (position + 7) % PATCHES as u16;
                    }
                    expected_counters.decisions_set += outcome.bits_set;
                } else {
                    expected.status |= STATUS_UNDECIDED;
                }
                prop_assert_eq!(summary_at(&memory, event), expected);
                let at = DECISIONS + (event * DECISION_BYTES) as u64;
                prop_assert_eq!(memory.read_array::<DECISION_BYTES>(at).unwrap().to_vec(), map);
            }
            prop_assert_eq!(counters, expected_counters);
        }
    }
}

/// Sources whose fragments are all there and sound.
fn sound_sources(n_events: usize) -> Vec<SourceCase> {
    let packet = PacketCondition::Good;
    TRACE_SOURCES
        .map(|id| SourceCase { id, packet, fragments: vec![Condition::Good; n_events], seed: id as u8 })
        .to_vec()
}

#[test]
fn bad_arguments_are_refused_with_their_cause() {
    let memory = Memory::anonymous(MEMORY).unwrap();
    let packets = write_all(&memory, &sound_sources(2));
    memory.write(GEOMETRY, &geometry().to_bytes()).unwrap();
    let good = Cluster7Args {
        first_event: FIRST_EVENT,
        n_events: 2,
        trace_sources: TRACE_SOURCES,
        threshold: 336,
        geometry: GEOMETRY,
        decisions: DECISIONS,
        ..Cluster7Args::default()
    };
    let room = MemoryRange::new(RESULT, 64);
    let mut kernel = (cluster7::BUILTIN.make)();
    let mut fault = |args: Cluster7Args, packets: &[PacketBuffer], result: MemoryRange| {
        let mut bytes = Vec::new();
        args.append_to(packets, &mut bytes);
        run(&mut *kernel, &memory, 0, &bytes, result).0.unwrap_err()
    };
    let fault_of = Fault::new;
    let size = MEMORY;

    let replace = |index: usize, packet: PacketBuffer| {
        let mut packets = packets.clone();
        packets[index] = packet;
        packets
    };
    let cases = [
        (Cluster7Args { n_events: 0, ..good }, fault_of(Cause::EventCount, 0)),
        (
            Cluster7Args { n_events: MAX_EVENTS + 1, ..good },
            fault_of(Cause::EventCount, u64::from(MAX_EVENTS) + 1),
        ),
        (
            Cluster7Args { first_event: u64::MAX - 1, ..good },
            fault_of(Cause::EventNumberOverflow, u64::MAX - 1),
        ),
        (Cluster7Args { n_events: 3, ..good }, fault_of(Cause::ResultTooSmall, 64)),
        (Cluster7Args { decisions: size - 1, ..good }, fault_of(Cause::DecisionsOutsideMemory, size - 1)),
        (Cluster7Args { decisions: RESULT, ..good }, fault_of(Cause::ResultsOverlap, RESULT)),
        (Cluster7Args { decisions: SLOT, ..good }, fault_of(Cause::ResultsOverlap, SLOT)),
        (Cluster7Args { geometry: u64::MAX, ..good }, fault_of(Cause::GeometryOutsideMemory, u64::MAX)),
        // Packets are not a geometry table: they start with "MFPK".
        (Cluster7Args { geometry: SLOT, ..good }, fault_of(Cause::GeometryEntry, 0)),
        (Cluster7Args { reserved: [0, 9], ..good }, fault_of(Cause::ReservedNotZero, 9)),
        (
            Cluster7Args { trace_sources: [0x10f, 0x20f, 0x40f], ..good },
            fault_of(Cause::TraceSourceMissing, 0x40f),
        ),
    ];
    for (args, expected) in cases {
        assert_eq!(fault(args, &packets, room), expected, "{args:?}");
    }
    let cases = [
        (vec![], fault_of(Cause::SourceCount, 0)),
        (
            vec![packets[0]; MAX_SOURCES as usize + 1],
            fault_of(Cause::SourceCount, u64::from(MAX_SOURCES) + 1),
        ),
        (replace(1, packets[0]), fault_of(Cause::DuplicateSource, 0x10f)),
        (
            replace(1, PacketBuffer { capacity: size, ..packets[1] }),
            fault_of(Cause::PacketOutsideMemory, packets[1].offset),
        ),
        (replace(2, PacketBuffer { reserved: 1, ..packets[2] }), fault_of(Cause::ReservedNotZero, 1)),
        (
            replace(0, PacketBuffer { offset: RESULT, capacity: 32, ..packets[0] }),
            fault_of(Cause::ResultsOverlap, RESULT),
        ),
    ];
    for (packets, expected) in cases {
        assert_eq!(fault(good, &packets, room), expected, "{packets:?}");
    }
    assert_eq!(fault(good, &packets, MemoryRange::new(RESULT, 63)), fault_of(Cause::ResultTooSmall, 63));

    let mut bytes = Vec::new();
    good.append_to(&packets, &mut bytes);
    bytes.push(0);
    let (outcome, _) = run(&mut *kernel, &memory, 0, &bytes, room);
    assert_eq!(outcome, Err(fault_of(Cause::ArgsLength, bytes.len() as u64)));
    let (outcome, _) = run(&mut *kernel, &memory, 0, &bytes[..63], room);
    assert_eq!(outcome, Err(fault_of(Cause::ArgsLength, 63)));
    bytes.pop();
    let (outcome, _) = run(&mut *kernel, &memory, 0, &bytes, room);
    assert_eq!(outcome, Ok(()), "the good arguments are good");
}

#[test]
fn a_new_geometry_is_used_and_a_bad_one_is_rejected() {
    let memory = Memory::anonymous(MEMORY).unwrap();
    let packets = write_all(&memory, &sound_sources(1));
    let args = Cluster7Args {
        first_event: FIRST_EVENT,
        n_events: 1,
        trace_sources: TRACE_SOURCES,
        threshold: 100,
        geometry: GEOMETRY,
        decisions: DECISIONS,
        ..Cluster7Args::default()
    };
    let mut bytes = Vec::new();
    args.append_to(&packets, &mut bytes);
    let mut kernel = (cluster7::BUILTIN.make)();
    let mut set_with = |table: &[u8]| {
        memory.write(GEOMETRY, table).unwrap();
        let (outcome, counters) = run(&mut *kernel, &memory, 0, &bytes, MemoryRange::new(RESULT, 32));
        outcome.map(|()| counters.decisions_set)
    };
    let mut table = geometry().to_bytes();
    let three = set_with(&table).unwrap();
    for row in table.chunks_exact_mut(16) {
        row[2..14].fill(0xff);
    }
    let one = set_with(&table).unwrap();
    assert!(0 < one && one < three, "fewer neighbours, smaller sums");
    table[16 * 431..][..2].copy_from_slice(&432i16.to_le_bytes());
    assert_eq!(set_with(&table), Err(Fault::new(Cause::GeometryEntry, 16 * 431)));
    assert_eq!(set_with(&geometry().to_bytes()), Ok(three));
}

/// A control that has requested an interrupt.
#[derive(Default)]
struct Interrupted {
    interrupt_requested: AtomicBool,
    inner: StandaloneControl,
}

impl RunControl for Interrupted {
    fn safe_point(&self, state: &KernelWords) -> Result<(), Fault> {
        self.inner.safe_point(state)
    }

    fn interrupt_requested(&self) -> &AtomicBool {
        &self.interrupt_requested
    }

    fn progress(&self) -> &AtomicU64 {
        self.inner.progress()
    }

    fn heartbeat(&self) -> &AtomicU64 {
        self.inner.heartbeat()
    }
}

#[test]
fn an_interrupted_kernel_ends() {
    let memory = Memory::anonymous(MEMORY).unwrap();
    let packets = write_all(&memory, &sound_sources(2));
    let mut args = Vec::new();
    VerifyArgs { first_event: FIRST_EVENT, n_events: 2, n_sources: 0 }.append_to(&packets, &mut args);
    let control = Interrupted { interrupt_requested: AtomicBool::new(true), ..Interrupted::default() };
    let mut kernel = (verify::BUILTIN.make)();
    let (outcome, counters) =
        run_under(&control, &mut *kernel, &memory, 0, &args, MemoryRange::new(RESULT, 64));
    assert_eq!(outcome, Err(Fault::new(Cause::Interrupted, 0)));
    assert_eq!((counters.fragments, counters.events), (1, 0), "in the middle of the first event");
    assert_eq!(control.heartbeat().load(Ordering::Relaxed), 1);
}
