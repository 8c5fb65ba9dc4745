//! Reorder buffer: holds packets that arrived behind a gap, so that only the missing packets must be
//! retransmitted.
//!
//! The peer cannot distinguish this from a delay in the network. The buffer is bounded in packets and bytes.
//!
//! A stored packet had a PSN in a range, not the expected one, so it is easier to forge. The callers store only
//! packets from the UDP source port in use. If two packets with one PSN differ, one of them is forged: neither
//! is kept, and the PSN is accepted in sequence only.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

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
    /// Positions at which two different packets arrived.
    conflicts: BTreeSet<ExtendedPsn>,
    bytes: usize,
}

impl ReorderBuffer {
    /// Stores a packet if it is in range and there is room; returns whether it did.
    pub(crate) fn keep(&mut self, expected: ExtendedPsn, at: ExtendedPsn, packet: &Packet<&[u8]>) -> bool {
        let len = packet.covered().len() + ICRC_LEN;
        if at.since(expected) >= PACKETS || self.bytes + len > BYTES || self.conflicts.contains(&at) {
            return false;
        }
        match self.packets.entry(at) {
            Entry::Vacant(free) => {
                free.insert([packet.covered(), &packet.icrc()].concat().into_boxed_slice());
                self.bytes += len;
                true
            }
            Entry::Occupied(former) if is_retransmission(former.get(), packet.covered()) => true,
            Entry::Occupied(former) => {
                self.bytes -= former.remove().len();
                self.conflicts.insert(at);
                false
            }
        }
    }

    /// Removes the packet at `expected`, and drops all before it.
    pub(crate) fn take(&mut self, expected: ExtendedPsn) -> Option<Box<[u8]>> {
        while self.conflicts.first().is_some_and(|first| *first <= expected) {
            self.conflicts.pop_first();
        }
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

/// Whether a packet repeats a stored one. The congestion bits and the AckReq bit may differ, and with them the
/// ICRC.
fn is_retransmission(stored: &[u8], covered: &[u8]) -> bool {
    let stored = &stored[..stored.len() - ICRC_LEN];
    // Byte 4 of the BTH has the congestion bits, byte 8 the AckReq bit.
    stored.len() == covered.len()
        && [0..4, 5..8, 9..covered.len()].into_iter().all(|part| stored[part.clone()] == covered[part])
}
