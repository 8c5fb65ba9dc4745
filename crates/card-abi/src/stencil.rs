//! Arguments of the kernel `stencil`.

use std::ops::Range;

use crate::registers::{KERNEL_WORDS, KernelWords};

/// Name of the kernel.
pub const NAME: &str = "stencil";

/// The arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StencilArguments {
    /// Elements are float64 instead of float32.
    pub double: bool,
    /// Rows of the grid.
    pub rows: u64,
    /// Columns of the grid.
    pub columns: u64,
    /// Elements from one row to the next.
    pub pitch: u64,
    /// Offset of the grid in card memory (bytes).
    pub source: u64,
    /// Offset of the second grid, which receives the result (bytes).
    pub destination: u64,
    /// Sweeps.
    pub sweeps: u64,
    /// Rows to compute; none: all.
    pub ranges: [Range<u64>; 2],
}

impl StencilArguments {
    /// The argument words.
    #[must_use]
    pub fn to_words(&self) -> KernelWords {
        let [one, other] = &self.ranges;
        let mut words = [0; KERNEL_WORDS];
        words[..11].copy_from_slice(&[
            self.double.into(),
            self.rows,
            self.columns,
            self.pitch,
            self.source,
            self.destination,
            self.sweeps,
            one.start,
            one.end,
            other.start,
            other.end,
        ]);
        words
    }
}
