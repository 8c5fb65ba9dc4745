//! The synapses of a node, which live with their targets.
//!
//! ```text
//!   offsets   for each source that may have targets here, and each delay: where its synapses begin
//!   synapses  target 4 B │ weight 4 B          by source, then delay
//!   plastic   derivative 4 B │ last arrival 4 B    the same order
//! ```

use millstream_application::Array;
use std::ops::Range;

use crate::cut::reaches;
use crate::network::{ColumnId, Network, NetworkError, NeuronId, SynapseGenerator};
use crate::plain::Plain;

/// A synapse in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct StoredSynapse {
    /// The target's place among the neurons of this node.
    pub(crate) target: u32,
    /// Weight (2⁻²⁰ mV).
    pub(crate) weight: i32,
}

// SAFETY: two numbers of 32 bits.
unsafe impl Plain for StoredSynapse {}

/// What a plastic synapse has besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Plastic {
    /// Derivative of the weight (2⁻²⁰ mV).
    pub(crate) derivative: i32,
    /// Step of the last arrival; [`NEVER`] before the first.
    pub(crate) arrived: i32,
}

// SAFETY: two numbers of 32 bits.
unsafe impl Plain for Plastic {}

/// Before any step.
pub(crate) const NEVER: i32 = -1;

/// A source's place: the rank of its column among the sources' columns · neurons of a column + its place there.
pub(crate) type SourceSlot = u32;

#[derive(Clone, Debug)]
pub(crate) struct Synapses {
    neurons: u32,
    delays: usize,
    /// Columns whose neurons may have targets here, by number.
    pub(crate) source_columns: Vec<ColumnId>,
    /// Rank of each column among them; `u32::MAX` for the others.
    ranks: Vec<u32>,
    pub(crate) offsets: Array<u32>,
    pub(crate) stored: Array<StoredSynapse>,
    /// Empty if no synapse is plastic.
    pub(crate) plastic: Array<Plastic>,
}

impl Synapses {
    /// As [`Synapses::new`], without the arrays of synapses.
    pub(crate) fn without_arrays(network: &Network, columns: &[ColumnId]) -> Synapses {
        let is_source = |&from: &ColumnId| columns.iter().any(|&to| reaches(network, from, to));
        let source_columns: Vec<ColumnId> = (0..network.columns()).filter(is_source).collect();
        let mut ranks = vec![u32::MAX; network.columns() as usize];
        source_columns.iter().enumerate().for_each(|(rank, &column)| ranks[column as usize] = rank as u32);
        Synapses {
            neurons: network.neurons,
            delays: network.longest_delay as usize,
            source_columns,
            ranks,
            offsets: Array::default(),
            stored: Array::default(),
            plastic: Array::default(),
        }
    }

    /// Number of neurons that may have targets here.
    pub(crate) fn sources(&self) -> usize {
        self.source_columns.len() * self.neurons as usize
    }

    /// Number of values of the offsets.
    pub(crate) fn offset_count(&self) -> usize {
        self.sources() * self.delays + 1
    }

    /// The synapses whose targets are in some columns.
    ///
    /// # Errors
    /// [`NetworkError::NodeSynapses`].
    pub(crate) fn new(network: &Network, columns: &[ColumnId]) -> Result<Synapses, NetworkError> {
        // A neuron is the target of as many synapses as it has, in the mean.
        let neurons = columns.len() as u64 * u64::from(network.neurons);
        let expected = neurons * u64::from(network.synapses);
        let too_many = |synapses: u64| NetworkError::NodeSynapses { synapses };
        u32::try_from(expected).map_err(|_| too_many(expected))?;
        let mut synapses = Synapses::without_arrays(network, columns);
        let mut own = vec![u32::MAX; network.columns() as usize];
        columns.iter().enumerate().for_each(|(rank, &column)| own[column as usize] = rank as u32);

        let delays = network.longest_delay as usize;
        let mut offsets = Vec::with_capacity(synapses.offset_count());
        let mut stored: Vec<StoredSynapse> = Vec::new();
        let mut generator = SynapseGenerator::new(network);
        for &column in &synapses.source_columns {
            for source in column * network.neurons..(column + 1) * network.neurons {
                let weight = network.weight_of(source);
                let mut delay = 0;
                for synapse in generator.of(source) {
                    while delay < synapse.delay {
                        offsets.push(stored.len() as u32);
                        delay += 1;
                    }
                    let rank = own[(synapse.target / network.neurons) as usize];
                    if rank != u32::MAX {
                        let target = rank * network.neurons + synapse.target % network.neurons;
                        stored.push(StoredSynapse { target, weight });
                    }
                }
                (delay..delays as u32).for_each(|_| offsets.push(stored.len() as u32));
            }
        }
        offsets.push(u32::try_from(stored.len()).map_err(|_| too_many(stored.len() as u64))?);
        stored.shrink_to_fit();
        let new = Plastic { derivative: 0, arrived: NEVER };
        let plastic = if network.is_plastic { vec![new; stored.len()] } else { Vec::new() };
        synapses.offsets = offsets.into();
        synapses.stored = stored.into();
        synapses.plastic = plastic.into();
        Ok(synapses)
    }

    /// The slot of a neuron; `None` if it cannot have targets here.
    pub(crate) fn slot(&self, source: NeuronId) -> Option<SourceSlot> {
        let rank = *self.ranks.get((source / self.neurons) as usize)?;
        (rank != u32::MAX).then(|| rank * self.neurons + source % self.neurons)
    }

    /// The neuron of a slot.
    pub(crate) fn source(&self, slot: SourceSlot) -> NeuronId {
        self.source_columns[(slot / self.neurons) as usize] * self.neurons + slot % self.neurons
    }

    /// The synapses of a source with a delay of `age` + 1 ms.
    pub(crate) fn group(&self, slot: SourceSlot, age: usize) -> Range<usize> {
        let at = slot as usize * self.delays + age;
        self.offsets[at] as usize..self.offsets[at + 1] as usize
    }

    /// All synapses of a source.
    pub(crate) fn of(&self, slot: SourceSlot) -> Range<usize> {
        let at = slot as usize * self.delays;
        self.offsets[at] as usize..self.offsets[at + self.delays] as usize
    }

    /// Slots of excitatory sources.
    pub(crate) fn excitatory_slots(&self, excitatory: u32) -> impl Iterator<Item = SourceSlot> + use<> {
        let neurons = self.neurons;
        (0..self.source_columns.len() as u32)
            .flat_map(move |rank| (0..excitatory).map(move |place| rank * neurons + place))
    }
}
