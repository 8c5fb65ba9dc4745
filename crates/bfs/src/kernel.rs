//! The kernel `bfs` of cards: its arguments, and the description of a graph in card memory.
//!
//! | argument | |
//! |---|---|
//! | 0 | operation |
//! | 1 | `Attach`: offset of the description in card memory. `Start`: the root. `Receive`, `BottomUp`: parity of the messages |
//! | 2 | `Attach`: length of the description. `Scan`, `Receive`, `BottomUp`: the level that is being found |
//!
//! | operation | does | results |
//! |---|---|---|
//! | 0 `Attach` | takes a graph whose arrays are in card memory, and checks it | |
//! | 1 `Start` | forgets the last search and makes the root the frontier | entries of the root's row, if it is here |
//! | 2 `Scan` | top-down: takes the own children of the frontier, and writes the others into the messages to their owners, until one is full | |
//! | 3 `Receive` | top-down: takes the children of the peers' messages | 1 if a node has more to scan, new vertices, entries of their rows |
//! | 4 `Frontier` | bottom-up: writes the own frontier into the messages to all peers | |
//! | 5 `BottomUp` | bottom-up: reads the peers' frontiers, and looks for a parent of each unvisited vertex | 0, new vertices, entries of their rows |
//!
//! A message begins with its length in bytes (u64); the highest bit says that the sender has more to scan. While a node has,
//! all nodes repeat `Scan` and `Receive`; the results are valid when none has. A kernel that is loaded again needs `Attach`.

use millstream_application::{HEADER_BYTES, Place};
use millstream_fabric::KernelWords;
use serde::{Deserialize, Serialize};

use crate::distribution::Distribution;

/// Name of the kernel.
pub const NAME: &str = "bfs";
/// Set in a message's length if its sender has more to scan.
pub const MORE: u64 = 1 << 63;
/// Longest description of a graph (bytes).
pub const MAX_DESCRIPTION: u64 = 1 << 20;
/// Arrays of a search.
pub const ARRAYS: usize = 9;

/// What a run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Takes a graph.
    Attach {
        /// Offset of the description in card memory (bytes).
        at: u64,
        /// Its length.
        bytes: u64,
    },
    /// Begins a search.
    Start {
        /// The root.
        root: u64,
    },
    /// Top-down: writes messages.
    Scan {
        /// The level that is being found.
        level: u32,
    },
    /// Top-down: reads messages.
    Receive {
        /// 0 or 1: which of the incoming messages.
        parity: u64,
        /// The level that is being found.
        level: u32,
    },
    /// Bottom-up: writes messages.
    Frontier,
    /// Bottom-up: reads messages and searches.
    BottomUp {
        /// 0 or 1: which of the incoming messages.
        parity: u64,
        /// The level that is being found.
        level: u32,
    },
}

impl Operation {
    /// The argument words.
    #[must_use]
    pub fn to_words(self) -> KernelWords {
        let first = match self {
            Operation::Attach { at, bytes } => [0, at, bytes],
            Operation::Start { root } => [1, root, 0],
            Operation::Scan { level } => [2, 0, level.into()],
            Operation::Receive { parity, level } => [3, parity, level.into()],
            Operation::Frontier => [4, 0, 0],
            Operation::BottomUp { parity, level } => [5, parity, level.into()],
        };
        let mut words = KernelWords::default();
        words[..3].copy_from_slice(&first);
        words
    }

    /// Reads argument words.
    ///
    /// # Errors
    /// Index of the first wrong word.
    pub fn from_words(words: &KernelWords) -> Result<Operation, u64> {
        let [code, first, second, ..] = *words;
        let parity = if first > 1 { Err(1_u64) } else { Ok(first) };
        let level = u32::try_from(second).map_err(|_| 2_u64);
        match code {
            0 if second > MAX_DESCRIPTION => Err(2),
            0 => Ok(Operation::Attach { at: first, bytes: second }),
            1 => Ok(Operation::Start { root: first }),
            2 => Ok(Operation::Scan { level: level? }),
            3 => Ok(Operation::Receive { parity: parity?, level: level? }),
            4 => Ok(Operation::Frontier),
            5 => Ok(Operation::BottomUp { parity: parity?, level: level? }),
            _ => Err(0),
        }
    }
}

/// The messages of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerMessages {
    /// Its number.
    pub node: u16,
    /// Where the message to it is.
    pub outgoing: u64,
    /// Where its messages are, by parity.
    pub incoming: [u64; 2],
}

/// A graph in card memory, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Vertices of all nodes.
    pub vertices: u64,
    /// Number of nodes.
    pub nodes: u16,
    /// This node.
    pub here: u16,
    /// Size of a vertex number in the arrays (bytes): 4 or 6.
    pub column_bytes: usize,
    /// Starts of rows, columns, the bitmaps visited, sent, frontier of all, frontier and next, parents, levels.
    pub arrays: [Place; ARRAYS],
    /// Room of a message (bytes).
    pub room: u64,
    /// All other nodes.
    pub peers: Vec<PeerMessages>,
}

impl Description {
    /// Checks what does not depend on the arrays' contents. `None` if something is wrong.
    #[must_use]
    pub fn distribution(&self) -> Option<Distribution> {
        let (nodes, here) = (usize::from(self.nodes), usize::from(self.here));
        let mut others: Vec<u16> = self.peers.iter().map(|peer| peer.node).collect();
        others.sort_unstable();
        if here >= nodes
            || !(1..=1 << 48).contains(&self.vertices)
            || !others.into_iter().eq((0..self.nodes).filter(|&node| node != self.here))
        {
            return None;
        }
        let distribution = Distribution::new(self.vertices, nodes, here);
        let [starts, columns, rest @ ..] = self.arrays.map(|place| place.count);
        let fits = starts == distribution.own_count() + 1
            && columns <= 1 << 48
            && rest == array_counts(&distribution)
            && (nodes == 1 || self.room >= least_room(&distribution, self.column_bytes));
        fits.then_some(distribution)
    }
}

/// Numbers of values of the arrays after the rows.
#[must_use]
pub fn array_counts(distribution: &Distribution) -> [u64; ARRAYS - 2] {
    let (own, all) = (distribution.own_count(), distribution.indices());
    let words = |numbers: u64| numbers.div_ceil(64);
    [words(own), words(all), words(all), words(own), words(own), own, own]
}

/// Room that a message needs at least: a whole frontier, or one child.
#[must_use]
pub fn least_room(distribution: &Distribution, column_bytes: usize) -> u64 {
    let frontier = 1 + 8 * distribution.own_count().div_ceil(64);
    HEADER_BYTES as u64 + frontier.max(2 * column_bytes as u64)
}
