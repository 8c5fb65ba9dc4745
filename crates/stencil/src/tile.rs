//! Several sweeps over one tile within the cache, row by row.
//!
//! Level `t` is the grid after `t` sweeps. A point of level `t` needs its neighbours of level `t - 1`. A tile
//! of level `T` therefore needs `T` more rows and columns of level 0 on each side. Neighbouring tiles compute
//! these points too. In return tiles are independent: any thread computes any tile in any order.
//!
//! Within a tile all levels advance together, two rows a step. In step `p` level `t` computes rows `2p - t`
//! and `2p - t + 1`. Its input is rows `2p - t - 1` to `2p - t + 2` of level `t - 1`: two rows of this step
//! and two of the previous one. Each level therefore keeps four rows:
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
//! The outermost rows and columns of the grid never change: each level copies them from the source.

use std::ops::Range;

use crate::element::Element;
use crate::rows::{RowLoops, RowPairFn, STEP, fence, single};
use crate::scratch::ScratchMemory;
use crate::{Plane, Stopped};

/// Rows that a level keeps.
const KEPT: usize = 4;

/// A tile to compute.
#[derive(Clone, Debug)]
pub(crate) struct Tile {
    /// Rows of the result.
    pub(crate) rows: Range<usize>,
    /// Columns of the result: from a multiple of [`STEP`] to a multiple of it or to the last column.
    pub(crate) columns: Range<usize>,
    /// Number of sweeps; zero copies.
    pub(crate) sweeps: usize,
    /// Whether the result is written with non-temporal stores.
    pub(crate) non_temporal: bool,
}

/// The part of a level that a tile needs, and its memory.
#[derive(Clone, Debug)]
struct Level<E> {
    rows: Range<usize>,
    columns: Range<usize>,
    /// Address that column 0 of row 0 would have. Only the needed rows and columns are valid. The loops may
    /// also read up to [`STEP`] columns on either side, whose values they do not use.
    base: *mut E,
    /// Elements from one row to the next.
    pitch: usize,
    /// Mask of a row number that selects the row's buffer.
    mask: usize,
}

impl<E> Level<E> {
    fn row(&self, row: usize) -> *mut E {
        self.base.wrapping_add((row & self.mask) * self.pitch)
    }
}

/// `range` extended by `more` on both sides and to whole vectors, within the grid.
fn widened(range: &Range<usize>, more: usize, end: usize) -> Range<usize> {
    let first = range.start.saturating_sub(more) / STEP * STEP;
    first..(range.end + more).next_multiple_of(STEP).min(end)
}

/// One pass over the grid: its tiles read the source plane and write the destination plane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass<E> {
    pub(crate) source: Plane<E>,
    pub(crate) destination: Plane<E>,
    pub(crate) loops: RowLoops<E>,
}

impl<E: Element> Pass<E> {
    /// Computes one tile. Calls `go_on` after each step.
    ///
    /// # Safety
    /// The planes have the same size and do not overlap; the source is readable, the destination writable. No
    /// other thread writes the tile of the destination or the part of the source that the tile needs.
    pub(crate) unsafe fn tile(
        &self,
        tile: &Tile,
        scratch: &mut ScratchMemory<E>,
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
                let loops = if tile.non_temporal && t == tile.sweeps {
                    self.loops.non_temporal
                } else {
                    self.loops.pair
                };
                if let Some(second) = (2 * step + 1).checked_sub(t) {
                    // SAFETY: the caller's promise. The rows that a level needs of the previous level were
                    // computed in this step or in the previous one.
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

    /// The source, the intermediate levels in `scratch`, and the destination.
    fn levels(&self, tile: &Tile, scratch: &mut ScratchMemory<E>) -> Vec<Level<E>> {
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
        let mut at = scratch.reserve((sweeps - 1) * KEPT * pitch);
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

    /// Computes rows `second - 1` and `second` of level `to`, as far as they are needed.
    ///
    /// # Safety
    /// The rows around them are in level `from`.
    unsafe fn two_rows(&self, from: &Level<E>, to: &Level<E>, second: usize, loops: RowPairFn<E>) {
        let (rows, columns) = (self.source.rows, self.source.columns);
        let changes = |row: usize| to.rows.contains(&row) && row != 0 && row != rows - 1;
        let (left, right) = (to.columns.start.max(1), to.columns.end.min(columns - 1));
        let first = second.saturating_sub(1);
        let input = |row: usize| from.row(row).cast_const();
        // SAFETY: reads are in level `from`, writes in level `to`; the edges of the grid are in the source.
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

    /// Copies the first and the last column of the grid, if they are in the tile.
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
