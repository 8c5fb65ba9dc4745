//! The kernel `neurons` of cards: its arguments, and the description of a population in card memory.
//!
//! | argument | |
//! |---|---|
//! | 0 | operation |
//! | 1, 2 | `Attach`: range of the description in card memory (offset, bytes). `Arrivals`, `SetArrivals`: range of the arrivals |
//! | 3 | `Step`: parity of the messages. `SetArrivals`: the next step |
//!
//! | operation | does | results |
//! |---|---|---|
//! | 0 `Attach` | takes a population whose arrays are in card memory | |
//! | 1 `Fire` | begins a step; writes the neurons that fire, and the message to each peer | |
//! | 2 `Step` | delivers spikes, those in the peers' messages included, and integrates | spikes of excitatory and inhibitory neurons, arrivals, hash of spikes |
//! | 3 `Arrivals` | writes the sources that fired in the last steps | bytes |
//! | 4 `SetArrivals` | reads them | |
//!
//! A message, and the list of neurons that fire: their count (u64), then their numbers (u32). Lists of spikes stay in the kernel
//! between runs: a kernel that is loaded again needs `Attach` and `SetArrivals`.

use millstream_application::{Array, Place};
use millstream_fabric::KernelWords;
use serde::{Deserialize, Serialize};

use crate::network::{ColumnId, Network};
use crate::plain::bytes_mut;
use crate::population::Population;
use crate::synapses::Synapses;

/// Name of the kernel.
pub const NAME: &str = "neurons";
/// Longest description of a population (bytes).
pub const MAX_DESCRIPTION: u64 = 64 << 20;
/// Arrays of a population.
pub const ARRAYS: usize = 7;
/// Size of a value of each array (bytes).
pub const VALUE_BYTES: [usize; ARRAYS] = [8, 8, 8, 8, 4, 8, 8];

/// What a run does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Takes a population.
    Attach {
        /// Offset of the description in card memory (bytes).
        at: u64,
        /// Its length.
        bytes: u64,
    },
    /// Begins a step.
    Fire,
    /// Ends a step.
    Step {
        /// 0 or 1: which of the incoming messages.
        parity: u64,
    },
    /// Writes the sources that fired in the last steps.
    Arrivals {
        /// Offset in card memory (bytes).
        at: u64,
        /// Room there.
        bytes: u64,
    },
    /// Reads them.
    SetArrivals {
        /// Offset in card memory (bytes).
        at: u64,
        /// Their length.
        bytes: u64,
        /// The next step.
        step: u64,
    },
}

impl Operation {
    /// The argument words.
    #[must_use]
    pub fn to_words(self) -> KernelWords {
        let first = match self {
            Operation::Attach { at, bytes } => [0, at, bytes, 0],
            Operation::Fire => [1, 0, 0, 0],
            Operation::Step { parity } => [2, 0, 0, parity],
            Operation::Arrivals { at, bytes } => [3, at, bytes, 0],
            Operation::SetArrivals { at, bytes, step } => [4, at, bytes, step],
        };
        let mut words = KernelWords::default();
        words[..4].copy_from_slice(&first);
        words
    }

    /// Reads argument words.
    ///
    /// # Errors
    /// Index of the first wrong word.
    pub fn from_words(words: &KernelWords) -> Result<Operation, u64> {
        let [code, at, bytes, value, ..] = *words;
        match code {
            0 if bytes > MAX_DESCRIPTION => Err(2),
            0 => Ok(Operation::Attach { at, bytes }),
            1 => Ok(Operation::Fire),
            2 if value > 1 => Err(3),
            2 => Ok(Operation::Step { parity: value }),
            3 => Ok(Operation::Arrivals { at, bytes }),
            4 if value > i32::MAX as u64 => Err(3),
            4 => Ok(Operation::SetArrivals { at, bytes, step: value }),
            _ => Err(0),
        }
    }
}

/// The messages of a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerMessages {
    /// Where the message to it is.
    pub outgoing: u64,
    /// Where its messages are, by parity.
    pub incoming: [u64; 2],
    /// Ranks of the own columns that it gets spikes of.
    pub ranks: Vec<u32>,
}

/// A population in card memory, as JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// The network.
    pub network: Network,
    /// The population's columns, by number.
    pub columns: Vec<ColumnId>,
    /// Potentials, recoveries, currents, last spikes, offsets of synapses, synapses, plastic parts of synapses.
    pub arrays: [Place; ARRAYS],
    /// Where the neurons that fire are written.
    pub firing: u64,
    /// The peers.
    pub peers: Vec<PeerMessages>,
}

impl Description {
    /// Checks what does not depend on the arrays. Returns the population without its arrays; `None` if something is wrong.
    #[must_use]
    pub fn population(&self) -> Option<Population> {
        self.network.check().ok()?;
        let is_sorted = self.columns.is_sorted_by(|a, b| a < b);
        let exist = self.columns.iter().all(|&column| column < self.network.columns());
        let ranks = |peer: &PeerMessages| peer.ranks.iter().all(|&rank| (rank as usize) < self.columns.len());
        if !is_sorted || !exist || !self.peers.iter().all(ranks) {
            return None;
        }
        let neurons = self.columns.len() as u64 * u64::from(self.network.neurons);
        let population = Population::without_arrays(&self.network, &self.columns);
        let [v, u, currents, fired, offsets, stored, plastic] = self.arrays.map(|place| place.count);
        let expected_plastic = if self.network.is_plastic { stored } else { 0 };
        let fits = [v, u, currents, fired].iter().all(|&count| count == neurons)
            && offsets == population.synapses.offset_count() as u64
            && plastic == expected_plastic
            && stored <= u64::from(u32::MAX);
        fits.then_some(population)
    }
}

