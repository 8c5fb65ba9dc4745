//! Five-point Jacobi sweeps: a sweep replaces each point of a grid by the mean of its four neighbours.
//!
//! Memory bandwidth limits a single sweep: four operations per point, and eight bytes of memory traffic. The
//! kernel therefore makes up to [`MAX_DEPTH`] sweeps of a tile within a core's cache before it writes the
//! tile back (temporal blocking, module `tile`). It uses the widest vectors of the processor (module `rows`).
//! The result does not depend on processor, tiles or threads. It equals [`reference()`] bit for bit,
//! and numpy's
//! `0.25 * ((a[:-2, 1:-1] + a[2:, 1:-1]) + (a[1:-1, :-2] + a[1:-1, 2:]))`.
//!
//! The outermost rows and columns of a grid keep their values.
//!
//! ```
//! use millstream_stencil::{Jacobi, Plane, reference};
//!
//! let mut source: Vec<f32> = (0..40 * 50).map(|i| (i * i % 101) as f32).collect();
//! let expected = reference(&source, 40, 50, 7);
//! let mut destination = source.clone();
//! let planes = [&mut source, &mut destination].map(|cells| Plane::of(cells, 40, 50));
//! // SAFETY: two distinct grids, which no other thread accesses.
//! unsafe { Jacobi::new(2).run(planes[0], planes[1], 7, &|| true).unwrap() };
//! assert_eq!(destination, expected);
//! ```

mod element;
mod rows;
mod scratch;
mod tile;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, OnceLock};

pub use element::Element;

use crate::rows::STEP;
use crate::scratch::ScratchMemory;
use crate::tile::{Pass, Tile};

/// The most sweeps that a tile makes before it is written back.
pub const MAX_DEPTH: usize = 16;

/// Cache of a core that the intermediate levels of a tile may take (bytes).
const CACHE_BYTES: usize = 384 << 10;

/// Rows of a tile: fewer rows increase the overlap of tiles, more rows balance threads worse.
const TILE_ROWS: usize = 1024;

/// Grids of this size (bytes) or more are written with non-temporal stores, since they exceed the caches.
const NON_TEMPORAL_BYTES: usize = 16 << 20;

/// The vector units that the inner loops are implemented for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorUnit {
    /// No vector unit, or an unknown one.
    Portable,
    /// 256-bit vectors of x86-64.
    Avx2,
    /// 512-bit vectors of x86-64.
    Avx512,
}

impl VectorUnit {
    /// All units, the widest first.
    pub const ALL: [VectorUnit; 3] = [VectorUnit::Avx512, VectorUnit::Avx2, VectorUnit::Portable];

    /// Whether this processor has the unit.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            VectorUnit::Portable => true,
            #[cfg(target_arch = "x86_64")]
            VectorUnit::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            VectorUnit::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The widest unit of this processor.
    #[must_use]
    pub fn widest() -> VectorUnit {
        VectorUnit::ALL.into_iter().find(|unit| unit.is_available()).unwrap_or(VectorUnit::Portable)
    }
}

/// A grid in memory, row by row.
#[derive(Debug)]
pub struct Plane<E> {
    /// First element of the first row.
    pub base: *mut E,
    /// Elements from one row to the next.
    pub pitch: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns, at most `pitch`.
    pub columns: usize,
}

impl<E> Clone for Plane<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Plane<E> {}

impl<E: Element> Plane<E> {
    /// The plane of contiguous cells.
    ///
    /// # Panics
    /// If there are not `rows * columns` cells.
    pub fn of(cells: &mut [E], rows: usize, columns: usize) -> Plane<E> {
        assert_eq!(Some(cells.len()), rows.checked_mul(columns));
        Plane { base: cells.as_mut_ptr(), pitch: columns, rows, columns }
    }

    fn row(&self, row: usize) -> *mut E {
        self.base.wrapping_add(row * self.pitch)
    }
}

/// The caller stopped the computation; the destination is partly written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the computation was stopped")]
pub struct Stopped;

/// The kernel: a vector unit, a number of threads, and their scratch memory, which is kept between runs.
#[derive(Debug)]
pub struct Jacobi<E> {
    unit: VectorUnit,
    depth: usize,
    scratch: Vec<ScratchMemory<E>>,
}

