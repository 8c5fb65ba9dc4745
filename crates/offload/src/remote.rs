//! Leased cards on the network as workers: a job's data goes by RDMA between this host and the cards, and from
//! card to card by copy descriptors.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use millstream_card::Span;
use millstream_card::net::control::{KernelSource, Start};
use millstream_card::net::{RemoteCard, RemoteError, RemoteOptions};
use millstream_card::region::copy::{Copy, CopyOperation};
use millstream_card::region::stencil::{NAME, StencilArguments};
use millstream_rdma::{Device, RemoteMemory};

use crate::OffloadError;
use crate::grid::Grid;
use crate::recovery::Crew;
use crate::worker::{Lane, Neighbour, Parcel, Worker, WorkerError};

/// Longest time of one run or copy. A card that dies is noticed at once; this is for one that hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// A card as people name it, and where it listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardAddress {
    /// Its name, for messages and reports.
    pub name: String,
    /// `host:port`.
    pub address: String,
}

impl From<&str> for CardAddress {
    fn from(address: &str) -> CardAddress {
        CardAddress { name: address.to_owned(), address: address.to_owned() }
    }
}

/// How leases are taken.
#[derive(Clone, Copy, Debug)]
pub struct LeaseTerms {
    /// How long a lease lasts beyond this process.
    pub duration: Duration,
    /// How long to wait for a card that somebody else has.
    pub patience: Duration,
}

/// A card of which this process holds the lease.
#[derive(Debug)]
pub struct LeasedCard {
    card: RemoteCard,
    place: CardAddress,
    /// Memory of the cards above and below.
    neighbours: [Option<RemoteMemory>; 2],
    /// Numbers of the runs under way.
    runs: [Option<u64>; 2],
}

impl LeasedCard {
    fn take(device: &Device, place: &CardAddress, terms: LeaseTerms) -> Result<LeasedCard, OffloadError> {
        let card = RemoteCard::connect(device, &place.address, RemoteOptions::default());
        let card = card.map_err(|error| failed(&place.name, "connecting", error))?;
        let mut card = LeasedCard { card, place: place.clone(), neighbours: [None; 2], runs: [None; 2] };
        card.prepare(terms)?;
        Ok(card)
    }

    /// Takes the lease and loads the kernel into two regions.
    fn prepare(&mut self, terms: LeaseTerms) -> Result<(), OffloadError> {
        self.runs = [None; 2];
        let name = &self.place.name;
        let failed = |doing| move |error| failed(name, doing, error);
        self.card.acquire(terms.duration, terms.patience).map_err(failed("taking its lease"))?;
        for lane in [Lane::Edges, Lane::Inner] {
            self.card.load(lane as u32, KernelSource::Named(NAME)).map_err(failed("loading the kernel"))?;
        }
        Ok(())
    }

    /// Ends the lease and takes another one, so that nothing that is still under way, from whatever card, can reach this
    /// card's memory.
    fn renew(&mut self, terms: LeaseTerms) -> Result<(), OffloadError> {
        self.card.release().map_err(|error| failed(&self.place.name, "giving its lease back", error))?;
        self.prepare(terms)
    }

    /// The card itself.
    #[must_use]
    pub fn card(&self) -> &RemoteCard {
        &self.card
    }

    /// Gives the lease back.
    ///
    /// # Errors
    /// [`OffloadError::Card`].
    pub fn release(self) -> Result<(), OffloadError> {
        self.card.release().map_err(|error| failed(&self.place.name, "giving its lease back", error))
    }
}

fn failed(name: &str, doing: &str, error: RemoteError) -> OffloadError {
    // Which card is said already.
    OffloadError::Card { card: name.to_owned(), doing: doing.to_owned(), cause: Box::new(error.kind) }
}

/// Leased cards in a row, and cards that take the places of those that are lost.
#[derive(Debug)]
pub struct LeasedRow {
    device: Device,
    cards: Vec<LeasedCard>,
    spares: VecDeque<CardAddress>,
    terms: LeaseTerms,
}

impl LeasedRow {
    /// Takes the leases of cards, in the order in which their tiles follow each other, loads the kernel into two
    /// regions of each and connects neighbours. Spare cards are left alone until one is needed.
    ///
    /// # Errors
    /// [`OffloadError::Card`] with the first card that cannot be had.
    pub fn take(
        device: &Device,
        places: &[CardAddress],
        spares: &[CardAddress],
        terms: LeaseTerms,
    ) -> Result<LeasedRow, OffloadError> {
        let cards = places.iter().map(|place| LeasedCard::take(device, place, terms));
        let mut row = LeasedRow {
            device: device.clone(),
            cards: cards.collect::<Result<_, _>>()?,
            spares: spares.iter().cloned().collect(),
            terms,
        };
        row.introduce()?;
        Ok(row)
    }

