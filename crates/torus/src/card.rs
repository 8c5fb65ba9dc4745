//! The card of a node: the node process holds its lease, and regions are parts of its memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_card::{Card, MemoryAccess};
use millstream_card_abi::CardName;

/// How long a card that is starting is waited for, and a lease that another client holds.
const ACQUIRE: Duration = Duration::from_secs(10);

/// A card whose lease this process holds until the lease is revoked or the card ends.
#[derive(Debug)]
pub struct LeasedCard {
    card: Card,
    /// Epoch of the lease.
    epoch: u32,
    ended: AtomicBool,
}

impl LeasedCard {
    /// Opens a card of this host and acquires its lease.
    ///
    /// # Errors
    /// There is no such card, it is leased, or it does not answer.
    pub fn acquire(name: &CardName) -> io::Result<LeasedCard> {
        let card = Card::open(name, ACQUIRE).map_err(io::Error::other)?;
        let epoch = card.acquire(ACQUIRE).map_err(io::Error::other)?;
        Ok(LeasedCard { card, epoch, ended: AtomicBool::new(false) })
    }

    /// Whether the lease lasts. Its memory belongs to others afterwards.
    #[must_use]
    pub fn is_leased(&self) -> bool {
        !self.ended.load(Ordering::Acquire) && self.card.holds(self.epoch)
    }

    /// Begins an access to the card's memory, which the card does not clear for the next holder meanwhile. None if the
    /// lease has ended.
    pub fn access(&self) -> Option<MemoryAccess<'_>> {
        if self.ended.load(Ordering::Acquire) {
            return None;
        }
        self.card.access(self.epoch)
    }

    /// The card has ended or died: [`LeasedCard::liveness`] hung up.
    pub fn set_ended(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Hangs up when the card ends or dies.
    #[must_use]
    pub fn liveness(&self) -> BorrowedFd<'_> {
        self.card.liveness_fd()
    }

    /// Size of its memory (bytes).
    #[must_use]
    pub fn size(&self) -> u64 {
        self.card.memory().size()
    }

    /// The card's name.
    #[must_use]
    pub fn name(&self) -> &CardName {
        self.card.name()
    }

    /// Epoch of the lease.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// A descriptor of its memory.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.card.memory_fd().try_clone_to_owned()
    }
}

impl AsFd for LeasedCard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.liveness()
    }
}
