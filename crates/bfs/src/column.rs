//! Vertex numbers as the graph stores them: 32 bits, or the 48 bits that the Graph500 rules require.

use std::cmp::Ordering;
use std::fmt::Debug;

/// A stored vertex number. The largest value means "none".
pub trait Column: Copy + Debug + Ord + Send + Sync + 'static {
    /// Size of a stored number (bytes).
    const BYTES: usize;
    /// No vertex.
    const NONE: Self;
    /// Largest number of a vertex.
    const MAX: u64;

    /// Stores a number, which is at most [`Column::MAX`].
    fn new(number: u64) -> Self;

    /// The number.
    fn get(self) -> u64;

    /// Appends the number to a message.
    fn append(self, message: &mut Vec<u8>);

    /// Reads a number from a message of [`Column::BYTES`].
    fn read(bytes: &[u8]) -> Self;
}

impl Column for u32 {
    const BYTES: usize = 4;
    const NONE: u32 = u32::MAX;
    const MAX: u64 = u32::MAX as u64 - 1;

    fn new(number: u64) -> u32 {
        number as u32
    }

    fn get(self) -> u64 {
        u64::from(self)
    }

    fn append(self, message: &mut Vec<u8>) {
        message.extend(self.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| bytes[i]))
    }
}

/// A number of 48 bits in 6 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct U48([u16; 3]);

impl Column for U48 {
    const BYTES: usize = 6;
    const NONE: U48 = U48([u16::MAX; 3]);
    const MAX: u64 = (1 << 48) - 2;

    fn new(number: u64) -> U48 {
        U48([number as u16, (number >> 16) as u16, (number >> 32) as u16])
    }

    fn get(self) -> u64 {
        let [low, middle, high] = self.0.map(u64::from);
        low | middle << 16 | high << 32
    }

    fn append(self, message: &mut Vec<u8>) {
        message.extend(self.0.iter().flat_map(|part| part.to_le_bytes()));
    }

    fn read(bytes: &[u8]) -> U48 {
        U48(std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
    }
}

impl Ord for U48 {
    fn cmp(&self, other: &U48) -> Ordering {
        self.get().cmp(&other.get())
    }
}

impl PartialOrd for U48 {
    fn partial_cmp(&self, other: &U48) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
