//! The order of things: what each card does, and what overlaps.
//!
//! ```text
//!   first block        write rows of band 1, 2, …   while band 0, 1, … is computed
//!   blocks between     compute the edges; then the rest, while the edges travel to the neighbours
//!   last block         read band 0, 1, …            while band 1, 2, … is computed
//! ```
//!
//! After each block the cards wait for each other: a card's next block needs its neighbours' edges. Each card has
//! a thread here that tells it what to do; the data goes between this host's memory and the cards, and from card
//! to card. If one card fails, the others end, and the job says which one it was and why.
//!
//! A job that keeps checkpoints reads the cards' own rows into a second grid now and then, while the next block is
//! computed: that block reads them and writes elsewhere. Two grids take turns, so that one of them always holds a
//! state of all cards after the same sweep ([`Saves`]); [`crate::recovery`] goes on from there.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_card::Span;
use millstream_card::region::stencil::StencilArguments;

use crate::OffloadError;
use crate::grid::Grid;
use crate::plan::{Plan, Tile};
use crate::timeline::{JobReport, Kind, Step};
use crate::worker::{Lane, Neighbour, Parcel, Worker, WorkerError};

/// What a job keeps for the case that a card fails.
#[derive(Debug)]
pub struct Saves<'a> {
    /// A second grid of the same shape, and registered as the first one is.
    pub spare: &'a mut Grid,
    /// Sweeps from one checkpoint to the next, at least; a checkpoint is made between two blocks. None: only the
    /// state at the start is kept.
    pub every: Option<NonZeroU64>,
}

/// A job that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failed {
    /// Why.
    #[source]
    pub error: OffloadError,
    /// The sweeps after which the grid is what it is now, if the job kept checkpoints.
    pub saved: u64,
}

