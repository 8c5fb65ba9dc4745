//! What a job needs of a card, and a card in this process.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use millstream_card::region::kernel::{Banks, RegionKernel, Run, Unattended};
use millstream_card::region::stencil::{BUILTIN, StencilArguments};
use millstream_card::{Memory, Span};

use crate::grid::Grid;

/// Why a worker could not do something.
pub type WorkerError = Box<dyn std::error::Error + Send + Sync>;

/// Where to compute: two runs can be under way at once. Bands of rows that come or go take both in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Rows that neighbours wait for.
    Edges,
    /// The others.
    Inner,
}

/// The card above or below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// The card with the rows before.
    Above,
    /// The card with the rows after.
    Below,
}

/// Rows to send to a neighbour: a range of this card's memory, and where it goes in the neighbour's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    /// To whom.
    pub to: Neighbour,
    /// What.
    pub from: Span,
    /// Where to.
    pub offset: u64,
}

/// A card that computes a tile.
pub trait Worker: Send + Debug {
    /// What people call it.
    fn name(&self) -> String;

    /// Size of its memory [bytes].
    fn memory_bytes(&self) -> u64;

    /// Starts the stencil. Not more than one run a lane.
    fn start(&mut self, lane: Lane, arguments: &StencilArguments) -> Result<(), WorkerError>;

    /// Waits for the run of a lane; the time that it took on the card.
    fn wait(&mut self, lane: Lane) -> Result<Duration, WorkerError>;

    /// Writes bytes of the grid, a range of all of them, to an offset of card memory.
    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), WorkerError>;

    /// Reads card memory into bytes of the grid.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes of the grid meanwhile.
    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), WorkerError>;

    /// Sends rows to neighbours and waits until they are there. No byte passes this process.
    fn send(&mut self, parcels: &[Parcel]) -> Result<(), WorkerError>;
}

/// Cards in this process, without registers or a network: their memory, and the kernel on threads.
#[derive(Debug)]
pub struct LocalCard {
    number: usize,
    memory: Arc<Memory>,
    neighbours: [Option<Arc<Memory>>; 2],
    lanes: [LocalLane; 2],
}

/// A kernel, and its run.
struct LocalLane {
    kernel: Arc<Mutex<Box<dyn RegionKernel>>>,
    run: Option<JoinHandle<Result<Duration, WorkerError>>>,
}

impl LocalLane {
    fn new() -> LocalLane {
        LocalLane { kernel: Arc::new(Mutex::new((BUILTIN.make)())), run: None }
    }
}

impl Debug for LocalLane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalLane").field("runs", &self.run.is_some()).finish()
    }
}

impl LocalCard {
    /// Cards in a row, with `bytes` of memory each.
    ///
    /// # Errors
    /// What making their memory reports.
    pub fn row(count: usize, bytes: u64) -> Result<Vec<LocalCard>, WorkerError> {
        let memories = (0..count).map(|_| Memory::anonymous(bytes).map(Arc::new));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        let at = |index: Option<usize>| index.and_then(|index| memories.get(index)).cloned();
        let cards = memories.iter().enumerate().map(|(number, memory)| LocalCard {
            number,
            memory: memory.clone(),
            neighbours: [at(number.checked_sub(1)), at(Some(number + 1))],
            lanes: [LocalLane::new(), LocalLane::new()],
        });
        Ok(cards.collect())
    }

    /// Its memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Worker for LocalCard {
    fn name(&self) -> String {
        format!("local {}", self.number)
    }

    fn memory_bytes(&self) -> u64 {
        self.memory.size()
    }

    fn start(&mut self, lane: Lane, arguments: &StencilArguments) -> Result<(), WorkerError> {
        let (memory, words) = (self.memory.clone(), arguments.to_words());
        let slot = &mut self.lanes[lane as usize];
        let kernel = slot.kernel.clone();
        let thread = std::thread::spawn(move || -> Result<Duration, WorkerError> {
            let control = Unattended::default();
            let mut run = Run::new(Banks::new(&memory, memory.size(), 1), words, &control);
            kernel.lock().unwrap_or_else(PoisonError::into_inner).run(&mut run)?;
            Ok(Duration::from_nanos(run.results()[2]))
        });
        match slot.run.replace(thread) {
            None => Ok(()),
            Some(_) => Err("a run is under way".into()),
        }
    }

    fn wait(&mut self, lane: Lane) -> Result<Duration, WorkerError> {
        let thread = self.lanes[lane as usize].run.take().ok_or("no run is under way")?;
        thread.join().map_err(|_| "the kernel failed")?
    }

    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), WorkerError> {
        assert!(bytes.end <= grid.shape().bytes());
        // SAFETY: the range was checked; nobody writes what is to be written to a card.
        let bytes = unsafe {
            std::slice::from_raw_parts(grid.pointer(bytes.start), (bytes.end - bytes.start) as usize)
        };
        Ok(self.memory.write(to, bytes)?)
    }

    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), WorkerError> {
        assert!(bytes.end <= grid.shape().bytes());
        // SAFETY: the caller's; the range was checked.
        let out = unsafe {
            std::slice::from_raw_parts_mut(grid.pointer(bytes.start), (bytes.end - bytes.start) as usize)
        };
        Ok(self.memory.read(from, out)?)
    }

    fn send(&mut self, parcels: &[Parcel]) -> Result<(), WorkerError> {
        let mut buffer = Vec::new();
        for parcel in parcels {
            let neighbour = self.neighbours[parcel.to as usize].as_ref().ok_or("there is no such card")?;
            buffer.resize(parcel.from.len as usize, 0);
            self.memory.read(parcel.from.offset, &mut buffer)?;
            neighbour.write(parcel.offset, &buffer)?;
        }
        Ok(())
    }
}
