//! Packets that came before their turn, kept until it comes: what was lost is then all that has to come again.
//!
//! To the peer it is as if the network had held them back. They are bounded in number and bytes.

use std::collections::BTreeMap;

use millstream_wire::{ICRC_LEN, Packet};

use crate::sequence::Sequence;

/// Packets ahead of the next one that are kept, at most.
const PACKETS: u32 = 2048;
/// Bytes of them.
const BYTES: usize = 2 << 20;

/// Packets from beyond a gap, by their places.
#[derive(Debug, Default)]
pub(crate) struct Early {
    packets: BTreeMap<Sequence, Box<[u8]>>,
    bytes: usize,
}

impl Early {
    /// Keeps a packet if it is near enough, and there is room; whether it did.
    pub(crate) fn keep(&mut self, expected: Sequence, at: Sequence, packet: &Packet<&[u8]>) -> bool {
        let len = packet.covered().len() + ICRC_LEN;
        if at.since(expected) >= PACKETS || self.bytes + len > BYTES {
            return false;
        }
        // What comes again is the same, or one of them is forged: the sender itself sends more than once.
        let bytes = [packet.covered(), &packet.icrc()].concat().into_boxed_slice();
        self.bytes += len;
        if let Some(former) = self.packets.insert(at, bytes) {
            self.bytes -= former.len();
        }
        true
    }

    /// The packet whose turn it is; those whose turn is over are forgotten.
    pub(crate) fn take(&mut self, expected: Sequence) -> Option<Box<[u8]>> {
        while let Some(first) = self.packets.first_entry().filter(|first| *first.key() <= expected) {
            let (at, bytes) = first.remove_entry();
            self.bytes -= bytes.len();
            if at == expected {
                return Some(bytes);
            }
        }
        None
    }

    /// Whether a packet is there.
    pub(crate) fn has(&self, at: Sequence) -> bool {
        self.packets.contains_key(&at)
    }

    /// The next packet from `at` on.
    pub(crate) fn next(&self, at: Sequence) -> Option<Sequence> {
        self.packets.range(at..).next().map(|(at, _)| *at)
    }

    /// The packet farthest ahead.
    pub(crate) fn last(&self) -> Option<Sequence> {
        self.packets.last_key_value().map(|(at, _)| *at)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}
