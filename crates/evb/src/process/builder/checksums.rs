//! Corruption by source: compares payload in landing memory with its checksums.
//!
//! A kernel that verifies checksums finds corrupt events; only these are read here, to name the sources. Without such a
//! kernel the policy decides: all batches, one of [`SAMPLE`], or none.

use super::landing::LandingMemory;
use super::slot_contents::{HeaderReader, InvalidSlotData};
use crate::config::ChecksumPolicy;
use crate::core::SlotIndex;
use crate::core::plan::Batch;
use crate::layout::SlotLayout;
use serde::{Deserialize, Serialize};

/// With [`ChecksumPolicy::Sample`], one of this many batches is verified.
const SAMPLE: u64 = 64;
/// Payload that is compared in one piece (bytes).
const CHUNK: usize = 64 << 10;

/// Fragments of one source that were compared with their checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceChecksums {
    /// Id of the source.
    pub source: u32,
    /// Fragments compared.
    pub checked: u64,
    /// Those with another checksum.
    pub corrupt: u64,
}

/// Compares fragments and counts by source.
pub(super) struct ChecksumChecker {
    policy: ChecksumPolicy,
    /// Whether the kernel compares every fragment.
    kernel_verifies: bool,
    counts: Vec<SourceChecksums>,
    chunk: Vec<u8>,
    /// Corrupt fragments by event of the current batch.
    corrupt: Vec<u32>,
}

impl ChecksumChecker {
    pub(super) fn new(policy: ChecksumPolicy, kernel_verifies: bool, layout: &SlotLayout) -> ChecksumChecker {
        let count = |source| SourceChecksums { source, ..SourceChecksums::default() };
        ChecksumChecker {
            policy,
            kernel_verifies,
            counts: layout.packets.iter().map(|area| count(area.source)).collect(),
            chunk: vec![0; CHUNK],
            corrupt: Vec::new(),
        }
    }

    /// The counts of sources of which fragments were compared.
    pub(super) fn counts(&self) -> Vec<SourceChecksums> {
        self.counts.iter().filter(|source| source.checked > 0).copied().collect()
    }

    /// Counts fragments that the kernel compares.
    pub(super) fn note_arrived(&mut self, position: usize, fragments: u32) {
        if self.kernel_verifies {
            self.counts[position].checked += u64::from(fragments);
        }
    }

    /// Whether the processor compares the batch: no kernel does, and the policy selects it.
    pub(super) fn selects(&self, batch: &Batch) -> bool {
        !self.kernel_verifies
            && match self.policy {
                ChecksumPolicy::All => true,
                ChecksumPolicy::Sample => batch.id.0.is_multiple_of(SAMPLE),
                ChecksumPolicy::None => false,
            }
    }

    /// Compares the fragments of the batch in the slot for which `wanted` holds; `event` counts from the first of the
    /// batch. Returns the corrupt fragments by event.
    pub(super) fn check(
        &mut self,
        (landing, layout, reader): (&LandingMemory, &SlotLayout, &mut HeaderReader),
        slot: SlotIndex,
        batch: &Batch,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<&[u32], InvalidSlotData> {
        self.corrupt.clear();
        self.corrupt.resize(batch.events.into(), 0);
        let slot_offset = layout.slot_offset(slot);
        for (area, count) in layout.packets.iter().zip(&mut self.counts) {
            let header = reader.read(landing, slot_offset, area)?;
            for entry in header.entries() {
                // The header was found to be of this batch when it arrived; a peer may have changed it since.
                let Ok(event) = usize::try_from(entry.event.wrapping_sub(batch.first_event.0)) else {
                    continue;
                };
                if event >= self.corrupt.len() || !wanted(event) {
                    continue;
                }
                let at = slot_offset + area.offset + u64::from(entry.offset);
                let crc = crc_of(landing, at, entry.len as usize, &mut self.chunk)?;
                if !self.kernel_verifies {
                    count.checked += 1;
                }
                if crc != entry.crc {
                    count.corrupt += 1;
                    self.corrupt[event] += 1;
                }
            }
        }
        Ok(&self.corrupt)
    }
}

/// CRC-32 of a range of landing memory.
fn crc_of(
    landing: &LandingMemory,
    mut at: u64,
    mut len: usize,
    chunk: &mut [u8],
) -> Result<u32, InvalidSlotData> {
    let mut crc = crc32fast::Hasher::new();
    while len > 0 {
        let piece = &mut chunk[..len.min(CHUNK)];
        landing.read(at, piece)?;
        crc.update(piece);
        at += piece.len() as u64;
        len -= piece.len();
    }
    Ok(crc.finalize())
}
