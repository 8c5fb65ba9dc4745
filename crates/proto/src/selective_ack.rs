//! Selective acknowledgements, an extension that IBTA does not define.
//!
//! A NAK names one missing packet, so a requester repairs one gap for each round trip. A selective acknowledgement
//! names all: it is a sequence NAK with a bitmap of the packets that arrived behind the gap. It has an opcode of the
//! range for manufacturers (9.2, table 38), and is sent only to a requester that sets a bit for it in the base transport
//! header. The bit is reserved, so other responders ignore it (9.2).

use crate::extended_psn::ExtendedPsn;
use crate::reorder_buffer::{self, ReorderBuffer};

/// Longest bitmap in bytes.
const MAX_LEN: usize = reorder_buffer::PACKETS as usize / 8;

/// Packets behind a gap that the responder has stored.
#[derive(Debug)]
pub(crate) struct StoredPackets {
    /// The packet of the first bit.
    first: ExtendedPsn,
    bits: Vec<u64>,
}

impl StoredPackets {
    /// Reads a bitmap: bit `i` of byte `n` is the packet `first + 8n + i`.
    pub(crate) fn parse(first: ExtendedPsn, bitmap: &[u8]) -> Self {
        let word = |chunk: &[u8]| {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(bytes)
        };
        Self { first, bits: bitmap[..bitmap.len().min(MAX_LEN)].chunks(8).map(word).collect() }
    }

    /// Whether the packet is stored.
    pub(crate) fn has(&self, at: ExtendedPsn) -> bool {
        if at < self.first {
            return false;
        }
        let bit = at.since(self.first);
        self.bits.get(bit as usize / 64).is_some_and(|word| word >> (bit % 64) & 1 != 0)
    }

    /// Behind the last stored packet, `first` if there is none.
    pub(crate) fn end(&self) -> ExtendedPsn {
        let last = self.bits.iter().rposition(|word| *word != 0);
        let bits = last.map_or(0, |last| 64 * (last as u32 + 1) - self.bits[last].leading_zeros());
        self.first.plus(bits)
    }
}

/// Bytes of the bitmap of the packets behind `gap`: a multiple of four.
pub(crate) fn bitmap_len(buffer: &ReorderBuffer, gap: ExtendedPsn) -> usize {
    let packets = buffer.last().filter(|last| *last > gap).map_or(0, |last| last.since(gap));
    (packets.div_ceil(8) as usize).next_multiple_of(4)
}

/// Writes the bitmap of the packets behind `gap`, for which there is room.
pub(crate) fn emit_bitmap(buffer: &ReorderBuffer, gap: ExtendedPsn, bitmap: &mut [u8]) {
    bitmap.fill(0);
    for (bit, is_stored) in buffer.behind(gap).take(8 * bitmap.len()).enumerate() {
        bitmap[bit / 8] |= u8::from(is_stored) << (bit % 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_wire::Psn;

    #[test]
    fn a_bitmap_has_a_bit_for_each_stored_packet() {
        let first = ExtendedPsn::first(Psn::new(0xff_fff0));
        let stored = StoredPackets::parse(first, &[0b101, 0, 0, 0, 0, 0, 0, 0, 0, 0b10, 0, 0]);
        let all: Vec<_> = (0..200).filter(|n| stored.has(first.plus(*n))).collect();
        assert_eq!(all, [0, 2, 73]);
        assert_eq!(stored.end(), first.plus(74));
        assert!(!stored.has(first.before()));
    }

    #[test]
    fn an_empty_bitmap_stores_nothing() {
        let first = ExtendedPsn::first(Psn::new(3));
        for bitmap in [&[][..], &[0; 4], &[0; 256]] {
            assert_eq!(StoredPackets::parse(first, bitmap).end(), first);
        }
    }

    #[test]
    fn longer_bitmaps_than_the_buffer_are_cut() {
        let first = ExtendedPsn::first(Psn::new(3));
        assert_eq!(StoredPackets::parse(first, &[0xff; 1000]).end(), first.plus(2048));
    }
}