    /// The cards.
    #[must_use]
    pub fn cards(&self) -> &[LeasedCard] {
        &self.cards
    }

    /// Gives all leases back.
    ///
    /// # Errors
    /// [`OffloadError::Card`] with the first that could not be given back; the others were.
    pub fn release(self) -> Result<(), OffloadError> {
        self.cards.into_iter().map(LeasedCard::release).fold(Ok(()), Result::and)
    }

    /// Connects cards that follow each other.
    fn introduce(&mut self) -> Result<(), OffloadError> {
        for index in 0..self.cards.len() {
            let others = [(Neighbour::Above, index.wrapping_sub(1)), (Neighbour::Below, index + 1)];
            for (neighbour, other) in others {
                let there = self.cards.get(other);
                let memory = there.and_then(|there| there.card.held()).map(|held| held.memory);
                if let Some(CardAddress { name, address }) = there.map(|there| &there.place) {
                    let here = &self.cards[index];
                    let connected = here.card.connect_peer(neighbour as u32, address);
                    let doing = || format!("connecting card {name}");
                    connected.map_err(|error| failed(&here.place.name, &doing(), error))?;
                }
                self.cards[index].neighbours[neighbour as usize] = memory;
            }
        }
        Ok(())
    }
}

impl Crew for LeasedRow {
    type Worker = LeasedCard;

    fn workers(&mut self) -> &mut [LeasedCard] {
        &mut self.cards
    }

    fn regroup(&mut self) -> Result<Vec<String>, OffloadError> {
        let mut gone = Vec::new();
        loop {
            let before = gone.len();
            let mut cards = Vec::new();
            for mut card in self.cards.drain(..) {
                if card.renew(self.terms).is_ok() {
                    cards.push(card);
                    continue;
                }
                gone.push(card.place.name.clone());
                // Its lease, should it still be there, ends with the connection.
                drop(card);
                // A spare card that cannot be had is none.
                let spares = std::iter::from_fn(|| self.spares.pop_front());
                let mut taken = spares.map(|place| LeasedCard::take(&self.device, &place, self.terms));
                cards.extend(taken.find_map(Result::ok));
            }
            self.cards = cards;
            match self.introduce() {
                Ok(()) => return Ok(gone),
                // One was lost just now; which one shows when they are looked at again.
                Err(_) if gone.len() > before => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl Worker for LeasedCard {
    fn name(&self) -> String {
        self.place.name.clone()
    }

    fn memory_bytes(&self) -> u64 {
        self.card.memory_bytes()
    }

    fn start(&mut self, lane: Lane, arguments: &StencilArguments) -> Result<(), WorkerError> {
        if self.runs[lane as usize].is_some() {
            return Err("a run is under way".into());
        }
        let rung =
            self.card.start(lane as u32, &Start::new(&arguments.to_words())).map_err(|error| error.kind)?;
        self.runs[lane as usize] = Some(rung);
        Ok(())
    }

    fn wait(&mut self, lane: Lane) -> Result<Duration, WorkerError> {
        let rung = self.runs[lane as usize].take().ok_or("no run is under way")?;
        let results = self.card.wait(rung, PATIENCE).map_err(|error| error.kind)?;
        Ok(Duration::from_nanos(results[2]))
    }

    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), WorkerError> {
        let region = grid.region().ok_or("the grid is not registered with the device")?;
        let span = Span::new(to, bytes.end - bytes.start);
        Ok(self.card.write_from(region, bytes.start, span).map_err(|error| error.kind)?)
    }

    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), WorkerError> {
        let region = grid.region().ok_or("the grid is not registered with the device")?;
        let span = Span::new(from, bytes.end - bytes.start);
        Ok(self.card.read_into(region, bytes.start, span).map_err(|error| error.kind)?)
    }

    fn send(&mut self, parcels: &[Parcel]) -> Result<(), WorkerError> {
        let mut copies = Vec::new();
        for parcel in parcels {
            let there = self.neighbours[parcel.to as usize].ok_or("there is no such card")?;
            let place = there.at(parcel.offset, parcel.from.len)?;
            copies.push(Copy {
                operation: CopyOperation::Write,
                peer: parcel.to as u16,
                local: parcel.from,
                remote: place.addr,
                key: place.rkey.get(),
                notify: false,
            });
        }
        Ok(self.card.copy(&copies, PATIENCE).map_err(|error| error.kind)?)
    }
}
