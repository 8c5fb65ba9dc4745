//! A checked run: the parameters of all units.

use super::security::SecurityConfig;
use crate::core::{Bytes, EventNumber, Plan, Unit};
use crate::layout::{KernelAreas, SlotLayout, landing_bytes};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// A checked run. The manager sends it to every unit at startup.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunConfig {
    /// Name of the run.
    pub name: String,
    /// Distinguishes the cards of this run from those of other runs on the same host. The run's name by default; the
    /// launcher adds its process id.
    pub instance: String,
    /// When the launcher started the run. With the instance, it tells the run from all others.
    #[serde(default)]
    pub started: Option<SystemTime>,
    /// How long to poll before blocking.
    pub spin: Duration,
    /// Whether the run starts paused: all units are ready, and no batch is assigned before the launcher resumes the run.
    #[serde(default)]
    pub starts_paused: bool,
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
    pub readouts: Vec<ReadoutConfig>,
    /// The builder units, then their restarts.
    pub builders: Vec<BuilderConfig>,
    /// Where accepted events are stored; `None` if they are only counted.
    pub output: Option<OutputConfig>,
    /// Which fragments a builder unit without a verifying kernel compares with their checksums.
    #[serde(default)]
    pub checksums: ChecksumPolicy,
    /// The run fails if a larger fraction of a source's checked fragments is corrupt.
    pub max_corrupt: f64,
    /// How long a readout unit is waited for whose sources have fallen silent, while others have later events; `None`: without
    /// limit.
    #[serde(default)]
    pub source_timeout: Option<Duration>,
    /// Keys of the processes that the launcher starts, and the nodes that may join.
    #[serde(default)]
    pub security: SecurityConfig,
    /// Stream file with reference trigger decisions for the kernels' results.
    pub reference_decisions: Option<PathBuf>,
}

/// A readout unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReadoutConfig {
    /// Its name.
    pub name: String,
    /// Where its fragments come from.
    pub input: InputConfig,
}

/// Where the fragments of a readout unit come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputConfig {
    /// A stream file with its sources.
    File(PathBuf),
    /// Generated fragments.
    Generator(GeneratorConfig),
    /// Datagrams from a front end.
    Udp(UdpConfig),
    /// Shared memory of front-end processes on the same host.
    Ring(RingConfig),
}

/// A shared-memory ring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RingConfig {
    /// Name by which front ends find the unit.
    pub name: String,
    /// Id of the first source.
    pub first_source: u32,
    /// Number of sources, with consecutive ids.
    pub sources: u16,
    /// Kind of their payload.
    pub kind: u32,
    /// Length of the longest fragment, in bytes.
    pub max_len: u32,
    /// Size of the ring of each front end.
    pub size: Bytes,
    /// Front ends are told to be busy above this fraction of their ring.
    pub busy_above: f64,
    /// And to go on below this one.
    pub busy_below: f64,
    /// Events that are buffered for each source.
    pub buffer_events: u64,
    /// How long to wait for a source that is behind the others.
    pub give_up: Duration,
}

/// A generator of fragments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeneratorConfig {
    /// Id of the first source.
    pub first_source: u32,
    /// Number of sources, with consecutive ids.
    pub sources: u16,
    /// Kind of their payload.
    pub kind: u32,
    /// Mean length of a fragment, in bytes.
    pub size: u32,
    /// Distribution of the lengths.
    pub size_distribution: SizeDistribution,
    /// Events per second; `None`: as fast as they are built.
    pub rate_hz: Option<f64>,
    /// Distribution of the times of events.
    pub arrival: Arrival,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Fraction of fragments that are missing.
    pub missing: f64,
    /// Fraction of fragments with a wrong checksum.
    pub corrupt: f64,
}

/// Distribution of the lengths of generated fragments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SizeDistribution {
    /// All have the mean length.
    #[default]
    Fixed,
    /// From 0 to twice the mean.
    Uniform,
    /// Exponential, truncated at eight times the mean.
    Exponential,
}

/// Distribution of the times of generated events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// At equal intervals.
    #[default]
    Periodic,
    /// Independently of each other, at exponential intervals.
    Poisson,
}

/// A receiver of datagrams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UdpConfig {
    /// Address and port.
    pub listen: String,
    /// Id of the first source.
    pub first_source: u32,
    /// Number of sources, with consecutive ids.
    pub sources: u16,
    /// Kind of their payload.
    pub kind: u32,
    /// Length of the longest fragment, in bytes.
    pub max_len: u32,
    /// Events that are buffered for each source.
    pub buffer_events: u64,
    /// How long to wait for a source that is behind the others.
    pub give_up: Duration,
}

