//! `verify`: checks that each event of a batch is complete and each of its fragments intact.
//!
//! Arguments: [`VerifyArgs`], followed by one [`PacketBuffer`] per source. Result: one [`EventSummary`] per
//! event, in order.

use millstream_card_abi::command::Fault;
use millstream_card_abi::events::{EventSummary, PacketBuffer, VERIFY, VerifyArgs};

use crate::kernel::events::gpu::GpuBatch;
use crate::kernel::events::packets::{Batch, ChecksumChecker, PacketList, Packets, check_disjoint, publish};
use crate::kernel::events::{EventRun, run_on_events};
use crate::kernel::{BuiltinKernel, Kernel, KernelRun};

/// The kernel.
pub const BUILTIN: BuiltinKernel = BuiltinKernel { name: VERIFY, make: || Box::new(Verify::new()) };

#[derive(Debug)]
pub(crate) struct Verify {
    list: PacketList,
    packets: Packets,
    checker: ChecksumChecker,
    gpu: GpuBatch,
}

impl Verify {
    pub(crate) fn new() -> Verify {
        Verify {
            list: PacketList::default(),
            packets: Packets::default(),
            checker: ChecksumChecker::new(),
            gpu: GpuBatch::default(),
        }
    }
}

impl Kernel for Verify {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        run_on_events(run, 0, |events| self.check(events))
    }
}

impl Verify {
    fn check(&mut self, run: &mut EventRun<'_, '_>) -> Result<(), Fault> {
        let args = VerifyArgs::from_bytes(&run.read_args()?);
        let batch = Batch::new(args.first_event, args.n_events)?;
        let summaries = batch.summaries(run)?;
        let buffers = self.list.read(run, VerifyArgs::BYTES, args.n_sources)?;
        check_disjoint(&[summaries], buffers.iter().map(PacketBuffer::span).chain([run.args]))?;

        let sources = self.packets.open(run.memory, buffers.iter().copied(), batch);
        if let Some(memory) = run.memory.gpu_memory() {
            self.gpu.find(sources, batch, &mut run.counters, true);
            self.gpu.verify(run, memory)?;
            return self.gpu.publish(run, summaries);
        }
        for (index, event) in batch.events() {
            let mut summary = EventSummary::of(event);
            for source in sources.iter_mut() {
                let Some(found) = source.fragment(&mut summary, &mut run.counters) else {
                    continue;
                };
                if !self.checker.is_intact(run, found)? {
                    summary.note_corrupt(&mut run.counters);
                }
            }
            publish(&summary, run, summaries, index)?;
        }
        Ok(())
    }
}
