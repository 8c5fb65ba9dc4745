//! A network on the nodes of a torus.

mod card;
pub mod picture;
mod resume;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use millstream_application::checkpoint::{CheckpointFolder, RunIdentity};
use millstream_application::{ApplicationError, FailAt, NodeGroup, NodeTimes, TimeSplit, TorusApplication};
use millstream_fabric::{Fabric, Neighbourhood};
use millstream_torus_core::NodeNumber;
use serde::{Deserialize, Serialize};

use card::CardPopulation;

use crate::cut::{ColumnCut, reaches};
use crate::network::{Network, NeuronId};
use crate::population::{Population, SECOND, StepCounts};

/// How long a node waits for another one.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Spikes that travel to a node at once, at first: more go in several rounds.
const MESSAGE_SPIKES: usize = 4096;
/// Neurons of the raster, about.
const RASTER_NEURONS: u64 = 400;

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulationOptions {
    /// The network.
    pub network: Network,
    /// Steps of 1 ms in all.
    pub steps: u64,
    /// Folder of checkpoints.
    pub checkpoint: Option<PathBuf>,
    /// Seconds of the network between checkpoints.
    pub checkpoint_every: u64,
    /// Whether to begin with the folder's checkpoint.
    pub resume: bool,
    /// A node that fails on purpose, at a step.
    pub fail_at: Option<FailAt>,
    /// Steps of the raster at the end of the run.
    pub raster: u64,
    /// Whether neurons and synapses are in the memory of the nodes' cards, whose kernel `neurons` computes. The fabric registers
    /// memory of the card, as [`OnCard`](millstream_fabric::OnCard) does.
    pub on_card: bool,
}

/// One second of the network, or what the run had of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SecondReport {
    /// Steps so far.
    pub step: u64,
    /// Spikes.
    pub spikes: u64,
    /// Mean rate of excitatory neurons (Hz).
    pub excitatory_hz: f64,
    /// Mean rate of inhibitory neurons (Hz).
    pub inhibitory_hz: f64,
    /// Arrivals at synapses.
    pub events: u64,
    /// Hash of all spikes.
    pub raster: u64,
}

/// A spike of the raster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RasterSpike {
    /// The step.
    pub step: u32,
    /// The neuron.
    pub neuron: NeuronId,
}

/// What a run found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SimulationReport {
    /// The network.
    pub network: Network,
    /// Nodes on each axis.
    pub dimensions: String,
    /// Steps in all.
    pub steps: u64,
    /// The step that this run began after.
    pub resumed_after: Option<u64>,
    /// Neurons.
    pub neurons: u64,
    /// Synapses.
    pub synapses: u64,
    /// Time of the steps, without checkpoints (s).
    pub wall_s: f64,
    /// Arrivals at synapses per second.
    pub events_per_s: f64,
    /// Time of an arrival (ns).
    pub ns_per_event: f64,
    /// Mean rate of all neurons (Hz).
    pub mean_hz: f64,
    /// Wall seconds for a second of the network, divided by the mean rate.
    pub wall_s_per_s_per_hz: f64,
    /// The seconds.
    pub seconds: Vec<SecondReport>,
    /// Hash of the final potentials, recoveries, weights and derivatives.
    pub state: u64,
    /// The times of the nodes.
    pub nodes: Vec<NodeTimes>,
    /// Spikes of some neurons at the end of the run.
    #[serde(skip)]
    pub raster: Vec<RasterSpike>,
}

impl TorusApplication for SimulationOptions {
    type Report = SimulationReport;

    fn run<F: Fabric>(&self, fabric: F) -> Result<SimulationReport, ApplicationError> {
        self.network.check().map_err(|error| ApplicationError::Parameters(error.to_string()))?;
        if i32::try_from(self.steps).is_err() {
            return Err(ApplicationError::Parameters(format!("{} steps exceed 2^31", self.steps)));
        }
        Node::new(NodeGroup::new(fabric, TIMEOUT)?, self)?.run()
    }
}

