//! Sweeps over a region of a block, within the cache.
//!
//! A half-sweep updates the sites of one parity from those of the other, in place. Half-sweep `h` of a site must come after
//! half-sweep `h − 1` of its neighbours, and before `h + 1` of these. Any order that keeps this has the same result.
//!
//! The block is divided into tiles of rows. In step `s` of a tile, half-sweep `h` updates plane `s − h`, so that all
//! half-sweeps follow each other through the planes while these are in the cache. Rows of half-sweep `h` are shifted by `−h`:
//!
//! ```text
//!      y ──►                 tile 0        tile 1        tile 2
//!      h = 0           │ 0 1 2 3 4 5 │ 6 7 8 9 …                   plane s
//!      h = 1         │ 0 1 2 3 4 │ 5 6 7 8 9 …                     plane s − 1
//!      h = 2       │ 0 1 2 3 │ 4 5 6 7 8 9 …                       plane s − 2
//! ```
//! So a tile needs the previous tile's results up to the same step only. Threads take tiles in turn, one step apart.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::block::{Block, SharedBlock};
use crate::geometry::Box3;
use crate::real::Real;
use crate::rows::RowUpdate;
use crate::vectors::VectorUnit;

/// Cache of a core that a tile may take (bytes).
const CACHE_BYTES: usize = 640 << 10;

/// Sites that change in each half-sweep: a box whose faces move by one site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// The sites of half-sweep 0.
    pub first: Box3,
    /// Movement of the lower face of each axis, in sites a half-sweep.
    pub lower: [isize; 3],
    /// Movement of the upper face of each axis.
    pub upper: [isize; 3],
}

impl Region {
    /// A region that stays.
    #[must_use]
    pub fn fixed(part: Box3) -> Region {
        Region { first: part, lower: [0; 3], upper: [0; 3] }
    }

    /// Everything that `half_sweeps` can update with valid halos: the block in the last half-sweep, more before.
    #[must_use]
    pub fn with_halos<E: Real>(block: &Block<E>, half_sweeps: usize) -> Region {
        let more = half_sweeps as isize - 1;
        let mut region = Region { first: block.inside(), lower: [1; 3], upper: [-1; 3] };
        for (a, range) in region.first.iter_mut().enumerate() {
            if a == 0 && block.has_whole_x() {
                (region.lower[a], region.upper[a]) = (0, 0);
            } else {
                *range = range.start - more..range.end + more;
            }
        }
        region
    }

    /// The sites of half-sweep `h` along an axis.
    fn range(&self, axis: usize, h: usize) -> std::ops::Range<isize> {
        let first = &self.first[axis];
        first.start + self.lower[axis] * h as isize..first.end + self.upper[axis] * h as isize
    }

    /// The planes or rows of all half-sweeps, each shifted by its number.
    fn shifted(&self, axis: usize, half_sweeps: usize) -> std::ops::Range<isize> {
        let ranges = (0..half_sweeps).map(|h| {
            let range = self.range(axis, h);
            range.start + h as isize..range.end + h as isize
        });
        ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }
}

/// Updates blocks with a number of threads on a vector unit.
#[derive(Clone, Copy, Debug)]
pub struct Sweeper {
    threads: usize,
    unit: VectorUnit,
    tile_rows: Option<usize>,
}

impl Sweeper {
    /// On the widest vector unit.
    #[must_use]
    pub fn new(threads: usize) -> Sweeper {
        Sweeper::with(threads, VectorUnit::widest(), None)
    }

    /// On a given vector unit, with tiles of a given number of rows.
    #[must_use]
    pub fn with(threads: usize, unit: VectorUnit, tile_rows: Option<usize>) -> Sweeper {
        Sweeper { threads: threads.max(1), unit, tile_rows }
    }

    /// Makes `half_sweeps` half-sweeps of a region; the first one updates sites of parity `parity`.
    ///
    /// # Panics
    /// If the region exceeds the block with its halos less one site.
    pub fn run<E: Real>(&self, block: &mut Block<E>, region: &Region, parity: usize, half_sweeps: usize) {
        self.run_until(block, region, parity, half_sweeps, &AtomicBool::new(false));
    }

