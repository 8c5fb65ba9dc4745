//! The kernel `spin` of cards: its arguments, and the boxes whose spins it moves between a block and messages.
//!
//! | argument | |
//! |---|---|
//! | 0 | bits 0–7: operation; 8–15: 0: float32, 1: float64; 16–31: threads |
//! | 1 | seed |
//! | 2, 3, 4 | sites of the lattice on each axis |
//! | 5, 6, 7 | global coordinates of the block's first site |
//! | 8, 9, 10 | sites of the block on each axis |
//! | 11 | sweeps between two exchanges, which the halos are made for |
//! | 12 | offset of the block in card memory, a multiple of 64 |
//! | 13 | offset of a table of boxes, or a number of half-sweeps |
//! | 14 | boxes in the table |
//!
//! | operation | does |
//! |---|---|
//! | 0 `Fill` | sets couplings and initial spins |
//! | 1 `Pack` | copies the spins of the table's boxes from the block to messages |
//! | 2 `Unpack` | copies them from messages to the block |
//! | 3 `Sweep` | makes half-sweeps, even sites first |
//! | 4 `Measure` | writes the block's sums to the first twelve result words |

use millstream_fabric::KernelWords;

use crate::geometry::{Box3, Extent, Geometry};
use crate::lattice::Lattice;
use crate::measure::{SUMS_BYTES, Sums};

/// Name of the kernel.
pub const NAME: &str = "spin";
/// Bytes of a box in a table.
pub const BOX_BYTES: usize = 64;
/// Most boxes of a table.
pub const MAX_BOXES: u64 = 1024;
/// Most sweeps between two exchanges.
pub const MAX_DEPTH: u64 = 64;
/// Most threads of a run.
pub const MAX_THREADS: u64 = 1024;
/// Largest coordinate, so that sums of coordinates and halos stay in range.
const MAX_SITES: u64 = 1 << 40;

/// What a run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Sets couplings and initial spins.
    Fill,
    /// Copies spins of boxes to messages.
    Pack {
        /// Offset of the table in card memory (bytes).
        table: u64,
        /// Boxes in the table.
        boxes: u64,
    },
    /// Copies spins of boxes from messages.
    Unpack {
        /// Offset of the table in card memory (bytes).
        table: u64,
        /// Boxes in the table.
        boxes: u64,
    },
    /// Makes half-sweeps, even sites first.
    Sweep {
        /// Half-sweeps.
        half_sweeps: u64,
    },
    /// Measures the block.
    Measure,
}

/// Arguments of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinArguments {
    /// What the run does.
    pub operation: Operation,
    /// Spins are float64 instead of float32.
    pub double: bool,
    /// Threads.
    pub threads: u16,
    /// The lattice.
    pub lattice: Lattice,
    /// The block's part of it.
    pub extent: Extent,
    /// Sweeps that the halos suffice for.
    pub depth: u64,
    /// Offset of the block in card memory (bytes).
    pub block: u64,
}

