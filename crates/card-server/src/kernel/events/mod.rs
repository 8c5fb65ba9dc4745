//! Kernels that work on the packets of a batch of events, in place.
//!
//! A user may still be writing the arguments in card memory. A kernel therefore copies them, checks the copy
//! and uses the copy. Event kernels access packets anywhere in card memory, so they need all banks.

pub mod cluster7;
pub mod function;
mod gpu;
mod gpu_function;
mod packets;
#[cfg(test)]
mod tests;
pub mod verify;

pub(crate) use self::gpu_function::{EVENT_FUNCTION, PtxEventKernel};

use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, EventCounters, Fault};

use crate::kernel::{KernelRun, outside};
use crate::memory::Memory;

/// One run of an event kernel: its checked arguments, and its counters.
///
/// Argument words: `args_offset`, `args_len`, `result_offset`, `result_len`, `flags`, as in a command
/// descriptor. Result words: events, fragments, corrupt fragments, decisions set, payload (bytes).
#[derive(Debug)]
pub struct EventRun<'r, 'a> {
    run: &'r KernelRun<'a>,
    /// Card memory.
    pub memory: &'a Memory,
    /// Flags of the command; the kernel knows all of them.
    pub flags: u32,
    /// Arguments, inside card memory.
    pub args: MemoryRange,
    /// Range for the result, inside card memory.
    pub result: MemoryRange,
    /// Counters of this run.
    pub counters: EventCounters,
}

impl<'r, 'a> EventRun<'r, 'a> {
    /// Reads the arguments of a run and checks them; `known_flags` are the flags that the kernel accepts.
    fn new(run: &'r KernelRun<'a>, known_flags: u32) -> Result<EventRun<'r, 'a>, Fault> {
        let [args_offset, args_len, result_offset, result_len, flags, ..] = *run.arguments();
        let banks = run.banks();
        let memory = banks.whole().ok_or(Fault::new(Cause::BanksNotGranted, banks.mask()))?;
        let flags = u32::try_from(flags).unwrap_or(u32::MAX);
        let unknown = flags & !known_flags;
        if unknown != 0 {
            return Err(Fault::new(Cause::UnknownFlags, unknown.into()));
        }
        let (args, result) =
            (MemoryRange::new(args_offset, args_len), MemoryRange::new(result_offset, result_len));
        memory.check(args).map_err(outside(Cause::ArgsOutsideMemory))?;
        memory.check(result).map_err(outside(Cause::ResultOutsideMemory))?;
        Ok(EventRun { run, memory, flags, args, result, counters: EventCounters::default() })
    }

    /// The run, for kernels that read more of it than the arguments.
    pub fn run(&self) -> &'r KernelRun<'a> {
        self.run
    }

    /// Advances the heartbeat; a fault if the run has to end. Call it once per event or every few microseconds.
    pub fn beat(&self) -> Result<(), Fault> {
        self.run.beat()
    }

    /// Copies the first `N` bytes of the arguments, which must have at least as many.
    pub fn read_args<const N: usize>(&self) -> Result<[u8; N], Fault> {
        if self.args.len < N as u64 {
            return Err(Fault::new(Cause::ArgsLength, self.args.len));
        }
        self.memory.read_array(self.args.offset).map_err(outside(Cause::ArgsOutsideMemory))
    }
}

/// Runs an event kernel's `body` on the arguments of `run`, and publishes its counters as results, also after a
/// fault.
pub fn run_on_events(
    run: &mut KernelRun<'_>,
    known_flags: u32,
    body: impl FnOnce(&mut EventRun<'_, '_>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut events = EventRun::new(run, known_flags)?;
    let outcome = body(&mut events);
    let counters = events.counters;
    for (index, word) in counters.to_words().into_iter().enumerate() {
        run.set_result(index, word);
    }
    run.add_traffic(counters.payload_bytes, 0);
    run.set_progress(counters.events.into());
    outcome
}
