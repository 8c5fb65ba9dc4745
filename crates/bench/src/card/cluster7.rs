//! The cluster7 kernel on generated camera events, against a copy of the same fragments.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use millstream_camera::format::{CRATES, DECISION_BYTES, PATCHES, TRACE_BYTES, TRIGGER_THRESHOLD};
use millstream_camera::trigger::{CLUSTER_INPUTS, GEOMETRY_BYTES, TriggerGeometry};
use millstream_card_abi::command::{FLAG_VERIFY, Fault};
use millstream_card_abi::events::{CLUSTER7, Cluster7Args, EventSummary, PacketBuffer};
use millstream_card_abi::registers::KernelWords;
use millstream_card_abi::{AccessError, MemoryRange, PrefaultError, SyscallError};
use millstream_card_server::Memory;
use millstream_card_server::kernel::builtin::BUILTINS;
use millstream_card_server::kernel::{GrantedBanks, Kernel, KernelRun, StandaloneControl};
use millstream_fragment::mfp::{self, MfpError, Repr};
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use millstream_shm::PAGE;

use crate::{Figure, NameFilter, Table, median};

/// Boards with waveforms per crate, and the length of their fragments (bytes), as in the camera.
const BOARDS: u32 = 9;
const BOARD_BYTES: usize = 4800;

/// The events that the kernel processes.
#[derive(Clone, Copy, Debug)]
struct Workload {
    /// Events per slot, 1 to [`MAX_EVENTS`](millstream_card_abi::events::MAX_EVENTS).
    batch: u32,
    /// Slots that the kernel cycles through; many slots exceed the caches, as an event builder's memory does.
    slots: NonZeroU32,
    /// Whether the kernel checks all 30 fragments of an event instead of only reading the traces.
    verify: bool,
    /// The shortest kernel time to measure.
    duration: Duration,
}

/// Counts and times of one measurement.
#[derive(Clone, Copy, Debug)]
struct Rate {
    /// Events processed.
    events: u64,
    /// Payload that the kernel read (bytes).
    payload_bytes: u64,
    /// Time in the kernel.
    kernel_time: Duration,
    /// Time of copying the same payload, fragment by fragment, to a buffer in the cache.
    copy_time: Duration,
    /// Decision bits set; a correct kernel sets some.
    decisions_set: u64,
}

impl Rate {
    /// Payload read by the kernel, and payload copied (GB/s).
    fn gigabytes_per_second(&self) -> [f64; 2] {
        [self.kernel_time, self.copy_time].map(|time| self.payload_bytes as f64 / time.as_secs_f64() / 1e9)
    }
}

/// Measures the kernel with and without the check of all fragments, in `rounds` interleaved rounds.
///
/// # Errors
/// [`Cluster7Error`].
pub(super) fn measure(table: &mut Table, rounds: usize, only: NameFilter<'_>) -> Result<(), Cluster7Error> {
    let geometry = neighbouring_patches();
    for (verify, name) in
        [(false, "cluster7 kernel, traces"), (true, "cluster7 kernel, all fragments checked")]
    {
        if !only.selects(name) {
            continue;
        }
        let workload = Workload { batch: 64, slots: SLOTS, verify, duration: Duration::from_millis(200) };
        let mut rates = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            let measured = cluster7(workload, &geometry)?.gigabytes_per_second();
            rates.iter_mut().zip(measured).for_each(|(rates, rate)| rates.push(rate));
        }
        let [kernel, copy] = rates.map(|rates| median(&rates).unwrap_or(0.0));
        table.push(Figure::with_baseline(name, kernel, "GB/s", copy));
    }
    Ok(())
}

/// Slots of a measurement.
const SLOTS: NonZeroU32 = NonZeroU32::new(8).unwrap();

/// A geometry in which each cluster is a patch and the ones that follow it.
fn neighbouring_patches() -> TriggerGeometry {
    let cluster = |patch: usize| (0..CLUSTER_INPUTS).map(move |next| ((patch + next) % PATCHES) as i16);
    let entries = (0..PATCHES).flat_map(|patch| cluster(patch).chain([patch as i16]));
    let table: Vec<u8> = entries.flat_map(i16::to_le_bytes).collect();
    let table = table.try_into().expect("a row of entries per patch");
    TriggerGeometry::from_bytes(&table).expect("entries below the number of patches")
}