impl InputConfig {
    /// The stream file, if it is one.
    pub fn file(&self) -> Option<&std::path::Path> {
        match self {
            InputConfig::File(path) => Some(path),
            InputConfig::Generator(_) | InputConfig::Udp(_) | InputConfig::Ring(_) => None,
        }
    }
}

/// A builder unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderConfig {
    /// Its name.
    pub name: String,
    /// The target of the readout units' writes.
    pub landing: LandingTarget,
    /// Its software trigger.
    #[serde(default)]
    pub trigger: Option<WorkersConfig>,
}

impl BuilderConfig {
    /// Whether a kernel or the software trigger accepts events.
    pub fn decides(&self) -> bool {
        self.trigger.is_some() || self.kernel().is_some_and(KernelConfig::decides)
    }

    /// Whether events that are accepted and stored may be incomplete or corrupt.
    pub fn accepts_incomplete(&self) -> bool {
        match &self.trigger {
            Some(trigger) if trigger.candidates == Candidates::All => true,
            _ => self.kernel().is_some_and(KernelConfig::accepts_incomplete),
        }
    }

    fn kernel(&self) -> Option<&KernelConfig> {
        match &self.landing {
            LandingTarget::Host => None,
            LandingTarget::Card(card) => Some(&card.kernel),
        }
    }
}

/// Worker processes of a builder unit's software trigger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkersConfig {
    /// The program of the workers.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Number of workers.
    pub workers: NonZeroU16,
    /// Batches that a worker may have at a time.
    pub credits: NonZeroU16,
    /// Time for the decisions on a batch.
    pub timeout: Duration,
    /// Processors of the workers, in turn; empty: any.
    pub cpus: Vec<usize>,
    /// The events that they decide on.
    pub candidates: Candidates,
}

/// The events that a software trigger decides on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Candidates {
    /// Those that the kernel accepts; built ones if no kernel decides.
    #[default]
    Accepted,
    /// All events, also incomplete and corrupt ones.
    All,
}

/// Where a builder unit's landing memory is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LandingTarget {
    /// In host memory.
    Host,
    /// In a card's memory.
    Card(LandingCard),
}

impl LandingTarget {
    /// Whether it is on a GPU.
    #[must_use]
    pub fn is_gpu(&self) -> bool {
        matches!(self, LandingTarget::Card(card) if card.kind.starts_with("cuda:"))
    }
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LandingCard {
    /// Its name in the configuration.
    pub name: String,
    /// Size of its memory, one bank.
    pub memory: Bytes,
    /// Kind of its memory, `emulated`, `pci:ADDRESS/barN`, `cuda:N`.
    pub kind: String,
    /// Its kernel.
    pub kernel: KernelConfig,
}

/// The kernel that a card runs on each batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelConfig {
    /// None: the card is used as memory.
    None,
    /// Checks presence and checksum of all fragments.
    Verify,
    /// The camera's trigger.
    Cluster7 {
        /// A decision bit is set if the sum of a cluster exceeds this.
        threshold: u32,
        /// Whether it also checks all fragments as [`KernelConfig::Verify`] does.
        verify: bool,
        /// Sources with the trigger traces of crates 1, 2 and 3.
        traces: [u32; 3],
        /// The camera's `patches.csv`.
        patches: PathBuf,
    },
    /// A user's function for events.
    Function {
        /// The module's language.
        language: FunctionLanguage,
        /// The module.
        module: PathBuf,
        /// Its size.
        image: Bytes,
        /// Whether all fragments are checked as [`KernelConfig::Verify`] does.
        verify: bool,
        /// Its argument words.
        arguments: Vec<u64>,
    },
}

/// The language of a module with a function for events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionLanguage {
    /// WebAssembly, for emulated cards.
    Wasm,
    /// PTX, for GPUs.
    Ptx,
}

impl FunctionLanguage {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FunctionLanguage::Wasm => "wasm",
            FunctionLanguage::Ptx => "ptx",
        }
    }
}

