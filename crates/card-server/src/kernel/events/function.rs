//! Kernels that call a user's function for each event of a batch.
//!
//! The kernel does what all event kernels have in common: it copies and checks the packets' headers, finds the
//! fragments of each event, verifies their checksums, and publishes a summary per event. The [`FunctionForEvents`]
//! decides. It is called for incomplete and corrupt events as well, with a map of what is there.
//!
//! Arguments: [`FunctionArgs`], followed by one [`PacketBuffer`] per source. Result: one
//! [`EventSummary`] per event, in order. Flag [`FLAG_VERIFY`]: verify the
//! checksum of every fragment.

use millstream_card_abi::command::{FLAG_VERIFY, Fault};
use millstream_card_abi::events::{
    EventFragment, EventSummary, FunctionArgs, PacketBuffer, STATUS_BAD_PACKET, STATUS_CORRUPT,
    STATUS_MISSING,
};
use millstream_card_abi::registers::{KERNEL_WORDS, KernelWords};

use crate::kernel::events::EventRun;
use crate::kernel::events::packets::{Batch, ChecksumChecker, PacketList, Packets, check_disjoint, publish};

/// Flags of a kernel that calls a function for events.
pub const FLAGS: u32 = FLAG_VERIFY;

/// One event, as a [`FunctionForEvents`] sees it.
#[derive(Clone, Copy, Debug)]
pub struct EventView<'a> {
    /// Its number.
    pub event: u64,
    /// One entry per source, in the order of the packets, also for missing fragments: the map of what is there.
    pub fragments: &'a [EventFragment],
    /// Offset in card memory of each fragment's payload, in the same order; [`EventFragment::address`] is zero, the
    /// function's host sets it.
    pub offsets: &'a [u64],
}

/// A user's function that decides on events.
pub trait FunctionForEvents {
    /// Starts a batch. The argument words are those of the configuration.
    ///
    /// # Errors
    /// The fault that ends the run.
    fn begin(&mut self, arguments: &KernelWords) -> Result<(), Fault>;

    /// Decides on one event: zero rejects it, each bit of another result is a decision for it.
    ///
    /// # Errors
    /// The fault that ends the run.
    fn call(&mut self, event: &EventView<'_>) -> Result<u32, Fault>;
}

/// Calls a function for each event of a batch. Keeps its memory from command to command.
#[derive(Debug)]
pub struct EventLoop {
    list: PacketList,
    packets: Packets,
    checker: ChecksumChecker,
    fragments: Vec<EventFragment>,
    offsets: Vec<u64>,
}

impl Default for EventLoop {
    fn default() -> EventLoop {
        EventLoop {
            list: PacketList::default(),
            packets: Packets::default(),
            checker: ChecksumChecker::new(),
            fragments: Vec::new(),
            offsets: Vec::new(),
        }
    }
}

impl EventLoop {
    /// Runs the function on the events of `run`.
    ///
    /// # Errors
    /// The arguments are invalid, the run has to end, or the function's fault.
    pub fn run(
        &mut self,
        run: &mut EventRun<'_, '_>,
        function: &mut dyn FunctionForEvents,
    ) -> Result<(), Fault> {
        let args = FunctionArgs::from_bytes(&run.read_args()?);
        let verify = run.flags & FLAG_VERIFY != 0;
        let batch = Batch::new(args.first_event, args.n_events)?;
        let summaries = batch.summaries(run)?;
        let buffers = self.list.read(run, FunctionArgs::BYTES, args.n_sources)?;
        check_disjoint(&[summaries], buffers.iter().map(PacketBuffer::span).chain([run.args]))?;

        let mut words = [0; KERNEL_WORDS];
        words[..args.arguments.len()].copy_from_slice(&args.arguments);
        function.begin(&words)?;
        let sources = self.packets.open(run.memory, buffers.iter().copied(), batch);
        for (index, event) in batch.events() {
            let mut summary = EventSummary::of(event);
            self.fragments.clear();
            self.offsets.clear();
            for source in sources.iter_mut() {
                let before = summary.status;
                summary.status = 0;
                let found = source.fragment(&mut summary, &mut run.counters);
                let mut fragment =
                    EventFragment { source: source.id(), kind: source.kind(), ..EventFragment::default() };
                match found {
                    None => fragment.status = summary.status & (STATUS_MISSING | STATUS_BAD_PACKET),
                    Some(found) => {
                        // The length of a fragment in a packet has 32 bits.
                        (fragment.len, fragment.crc) = (found.payload.len as u32, found.crc);
                        if verify && !self.checker.is_intact(run, found)? {
                            summary.note_corrupt(&mut run.counters);
                            fragment.status = STATUS_CORRUPT;
                        }
                    }
                }
                summary.status |= before;
                self.fragments.push(fragment);
                self.offsets.push(found.map_or(0, |found| found.payload.offset));
            }
            let view = EventView { event, fragments: &self.fragments, offsets: &self.offsets };
            let decisions = function.call(&view)?;
            summary.decisions_set = decisions.count_ones();
            summary.accepted = u32::from(decisions != 0);
            run.counters.decisions_set += summary.decisions_set;
            publish(&summary, run, summaries, index)?;
        }
        Ok(())
    }
}
