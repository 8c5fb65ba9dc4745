//! Reorder buffer: holds packets that arrived behind a gap, so that only the missing packets must be
//! retransmitted.
//!
//! The peer cannot distinguish this from a delay in the network. The buffer is bounded in packets and bytes.
//!
//! A stored packet had a PSN in a range, not the expected one, so it is easier to forge. The callers store only
//! packets from the UDP source port in use. If two packets with one PSN differ, one of them is forged: neither
//! is kept, and the PSN is accepted in sequence only.

use std::collections::{BTreeSet, VecDeque};

use millstream_wire::{ICRC_LEN, Operation, Packet};

use crate::extended_psn::ExtendedPsn;

/// Largest distance from the expected packet, in packets.
pub(crate) const PACKETS: u32 = 2048;
/// Largest sum of packet lengths in bytes: the payload of a connection's largest window, and headers.
const BYTES: usize = (2 << 20) + PACKETS as usize * 64;
/// Most bytes of buffers of former packets that are kept for later ones.
const SPARE_BYTES: usize = 1 << 20;
/// Packets in sequence after which they are freed.
const LOSS_FREE_PACKETS: u32 = 16_384;

/// Packets behind a gap, by sequence number.
#[derive(Debug, Default)]
pub(crate) struct ReorderBuffer {
    /// Sequence number of the first slot.
    first: ExtendedPsn,
    slots: VecDeque<Option<Vec<u8>>>,
    stored: usize,
    /// Positions at which two different packets arrived.
    conflicts: BTreeSet<ExtendedPsn>,
    bytes: usize,
    spare: Vec<Vec<u8>>,
    /// Packets in sequence since the last one was stored.
    loss_free: u32,
}

impl ReorderBuffer {
    /// Stores a packet if it is in range and there is room; returns whether it did.
    pub(crate) fn keep(&mut self, expected: ExtendedPsn, at: ExtendedPsn, packet: &Packet<&[u8]>) -> bool {
        let len = packet.covered().len() + ICRC_LEN;
        if at.since(expected) >= PACKETS || self.bytes + len > BYTES || self.conflicts.contains(&at) {
            return false;
        }
        if self.slots.is_empty() {
            self.first = expected;
        }
        let index = at.since(self.first) as usize;
        if index >= self.slots.len() {
            self.slots.resize(index + 1, None);
        }
        let slot = &mut self.slots[index];
        match slot {
            None => {
                let mut bytes = self.spare.pop().unwrap_or_default();
                bytes.reserve_exact(len);
                bytes.extend_from_slice(packet.covered());
                bytes.extend_from_slice(&packet.icrc());
                *slot = Some(bytes);
                self.stored += 1;
                self.bytes += len;
                self.loss_free = 0;
                true
            }
            Some(former) if is_retransmission(former, packet) => true,
            Some(former) => {
                self.bytes -= former.len();
                self.stored -= 1;
                *slot = None;
                self.conflicts.insert(at);
                false
            }
        }
    }

    /// Removes the packet at `expected`, and drops all before it. [`recycle`](Self::recycle) takes its buffer back.
    pub(crate) fn take(&mut self, expected: ExtendedPsn) -> Option<Vec<u8>> {
        while self.conflicts.first().is_some_and(|first| *first <= expected) {
            self.conflicts.pop_first();
        }
        while self.first <= expected && self.stored > 0 {
            let at = self.first;
            self.first = at.plus(1);
            if let Some(bytes) = self.slots.pop_front().flatten() {
                self.bytes -= bytes.len();
                self.stored -= 1;
                if at == expected {
                    return Some(bytes);
                }
                self.recycle(bytes);
            }
        }
        if self.stored == 0 {
            self.slots.clear();
        }
        None
    }

    /// Keeps the buffer of a packet for a later one.
    pub(crate) fn recycle(&mut self, mut bytes: Vec<u8>) {
        if (self.spare.len() + 1) * bytes.capacity() <= SPARE_BYTES {
            bytes.clear();
            self.spare.push(bytes);
        }
    }

    /// Notes a packet in sequence.
    #[inline]
    pub(crate) fn in_sequence(&mut self) {
        if !self.spare.is_empty() {
            self.loss_free += 1;
            if self.loss_free == LOSS_FREE_PACKETS {
                self.spare = Vec::new();
            }
        }
    }

    /// Whether the packet at `at` is stored.
    pub(crate) fn has(&self, at: ExtendedPsn) -> bool {
        at >= self.first && self.slots.get(at.since(self.first) as usize).is_some_and(Option::is_some)
    }

    /// The first stored packet at or after `at`.
    pub(crate) fn next(&self, at: ExtendedPsn) -> Option<ExtendedPsn> {
        let from = if at < self.first { 0 } else { at.since(self.first) as usize };
        let index = (from..self.slots.len()).find(|index| self.slots[*index].is_some())?;
        Some(self.first.plus(index as u32))
    }

