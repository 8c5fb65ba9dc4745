//! Sweeps over a region of a block, within the cache.
//!
//! A half-sweep updates the sites of one parity from those of the other, in place. Half-sweep `h` of a site must come after
//! half-sweep `h − 1` of its neighbours, and before `h + 1` of these. Any order that keeps this has the same result.
//!
//! A region of the block is divided into tiles of rows. In step `s` of a tile, half-sweep `h` updates plane `s − h`, so that all
//! half-sweeps follow each other through the planes while these are in the cache. Rows of half-sweep `h` are shifted by `−h`:
//!
//! ```text
//!      y ──►                 tile 0        tile 1        tile 2
//!      h = 0           │ 0 1 2 3 4 5 │ 6 7 8 9 …                   plane s
//!      h = 1         │ 0 1 2 3 4 │ 5 6 7 8 9 …                     plane s − 1
//!      h = 2       │ 0 1 2 3 │ 4 5 6 7 8 9 …                       plane s − 2
//! ```
//! So a tile needs the previous tile's results up to the same step only.
//!
//! Threads share nothing while they sweep: each has a chunk of rows, and half-sweep `h` leaves out `h` rows at either end, which
//! need rows of other chunks. The seam around an end comes afterwards: no row in half-sweep 0, one on either side in half-sweep
//! 1, and so on. The same holds for the ends of an axis of which the block has all, as these are neighbours of each other:
//!
//! ```text
//!      y ──►        chunk 0        seam 0        chunk 1        seam 1 (around the end)
//!      h = 0    0 1 2 3 4 5 6 7 │            │ 8 9 … 15     │
//!      h = 1      1 2 3 4 5 6   │    7 8     │   9 … 14     │   15 0
//!      h = 2        2 3 4 5     │  6 7 8 9   │   10 … 13    │ 14 15 0 1
//! ```

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::block::{Block, SharedBlock};
use crate::geometry::Box3;
use crate::real::Real;
use crate::rows::{COMPONENTS, RowUpdate};
use crate::vectors::VectorUnit;

/// Share of the last cache that a tile may take (bytes).
const CACHE_BYTES: usize = 4 << 20;

/// Sites that change: a box whose faces move from half-sweep to half-sweep.
#[derive(Clone, Debug)]
struct Region([Piece; 3]);

impl Region {
    /// The sites of half-sweep `h` along an axis.
    fn range(&self, axis: usize, h: usize) -> Range<isize> {
        let Piece { first, lower, upper } = &self.0[axis];
        first.start + lower * h as isize..first.end + upper * h as isize
    }

    /// The planes or rows of all half-sweeps, each shifted by its number.
    fn shifted(&self, axis: usize, half_sweeps: usize) -> Range<isize> {
        let ranges = (0..half_sweeps).map(|h| {
            let range = self.range(axis, h);
            range.start + h as isize..range.end + h as isize
        });
        ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// The block has all sites that change, and their neighbours.
    fn check<E: Real>(&self, block: &Block<E>, half_sweeps: usize) {
        for h in 0..half_sweeps {
            for (axis, (size, halo)) in block.extent().size.into_iter().zip(block.halo()).enumerate() {
                let (range, size, halo) = (self.range(axis, h), size as isize, halo as isize);
                let fits = if axis > 0 && block.has_whole(axis) {
                    // Rows and planes beyond an end are those of the other end.
                    range.start >= -size && range.end <= 2 * size && range.len() <= size as usize
                } else {
                    range.start > -halo && range.end < size + halo
                };
                assert!(range.is_empty() || fits, "the region exceeds the block");
            }
        }
    }
}

/// Sites along an axis that change: a range, and the movement of its faces in sites a half-sweep.
#[derive(Clone, Debug)]
struct Piece {
    first: Range<isize>,
    lower: isize,
    upper: isize,
}

impl Piece {
    fn fixed(first: Range<isize>) -> Piece {
        Piece { first, lower: 0, upper: 0 }
    }

    /// Leaves out a site more at either end in each half-sweep.
    fn shrinking(first: Range<isize>) -> Piece {
        Piece { first, lower: 1, upper: -1 }
    }

