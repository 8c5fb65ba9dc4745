//! Copy descriptors: what a card's own engine moves, inside its memory or to and from another card.

use crate::command::{Cause, Fault, numbered};
use crate::layout::layout;
use crate::memory::Span;
use crate::registers::COPY_BYTES;

layout! {
    /// A copy descriptor as it stands in the ring in BAR0.
    pub struct RawCopy[32] {
        0 operation: u8 = "see Copy operations";
        1 flags: u8 = "1: send a message when this copy is complete";
        2 peer: u16 = "number of the other card in the table of peers";
        4 key: u32 = "key of the other card's window";
        8 local: u64 = "offset in this card's memory, or with bit 63 set in its DMA window (BAR2) [bytes]";
        16 remote: u64 = "address in the other card's terms; of a copy within this card like `local` [bytes]";
        24 bytes: u64 = "length [bytes]";
    }
}

const _: () = assert!(RawCopy::BYTES == COPY_BYTES);

numbered! {
    /// What a copy does.
    CopyOperation COPY_OPERATIONS {
        1 Write = "from this card's memory to the other card's";
        2 Read = "from the other card's memory to this card's";
        3 Within = "from `local` to `remote`, both in this card's memory; they may not overlap";
    }
}

/// Bit of an address that means the DMA window instead of card memory.
pub const IN_DMA_WINDOW: u64 = 1 << 63;

/// Flag: send a message when the copy is complete.
pub const COPY_NOTIFY: u8 = 1;

/// A copy to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// What it does.
    pub operation: CopyOperation,
    /// The other card's number in the table of peers.
    pub peer: u16,
    /// The range in this card's memory.
    pub local: Span,
    /// Where the other end is.
    pub remote: u64,
    /// Key of the other card's window.
    pub key: u32,
    /// Whether a message is sent when it is complete.
    pub notify: bool,
}

impl RawCopy {
    /// Whether it is right, and goes the same way as `other`, in all but from where to where, how much, and who hears of it.
    pub(crate) fn goes_with(&self, other: &Copy) -> bool {
        (self.operation, self.peer, self.key) == (other.operation as u8, other.peer, other.key)
            && self.flags & !COPY_NOTIFY == 0
    }
}

impl Copy {
    /// The descriptor as it stands in the ring.
    pub fn to_bytes(self) -> [u8; RawCopy::BYTES] {
        RawCopy {
            operation: self.operation as u8,
            flags: if self.notify { COPY_NOTIFY } else { 0 },
            peer: self.peer,
            key: self.key,
            local: self.local.offset,
            remote: self.remote,
            bytes: self.local.len,
        }
        .to_bytes()
    }

    /// Checks a descriptor against a memory of `memory` bytes and a DMA window of `dma`.
    pub fn from_raw(raw: RawCopy, memory: u64, dma: u64) -> Result<Copy, Fault> {
        let operation = CopyOperation::from_code(raw.operation.into())
            .ok_or(Fault::new(Cause::CopyOperation, raw.operation.into()))?;
        if raw.flags & !COPY_NOTIFY != 0 {
            return Err(Fault::new(Cause::UnknownFlags, raw.flags.into()));
        }
        let local = Span::new(raw.local, raw.bytes);
        let fits = |span: Span| match span.offset & IN_DMA_WINDOW {
            0 => span.fits(memory),
            _ => Span::new(span.offset & !IN_DMA_WINDOW, span.len).fits(dma),
        };
        if !fits(local) {
            return Err(Fault::new(Cause::CopyOutsideMemory, raw.local));
        }
        if operation == CopyOperation::Within {
            let to = Span::new(raw.remote, raw.bytes);
            if !fits(to) || to.overlaps(local) {
                return Err(Fault::new(Cause::CopyOutsideMemory, raw.remote));
            }
        }
        Ok(Copy {
            operation,
            peer: raw.peer,
            local,
            remote: raw.remote,
            key: raw.key,
            notify: raw.flags & COPY_NOTIFY != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_stands_in_the_ring_is_refused_or_lies_in_memory(
            bytes: [u8; 32], operation in 0u8..5, flags in 0u8..3, memory in 0u64..1 << 40, dma in 0u64..1 << 30,
        ) {
            let mut raw = bytes;
            (raw[0], raw[1]) = (operation, flags);
            match Copy::from_raw(RawCopy::from_bytes(&raw), memory, dma) {
                Ok(copy) => {
                    let within = Span::new(copy.local.offset & !IN_DMA_WINDOW, copy.local.len);
                    let size = if within == copy.local { memory } else { dma };
                    prop_assert!(within.fits(size));
                    prop_assert_eq!(copy.to_bytes(), raw);
                }
                Err(fault) => prop_assert!(matches!(
                    fault.cause,
                    Cause::CopyOperation | Cause::CopyOutsideMemory | Cause::UnknownFlags
                )),
            }
        }
    }
}