    /// The last stored packet.
    pub(crate) fn last(&self) -> Option<ExtendedPsn> {
        self.slots.iter().rposition(Option::is_some).map(|index| self.first.plus(index as u32))
    }

    /// Whether each packet behind the expected one is stored, up to the last stored one.
    pub(crate) fn behind(&self, expected: ExtendedPsn) -> impl Iterator<Item = bool> {
        let next = expected.plus(1);
        // Slots in front of it remain until the expected packet is taken.
        let index = next.since(self.first.min(next));
        self.slots.iter().skip(index as usize).map(Option::is_some)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Whether a packet repeats a stored one. The congestion bits, the AckReq bit and the bit for selective
/// acknowledgements may differ, and with them the ICRC. READ data that was requested again comes with other headers.
fn is_retransmission(stored: &[u8], packet: &Packet<&[u8]>) -> bool {
    if packet.opcode().operation() == Operation::ReadResponse {
        return Packet::new_checked(stored).is_ok_and(|stored| {
            stored.opcode().operation() == Operation::ReadResponse && stored.payload() == packet.payload()
        });
    }
    let (stored, covered) = (&stored[..stored.len() - ICRC_LEN], packet.covered());
    // Byte 4 of the BTH has the congestion bits, byte 8 the others.
    stored.len() == covered.len()
        && [0..4, 5..8, 9..covered.len()].into_iter().all(|part| stored[part.clone()] == covered[part])
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_wire::{Msn, Opcode, Psn, Qpn, Repr, aeth, bth};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn packet(at: ExtendedPsn, payload: &[u8]) -> Vec<u8> {
        let repr = Repr::new(bth::Repr::new(Opcode::RC_SEND_ONLY, Qpn::new(2), at.psn()), payload);
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(&mut bytes);
        bytes
    }

    #[test]
    fn read_data_that_was_requested_again_is_the_same_packet() {
        let read = |opcode, payload: &[u8]| {
            let repr = Repr {
                aeth: Some(aeth::Repr { syndrome: 0x1f, msn: Msn::new(1) }),
                ..Repr::new(bth::Repr::new(opcode, Qpn::new(2), Psn::new(5)), payload)
            };
            let mut bytes = vec![0; repr.buffer_len()];
            repr.emit(&mut bytes);
            bytes
        };
        let expected = ExtendedPsn::first(Psn::new(4));
        let mut buffer = ReorderBuffer::default();
        let mut keep =
            |bytes: &[u8]| buffer.keep(expected, expected.plus(1), &Packet::new_checked(bytes).unwrap());
        assert!(keep(&read(Opcode::RC_READ_RESPONSE_MIDDLE, &[1; 8])));
        assert!(keep(&read(Opcode::RC_READ_RESPONSE_ONLY, &[1; 8])));
        assert!(!keep(&read(Opcode::RC_READ_RESPONSE_ONLY, &[2; 8])), "other data: one of them is forged");
    }

    proptest! {
        /// Packets are stored, repeated, changed and taken in any order; a map is the model.
        #[test]
        fn holds_what_a_map_holds(steps in prop::collection::vec((0_u8..6, 0_u32..70, 0_u8..3), 1..200)) {
            let mut expected = ExtendedPsn::first(Psn::new(0xff_fff0));
            let mut buffer = ReorderBuffer::default();
            let mut model = BTreeMap::new();
            let mut conflicts = BTreeSet::new();
            for (kind, distance, content) in steps {
                let at = expected.plus(distance + 1);
                match kind {
                    0..=3 => {
                        let bytes = packet(at, &[content; 4]);
                        let kept = buffer.keep(expected, at, &Packet::new_checked(&bytes[..]).unwrap());
                        let differs = model.get(&at).is_some_and(|former| *former != bytes);
                        if differs {
                            model.remove(&at);
                            conflicts.insert(at);
                        } else if !conflicts.contains(&at) {
                            model.insert(at, bytes);
                        }
                        prop_assert_eq!(kept, !conflicts.contains(&at));
                    }
                    // The expected packet arrives in sequence.
                    4 => expected = expected.plus(1),
                    _ => {}
                }
                while let Some(bytes) = buffer.take(expected) {
                    prop_assert_eq!(Some(&bytes), model.get(&expected));
                    buffer.recycle(bytes);
                    expected = expected.plus(1);
                }
                model.retain(|at, _| *at > expected);
                conflicts.retain(|at| *at > expected);
                prop_assert_eq!(buffer.last(), model.keys().last().copied());
                prop_assert_eq!(buffer.next(at), model.range(at..).next().map(|(at, _)| *at));
                prop_assert_eq!(buffer.has(at), model.contains_key(&at));
                let behind: Vec<_> =
                    (1..).zip(buffer.behind(expected)).filter(|(_, stored)| *stored).map(|(n, _)| n).collect();
                let all: Vec<u32> = model.keys().map(|at| at.since(expected)).collect();
                prop_assert_eq!(behind, all);
            }
        }
    }
}