/// Computes the grid, in place, on the cards; one worker for each tile of the plan.
///
/// `progress` hears how many blocks are over. `stop` ends the job at the next step. With `saves` the grid is, after a
/// failure, the state of the latest checkpoint; without, it may have parts of several.
///
/// # Errors
/// [`OffloadError::Card`] with the first failure; [`OffloadError::Stopped`].
///
/// # Panics
/// If there are not as many workers as tiles, or the grids differ in shape.
pub fn run<W: Worker>(
    plan: &Plan,
    grid: &mut Grid,
    saves: Option<Saves<'_>>,
    workers: &mut [W],
    progress: &(dyn Fn(usize) + Sync),
    stop: &AtomicBool,
) -> Result<JobReport, Failed> {
    assert_eq!(workers.len(), plan.tiles.len());
    assert_eq!(grid.shape(), plan.shape);
    let cards: Vec<_> = workers.iter().map(W::name).collect();
    let gate = Gate::new(workers.len());
    let start = Instant::now();
    let checkpoints = saves.as_ref().and_then(|saves| saves.every);
    let due = checkpoints.map_or_else(Vec::new, |every| plan.checkpoints(every.get()));
    let spare = saves.map(|saves| saves.spare);
    assert!(spare.as_ref().is_none_or(|spare| spare.shape() == plan.shape));
    let grids = Grids { first: grid, second: spare.as_deref() };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .enumerate()
            .map(|(card, worker)| {
                let (gate, due) = (&gate, &due[..]);
                scope.spawn(move || {
                    let (steps, computed) = (Vec::new(), Duration::ZERO);
                    Clerk {
                        plan,
                        grids,
                        due,
                        saved: 0,
                        card,
                        worker,
                        gate,
                        start,
                        progress,
                        stop,
                        steps,
                        computed,
                    }
                    .work()
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
    let mut broken = None;
    for outcome in outcomes {
        match outcome {
            Ok(more) => steps.extend(more),
            // Those that ended because another one did have nothing to say.
            Err(None) => {}
            Err(Some(error)) => broken = broken.or(Some(error)),
        }
    }
    let saved = gate.lock().saved;
    // Checkpoints and the result take turns: what is wanted is in the other grid after an odd number of them.
    let turns = if broken.is_some() { saved } else { due.len() + 1 };
    if let Some(spare) = spare
        && turns % 2 == 1
    {
        std::mem::swap(grid, spare);
    }
    match broken {
        Some(error) => {
            let blocks = saved.checked_sub(1).map_or(0, |index| due[index]);
            Err(Failed { error, saved: plan.blocks[..blocks].iter().sum() })
        }
        None => Ok(JobReport::new(plan, cards, wall, steps)),
    }
}

/// Where rows come from and go to.
#[derive(Clone, Copy)]
struct Grids<'a> {
    /// The state at the start.
    first: &'a Grid,
    /// The grid that takes turns with it, if the job keeps states.
    second: Option<&'a Grid>,
}

impl<'a> Grids<'a> {
    /// Where the `turn`-th state goes, from 1.
    fn target(&self, turn: usize) -> &'a Grid {
        if turn % 2 == 1 { self.second.unwrap_or(self.first) } else { self.first }
    }
}

/// Where cards wait for each other.
struct Gate {
    cards: usize,
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    waiting: usize,
    opened: u64,
    broken: bool,
    /// Checkpoints that all cards have made.
    saved: usize,
}

/// Another card has failed.
struct Broken;

impl Gate {
    fn new(cards: usize) -> Gate {
        Gate { cards, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every card is here, each having made `saved` checkpoints. True for one of them.
    fn pass(&self, saved: usize) -> Result<bool, Broken> {
        let mut state = self.lock();
        let opened = state.opened;
        state.waiting += 1;
        let last = state.waiting == self.cards;
        if last {
            state.waiting = 0;
            state.opened += 1;
            // Under the lock: nobody writes over the checkpoint before until this one counts.
            state.saved = saved;
            self.changed.notify_all();
        }
        let waits = |state: &mut GateState| state.opened == opened && !state.broken;
        state = self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        if state.broken { Err(Broken) } else { Ok(last) }
    }

    fn shatter(&self) {
        self.lock().broken = true;
        self.changed.notify_all();
    }

    fn is_broken(&self) -> bool {
        self.lock().broken
    }
}

/// Who tells one card what to do.
struct Clerk<'a, W> {
    plan: &'a Plan,
    grids: Grids<'a>,
    /// Blocks before which a checkpoint is made.
    due: &'a [usize],
    /// Checkpoints made.
    saved: usize,
    card: usize,
    worker: &'a mut W,
    gate: &'a Gate,
    start: Instant,
    progress: &'a (dyn Fn(usize) + Sync),
    stop: &'a AtomicBool,
    steps: Vec<Step>,
    /// When the latest run ended.
    computed: Duration,
}

/// Where bands are computed in turn.
const LANES: [Lane; 2] = [Lane::Inner, Lane::Edges];

/// Bands that a card computes, the first one first: which, where, since when.
type UnderWay = VecDeque<(Range<u64>, Lane, Duration)>;

/// A failure, or none of one's own.
type Ended = Option<OffloadError>;

impl From<Broken> for Ended {
    fn from(_: Broken) -> Ended {
        None
    }
}

impl<W: Worker> Clerk<'_, W> {
    fn work(mut self) -> Result<Vec<Step>, Ended> {
        let outcome = self.blocks();
        if outcome.is_err() {
            self.gate.shatter();
        }
        outcome.map(|()| self.steps)
    }

    fn tile(&self) -> &Tile {
        &self.plan.tiles[self.card]
    }

    fn blocks(&mut self) -> Result<(), Ended> {
        let count = self.plan.blocks.len();
        for block in 0..count {
            let (first, last) = (block == 0, block + 1 == count);
            if first || last {
                self.in_bands(block, first, last)?;
            } else {
                self.in_parts(block)?;
            }
            if !last {
                if first {
                    self.exchange(block)?;
                }
                let began = self.start.elapsed();
                let told = self.gate.pass(self.saved)?;
                self.note(Kind::Wait, block, began, 0);
                if told {
                    (self.progress)(block + 1);
                }
            }
        }
        Ok(())
    }

    /// A block band by band: rows come before their band is computed, or go after it was. Two bands are under way in
    /// the card at a time, so that cores which have no more to do in the one go on with the other.
    fn in_bands(&mut self, block: usize, comes: bool, goes: bool) -> Result<(), Ended> {
        let bands = self.plan.bands(self.tile());
        let sweeps = self.plan.blocks[block];
        let held = self.tile().held.clone();
        // Another card's rows must not come back to the grid that cards are still getting theirs from.
        let at_once = goes && !(comes && self.plan.tiles.len() > 1 && self.grids.second.is_none());
        let result = self.grids.target(self.due.len() + 1);
        let mut written = held.start;
        let mut under_way = VecDeque::new();
        for (index, band) in bands.iter().enumerate() {
            if comes {
                let until = if band.end == self.tile().own.end {
                    held.end
                } else {
                    (band.end + sweeps).min(held.end)
                };
                self.write(block, written..until.max(written))?;
                written = until.max(written);
            }
            let done =
                if under_way.len() == LANES.len() { self.settle(block, &mut under_way)? } else { None };
            let lane = LANES[index % LANES.len()];
            let began = self.begin(block, lane, &[band.clone(), 0..0])?;
            under_way.push_back((band.clone(), lane, began));
            if let Some(done) = done.filter(|_| at_once) {
                self.read(block, &done, result)?;
            }
        }
        while let Some(done) = self.settle(block, &mut under_way)? {
            if at_once {
                self.read(block, &done, result)?;
            }
        }
        if goes && !at_once {
            self.gate.pass(self.saved)?;
            for band in &bands {
                self.read(block, band, result)?;
            }
        }
        Ok(())
    }

    /// A block in two parts: the edges, and the rest while they travel.
    fn in_parts(&mut self, block: usize) -> Result<(), Ended> {
        let next = self.plan.blocks[block + 1];
        let (edges, between) = self.plan.edges(self.card, next).split(&self.tile().own);
        if edges.iter().any(|range| !range.is_empty()) {
            let began = self.begin(block, Lane::Edges, &edges)?;
            self.end(block, Lane::Edges, began)?;
        }
        let began = match between.is_empty() {
            true => None,
            false => Some(self.begin(block, Lane::Inner, &[between, 0..0])?),
        };
        self.exchange(block)?;
        if self.due.contains(&block) {
            self.save(block)?;
        }
        if let Some(began) = began {
            self.end(block, Lane::Inner, began)?;
        }
        Ok(())
    }

    /// Reads the state before a block, which the block leaves as it is.
    fn save(&mut self, block: usize) -> Result<(), Ended> {
        self.go_on()?;
        let target = self.grids.target(self.saved + 1);
        let rows = self.tile().own.clone();
        let (bytes, began) = (target.span(&rows), self.start.elapsed());
        let from = self.plan.place(self.tile(), block as u64 % 2, rows.start);
        // SAFETY: a card reads its own rows, into the grid that no state is taken from: what was written to cards came
        // from another one, or the checkpoint after it is complete and all cards have passed the gate behind it.
        let read = unsafe { self.worker.read(target, bytes.clone(), from) };
        self.check(read, || format!("saving rows {} to {}", rows.start, rows.end))?;
        self.note(Kind::Save, block, began, bytes.end - bytes.start);
        self.saved += 1;
        Ok(())
    }

    /// Sends what the neighbours need of this block's result for the next.
    fn exchange(&mut self, block: usize) -> Result<(), Ended> {
        let plane = (block as u64 + 1) % 2;
        let edges = self.plan.edges(self.card, self.plan.blocks[block + 1]);
        let mut parcels = Vec::new();
        for (rows, to, other) in [
            (edges.upper, Neighbour::Above, self.card.wrapping_sub(1)),
            (edges.lower, Neighbour::Below, self.card + 1),
        ] {
            let (Some(rows), Some(there)) = (rows, self.plan.tiles.get(other)) else { continue };
            let from = self.plan.place(self.tile(), plane, rows.start);
            let len = (rows.end - rows.start) * self.plan.shape.row_bytes();
            let offset = self.plan.place(there, plane, rows.start);
            parcels.push(Parcel { to, from: Span::new(from, len), offset });
        }
        if parcels.is_empty() {
            return Ok(());
        }
        let bytes = parcels.iter().map(|parcel| parcel.from.len).sum();
        self.go_on()?;
        let began = self.start.elapsed();
        let sent = self.worker.send(&parcels);
        self.check(sent, || "sending rows to its neighbours".to_owned())?;
        self.note(Kind::Halo, block, began, bytes);
        Ok(())
    }

    /// Starts rows of a block; when that was.
    fn begin(&mut self, block: usize, lane: Lane, rows: &[Range<u64>; 2]) -> Result<Duration, Ended> {
        self.go_on()?;
        let (plan, tile) = (self.plan, self.tile());
        let block_plane = block as u64 % 2;
        let local = |rows: &Range<u64>| if rows.is_empty() { 0..0 } else { tile.local(rows) };
        let arguments = StencilArguments {
            double: plan.shape.double,
            rows: tile.held.end - tile.held.start,
            columns: plan.shape.columns,
            pitch: plan.shape.columns,
            source: plan.plane(tile, block_plane),
            destination: plan.plane(tile, 1 - block_plane),
            sweeps: plan.blocks[block],
            ranges: [local(&rows[0]), local(&rows[1])],
        };
        let began = self.start.elapsed();
        let started = self.worker.start(lane, &arguments);
        self.check(started, || format!("starting block {block}"))?;
        Ok(began)
    }

    fn end(&mut self, block: usize, lane: Lane, began: Duration) -> Result<(), Ended> {
        let waited = self.worker.wait(lane);
        let took = self.check(waited, || format!("computing block {block}"))?;
        // When it ended the card does not say; that it took so long, it does. Of two runs at once the second one counts
        // from the end of the first.
        let end = (began + took).min(self.start.elapsed()).max(self.computed);
        let step = Step {
            card: self.card,
            kind: Kind::Compute,
            block,
            start_s: began.max(self.computed).as_secs_f64(),
            end_s: end.as_secs_f64(),
            bytes: 0,
        };
        self.computed = end;
        self.steps.push(step);
        self.go_on()
    }

    /// Waits for the first of the bands that are being computed, if there is one.
    fn settle(&mut self, block: usize, under_way: &mut UnderWay) -> Result<Option<Range<u64>>, Ended> {
        match under_way.pop_front() {
            None => Ok(None),
            Some((band, lane, began)) => {
                self.end(block, lane, began)?;
                Ok(Some(band))
            }
        }
    }

    fn write(&mut self, block: usize, rows: Range<u64>) -> Result<(), Ended> {
        if rows.is_empty() {
            return Ok(());
        }
        self.go_on()?;
        let grid = self.grids.first;
        let bytes = grid.span(&rows);
        let to = self.plan.place(self.tile(), 0, rows.start);
        let began = self.start.elapsed();
        let written = self.worker.write(grid, bytes.clone(), to);
        self.check(written, || format!("writing rows {} to {}", rows.start, rows.end))?;
        self.note(Kind::Write, block, began, bytes.end - bytes.start);
        Ok(())
    }

    fn read(&mut self, block: usize, rows: &Range<u64>, result: &Grid) -> Result<(), Ended> {
        self.go_on()?;
        let bytes = result.span(rows);
        let from = self.plan.place(self.tile(), (block as u64 + 1) % 2, rows.start);
        let began = self.start.elapsed();
        // SAFETY: a card reads its own rows, and if this is the grid that rows come from, only after all have written theirs.
        let read = unsafe { self.worker.read(result, bytes.clone(), from) };
        self.check(read, || format!("reading rows {} to {}", rows.start, rows.end))?;
        self.note(Kind::Read, block, began, bytes.end - bytes.start);
        Ok(())
    }

    fn note(&mut self, kind: Kind, block: usize, began: Duration, bytes: u64) {
        let (start_s, end_s) = (began.as_secs_f64(), self.start.elapsed().as_secs_f64());
        self.steps.push(Step { card: self.card, kind, block, start_s, end_s, bytes });
    }

    fn go_on(&self) -> Result<(), Ended> {
        if self.gate.is_broken() {
            return Err(None);
        }
        if self.stop.load(Ordering::Relaxed) {
            return Err(Some(OffloadError::Stopped));
        }
        Ok(())
    }

    fn check<T>(&self, outcome: Result<T, WorkerError>, doing: impl Fn() -> String) -> Result<T, Ended> {
        outcome.map_err(|cause| Some(OffloadError::Card { card: self.worker.name(), doing: doing(), cause }))
    }
}
