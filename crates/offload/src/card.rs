//! The operations that a job needs from a card, and cards in this process for tests.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use millstream_card_abi::MemoryRange;
use millstream_card_abi::stencil::StencilArguments;
use millstream_card_server::Memory;
use millstream_card_server::kernel::stencil::BUILTIN;
use millstream_card_server::kernel::{GrantedBanks, Kernel, KernelRun, StandaloneControl};

use crate::grid::Grid;

/// Why a card operation failed.
pub type CardError = Box<dyn std::error::Error + Send + Sync>;

/// A region of the card: two kernel runs can be in progress at once, one a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeRegion {
    /// Runs the rows that neighbours wait for.
    Boundary,
    /// Runs the other rows.
    Interior,
}

/// A neighbour of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// The card with the previous rows.
    Above,
    /// The card with the next rows.
    Below,
}

/// A transfer of boundary rows into a neighbour's halo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HaloTransfer {
    /// The receiver.
    pub to: Neighbour,
    /// Source range in this card's memory.
    pub from: MemoryRange,
    /// Destination offset in the neighbour's memory.
    pub offset: u64,
}

/// A card that computes a tile.
pub trait StencilCard: Send + Debug {
    /// The card's name for messages and reports.
    fn name(&self) -> String;

    /// Size of the card's memory (bytes).
    fn memory_bytes(&self) -> u64;

    /// Starts the stencil kernel in a region, which must be idle.
    fn start(&mut self, region: ComputeRegion, arguments: &StencilArguments) -> Result<(), CardError>;

    /// Waits for the run of a region. Returns its time on the card.
    fn wait(&mut self, region: ComputeRegion) -> Result<Duration, CardError>;

    /// Writes the grid's bytes `bytes` to card memory at offset `to`.
    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), CardError>;

    /// Reads card memory from offset `from` into the grid's bytes `bytes`.
    ///
    /// # Safety
    /// No other thread accesses these bytes of the grid meanwhile.
    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), CardError>;

    /// Transfers rows to neighbours, card to card, and waits until they have arrived.
    fn send(&mut self, transfers: &[HaloTransfer]) -> Result<(), CardError>;
}

/// A card in this process, without registers or a network: memory, and the kernel on threads.
#[derive(Debug)]
pub struct InProcessCard {
    number: usize,
    memory: Arc<Memory>,
    neighbours: [Option<Arc<Memory>>; 2],
    regions: [InProcessRegion; 2],
}

/// A kernel and its run in progress, if any.
struct InProcessRegion {
    kernel: Arc<Mutex<Box<dyn Kernel>>>,
    run: Option<JoinHandle<Result<Duration, CardError>>>,
}

impl InProcessRegion {
    fn new() -> InProcessRegion {
        InProcessRegion { kernel: Arc::new(Mutex::new((BUILTIN.make)())), run: None }
    }
}

impl Debug for InProcessRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InProcessRegion").field("runs", &self.run.is_some()).finish()
    }
}

impl InProcessCard {
    /// Adjacent cards with `bytes` of memory each.
    ///
    /// # Errors
    /// The error of allocating the memory.
    pub fn adjacent(count: usize, bytes: u64) -> Result<Vec<InProcessCard>, CardError> {
        let memories = (0..count).map(|_| Memory::anonymous(bytes).map(Arc::new));
        let memories = memories.collect::<Result<Vec<_>, _>>()?;
        let at = |index: Option<usize>| index.and_then(|index| memories.get(index)).cloned();
        let cards = memories.iter().enumerate().map(|(number, memory)| InProcessCard {
            number,
            memory: memory.clone(),
            neighbours: [at(number.checked_sub(1)), at(Some(number + 1))],
            regions: [InProcessRegion::new(), InProcessRegion::new()],
        });
        Ok(cards.collect())
    }

    /// The card's memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl StencilCard for InProcessCard {
    fn name(&self) -> String {
        format!("local {}", self.number)
    }

    fn memory_bytes(&self) -> u64 {
        self.memory.size()
    }

    fn start(&mut self, region: ComputeRegion, arguments: &StencilArguments) -> Result<(), CardError> {
        let (memory, words) = (self.memory.clone(), arguments.to_words());
        let state = &mut self.regions[region as usize];
        let kernel = state.kernel.clone();
        let thread = std::thread::spawn(move || -> Result<Duration, CardError> {
            let control = StandaloneControl::default();
            let mut run = KernelRun::new(GrantedBanks::new(&memory, memory.size(), 1), words, &control);
            kernel.lock().unwrap_or_else(PoisonError::into_inner).run(&mut run)?;
            Ok(Duration::from_nanos(run.results()[2]))
        });
        match state.run.replace(thread) {
            None => Ok(()),
            Some(_) => Err("a run is in progress in this region".into()),
        }
    }

    fn wait(&mut self, region: ComputeRegion) -> Result<Duration, CardError> {
        let thread =
            self.regions[region as usize].run.take().ok_or("no run is in progress in this region")?;
        thread.join().map_err(|_| "the kernel panicked")?
    }

    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), CardError> {
        assert!(bytes.end <= grid.shape().bytes());
        // SAFETY: the range was checked; no thread writes to bytes that are being sent to a card.
        let bytes = unsafe {
            std::slice::from_raw_parts(grid.pointer(bytes.start), (bytes.end - bytes.start) as usize)
        };
        Ok(self.memory.write(to, bytes)?)
    }

    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), CardError> {
        assert!(bytes.end <= grid.shape().bytes());
        // SAFETY: the caller's promise; the range was checked.
        let out = unsafe {
            std::slice::from_raw_parts_mut(grid.pointer(bytes.start), (bytes.end - bytes.start) as usize)
        };
        Ok(self.memory.read(from, out)?)
    }

    fn send(&mut self, transfers: &[HaloTransfer]) -> Result<(), CardError> {
        let mut buffer = Vec::new();
        for transfer in transfers {
            let neighbour =
                self.neighbours[transfer.to as usize].as_ref().ok_or("there is no card in this direction")?;
            buffer.resize(transfer.from.len as usize, 0);
            self.memory.read(transfer.from.offset, &mut buffer)?;
            neighbour.write(transfer.offset, &buffer)?;
        }
        Ok(())
    }
}
