//! The division of a grid into tiles, and of a job into blocks of sweeps.
//!
//! ```text
//!     grid          card 0             card 1
//!     ┌────────┐    ┌────────┐
//!     │        │    │ owned  │
//!     │        │    │        │    ┌ ─ ─ ─ ─┐  halo of card 1: the last rows of card 0
//!     ├ ─ ─ ─ ─┤    ├────────┤    ├────────┤
//!     │        │    └ ─ ─ ─ ─┘    │ owned  │  halo of card 0: the first rows of card 1
//!     │        │                  │        │
//!     └────────┘                  └────────┘
//! ```
//!
//! With a halo of `depth` rows a card makes `depth` sweeps of its owned rows without an exchange. It also
//! computes some rows of its neighbours, which are few compared with its own. In return, messages are fewer
//! and larger, and the kernel can block in time.

use std::ops::Range;

use millstream_stencil::MAX_DEPTH;

use crate::grid::Shape;

/// Rows of a band, which is computed while other bands are written or read.
const BAND_ROWS: u64 = 1024;

/// Rows of the first bands of a tile, and of the last ones.
const END_BANDS: [u64; 2] = [128, 384];

/// Alignment of planes in card memory (bytes).
const ALIGNMENT: u64 = 4096;

/// The grid cannot be divided among the cards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// There are no cards.
    #[error("there are no cards")]
    NoCards,
    /// There are too few rows for the cards.
    #[error("a grid of {rows} rows cannot be divided into tiles of at least {depth} rows for {cards} cards")]
    TooManyCards {
        /// Rows of the grid.
        rows: u64,
        /// Number of cards.
        cards: usize,
        /// Sweeps between two halo exchanges.
        depth: u64,
    },
    /// There are too many sweeps.
    #[error("{iterations} sweeps in blocks of {depth} are more than this host's memory can list")]
    TooManySweeps {
        /// Number of sweeps.
        iterations: u64,
        /// Sweeps between two halo exchanges.
        depth: u64,
    },
    /// The depth is out of range.
    #[error("depth {0} is not from 1 to {MAX_DEPTH}")]
    Depth(u64),
    /// A tile exceeds its card's memory.
    #[error(
        "card {card} has {has} bytes of memory, but its tile of {rows} rows needs {needs}; use more cards"
    )]
    CardTooSmall {
        /// Index of the card.
        card: usize,
        /// Its memory (bytes).
        has: u64,
        /// Rows of its tile with halos.
        rows: u64,
        /// Memory that two planes of the tile take (bytes).
        needs: u64,
    },
}

/// The rows of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The rows that the card computes.
    pub owned: Range<u64>,
    /// The rows that the card stores: owned rows and halos.
    pub with_halo: Range<u64>,
}

impl Tile {
    /// A range of grid rows as rows of the tile.
    #[must_use]
    pub fn local(&self, rows: &Range<u64>) -> Range<u64> {
        rows.start - self.with_halo.start..rows.end - self.with_halo.start
    }
}

/// The tiles and blocks of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The grid.
    pub shape: Shape,
    /// The tiles, one a card.
    pub tiles: Vec<Tile>,
    /// Sweeps of each block; halos are exchanged between blocks.
    pub blocks: Vec<u64>,
}

