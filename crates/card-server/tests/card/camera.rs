//! The camera's recorded events through a card: the decisions equal the camera's, bit for bit.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use crate::host::{MEMORY, Process, TIMEOUT};
use millstream_camera::format::{DECISION_BYTES, TRIGGER_THRESHOLD};
use millstream_camera::trigger::TriggerGeometry;
use millstream_card::{Card, Ring, RingLayout};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Descriptor, FLAG_VERIFY};
use millstream_card_abi::events::{CLUSTER7, Cluster7Args, EventSummary, PacketBuffer, VERIFY, VerifyArgs};
use millstream_fragment::mfp::{self, Repr};
use millstream_fragment::stream::{Source, Stream};
use millstream_fragment::{SourceId, unpack::unpack};

const ARGS: u64 = 16 << 10;
const RESULT: u64 = 32 << 10;
const GEOMETRY: u64 = 64 << 10;
const DECISIONS: u64 = 80 << 10;
const SLOT: u64 = 256 << 10;

const EVENTS: u64 = 32;
const DECISION_BITS: u64 = EVENTS * 50 * 432;
const BITS_SET: u64 = 56;

/// The camera's recorded data: three crates, and the decisions of its hardware.
struct Camera {
    crates: Vec<Stream>,
    truth: Stream,
    folder: PathBuf,
    _unpacked: tempfile::TempDir,
}

impl Camera {
    fn open() -> Camera {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m");
        let unpacked = tempfile::tempdir().unwrap();
        unpack(&folder, unpacked.path()).unwrap();
        let open = |name: &str| Stream::open(unpacked.path().join(name)).unwrap();
        Camera {
            crates: ["crate1.mfs", "crate2.mfs", "crate3.mfs"].map(open).into(),
            truth: open("decisions.mfs"),
            folder,
            _unpacked: unpacked,
        }
    }

    fn sources(&self) -> impl Iterator<Item = Source<'_>> {
        self.crates.iter().flat_map(|one| one.sources())
    }

    fn first_event(&self) -> u64 {
        self.truth.events().start
    }

    fn recorded_decisions(&self, event: u64) -> &[u8] {
        let source = self.truth.source(SourceId(0xf00)).unwrap();
        source.fragment(source.find(event).unwrap()).unwrap().payload
    }
}

/// Puts the packets of a batch into the slot, as the readout units would.
fn fill_slot(card: &Card, camera: &Camera, first_event: u64, n_events: u32) -> Vec<PacketBuffer> {
    let mut offset = SLOT;
    let mut places = Vec::new();
    for source in camera.sources() {
        let positions = source.positions(first_event..first_event + u64::from(n_events));
        let fragments: Vec<_> = positions.map(|position| source.fragment(position).unwrap()).collect();
        let repr = Repr {
            source: source.id(),
            kind: source.kind(),
            first_event,
            n_events,
            n_fragments: fragments.len() as u32,
            alignment: source.alignment(),
        };
        let capacity = mfp::capacity(n_events, source.max_len(), source.alignment()).unwrap();
        let mut packet = vec![0; capacity as usize];
        let len = mfp::assemble(&mut packet, repr, &fragments).unwrap();
        card.memory().write(offset, &packet[..len as usize]).unwrap();
        places.push(PacketBuffer { offset, capacity: capacity.into(), source: source.id().0, reserved: 0 });
        offset += u64::from(capacity);
    }
    assert!(offset <= MEMORY);
    places
}

fn command(card: &Card, region: u32, flags: u32, args: &[u8], n_events: u32) -> Descriptor {
    card.memory().write(ARGS, args).unwrap();
    Descriptor {
        region,
        flags,
        args: MemoryRange::new(ARGS, args.len() as u64),
        result: MemoryRange::new(RESULT, u64::from(n_events) * EventSummary::BYTES as u64),
        cookie: 0,
    }
}

fn summary(card: &Card, index: u32) -> EventSummary {
    let offset = RESULT + u64::from(index) * EventSummary::BYTES as u64;
    EventSummary::from_bytes(&card.memory().read_array(offset).unwrap())
}

fn cluster7_args(first_event: u64, n_events: u32, places: &[PacketBuffer]) -> Vec<u8> {
    let mut args = Vec::new();
    Cluster7Args {
        first_event,
        n_events,
        trace_sources: [0x10f, 0x20f, 0x30f],
        threshold: TRIGGER_THRESHOLD,
        geometry: GEOMETRY,
        decisions: DECISIONS,
        ..Cluster7Args::default()
    }
    .append_to(places, &mut args);
    args
}