    /// As [`Sweeper::run`], but ends early when `stop` is set. Returns whether all half-sweeps were made; otherwise some
    /// sites were updated more often than others.
    ///
    /// # Panics
    /// As [`Sweeper::run`].
    pub fn run_until<E: Real>(
        &self,
        block: &mut Block<E>,
        region: &Region,
        parity: usize,
        half_sweeps: usize,
        stop: &AtomicBool,
    ) -> bool {
        for h in 0..half_sweeps {
            for (axis, (size, halo)) in block.extent().size.into_iter().zip(block.halo()).enumerate() {
                let (range, halo) = (region.range(axis, h), halo as isize);
                // The update reads one site beyond.
                let fits = range.start > -halo && range.end < size as isize + halo;
                assert!(range.is_empty() || fits, "the region exceeds the block");
            }
        }
        let rows = region.shifted(1, half_sweeps);
        if rows.is_empty() || half_sweeps == 0 {
            return true;
        }
        let height = self.tile_rows.unwrap_or_else(|| tile_rows(block, half_sweeps)).max(1);
        let tiles = rows.len().div_ceil(height);
        let work = Work {
            steps: region.shifted(2, half_sweeps),
            block: block.shared(),
            region,
            parity,
            half_sweeps,
            rows,
            height,
            update: E::row_update(self.unit),
            progress: (0..tiles).map(|_| AtomicUsize::new(0)).collect(),
            stop,
            stopped: AtomicBool::new(false),
        };
        let threads = self.threads.min(tiles);
        std::thread::scope(|scope| {
            for thread in 1..threads {
                let work = &work;
                scope.spawn(move || work.tiles_of(thread, threads));
            }
            work.tiles_of(0, threads);
        });
        !work.stopped.into_inner()
    }
}

/// Rows of a tile whose planes stay in a core's cache.
fn tile_rows<E: Real>(block: &Block<E>, half_sweeps: usize) -> usize {
    let row = 2 * crate::rows::COMPONENTS * E::BYTES * (block.extent().size[0] / 2 + 16);
    // Each half-sweep's plane, one on either side, and the rows by which they are shifted.
    (CACHE_BYTES / row / (half_sweeps + 2)).saturating_sub(2).max(4)
}

/// What the threads of a run share.
struct Work<'r, E> {
    block: SharedBlock<E>,
    region: &'r Region,
    parity: usize,
    half_sweeps: usize,
    rows: std::ops::Range<isize>,
    steps: std::ops::Range<isize>,
    height: usize,
    update: RowUpdate<E>,
    /// Steps that each tile has made.
    progress: Vec<AtomicUsize>,
    /// Request to end early.
    stop: &'r AtomicBool,
    /// A thread has ended early; so do those that wait for it.
    stopped: AtomicBool,
}

impl<E: Real> Work<'_, E> {
    fn tiles_of(&self, thread: usize, threads: usize) {
        for tile in (thread..self.progress.len()).step_by(threads) {
            for (done, step) in self.steps.clone().enumerate() {
                if self.stop.load(Ordering::Relaxed) {
                    self.stopped.store(true, Ordering::Relaxed);
                }
                if tile > 0 {
                    self.await_step(tile - 1, done + 1);
                }
                if self.stopped.load(Ordering::Relaxed) {
                    return;
                }
                self.step(tile, step);
                self.progress[tile].store(done + 1, Ordering::Release);
            }
        }
    }

    fn await_step(&self, tile: usize, steps: usize) {
        let mut looks = 0_u32;
        while self.progress[tile].load(Ordering::Acquire) < steps && !self.stopped.load(Ordering::Relaxed) {
            looks += 1;
            // The other thread may not run: there may be fewer processors than threads.
            if looks.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    fn step(&self, tile: usize, step: isize) {
        let start = self.rows.start + (tile * self.height) as isize;
        for h in 0..self.half_sweeps {
            let (z, lag) = (step - h as isize, h as isize);
            if !self.region.range(2, h).contains(&z) {
                continue;
            }
            let y = self.region.range(1, h);
            let rows = y.start.max(start - lag)..y.end.min(start + self.height as isize - lag);
            let x = self.region.range(0, h);
            let parity = (self.parity + h) % 2;
            for y in rows {
                let row = self.block.rows(parity, y, z);
                let indices = Block::<E>::indices(&x, row.shift);
                // SAFETY: the region is within the block. Half-sweeps, steps and tiles are in the order of the module's
                // description, so no other thread accesses these sites or changes their neighbours.
                unsafe {
                    (self.update)(&row, indices);
                    self.block.copy_x_ends(row.own);
                }
            }
        }
    }
}