impl<E: Element> Jacobi<E> {
    /// A kernel with `threads` threads, at least one, on the widest vector unit.
    #[must_use]
    pub fn new(threads: usize) -> Jacobi<E> {
        Jacobi::with(threads, VectorUnit::widest(), MAX_DEPTH)
    }

    /// A kernel on a given vector unit; the portable loop if this processor lacks it. It makes at most
    /// `depth` sweeps, 1 to [`MAX_DEPTH`], before it writes a tile back.
    #[must_use]
    pub fn with(threads: usize, unit: VectorUnit, depth: usize) -> Jacobi<E> {
        let scratch = (0..threads.max(1)).map(|_| ScratchMemory::default()).collect();
        Jacobi { unit, depth: depth.clamp(1, MAX_DEPTH), scratch }
    }

    /// Makes `sweeps` sweeps over the grid in `source` and leaves the result in `destination`. The source keeps its values only
    /// if the sweeps do not exceed the depth.
    ///
    /// Each thread calls `go_on` every few microseconds. Fewer threads compute if the system refuses some.
    ///
    /// # Errors
    /// [`Stopped`] if `go_on` returned false.
    ///
    /// # Panics
    /// If the planes differ in size, or have rows longer than their pitch.
    ///
    /// # Safety
    /// The planes are readable and writable and do not overlap. No other thread writes the source or accesses
    /// the destination meanwhile. If another process does, in memory that it maps too, the result is
    /// unspecified.
    pub unsafe fn run(
        &mut self,
        source: Plane<E>,
        destination: Plane<E>,
        sweeps: usize,
        go_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), Stopped> {
        // An odd number of passes ends in the destination.
        let passes = sweeps.div_ceil(self.depth) | 1;
        let whole = 0..source.rows;
        // SAFETY: the caller's promise.
        unsafe { self.passes(source, destination, whole, sweeps, passes, go_on) }
    }

    /// Computes rows `rows` of the grid after `sweeps` sweeps, at most the depth. The source keeps its values; no other row of
    /// the destination changes.
    ///
    /// # Errors
    /// [`Stopped`] if `go_on` returned false.
    ///
    /// # Panics
    /// If the planes differ in size or have rows longer than their pitch. If `rows` exceeds the planes, or
    /// `sweeps` the depth.
    ///
    /// # Safety
    /// As for [`run`](Self::run). However, other threads may write other rows of the destination, and rows of
    /// the source that are more than `sweeps` away.
    pub unsafe fn run_rows(
        &mut self,
        source: Plane<E>,
        destination: Plane<E>,
        rows: Range<usize>,
        sweeps: usize,
        go_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), Stopped> {
        assert!(sweeps <= self.depth && rows.end <= source.rows);
        // SAFETY: the caller's promise.
        unsafe { self.passes(source, destination, rows, sweeps, 1, go_on) }
    }

    unsafe fn passes(
        &mut self,
        source: Plane<E>,
        destination: Plane<E>,
        rows: Range<usize>,
        sweeps: usize,
        passes: usize,
        go_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), Stopped> {
        assert_eq!((source.rows, source.columns), (destination.rows, destination.columns));
        assert!(source.columns <= source.pitch && source.columns <= destination.pitch);
        if rows.is_empty() || source.columns == 0 {
            return Ok(());
        }
        let plan = SharedRun {
            source,
            destination,
            loops: E::rows(self.unit),
            tiles: Tiles::new::<E>(rows, source.columns, sweeps.div_ceil(passes)),
            sweeps,
            passes,
            non_temporal: source.rows * source.columns * E::BYTES >= NON_TEMPORAL_BYTES,
            next: (0..passes).map(|_| AtomicUsize::new(0)).collect(),
            stopped: AtomicBool::new(false),
        };
        // Starting a thread takes longer than computing a small tile.
        let threads = self.scratch.len().min(plan.tiles.count());
        // Made for the threads that have started: the system may refuse some, for example at a limit of processes.
        let barrier = OnceLock::new();
        let (first, others) = self.scratch.split_first_mut().expect("there is at least one thread");
        std::thread::scope(|scope| {
            let mut started = 1;
            for scratch in &mut others[..threads - 1] {
                let (plan, barrier) = (&plan, &barrier);
                // SAFETY: the caller's promise.
                let work = move || unsafe { plan.work(scratch, barrier.wait(), go_on) };
                if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    break;
                }
                started += 1;
            }
            let barrier = barrier.get_or_init(|| Barrier::new(started));
            // SAFETY: the caller's promise.
            unsafe { plan.work(first, barrier, go_on) };
        });
        if plan.stopped.into_inner() { Err(Stopped) } else { Ok(()) }
    }
}

