//! A batch on a GPU: what the card finds in the packets' headers, and what the GPU finds in the payload.

use millstream_camera::format::{CRATES, TRACE_BYTES};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{EventCounters, Fault};
use millstream_card_abi::events::{EventSummary, STATUS_CORRUPT, STATUS_UNDECIDED};
use millstream_gpu::CudaMemory;

use crate::kernel::events::EventRun;
use crate::kernel::events::packets::{Batch, FoundFragment, SourcePacket, publish};
use crate::kernel::gpu::{GpuEvent, GpuEvents, GpuFragment, GpuTrigger};

/// Keeps its memory from command to command.
#[derive(Debug, Default)]
pub(super) struct GpuBatch {
    /// The kernels, once a run has used a GPU.
    kernels: Option<GpuEvents>,
    summaries: Vec<EventSummary>,
    /// The fragments that were found: position of the event in the batch, and source.
    found: Vec<(usize, u32, FoundFragment)>,
    /// Fragments whose checksum the GPU compares, and the position of their event.
    checked: Vec<GpuFragment>,
    checked_events: Vec<usize>,
    /// A row for each source and event, event by event, and the rows of the fragments that are compared.
    rows: Vec<GpuRow>,
    checked_rows: Vec<usize>,
    events: Vec<GpuEvent>,
}

/// One source's part of an event, as a function for events finds it in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GpuRow {
    /// Offset of the payload in card memory; zero if the fragment is missing.
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) source: u32,
    pub(super) kind: u32,
    /// Zero: the fragment is there; else status bits: missing, bad packet, corrupt.
    pub(super) status: u32,
}

impl GpuRow {
    pub(super) fn append_to(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.offset.to_le_bytes());
        [self.len, self.source, self.kind, self.status]
            .iter()
            .for_each(|word| bytes.extend(word.to_le_bytes()));
    }
}

impl GpuBatch {
    /// Finds the fragments of a batch. The checksums of those that `is_checked` accepts are compared.
    pub(super) fn find(
        &mut self,
        sources: &mut [SourcePacket],
        batch: Batch,
        counters: &mut EventCounters,
        is_checked: impl Fn(u32) -> bool,
    ) {
        self.summaries.clear();
        self.found.clear();
        self.checked.clear();
        self.checked_events.clear();
        self.rows.clear();
        self.checked_rows.clear();
        self.events.clear();
        for (index, event) in batch.events() {
            let index = index as usize;
            let mut summary = EventSummary::of(event);
            for source in sources.iter_mut() {
                let before = std::mem::take(&mut summary.status);
                let found = source.fragment(&mut summary, counters);
                let mut row = GpuRow { source: source.id(), kind: source.kind(), ..GpuRow::default() };
                if let Some(found) = found {
                    // The length of a fragment in a packet has 32 bits.
                    (row.offset, row.len) = (found.payload.offset, found.payload.len as u32);
                    self.found.push((index, source.id(), found));
                    if is_checked(source.id()) {
                        self.checked.push(GpuFragment { payload: found.payload, crc: found.crc });
                        self.checked_events.push(index);
                        self.checked_rows.push(self.rows.len());
                    }
                } else {
                    row.status = summary.status;
                }
                summary.status |= before;
                self.rows.push(row);
            }
            self.summaries.push(summary);
        }
    }

    /// Compares checksums.
    pub(super) fn verify(&mut self, run: &mut EventRun<'_, '_>, memory: &CudaMemory) -> Result<(), Fault> {
        self.run(run, memory, None)
    }

    /// Compares checksums, and decides on each event with the traces of all crates, none of which is corrupt if all are
    /// checked.
    pub(super) fn decide(
        &mut self,
        run: &mut EventRun<'_, '_>,
        memory: &CudaMemory,
        trigger: GpuTrigger<'_>,
        (trace_sources, all_are_checked): ([u32; CRATES], bool),
    ) -> Result<(), Fault> {
        let mut traces = vec![[None; CRATES]; self.summaries.len()];
        for (number, (index, source, found)) in self.found.iter().enumerate() {
            let crate_index = trace_sources.iter().position(|traces| traces == source);
            if let Some(crate_index) = crate_index.filter(|_| found.payload.len == TRACE_BYTES as u64) {
                traces[*index][crate_index] = Some((found.payload.offset, number as u32));
            }
        }
        self.events.extend(traces.into_iter().map(|traces| match traces {
            [Some(first), Some(second), Some(third)] => GpuEvent {
                traces: Some([first.0, second.0, third.0]),
                // If all fragments are checked, their numbers in both lists are the same.
                fragments: all_are_checked.then_some([first.1, second.1, third.1]),
            },
            _ => GpuEvent::default(),
        }));
        self.run(run, memory, Some(trigger))
    }

    fn run(
        &mut self,
        run: &mut EventRun<'_, '_>,
        memory: &CudaMemory,
        trigger: Option<GpuTrigger<'_>>,
    ) -> Result<(), Fault> {
        if self.kernels.is_none() {
            self.kernels = Some(GpuEvents::new(memory.gpu())?);
        }
        let Some(kernels) = &mut self.kernels else { return Ok(()) };
        let trigger = trigger.map(|trigger| (trigger, &self.events[..]));
        kernels.run(run.run(), memory, &self.checked, trigger)?;
        let pairs = self.checked.iter().zip(kernels.checksums()).zip(&self.checked_events);
        for (number, ((fragment, checksum), index)) in (0..).zip(pairs) {
            if fragment.crc == *checksum {
                continue;
            }
            self.summaries[*index].note_corrupt(&mut run.counters);
            self.rows[self.checked_rows[number as usize]].status = STATUS_CORRUPT;
            if let Some(event) = self.events.get_mut(*index)
                && event.fragments.is_some_and(|fragments| fragments.contains(&number))
            {
                event.traces = None;
            }
        }
        Ok(())
    }

    /// The rows of the latest batch, event by event.
    pub(super) fn rows(&self) -> &[GpuRow] {
        &self.rows
    }

    /// Notes a function's decisions in the summaries: each bit of a word is a decision for the event.
    pub(super) fn note_words(&mut self, counters: &mut EventCounters, words: impl Iterator<Item = u32>) {
        for (summary, word) in self.summaries.iter_mut().zip(words) {
            summary.decisions_set = word.count_ones();
            summary.accepted = u32::from(word != 0);
            counters.decisions_set += summary.decisions_set;
        }
    }

    /// Notes the decisions of the latest run in the summaries.
    pub(super) fn note_decisions(&mut self, counters: &mut EventCounters, patches: &[u16]) {
        let decisions = self.kernels.as_ref().map_or(&[][..], GpuEvents::decisions);
        for ((summary, event), decision) in self.summaries.iter_mut().zip(&self.events).zip(decisions) {
            if event.traces.is_none() {
                summary.status |= STATUS_UNDECIDED;
                continue;
            }
            counters.decisions_set += decision.bits_set;
            summary.decisions_set = decision.bits_set;
            summary.accepted = u32::from(decision.bits_set != 0);
            if let Some((sample, position)) = decision.first {
                summary.first_sample = sample;
                summary.first_patch = patches[usize::from(position)];
            }
        }
    }

    /// Writes the summaries into the batch's `summaries`.
    pub(super) fn publish(
        &mut self,
        run: &mut EventRun<'_, '_>,
        summaries: MemoryRange,
    ) -> Result<(), Fault> {
        for (index, summary) in (0..).zip(&self.summaries) {
            publish(summary, run, summaries, index)?;
        }
        Ok(())
    }
}
