//! Neurons, columns, and who is connected with whom.
//!
//! The synapses of a neuron are a function of the seed and its number, so connectivity does not depend on the nodes.

use millstream_application::counter_hash;

/// Units of currents and weights in a millivolt.
pub const UNITS_PER_MV: i32 = 1 << 20;
/// How far synapses reach, in columns along either axis.
pub const REACH: usize = 3;

/// Number of a neuron: column · neurons in a column + place.
pub type NeuronId = u32;
/// Number of a column: x + X·y.
pub type ColumnId = u32;

/// Streams of random numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stream {
    /// Targets of synapses.
    Target = 11,
    /// The neuron of a column that gets the input of a step.
    Input = 12,
    /// The step in which a neuron that ignores its input fires.
    Phase = 13,
}

/// What a neuron does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Model {
    /// Izhikevich's model: regular spiking excitatory and fast spiking inhibitory neurons.
    Izhikevich,
    /// A neuron that fires once in a number of steps, whatever it gets: to measure delivery alone.
    IgnoreAndFire {
        /// Steps between two spikes.
        period: u32,
    },
}

/// A network.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Network {
    /// Columns along x and y.
    pub grid: [u32; 2],
    /// Neurons of a column; four fifths are excitatory.
    pub neurons: u32,
    /// Synapses of a neuron.
    pub synapses: u32,
    /// Thousandths of an excitatory neuron's synapses in its own column and in rings 1, 2, 3 around it.
    pub shares: [u32; REACH + 1],
    /// Longest delay of an excitatory synapse (ms); the shortest is 1, as for all inhibitory ones.
    pub longest_delay: u32,
    /// Initial weight of excitatory synapses (2⁻²⁰ mV).
    pub excitatory_weight: i32,
    /// Weight of inhibitory synapses (2⁻²⁰ mV).
    pub inhibitory_weight: i32,
    /// Whether excitatory synapses learn.
    pub is_plastic: bool,
    /// What the neurons do.
    pub model: Model,
    /// The seed.
    pub seed: u64,
}

/// A synapse of a neuron.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synapse {
    /// The neuron that it excites or inhibits.
    pub target: NeuronId,
    /// Delay (ms), from 1.
    pub delay: u32,
}

/// A network that is not possible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetworkError {
    /// A value that is out of range.
    #[error("{field} is {value}; it must be {range}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it may be.
        range: String,
    },
    /// A node has more synapses than its arrays count.
    #[error("a node has {synapses} synapses; it must be at most {}; use more nodes", u32::MAX)]
    NodeSynapses {
        /// The synapses of its neurons, in the mean.
        synapses: u64,
    },
}

impl Network {
    /// Checks all values.
    ///
    /// # Errors
    /// [`NetworkError`] with the first wrong one.
    pub fn check(&self) -> Result<(), NetworkError> {
        let within = |field, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(NetworkError::Range { field, value, range: format!("{low} to {high}") })
        };
        within("columns along x", self.grid[0].into(), 1, 1 << 15)?;
        within("columns along y", self.grid[1].into(), 1, 1 << 15)?;
        within("neurons of a column", self.neurons.into(), 5, 1 << 20)?;
        let neurons = u64::from(self.columns()) * u64::from(self.neurons);
        within("number of all neurons", neurons, 5, u64::from(u32::MAX))?;
        // Inhibitory neurons need as many excitatory targets, found by chance.
        within("synapses of a neuron", self.synapses.into(), 1, u64::from(self.excitatory() / 2).max(1))?;
        within("longest delay", self.longest_delay.into(), 1, 20)?;
        let shares = self.shares.iter().map(|&share| u64::from(share)).sum();
        within("sum of all shares (thousandths)", shares, 1000, 1000)?;
        let highest = 100 * i64::from(UNITS_PER_MV);
        let weight = |field, weight: i32| within(field, u64::from(weight.unsigned_abs()), 0, highest as u64);
        weight("excitatory weight (2^-20 mV)", self.excitatory_weight)?;
        weight("inhibitory weight (2^-20 mV)", self.inhibitory_weight)?;
        if let Model::IgnoreAndFire { period } = self.model {
            within("period (ms)", period.into(), 1, 1 << 20)?;
        }
        Ok(())
    }

    /// Number of columns.
    #[must_use]
    pub fn columns(&self) -> u32 {
        self.grid[0] * self.grid[1]
    }

    /// Excitatory neurons of a column; they come first.
    #[must_use]
    pub fn excitatory(&self) -> u32 {
        self.neurons * 4 / 5
    }

    /// Whether a neuron is excitatory.
    #[must_use]
    pub fn is_excitatory(&self, neuron: NeuronId) -> bool {
        neuron % self.neurons < self.excitatory()
    }

    /// Coordinates of a column.
    #[must_use]
    pub fn place(&self, column: ColumnId) -> [u32; 2] {
        [column % self.grid[0], column / self.grid[0]]
    }

    /// The neuron of a column that gets the input of a step.
    #[must_use]
    pub fn input(&self, column: ColumnId, step: u64) -> NeuronId {
        let index = step * u64::from(self.columns()) + u64::from(column);
        let word = counter_hash(self.seed, Stream::Input as u64, index, 0);
        column * self.neurons + scaled(word as u32, self.neurons)
    }

    /// The step, modulo the period, in which a neuron that ignores its input fires.
    #[must_use]
    pub fn phase(&self, neuron: NeuronId, period: u32) -> u32 {
        scaled(counter_hash(self.seed, Stream::Phase as u64, neuron.into(), 0) as u32, period)
    }

    /// Initial weight of a neuron's synapses.
    #[must_use]
    pub fn weight_of(&self, source: NeuronId) -> i32 {
        if self.is_excitatory(source) { self.excitatory_weight } else { self.inhibitory_weight }
    }
}

