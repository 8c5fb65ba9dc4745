//! Five-point Jacobi sweeps: each point of a grid becomes the mean of its four neighbours, again and again.
//!
//! A sweep by itself does four additions and multiplications for eight bytes that come from and go to memory,
//! so memory decides. Here a tile that fits into a core's cache goes through up to [`MAX_DEPTH`] sweeps before
//! it is written back (temporal blocking; `tile` says how), in vectors as wide as the processor has (`rows`).
//! The result does not depend on the processor, on the tiles or on the number of threads: it is that of
//! [`reference`], bit for bit, and that of numpy's
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
//! // SAFETY: two grids of ours, apart from each other, that nobody else has.
//! unsafe { Jacobi::new(2).run(planes[0], planes[1], 7, &|| true).unwrap() };
//! assert_eq!(destination, expected);
//! ```

mod element;
mod rows;
mod scratch;
mod tile;

use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

pub use element::Element;

use crate::rows::STEP;
use crate::scratch::Scratch;
use crate::tile::{Pass, Tile};

/// Most sweeps that a tile makes before it is written back.
pub const MAX_DEPTH: usize = 16;

/// Bytes of a core's cache that the rows between the levels may take.
const CACHE_BYTES: usize = 384 << 10;

/// Rows of a tile: the fewer, the more is computed twice; the more, the less evenly threads share them.
const TILE_ROWS: usize = 1024;

/// Grids from this size on [bytes] are written past the caches: they would not stay there.
const STREAM_BYTES: usize = 16 << 20;

/// The vector units that there are loops for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// None that we know.
    Portable,
    /// 256-bit vectors of x86-64.
    Avx2,
    /// 512-bit vectors of x86-64.
    Avx512,
}

impl Unit {
    /// All of them, the widest first.
    pub const ALL: [Unit; 3] = [Unit::Avx512, Unit::Avx2, Unit::Portable];

