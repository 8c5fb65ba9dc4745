//! Layout of a builder unit's landing memory.
//!
//! ```text
//! ┌────────┬────────┬───┬──────────────────────────────────┬───────┬──────────┬───────┐
//! │ slot 0 │ slot 1 │ … │ arguments, summaries, decisions  │ rings │ geometry │ image │
//! └────────┴────────┴───┴────── of slot 0, 1, … ───────────┴───────┴──────────┴───────┘
//! ┌──────────┬──────────┬───┐
//! │ source a │ source b │ … │   one packet area per source, at the same offsets in all slots
//! └──────────┴──────────┴───┘
//! ```
//!
//! A slot starts at a multiple of a page and has one packet area per source. An area holds the source's packet of
//! any batch. The areas behind the slots exist only on a card that runs a kernel. The size of landing memory is
//!
//! `slots × (Σ packet areas, rounded up to a page + kernel areas per slot) + rings + geometry + image`
//!
//! and does not grow during a run.

use crate::core::{Bytes, RuIndex, SlotIndex};
use millstream_camera::format::DECISION_BYTES;
use millstream_camera::trigger::GEOMETRY_BYTES;
use millstream_card::RingLayout;
use millstream_card_abi::MemoryRange;
use millstream_card_abi::events::{Cluster7Args, EventSummary, FunctionArgs, PacketBuffer};
use millstream_fragment::{Alignment, SourceId, SourceKind, mfp};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Slots start at multiples of a page.
const PAGE: u64 = 4096;
/// Packet areas and kernel areas start at multiples of a cache line.
const LINE: u64 = 64;

/// Parameters of a source that determine its packet area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceInfo {
    /// The source.
    pub id: SourceId,
    /// Layout of its payload.
    pub kind: SourceKind,
    /// The readout unit that serves it.
    pub readout: RuIndex,
    /// Length of its longest fragment, in bytes.
    pub max_len: u32,
    /// Alignment of its fragments.
    pub alignment: Alignment,
}

/// The area of one source's packet, at the same offset in every slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketArea {
    /// Id of the source.
    pub source: u32,
    /// Kind of its payload.
    pub kind: u32,
    /// The readout unit that writes there.
    pub readout: RuIndex,
    /// Offset in the slot, in bytes.
    pub offset: u64,
    /// Its size, in bytes.
    pub capacity: u32,
    /// Length of the longest header of the source's packets, in bytes.
    pub header_len: u32,
}

/// The packet areas of a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotLayout {
    /// By readout unit, then by source id.
    pub packets: Vec<PacketArea>,
    /// Size of a slot, a multiple of a page.
    pub slot_bytes: Bytes,
}

/// The packets of a source can be 4 GiB or longer, which the format does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{id}: a batch of {batch} fragments of up to {max_len} B exceeds 4 GiB in one packet; reduce run.batch"
)]
pub struct PacketTooLong {
    /// The source.
    pub id: SourceId,
    /// Its longest fragment, in bytes.
    pub max_len: u32,
    /// Events per batch.
    pub batch: u16,
}

impl SlotLayout {
    /// Gives each source an area that holds its packet of any batch of `batch` events.
    ///
    /// # Errors
    /// A source whose packets can be 4 GiB or longer.
    pub fn new(sources: &[SourceInfo], batch: u16) -> Result<SlotLayout, PacketTooLong> {
        let mut ordered: Vec<_> = sources.iter().collect();
        ordered.sort_by_key(|source| (source.readout, source.id));
        let mut packets = Vec::with_capacity(ordered.len());
        let mut end = 0u64;
        for source in ordered {
            let capacity = mfp::capacity(batch.into(), source.max_len, source.alignment)
                .ok_or(PacketTooLong { id: source.id, max_len: source.max_len, batch })?;
            let offset = end.next_multiple_of(LINE.max(source.alignment.get().into()));
            end = offset + u64::from(capacity);
            packets.push(PacketArea {
                source: source.id.0,
                kind: source.kind.0,
                readout: source.readout,
                offset,
                capacity,
                // A part of the capacity, so it fits.
                header_len: mfp::header_len(batch.into(), source.alignment) as u32,
            });
        }
        Ok(SlotLayout { packets, slot_bytes: Bytes(end.next_multiple_of(PAGE)) })
    }

    /// The areas that a readout unit writes to.
    pub fn of_readout(&self, ru: RuIndex) -> &[PacketArea] {
        &self.packets[self.positions_of_readout(ru)]
    }

    /// Positions of these areas in [`packets`](Self::packets).
    pub fn positions_of_readout(&self, ru: RuIndex) -> Range<usize> {
        let start = self.packets.partition_point(|area| area.readout < ru);
        let end = self.packets.partition_point(|area| area.readout <= ru);
        start..end
    }

    /// Offset of a slot in landing memory, in bytes.
    pub fn slot_offset(&self, slot: SlotIndex) -> u64 {
        u64::from(slot.0) * self.slot_bytes.0
    }
}

/// Areas of a card's kernel, behind the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelAreas {
    /// End of the slots and start of these areas.
    start: u64,
    per_slot: u64,
    args: u64,
    summaries: u64,
    image: Bytes,
    slots: u16,
}

/// Kernel areas of one slot; offsets from the start of card memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotAreas {
    /// Arguments of the kernel.
    pub args: u64,
    /// Size of the arguments, in bytes.
    pub args_len: u64,
    /// One summary per event.
    pub summaries: u64,
    /// Size of the summaries, in bytes.
    pub summaries_len: u64,
    /// One decision map per event.
    pub decisions: u64,
}

