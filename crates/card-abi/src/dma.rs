//! DMA descriptors: transfers of a card's DMA engine, inside its memory or with a peer card.

use crate::MemoryRange;
use crate::command::{Cause, Fault, numbered};
use crate::layout;
use crate::registers::DMA_DESCRIPTOR_BYTES;

layout! {
    /// A DMA descriptor as encoded in the ring in BAR0.
    pub struct RawDmaDescriptor[32] {
        0 operation: u8 = "see DMA operations";
        1 flags: u8 = "1: send a message when this transfer is complete";
        2 peer: u16 = "number of the peer in the peer table";
        4 key: u32 = "key of the peer's window";
        8 local: u64 = "offset in this card's memory (BAR4), or with bit 63 set in BAR2 (bytes)";
        16 remote: u64 = "address in the peer's window; for a local transfer: offset like `local` (bytes)";
        24 bytes: u64 = "length (bytes)";
    }
}

const _: () = assert!(RawDmaDescriptor::BYTES == DMA_DESCRIPTOR_BYTES);

numbered! {
    /// Direction of a transfer.
    DmaOperation DMA_OPERATIONS {
        1 Write = "from this card's memory to the peer's";
        2 Read = "from the peer's memory to this card's";
        3 Local = "from `local` to `remote`, both in this card; the ranges must not overlap";
    }
}

/// Bit of an offset that selects BAR2, the DMA window, instead of card memory.
pub const BAR2_OFFSET: u64 = 1 << 63;

/// Flag: send a message when the transfer is complete.
pub const DMA_NOTIFY: u8 = 1;

/// A DMA transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaDescriptor {
    /// Its direction.
    pub operation: DmaOperation,
    /// Number of the peer in the peer table.
    pub peer: u16,
    /// The range in this card's memory.
    pub local: MemoryRange,
    /// Address in the peer's window, or offset in this card.
    pub remote: u64,
    /// Key of the peer's window.
    pub key: u32,
    /// Whether the card sends a message when it is complete.
    pub notify: bool,
}

impl RawDmaDescriptor {
    /// Whether the descriptor has valid flags, and direction, peer and key of `other`.
    #[inline]
    pub fn can_batch_with(&self, other: &DmaDescriptor) -> bool {
        (self.operation, self.peer, self.key) == (other.operation as u8, other.peer, other.key)
            && self.flags & !DMA_NOTIFY == 0
    }
}

impl DmaDescriptor {
    /// Encodes the descriptor.
    #[inline]
    pub fn to_bytes(self) -> [u8; RawDmaDescriptor::BYTES] {
        RawDmaDescriptor {
            operation: self.operation as u8,
            flags: if self.notify { DMA_NOTIFY } else { 0 },
            peer: self.peer,
            key: self.key,
            local: self.local.offset,
            remote: self.remote,
            bytes: self.local.len,
        }
        .to_bytes()
    }

    /// Decodes a descriptor and checks it against `memory` bytes of card memory and `bar2` bytes of BAR2.
    #[inline]
    pub fn from_raw(raw: RawDmaDescriptor, memory: u64, bar2: u64) -> Result<DmaDescriptor, Fault> {
        let operation = DmaOperation::from_code(raw.operation.into())
            .ok_or(Fault::new(Cause::DmaOperation, raw.operation.into()))?;
        if raw.flags & !DMA_NOTIFY != 0 {
            return Err(Fault::new(Cause::UnknownFlags, raw.flags.into()));
        }
        let local = MemoryRange::new(raw.local, raw.bytes);
        let fits = |span: MemoryRange| match span.offset & BAR2_OFFSET {
            0 => span.fits(memory),
            _ => MemoryRange::new(span.offset & !BAR2_OFFSET, span.len).fits(bar2),
        };
        if !fits(local) {
            return Err(Fault::new(Cause::DmaOutsideMemory, raw.local));
        }
        if operation == DmaOperation::Local {
            let to = MemoryRange::new(raw.remote, raw.bytes);
            if !fits(to) || to.overlaps(local) {
                return Err(Fault::new(Cause::DmaOutsideMemory, raw.remote));
            }
        }
        Ok(DmaDescriptor {
            operation,
            peer: raw.peer,
            local,
            remote: raw.remote,
            key: raw.key,
            notify: raw.flags & DMA_NOTIFY != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_descriptor_is_refused_or_inside_memory(
            bytes: [u8; 32], operation in 0u8..5, flags in 0u8..3, memory in 0u64..1 << 40, bar2 in 0u64..1 << 30,
        ) {
            let mut raw = bytes;
            (raw[0], raw[1]) = (operation, flags);
            match DmaDescriptor::from_raw(RawDmaDescriptor::from_bytes(&raw), memory, bar2) {
                Ok(transfer) => {
                    let within = MemoryRange::new(transfer.local.offset & !BAR2_OFFSET, transfer.local.len);
                    let size = if within == transfer.local { memory } else { bar2 };
                    prop_assert!(within.fits(size));
                    prop_assert_eq!(transfer.to_bytes(), raw);
                }
                Err(fault) => prop_assert!(matches!(
                    fault.cause,
                    Cause::DmaOperation | Cause::DmaOutsideMemory | Cause::UnknownFlags
                )),
            }
        }
    }
}
