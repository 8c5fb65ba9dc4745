//! Which rows are whose, and how many sweeps are made between two exchanges.
//!
//! ```text
//!     grid          card 0            card 1            card 2
//!     ┌────────┐    ┌ held ─┐
//!     │        │    │ own   │
//!     │        │    │       │
//!     │        │    │       │ ─ ─ ─  ┌ held ─┐  ▲ halo of card 1: its neighbour's last rows
//!     ├ ─ ─ ─ ─┤    ├───────┤        ├ own ──┤  ▼
//!     │        │    └ held ─┘ ─ ─ ─  │       │  ▲ halo of card 0: its neighbour's first rows
//!     │        │                     │       │
//!     ├ ─ ─ ─ ─┤                     ├───────┤        ┌───────┐
//! ```
//!
//! With a halo of `depth` rows a card makes `depth` sweeps of its own rows without asking anybody. It computes
//! some rows of its neighbours on the way; that is little beside a tile, and in return messages are fewer and
//! larger and the kernel's temporal blocking has something to block.

use std::ops::Range;

use millstream_stencil::MAX_DEPTH;

use crate::grid::Shape;

/// Rows of a band: what is computed while the next rows are still being written, or the last ones read.
const BAND_ROWS: u64 = 1024;

/// Rows of the first bands of a tile, and of the last ones.
const EDGE_BANDS: [u64; 2] = [128, 384];

/// Planes start at such offsets in card memory.
const ALIGNMENT: u64 = 4096;

/// The grid and the cards do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// There is nothing to compute on.
    #[error("no cards were given")]
    NoCards,
    /// More cards than rows.
    #[error("a grid of {rows} rows cannot be cut into tiles for {cards} cards of at least {depth} rows each")]
    TooManyCards {
        /// Rows of the grid.
        rows: u64,
        /// Cards.
        cards: usize,
        /// Sweeps between two exchanges.
        depth: u64,
    },
    /// A depth that the kernel does not make at once.
    #[error("depth {0} is not from 1 to {MAX_DEPTH}")]
    Depth(u64),
    /// The tile does not fit.
    #[error(
        "card {card} has {has} bytes of memory, and its tile of {rows} rows takes {needs}; give more cards"
    )]
    CardTooSmall {
        /// Which, from 0.
        card: usize,
        /// Its memory.
        has: u64,
        /// Rows of its tile, with halos.
        rows: u64,
        /// What two grids of them take.
        needs: u64,
    },
}

/// The rows of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows of the grid that the card computes.
    pub own: Range<u64>,
    /// With the halos: rows that it holds.
    pub held: Range<u64>,
}

impl Tile {
    /// A range of rows of the grid in the card's own count.
    #[must_use]
    pub fn local(&self, rows: &Range<u64>) -> Range<u64> {
        rows.start - self.held.start..rows.end - self.held.start
    }
}

/// How a job is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The grid.
    pub shape: Shape,
    /// One for each card.
    pub tiles: Vec<Tile>,
    /// Sweeps of each block; rows at the edges are exchanged between two blocks.
    pub blocks: Vec<u64>,
}

