//! Where receive slots lie in a node's memory.

use millstream_torus_core::header::HEADER_BYTES;
use millstream_torus_core::route::VirtualChannel;
use millstream_torus_core::router::SlotRef;
use millstream_torus_core::topology::DIRECTIONS;

use crate::engine::EngineOptions;

/// Size of a slot: header and payload (bytes).
#[must_use]
pub(crate) fn slot_bytes(options: &EngineOptions) -> usize {
    HEADER_BYTES + options.packet as usize
}

/// Offset of a slot.
#[must_use]
pub(crate) fn slot_offset(options: &EngineOptions, slot: SlotRef) -> u64 {
    let ring = slot.side.index() * VirtualChannel::COUNT + slot.vc.index();
    let index = ring * usize::from(options.slots) + usize::from(slot.index);
    (index * slot_bytes(options)) as u64
}

/// Size of all slots of a node (bytes).
#[must_use]
pub(crate) fn slots_bytes(options: &EngineOptions) -> usize {
    DIRECTIONS * VirtualChannel::COUNT * usize::from(options.slots) * slot_bytes(options)
}
