//! A checked run: the parameters of all units.

use crate::core::{Bytes, EventNumber, Plan};
use crate::layout::{KernelAreas, SlotLayout, landing_bytes};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// A checked run. The manager sends it to every unit at startup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Name of the run.
    pub name: String,
    /// Distinguishes the cards of this run from those of other runs on the same host. The run's name by default; the
    /// launcher adds its process id.
    pub instance: String,
    /// How long to poll before blocking.
    pub spin: Duration,
    /// The RDMA device to use: `auto`, `hardware`, `soft` or a device's name.
    pub device: String,
    /// Where the manager listens.
    pub listen: String,
    /// Parameters of the state machines.
    pub plan: Plan,
    /// Layout of a slot.
    pub layout: SlotLayout,
    /// Number of the inputs' first event.
    pub file_first: EventNumber,
    /// Number of events of the inputs. A replay repeats them under consecutive numbers.
    pub file_events: u64,
    /// The readout units.
    pub readouts: Vec<ReadoutSetup>,
    /// The builder units.
    pub builders: Vec<BuilderSetup>,
    /// Where accepted events are stored; `None` if they are only counted.
    pub output: Option<OutputSetup>,
    /// Stream file with reference trigger decisions for the kernels' results.
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
    /// The target of the readout units' writes.
    pub landing: LandingTarget,
}

/// Where a builder unit's landing memory is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LandingTarget {
    /// In host memory.
    Host,
    /// In a card's memory.
    Card(CardSetup),
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardSetup {
    /// Its name in the configuration.
    pub name: String,
    /// Size of its memory, one bank.
    pub memory: Bytes,
    /// Its kernel.
    pub kernel: KernelSetup,
}

/// The kernel that a card runs on each batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelSetup {
    /// None: the card is used as memory.
    None,
    /// Checks presence and checksum of all fragments.
    Verify,
    /// The camera's trigger.
    Cluster7 {
        /// A decision bit is set if the sum of a cluster exceeds this.
        threshold: u32,
        /// Whether it also checks all fragments as [`KernelSetup::Verify`] does.
        verify: bool,
        /// Sources with the trigger traces of crates 1, 2 and 3.
        traces: [u32; 3],
        /// The camera's `patches.csv`.
        patches: PathBuf,
    },
}

/// Which events a run stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredEvents {
    /// Built events that the kernel accepts.
    #[default]
    Accepted,
    /// All built events.
    Built,
    /// All events of processed batches. Incomplete and corrupt ones are marked in `events/status`.
    All,
}

/// Storage of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputSetup {
    /// The directory.
    pub directory: PathBuf,
    /// The events to store.
    pub events: StoredEvents,
    /// Maximum number of events that each builder unit stores; further accepted events are only counted.
    pub max_events: u64,
}

impl Setup {
    /// What is valid, but probably not intended.
    pub fn warnings(&self) -> Vec<String> {
        let decides = |unit: &BuilderSetup| match &unit.landing {
            LandingTarget::Card(card) => matches!(card.kernel, KernelSetup::Cluster7 { .. }),
            LandingTarget::Host => false,
        };
        let accepted_only =
            self.output.as_ref().is_some_and(|output| output.events == StoredEvents::Accepted);
        let undecided = self.builders.iter().filter(|unit| accepted_only && !decides(unit));
        let warning = |unit: &BuilderSetup| {
            format!(
                "builder {} stores no event: no kernel accepts any; set output.events = \"built\" or \"all\", or use \
                 kernel = \"cluster7\"",
                unit.name
            )
        };
        undecided.map(warning).collect()
    }

    /// Kernel areas of a builder unit's card; `None` without a kernel.
    pub fn kernel_areas(&self, builder: usize) -> Option<KernelAreas> {
        match &self.builders[builder].landing {
            LandingTarget::Host | LandingTarget::Card(CardSetup { kernel: KernelSetup::None, .. }) => None,
            LandingTarget::Card(_) => {
                let slots = self.plan.slots[builder].get();
                Some(KernelAreas::new(&self.layout, slots, self.plan.batch.get()))
            }
        }
    }

    /// Size of a builder unit's landing memory: `slots × slot size + kernel areas`.
    pub fn landing_bytes(&self, builder: usize) -> Bytes {
        let slots = self.plan.slots[builder].get();
        landing_bytes(&self.layout, slots, self.kernel_areas(builder).as_ref())
    }
}
