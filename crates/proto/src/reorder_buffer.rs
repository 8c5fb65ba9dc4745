//! Reorder buffer: holds packets that arrived behind a gap, so that only the missing packets must be
//! retransmitted.
//!
//! The peer cannot distinguish this from a delay in the network. The buffer is bounded in packets and bytes.

use std::collections::BTreeMap;

use millstream_wire::{ICRC_LEN, Packet};

use crate::extended_psn::ExtendedPsn;

/// Largest distance from the expected packet, in packets.
const PACKETS: u32 = 2048;
/// Largest sum of packet lengths in bytes.
const BYTES: usize = 2 << 20;

/// Packets behind a gap, by sequence number.
#[derive(Debug, Default)]
pub(crate) struct ReorderBuffer {
    packets: BTreeMap<ExtendedPsn, Box<[u8]>>,
    bytes: usize,
}

impl ReorderBuffer {
    /// Stores a packet if it is in range and there is room; returns whether it did.
    pub(crate) fn keep(&mut self, expected: ExtendedPsn, at: ExtendedPsn, packet: &Packet<&[u8]>) -> bool {
        let len = packet.covered().len() + ICRC_LEN;
        if at.since(expected) >= PACKETS || self.bytes + len > BYTES {
            return false;
        }
        // The first copy wins: a retransmission is identical, unless one of them is forged.
        let bytes = [packet.covered(), &packet.icrc()].concat().into_boxed_slice();
        self.bytes += len;
        if let Some(former) = self.packets.insert(at, bytes) {
            self.bytes -= former.len();
        }
        true
    }

    /// Removes the packet at `expected`, and drops all before it.
    pub(crate) fn take(&mut self, expected: ExtendedPsn) -> Option<Box<[u8]>> {
        while let Some(first) = self.packets.first_entry().filter(|first| *first.key() <= expected) {
            let (at, bytes) = first.remove_entry();
            self.bytes -= bytes.len();
            if at == expected {
                return Some(bytes);
            }
        }
        None
    }

    /// Whether the packet at `at` is stored.
    pub(crate) fn has(&self, at: ExtendedPsn) -> bool {
        self.packets.contains_key(&at)
    }

    /// The first stored packet at or after `at`.
    pub(crate) fn next(&self, at: ExtendedPsn) -> Option<ExtendedPsn> {
        self.packets.range(at..).next().map(|(at, _)| *at)
    }

    /// The last stored packet.
    pub(crate) fn last(&self) -> Option<ExtendedPsn> {
        self.packets.last_key_value().map(|(at, _)| *at)
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}
