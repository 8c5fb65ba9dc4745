//! Leased cards on the network as workers: a job's data goes by RDMA between this host and the cards, and from
//! card to card by copy descriptors.

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
use crate::worker::{Lane, Neighbour, Parcel, Worker, WorkerError};

/// Longest time of one run or copy. A card that dies is noticed at once; this is for one that hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// A card of which this process holds the lease.
#[derive(Debug)]
pub struct LeasedCard {
    card: RemoteCard,
    /// Memory of the cards above and below.
    neighbours: [Option<RemoteMemory>; 2],
    /// Numbers of the runs under way.
    runs: [Option<u64>; 2],
}

impl LeasedCard {
    /// Takes the leases of cards, in the order in which their tiles follow each other, loads the kernel into two
    /// regions of each and connects neighbours. `lease` is how long a lease lasts beyond this process.
    ///
    /// # Errors
    /// [`OffloadError::Card`] with the first card that cannot be had.
    pub fn row(
        device: &Device,
        addresses: &[String],
        lease: Duration,
        patience: Duration,
    ) -> Result<Vec<LeasedCard>, OffloadError> {
        let mut cards = Vec::new();
        for address in addresses {
            let card = RemoteCard::connect(device, address, RemoteOptions::default());
            let card = card.map_err(|error| failed(address, "connecting", error))?;
            card.acquire(lease, patience).map_err(|error| failed(address, "taking its lease", error))?;
            for lane in [Lane::Edges, Lane::Inner] {
                let loaded = card.load(lane as u32, KernelSource::Named(NAME));
                loaded.map_err(|error| failed(address, "loading the kernel", error))?;
            }
            cards.push(LeasedCard { card, neighbours: [None; 2], runs: [None; 2] });
        }
        for index in 0..cards.len() {
            let others = [(Neighbour::Above, index.wrapping_sub(1)), (Neighbour::Below, index + 1)];
            for (neighbour, other) in others {
                let Some(there) = cards.get(other) else { continue };
                let memory = there.card.held().map(|held| held.memory);
                let here = cards[index].card.connect_peer(neighbour as u32, &addresses[other]);
                let doing = format!("connecting card {}", addresses[other]);
                here.map_err(|error| failed(&addresses[index], &doing, error))?;
                cards[index].neighbours[neighbour as usize] = memory;
            }
        }
        Ok(cards)
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
        let address = self.card.address().to_owned();
        self.card.release().map_err(|error| failed(&address, "giving its lease back", error))
    }
}

fn failed(address: &str, doing: &str, error: RemoteError) -> OffloadError {
    // The address is said already.
    OffloadError::Card { card: address.to_owned(), doing: doing.to_owned(), cause: Box::new(error.kind) }
}

impl Worker for LeasedCard {
    fn name(&self) -> String {
        self.card.address().to_owned()
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
                peer: parcel.to as u32,
                local: parcel.from,
                remote: place.addr,
                key: place.rkey.0,
                notify: false,
            });
        }
        Ok(self.card.copy(&copies, PATIENCE).map_err(|error| error.kind)?)
    }
}