/// The kernel could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum Cluster7Error {
    /// The memory for the slots cannot be allocated.
    #[error(transparent)]
    Memory(#[from] PrefaultError),
    /// The kernel rejected the workload.
    #[error("kernel: {0}")]
    Kernel(#[from] Fault),
    /// The workload cannot be packed.
    #[error("packets: {0}")]
    Packet(#[from] MfpError),
}

impl From<SyscallError> for Cluster7Error {
    fn from(error: SyscallError) -> Cluster7Error {
        Cluster7Error::Memory(error.into())
    }
}

impl From<AccessError> for Cluster7Error {
    fn from(error: AccessError) -> Cluster7Error {
        Cluster7Error::Memory(error.into())
    }
}

/// Runs the kernel with the camera's sources and generated traces, on the calling thread and without a card.
fn cluster7(workload: Workload, geometry: &TriggerGeometry) -> Result<Rate, Cluster7Error> {
    let bench = Prepared::new(workload, geometry)?;
    let builtin = BUILTINS.iter().find(|kernel| kernel.name == CLUSTER7).expect("cluster7 is built in");
    let mut kernel = (builtin.make)();
    // Warm-up: one pass over all slots.
    for slot in 0..workload.slots.get() {
        bench.run(&mut *kernel, slot)?;
    }
    let mut rate = Rate {
        events: 0,
        payload_bytes: 0,
        kernel_time: Duration::ZERO,
        copy_time: Duration::ZERO,
        decisions_set: 0,
    };
    // Kernel and copy in turn, so that both see the same state of the machine.
    while rate.kernel_time < workload.duration {
        let started = Instant::now();
        for slot in 0..workload.slots.get() {
            let [events, _, _, decisions_set, payload_bytes, ..] = bench.run(&mut *kernel, slot)?;
            rate.events += events;
            rate.payload_bytes += payload_bytes;
            rate.decisions_set += decisions_set;
        }
        rate.kernel_time += started.elapsed();
        let started = Instant::now();
        for slot in 0..workload.slots.get() {
            bench.copy(slot)?;
        }
        rate.copy_time += started.elapsed();
    }
    Ok(rate)
}

/// Card memory with slots full of packets, and its layout.
struct Prepared {
    workload: Workload,
    memory: Memory,
    result: MemoryRange,
    args: Vec<MemoryRange>,
    /// The fragments that the kernel reads, by slot.
    fragments: Vec<Vec<MemoryRange>>,
}

impl Prepared {
    fn new(workload: Workload, geometry: &TriggerGeometry) -> Result<Prepared, Cluster7Error> {
        let n_events = workload.batch;
        let sources = sources(workload.verify);
        let capacity = |&(_, len): &(u32, usize)| {
            mfp::capacity(n_events, len as u32, Alignment::CACHE_LINE)
                .ok_or(MfpError::TooLong { len: u64::from(n_events) * len as u64 })
        };
        let capacities = sources.iter().map(capacity).collect::<Result<Vec<_>, _>>()?;
        let slot_bytes: u64 = capacities.iter().map(|&bytes| u64::from(bytes)).sum();

        let mut end = 0;
        let mut take = |bytes: u64| {
            let span = MemoryRange::new(end, bytes);
            end = (end + bytes).next_multiple_of(64);
            span
        };
        let table = take(GEOMETRY_BYTES as u64);
        let result = take(u64::from(n_events) * EventSummary::BYTES as u64);
        let decisions = take(u64::from(n_events) * DECISION_BYTES as u64);
        let args_bytes = (Cluster7Args::BYTES + sources.len() * PacketBuffer::BYTES) as u64;
        let args: Vec<_> = (0..workload.slots.get()).map(|_| take(args_bytes)).collect();
        let slots: Vec<_> = (0..workload.slots.get()).map(|_| take(slot_bytes)).collect();
        let memory = Memory::anonymous(end.next_multiple_of(PAGE as u64))?;
        memory.prefault(MemoryRange::new(0, memory.size()))?;
        memory.write(table.offset, &geometry.to_bytes())?;

        let mut noise = Noise(1);
        let mut all_fragments = Vec::new();
        for (slot, args) in slots.iter().zip(&args) {
            let mut offset = slot.offset;
            let mut places = Vec::new();
            let mut in_slot = Vec::new();
            for (&(source, len), &capacity) in sources.iter().zip(&capacities) {
                let packet = packet(source, len, n_events, capacity, &mut noise)?;
                memory.write(offset, &packet)?;
                let payload = capacity as usize - n_events as usize * len.next_multiple_of(64);
                let starts = (0..n_events as usize).map(|event| payload + event * len.next_multiple_of(64));
                in_slot.extend(starts.map(|start| MemoryRange::new(offset + start as u64, len as u64)));
                places.push(PacketBuffer { offset, capacity: capacity.into(), source, reserved: 0 });
                offset += u64::from(capacity);
            }
            let mut bytes = Vec::new();
            Cluster7Args {
                first_event: 0,
                n_events,
                trace_sources: [0, 1, 2],
                threshold: TRIGGER_THRESHOLD,
                geometry: table.offset,
                decisions: decisions.offset,
                ..Cluster7Args::default()
            }
            .append_to(&places, &mut bytes);
            memory.write(args.offset, &bytes)?;
            all_fragments.push(in_slot);
        }
        Ok(Prepared { workload, memory, result, args, fragments: all_fragments })
    }

    /// Runs the kernel on one slot; the run's results.
    fn run(&self, kernel: &mut dyn Kernel, slot: u32) -> Result<KernelWords, Fault> {
        let (args, result) = (self.args[slot as usize], self.result);
        let mut arguments = KernelWords::default();
        let flags = if self.workload.verify { FLAG_VERIFY } else { 0 };
        arguments[..5].copy_from_slice(&[args.offset, args.len, result.offset, result.len, flags.into()]);
        let control = StandaloneControl::default();
        let banks = GrantedBanks::new(&self.memory, self.memory.size(), 1);
        let mut run = KernelRun::new(banks, arguments, &control);
        kernel.run(&mut run)?;
        Ok(*run.results())
    }

    fn copy(&self, slot: u32) -> Result<(), AccessError> {
        let mut buffer = [0; TRACE_BYTES];
        for fragment in &self.fragments[slot as usize] {
            self.memory.read(fragment.offset, &mut buffer[..fragment.len as usize])?;
            std::hint::black_box(&buffer);
        }
        Ok(())
    }
}

/// Sources and the length of their fragments; the first three are the traces.
fn sources(boards: bool) -> Vec<(u32, usize)> {
    let crates = CRATES as u32;
    let boards = if boards { crates * BOARDS } else { 0 };
    let traces = (0..crates).map(|source| (source, TRACE_BYTES));
    traces.chain((crates..crates + boards).map(|source| (source, BOARD_BYTES))).collect()
}

fn packet(
    source: u32,
    len: usize,
    n_events: u32,
    capacity: u32,
    noise: &mut Noise,
) -> Result<Vec<u8>, MfpError> {
    let payloads: Vec<Vec<u8>> = (0..n_events).map(|_| (0..len).map(|_| noise.sample()).collect()).collect();
    let fragments: Vec<_> =
        (0..).zip(&payloads).map(|(event, payload)| Fragment::new(event, payload)).collect();
    let repr = Repr {
        source: SourceId(source),
        kind: SourceKind(0),
        first_event: 0,
        n_events,
        n_fragments: n_events,
        alignment: Alignment::CACHE_LINE,
    };
    let mut packet = vec![0; capacity as usize];
    mfp::assemble(&mut packet, repr, &fragments)?;
    Ok(packet)
}

/// Samples of a camera at night level, with an occasional bright sample.
struct Noise(u32);

impl Noise {
    fn sample(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let bright = self.0 >> 8 & 0xffff == 0;
        if bright { 255 } else { 20 + (self.0 >> 28) as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: NonZeroU32 = NonZeroU32::new(2).unwrap();

    #[test]
    fn kernel_and_payload_counts_match_the_workload() {
        let mut table = Vec::new();
        for patch in 0..PATCHES as i16 {
            let cluster = [patch, patch, patch, -1, -1, -1, -1];
            assert_eq!(cluster.len(), CLUSTER_INPUTS);
            table.extend(cluster.iter().chain([&patch]).flat_map(|entry| entry.to_le_bytes()));
        }
        let table: [u8; GEOMETRY_BYTES] = table.try_into().unwrap();
        let geometry = TriggerGeometry::from_bytes(&table).unwrap();
        for (verify, payload) in [(false, 28_800), (true, 158_400)] {
            let workload = Workload { batch: 32, slots: TWO, verify, duration: Duration::from_millis(1) };
            let rate = cluster7(workload, &geometry).unwrap();
            assert_eq!(rate.events % 64, 0);
            assert_eq!(rate.payload_bytes, rate.events * payload);
            // A bright sample, added three times, exceeds the threshold; a dark one does not.
            assert!((1..5 * rate.events).contains(&rate.decisions_set), "{rate:?}");
            assert!(rate.kernel_time >= workload.duration && rate.copy_time > Duration::ZERO);
        }
        let workload = Workload { batch: 0, slots: TWO, verify: false, duration: Duration::ZERO };
        assert!(matches!(
            cluster7(workload, &geometry),
            Err(Cluster7Error::Packet(_) | Cluster7Error::Kernel(_))
        ));
    }
}
