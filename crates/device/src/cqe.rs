//! A completion that a peer produced, and its place in shared memory.
//!
//! ```text
//! word 0   qpn        sequence
//!      1   status, opcode  byte_len
//!      2   imm        wc_flags
//!      3   detail     stamp
//! ```
//!
//! The low half of a word is on the left. The last word, which holds the stamp, is stored last: it tells the
//! consumer that the rest is there, and one cache line brings it all. Every word is accessed whole, so what a
//! process reads while another one writes is old or new, and never undefined.

use millstream_shm::sync::atomic::{AtomicU64, Ordering};

/// One completion. The request's name is not in it: the owner knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cqe {
    pub(crate) qpn: u32,
    /// Which receive request: how many were consumed before it, modulo 2^32; its slot, if it came
    /// from a shared receive queue.
    pub(crate) sequence: u32,
    pub(crate) status: u16,
    pub(crate) opcode: u16,
    pub(crate) byte_len: u32,
    pub(crate) imm: u32,
    pub(crate) wc_flags: u32,
    /// The sender of a datagram and, in the high byte, what stands for its service level; the cause of an error.
    pub(crate) detail: u32,
}

impl Cqe {
    #[inline]
    fn words(self) -> [u64; 3] {
        let kind = u32::from(self.status) | u32::from(self.opcode) << 16;
        [pack(self.qpn, self.sequence), pack(kind, self.byte_len), pack(self.imm, self.wc_flags)]
    }

    #[inline]
    fn from_words(words: [u64; 3], detail: u32) -> Self {
        let [(qpn, sequence), (kind, byte_len), (imm, wc_flags)] = words.map(unpack);
        let (status, opcode) = (kind as u16, (kind >> 16) as u16);
        Self { qpn, sequence, status, opcode, byte_len, imm, wc_flags, detail }
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

/// Where a completion lies. The stamp of the `n`th to be produced, counted from zero, is `n + 1` modulo 2^32.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub(crate) struct Place([AtomicU64; 4]);

impl Place {
    /// The stamp of the completion that is here, or of none.
    #[inline]
    pub(crate) fn stamp(&self) -> u32 {
        unpack(self.0[3].load(Ordering::Relaxed)).1
    }

    /// Puts a completion here, for all to see. The caller is the only producer.
    #[inline]
    pub(crate) fn publish(&self, cqe: Cqe, stamp: u32) {
        for (place, word) in self.0.iter().zip(cqe.words()) {
            place.store(word, Ordering::Relaxed);
        }
        self.0[3].store(pack(cqe.detail, stamp), Ordering::Release);
    }

    /// The completion with this stamp, if it is here. It may be garbage if a peer breaks the protocol.
    #[inline]
    pub(crate) fn read(&self, stamp: u32) -> Option<Cqe> {
        let (detail, found) = unpack(self.0[3].load(Ordering::Acquire));
        let [a, b, c, _] = &self.0;
        (found == stamp).then(|| Cqe::from_words([a, b, c].map(|word| word.load(Ordering::Relaxed)), detail))
    }

    /// Lets the consumer drop the completion that is here, when it comes to it.
    pub(crate) fn forget(&self) {
        self.0[0].store(0, Ordering::Relaxed);
    }

    /// Says that no completion is here but, it seems, the one with this stamp.
    pub(crate) fn clear(&self, stamp: u32) {
        self.0[3].store(pack(0, stamp), Ordering::Relaxed);
    }

    /// Takes what is at another place, which nobody changes meanwhile.
    pub(crate) fn copy(&self, from: &Self) {
        for (to, from) in self.0.iter().zip(&from.0) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn completions_survive_the_way() {
        let cqe = Cqe {
            qpn: 1,
            sequence: u32::MAX,
            status: 3,
            opcode: u16::MAX,
            byte_len: 5,
            imm: u32::MAX - 1,
            wc_flags: 7,
            detail: 8 << 24,
        };
        let place = Place::default();
        assert_eq!(place.read(0), Some(Cqe::default()), "an empty place has the stamp zero");
        for stamp in [1, u32::MAX, 0] {
            place.publish(cqe, stamp);
            assert_eq!((place.read(stamp), place.stamp()), (Some(cqe), stamp));
            assert_eq!(place.read(stamp ^ 1), None);
            let other = Place::default();
            other.copy(&place);
            assert_eq!(other.read(stamp), Some(cqe));
            place.forget();
            assert_eq!(place.read(stamp), Some(Cqe { qpn: 0, sequence: 0, ..cqe }));
            place.clear(stamp ^ 2);
            assert_eq!(place.read(stamp), None);
        }
    }
}
