//! A job: the steps of each card, and which of them overlap.
//!
//! ```text
//!   first block        write rows of band 1, 2, …   while band 0, 1, … is computed
//!   blocks between     compute the boundary rows; then the interior, while the boundary rows are sent
//!   last block         read band 0, 1, …            while band 1, 2, … is computed
//! ```
//!
//! After each block the cards wait for each other: a card's next block needs its neighbours' boundary rows. A
//! thread on this host drives each card. Data moves between this host's memory and the cards, and from card
//! to card. If a card fails, the others stop, and the error names the card.
//!
//! A job with checkpoints reads the cards' owned rows into a second grid while the next block is computed.
//! That block does not change these rows. Two grids alternate, so one of them always holds a complete state
//! ([`CheckpointPolicy`]). [`crate::recovery`] continues from it.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_card_abi::MemoryRange;
use millstream_card_abi::stencil::StencilArguments;

use crate::OffloadError;
use crate::card::{CardError, ComputeRegion, HaloTransfer, Neighbour, StencilCard};
use crate::grid::Grid;
use crate::plan::{Plan, Tile};
use crate::timeline::{JobReport, Step, StepKind};

/// The checkpoints of a job, for the loss of a card.
#[derive(Debug)]
pub struct CheckpointPolicy<'a> {
    /// A second grid of the same shape, registered like the first.
    pub spare: &'a mut Grid,
    /// The fewest sweeps between two checkpoints, which are made between blocks. `None` keeps only the initial state.
    pub interval: Option<NonZeroU64>,
}

/// The failure of a job.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct JobFailure {
    /// The cause.
    #[source]
    pub error: OffloadError,
    /// Sweeps of the checkpoint that the grid now holds, if the job made checkpoints.
    pub checkpoint_sweeps: u64,
}