impl Plan {
    /// Cuts a grid for cards with `memories` bytes each, for `iterations` sweeps. Without a `depth`, the deepest
    /// that leaves tiles at least eight times as many rows as they share.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn new(
        shape: Shape,
        iterations: u64,
        memories: &[u64],
        depth: Option<u64>,
    ) -> Result<Plan, PlanError> {
        let cards = memories.len();
        let n = cards as u64;
        if cards == 0 {
            return Err(PlanError::NoCards);
        }
        let fewest = shape.rows / n;
        let most = MAX_DEPTH as u64;
        let chosen = match depth {
            Some(depth) if depth == 0 || depth > most => return Err(PlanError::Depth(depth)),
            Some(depth) => depth,
            None if cards == 1 => most,
            None => (fewest / 8).clamp(1, most),
        };
        let count = iterations.div_ceil(chosen);
        // As even as can be: the later blocks make one sweep less.
        let blocks: Vec<u64> = (0..count).map(|index| (iterations + count - 1 - index) / count).collect();
        let halo = blocks.first().copied().unwrap_or(0);
        if fewest == 0 || cards > 1 && fewest < halo {
            return Err(PlanError::TooManyCards { rows: shape.rows, cards, depth: halo.max(1) });
        }
        let cut = |index: u64| shape.rows * index / n;
        let mut tiles = Vec::new();
        for index in 0..n {
            let own = cut(index)..cut(index + 1);
            let held = if cards == 1 {
                own.clone()
            } else {
                own.start.saturating_sub(halo)..(own.end + halo).min(shape.rows)
            };
            tiles.push(Tile { own, held });
        }
        let plan = Plan { shape, tiles, blocks };
        for (card, (tile, &has)) in plan.tiles.iter().zip(memories).enumerate() {
            let needs = plan.memory(tile);
            if needs > has {
                let rows = tile.held.end - tile.held.start;
                return Err(PlanError::CardTooSmall { card, has, rows, needs });
            }
        }
        Ok(plan)
    }

    /// All sweeps.
    #[must_use]
    pub fn iterations(&self) -> u64 {
        self.blocks.iter().sum()
    }

    /// The blocks before which a checkpoint is made: as few as there are at least `every` sweeps between two, none before
    /// the first block or the last one, whose result is read anyway.
    #[must_use]
    pub fn checkpoints(&self, every: u64) -> Vec<usize> {
        let (mut due, mut since) = (Vec::new(), 0);
        for (block, sweeps) in self.blocks.iter().enumerate() {
            if since >= every && block + 1 < self.blocks.len() {
                due.push(block);
                since = 0;
            }
            since += sweeps;
        }
        due
    }

    fn plane_bytes(&self, tile: &Tile) -> u64 {
        (tile.held.end - tile.held.start) * self.shape.row_bytes()
    }

    /// Card memory that a tile takes: two grids of the rows that it holds [bytes].
    #[must_use]
    pub fn memory(&self, tile: &Tile) -> u64 {
        self.plane(tile, 1) + self.plane_bytes(tile)
    }

    /// Offset of a plane, 0 or 1, in card memory.
    #[must_use]
    pub fn plane(&self, tile: &Tile, plane: u64) -> u64 {
        plane * self.plane_bytes(tile).next_multiple_of(ALIGNMENT)
    }

    /// Offset of a row of the grid in a card's plane.
    #[must_use]
    pub fn place(&self, tile: &Tile, plane: u64, row: u64) -> u64 {
        self.plane(tile, plane) + (row - tile.held.start) * self.shape.row_bytes()
    }

    /// A tile's own rows in bands, for what is computed while rows come or go. The first ones and the last ones are
    /// smaller: nothing is computed before the first one is written, nor while the last one is read.
    #[must_use]
    pub fn bands(&self, tile: &Tile) -> Vec<Range<u64>> {
        let (mut from, mut to) = (tile.own.start, tile.own.end);
        let (mut bands, mut last) = (Vec::new(), Vec::new());
        for rows in EDGE_BANDS {
            // Not where they would be all that there is.
            if to - from > 4 * rows {
                bands.push(from..from + rows);
                last.push(to - rows..to);
                (from, to) = (from + rows, to - rows);
            }
        }
        let count = (to - from).div_ceil(BAND_ROWS).max(1);
        let cut = |index: u64| from + (to - from) * index / count;
        bands.extend((0..count).map(|index| cut(index)..cut(index + 1)));
        bands.extend(last.into_iter().rev());
        bands
    }

    /// What a block leaves for the neighbours of card `card`: the own rows that they need for the `next` sweeps.
    #[must_use]
    pub fn edges(&self, card: usize, next: u64) -> Edges {
        let own = &self.tiles[card].own;
        let upper = (card > 0).then(|| own.start..own.start + next);
        let lower = (card + 1 < self.tiles.len()).then(|| own.end - next..own.end);
        Edges { upper, lower }
    }
}

