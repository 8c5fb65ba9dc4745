//! A population on the card of its node: the kernel `neurons` computes, and spikes go from card to card.

use millstream_application::{
    ApplicationError, CardMessages, HEADER_BYTES, NodeGroup, Place, TimeSplit, allocate_on_card, attach,
};
use millstream_fabric::{Fabric, FabricError, KernelWords, RegionId};
use millstream_torus_core::NodeNumber;

use crate::kernel::{self, ARRAYS, Description, Operation, PeerMessages, VALUE_BYTES};
use crate::network::{ColumnId, Network, NeuronId};
use crate::population::{Population, StepCounts};

/// The population of a node in the memory of its card.
#[derive(Debug)]
pub(super) struct CardPopulation {
    network: Network,
    columns: Vec<ColumnId>,
    arrays: [RegionId; ARRAYS],
    /// The list of neurons that fire.
    firing: RegionId,
    /// The arrivals of the last steps, between host and card.
    arrivals: RegionId,
    arrivals_at: u64,
    arrivals_bytes: usize,
    messages: CardMessages,
    synapses: usize,
    step: u64,
    counts: StepCounts,
}

impl CardPopulation {
    /// Moves a population to the card of this node; all nodes call this. `peers_of` has the peers of each own column.
    pub(super) fn new<F: Fabric>(
        group: &mut NodeGroup<F>,
        mut population: Population,
        peers: &[NodeNumber],
        peers_of: &[Vec<usize>],
    ) -> Result<CardPopulation, ApplicationError> {
        let (network, columns) = (population.network.clone(), population.columns.clone());
        let list = HEADER_BYTES + size_of::<NeuronId>() * population.neurons();
        let timeout = group.timeout();
        let fabric = &mut group.fabric;
        let messages = CardMessages::new(fabric, peers, list, 0, timeout)?;
        let slots = population.synapses.source_columns.len() * network.neurons as usize;
        let arrivals_bytes = (1 + slots) * 4 * network.longest_delay as usize;
        let (firing, firing_at) = allocate_on_card(fabric, list, "spikes")?;
        let (arrivals, arrivals_at) = allocate_on_card(fabric, arrivals_bytes, "spikes")?;
        let mut regions = [RegionId(0); ARRAYS];
        let mut places = [Place::default(); ARRAYS];
        for (i, bytes) in population.array_bytes().into_iter().enumerate() {
            let (region, at) = allocate_on_card(fabric, bytes.len(), "neurons and synapses")?;
            (regions[i], places[i]) = (region, Place { at, count: (bytes.len() / VALUE_BYTES[i]) as u64 });
        }
        let of_peer = |i: usize| PeerMessages {
            outgoing: messages.outgoing_at(i),
            incoming: [0, 1].map(|parity| messages.incoming_at(i, parity)),
            ranks: (0..)
                .zip(peers_of)
                .filter(|(_, peers)| peers.contains(&i))
                .map(|(rank, _)| rank)
                .collect(),
        };
        let description = Description {
            network: network.clone(),
            columns: columns.clone(),
            arrays: places,
            firing: firing_at,
            peers: (0..peers.len()).map(of_peer).collect(),
        };
        let synapses = population.synapses();
        let mut card = CardPopulation {
            network,
            columns,
            arrays: regions,
            firing,
            arrivals,
            arrivals_at,
            arrivals_bytes,
            messages,
            synapses,
            step: 0,
            counts: StepCounts::default(),
        };
        card.store_arrays(fabric, &mut population)?;
        attach(fabric, kernel::NAME, &description, "the description of the network", |at, bytes| {
            Operation::Attach { at, bytes }.to_words()
        })?;
        card.set_arrivals(fabric, &population)?;
        Ok(card)
    }

    fn store_arrays<F: Fabric>(
        &self,
        fabric: &mut F,
        population: &mut Population,
    ) -> Result<(), FabricError> {
        for (&region, bytes) in self.arrays.iter().zip(population.array_bytes()) {
            fabric.store(region, 0, bytes)?;
        }
        Ok(())
    }

    fn set_arrivals<F: Fabric>(
        &mut self,
        fabric: &mut F,
        population: &Population,
    ) -> Result<(), FabricError> {
        let bytes = population.arrivals_bytes();
        fabric.store(self.arrivals, 0, &bytes)?;
        let (at, step) = (self.arrivals_at, population.step());
        run(fabric, Operation::SetArrivals { at, bytes: bytes.len() as u64, step })?;
        self.step = step;
        Ok(())
    }

    /// A copy in host memory. No spike of this second waits: a second has just ended.
    pub(super) fn load<F: Fabric>(&self, fabric: &mut F) -> Result<Population, ApplicationError> {
        let mut population = Population::new(&self.network, &self.columns)
            .map_err(|error| ApplicationError::Parameters(error.to_string()))?;
        for (&region, bytes) in self.arrays.iter().zip(population.array_bytes()) {
            fabric.load(region, 0, bytes)?;
        }
        let (at, room) = (self.arrivals_at, self.arrivals_bytes as u64);
        let [length, ..] = run(fabric, Operation::Arrivals { at, bytes: room })?;
        let mut bytes = vec![0; (length as usize).min(self.arrivals_bytes)];
        fabric.load(self.arrivals, 0, &mut bytes)?;
        if !population.set_arrivals(&bytes, self.step) {
            return Err(ApplicationError::Message { bytes: bytes.len() });
        }
        Ok(population)
    }

    /// Number of synapses here.
    pub(super) fn synapses(&self) -> usize {
        self.synapses
    }

    /// The next step (ms).
    pub(super) fn step_number(&self) -> u64 {
        self.step
    }

    /// What happened since the last call.
    pub(super) fn take_counts(&mut self) -> StepCounts {
        std::mem::take(&mut self.counts)
    }

    /// Makes a step. Returns the neurons that fired, if they are `wanted`.
    pub(super) fn step<F: Fabric>(
        &mut self,
        fabric: &mut F,
        times: &mut TimeSplit,
        wanted: bool,
    ) -> Result<Vec<NeuronId>, ApplicationError> {
        times.communicating(|| self.messages.begin(fabric))?;
        times.computing(|| run(fabric, Operation::Fire))?;
        let length = |neurons| HEADER_BYTES + size_of::<NeuronId>() * neurons as usize;
        let parity = self.messages.exchange_with_headers(fabric, length, times)? as u64;
        let results = times.computing(|| run(fabric, Operation::Step { parity }))?;
        let [excitatory, inhibitory, events, raster, ..] = results;
        self.counts = self.counts.plus(StepCounts { excitatory, inhibitory, events, raster });
        self.step += 1;
        if !wanted {
            return Ok(Vec::new());
        }
        let neurons = self.columns.len() * self.network.neurons as usize;
        let mut bytes = vec![0; size_of::<NeuronId>() * count(fabric, self.firing, 0)?.min(neurons)];
        fabric.load(self.firing, HEADER_BYTES as u64, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|&neuron| NeuronId::from_le_bytes(neuron)).collect())
    }
}

fn run<F: Fabric>(fabric: &mut F, operation: Operation) -> Result<KernelWords, FabricError> {
    fabric.run_kernel(kernel::NAME, &operation.to_words())
}

/// The number of neurons in a list.
fn count<F: Fabric>(fabric: &F, region: RegionId, offset: u64) -> Result<usize, FabricError> {
    let mut header = [0; HEADER_BYTES];
    fabric.load(region, offset, &mut header)?;
    Ok(u64::from_le_bytes(header) as usize)
}