    /// What two shrinking pieces left out around their common end.
    fn seam(at: isize) -> Piece {
        Piece { first: at..at, lower: -1, upper: 1 }
    }
}

/// Regions that do not need each other.
struct Phase {
    regions: Vec<Region>,
    parity: usize,
    half_sweeps: usize,
}

/// The phases that make half-sweeps of a block, even sites first.
fn phases<E: Real>(block: &Block<E>, half_sweeps: usize, threads: usize) -> Vec<Phase> {
    let size = block.extent().size;
    let whole = [0, 1, 2].map(|axis| block.has_whole(axis));
    // A seam around the end of an axis does not meet itself.
    let most = (1..3).filter(|&axis| whole[axis]).map(|axis| size[axis] / 2).min().unwrap_or(half_sweeps);
    let (mut phases, mut done) = (Vec::new(), 0);
    while done < half_sweeps {
        let now = (half_sweeps - done).min(most);
        // A cut axis begins in its halos, and ends with the block.
        let more = (half_sweeps - done) as isize - 1;
        let all = |axis: usize| {
            let end = size[axis] as isize;
            if whole[axis] { 0..end } else { -more..end + more }
        };
        let x = if whole[0] { Piece::fixed(all(0)) } else { Piece::shrinking(all(0)) };
        let rows = all(1);
        let chunks = (rows.len() / (2 * now)).clamp(1, threads);
        let edges: Vec<_> = (0..=chunks).map(|i| rows.start + (i * rows.len() / chunks) as isize).collect();
        let inner_edges = if whole[1] { &edges[1..] } else { &edges[1..chunks] };
        let ys = [
            edges.windows(2).map(|edges| Piece::shrinking(edges[0]..edges[1])).collect::<Vec<_>>(),
            inner_edges.iter().map(|&at| Piece::seam(at)).collect(),
        ];
        let mut zs = vec![Piece::shrinking(all(2))];
        zs.extend(whole[2].then(|| Piece::seam(all(2).end)));
        for z in &zs {
            for ys in ys.iter().filter(|ys| !ys.is_empty()) {
                let regions = ys.iter().map(|y| Region([x.clone(), y.clone(), z.clone()])).collect();
                phases.push(Phase { regions, parity: done % 2, half_sweeps: now });
            }
        }
        done += now;
    }
    phases
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

    /// Makes half-sweeps of a block whose halos are valid, even sites first. `2 · depth` half-sweeps use all of the halos.
    ///
    /// # Panics
    /// If the halos are thinner than the half-sweeps need.
    pub fn sweep<E: Real>(&self, block: &mut Block<E>, half_sweeps: usize) {
        self.sweep_until(block, half_sweeps, &AtomicBool::new(false));
    }

    /// As [`Sweeper::sweep`], but ends early when `stop` is set. Returns whether all half-sweeps were made; otherwise some
    /// sites were updated more often than others.
    ///
    /// # Panics
    /// As [`Sweeper::sweep`].
    pub fn sweep_until<E: Real>(&self, block: &mut Block<E>, half_sweeps: usize, stop: &AtomicBool) -> bool {
        let phases = phases(block, half_sweeps, self.threads);
        self.run_phases(block, &phases, stop)
    }

    /// Makes one half-sweep of a region: it updates sites of parity `parity`.
    ///
    /// # Panics
    /// If the region exceeds the block with its halos less one site.
    pub fn half_sweep<E: Real>(&self, block: &mut Block<E>, region: &Box3, parity: usize) {
        let regions = vec![Region(region.clone().map(Piece::fixed))];
        self.run_phases(block, &[Phase { regions, parity, half_sweeps: 1 }], &AtomicBool::new(false));
    }

    fn run_phases<E: Real>(&self, block: &mut Block<E>, phases: &[Phase], stop: &AtomicBool) -> bool {
        for phase in phases {
            phase.regions.iter().for_each(|region| region.check(block, phase.half_sweeps));
        }
        let threads = phases.iter().map(|phase| phase.regions.len()).max().unwrap_or(0).min(self.threads);
        let work = Work {
            tile_rows: self.tile_rows,
            row_bytes: 2 * COMPONENTS * E::BYTES * block.geometry().pitch,
            block: block.shared(),
            phases,
            update: E::row_update(self.unit),
            arrived: AtomicUsize::new(0),
            stop,
            stopped: AtomicBool::new(false),
        };
        // Known to the threads once they have started: the system may refuse some, for example at a limit of processes.
        let count = OnceLock::new();
        std::thread::scope(|scope| {
            let mut started = 1;
            for thread in 1..threads {
                let (work, count) = (&work, &count);
                let run = move || work.run(thread, *count.wait());
                if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                    break;
                }
                started += 1;
            }
            work.run(0, *count.get_or_init(|| started));
        });
        !work.stopped.into_inner()
    }
}