/// Computes the grid in place, one card a tile of the plan.
///
/// `progress` gets the number of completed blocks. `stop` ends the job at the next step. After a failure, the grid holds the
/// latest checkpoint if `checkpoints` is given; otherwise its rows may belong to different sweeps.
///
/// # Errors
/// [`OffloadError::Card`] with the first failure; [`OffloadError::Stopped`].
///
/// # Panics
/// If the numbers of cards and tiles differ, or the shapes of the grids.
pub fn run<C: StencilCard>(
    plan: &Plan,
    grid: &mut Grid,
    checkpoints: Option<CheckpointPolicy<'_>>,
    cards: &mut [C],
    progress: &(dyn Fn(usize) + Sync),
    stop: &AtomicBool,
) -> Result<JobReport, JobFailure> {
    assert_eq!(cards.len(), plan.tiles.len());
    assert_eq!(grid.shape(), plan.shape);
    let names: Vec<_> = cards.iter().map(C::name).collect();
    let barrier = BlockBarrier::new(cards.len());
    let start = Instant::now();
    let interval = checkpoints.as_ref().and_then(|checkpoints| checkpoints.interval);
    let due = interval.map_or_else(Vec::new, |every| plan.checkpoints(every.get()));
    let spare = checkpoints.map(|checkpoints| checkpoints.spare);
    assert!(spare.as_ref().is_none_or(|spare| spare.shape() == plan.shape));
    let grids = Grids { first: grid, second: spare.as_deref() };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = cards
            .iter_mut()
            .enumerate()
            .map(|(index, card)| {
                let (barrier, due) = (&barrier, &due[..]);
                scope.spawn(move || {
                    CardDriver {
                        plan,
                        grids,
                        due,
                        checkpoints_made: 0,
                        index,
                        card,
                        barrier,
                        start,
                        progress,
                        stop,
                        steps: Vec::new(),
                        computed_until: Duration::ZERO,
                    }
                    .run()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let wall = start.elapsed();
    let mut steps = Vec::new();
    let mut failure = None;
    for outcome in outcomes {
        match outcome {
            Ok(more) => steps.extend(more),
            // A card that stopped because of another card's failure reports nothing.
            Err(None) => {}
            Err(Some(error)) => failure = failure.or(Some(error)),
        }
    }
    let complete = barrier.lock().checkpoints;
    // Checkpoints and the result alternate between the grids: after an odd number the state is in the second grid.
    // A job without sweeps reads no result.
    let results = usize::from(!plan.blocks.is_empty());
    let turns = if failure.is_some() { complete } else { due.len() + results };
    if let Some(spare) = spare
        && turns % 2 == 1
    {
        std::mem::swap(grid, spare);
    }
    match failure {
        Some(error) => {
            let blocks = complete.checked_sub(1).map_or(0, |index| due[index]);
            Err(JobFailure { error, checkpoint_sweeps: plan.blocks[..blocks].iter().sum() })
        }
        None => Ok(JobReport::new(plan, names, wall, steps)),
    }
}

/// The grids that cards read from and write to.
#[derive(Clone, Copy)]
struct Grids<'a> {
    /// The initial state.
    first: &'a Grid,
    /// The grid that alternates with it, if the job makes checkpoints.
    second: Option<&'a Grid>,
}

impl<'a> Grids<'a> {
    /// The grid of the `turn`-th state, from 1.
    fn target(&self, turn: usize) -> &'a Grid {
        if turn % 2 == 1 { self.second.unwrap_or(self.first) } else { self.first }
    }
}

/// The barrier at which cards wait for each other after each block.
struct BlockBarrier {
    cards: usize,
    state: Mutex<BarrierState>,
    changed: Condvar,
}

#[derive(Default)]
struct BarrierState {
    waiting: usize,
    generation: u64,
    broken: bool,
    /// Checkpoints that all cards have made.
    checkpoints: usize,
}

/// Another card failed.
struct BarrierBroken;

impl BlockBarrier {
    fn new(cards: usize) -> BlockBarrier {
        BlockBarrier { cards, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, BarrierState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all cards have arrived, each having made `checkpoints` checkpoints. Returns true to one of them.
    fn wait(&self, checkpoints: usize) -> Result<bool, BarrierBroken> {
        let mut state = self.lock();
        let generation = state.generation;
        state.waiting += 1;
        let last = state.waiting == self.cards;
        if last {
            state.waiting = 0;
            state.generation += 1;
            // Under the lock: the previous checkpoint is not overwritten before this one is complete.
            state.checkpoints = checkpoints;
            self.changed.notify_all();
        }
        let waits = |state: &mut BarrierState| state.generation == generation && !state.broken;
        state = self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        if state.broken { Err(BarrierBroken) } else { Ok(last) }
    }

    fn break_all(&self) {
        self.lock().broken = true;
        self.changed.notify_all();
    }

    fn is_broken(&self) -> bool {
        self.lock().broken
    }
}

/// The thread that drives one card.
struct CardDriver<'a, C> {
    plan: &'a Plan,
    grids: Grids<'a>,
    /// The blocks before which a checkpoint is made.
    due: &'a [usize],
    checkpoints_made: usize,
    index: usize,
    card: &'a mut C,
    barrier: &'a BlockBarrier,
    start: Instant,
    progress: &'a (dyn Fn(usize) + Sync),
    stop: &'a AtomicBool,
    steps: Vec<Step>,
    /// End of the latest kernel run.
    computed_until: Duration,
}

/// The regions that compute bands, alternately.
const REGIONS: [ComputeRegion; 2] = [ComputeRegion::Interior, ComputeRegion::Boundary];

/// Bands in progress, oldest first: rows, region, start.
type RunningBands = VecDeque<(Range<u64>, ComputeRegion, Duration)>;

/// Why a card's thread stops: its own failure, or `None` for another card's.
type StopCause = Option<OffloadError>;

impl From<BarrierBroken> for StopCause {
    fn from(_: BarrierBroken) -> StopCause {
        None
    }
}

impl<C: StencilCard> CardDriver<'_, C> {
    fn run(mut self) -> Result<Vec<Step>, StopCause> {
        let outcome = self.blocks();
        if outcome.is_err() {
            self.barrier.break_all();
        }
        outcome.map(|()| self.steps)
    }

    fn tile(&self) -> &Tile {
        &self.plan.tiles[self.index]
    }

    fn blocks(&mut self) -> Result<(), StopCause> {
        let count = self.plan.blocks.len();
        for block in 0..count {
            let (first, last) = (block == 0, block + 1 == count);
            if first || last {
                self.block_in_bands(block, first, last)?;
            } else {
                self.block_in_parts(block)?;
            }
            if !last {
                if first {
                    self.exchange(block)?;
                }
                let began = self.start.elapsed();
                let reports = self.barrier.wait(self.checkpoints_made)?;
                self.record(StepKind::Wait, block, began, 0);
                if reports {
                    (self.progress)(block + 1);
                }
            }
        }
        Ok(())
    }

    /// Computes a block band by band. The first block writes the rows of each band before it, the last block
    /// reads them after it. Two bands are in progress at a time, so that cores that finish one band continue
    /// with the other.
    fn block_in_bands(&mut self, block: usize, first: bool, last: bool) -> Result<(), StopCause> {
        let bands = self.plan.bands(self.tile());
        let sweeps = self.plan.blocks[block];
        let stored = self.tile().with_halo.clone();
        // Results must not overwrite a grid from which rows are still being written to other cards.
        let read_at_once = last && !(first && self.plan.tiles.len() > 1 && self.grids.second.is_none());
        let result = self.grids.target(self.due.len() + 1);
        let mut written = stored.start;
        let mut running = VecDeque::new();
        for (index, band) in bands.iter().enumerate() {
            if first {
                let until = if band.end == self.tile().owned.end {
                    stored.end
                } else {
                    (band.end + sweeps).min(stored.end)
                };
                self.write(block, written..until.max(written))?;
                written = until.max(written);
            }
            let done =
                if running.len() == REGIONS.len() { self.finish_band(block, &mut running)? } else { None };
            let region = REGIONS[index % REGIONS.len()];
            let began = self.begin(block, region, &[band.clone(), 0..0])?;
            running.push_back((band.clone(), region, began));
            if let Some(done) = done.filter(|_| read_at_once) {
                self.read(block, &done, result)?;
            }
        }
        while let Some(done) = self.finish_band(block, &mut running)? {
            if read_at_once {
                self.read(block, &done, result)?;
            }
        }
        if last && !read_at_once {
            self.barrier.wait(self.checkpoints_made)?;
            for band in &bands {
                self.read(block, band, result)?;
            }
        }
        Ok(())
    }

    /// Computes a block in two parts: the boundary rows, then the interior while the boundary rows travel.
    fn block_in_parts(&mut self, block: usize) -> Result<(), StopCause> {
        let next = self.plan.blocks[block + 1];
        let (boundary, interior) = self.plan.boundary(self.index, next).split(&self.tile().owned);
        if boundary.iter().any(|range| !range.is_empty()) {
            let began = self.begin(block, ComputeRegion::Boundary, &boundary)?;
            self.end(block, ComputeRegion::Boundary, began)?;
        }
        let began = match interior.is_empty() {
            true => None,
            false => Some(self.begin(block, ComputeRegion::Interior, &[interior, 0..0])?),
        };
        self.exchange(block)?;
        if self.due.contains(&block) {
            self.checkpoint(block)?;
        }
        if let Some(began) = began {
            self.end(block, ComputeRegion::Interior, began)?;
        }
        Ok(())
    }

    /// Reads the state before a block, which the block does not change.
    fn checkpoint(&mut self, block: usize) -> Result<(), StopCause> {
        self.check_stop()?;
        let target = self.grids.target(self.checkpoints_made + 1);
        let rows = self.tile().owned.clone();
        let (bytes, began) = (target.span(&rows), self.start.elapsed());
        let from = self.plan.row_offset(self.tile(), block as u64 % 2, rows.start);
        // SAFETY: a card reads its owned rows. No other thread uses this grid: either rows were written to
        // cards from the other grid, or a later checkpoint is complete. In the second case all cards have
        // passed the barrier after it.
        let read = unsafe { self.card.read(target, bytes.clone(), from) };
        self.check(read, || format!("reading rows {} to {} for a checkpoint", rows.start, rows.end))?;
        self.record(StepKind::Checkpoint, block, began, bytes.end - bytes.start);
        self.checkpoints_made += 1;
        Ok(())
    }

    /// Sends neighbours the rows of this block's result that their next block needs.
    fn exchange(&mut self, block: usize) -> Result<(), StopCause> {
        let plane = (block as u64 + 1) % 2;
        let boundary = self.plan.boundary(self.index, self.plan.blocks[block + 1]);
        let mut transfers = Vec::new();
        for (rows, to, other) in [
            (boundary.upper, Neighbour::Above, self.index.wrapping_sub(1)),
            (boundary.lower, Neighbour::Below, self.index + 1),
        ] {
            let (Some(rows), Some(there)) = (rows, self.plan.tiles.get(other)) else { continue };
            let from = self.plan.row_offset(self.tile(), plane, rows.start);
            let len = (rows.end - rows.start) * self.plan.shape.row_bytes();
            let offset = self.plan.row_offset(there, plane, rows.start);
            transfers.push(HaloTransfer { to, from: MemoryRange::new(from, len), offset });
        }
        if transfers.is_empty() {
            return Ok(());
        }
        let bytes = transfers.iter().map(|transfer| transfer.from.len).sum();
        self.check_stop()?;
        let began = self.start.elapsed();
        let sent = self.card.send(&transfers);
        self.check(sent, || "sending boundary rows to its neighbours".to_owned())?;
        self.record(StepKind::Halo, block, began, bytes);
        Ok(())
    }

    /// Starts the kernel on rows of a block. Returns the time.
    fn begin(
        &mut self,
        block: usize,
        region: ComputeRegion,
        rows: &[Range<u64>; 2],
    ) -> Result<Duration, StopCause> {
        self.check_stop()?;
        let (plan, tile) = (self.plan, self.tile());
        let block_plane = block as u64 % 2;
        let local = |rows: &Range<u64>| if rows.is_empty() { 0..0 } else { tile.local(rows) };
        let arguments = StencilArguments {
            double: plan.shape.double,
            rows: tile.with_halo.end - tile.with_halo.start,
            columns: plan.shape.columns,
            pitch: plan.shape.columns,
            source: plan.plane_offset(tile, block_plane),
            destination: plan.plane_offset(tile, 1 - block_plane),
            sweeps: plan.blocks[block],
            ranges: [local(&rows[0]), local(&rows[1])],
        };
        let began = self.start.elapsed();
        let started = self.card.start(region, &arguments);
        self.check(started, || format!("starting block {block}"))?;
        Ok(began)
    }

    fn end(&mut self, block: usize, region: ComputeRegion, began: Duration) -> Result<(), StopCause> {
        let waited = self.card.wait(region);
        let took = self.check(waited, || format!("computing block {block}"))?;
        // The card reports the duration of a run but not its end. Of two concurrent runs, the second counts from the end of the
        // first.
        let end = (began + took).min(self.start.elapsed()).max(self.computed_until);
        let step = Step {
            card: self.index,
            kind: StepKind::Compute,
            block,
            start_s: began.max(self.computed_until).as_secs_f64(),
            end_s: end.as_secs_f64(),
            bytes: 0,
        };
        self.computed_until = end;
        self.steps.push(step);
        self.check_stop()
    }

    /// Waits for the oldest band in progress, if there is one. Returns its rows.
    fn finish_band(
        &mut self,
        block: usize,
        running: &mut RunningBands,
    ) -> Result<Option<Range<u64>>, StopCause> {
        match running.pop_front() {
            None => Ok(None),
            Some((band, region, began)) => {
                self.end(block, region, began)?;
                Ok(Some(band))
            }
        }
    }

    fn write(&mut self, block: usize, rows: Range<u64>) -> Result<(), StopCause> {
        if rows.is_empty() {
            return Ok(());
        }
        self.check_stop()?;
        let grid = self.grids.first;
        let bytes = grid.span(&rows);
        let to = self.plan.row_offset(self.tile(), 0, rows.start);
        let began = self.start.elapsed();
        let written = self.card.write(grid, bytes.clone(), to);
        self.check(written, || format!("writing rows {} to {}", rows.start, rows.end))?;
        self.record(StepKind::Write, block, began, bytes.end - bytes.start);
        Ok(())
    }

    fn read(&mut self, block: usize, rows: &Range<u64>, result: &Grid) -> Result<(), StopCause> {
        self.check_stop()?;
        let bytes = result.span(rows);
        let from = self.plan.row_offset(self.tile(), (block as u64 + 1) % 2, rows.start);
        let began = self.start.elapsed();
        // SAFETY: a card reads its owned rows. If rows are written to cards from this grid, all cards have received theirs.
        let read = unsafe { self.card.read(result, bytes.clone(), from) };
        self.check(read, || format!("reading rows {} to {}", rows.start, rows.end))?;
        self.record(StepKind::Read, block, began, bytes.end - bytes.start);
        Ok(())
    }

    fn record(&mut self, kind: StepKind, block: usize, began: Duration, bytes: u64) {
        let (start_s, end_s) = (began.as_secs_f64(), self.start.elapsed().as_secs_f64());
        self.steps.push(Step { card: self.index, kind, block, start_s, end_s, bytes });
    }

    fn check_stop(&self) -> Result<(), StopCause> {
        if self.barrier.is_broken() {
            return Err(None);
        }
        if self.stop.load(Ordering::Relaxed) {
            return Err(Some(OffloadError::Stopped));
        }
        Ok(())
    }

    fn check<T>(
        &self,
        outcome: Result<T, CardError>,
        operation: impl Fn() -> String,
    ) -> Result<T, StopCause> {
        outcome.map_err(|cause| {
            Some(OffloadError::Card { card: self.card.name(), operation: operation(), cause })
        })
    }
}