/// A uniform number below `limit` of 32 random bits.
fn scaled(bits: u32, limit: u32) -> u32 {
    ((u64::from(bits) * u64::from(limit)) >> 32) as u32
}

/// Makes the synapses of one neuron after another. Keeps its memory.
#[derive(Clone, Debug)]
pub(crate) struct SynapseGenerator<'n> {
    network: &'n Network,
    synapses: Vec<Synapse>,
    /// Targets so far, by hash; `u32::MAX` is free.
    taken: Vec<NeuronId>,
}

const FREE: NeuronId = u32::MAX;

impl<'n> SynapseGenerator<'n> {
    pub(crate) fn new(network: &'n Network) -> SynapseGenerator<'n> {
        let places = (4 * network.synapses as usize).next_power_of_two();
        SynapseGenerator { network, synapses: Vec::new(), taken: vec![FREE; places] }
    }

    /// The synapses of a neuron, by growing delay. No target occurs twice, and none is the neuron itself.
    pub(crate) fn of(&mut self, source: NeuronId) -> &[Synapse] {
        let network = self.network;
        self.synapses.clear();
        self.taken.fill(FREE);
        let is_excitatory = network.is_excitatory(source);
        for k in 0..network.synapses {
            let delay = if is_excitatory { 1 + k * network.longest_delay / network.synapses } else { 1 };
            let index = u64::from(source) * u64::from(network.synapses) + u64::from(k);
            let word = |attempt| counter_hash(network.seed, Stream::Target as u64, index, attempt);
            let column =
                if is_excitatory { self.column(source, word(0) as u32) } else { source / network.neurons };
            let among = if is_excitatory { network.neurons } else { network.excitatory() };
            // Ends: at least half of a column's neurons are free. Only the place is drawn again, so the shares hold.
            let mut attempt = 0;
            let target = loop {
                let target = column * network.neurons + scaled((word(attempt) >> 32) as u32, among);
                if target != source && self.take(target) {
                    break target;
                }
                attempt += 1;
            };
            self.synapses.push(Synapse { target, delay });
        }
        &self.synapses
    }

    /// The column of an excitatory synapse's target.
    fn column(&self, source: NeuronId, bits: u32) -> ColumnId {
        let network = self.network;
        let mut share = scaled(bits << 16, 1000);
        let mut ring = 0;
        while ring < REACH && share >= network.shares[ring] {
            share -= network.shares[ring];
            ring += 1;
        }
        let cell = scaled(bits & 0xffff_0000, 8 * ring as u32);
        let [dx, dy] = if ring == 0 { [0, 0] } else { ring_cell(ring as i64, cell.into()) };
        let [x, y] = network.place(source / network.neurons);
        let wrap = |at: u32, by: i64, size: u32| (i64::from(at) + by).rem_euclid(i64::from(size)) as u32;
        let (x, y) = (wrap(x, dx, network.grid[0]), wrap(y, dy, network.grid[1]));
        x + network.grid[0] * y
    }

    /// Notes a target; false if it was noted before.
    fn take(&mut self, target: NeuronId) -> bool {
        let mask = self.taken.len() - 1;
        let mut at = target.wrapping_mul(0x9e37_79b9) as usize >> 7 & mask;
        while self.taken[at] != FREE {
            if self.taken[at] == target {
                return false;
            }
            at = (at + 1) & mask;
        }
        self.taken[at] = target;
        true
    }
}

/// The offset of one of the 8·r cells at distance r: right, upper, left, lower side.
fn ring_cell(r: i64, cell: i64) -> [i64; 2] {
    let (side, along) = (cell / (2 * r), cell % (2 * r) - r);
    match side {
        0 => [r, along],
        1 => [-along, r],
        2 => [-r, -along],
        _ => [along, -r],
    }
}

impl Network {
    /// The synapses of a neuron, by growing delay.
    #[must_use]
    pub fn synapses_of(&self, source: NeuronId) -> Vec<Synapse> {
        SynapseGenerator::new(self).of(source).to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_has_each_of_its_cells_once() {
        for r in 1..=3 {
            let mut cells: Vec<_> = (0..8 * r).map(|cell| ring_cell(r, cell)).collect();
            assert!(cells.iter().all(|[x, y]| x.abs().max(y.abs()) == r), "{cells:?}");
            cells.sort_unstable();
            cells.dedup();
            assert_eq!(cells.len() as i64, 8 * r);
        }
    }
}
