//! One tile through several sweeps, row by row, without leaving the cache.
//!
//! Level `t` is the grid after `t` sweeps. A point of level `t` needs its neighbours of level `t - 1`, so a
//! tile of level `T` needs `T` more rows and columns of level 0 on each side. They are computed again by the
//! neighbouring tile; in return tiles need nothing of each other, in any order, on any thread.
//!
//! Inside a tile all levels walk down together, two rows at a step. At step `p` level `t` computes rows
//! `2p - t` and `2p - t + 1`, from rows `2p - t - 1` to `2p - t + 2` of level `t - 1`: the two that this step
//! has just made and the two of the step before. Four rows of each level are all that is kept:
//!
//! ```text
//!      level 0 (source)   1            2            3 (destination)
//!      row 2p-4                                     . . . . .
//!      row 2p-3                        * * * * *    = = = = =   ◄ rows 2p-3 and 2p-2 of level 3
//!      row 2p-2           * * * * *    = = = = =    = = = = =
//!      row 2p-1           = = = = =    = = = = =   ◄
//!      row 2p             = = = = =   ◄
//! ```
//!
//! The outermost rows and columns of the grid never change: at every level they are copied from the source.

use std::ops::Range;

use crate::element::Element;
use crate::rows::{Pair, Rows, STEP, fence, single};
use crate::scratch::Scratch;
use crate::{Plane, Stopped};

/// Rows that a level keeps.
const KEPT: usize = 4;

/// What a tile computes.
#[derive(Clone, Debug)]
pub(crate) struct Tile {
    /// Rows of the result.
    pub(crate) rows: Range<usize>,
    /// Columns of the result. They begin at a multiple of [`STEP`], and end at one or at the end.
    pub(crate) columns: Range<usize>,
    /// Sweeps; none copies.
    pub(crate) sweeps: usize,
    /// Whether the result's stores may pass the caches by.
    pub(crate) stream: bool,
}

/// The part of a level that a tile needs, and where it lies.
#[derive(Clone, Debug)]
struct Level<E> {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Column 0 of row 0, if it were there: rows and columns that are not needed may not be looked at, except
    /// for up to [`STEP`] columns on either side, where the kernels may read what then does not count.
    base: *mut E,
    /// Elements from one row to the next.
    pitch: usize,
    /// Which bits of a row's number say where it is kept.
    mask: usize,
}

impl<E> Level<E> {
    fn row(&self, row: usize) -> *mut E {
        self.base.wrapping_add((row & self.mask) * self.pitch)
    }
}

/// `range` and `more` on both sides, to whole vectors, as far as there are any.
fn widened(range: &Range<usize>, more: usize, end: usize) -> Range<usize> {
    let first = range.start.saturating_sub(more) / STEP * STEP;
    first..(range.end + more).next_multiple_of(STEP).min(end)
}

/// A grid, two levels of it in memory: the tiles of one pass read one and write the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass<E> {
    pub(crate) source: Plane<E>,
    pub(crate) destination: Plane<E>,
    pub(crate) loops: Rows<E>,
}

impl<E: Element> Pass<E> {
    /// Computes one tile. `go_on` is asked after every step.
    ///
    /// # Safety
    /// Both planes are memory that this call may read and write as it says, of the same size, apart from each
    /// other; nobody else writes the tile of the destination or the part of the source that the tile needs.
    pub(crate) unsafe fn tile(
        &self,
        tile: &Tile,
        scratch: &mut Scratch<E>,
        go_on: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), Stopped> {
        if tile.sweeps == 0 {
            for row in tile.rows.clone() {
                let (from, to) = (self.source.row(row), self.destination.row(row));
                let start = tile.columns.start;
                // SAFETY: a row of the tile, in both planes.
                unsafe {
                    from.wrapping_add(start)
                        .copy_to_nonoverlapping(to.wrapping_add(start), tile.columns.len());
                }
            }
            return Ok(());
        }
        let levels = self.levels(tile, scratch);
        let last = tile.rows.end - 1;
        // Level 1 begins with row `start - T + 1`; level T has its last row when `2p - T + 1 >= last`.
        let first_step = (tile.rows.start + 1).saturating_sub(tile.sweeps).div_ceil(2);
        let last_step = (last + tile.sweeps - 1).div_ceil(2);
        for step in first_step..=last_step {
            for (t, pair) in (1..).zip(levels.windows(2)) {
                let [from, to] = pair else { unreachable!("windows of two") };
                let loops = if tile.stream && t == tile.sweeps { self.loops.stream } else { self.loops.pair };
                if let Some(second) = (2 * step + 1).checked_sub(t) {
                    // SAFETY: the caller's; each row that a level needs finds its neighbours one level before,
                    // made in this step or in the one before.
                    unsafe { self.two_rows(from, to, second, loops) };
                }
            }
            if !go_on() {
                return Err(Stopped);
            }
        }
        fence();
        Ok(())
    }

