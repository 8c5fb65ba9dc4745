//! Checksums and trigger decisions of a batch, on the GPU in whose memory the packets are.
//!
//! The card parses the packets' headers, as for every kind of memory, and uploads a list of fragments. The GPU reads the payload.

use std::ffi::CStr;

use millstream_camera::format::{CRATES, DECISION_BYTES, PATCHES};
use millstream_camera::trigger::GEOMETRY_BYTES;
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::Fault;
use millstream_gpu::{BLOCK_THREADS, CudaError, CudaMemory, Gpu, Module, Parameter};

use super::{Scratch, failed, wait};
use crate::kernel::KernelRun;

/// `events.cu`, compiled.
const PTX: &[u8] = concat!(include_str!("events.ptx"), "\0").as_bytes();

/// Bytes of a fragment, an event and a result in the lists of `events.cu`.
const FRAGMENT: usize = 16;
const EVENT: usize = 40;
const RESULT: usize = 8;

/// Number of a fragment whose checksum does not count.
pub(crate) const NO_CHECKSUM: u32 = u32::MAX;

/// A fragment in card memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuFragment {
    pub(crate) payload: MemoryRange,
    /// The checksum that it should have.
    pub(crate) crc: u32,
}

/// An event to decide on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuEvent {
    /// Offsets of the traces in card memory, by crate; none if one is missing.
    pub(crate) traces: Option<[u64; CRATES]>,
    /// Numbers of the traces' fragments, or [`NO_CHECKSUM`].
    pub(crate) fragments: [u32; CRATES],
}

/// The decision on an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuDecision {
    pub(crate) bits_set: u32,
    /// Sample and decision position of the first bit set.
    pub(crate) first: Option<(u16, u16)>,
}

/// The trigger's parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuTrigger<'a> {
    pub(crate) geometry: &'a [u8; GEOMETRY_BYTES],
    pub(crate) threshold: u32,
    /// Offset of the decision maps in card memory.
    pub(crate) decisions: u64,
}

/// The kernels, and the lists of the current batch.
#[derive(Debug)]
pub(crate) struct GpuEvents {
    module: Module,
    scratch: Scratch,
    lists: Vec<u8>,
    checksums: Vec<u32>,
    decisions: Vec<GpuDecision>,
}

impl GpuEvents {
    /// Compiles the kernels for a GPU.
    pub(crate) fn new(gpu: &Gpu) -> Result<GpuEvents, Fault> {
        let ptx = CStr::from_bytes_with_nul(PTX).expect("PTX has no zero byte but its last");
        let module = Module::load(gpu, ptx).map_err(|error| failed(&error))?;
        Ok(GpuEvents {
            module,
            scratch: Scratch::default(),
            lists: Vec::new(),
            checksums: Vec::new(),
            decisions: Vec::new(),
        })
    }

    /// Checksums that were found, in the order of the fragments of the latest run.
    pub(crate) fn checksums(&self) -> &[u32] {
        &self.checksums
    }

    /// Decisions, in the order of the events of the latest run.
    pub(crate) fn decisions(&self) -> &[GpuDecision] {
        &self.decisions
    }

