//! Leased cards on the network. Data moves by RDMA between this host and the cards, and by DMA transfers
//! between cards.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteError, RemoteOptions};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::dma::{DmaDescriptor, DmaOperation};
use millstream_card_abi::stencil::{NAME, StencilArguments};
use millstream_rdma::{Device, RemoteMemory};

use crate::OffloadError;
use crate::card::{CardError, ComputeRegion, HaloTransfer, Neighbour, StencilCard};
use crate::grid::Grid;
use crate::recovery::CardGroup;

/// Time limit of one run or transfer, for a card that hangs. The end of a card process is detected at once.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(300);

/// The name and the address of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardAddress {
    /// The name, for messages and reports.
    pub name: String,
    /// `host:port`.
    pub address: String,
}

impl From<&str> for CardAddress {
    fn from(address: &str) -> CardAddress {
        CardAddress { name: address.to_owned(), address: address.to_owned() }
    }
}

/// How leases are acquired.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTerms {
    /// Time after which a lease without heartbeats ends.
    pub duration: Duration,
    /// Time to wait for a card that is leased to another node.
    pub acquire_timeout: Duration,
}

/// A card leased by this process.
#[derive(Debug)]
pub struct LeasedCard {
    card: RemoteCard,
    address: CardAddress,
    /// Memory of the previous and of the next card.
    neighbours: [Option<RemoteMemory>; 2],
    /// Doorbell numbers of the runs in progress.
    runs: [Option<u64>; 2],
}

impl LeasedCard {
    fn acquire(
        device: &Device,
        address: &CardAddress,
        terms: LeaseTerms,
    ) -> Result<LeasedCard, OffloadError> {
        let card = RemoteCard::connect(device, &address.address, RemoteOptions::default());
        let card = card.map_err(|error| failed(&address.name, "connecting", error))?;
        let mut card = LeasedCard { card, address: address.clone(), neighbours: [None; 2], runs: [None; 2] };
        card.prepare(terms)?;
        Ok(card)
    }

    /// Acquires the lease and loads the kernel into two regions.
    fn prepare(&mut self, terms: LeaseTerms) -> Result<(), OffloadError> {
        self.runs = [None; 2];
        let name = &self.address.name;
        let failed = |operation| move |error| failed(name, operation, error);
        self.card.acquire(terms.duration, terms.acquire_timeout).map_err(failed("acquiring its lease"))?;
        for region in [ComputeRegion::Boundary, ComputeRegion::Interior] {
            self.card
                .load(region as u32, KernelSource::Builtin(NAME))
                .map_err(failed("loading the kernel"))?;
        }
        Ok(())
    }

    /// Replaces the lease: its keys end, so that transfers still in flight cannot reach this card's memory.
    fn renew(&mut self, terms: LeaseTerms) -> Result<(), OffloadError> {
        self.card.release().map_err(|error| failed(&self.address.name, "releasing its lease", error))?;
        self.prepare(terms)
    }

    /// The connection to the card.
    #[must_use]
    pub fn card(&self) -> &RemoteCard {
        &self.card
    }

    /// Releases the lease.
    ///
    /// # Errors
    /// [`OffloadError::Card`].
    pub fn release(self) -> Result<(), OffloadError> {
        self.card.release().map_err(|error| failed(&self.address.name, "releasing its lease", error))
    }
}

fn failed(name: &str, operation: &str, error: RemoteError) -> OffloadError {
    // The kind only: the error's text would name the card twice.
    OffloadError::Card { card: name.to_owned(), operation: operation.to_owned(), cause: Box::new(error.kind) }
}

/// The leased cards of a job in the order of their tiles, and spare cards that replace lost ones.
#[derive(Debug)]
pub struct LeasedCards {
    device: Device,
    cards: Vec<LeasedCard>,
    spares: VecDeque<CardAddress>,
    terms: LeaseTerms,
}

impl LeasedCards {
    /// Leases cards in the order of their tiles, loads the kernel into two regions of each, and connects neighbours. Spare
    /// cards are leased when they are needed.
    ///
    /// # Errors
    /// [`OffloadError::Card`] with the first card that cannot be leased.
    pub fn acquire(
        device: &Device,
        addresses: &[CardAddress],
        spares: &[CardAddress],
        terms: LeaseTerms,
    ) -> Result<LeasedCards, OffloadError> {
        let cards = addresses.iter().map(|address| LeasedCard::acquire(device, address, terms));
        let mut row = LeasedCards {
            device: device.clone(),
            cards: cards.collect::<Result<_, _>>()?,
            spares: spares.iter().cloned().collect(),
            terms,
        };
        row.connect_neighbours()?;
        Ok(row)
    }