impl KernelConfig {
    /// Its name in the configuration.
    pub fn name(&self) -> &'static str {
        match self {
            KernelConfig::None => "none",
            KernelConfig::Verify => "verify",
            KernelConfig::Cluster7 { .. } => "cluster7",
            KernelConfig::Function { language, .. } => language.name(),
        }
    }

    /// Whether the kernel accepts events.
    pub fn decides(&self) -> bool {
        matches!(self, KernelConfig::Cluster7 { .. } | KernelConfig::Function { .. })
    }

    /// Whether the kernel compares every fragment with its checksum.
    pub fn verifies_checksums(&self) -> bool {
        match self {
            KernelConfig::None => false,
            KernelConfig::Verify => true,
            KernelConfig::Cluster7 { verify, .. } | KernelConfig::Function { verify, .. } => *verify,
        }
    }

    /// Whether incomplete and corrupt events that the kernel accepts are stored.
    pub fn accepts_incomplete(&self) -> bool {
        matches!(self, KernelConfig::Function { .. })
    }

    /// Size of its image in card memory.
    pub fn image(&self) -> Bytes {
        match self {
            KernelConfig::Function { image, .. } => *image,
            _ => Bytes(0),
        }
    }
}

/// Which fragments are compared with their checksums where no kernel does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChecksumPolicy {
    /// None.
    None,
    /// Those of one batch in 64.
    #[default]
    Sample,
    /// All.
    All,
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
pub struct OutputConfig {
    /// The directory.
    pub directory: PathBuf,
    /// The events to store.
    pub events: StoredEvents,
    /// Maximum number of events that each builder unit stores; further accepted events are only counted.
    pub max_events: u64,
    /// Start a new file when one has this length.
    pub rotate_size: Option<Bytes>,
    /// Start a new file when one is this old.
    pub rotate_interval: Option<Duration>,
    /// When events are made durable.
    pub sync: SyncPolicy,
    /// Format of the files.
    pub format: OutputFormat,
    /// Whether the files of an earlier run with the same name are removed. Otherwise they are refused if they have events.
    pub replace: bool,
}

/// Format of the files with events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputFormat {
    /// Events in HDF5.
    #[default]
    Hdf5,
    /// Whole batches.
    Batches {
        /// Whether they are written past the page cache (`O_DIRECT`).
        direct: bool,
    },
}

/// When stored events are made durable. In any case, they survive their process as soon as their batch is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SyncPolicy {
    /// When their file is complete.
    #[default]
    File,
    /// Before their batch is done.
    Batch,
}

impl RunConfig {
    /// The builder units that start the run.
    pub fn initial_builders(&self) -> &[BuilderConfig] {
        &self.builders[..self.plan.initial_builders().min(self.builders.len())]
    }

    /// A unit's name in the configuration; of a restart, with its number, as in `crate1+2`.
    pub fn unit_name(&self, unit: Unit) -> String {
        let name = match unit {
            Unit::Manager => Some("manager".to_owned()),
            Unit::Readout(ru) => {
                let unit = self.readouts.get(self.plan.readout_role(ru).index());
                unit.map(|unit| match ru.index() / self.readouts.len() {
                    0 => unit.name.clone(),
                    restart => format!("{}+{restart}", unit.name),
                })
            }
            Unit::Builder(bu) => self.builders.get(bu.index()).map(|unit| unit.name.clone()),
        };
        name.unwrap_or_else(|| unit.to_string())
    }

    /// What is valid, but probably not intended.
    pub fn warnings(&self) -> Vec<String> {
        let accepted_only =
            self.output.as_ref().is_some_and(|output| output.events == StoredEvents::Accepted);
        let undecided = self.initial_builders().iter().filter(|unit| accepted_only && !unit.decides());
        let warning = |unit: &BuilderConfig| {
            format!(
                "builder {} stores no event: no kernel accepts any; set output.events = \"built\" or \"all\", or use \
                 kernel = \"cluster7\" or \"wasm\"",
                unit.name
            )
        };
        undecided.map(warning).collect()
    }

    /// Whether the kernel of a builder unit compares every fragment with its checksum.
    pub fn verifies_checksums(&self, builder: usize) -> bool {
        match &self.builders[builder].landing {
            LandingTarget::Host => false,
            LandingTarget::Card(card) => card.kernel.verifies_checksums(),
        }
    }

    /// Kernel areas of a builder unit's card; `None` without a kernel.
    pub fn kernel_areas(&self, builder: usize) -> Option<KernelAreas> {
        match &self.builders[builder].landing {
            LandingTarget::Host | LandingTarget::Card(LandingCard { kernel: KernelConfig::None, .. }) => None,
            LandingTarget::Card(card) => {
                let slots = self.plan.slots[builder].get();
                Some(KernelAreas::new(&self.layout, slots, self.plan.batch.get(), card.kernel.image()))
            }
        }
    }

    /// Size of a builder unit's landing memory: `slots × slot size + kernel areas`.
    pub fn landing_bytes(&self, builder: usize) -> Bytes {
        let slots = self.plan.slots[builder].get();
        landing_bytes(&self.layout, slots, self.kernel_areas(builder).as_ref())
    }
}