#[test]
fn all_recorded_decisions_are_reproduced_in_batches_of_any_size() {
    let camera = Camera::open();
    let process = Process::start("camera", "unbound");
    let card = process.open();
    card.load(0, CLUSTER7).unwrap();
    let geometry = TriggerGeometry::load(&camera.folder.join("patches.csv")).unwrap();
    card.memory().write(GEOMETRY, &geometry.to_bytes()).unwrap();
    let mut ring = Ring::open(&card, RingLayout::at(0, 8)).unwrap();

    for (batch, flags) in [(1, 0), (5, FLAG_VERIFY), (EVENTS, 0)] {
        let (mut agreed, mut set, mut accepted) = (0, 0, 0);
        let end = camera.first_event() + EVENTS;
        let mut first_event = camera.first_event();
        while first_event < end {
            let n_events = batch.min(end - first_event) as u32;
            let places = fill_slot(&card, &camera, first_event, n_events);
            let args = cluster7_args(first_event, n_events, &places);
            ring.submit(&command(&card, 0, flags, &args, n_events)).unwrap();
            let completion = ring.wait(TIMEOUT).unwrap();
            assert_eq!(completion.outcome, Ok(()));
            let (sources, payload) = if flags == 0 { (3, 28_800) } else { (30, 158_400) };
            assert_eq!(completion.counters.fragments, sources * n_events);
            assert_eq!(completion.counters.payload_bytes, payload * u64::from(n_events));

            for index in 0..n_events {
                let event = first_event + u64::from(index);
                let at = DECISIONS + u64::from(index) * DECISION_BYTES as u64;
                let decisions = card.memory().read_array::<DECISION_BYTES>(at).unwrap();
                let recorded = camera.recorded_decisions(event);
                assert_eq!(recorded.len(), DECISION_BYTES);
                agreed += decisions
                    .iter()
                    .zip(recorded)
                    .map(|(a, b)| u64::from((a ^ b).count_zeros()))
                    .sum::<u64>();

                let summary = summary(&card, index);
                let bits = recorded.iter().map(|byte| byte.count_ones()).sum();
                assert_eq!((summary.event, summary.status), (event, 0));
                assert_eq!((summary.decisions_set, summary.accepted), (bits, u32::from(bits > 0)));
                if let Some(at) = recorded.iter().position(|&byte| byte != 0) {
                    let position = 8 * (at % 54) + recorded[at].trailing_zeros() as usize;
                    assert_eq!(usize::from(summary.first_sample), at / 54);
                    let patch = geometry.clusters()[position].patch;
                    assert_eq!(i32::from(summary.first_patch), i32::from(patch));
                }
                set += u64::from(bits);
                accepted += summary.accepted;
            }
            first_event += u64::from(n_events);
        }
        assert_eq!(agreed, DECISION_BITS, "batches of {batch}, flags {flags}");
        assert_eq!((set, accepted), (BITS_SET, 30));
    }
    let registers = card.registers();
    assert_eq!(registers.events().load(Ordering::Relaxed), 3 * EVENTS);
    assert_eq!(registers.decisions_set().load(Ordering::Relaxed), 3 * BITS_SET);
    assert_eq!(registers.corrupt_fragments().load(Ordering::Relaxed), 0);
    assert!(registers.kernel_busy_ns().load(Ordering::Relaxed) > 0);
}

#[test]
fn a_flipped_bit_in_the_slot_is_found_in_its_event_only() {
    let camera = Camera::open();
    let process = Process::start("flipped", "unbound");
    let card = process.open();
    card.load(0, VERIFY).unwrap();
    let mut ring = Ring::open(&card, RingLayout::at(0, 8)).unwrap();
    let first_event = camera.first_event();
    let places = fill_slot(&card, &camera, first_event, 4);
    // Board 0 of crate 1, event 2: after a header of 128 bytes and two fragments of 4,800.
    let at = places[0].offset + 128 + 2 * 4800 + 17;
    let [byte] = card.memory().read_array(at).unwrap();
    card.memory().write(at, &[byte ^ 0x10]).unwrap();

    let mut args = Vec::new();
    VerifyArgs { first_event, n_events: 4, n_sources: 0 }.append_to(&places, &mut args);
    ring.submit(&command(&card, 0, 0, &args, 4)).unwrap();
    let completion = ring.wait(TIMEOUT).unwrap();
    assert_eq!(completion.outcome, Ok(()));
    assert_eq!((completion.counters.fragments, completion.counters.corrupt_fragments), (120, 1));
    let corrupt: Vec<_> = (0..4).map(|index| summary(&card, index).corrupt).collect();
    assert_eq!(corrupt, [0, 0, 1, 0]);
    assert_eq!(card.registers().corrupt_fragments().load(Ordering::Relaxed), 1);
}