    /// The cards.
    #[must_use]
    pub fn cards(&self) -> &[LeasedCard] {
        &self.cards
    }

    /// Releases all leases.
    ///
    /// # Errors
    /// [`OffloadError::Card`] with the first lease that could not be released; the others were.
    pub fn release(self) -> Result<(), OffloadError> {
        self.cards.into_iter().map(LeasedCard::release).fold(Ok(()), Result::and)
    }

    /// Connects each card with its neighbours.
    fn connect_neighbours(&mut self) -> Result<(), OffloadError> {
        for index in 0..self.cards.len() {
            let others = [(Neighbour::Above, index.wrapping_sub(1)), (Neighbour::Below, index + 1)];
            for (neighbour, other) in others {
                let there = self.cards.get(other);
                let memory = there.and_then(|there| there.card.held()).map(|held| held.memory);
                if let Some(CardAddress { name, address }) = there.map(|there| &there.address) {
                    let here = &self.cards[index];
                    let connected = here.card.connect_peer(neighbour as u32, address);
                    let operation = || format!("connecting card {name}");
                    connected.map_err(|error| failed(&here.address.name, &operation(), error))?;
                }
                self.cards[index].neighbours[neighbour as usize] = memory;
            }
        }
        Ok(())
    }
}

impl CardGroup for LeasedCards {
    type Card = LeasedCard;

    fn cards_mut(&mut self) -> &mut [LeasedCard] {
        &mut self.cards
    }

    fn replace_lost(&mut self) -> Result<Vec<String>, OffloadError> {
        let mut lost = Vec::new();
        loop {
            let before = lost.len();
            let mut cards = Vec::new();
            for mut card in self.cards.drain(..) {
                if card.renew(self.terms).is_ok() {
                    cards.push(card);
                    continue;
                }
                lost.push(card.address.name.clone());
                // Its lease, if it still exists, ends with the connection.
                drop(card);
                // Skip spare cards that cannot be leased.
                let spares = std::iter::from_fn(|| self.spares.pop_front());
                let mut taken = spares.map(|address| LeasedCard::acquire(&self.device, &address, self.terms));
                cards.extend(taken.find_map(Result::ok));
            }
            self.cards = cards;
            match self.connect_neighbours() {
                Ok(()) => return Ok(lost),
                // Another card was lost meanwhile; the next pass finds it.
                Err(_) if lost.len() > before => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl StencilCard for LeasedCard {
    fn name(&self) -> String {
        self.address.name.clone()
    }

    fn memory_bytes(&self) -> u64 {
        self.card.memory_bytes()
    }

    fn start(&mut self, region: ComputeRegion, arguments: &StencilArguments) -> Result<(), CardError> {
        if self.runs[region as usize].is_some() {
            return Err("a run is in progress in this region".into());
        }
        let rung = self
            .card
            .start(region as u32, &RunRequest::new(&arguments.to_words()))
            .map_err(|error| error.kind)?;
        self.runs[region as usize] = Some(rung);
        Ok(())
    }

    fn wait(&mut self, region: ComputeRegion) -> Result<Duration, CardError> {
        let rung = self.runs[region as usize].take().ok_or("no run is in progress in this region")?;
        let results = self.card.wait(rung, OPERATION_TIMEOUT).map_err(|error| error.kind)?;
        Ok(Duration::from_nanos(results[2]))
    }

    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), CardError> {
        let region = grid.region().ok_or("the grid is not registered with the device")?;
        let span = MemoryRange::new(to, bytes.end - bytes.start);
        Ok(self.card.write_from(region, bytes.start, span).map_err(|error| error.kind)?)
    }

    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), CardError> {
        let region = grid.region().ok_or("the grid is not registered with the device")?;
        let span = MemoryRange::new(from, bytes.end - bytes.start);
        Ok(self.card.read_into(region, bytes.start, span).map_err(|error| error.kind)?)
    }

    fn send(&mut self, transfers: &[HaloTransfer]) -> Result<(), CardError> {
        let mut copies = Vec::new();
        for transfer in transfers {
            let there = self.neighbours[transfer.to as usize].ok_or("there is no card in this direction")?;
            let remote = there.at(transfer.offset, transfer.from.len)?;
            copies.push(DmaDescriptor {
                operation: DmaOperation::Write,
                peer: transfer.to as u16,
                local: transfer.from,
                remote: remote.addr,
                key: remote.rkey.get(),
                notify: false,
            });
        }
        Ok(self.card.run_dma(&copies, OPERATION_TIMEOUT).map_err(|error| error.kind)?)
    }
}
