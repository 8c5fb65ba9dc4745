//! The edge list of Graph500: a Kronecker graph with scrambled vertex numbers, bit for bit that of the reference code.
//!
//! Each edge has a generator of its own, 2⁶⁴ steps behind the previous edge's. So any part of the list can be made anywhere.

use std::ops::Range;

use crate::mrg::{Jump, Mrg};

/// Probabilities of the four quarters of the adjacency matrix, in ten thousandths: A, B = C; D is the rest.
const A: u32 = 5700;
const B: u32 = 1900;
const DENOMINATOR: u32 = 10_000;
/// Draws below this are repeated, so that all remainders are equally likely.
const SHORT: u32 = 0x7FFF_FFFF % DENOMINATOR;
/// The numbers that scramble vertices begin 50·2¹²⁸ + 7·2⁶⁴ steps after the seed.
const SCRAMBLE_AT: [u64; 3] = [0, 7, 50];

/// Largest supported scale: 48-bit vertex numbers, one of which means "none".
pub const MAX_SCALE: u32 = 47;

/// An edge of the input list, 12 bytes: two numbers of 48 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    low: [u32; 2],
    high: u32,
}

impl Edge {
    /// An edge between two vertices below 2⁴⁸.
    #[must_use]
    pub fn new(a: u64, b: u64) -> Edge {
        let high = (a >> 32 & 0xFFFF) | (b >> 32 & 0xFFFF) << 16;
        Edge { low: [a as u32, b as u32], high: high as u32 }
    }

    /// Both ends.
    #[must_use]
    pub fn ends(self) -> (u64, u64) {
        let high = u64::from(self.high);
        (u64::from(self.low[0]) | (high & 0xFFFF) << 32, u64::from(self.low[1]) | high >> 16 << 32)
    }

    /// The edge as the reference code writes it to a file on a little-endian machine.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        for (place, word) in bytes.chunks_exact_mut(4).zip([self.low[0], self.low[1], self.high]) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// A Kronecker graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kronecker {
    scale: u32,
    edge_factor: u64,
    start: Mrg,
    /// The two numbers that scramble vertices.
    scramble: [u64; 2],
}

impl Kronecker {
    /// The graph of 2^`scale` vertices and `edge_factor`·2^`scale` edges. `scale` is 1 to [`MAX_SCALE`].
    #[must_use]
    pub fn new(scale: u32, edge_factor: u64, seeds: (u64, u64)) -> Kronecker {
        let start = Mrg::from_seeds(seeds.0, seeds.1);
        let mut numbers = start.after(&Jump::steps(SCRAMBLE_AT));
        let mut word = || {
            let high = u64::from(numbers.draw()) * 0xFFFF_FFFF;
            high.wrapping_add(u64::from(numbers.draw()))
        };
        Kronecker { scale, edge_factor, start, scramble: [word(), word()] }
    }

    /// Number of vertices.
    #[must_use]
    pub fn vertices(&self) -> u64 {
        1 << self.scale
    }

    /// Number of edges, duplicates and self-loops included.
    #[must_use]
    pub fn edges(&self) -> u64 {
        self.edge_factor << self.scale
    }

    /// A part of the edge list.
    pub fn part(&self, range: Range<u64>) -> impl Iterator<Item = Edge> + use<> {
        let graph = *self;
        let mut state = self.start.after(&Jump::steps([0, range.start, 0]));
        let one = Jump::steps([0, 1, 0]);
        range.map(move |_| {
            let edge = graph.edge(state);
            state = state.after(&one);
            edge
        })
    }

    fn edge(&self, mut numbers: Mrg) -> Edge {
        let (mut a, mut b) = (0, 0);
        for bit in (0..self.scale).rev() {
            let (mut a_bit, mut b_bit) = quarter(&mut numbers);
            // The graph is undirected: on the diagonal, the lower triangle is folded onto the upper one.
            if a == b && a_bit > b_bit {
                (a_bit, b_bit) = (b_bit, a_bit);
            }
            a |= a_bit << bit;
            b |= b_bit << bit;
        }
        Edge::new(self.scrambled(a), self.scrambled(b))
    }

    /// A permutation of the vertex numbers.
    fn scrambled(&self, vertex: u64) -> u64 {
        let [first, second] = self.scramble;
        let top = |number: u64| number.reverse_bits() >> (64 - self.scale);
        let number = vertex.wrapping_add(first).wrapping_add(second);
        let number = top(number.wrapping_mul(first | 0x4519_8402_1149_3211));
        top(number.wrapping_mul(second | 0x3050_8521_02C8_43A5))
    }
}

/// Draws a quarter of the matrix: the bits of both ends.
fn quarter(numbers: &mut Mrg) -> (u64, u64) {
    let draw = loop {
        let draw = numbers.draw();
        if draw >= SHORT {
            break draw % DENOMINATOR;
        }
    };
    match draw {
        _ if draw < B => (0, 1),
        _ if draw < 2 * B => (1, 0),
        _ if draw < 2 * B + A => (0, 0),
        _ => (1, 1),
    }
}
