//! A batch on a GPU: what the card finds in the packets' headers, and what the GPU finds in the payload.

use millstream_camera::format::{CRATES, TRACE_BYTES};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{EventCounters, Fault};
use millstream_card_abi::events::{EventSummary, STATUS_CORRUPT, STATUS_UNDECIDED};
use millstream_gpu::CudaMemory;

use crate::kernel::events::EventRun;
use crate::kernel::events::packets::{Batch, FoundFragment, SourcePacket, publish};
use crate::kernel::gpu::{GpuEvent, GpuEvents, GpuFragment, GpuTrigger, NO_CHECKSUM};

/// Keeps its memory from command to command.
#[derive(Debug, Default)]
pub(super) struct GpuBatch {
    /// The kernels, once a run has used a GPU.
    kernels: Option<GpuEvents>,
    summaries: Vec<EventSummary>,
    /// A row for each source and event, event by event.
    rows: Vec<GpuRow>,
    /// Number of sources.
    sources: usize,
    /// Fragments whose checksum the GPU compares, and the positions of their rows, which ascend.
    checked: Vec<GpuFragment>,
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
    /// Finds the fragments of a batch. With `verify`, the GPU compares their checksums.
    pub(super) fn find(
        &mut self,
        sources: &mut [SourcePacket],
        batch: Batch,
        counters: &mut EventCounters,
        verify: bool,
    ) {
        self.sources = sources.len();
        self.summaries.clear();
        self.rows.clear();
        self.checked.clear();
        self.checked_rows.clear();
        self.events.clear();
        for (_, event) in batch.events() {
            let mut summary = EventSummary::of(event);
            for source in sources.iter_mut() {
                let before = std::mem::take(&mut summary.status);
                let found = source.fragment(&mut summary, counters);
                let mut row = GpuRow { source: source.id(), kind: source.kind(), ..GpuRow::default() };
                if let Some(FoundFragment { payload, crc }) = found {
                    // The length of a fragment in a packet has 32 bits.
                    (row.offset, row.len) = (payload.offset, payload.len as u32);
                    if verify {
                        self.checked.push(GpuFragment { payload, crc });
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

    /// Compares checksums, and decides on each event with the traces of all crates, none of which is corrupt.
    pub(super) fn decide(
        &mut self,
        run: &mut EventRun<'_, '_>,
        memory: &CudaMemory,
        trigger: GpuTrigger<'_>,
        trace_sources: [u32; CRATES],
    ) -> Result<(), Fault> {
        for event in 0..self.summaries.len() {
            let first = event * self.sources;
            let rows = &self.rows[first..first + self.sources];
            let is_trace = |row: &GpuRow| row.status == 0 && row.len as usize == TRACE_BYTES;
            let traces =
                trace_sources.map(|source| rows.iter().position(|row| row.source == source && is_trace(row)));
            self.events.push(match traces {
                [Some(one), Some(two), Some(three)] => {
                    let traces = [one, two, three];
                    // None without `verify`: then no checksum is compared.
                    let numbers = traces.map(|row| self.checked_rows.binary_search(&(first + row)).ok());
                    let numbers = numbers.map(|number| number.map_or(NO_CHECKSUM, |number| number as u32));
                    GpuEvent { traces: Some(traces.map(|row| rows[row].offset)), fragments: numbers }
                }
                _ => GpuEvent { traces: None, fragments: [NO_CHECKSUM; CRATES] },
            });
        }
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
        let pairs = self.checked.iter().zip(kernels.checksums()).zip(&self.checked_rows);
        for (number, ((fragment, checksum), row)) in (0..).zip(pairs) {
            if fragment.crc == *checksum {
                continue;
            }
            let index = row / self.sources;
            self.summaries[index].note_corrupt(&mut run.counters);
            self.rows[*row].status = STATUS_CORRUPT;
            if let Some(event) = self.events.get_mut(index)
                && event.fragments.contains(&number)
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
