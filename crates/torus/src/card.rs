//! The card of a node: the node process holds its lease, and regions are parts of its memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_card::Card;
use millstream_card_abi::CardName;

/// How long a card that is starting is waited for, and a lease that another client holds.
const ACQUIRE: Duration = Duration::from_secs(10);

/// A card whose lease this process holds until the lease is revoked or the card ends.
#[derive(Debug)]
pub struct LeasedCard {
    card: Card,
    /// The lease word while the lease lasts.
    lease: u64,
    ended: AtomicBool,
}

impl LeasedCard {
    /// Opens a card of this host and acquires its lease.
    ///
    /// # Errors
    /// There is no such card, it is leased, or it does not answer.
    pub fn acquire(name: &CardName) -> io::Result<LeasedCard> {
        let card = Card::open(name, ACQUIRE).map_err(io::Error::other)?;
        card.acquire(ACQUIRE).map_err(io::Error::other)?;
        let lease = card.registers().lease_word().load(Ordering::Acquire);
        Ok(LeasedCard { card, lease, ended: AtomicBool::new(false) })
    }

    /// Whether the lease lasts. Its memory belongs to others afterwards.
    #[must_use]
    pub fn is_leased(&self) -> bool {
        let word = self.card.registers().lease_word().load(Ordering::Acquire);
        word == self.lease && !self.ended.load(Ordering::Acquire)
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