/// Puts the neurons that fire into the messages to peers: `peers_of` has the peers of each rank of a column.
pub(crate) fn messages(
    firing: &[u32],
    columns: &[ColumnId],
    neurons: u32,
    peers_of: &[Vec<usize>],
    messages: &mut [Vec<u8>],
) {
    let mut rank = 0;
    for &neuron in firing {
        // Neurons and columns are in the order of their numbers.
        while columns[rank] != neuron / neurons {
            rank += 1;
        }
        for &peer in &peers_of[rank] {
            messages[peer].extend_from_slice(&neuron.to_le_bytes());
        }
    }
}

impl Population {
    /// A population at rest whose arrays are empty until [`Population::place`].
    pub(crate) fn without_arrays(network: &Network, columns: &[ColumnId]) -> Population {
        let synapses = Synapses::without_arrays(network, columns);
        Population::with(network, columns, synapses, 0)
    }

    /// The arrays' bytes, in the order of [`Description::arrays`].
    #[must_use]
    pub fn array_bytes(&mut self) -> [&mut [u8]; ARRAYS] {
        let synapses = &mut self.synapses;
        [
            bytes_mut(&mut self.v),
            bytes_mut(&mut self.u),
            bytes_mut(&mut self.currents),
            bytes_mut(&mut self.fired),
            bytes_mut(&mut synapses.offsets),
            bytes_mut(&mut synapses.stored),
            bytes_mut(&mut synapses.plastic),
        ]
    }

    /// Uses arrays at these addresses, with these numbers of values.
    ///
    /// # Safety
    /// They are aligned to 8 bytes, initialised, and exclusively the population's until [`Population::displace`].
    pub unsafe fn place(&mut self, arrays: [(*mut u8, usize); ARRAYS]) {
        let [v, u, currents, fired, offsets, stored, plastic] = arrays;
        // SAFETY: the caller's promise.
        unsafe {
            self.v = Array::over(v.0.cast(), v.1);
            self.u = Array::over(u.0.cast(), u.1);
            self.currents = Array::over(currents.0.cast(), currents.1);
            self.fired = Array::over(fired.0.cast(), fired.1);
            self.synapses.offsets = Array::over(offsets.0.cast(), offsets.1);
            self.synapses.stored = Array::over(stored.0.cast(), stored.1);
            self.synapses.plastic = Array::over(plastic.0.cast(), plastic.1);
        }
    }

    /// Uses no arrays any more.
    pub fn displace(&mut self) {
        self.v = Default::default();
        self.u = Default::default();
        self.currents = Default::default();
        self.fired = Default::default();
        self.synapses.offsets = Default::default();
        self.synapses.stored = Default::default();
        self.synapses.plastic = Default::default();
    }

    /// Whether the arrays refer to nothing that does not exist, and no spike of this second waits.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        let neurons = self.v.len();
        let offsets = &self.synapses.offsets;
        offsets.is_sorted()
            && offsets.last().is_some_and(|&last| last as usize == self.synapses.stored.len())
            && self.synapses.stored.iter().all(|synapse| (synapse.target as usize) < neurons)
            && self.fired.iter().all(|fired| fired.newest == 0)
    }

    /// The message to each of `peers`, given the peers of each own column.
    #[must_use]
    pub fn messages(&self, peers_of: &[Vec<usize>], peers: usize) -> Vec<Vec<u8>> {
        let mut all = vec![Vec::new(); peers];
        messages(self.firing(), &self.columns, self.network.neurons, peers_of, &mut all);
        all
    }

    /// The sources that fired in the last steps: for each age their number (u32), then their slots.
    #[must_use]
    pub fn arrivals_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for slots in &self.arrivals {
            bytes.extend_from_slice(&(slots.len() as u32).to_le_bytes());
            slots.iter().for_each(|slot| bytes.extend_from_slice(&slot.to_le_bytes()));
        }
        bytes
    }

    /// Takes such bytes, and the next step. False, and nothing changed, if they are not of this population.
    #[must_use]
    pub fn set_arrivals(&mut self, bytes: &[u8], step: u64) -> bool {
        let slots = self.synapses.source_columns.len() as u64 * u64::from(self.network.neurons);
        let mut words = bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word));
        let mut arrivals = Vec::new();
        for _ in 0..self.arrivals.len() {
            let Some(count) = words.next() else { return false };
            let own: Vec<u32> = words.by_ref().take(count as usize).collect();
            if own.len() != count as usize || own.iter().any(|&slot| u64::from(slot) >= slots) {
                return false;
            }
            arrivals.push(own);
        }
        if words.next().is_some() || !bytes.len().is_multiple_of(4) {
            return false;
        }
        self.arrivals = arrivals.into();
        self.step = step;
        true
    }
}