impl KernelAreas {
    /// The areas for `slots` slots with batches of `batch` events, and a kernel image of that size.
    pub fn new(layout: &SlotLayout, slots: u16, batch: u16, image: Bytes) -> KernelAreas {
        let head = Cluster7Args::BYTES.max(FunctionArgs::BYTES);
        let args = (head + layout.packets.len() * PacketBuffer::BYTES) as u64;
        let args = args.next_multiple_of(LINE);
        let summaries = (usize::from(batch) * EventSummary::BYTES) as u64;
        let summaries = summaries.next_multiple_of(LINE);
        let decisions = (usize::from(batch) * DECISION_BYTES) as u64;
        let per_slot = args + summaries + decisions.next_multiple_of(LINE);
        KernelAreas { start: layout.slot_offset(SlotIndex(slots)), per_slot, args, summaries, image, slots }
    }

    /// The areas of a slot.
    pub fn of_slot(&self, slot: SlotIndex) -> SlotAreas {
        let args = self.start + u64::from(slot.0) * self.per_slot;
        let summaries = args + self.args;
        SlotAreas {
            args,
            args_len: self.args,
            summaries,
            summaries_len: self.summaries,
            decisions: summaries + self.summaries,
        }
    }

    /// The command ring and the completion ring, with one entry per slot at least.
    pub fn rings(&self) -> RingLayout {
        let end = self.start + u64::from(self.slots) * self.per_slot;
        RingLayout::at(end, u32::from(self.slots).next_power_of_two())
    }

    /// Offset of the geometry table.
    pub fn geometry(&self) -> u64 {
        let rings = self.rings();
        rings.commands + RingLayout::bytes(rings.slots)
    }

    /// Range of the kernel's image.
    pub fn image(&self) -> MemoryRange {
        MemoryRange::new(self.geometry() + GEOMETRY_BYTES as u64, self.image.0)
    }

    /// End of all areas.
    pub fn end(&self) -> Bytes {
        Bytes(self.image().offset + self.image.0)
    }
}

/// Size of landing memory with `slots` slots.
pub fn landing_bytes(layout: &SlotLayout, slots: u16, kernel: Option<&KernelAreas>) -> Bytes {
    kernel.map_or(Bytes(layout.slot_offset(SlotIndex(slots))), KernelAreas::end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(readout: u16, id: u32, max_len: u32, alignment: u32) -> SourceInfo {
        let alignment = Alignment::new(alignment).unwrap();
        SourceInfo { id: SourceId(id), kind: SourceKind(1), readout: RuIndex(readout), max_len, alignment }
    }

    #[test]
    fn areas_of_a_readout_unit_are_contiguous() {
        let sources = [shape(1, 5, 100, 64), shape(0, 9, 100, 64), shape(1, 2, 100, 64)];
        let layout = SlotLayout::new(&sources, 2).unwrap();
        let order = |ru| layout.of_readout(RuIndex(ru)).iter().map(|area| area.source).collect::<Vec<_>>();
        assert_eq!((order(0), order(1), order(2)), (vec![9], vec![2, 5], vec![]));
        // Header of 128 for two fragments, which take 128 each.
        assert_eq!((layout.packets[1].offset, layout.packets[1].capacity), (384, 384));
        assert_eq!(layout.slot_bytes, Bytes(4096));
    }

    #[test]
    fn a_packet_of_4_gib_is_refused() {
        let error = SlotLayout::new(&[shape(0, 7, u32::MAX, 64)], 1).unwrap_err();
        assert_eq!((error.id, error.batch), (SourceId(7), 1));
    }

    proptest! {
        #[test]
        fn nothing_overlaps_and_everything_is_aligned(
            sources in proptest::collection::vec((0u16..4, 1u32..5000, 3u32..=12), 1..20),
            slots in 1u16..40,
            batch in 1u16..=256,
        ) {
            let shapes: Vec<_> = (0..)
                .zip(sources)
                .map(|(id, (readout, max_len, exponent))| shape(readout, id, max_len, 1 << exponent))
                .collect();
            let layout = SlotLayout::new(&shapes, batch).unwrap();
            let mut end = 0;
            for area in &layout.packets {
                let source = &shapes[area.source as usize];
                prop_assert!(area.offset >= end);
                prop_assert!(area.offset.is_multiple_of(64.max(source.alignment.get().into())));
                end = area.offset + u64::from(area.capacity);
            }
            prop_assert!(end <= layout.slot_bytes.0 && layout.slot_bytes.0.is_multiple_of(4096));

            let areas = KernelAreas::new(&layout, slots, batch, Bytes(1000));
            let mut end = layout.slot_offset(SlotIndex(slots));
            for slot in 0..slots {
                let slot = areas.of_slot(SlotIndex(slot));
                prop_assert_eq!(slot.args, end);
                prop_assert_eq!(slot.summaries, slot.args + slot.args_len);
                prop_assert_eq!(slot.decisions, slot.summaries + slot.summaries_len);
                prop_assert!(slot.args.is_multiple_of(64) && slot.decisions.is_multiple_of(64));
                let decisions = u64::from(batch) * DECISION_BYTES as u64;
                end = (slot.decisions + decisions).next_multiple_of(64);
            }
            prop_assert_eq!(areas.rings().commands, end);
            prop_assert!(areas.rings().slots >= slots.into());
            prop_assert_eq!(landing_bytes(&layout, slots, Some(&areas)), areas.end());
        }
    }
}
