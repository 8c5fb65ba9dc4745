//! `cluster7`: the trigger of the SST-1M camera, computed on the packets in card memory.
//!
//! For each sample and each of the 432 patches, the trigger adds the traces of the patch and of its
//! neighbours. It sets the patch's decision bit where the sum exceeds a threshold. The traces come in one
//! fragment per crate: 50 samples of 192 bytes. The first 144 bytes of a sample are patches.
//!
//! Arguments: [`Cluster7Args`], followed by one [`PacketBuffer`] per source. The command's result is one
//! [`EventSummary`] per event, in order. The decision maps go to [`Cluster7Args::decisions`],
//! [`DECISION_BYTES`] per event. A map has 432 bits per sample, by decision position, least significant bit
//! first.
//!
//! The kernel reads the three trace sources only and does not check them. With [`FLAG_VERIFY`] it also checks
//! all sources as `verify` does, in the same pass, and does not decide on corrupt traces.

use millstream_camera::format::{CRATES, DECISION_BYTES, TRACE_BYTES};
use millstream_camera::trigger::{GEOMETRY_BYTES, ROW_BYTES, Trigger, TriggerGeometry, TriggerTraces};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, FLAG_VERIFY, Fault};
use millstream_card_abi::events::{CLUSTER7, Cluster7Args, EventSummary, PacketBuffer, STATUS_UNDECIDED};

use crate::kernel::events::gpu::GpuBatch;
use crate::kernel::events::packets::{Batch, ChecksumChecker, PacketList, Packets, check_disjoint, publish};
use crate::kernel::events::{EventRun, run_on_events};
use crate::kernel::gpu::GpuTrigger;
use crate::kernel::{BuiltinKernel, Kernel, KernelRun, outside};

/// The kernel.
pub const BUILTIN: BuiltinKernel = BuiltinKernel { name: CLUSTER7, make: || Box::new(Cluster7::new()) };

struct Cluster7 {
    list: PacketList,
    packets: Packets,
    checker: ChecksumChecker,
    traces: TriggerTraces,
    trigger: Trigger,
    /// The geometry table in use, as read from card memory; empty before the first run.
    table: Vec<u8>,
    patches: Vec<u16>,
    gpu: GpuBatch,
    fresh_table: Box<[u8; GEOMETRY_BYTES]>,
}

impl Cluster7 {
    fn new() -> Cluster7 {
        Cluster7 {
            list: PacketList::default(),
            packets: Packets::default(),
            checker: ChecksumChecker::new(),
            traces: TriggerTraces::new(),
            trigger: Trigger::new(),
            table: Vec::new(),
            patches: Vec::new(),
            gpu: GpuBatch::default(),
            fresh_table: Box::new([0; GEOMETRY_BYTES]),
        }
    }

    /// Sets the geometry table at `offset`, unless it is the one in use.
    fn use_geometry(&mut self, run: &EventRun<'_, '_>, offset: u64) -> Result<(), Fault> {
        run.memory.read(offset, &mut self.fresh_table[..]).map_err(outside(Cause::GeometryOutsideMemory))?;
        if self.table == self.fresh_table[..] {
            return Ok(());
        }
        let geometry = TriggerGeometry::from_bytes(&self.fresh_table).map_err(|error| {
            Fault::new(Cause::GeometryEntry, (error.row * ROW_BYTES + 2 * error.entry) as u64)
        })?;
        self.trigger.set_geometry(&geometry);
        self.patches = geometry.patches().collect();
        self.table.clear();
        self.table.extend(&self.fresh_table[..]);
        Ok(())
    }
}

impl Kernel for Cluster7 {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        run_on_events(run, FLAG_VERIFY, |events| self.decide(events))
    }
}

impl Cluster7 {
    fn decide(&mut self, run: &mut EventRun<'_, '_>) -> Result<(), Fault> {
        let args = Cluster7Args::from_bytes(&run.read_args()?);
        if let Some(&reserved) = args.reserved.iter().find(|&&word| word != 0) {
            return Err(Fault::new(Cause::ReservedNotZero, reserved));
        }
        let verify = run.flags & FLAG_VERIFY != 0;
        let batch = Batch::new(args.first_event, args.n_events)?;
        let summaries = batch.summaries(run)?;
        let decisions = MemoryRange::new(args.decisions, u64::from(batch.n_events) * DECISION_BYTES as u64);
        run.memory.check(decisions).map_err(outside(Cause::DecisionsOutsideMemory))?;
        self.use_geometry(run, args.geometry)?;
        let buffers = self.list.read(run, Cluster7Args::BYTES, args.n_sources)?;
        let geometry = MemoryRange::new(args.geometry, GEOMETRY_BYTES as u64);
        let inputs = buffers.iter().map(PacketBuffer::span).chain([run.args, geometry]);
        check_disjoint(&[summaries, decisions], inputs)?;
        let crate_index_of = |source: u32| args.trace_sources.iter().position(|&traces| traces == source);
        for source in args.trace_sources {
            if !buffers.iter().any(|buffer| buffer.source == source) {
                return Err(Fault::new(Cause::TraceSourceMissing, source.into()));
            }
        }

        let inspected =
            buffers.iter().copied().filter(|buffer| verify || crate_index_of(buffer.source).is_some());
        let sources = self.packets.open(run.memory, inspected, batch);
        if let Some(memory) = run.memory.gpu_memory() {
            self.gpu.find(sources, batch, &mut run.counters, verify);
            let trigger = GpuTrigger {
                geometry: &self.fresh_table,
                threshold: args.threshold,
                decisions: decisions.offset,
            };
            self.gpu.decide(run, memory, trigger, args.trace_sources)?;
            self.gpu.note_decisions(&mut run.counters, &self.patches);
            return self.gpu.publish(run, summaries);
        }
        for (index, event) in batch.events() {
            let mut summary = EventSummary::of(event);
            let mut traces_found = 0;
            for source in sources.iter_mut() {
                let Some(found) = source.fragment(&mut summary, &mut run.counters) else {
                    continue;
                };
                let intact = match crate_index_of(source.id()) {
                    Some(crate_index) if found.payload.len == TRACE_BYTES as u64 => {
                        let traces = self.traces.crate_mut(crate_index);
                        run.memory
                            .read(found.payload.offset, traces)
                            .map_err(outside(Cause::PacketOutsideMemory))?;
                        let intact = !verify || crc32fast::hash(traces) == found.crc;
                        traces_found += usize::from(intact);
                        intact
                    }
                    _ => !verify || self.checker.is_intact(run, found)?,
                };
                if !intact {
                    summary.note_corrupt(&mut run.counters);
                }
            }

            let mut map = [0; DECISION_BYTES];
            if traces_found == CRATES {
                let outcome = self.trigger.decide(&self.traces, args.threshold, &mut map);
                run.counters.decisions_set += outcome.bits_set;
                summary.decisions_set = outcome.bits_set;
                summary.accepted = u32::from(outcome.bits_set != 0);
                if let Some((sample, position)) = outcome.first {
                    summary.first_sample = sample;
                    summary.first_patch = self.patches[usize::from(position)];
                }
            } else {
                summary.status |= STATUS_UNDECIDED;
            }
            run.memory
                .write(decisions.offset + index * DECISION_BYTES as u64, &map)
                .map_err(outside(Cause::DecisionsOutsideMemory))?;
            publish(&summary, run, summaries, index)?;
        }
        Ok(())
    }
}
