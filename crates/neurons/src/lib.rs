//! Spiking network of cortical columns with plastic synapses.
//!
//! Columns of Izhikevich neurons lie on a periodic grid. Excitatory neurons have synapses in their own column and in those
//! up to three columns away, inhibitory ones in their own. Delays are 1 to 20 ms; synapses learn by the timing of spikes
//! (Izhikevich 2006, program `spnet`).
//!
//! [`Network`] says who is connected with whom, [`Population`] has the neurons and synapses of one node. Both know no
//! network of computers. [`simulation`] runs populations on the nodes of a [`Fabric`](millstream_fabric::Fabric). Currents
//! and weights are integers (2⁻²⁰ mV), so their sums do not depend on the order of arrival. The spikes are the same for
//! every number and shape of nodes.

mod cut;
mod dynamics;
pub mod kernel;
mod network;
mod plain;
mod plasticity;
mod population;
pub mod simulation;
mod synapses;

pub use cut::{ColumnCut, reaches};
pub use network::{ColumnId, Model, Network, NetworkError, NeuronId, REACH, Synapse, UNITS_PER_MV};
pub use plasticity::PlasticityTables;
pub use population::{Population, StepCounts};