impl Plan {
    /// Divides a grid among cards with `memories` bytes each, for `iterations` sweeps. Without a `depth`, it is the largest
    /// that leaves each tile eight times as many rows.
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
        let mut blocks = Vec::<u64>::new();
        if blocks.try_reserve_exact(usize::try_from(count).unwrap_or(usize::MAX)).is_err() {
            return Err(PlanError::TooManySweeps { iterations, depth: chosen });
        }
        // As even as possible: later blocks make one sweep less.
        blocks.extend((0..count).map(|index| (iterations + count - 1 - index) / count));
        let halo = blocks.first().copied().unwrap_or(0);
        if fewest == 0 || cards > 1 && fewest < halo {
            return Err(PlanError::TooManyCards { rows: shape.rows, cards, depth: halo.max(1) });
        }
        let cut = |index: u64| shape.rows * index / n;
        let mut tiles = Vec::new();
        for index in 0..n {
            let owned = cut(index)..cut(index + 1);
            let with_halo = if cards == 1 {
                owned.clone()
            } else {
                owned.start.saturating_sub(halo)..(owned.end + halo).min(shape.rows)
            };
            tiles.push(Tile { owned, with_halo });
        }
        let plan = Plan { shape, tiles, blocks };
        for (card, (tile, &has)) in plan.tiles.iter().zip(memories).enumerate() {
            let needs = plan.tile_bytes(tile);
            if needs > has {
                let rows = tile.with_halo.end - tile.with_halo.start;
                return Err(PlanError::CardTooSmall { card, has, rows, needs });
            }
        }
        Ok(plan)
    }

    /// Number of sweeps of all blocks.
    #[must_use]
    pub fn iterations(&self) -> u64 {
        self.blocks.iter().sum()
    }

    /// The blocks before which a checkpoint is made, at least `every` sweeps apart. The first block needs
    /// none, and the result of the last one is read in any case.
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
        (tile.with_halo.end - tile.with_halo.start) * self.shape.row_bytes()
    }

    /// Card memory of a tile: two planes of its rows with halos (bytes).
    #[must_use]
    pub fn tile_bytes(&self, tile: &Tile) -> u64 {
        self.plane_offset(tile, 1) + self.plane_bytes(tile)
    }

    /// Offset of a plane, 0 or 1, in card memory (bytes).
    #[must_use]
    pub fn plane_offset(&self, tile: &Tile, plane: u64) -> u64 {
        plane * self.plane_bytes(tile).next_multiple_of(ALIGNMENT)
    }

    /// Offset of a grid row in a card's plane (bytes).
    #[must_use]
    pub fn row_offset(&self, tile: &Tile, plane: u64, row: u64) -> u64 {
        self.plane_offset(tile, plane) + (row - tile.with_halo.start) * self.shape.row_bytes()
    }

    /// The owned rows of a tile in bands, for overlapping transfers with computation. The first and the last
    /// bands are small, because no computation overlaps with writing the first one or reading the last one.
    #[must_use]
    pub fn bands(&self, tile: &Tile) -> Vec<Range<u64>> {
        let (mut from, mut to) = (tile.owned.start, tile.owned.end);
        let (mut bands, mut last) = (Vec::new(), Vec::new());
        for rows in END_BANDS {
            // Only if enough rows remain for larger bands.
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

    /// The owned rows of card `card` that its neighbours need for their `next` sweeps.
    #[must_use]
    pub fn boundary(&self, card: usize, next: u64) -> Boundary {
        let owned = &self.tiles[card].owned;
        let upper = (card > 0).then(|| owned.start..owned.start + next);
        let lower = (card + 1 < self.tiles.len()).then(|| owned.end - next..owned.end);
        Boundary { upper, lower }
    }
}

/// Rows at the boundaries of a tile; they overlap if the tile is thin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Rows for the previous card.
    pub upper: Option<Range<u64>>,
    /// Rows for the next card.
    pub lower: Option<Range<u64>>,
}

impl Boundary {
    /// The boundary rows of `owned`, each once, and the interior rows.
    #[must_use]
    pub fn split(&self, owned: &Range<u64>) -> ([Range<u64>; 2], Range<u64>) {
        let upper = self.upper.clone().unwrap_or(owned.start..owned.start);
        let lower = self.lower.clone().unwrap_or(owned.end..owned.end);
        let lower = lower.start.max(upper.end)..lower.end;
        let interior = upper.end..lower.start;
        ([upper, lower], interior)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn impossible_divisions_are_reported() {
        let shape = Shape { rows: 100, columns: 10, double: false };
        assert_eq!(Plan::new(shape, 1, &[], None), Err(PlanError::NoCards));
        assert_eq!(Plan::new(shape, 1, &[1 << 20], Some(17)), Err(PlanError::Depth(17)));
        let long = Plan::new(shape, u64::MAX, &[1 << 20], Some(8)).unwrap_err();
        assert_eq!(long, PlanError::TooManySweeps { iterations: u64::MAX, depth: 8 });
        let many = Plan::new(shape, 9, &[1 << 20; 20], Some(9)).unwrap_err();
        assert_eq!(many, PlanError::TooManyCards { rows: 100, cards: 20, depth: 9 });
        let small = Plan::new(shape, 9, &[1 << 20, 4000], None).unwrap_err();
        assert!(matches!(small, PlanError::CardTooSmall { card: 1, has: 4000, rows: 55, .. }), "{small:?}");
        assert!(small.to_string().contains("use more cards"));
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
                prop_assert_eq!(tile.owned.start, next);
                next = tile.owned.end;
                let mut at = tile.owned.start;
                for band in plan.bands(tile) {
                    prop_assert!(band.start == at && !band.is_empty());
                    at = band.end;
                }
                prop_assert_eq!(at, tile.owned.end);
                for &sweeps in &plan.blocks {
                    prop_assert!(tile.with_halo.start <= tile.owned.start.saturating_sub(sweeps));
                    prop_assert!(tile.with_halo.end >= (tile.owned.end + sweeps).min(rows));
                    let ([upper, lower], between) = plan.boundary(card, sweeps).split(&tile.owned);
                    prop_assert!(upper.start == tile.owned.start && upper.end == between.start);
                    prop_assert!(between.end == lower.start && lower.end == tile.owned.end);
                }
            }
            prop_assert_eq!(next, rows);
        }
    }
}
