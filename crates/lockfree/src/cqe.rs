//! A completion queue entry (CQE) written by a peer, and its slot in shared memory.
//!
//! ```text
//! word 0   qpn        sequence
//!      1   status, opcode  byte_len       the opcode's top bit: solicited
//!      2   imm        wc_flags
//!      3   detail     phase
//! ```
//!
//! The low half of a word is on the left. The last word is stored last: its phase tells the consumer that the entry is
//! complete, and one cache line carries all of it. Every word is accessed whole, so a process that reads while another
//! one writes gets the old or the new word.

use crate::sync::atomic::{AtomicU64, Ordering};

/// One completion. It has no work request id: the owner of the queue keeps that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cqe {
    /// The receiver's queue pair.
    pub qpn: u32,
    /// The receive request: how many were consumed before it, modulo 2^32. For a shared receive queue: its slot.
    pub sequence: u32,
    /// `IBV_WC_*` status.
    pub status: u16,
    /// `IBV_WC_*` operation.
    pub opcode: u16,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data or the invalidated key.
    pub imm: u32,
    /// `IBV_WC_*` flags.
    pub wc_flags: u32,
    /// The sender of a datagram and, in the high byte, its service level; the cause of an error.
    pub detail: u32,
    /// Whether an event for solicited completions is due.
    pub solicited: bool,
}

/// Bits of the opcode in its word; the bit above them is [`Cqe::solicited`].
const OPCODE_MASK: u16 = 0x7fff;

impl Cqe {
    #[inline]
    fn words(self) -> [u64; 3] {
        let opcode = self.opcode & OPCODE_MASK | u16::from(self.solicited) << 15;
        let kind = u32::from(self.status) | u32::from(opcode) << 16;
        [pack(self.qpn, self.sequence), pack(kind, self.byte_len), pack(self.imm, self.wc_flags)]
    }

    #[inline]
    fn from_words(words: [u64; 3], detail: u32) -> Self {
        let [(qpn, sequence), (kind, byte_len), (imm, wc_flags)] = words.map(unpack);
        let (status, opcode) = (kind as u16, (kind >> 16) as u16 & OPCODE_MASK);
        let solicited = kind >> 31 != 0;
        Self { qpn, sequence, status, opcode, byte_len, imm, wc_flags, detail, solicited }
    }
}

#[inline]
fn pack(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline]
fn unpack(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// A completion's slot. The phase of completion number `n`, counted from zero, is `n + 1` modulo 2^32.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub struct CqeSlot([AtomicU64; 4]);

impl CqeSlot {
    /// The phase of the completion in this slot.
    #[inline]
    pub fn phase(&self) -> u32 {
        unpack(self.0[3].load(Ordering::Relaxed)).1
    }

    /// Publishes a completion. The caller is the only producer.
    #[inline]
    pub fn publish(&self, cqe: Cqe, phase: u32) {
        for (slot, word) in self.0.iter().zip(cqe.words()) {
            slot.store(word, Ordering::Relaxed);
        }
        self.0[3].store(pack(cqe.detail, phase), Ordering::Release);
    }

    /// The completion with this phase, if the slot holds it. Its fields may be garbage if a peer breaks the protocol.
    #[inline]
    pub fn read(&self, phase: u32) -> Option<Cqe> {
        let (detail, found) = unpack(self.0[3].load(Ordering::Acquire));
        let [a, b, c, _] = &self.0;
        (found == phase).then(|| Cqe::from_words([a, b, c].map(|word| word.load(Ordering::Relaxed)), detail))
    }

    /// Cancels the completion in this slot: it then names queue pair 0, and the consumer drops it.
    pub fn cancel(&self) {
        self.0[0].store(0, Ordering::Relaxed);
    }

    /// Empties the slot: it seems to hold the completion with this phase only.
    pub fn set_empty(&self, phase: u32) {
        self.0[3].store(pack(0, phase), Ordering::Relaxed);
    }

    /// Copies another slot, which must not change meanwhile.
    pub fn copy_from(&self, from: &Self) {
        for (to, from) in self.0.iter().zip(&from.0) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<CqeSlot>() == 32);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_published_completion_reads_back() {
        let cqe = Cqe {
            qpn: 1,
            sequence: u32::MAX,
            status: 3,
            opcode: OPCODE_MASK,
            byte_len: 5,
            imm: u32::MAX - 1,
            wc_flags: 7,
            detail: 8 << 24,
            solicited: true,
        };
        let slot = CqeSlot::default();
        assert_eq!(slot.read(0), Some(Cqe::default()), "an empty slot has phase zero");
        for phase in [1, u32::MAX, 0] {
            slot.publish(cqe, phase);
            assert_eq!((slot.read(phase), slot.phase()), (Some(cqe), phase));
            assert_eq!(slot.read(phase ^ 1), None);
            let other = CqeSlot::default();
            other.copy_from(&slot);
            assert_eq!(other.read(phase), Some(cqe));
            slot.cancel();
            assert_eq!(slot.read(phase), Some(Cqe { qpn: 0, sequence: 0, ..cqe }));
            slot.set_empty(phase ^ 2);
            assert_eq!(slot.read(phase), None);
        }
    }
}