/// Where a node's population is.
enum PopulationPlace {
    /// In host memory; this process computes.
    Host { population: Population, neighbourhood: Neighbourhood },
    /// In the memory of the node's card; the card computes.
    Card(CardPopulation),
    /// Nowhere, while the run begins.
    Unplaced(Population),
}

/// The state of a node during a run.
struct Node<'o, F> {
    options: &'o SimulationOptions,
    group: NodeGroup<F>,
    place: PopulationPlace,
    /// The nodes with neurons that own columns reach.
    peers: Vec<NodeNumber>,
    /// For each own column, the peers that it reaches.
    peers_of: Vec<Vec<usize>>,
    times: TimeSplit,
    wall: Duration,
    raster: Vec<RasterSpike>,
}

impl<'o, F: Fabric> Node<'o, F> {
    fn new(group: NodeGroup<F>, options: &'o SimulationOptions) -> Result<Node<'o, F>, ApplicationError> {
        let network = &options.network;
        let cut = ColumnCut::new(network, group.dimensions());
        let own = cut.columns(group.here());
        let (mut peers, mut peers_of) = (Vec::new(), vec![Vec::new(); own.len()]);
        for (node, theirs) in (0..).map(NodeNumber).zip(cut.all()).filter(|(node, _)| *node != group.here()) {
            let reached: Vec<usize> = (0..own.len())
                .filter(|&rank| theirs.iter().any(|&to| reaches(network, own[rank], to)))
                .collect();
            if !reached.is_empty() {
                reached.into_iter().for_each(|rank| peers_of[rank].push(peers.len()));
                peers.push(node);
            }
        }
        let population = Population::new(network, &own)
            .map_err(|error| ApplicationError::Parameters(error.to_string()))?;
        Ok(Node {
            options,
            group,
            place: PopulationPlace::Unplaced(population),
            peers,
            peers_of,
            times: TimeSplit::default(),
            wall: Duration::ZERO,
            raster: Vec::new(),
        })
    }

    fn run(&mut self) -> Result<SimulationReport, ApplicationError> {
        let options = self.options;
        let folder = options.checkpoint.as_deref().map(CheckpointFolder::create).transpose()?;
        let mut seconds = self.begin(folder.as_ref())?;
        let start = self.step_number();
        if start > options.steps {
            let reason = format!("--duration {}: the checkpoint is that of {start} ms", options.steps);
            return Err(ApplicationError::Parameters(reason));
        }
        self.group.barrier()?;
        while self.step_number() < options.steps {
            let begin = Instant::now();
            self.step()?;
            self.wall += begin.elapsed();
            let step = self.step_number();
            let is_second = step.is_multiple_of(SECOND);
            if is_second || step == options.steps {
                seconds.push(self.second(step, seconds.last())?);
            }
            if let Some(folder) = folder.as_ref().filter(|_| is_second)
                && (step / SECOND).is_multiple_of(options.checkpoint_every)
            {
                let bytes = self.with_population(resume::part)?;
                // The rows are plain data.
                let progress = || serde_json::to_value(&seconds).unwrap_or_default();
                folder.save(&mut self.group, &identity(options), step, &bytes, progress)?;
            }
        }
        self.report(start, seconds)
    }

    /// Puts the population where it belongs, in the folder's state if the run resumes. Returns the seconds so far.
    fn begin(&mut self, folder: Option<&CheckpointFolder>) -> Result<Vec<SecondReport>, ApplicationError> {
        let options = self.options;
        let empty = PopulationPlace::Unplaced(Population::without_arrays(&options.network, &[]));
        let unplaced = std::mem::replace(&mut self.place, empty);
        let PopulationPlace::Unplaced(mut population) = unplaced else { return Ok(Vec::new()) };
        let seconds = match folder.filter(|_| options.resume) {
            Some(folder) => resume::load(folder, &identity(options), &mut population)?,
            None => Vec::new(),
        };
        self.place = if options.on_card {
            let (peers, peers_of) = (&self.peers, &self.peers_of);
            PopulationPlace::Card(CardPopulation::new(&mut self.group, population, peers, peers_of)?)
        } else {
            let timeout = self.group.timeout();
            let capacity = MESSAGE_SPIKES * size_of::<NeuronId>();
            let fabric = &mut self.group.fabric;
            let neighbourhood = Neighbourhood::new(fabric, &self.peers, capacity, timeout)?;
            PopulationPlace::Host { population, neighbourhood }
        };
        Ok(seconds)
    }

    /// The next step (ms).
    fn step_number(&self) -> u64 {
        match &self.place {
            PopulationPlace::Host { population, .. } | PopulationPlace::Unplaced(population) => {
                population.step()
            }
            PopulationPlace::Card(card) => card.step_number(),
        }
    }

    /// A function of the population, or of a copy of the card's.
    fn with_population<R>(&mut self, work: impl FnOnce(&Population) -> R) -> Result<R, ApplicationError> {
        match &self.place {
            PopulationPlace::Host { population, .. } | PopulationPlace::Unplaced(population) => {
                Ok(work(population))
            }
            PopulationPlace::Card(card) => Ok(work(&card.load(&mut self.group.fabric)?)),
        }
    }

    fn step(&mut self) -> Result<(), ApplicationError> {
        let step = self.step_number();
        if self.options.fail_at.is_some_and(|fail| fail.step == step && fail.node == self.group.here()) {
            return Err(ApplicationError::ToldToFail { step });
        }
        let is_shown = self.options.steps.saturating_sub(step) <= self.options.raster;
        let fabric = &mut self.group.fabric;
        let shown = match &mut self.place {
            PopulationPlace::Host { population, neighbourhood } => {
                host_step(fabric, population, neighbourhood, &self.peers_of, &mut self.times)?;
                if is_shown { population.firing().to_vec() } else { Vec::new() }
            }
            PopulationPlace::Card(card) => card.step(fabric, &mut self.times, is_shown)?,
            PopulationPlace::Unplaced(_) => Vec::new(),
        };
        self.note_raster(step, &shown);
        Ok(())
    }

    fn note_raster(&mut self, step: u64, firing: &[NeuronId]) {
        let network = &self.options.network;
        let all = u64::from(network.columns()) * u64::from(network.neurons);
        let every = all.div_ceil(RASTER_NEURONS) as u32;
        let shown = firing.iter().filter(|&&neuron| neuron.is_multiple_of(every));
        self.raster.extend(shown.map(|&neuron| RasterSpike { step: step as u32, neuron }));
    }

    /// Adds up the counts of all nodes since the last second.
    fn second(&mut self, step: u64, last: Option<&SecondReport>) -> Result<SecondReport, ApplicationError> {
        let own = match &mut self.place {
            PopulationPlace::Host { population, .. } | PopulationPlace::Unplaced(population) => {
                population.take_counts()
            }
            PopulationPlace::Card(card) => card.take_counts(),
        };
        let mut bytes = [0; 32];
        let words = [own.excitatory, own.inhibitory, own.events, own.raster];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        let all = self.group.all_blocks(&bytes)?;
        let counts = all.iter().map(|bytes| {
            let mut words = bytes.as_chunks().0.iter().map(|&word| u64::from_le_bytes(word));
            let mut next = || words.next().unwrap_or(0);
            StepCounts { excitatory: next(), inhibitory: next(), events: next(), raster: next() }
        });
        let counts = counts.fold(StepCounts::default(), StepCounts::plus);
        let network = &self.options.network;
        let seconds = (step - last.map_or(0, |last| last.step)) as f64 / SECOND as f64;
        let rate = |spikes: u64, neurons: u32| {
            let neurons = f64::from(neurons) * f64::from(network.columns());
            spikes as f64 / neurons.max(1.0) / seconds
        };
        Ok(SecondReport {
            step,
            spikes: counts.excitatory + counts.inhibitory,
            excitatory_hz: rate(counts.excitatory, network.excitatory()),
            inhibitory_hz: rate(counts.inhibitory, network.neurons - network.excitatory()),
            events: counts.events,
            raster: counts.raster,
        })
    }

    fn report(
        &mut self,
        start: u64,
        seconds: Vec<SecondReport>,
    ) -> Result<SimulationReport, ApplicationError> {
        let options = self.options;
        let sum = |all: Vec<[u8; 8]>| all.into_iter().map(u64::from_le_bytes).fold(0, u64::wrapping_add);
        let own = self.with_population(Population::checksum)?;
        let state = sum(self.group.all_blocks(&own.to_le_bytes())?);
        let own = match &self.place {
            PopulationPlace::Host { population, .. } | PopulationPlace::Unplaced(population) => {
                population.synapses()
            }
            PopulationPlace::Card(card) => card.synapses(),
        };
        let synapses = sum(self.group.all_blocks(&(own as u64).to_le_bytes())?);
        let walls = self.group.all_blocks(&(self.wall.as_nanos() as u64).to_le_bytes())?;
        let wall = walls.into_iter().map(u64::from_le_bytes).max().unwrap_or(0) as f64 / 1e9;
        let nodes = self.group.all_blocks(&self.times.to_bytes())?;
        let mut raster = Vec::new();
        for bytes in self.group.gather(&raster_bytes(&self.raster))? {
            for [a, b, c, d, e, f, g, h] in bytes.as_chunks::<8>().0 {
                let (step, neuron) = (u32::from_le_bytes([*a, *b, *c, *d]), [*e, *f, *g, *h]);
                raster.push(RasterSpike { step, neuron: NeuronId::from_le_bytes(neuron) });
            }
        }
        raster.sort_unstable();
        let network = &options.network;
        let neurons = u64::from(network.columns()) * u64::from(network.neurons);
        let run = || seconds.iter().filter(|second| second.step > start);
        let events = run().map(|second| second.events).sum::<u64>() as f64;
        let simulated = (options.steps - start.min(options.steps)) as f64 / SECOND as f64;
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        let spikes = run().map(|second| second.spikes).sum::<u64>() as f64;
        let mean_hz = ratio(spikes / neurons as f64, simulated);
        Ok(SimulationReport {
            network: network.clone(),
            dimensions: self.group.dimensions().to_string(),
            steps: options.steps,
            resumed_after: (start > 0).then_some(start),
            neurons,
            synapses,
            wall_s: wall,
            events_per_s: ratio(events, wall),
            ns_per_event: ratio(wall * 1e9, events),
            mean_hz,
            wall_s_per_s_per_hz: ratio(ratio(wall, simulated), mean_hz),
            seconds,
            state,
            nodes: nodes.iter().map(NodeTimes::from_bytes).collect(),
            raster,
        })
    }
}

/// A step of a population in host memory: spikes of earlier steps are delivered while those of this step travel.
fn host_step<F: Fabric>(
    fabric: &mut F,
    population: &mut Population,
    neighbourhood: &mut Neighbourhood,
    peers_of: &[Vec<usize>],
    times: &mut TimeSplit,
) -> Result<(), ApplicationError> {
    times.computing(|| {
        population.fire();
    });
    let peers = neighbourhood.peers().len();
    let messages = times.communicating(|| population.messages(peers_of, peers));
    let before = neighbourhood.statistics();
    neighbourhood.start(fabric, messages)?;
    times.computing(|| {
        population.deliver_earlier();
        population.receive_own();
    });
    let messages = neighbourhood.finish(fabric)?;
    times.add_exchange(before, neighbourhood.statistics());
    times.communicating(|| {
        for message in &messages {
            let (spikes, rest) = message.as_chunks();
            let spikes = spikes.iter().map(|&bytes| NeuronId::from_le_bytes(bytes));
            if !rest.is_empty() || !population.receive(spikes) {
                return Err(ApplicationError::Message { bytes: message.len() });
            }
        }
        Ok(())
    })?;
    times.computing(|| {
        population.deliver_new();
        population.integrate();
    });
    Ok(())
}

fn raster_bytes(raster: &[RasterSpike]) -> Vec<u8> {
    let words = raster.iter().flat_map(|spike| [spike.step, spike.neuron]);
    words.flat_map(u32::to_le_bytes).collect()
}

/// What a run must have in common with another to resume it.
fn identity(options: &SimulationOptions) -> RunIdentity<'static> {
    // The network is plain data.
    let parameters = serde_json::to_value(&options.network).unwrap_or_default();
    RunIdentity { application: "neurons", parameters }
}