impl SpinArguments {
    /// The layout of the block.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry::new(self.lattice, self.extent, self.depth as usize)
    }

    /// The argument words.
    #[must_use]
    pub fn to_words(&self) -> KernelWords {
        let (code, x, y) = match self.operation {
            Operation::Fill => (0, 0, 0),
            Operation::Pack { table, boxes } => (1, table, boxes),
            Operation::Unpack { table, boxes } => (2, table, boxes),
            Operation::Sweep { half_sweeps } => (3, half_sweeps, 0),
            Operation::Measure => (4, 0, 0),
        };
        let first = code | u64::from(self.double) << 8 | u64::from(self.threads) << 16;
        let [lx, ly, lz] = self.lattice.size.map(|size| size as u64);
        let [ox, oy, oz] = self.extent.origin.map(|at| at as u64);
        let [sx, sy, sz] = self.extent.size.map(|size| size as u64);
        [first, self.lattice.seed, lx, ly, lz, ox, oy, oz, sx, sy, sz, self.depth, self.block, x, y, 0]
    }

    /// Reads and checks argument words.
    ///
    /// # Errors
    /// Index of the first wrong word.
    pub fn from_words(words: &KernelWords) -> Result<SpinArguments, u64> {
        let check = |fits: bool, index: u64| if fits { Ok(()) } else { Err(index) };
        let [first, seed, ..] = *words;
        let (table, boxes) = (words[13], words[14]);
        let threads = first >> 16;
        check(first >> 8 & 0xff <= 1 && (1..=MAX_THREADS).contains(&threads), 0)?;
        let mut size = [0; 3];
        for (a, index) in (2_u64..5).enumerate() {
            let sites = words[index as usize];
            check((4..=MAX_SITES).contains(&sites) && sites.is_multiple_of(2), index)?;
            size[a] = usize::try_from(sites).map_err(|_| index)?;
        }
        let lattice = Lattice::new(size, seed).map_err(|_| 2_u64)?;
        let depth = words[11];
        check((1..=MAX_DEPTH).contains(&depth), 11)?;
        let mut extent = Extent { origin: [0; 3], size: [0; 3] };
        for a in 0..3 {
            let (origin, sites, all) = (words[5 + a], words[8 + a], size[a] as u64);
            let is_even = a != 0 || (origin % 2 == 0 && sites % 2 == 0);
            check(origin < all && is_even, 5 + a as u64)?;
            let needed = if sites == all { 2 } else { 2 * depth };
            check(is_even && sites >= needed && sites <= all - origin, 8 + a as u64)?;
            (extent.origin[a], extent.size[a]) = (origin as usize, sites as usize);
        }
        check(words[12].is_multiple_of(64), 12)?;
        let operation = match first & 0xff {
            0 => Operation::Fill,
            code @ (1 | 2) => {
                check(table.is_multiple_of(8), 13)?;
                check(boxes <= MAX_BOXES, 14)?;
                if code == 1 { Operation::Pack { table, boxes } } else { Operation::Unpack { table, boxes } }
            }
            3 => {
                check(table <= 2 * depth, 13)?;
                Operation::Sweep { half_sweeps: table }
            }
            4 => Operation::Measure,
            _ => return Err(0),
        };
        Ok(SpinArguments {
            operation,
            double: first >> 8 & 0xff == 1,
            threads: threads as u16,
            lattice,
            extent,
            depth,
            block: words[12],
        })
    }
}

/// A box of a block, and the place of its spins in card memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageBox {
    /// The box, in local coordinates.
    pub part: Box3,
    /// Offset of its spins in card memory (bytes).
    pub at: u64,
}

impl MessageBox {
    /// Its place in a table: six coordinates, the offset, zero.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; BOX_BYTES] {
        let [x, y, z] = self.part.clone().map(|range| [range.start as u64, range.end as u64]);
        let words = [x[0], x[1], y[0], y[1], z[0], z[1], self.at, 0];
        let mut bytes = [0; BOX_BYTES];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        bytes
    }

    /// Reads a box of a table. `None` if it is not within a block with its halos.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; BOX_BYTES], geometry: &Geometry) -> Option<MessageBox> {
        let word = |i: usize| u64::from_le_bytes(bytes.as_chunks().0[i]);
        let part: Box3 = std::array::from_fn(|a| word(2 * a) as isize..word(2 * a + 1) as isize);
        geometry.has(&part).then_some(MessageBox { part, at: word(6) })
    }
}

/// The sums of a block in result words.
#[must_use]
pub fn sums_to_words(sums: &Sums) -> [u64; SUMS_BYTES / 8] {
    let bytes = sums.to_bytes();
    std::array::from_fn(|i| u64::from_le_bytes(bytes.as_chunks().0[i]))
}

/// The sums of result words.
#[must_use]
pub fn sums_from_words(words: &KernelWords) -> Sums {
    let mut bytes = [0; SUMS_BYTES];
    for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
    Sums::from_bytes(&bytes)
}
