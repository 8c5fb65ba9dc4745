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

/// Slots are filled, and freed, in ring order. Cumulative counts wrap.
#[derive(Clone, Debug)]
pub(super) struct SlotRing {
    slots: u16,
    arrived: u32,
    freed: u32,
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
            released: vec![false; slots.into()],
            waiting: VecDeque::with_capacity(slots.into()),
        }
    }

    pub(super) fn reset(&mut self) {
        *self = SlotRing::new(self.slots);
    }

    fn slot_of(&self, count: u32) -> u16 {
        (count % u32::from(self.slots)) as u16
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
        let expected = self.slot_of(self.arrived);
        if slot != expected {
            return Err(SlotError::Order { found: slot, expected });
        }
        self.waiting.push_back(header);
        self.arrived = self.arrived.wrapping_add(1);
        Ok(())
    }

    pub(super) fn head(&self) -> Option<(Header, u16)> {
        let header = *self.waiting.front()?;
        Some((header, self.slot_of(self.arrived.wrapping_sub(self.waiting.len() as u32))))
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
        let distance = (index + self.slots - self.slot_of(self.freed)) % self.slots;
        let taken = usize::from(self.occupied()) - self.waiting.len();
        if usize::from(distance) >= taken || self.released[usize::from(index)] {
            return Err(not_taken);
        }
        self.released[usize::from(index)] = true;
        while self.occupied() > 0 {
            let oldest = usize::from(self.slot_of(self.freed));
            if !std::mem::take(&mut self.released[oldest]) {
                break;
            }
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
}

impl CreditAccount {
    pub(super) fn new(slots: u16) -> CreditAccount {
        CreditAccount { slots, sent: 0, freed: 0 }
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
            let slot = (self.sent % u32::from(self.slots)) as u16;
            self.sent = self.sent.wrapping_add(1);
            slot
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
