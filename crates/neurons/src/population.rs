//! The neurons and synapses of one node.
//!
//! A step of 1 ms, in the order of `spnet`:
//! 1. [`Population::fire`]: neurons above the threshold are reset; their spikes go to all nodes with targets;
//! 2. [`Population::deliver_earlier`]: arrivals of spikes of earlier steps, which need no other node;
//! 3. [`Population::receive`] and [`Population::deliver_new`]: the spikes of this step, and their first arrivals;
//! 4. [`Population::integrate`]: the equations; at the end of a second the weights.
//!
//! A synapse changes when a spike arrives, also for the target's spikes since the last arrival. So only arrivals and the end
//! of a second touch synapses.

use millstream_application::Array;
use std::collections::VecDeque;

use millstream_application::mix;

use crate::dynamics::{B, EXCITATORY, INHIBITORY, RESET, THRESHOLD, advance};
use crate::network::{ColumnId, Model, Network, NetworkError, NeuronId, UNITS_PER_MV};
use crate::plain::Plain;
use crate::plasticity::PlasticityTables;
use crate::synapses::{NEVER, SourceSlot, Synapses};

/// Steps of a second.
pub(crate) const SECOND: u64 = 1000;
/// Current of the input (2⁻²⁰ mV).
const INPUT: i64 = 20 * UNITS_PER_MV as i64;

/// Spikes of a neuron: the last one, and the list of this second's ones.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Fired {
    /// Step of the last spike; [`NEVER`] before the first.
    pub(crate) last: i32,
    /// Index of the last spike in the list of this second, plus one; 0 if there is none.
    pub(crate) newest: u32,
}

// SAFETY: two numbers of 32 bits.
unsafe impl Plain for Fired {}

/// A spike of this second.
#[derive(Clone, Copy, Debug)]
struct RecentSpike {
    step: i32,
    /// As [`Fired::newest`], of the neuron's spike before.
    before: u32,
}

/// What happened on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Spikes of excitatory neurons.
    pub excitatory: u64,
    /// Spikes of inhibitory neurons.
    pub inhibitory: u64,
    /// Arrivals at synapses.
    pub events: u64,
    /// Sum over spikes of a hash of step and neuron; the sum over nodes does not depend on the cut.
    pub raster: u64,
}

impl StepCounts {
    /// The sum of both.
    #[must_use]
    pub fn plus(self, other: StepCounts) -> StepCounts {
        StepCounts {
            excitatory: self.excitatory + other.excitatory,
            inhibitory: self.inhibitory + other.inhibitory,
            events: self.events + other.events,
            raster: self.raster.wrapping_add(other.raster),
        }
    }
}

/// The neurons and synapses of some columns.
#[derive(Clone, Debug)]
pub struct Population {
    pub(crate) network: Network,
    pub(crate) columns: Vec<ColumnId>,
    pub(crate) synapses: Synapses,
    tables: PlasticityTables,
    pub(crate) v: Array<f64>,
    pub(crate) u: Array<f64>,
    pub(crate) currents: Array<i64>,
    pub(crate) fired: Array<Fired>,
    recent: Vec<RecentSpike>,
    /// Sources that fired in this step and those before, newest first.
    pub(crate) arrivals: VecDeque<Vec<SourceSlot>>,
    /// Own neurons that fired in this step.
    firing: Vec<NeuronId>,
    /// Places by the step, modulo the period, in which they fire; empty if that depends on the potential.
    schedule: Vec<Vec<u32>>,
    /// The next step.
    pub(crate) step: u64,
    counts: StepCounts,
}

impl Population {
    /// The population of some columns, at rest.
    ///
    /// # Errors
    /// [`NetworkError::NodeSynapses`] if these columns have too many synapses for one node.
    pub fn new(network: &Network, columns: &[ColumnId]) -> Result<Population, NetworkError> {
        let neurons = columns.len() * network.neurons as usize;
        Ok(Population::with(network, columns, Synapses::new(network, columns)?, neurons))
    }

    /// A population at rest with these synapses, and arrays of `neurons` neurons.
    pub(crate) fn with(
        network: &Network,
        columns: &[ColumnId],
        synapses: Synapses,
        neurons: usize,
    ) -> Population {
        let delays = network.longest_delay as usize;
        Population {
            network: network.clone(),
            columns: columns.to_vec(),
            synapses,
            tables: PlasticityTables::default(),
            v: vec![RESET; neurons].into(),
            u: vec![B * RESET; neurons].into(),
            currents: vec![0; neurons].into(),
            fired: vec![Fired { last: NEVER, newest: 0 }; neurons].into(),
            recent: Vec::new(),
            arrivals: (0..delays).map(|_| Vec::new()).collect(),
            firing: Vec::new(),
            schedule: schedule(network, columns),
            step: 0,
            counts: StepCounts::default(),
        }
    }