    /// Whether this processor has it.
    #[must_use]
    pub fn is_here(self) -> bool {
        match self {
            Unit::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The widest that this processor has.
    #[must_use]
    pub fn widest() -> Unit {
        Unit::ALL.into_iter().find(|unit| unit.is_here()).unwrap_or(Unit::Portable)
    }
}

/// Where a grid lies in memory, row by row.
#[derive(Debug)]
pub struct Plane<E> {
    /// First element of the first row.
    pub base: *mut E,
    /// Elements from one row to the next.
    pub pitch: usize,
    /// Rows.
    pub rows: usize,
    /// Columns, not more than `pitch`.
    pub columns: usize,
}

impl<E> Clone for Plane<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Plane<E> {}

impl<E: Element> Plane<E> {
    /// The plane of cells that follow each other without gaps.
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

/// The computation was told to stop; the destination is partly written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped before the end")]
pub struct Stopped;

/// What computes: a vector unit, a number of threads, and the memory that they keep between runs.
#[derive(Debug)]
pub struct Jacobi<E> {
    unit: Unit,
    depth: usize,
    scratch: Vec<Scratch<E>>,
}

impl<E: Element> Jacobi<E> {
    /// With `threads` threads, at least one, on the widest vector unit.
    #[must_use]
    pub fn new(threads: usize) -> Jacobi<E> {
        Jacobi::with(threads, Unit::widest(), MAX_DEPTH)
    }

    /// With a vector unit (if this processor does not have it: a portable loop) and so many sweeps at most
    /// from one writing back to the next, 1 to [`MAX_DEPTH`].
    #[must_use]
    pub fn with(threads: usize, unit: Unit, depth: usize) -> Jacobi<E> {
        let scratch = (0..threads.max(1)).map(|_| Scratch::default()).collect();
        Jacobi { unit, depth: depth.clamp(1, MAX_DEPTH), scratch }
    }

    /// `sweeps` sweeps over the whole grid in `source`; the result is in `destination`. Both are used on the
    /// way: the source does not keep its values, unless the sweeps are at most the depth.
    ///
    /// `go_on` is asked every few microseconds on every thread.
    ///
    /// # Errors
    /// [`Stopped`] if `go_on` said no.
    ///
    /// # Panics
    /// If the planes are not of one size, or have rows longer than their pitch.
    ///
    /// # Safety
    /// The planes are memory that may be read and written, apart from each other. Nobody else writes the one
    /// or touches the other meanwhile; if somebody does (memory that other processes map), the result is
    /// undefined, the behaviour is not, as far as the elements are plain memory.
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
        // SAFETY: the caller's.
        unsafe { self.passes(source, destination, whole, sweeps, passes, go_on) }
    }

    /// The rows `rows` of the grid after `sweeps` sweeps, at most the depth, from the `source`, which keeps
    /// its values, to `destination`, where no other row is touched.
    ///
    /// # Errors
    /// [`Stopped`] if `go_on` said no.
    ///
    /// # Panics
    /// If the planes are not of one size or have rows longer than their pitch, if the rows are not rows of
    /// theirs, and if there are more sweeps than the depth.
    ///
    /// # Safety
    /// As for [`run`](Self::run); others may write other rows of the destination, and rows of the source that
    /// are more than `sweeps` away.
    pub unsafe fn run_rows(
        &mut self,
        source: Plane<E>,
        destination: Plane<E>,
        rows: Range<usize>,
        sweeps: usize,
        go_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), Stopped> {
        assert!(sweeps <= self.depth && rows.end <= source.rows);
        // SAFETY: the caller's.
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
        let plan = Plan {
            source,
            destination,
            loops: E::rows(self.unit),
            tiles: Tiles::new::<E>(rows, source.columns, sweeps.div_ceil(passes)),
            sweeps,
            passes,
            stream: source.rows * source.columns * E::BYTES >= STREAM_BYTES,
            next: (0..passes).map(|_| AtomicUsize::new(0)).collect(),
            stopped: AtomicBool::new(false),
        };
        // A thread takes longer to start than a small tile to compute.
        let threads = self.scratch.len().min(plan.tiles.count());
        let barrier = Barrier::new(threads);
        let (first, others) = self.scratch.split_first_mut().expect("there is at least one thread");
        std::thread::scope(|scope| {
            for scratch in &mut others[..threads - 1] {
                let (plan, barrier) = (&plan, &barrier);
                // SAFETY: the caller's.
                scope.spawn(move || unsafe { plan.work(scratch, barrier, go_on) });
            }
            // SAFETY: the caller's.
            unsafe { plan.work(first, &barrier, go_on) };
        });
        if plan.stopped.into_inner() { Err(Stopped) } else { Ok(()) }
    }
}

/// How a region is cut into tiles.
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
        // As many as are needed, of one width.
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

/// One run, as its threads share it.
struct Plan<E> {
    source: Plane<E>,
    destination: Plane<E>,
    loops: rows::Rows<E>,
    tiles: Tiles,
    sweeps: usize,
    passes: usize,
    stream: bool,
    /// The next tile of each pass.
    next: Vec<AtomicUsize>,
    stopped: AtomicBool,
}

// SAFETY: the pointers are to memory that every thread may use as `Jacobi::run` says; tiles of one pass write
// different places, and passes are kept apart by a barrier.
unsafe impl<E: Element> Sync for Plan<E> {}

impl<E: Element> Plan<E> {
    /// Takes tiles until there are no more.
    ///
    /// # Safety
    /// As for [`Jacobi::run`].
    unsafe fn work(&self, scratch: &mut Scratch<E>, barrier: &Barrier, go_on: &(dyn Fn() -> bool + Sync)) {
        for (number, next) in self.next.iter().enumerate() {
            // As even as can be: the later passes make one sweep less.
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
                let tile = Tile { rows, columns, sweeps, stream: self.stream };
                // SAFETY: the caller's.
                if unsafe { pass.tile(&tile, scratch, go_on) }.is_err() {
                    self.stopped.store(true, Ordering::Relaxed);
                }
            }
            barrier.wait();
        }
    }
}

/// The same, one sweep after the other and point by point.
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
