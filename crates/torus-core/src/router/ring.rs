//! Receive slots of one virtual channel, and the sender's credits for them.

use std::collections::VecDeque;

use crate::header::Header;
use crate::route::VirtualChannel;
use crate::topology::Direction;

/// A receive slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotRef {
    /// The side on which the packet came.
    pub side: Direction,
    /// The virtual channel.
    pub vc: VirtualChannel,
    /// The slot in that ring.
    pub index: u16,
}

/// A slot was used against the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// The neighbour filled another slot than the next one.
    #[error("packet in slot {found}, expected slot {expected}")]
    Order {
        /// The slot.
        found: u16,
        /// The next free slot.
        expected: u16,
    },
    /// The neighbour sent without a credit.
    #[error("packet without a credit: all {slots} slots are occupied")]
    Overrun {
        /// Slots of the ring.
        slots: u16,
    },
    /// The virtual channel does not exist.
    #[error("virtual channel {vc} does not exist")]
    UnknownChannel {
        /// The virtual channel.
        vc: u8,
    },
    /// A slot was released that no packet has left.
    #[error("slot {index} is released but not taken")]
    NotTaken {
        /// The slot.
        index: u16,
    },
    /// A link was reset while its slots are in use.
    #[error("a slot of the link is in use")]
    InUse,
}

/// A neighbour returned credits that this node had not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("virtual channel {vc}: {freed} slots freed, but only {sent} packets sent")]
pub struct CreditError {
    /// The virtual channel.
    pub vc: u8,
    /// The neighbour's cumulative count.
    pub freed: u32,
    /// Packets sent so far.
    pub sent: u32,
}

/// The slot that is `by` places behind another one in its ring.
fn advance(slot: u16, by: u16, slots: u16) -> u16 {
    ((u32::from(slot) + u32::from(by)) % u32::from(slots)) as u16
}

/// Slots are filled, and freed, in ring order. Cumulative counts wrap; slots are counted apart, as the number of slots need not
/// divide the range of a count.
#[derive(Clone, Debug)]
pub(super) struct SlotRing {
    slots: u16,
    arrived: u32,
    freed: u32,
    /// The slot of the next packet, and the oldest occupied one.
    next: u16,
    oldest: u16,
    /// Per slot: a packet has left it but an earlier one has not.
    released: Vec<bool>,
    waiting: VecDeque<Header>,
}

impl SlotRing {
    pub(super) fn new(slots: u16) -> SlotRing {
        SlotRing {
            slots,
            arrived: 0,
            freed: 0,
            next: 0,
            oldest: 0,
            released: vec![false; slots.into()],
            waiting: VecDeque::with_capacity(slots.into()),
        }
    }

    pub(super) fn reset(&mut self) {
        *self = SlotRing::new(self.slots);
    }