/// Rows at the edges of a tile; they overlap if the tile is thin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edges {
    /// For the card above.
    pub upper: Option<Range<u64>>,
    /// For the card below.
    pub lower: Option<Range<u64>>,
}

impl Edges {
    /// The rows of `own` at the edges, each once, and those between.
    #[must_use]
    pub fn split(&self, own: &Range<u64>) -> ([Range<u64>; 2], Range<u64>) {
        let upper = self.upper.clone().unwrap_or(own.start..own.start);
        let lower = self.lower.clone().unwrap_or(own.end..own.end);
        let lower = lower.start.max(upper.end)..lower.end;
        let between = upper.end..lower.start;
        ([upper, lower], between)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_does_not_fit_is_said() {
        let shape = Shape { rows: 100, columns: 10, double: false };
        assert_eq!(Plan::new(shape, 1, &[], None), Err(PlanError::NoCards));
        assert_eq!(Plan::new(shape, 1, &[1 << 20], Some(17)), Err(PlanError::Depth(17)));
        let many = Plan::new(shape, 9, &[1 << 20; 20], Some(9)).unwrap_err();
        assert_eq!(many, PlanError::TooManyCards { rows: 100, cards: 20, depth: 9 });
        let small = Plan::new(shape, 9, &[1 << 20, 4000], None).unwrap_err();
        assert!(matches!(small, PlanError::CardTooSmall { card: 1, has: 4000, rows: 55, .. }), "{small:?}");
        assert!(small.to_string().contains("give more cards"));
    }

    proptest! {
        #[test]
        fn every_row_is_computed_once_and_halos_are_deep_enough(
            rows in 1u64..5000,
            iterations in 0u64..200,
            cards in 1usize..9,
            depth in prop_oneof![Just(None), (1u64..=16).prop_map(Some)],
        ) {
            let shape = Shape { rows, columns: 3, double: true };
            let Ok(plan) = Plan::new(shape, iterations, &vec![u64::MAX; cards], depth) else {
                prop_assert!(rows < 16 * cards as u64);
                return Ok(());
            };
            prop_assert_eq!(plan.iterations(), iterations);
            prop_assert!(plan.blocks.iter().all(|&sweeps| (1..=16).contains(&sweeps)));
            for every in [1, 20, 64] {
                let due = plan.checkpoints(every);
                prop_assert!(due.iter().all(|&block| block > 0 && block + 1 < plan.blocks.len()));
                let between = due.windows(2).map(|pair| plan.blocks[pair[0]..pair[1]].iter().sum::<u64>());
                prop_assert!(between.into_iter().all(|sweeps| (every..every + 16).contains(&sweeps)));
            }
            let mut next = 0;
            for (card, tile) in plan.tiles.iter().enumerate() {
                prop_assert_eq!(tile.own.start, next);
                next = tile.own.end;
                let mut at = tile.own.start;
                for band in plan.bands(tile) {
                    prop_assert!(band.start == at && !band.is_empty());
                    at = band.end;
                }
                prop_assert_eq!(at, tile.own.end);
                for &sweeps in &plan.blocks {
                    prop_assert!(tile.held.start <= tile.own.start.saturating_sub(sweeps));
                    prop_assert!(tile.held.end >= (tile.own.end + sweeps).min(rows));
                    let ([upper, lower], between) = plan.edges(card, sweeps).split(&tile.own);
                    prop_assert!(upper.start == tile.own.start && upper.end == between.start);
                    prop_assert!(between.end == lower.start && lower.end == tile.own.end);
                }
            }
            prop_assert_eq!(next, rows);
        }
    }
}
