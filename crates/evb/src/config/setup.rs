//! A run that can be started: what all units get to know of the configuration and the inputs.

use crate::core::{Bytes, EventNumber, Plan};
use crate::layout::{KernelAreas, SlotLayout, landing_bytes};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// A run that can be started. The manager hands it to every unit at wire-up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Name of the run.
    pub name: String,
    /// Tells this run's cards from those of other runs on the same hosts; the run's name, unless whoever
    /// starts the units says otherwise.
    pub instance: String,
    /// How long to look for work before blocking: worth as much as a wake-up costs where every unit has a
    /// processor, and nothing where units share one.
    pub spin: Duration,
    /// The RDMA device to use: `auto`, `hardware`, `soft` or a device's name.
    pub device: String,
    /// Where the manager listens.
    pub listen: String,
    /// What the state machines work from.
    pub plan: Plan,
    /// The places of the sources in a slot.
    pub layout: SlotLayout,
    /// Number of the inputs' first event.
    pub file_first: EventNumber,
    /// Events of the inputs; a replay repeats them under running numbers.
    pub file_events: u64,
    /// The readout units.
    pub readouts: Vec<ReadoutSetup>,
    /// The builder units.
    pub builders: Vec<BuilderSetup>,
    /// Where accepted events go; none: nowhere.
    pub output: Option<OutputSetup>,
    /// Stream file with the decisions that the kernels have to reproduce.
    pub reference_decisions: Option<PathBuf>,
}

/// A readout unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadoutSetup {
    /// Its name.
    pub name: String,
    /// Stream file with its sources.
    pub input: PathBuf,
}

/// A builder unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderSetup {
    /// Its name.
    pub name: String,
    /// Where its events land.
    pub landing: LandingTarget,
}

/// Where events land.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LandingTarget {
    /// In the builder unit's own memory.
    Host,
    /// In a card's memory.
    Card(CardSetup),
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardSetup {
    /// Its name in the configuration.
    pub name: String,
    /// Its memory, one bank.
    pub memory: Bytes,
    /// What it computes.
    pub kernel: KernelSetup,
}

/// What a card computes on each batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelSetup {
    /// Nothing: it is memory.
    None,
    /// Whether all fragments are there and intact.
    Verify,
    /// The camera's trigger.
    Cluster7 {
        /// A decision bit is set where the sum of a cluster exceeds this.
        threshold: u32,
        /// Whether it checks all fragments as [`KernelSetup::Verify`] does.
        verify: bool,
        /// Sources with the traces of crates 1, 2 and 3.
        traces: [u32; 3],
        /// The camera's `patches.csv`.
        patches: PathBuf,
    },
}

/// Where accepted events go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputSetup {
    /// The directory.
    pub directory: PathBuf,
    /// The most events that each builder unit stores; further accepted ones are counted only.
    pub max_events: u64,
}

impl Setup {
    /// The kernel areas of a builder unit's card, if it runs a kernel.
    pub fn kernel_areas(&self, builder: usize) -> Option<KernelAreas> {
        match &self.builders[builder].landing {
            LandingTarget::Host | LandingTarget::Card(CardSetup { kernel: KernelSetup::None, .. }) => None,
            LandingTarget::Card(_) => {
                let slots = self.plan.slots[builder].get();
                Some(KernelAreas::new(&self.layout, slots, self.plan.batch.get()))
            }
        }
    }

    /// Landing memory that a builder unit needs: `slots × slot size + kernel areas`.
    pub fn landing_bytes(&self, builder: usize) -> Bytes {
        let slots = self.plan.slots[builder].get();
        landing_bytes(&self.layout, slots, self.kernel_areas(builder).as_ref())
    }
}