/// Planes between the one that half-sweep 0 updates and one that is fetched from memory: short rows are no streams to the
/// processor.
const AHEAD: isize = 2;

/// What the threads of a run share.
struct Work<'r, E> {
    block: SharedBlock<E>,
    phases: &'r [Phase],
    tile_rows: Option<usize>,
    /// Bytes of both rows at one y and z.
    row_bytes: usize,
    update: RowUpdate<E>,
    /// Ends of phases, over all threads.
    arrived: AtomicUsize,
    /// Request to end early.
    stop: &'r AtomicBool,
    /// A thread has ended early; so do those that wait for it.
    stopped: AtomicBool,
}

impl<E: Real> Work<'_, E> {
    /// What one of `threads` threads does.
    fn run(&self, thread: usize, threads: usize) {
        for (number, phase) in self.phases.iter().enumerate() {
            for region in phase.regions.iter().skip(thread).step_by(threads) {
                self.sweep(phase, region);
            }
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            self.arrived.fetch_add(1, Ordering::Release);
            self.await_all((number + 1) * threads);
        }
    }

    /// Waits until all threads have ended a phase.
    fn await_all(&self, ends: usize) {
        let mut looks = 0_u32;
        while self.arrived.load(Ordering::Acquire) < ends && !self.stopped.load(Ordering::Relaxed) {
            looks += 1;
            // The other thread may not run: there may be fewer processors than threads.
            if looks.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }

    /// Sweeps a region, tile after tile.
    fn sweep(&self, phase: &Phase, region: &Region) {
        let rows = region.shifted(1, phase.half_sweeps);
        // Each half-sweep's plane, one on either side, and the rows by which they are shifted.
        let planes = CACHE_BYTES / self.row_bytes / (phase.half_sweeps + 2);
        let height = self.tile_rows.unwrap_or_else(|| planes.saturating_sub(2).max(4)).max(1);
        for start in rows.step_by(height) {
            for step in region.shifted(2, phase.half_sweeps) {
                if self.stop.load(Ordering::Relaxed) {
                    self.stopped.store(true, Ordering::Relaxed);
                }
                if self.stopped.load(Ordering::Relaxed) {
                    return;
                }
                self.step(phase, region, start..start + height as isize, step);
            }
        }
    }

    fn step(&self, phase: &Phase, region: &Region, tile: Range<isize>, step: isize) {
        for h in 0..phase.half_sweeps {
            let (z, lag) = (step - h as isize, h as isize);
            let planes = region.range(2, h);
            if !planes.contains(&z) {
                continue;
            }
            let y = region.range(1, h);
            let rows = y.start.max(tile.start - lag)..y.end.min(tile.end - lag);
            let x = region.range(0, h);
            let parity = (phase.parity + h) % 2;
            for y in rows {
                if h == 0 && z + AHEAD < planes.end {
                    self.block.prefetch(y, z + AHEAD);
                }
                let row = self.block.rows(parity, y, z);
                let indices = Block::<E>::indices(&x, row.shift);
                // SAFETY: the region is within the block. Half-sweeps, steps, tiles and phases are in the order of the
                // module's description, so no other thread accesses these sites or changes their neighbours.
                unsafe {
                    (self.update)(&row, indices);
                    self.block.copy_x_ends(row.own);
                }
            }
        }
    }
}