    pub(super) fn occupied(&self) -> u16 {
        self.arrived.wrapping_sub(self.freed) as u16
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn freed(&self) -> u32 {
        self.freed
    }

    /// More than half full.
    pub(super) fn is_pressed(&self) -> bool {
        self.waiting.len() * 2 > usize::from(self.slots)
    }

    pub(super) fn credit_is_due(&self, advertised: u32) -> bool {
        let unreported = self.freed.wrapping_sub(advertised);
        let known_free = u32::from(self.slots).wrapping_sub(self.arrived.wrapping_sub(advertised));
        unreported > 0 && (known_free == 0 || 2 * unreported >= u32::from(self.slots))
    }

    pub(super) fn arrive(&mut self, slot: u16, header: Header) -> Result<(), SlotError> {
        if self.occupied() >= self.slots {
            return Err(SlotError::Overrun { slots: self.slots });
        }
        if slot != self.next {
            return Err(SlotError::Order { found: slot, expected: self.next });
        }
        self.waiting.push_back(header);
        self.next = advance(self.next, 1, self.slots);
        self.arrived = self.arrived.wrapping_add(1);
        Ok(())
    }

    pub(super) fn head(&self) -> Option<(Header, u16)> {
        let header = *self.waiting.front()?;
        // No more wait than there are slots.
        Some((header, advance(self.next, self.slots - self.waiting.len() as u16, self.slots)))
    }

    pub(super) fn take_head(&mut self) -> Option<(Header, u16)> {
        let head = self.head()?;
        self.waiting.pop_front();
        Some(head)
    }

    pub(super) fn release(&mut self, index: u16) -> Result<(), SlotError> {
        let not_taken = SlotError::NotTaken { index };
        if index >= self.slots {
            return Err(not_taken);
        }
        // Distance of the slot from the oldest occupied one.
        let distance = advance(index, self.slots - self.oldest, self.slots);
        let taken = usize::from(self.occupied()) - self.waiting.len();
        if usize::from(distance) >= taken || self.released[usize::from(index)] {
            return Err(not_taken);
        }
        self.released[usize::from(index)] = true;
        while self.occupied() > 0 {
            if !std::mem::take(&mut self.released[usize::from(self.oldest)]) {
                break;
            }
            self.oldest = advance(self.oldest, 1, self.slots);
            self.freed = self.freed.wrapping_add(1);
        }
        Ok(())
    }
}

/// The sender's side of a [`SlotRing`].
#[derive(Clone, Debug)]
pub(super) struct CreditAccount {
    slots: u16,
    sent: u32,
    freed: u32,
    /// The slot of the next packet.
    next: u16,
}

impl CreditAccount {
    pub(super) fn new(slots: u16) -> CreditAccount {
        CreditAccount { slots, sent: 0, freed: 0, next: 0 }
    }

    pub(super) fn reset(&mut self) {
        *self = CreditAccount::new(self.slots);
    }

    pub(super) fn available(&self) -> u16 {
        self.slots - self.sent.wrapping_sub(self.freed) as u16
    }

    pub(super) fn freed(&self) -> u32 {
        self.freed
    }

    /// Uses a credit: the slot to fill.
    pub(super) fn take(&mut self) -> Option<u16> {
        (self.available() > 0).then(|| {
            self.sent = self.sent.wrapping_add(1);
            let next = advance(self.next, 1, self.slots);
            std::mem::replace(&mut self.next, next)
        })
    }

    pub(super) fn handle(&mut self, vc: VirtualChannel, freed: u32) -> Result<(), CreditError> {
        let newly = freed.wrapping_sub(self.freed);
        // Words overtake each other only backwards: an older count is ignored.
        if newly > u32::MAX / 2 {
            return Ok(());
        }
        if newly > self.sent.wrapping_sub(self.freed) {
            return Err(CreditError { vc: vc.0, freed, sent: self.sent });
        }
        self.freed = freed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::Kind;
    use crate::topology::NodeNumber;

    /// Counts wrap at 2³², which only powers of two divide.
    #[test]
    fn slots_keep_their_order_while_counts_wrap() {
        let header = Header::new(Kind::Put, NodeNumber(0), NodeNumber(1));
        let begin = u32::MAX - 20;
        for slots in [1, 3, 5, 7, 8, 12, 255] {
            let mut ring = SlotRing { arrived: begin, freed: begin, ..SlotRing::new(slots) };
            let mut credits = CreditAccount { sent: begin, freed: begin, ..CreditAccount::new(slots) };
            let mut released = Vec::new();
            for round in 0..6 * usize::from(slots).max(8) {
                // Some rounds fill the ring, and each frees a part of it.
                while credits.available() > u16::from(round % 2 == 0) {
                    let slot = credits.take().expect("available");
                    ring.arrive(slot, header).expect("the next slot");
                }
                for _ in 0..(round % 3).max(1) {
                    released.extend(ring.take_head().map(|(_, slot)| slot));
                }
                while let Some(slot) = released.pop() {
                    ring.release(slot).expect("taken");
                }
                credits.handle(VirtualChannel(0), ring.freed()).expect("as many were sent");
                assert_eq!(credits.available() + ring.occupied(), slots);
            }
            assert!(ring.freed() < begin, "the counts of {slots} slots have wrapped");
        }
    }
}