    /// The source, the levels between in `scratch`, and the destination.
    fn levels(&self, tile: &Tile, scratch: &mut Scratch<E>) -> Vec<Level<E>> {
        let whole = |plane: Plane<E>| Level {
            rows: tile.rows.clone(),
            columns: tile.columns.clone(),
            base: plane.base,
            pitch: plane.pitch,
            mask: usize::MAX,
        };
        let sweeps = tile.sweeps;
        let (rows, columns) = (self.source.rows, self.source.columns);
        let widest = widened(&tile.columns, sweeps, columns);
        let pitch = (widest.len() + 2 * STEP).next_multiple_of(STEP);
        let mut at = scratch.room((sweeps - 1) * KEPT * pitch);
        let mut levels = vec![whole(self.source)];
        for t in 1..sweeps {
            let more = sweeps - t;
            levels.push(Level {
                rows: tile.rows.start.saturating_sub(more)..(tile.rows.end + more).min(rows),
                columns: widened(&tile.columns, more, columns),
                base: at.wrapping_add(STEP).wrapping_sub(widest.start),
                pitch,
                mask: KEPT - 1,
            });
            at = at.wrapping_add(KEPT * pitch);
        }
        levels.push(whole(self.destination));
        levels
    }

    /// Rows `second - 1` and `second` of level `to`, as far as they are needed.
    ///
    /// # Safety
    /// The rows around them are in level `from`.
    unsafe fn two_rows(&self, from: &Level<E>, to: &Level<E>, second: usize, loops: Pair<E>) {
        let (rows, columns) = (self.source.rows, self.source.columns);
        let changes = |row: usize| to.rows.contains(&row) && row != 0 && row != rows - 1;
        let (left, right) = (to.columns.start.max(1), to.columns.end.min(columns - 1));
        let first = second.saturating_sub(1);
        let input = |row: usize| from.row(row).cast_const();
        // SAFETY: what is read is in level `from`, what is written in level `to`; the edges of the grid are in
        // the source.
        unsafe {
            if left < right && changes(first) && changes(second) && first != second {
                let around = [first - 1, first, second, second + 1].map(input);
                loops(around, [to.row(first), to.row(second)], left, right);
                self.edges(to, first);
                self.edges(to, second);
                return;
            }
            for row in first..=second {
                if left < right && changes(row) {
                    single([row - 1, row, row + 1].map(input), to.row(row), left, right);
                    self.edges(to, row);
                } else if to.rows.contains(&row) {
                    let (source, start) = (self.source.row(row), to.columns.start);
                    let target = to.row(row).wrapping_add(start);
                    source.wrapping_add(start).copy_to_nonoverlapping(target, to.columns.len());
                }
            }
        }
    }

    /// The first and the last column of the grid, where the tile reaches them.
    ///
    /// # Safety
    /// The row is needed in level `to`.
    unsafe fn edges(&self, to: &Level<E>, row: usize) {
        for column in [0, self.source.columns - 1] {
            if to.columns.contains(&column) {
                // SAFETY: the column is in the source and in the level.
                unsafe { *to.row(row).wrapping_add(column) = *self.source.row(row).wrapping_add(column) };
            }
        }
    }
}
