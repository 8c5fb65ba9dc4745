//! A user's function for events in PTX, which the GPU calls for a batch.
//!
//! The card parses the packets' headers and the GPU compares checksums, as for `verify`. The user's entry decides. Its
//! parameters, of eight bytes each: address of card memory; address of a table with a row for each event and source, event by
//! event; number of sources; number of events; number of the first event; address of the eight argument words of the
//! configuration; address of a decision word of four bytes for each event, zero before. A row has 24 bytes: offset of the payload
//! in card memory (eight bytes), its length, the source, the kind, and the status bits of the fragment (four bytes each).
//!
//! Arguments and result of the command are those of every function for events: see [`function`](super::function).

use millstream_card_abi::command::{Cause, FLAG_VERIFY, Fault};
use millstream_card_abi::events::{FunctionArgs, PacketBuffer};
use millstream_gpu::{CudaError, CudaMemory, Module, Parameter};

use crate::kernel::events::gpu::GpuBatch;
use crate::kernel::events::packets::{Batch, PacketList, Packets, check_disjoint};
use crate::kernel::events::{EventRun, function, run_on_events};
use crate::kernel::gpu::{Scratch, failed, wait};
use crate::kernel::{Kernel, KernelRun};

/// Name of the entry of a function for events.
pub(crate) const EVENT_FUNCTION: &str = "decide_events";

/// Bytes of a row.
const ROW: usize = 24;

/// A module with a function for events. Keeps its memory from command to command.
#[derive(Debug)]
pub(crate) struct PtxEventKernel {
    module: Module,
    list: PacketList,
    packets: Packets,
    batch: GpuBatch,
    /// The argument words, the decisions and the rows, in GPU memory and to be copied.
    scratch: Scratch,
    bytes: Vec<u8>,
}

impl PtxEventKernel {
    pub(crate) fn new(module: Module) -> PtxEventKernel {
        PtxEventKernel {
            module,
            list: PacketList::default(),
            packets: Packets::default(),
            batch: GpuBatch::default(),
            scratch: Scratch::default(),
            bytes: Vec::new(),
        }
    }

    fn decide(&mut self, run: &mut EventRun<'_, '_>) -> Result<(), Fault> {
        let args = FunctionArgs::from_bytes(&run.read_args()?);
        let verify = run.flags & FLAG_VERIFY != 0;
        let batch = Batch::new(args.first_event, args.n_events)?;
        let summaries = batch.summaries(run)?;
        let buffers = self.list.read(run, FunctionArgs::BYTES, args.n_sources)?;
        check_disjoint(&[summaries], buffers.iter().map(PacketBuffer::span).chain([run.args]))?;
        // A module of PTX is loaded on the GPU that the memory belongs to.
        let memory = run.memory.gpu_memory().ok_or(Fault::new(Cause::MemoryNotMapped, 0))?;
        let sources = self.packets.open(run.memory, buffers.iter().copied(), batch);
        self.batch.find(sources, batch, &mut run.counters, verify);
        if verify {
            self.batch.verify(run, memory)?;
        }
        self.launch(memory, &args).map_err(|error| failed(&error))?;
        wait(&self.module, run.run())?;
        let words = self.fetch(args.n_events as usize).map_err(|error| failed(&error))?;
        self.batch.note_words(&mut run.counters, words.into_iter());
        self.batch.publish(run, summaries)
    }

    fn launch(&mut self, memory: &CudaMemory, args: &FunctionArgs) -> Result<(), CudaError> {
        let events = args.n_events as usize;
        let (decisions, rows) = places(events);
        self.bytes.clear();
        args.arguments.iter().for_each(|word| self.bytes.extend(word.to_le_bytes()));
        self.bytes.resize(rows, 0);
        self.batch.rows().iter().for_each(|row| row.append_to(&mut self.bytes));
        debug_assert_eq!(self.bytes.len(), rows + ROW * self.batch.rows().len());
        let scratch = self.scratch.upload(self.module.gpu(), &self.bytes)?;
        let parameters = [
            Parameter::Address(memory, 0),
            Parameter::Address(scratch, rows as u64),
            Parameter::Word(args.n_sources.into()),
            Parameter::Word(args.n_events.into()),
            Parameter::Word(args.first_event),
            Parameter::Address(scratch, 0),
            Parameter::Address(scratch, decisions as u64),
        ];
        let function = self.module.function(c"decide_events")?;
        // SAFETY: both memories live until the launch has ended, for which the caller waits. A user's function that leaves them,
        // or takes other parameters, acts with the rights of this process, which its author has (SECURITY.md).
        unsafe { self.module.launch(function, args.n_events, &parameters) }
    }

    fn fetch(&self, events: usize) -> Result<Vec<u32>, CudaError> {
        let (decisions, _) = places(events);
        let mut bytes = vec![0; 4 * events];
        self.scratch.read(decisions, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }
}

impl Kernel for PtxEventKernel {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        run_on_events(run, function::FLAGS, |events| self.decide(events))
    }
}

/// Offsets of the decisions and of the rows in scratch memory, behind the argument words.
fn places(events: usize) -> (usize, usize) {
    let decisions = 8 * millstream_card_abi::events::FUNCTION_ARGUMENTS;
    (decisions, (decisions + 4 * events).next_multiple_of(8))
}