    /// Number of neurons here.
    #[must_use]
    pub fn neurons(&self) -> usize {
        self.v.len()
    }

    /// Number of synapses here.
    #[must_use]
    pub fn synapses(&self) -> usize {
        self.synapses.stored.len()
    }

    /// The next step (ms).
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// What happened since the last call.
    pub fn take_counts(&mut self) -> StepCounts {
        std::mem::take(&mut self.counts)
    }

    /// The neuron at a place of this node.
    pub(crate) fn id(&self, place: usize) -> NeuronId {
        let neurons = self.network.neurons as usize;
        self.columns[place / neurons] * self.network.neurons + (place % neurons) as u32
    }

    /// Begins a step: returns the neurons here that fire in it, by number.
    pub fn fire(&mut self) -> &[NeuronId] {
        let mut newest = self.arrivals.pop_back().unwrap_or_default();
        newest.clear();
        self.arrivals.push_front(newest);
        self.firing.clear();
        if self.schedule.is_empty() {
            for place in 0..self.v.len() {
                if self.v[place] >= THRESHOLD {
                    self.v[place] = RESET;
                    self.u[place] += if self.is_excitatory(place) { EXCITATORY.1 } else { INHIBITORY.1 };
                    self.note_spike(place);
                }
            }
        } else {
            let phase = (self.step % self.schedule.len() as u64) as usize;
            let places = std::mem::take(&mut self.schedule[phase]);
            places.iter().for_each(|&place| self.note_spike(place as usize));
            self.schedule[phase] = places;
        }
        self.add_input();
        &self.firing
    }

    fn is_excitatory(&self, place: usize) -> bool {
        place % (self.network.neurons as usize) < self.network.excitatory() as usize
    }

    fn note_spike(&mut self, place: usize) {
        let (id, step) = (self.id(place), self.step as i32);
        if self.network.is_plastic {
            let before = self.fired[place].newest;
            self.recent.push(RecentSpike { step, before });
            self.fired[place] = Fired { last: step, newest: self.recent.len() as u32 };
        }
        if self.is_excitatory(place) {
            self.counts.excitatory += 1;
        } else {
            self.counts.inhibitory += 1;
        }
        self.counts.raster = self.counts.raster.wrapping_add(mix(self.step << 32 | u64::from(id)));
        self.firing.push(id);
    }

    /// One neuron of each column gets the input of this step.
    fn add_input(&mut self) {
        for (rank, &column) in self.columns.iter().enumerate() {
            let place = self.network.input(column, self.step) % self.network.neurons;
            self.currents[rank * self.network.neurons as usize + place as usize] += INPUT;
        }
    }

    /// Takes the spikes of this step of sources that may have targets here. False if one cannot, or there are more spikes than
    /// sources: each fires at most once in a step.
    #[must_use]
    pub fn receive(&mut self, spikes: impl IntoIterator<Item = NeuronId>) -> bool {
        let most = self.synapses.sources();
        for source in spikes {
            let Some(slot) = self.synapses.slot(source).filter(|_| self.arrivals[0].len() < most) else {
                return false;
            };
            self.arrivals[0].push(slot);
        }
        true
    }

    /// The neurons here that fire in this step.
    #[must_use]
    pub fn firing(&self) -> &[NeuronId] {
        &self.firing
    }

    /// Takes this node's own spikes of this step.
    pub fn receive_own(&mut self) {
        let firing = std::mem::take(&mut self.firing);
        // Columns reach themselves.
        let _ = self.receive(firing.iter().copied());
        self.firing = firing;
    }

    /// Executes this step's arrivals of spikes of earlier steps.
    pub fn deliver_earlier(&mut self) {
        let arrivals = std::mem::take(&mut self.arrivals);
        arrivals.iter().enumerate().skip(1).for_each(|(age, slots)| self.deliver(age, slots));
        self.arrivals = arrivals;
    }

    /// Executes this step's arrivals of this step's spikes.
    pub fn deliver_new(&mut self) {
        let slots = std::mem::take(&mut self.arrivals[0]);
        self.deliver(0, &slots);
        self.arrivals[0] = slots;
    }

    fn deliver(&mut self, age: usize, slots: &[SourceSlot]) {
        for &slot in slots {
            let group = self.synapses.group(slot, age);
            self.counts.events += group.len() as u64;
            if self.network.is_plastic && self.network.is_excitatory(slot) {
                self.deliver_plastic(group);
            } else {
                for synapse in &self.synapses.stored[group] {
                    self.currents[synapse.target as usize] += i64::from(synapse.weight);
                }
            }
        }
    }