/// The division of rows and columns into tiles.
#[derive(Debug)]
struct Tiles {
    rows: Range<usize>,
    columns: usize,
    height: usize,
    width: usize,
}

impl Tiles {
    fn new<E: Element>(rows: Range<usize>, columns: usize, depth: usize) -> Tiles {
        let between = depth.saturating_sub(1).max(1);
        let width = CACHE_BYTES / (4 * between * E::BYTES);
        let width = width.saturating_sub(2 * STEP).clamp(16 * STEP, columns.max(16 * STEP));
        // The fewest tiles of equal width.
        let count = columns.div_ceil(width).max(1);
        let width = columns.div_ceil(count).next_multiple_of(STEP);
        let bands = rows.len().div_ceil(TILE_ROWS).max(1);
        let height = rows.len().div_ceil(bands).next_multiple_of(2);
        Tiles { rows, columns, height, width }
    }

    fn across(&self) -> usize {
        self.columns.div_ceil(self.width)
    }

    fn count(&self) -> usize {
        self.across() * self.rows.len().div_ceil(self.height)
    }

    /// Rows and columns of tile `index`.
    fn get(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let (band, column) = (index / self.across(), index % self.across());
        let top = self.rows.start + band * self.height;
        let left = column * self.width;
        (top..(top + self.height).min(self.rows.end), left..(left + self.width).min(self.columns))
    }
}

/// The state of a run that its threads share.
struct SharedRun<E> {
    source: Plane<E>,
    destination: Plane<E>,
    loops: rows::RowLoops<E>,
    tiles: Tiles,
    sweeps: usize,
    passes: usize,
    non_temporal: bool,
    /// The next tile of each pass.
    next: Vec<AtomicUsize>,
    stopped: AtomicBool,
}

// SAFETY: the caller of `Jacobi::run` permits all threads to use the planes. Tiles of one pass write disjoint
// ranges, and a barrier separates passes.
unsafe impl<E: Element> Sync for SharedRun<E> {}

impl<E: Element> SharedRun<E> {
    /// Computes tiles until none are left.
    ///
    /// # Safety
    /// As for [`Jacobi::run`].
    unsafe fn work(
        &self,
        scratch: &mut ScratchMemory<E>,
        barrier: &Barrier,
        go_on: &(dyn Fn() -> bool + Sync),
    ) {
        for (number, next) in self.next.iter().enumerate() {
            // As even as possible: later passes make one sweep less.
            let sweeps = (self.sweeps + self.passes - 1 - number) / self.passes;
            let (source, destination) = match number % 2 {
                0 => (self.source, self.destination),
                _ => (self.destination, self.source),
            };
            let pass = Pass { source, destination, loops: self.loops };
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= self.tiles.count() || self.stopped.load(Ordering::Relaxed) {
                    break;
                }
                let (rows, columns) = self.tiles.get(index);
                let tile = Tile { rows, columns, sweeps, non_temporal: self.non_temporal };
                // SAFETY: the caller's promise.
                if unsafe { pass.tile(&tile, scratch, go_on) }.is_err() {
                    self.stopped.store(true, Ordering::Relaxed);
                }
            }
            barrier.wait();
        }
    }
}

/// The cells after `sweeps` sweeps, computed sweep by sweep and point by point.
///
/// # Panics
/// If there are not `rows * columns` cells.
#[must_use]
pub fn reference<E: Element>(cells: &[E], rows: usize, columns: usize, sweeps: usize) -> Vec<E> {
    assert_eq!(cells.len(), rows * columns);
    let (mut now, mut next) = (cells.to_vec(), cells.to_vec());
    for _ in 0..sweeps {
        for row in 1..rows.saturating_sub(1) {
            for at in row * columns + 1..((row + 1) * columns).saturating_sub(1) {
                next[at] = E::average(now[at - columns], now[at + columns], now[at - 1], now[at + 1]);
            }
        }
        std::mem::swap(&mut now, &mut next);
    }
    now
}

#[cfg(test)]
mod tests;