    /// Computes the checksums of `fragments`, and with a `trigger` the decisions on `events`, whose maps go to card memory.
    pub(crate) fn run(
        &mut self,
        run: &KernelRun<'_>,
        memory: &CudaMemory,
        fragments: &[GpuFragment],
        trigger: Option<(GpuTrigger<'_>, &[GpuEvent])>,
    ) -> Result<(), Fault> {
        let launched = self.launch(memory, fragments, trigger);
        // Also for the first of two launches, if the second one failed.
        wait(&self.module, run)?;
        launched.map_err(|error| failed(&error))?;
        self.fetch(fragments.len(), trigger.map_or(0, |(_, events)| events.len()))
            .map_err(|error| failed(&error))
    }

    fn launch(
        &mut self,
        memory: &CudaMemory,
        fragments: &[GpuFragment],
        trigger: Option<(GpuTrigger<'_>, &[GpuEvent])>,
    ) -> Result<(), CudaError> {
        let events = trigger.map_or(&[][..], |(_, events)| events);
        let at = Places::new(fragments.len(), events.len());
        self.lists.clear();
        for fragment in fragments {
            self.lists.extend(fragment.payload.offset.to_le_bytes());
            // The length of a fragment in a packet has 32 bits.
            self.lists.extend((fragment.payload.len as u32).to_le_bytes());
            self.lists.extend([0; 4]);
        }
        for event in events {
            event
                .traces
                .unwrap_or_default()
                .iter()
                .for_each(|offset| self.lists.extend(offset.to_le_bytes()));
            event.fragments.iter().for_each(|number| self.lists.extend(number.to_le_bytes()));
            self.lists.extend(u32::from(event.traces.is_some()).to_le_bytes());
        }
        self.lists.extend(trigger.map_or(&[][..], |(trigger, _)| &trigger.geometry[..]));
        self.lists.resize(at.expected, 0);
        fragments.iter().for_each(|fragment| self.lists.extend(fragment.crc.to_le_bytes()));
        self.lists.resize(at.results, 0);
        for _ in events {
            self.lists.extend(u64::from(u32::MAX).rotate_left(32).to_le_bytes());
        }
        let scratch = self.scratch.upload(self.module.gpu(), &self.lists)?;
        let place = |offset: usize| Parameter::Address(scratch, offset as u64);
        if !fragments.is_empty() {
            let parameters = [
                Parameter::Address(memory, 0),
                place(0),
                Parameter::Word(fragments.len() as u64),
                place(at.found),
            ];
            let function = self.module.function(c"fragment_checksums")?;
            // SAFETY: the offsets of the fragments are inside `memory`, those of the lists inside `scratch`. Both live until the
            // launch has ended, for which the caller waits.
            unsafe { self.module.launch(function, fragments.len() as u32, &parameters)? };
        }
        if let Some((trigger, _)) = trigger.filter(|_| !events.is_empty()) {
            let parameters = [
                Parameter::Address(memory, 0),
                place(at.geometry),
                place(at.events),
                Parameter::Word(events.len() as u64),
                Parameter::Word(trigger.threshold.into()),
                place(at.expected),
                place(at.found),
                Parameter::Address(memory, trigger.decisions),
                place(at.results),
            ];
            // A thread makes a byte of a map.
            let blocks = (events.len() * DECISION_BYTES).div_ceil(BLOCK_THREADS as usize);
            let function = self.module.function(c"cluster7")?;
            // SAFETY: as above; the traces and the maps are inside `memory`, and the entries of the geometry in range.
            unsafe { self.module.launch(function, blocks as u32, &parameters)? };
        }
        Ok(())
    }

    fn fetch(&mut self, fragments: usize, events: usize) -> Result<(), CudaError> {
        let at = Places::new(fragments, events);
        let output = &mut self.lists[at.found..];
        self.scratch.read(at.found, output)?;
        let (checksums, results) = output.split_at(at.results - at.found);
        self.checksums.clear();
        self.checksums
            .extend(checksums.as_chunks().0.iter().take(fragments).map(|word| u32::from_le_bytes(*word)));
        self.decisions.clear();
        self.decisions.extend(results.as_chunks::<RESULT>().0.iter().map(|result| {
            let [bits_set, first] =
                [0, 4].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|byte| result[at + byte])));
            let first = (bits_set != 0).then_some((first / PATCHES as u32, first % PATCHES as u32));
            GpuDecision { bits_set, first: first.map(|(sample, position)| (sample as u16, position as u16)) }
        }));
        Ok(())
    }
}

/// Offsets of the lists in scratch memory.
struct Places {
    events: usize,
    geometry: usize,
    expected: usize,
    found: usize,
    results: usize,
}

impl Places {
    fn new(fragments: usize, events: usize) -> Places {
        let geometry = FRAGMENT * fragments + EVENT * events;
        let expected = geometry + if events == 0 { 0 } else { GEOMETRY_BYTES };
        let found = expected + 4 * fragments;
        // Words of eight bytes.
        let results = (found + 4 * fragments).next_multiple_of(8);
        Places { events: FRAGMENT * fragments, geometry, expected, found, results }
    }
}