    fn deliver_plastic(&mut self, group: std::ops::Range<usize>) {
        let step = self.step as i32;
        let synapses = self.synapses.stored[group.clone()].iter();
        for (synapse, plastic) in synapses.zip(&mut self.synapses.plastic[group]) {
            let target = synapse.target as usize;
            self.currents[target] += i64::from(synapse.weight);
            let fired = self.fired[target];
            plastic.derivative += pending(&self.tables, &self.recent, fired, plastic.arrived);
            if fired.last != NEVER {
                plastic.derivative -= self.tables.depression((step - fired.last) as u32);
            }
            plastic.arrived = step;
        }
    }

    /// Ends a step.
    pub fn integrate(&mut self) {
        if self.network.model == Model::Izhikevich {
            let (neurons, excitatory) = (self.network.neurons as usize, self.network.excitatory() as usize);
            for first in (0..self.v.len()).step_by(neurons) {
                let kinds = [
                    (first..first + excitatory, EXCITATORY),
                    (first + excitatory..first + neurons, INHIBITORY),
                ];
                for (range, (rate, _)) in kinds {
                    let (v, u) = (&mut self.v[range.clone()], &mut self.u[range.clone()]);
                    advance(v, u, &mut self.currents[range], rate);
                }
            }
        } else {
            self.currents.fill(0);
        }
        self.step += 1;
        if self.step.is_multiple_of(SECOND) && self.network.is_plastic {
            self.end_second();
        }
    }

    fn end_second(&mut self) {
        for slot in self.synapses.excitatory_slots(self.network.excitatory()) {
            let all = self.synapses.of(slot);
            let synapses = self.synapses.stored[all.clone()].iter_mut();
            for (synapse, plastic) in synapses.zip(&mut self.synapses.plastic[all]) {
                let fired = self.fired[synapse.target as usize];
                let derivative =
                    plastic.derivative + pending(&self.tables, &self.recent, fired, plastic.arrived);
                (synapse.weight, plastic.derivative) =
                    PlasticityTables::after_second(synapse.weight, derivative);
            }
        }
        self.recent.clear();
        self.fired.iter_mut().for_each(|fired| fired.newest = 0);
    }

    /// Makes a step of a population without other nodes.
    pub fn step_alone(&mut self) -> Vec<NeuronId> {
        let firing = self.fire().to_vec();
        self.deliver_earlier();
        self.receive_own();
        self.deliver_new();
        self.integrate();
        firing
    }

    /// The sum of all weights here (2⁻²⁰ mV).
    #[must_use]
    pub fn weight_sum(&self) -> i64 {
        self.synapses.stored.iter().map(|synapse| i64::from(synapse.weight)).sum()
    }

    /// A checksum over the neurons and synapses here, the sum over nodes being independent of the cut.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        let mut sum = 0_u64;
        for place in 0..self.v.len() {
            let word = mix(u64::from(self.id(place)) ^ self.v[place].to_bits());
            sum = sum.wrapping_add(mix(word ^ self.u[place].to_bits()));
        }
        for (rank, _) in self.synapses.source_columns.iter().enumerate() {
            for place in 0..self.network.neurons {
                let slot = rank as u32 * self.network.neurons + place;
                let source = u64::from(self.synapses.source(slot));
                for at in self.synapses.of(slot) {
                    let synapse = self.synapses.stored[at];
                    let target = u64::from(self.id(synapse.target as usize));
                    let derivative = self.synapses.plastic.get(at).map_or(0, |plastic| plastic.derivative);
                    let values = u64::from(synapse.weight as u32) << 32 | u64::from(derivative as u32);
                    sum = sum.wrapping_add(mix(mix(source << 32 | target) ^ values));
                }
            }
        }
        sum
    }
}

/// Places by the step in which they fire, for neurons that ignore their input.
fn schedule(network: &Network, columns: &[ColumnId]) -> Vec<Vec<u32>> {
    let Model::IgnoreAndFire { period } = network.model else { return Vec::new() };
    let mut schedule = vec![Vec::new(); period as usize];
    let ids = columns.iter().flat_map(|column| column * network.neurons..(column + 1) * network.neurons);
    ids.zip(0..).for_each(|(id, place)| schedule[network.phase(id, period) as usize].push(place));
    schedule
}

/// What the target's spikes since the last arrival at a synapse add to its derivative.
#[inline]
fn pending(tables: &PlasticityTables, recent: &[RecentSpike], fired: Fired, arrived: i32) -> i32 {
    let (mut sum, mut at) = (0, fired.newest);
    if arrived == NEVER || fired.last <= arrived {
        return 0;
    }
    while let Some(spike) = (at as usize).checked_sub(1).map(|index| recent[index]) {
        if spike.step <= arrived {
            break;
        }
        sum += tables.potentiation((spike.step - 1 - arrived) as u32);
        at = spike.before;
    }
    sum
}
