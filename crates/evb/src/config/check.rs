//! Checks that need the inputs and the host, and the resulting configuration.

use super::error::{ConfigError, Problem};
use super::file::{Builder, Card, ConfigFile, Recovery, Trigger};
use super::input::Inputs;
use super::run_config::{
    BuilderConfig, Candidates, ChecksumPolicy, FunctionLanguage, KernelConfig, LandingCard, LandingTarget,
    OutputConfig, OutputFormat, ReadoutConfig, RunConfig, StoredEvents, SyncPolicy, WorkersConfig,
};
use crate::core::recovery::{OnBuilderLoss, OnReadoutLoss, RecoveryPolicy};
use crate::core::shaping::TrafficShaping;
use crate::core::{Bytes, EventNumber, Plan};
use crate::layout::{KernelAreas, PacketTooLong, SlotLayout, landing_bytes};
use millstream_camera::format::{
    CRATES, DECISION_BYTES, TRACE_BYTES, TRIGGER_DECISIONS, TRIGGER_THRESHOLD, TRIGGER_TRACES,
};
use millstream_camera::trigger::TriggerGeometry;
use millstream_card_abi::events::MAX_SOURCES;
use millstream_card_abi::image::MAX_IMAGE_BYTES;
use millstream_fragment::SourceId;
use millstream_fragment::stream::Stream;
use millstream_shm::random_u64;
use std::net::TcpListener;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;

const DEFAULT_WINDOW: u64 = 8;
const DEFAULT_TIMEOUT_MS: u64 = 2000;
/// Long enough to fill a batch at usual rates, and short for an operator who waits for an event.
const DEFAULT_BATCH_TIMEOUT_MS: u64 = 100;
/// A unit with much landing memory needs seconds to start.
const DEFAULT_JOIN_TIMEOUT_MS: u64 = 10_000;
/// A takeover takes milliseconds once the launcher has noticed the loss; a busy host is slower.
const DEFAULT_TAKEOVER_TIMEOUT_MS: u64 = 5000;
/// Stopping has four steps; with this value a failed run ends within five seconds, with margin.
const DEFAULT_DRAIN_MS: u64 = 500;
/// About the cost of a wake-up.
const DEFAULT_SPIN: Duration = Duration::from_micros(20);
const DEFAULT_KEEP: u64 = 10_000;
/// A source with more corrupt fragments than one in a hundred is broken.
const DEFAULT_MAX_CORRUPT: f64 = 0.01;

/// A field of a card's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CardField {
    /// `kind`.
    Kind,
    /// `module`.
    Module,
    /// `memory`.
    Memory,
}

/// Why a card is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedCard {
    /// The field.
    pub field: CardField,
    /// The problem, with the value.
    pub problem: String,
}

/// Inspects the card of a checked configuration.
pub type InspectCard<'a> = dyn Fn(&LandingCard) -> Result<(), RefusedCard> + 'a;

impl ConfigFile {
    /// Checks everything that can be checked before a run starts, and returns the configuration of the run.
    ///
    /// Opens the inputs and checks them, except their payload. Binds the listen address and releases it. Creates and removes a
    /// file where the output directory is or will be; nothing stays.
    ///
    /// # Errors
    /// The first problem.
    pub fn check(&self) -> Result<RunConfig, ConfigError> {
        self.check_with(&|_| Ok(()))
    }

    /// Checks as [`check`](Self::check) does, and lets `inspect` refuse cards: the program that serves them knows the
    /// host's devices and what a kernel's module must be.
    ///
    /// # Errors
    /// The first problem.
    pub fn check_with(&self, inspect: &InspectCard<'_>) -> Result<RunConfig, ConfigError> {
        let tables = &self.tables;
        let run = &tables.run;
        let inputs = self.inputs()?;
        let batch = self.nonzero_16(&run.batch, "run.batch")?;
        let layout = SlotLayout::new(&inputs.sources, batch.get())
            .map_err(|error| self.packet_too_long(error, &inputs))?;
        let plan = self.plan(&inputs, batch)?;
        let cards: Vec<LandingCard> =
            tables.card.iter().map(|card| self.card(card, &inputs, inspect)).collect::<Result<_, _>>()?;
        let builders: Vec<BuilderConfig> = tables
            .builder
            .iter()
            .zip(&plan.slots)
            .map(|(unit, slots)| self.builder(unit, *slots, &cards, &layout, batch))
            .collect::<Result<_, _>>()?;
        let restarts = (1..=plan.recovery.restarts).flat_map(|restart| {
            // No name in a configuration has a plus sign.
            let name = move |name: &str| format!("{name}+{restart}");
            builders.iter().map(move |unit| BuilderConfig { name: name(&unit.name), ..unit.clone() })
        });
        let builders: Vec<BuilderConfig> = builders.iter().cloned().chain(restarts).collect();
        let readouts = tables.readout.iter().zip(&inputs.configs);
        let readouts = readouts
            .map(|(unit, input)| ReadoutConfig { name: unit.name.get_ref().clone(), input: input.clone() });
        Ok(RunConfig {
            name: run.name.get_ref().clone(),
            instance: run.name.get_ref().clone(),
            started: None,
            spin: run.spin_us.as_ref().map_or_else(|| self.spin(), |us| Duration::from_micros(*us.get_ref())),
            starts_paused: false,
            device: run.device.clone().unwrap_or_else(|| "auto".to_owned()),
            listen: self.listen()?,
            file_first: EventNumber(inputs.first()),
            file_events: inputs.events(),
            readouts: readouts.collect(),
            reference_decisions: self.reference_decisions(&inputs, &builders)?,
            checksums: self.checksums(),
            max_corrupt: self.max_corrupt()?,
            source_timeout: tables
                .recovery
                .source_timeout_ms
                .as_ref()
                .map(|ms| Duration::from_millis(*ms.get_ref())),
            output: self.output()?,
            security: self.security()?,
            builders,
            layout,
            plan,
        })
    }

    /// Resolves a path of the configuration file.
    pub(super) fn locate(&self, path: &Path) -> PathBuf {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        let joined = folder.join(path);
        // Without a current directory, the relative path is used.
        std::path::absolute(&joined).unwrap_or(joined)
    }

    fn nonzero_16(&self, value: &Spanned<u64>, field: &str) -> Result<NonZeroU16, ConfigError> {
        let number = *value.get_ref();
        u16::try_from(number).ok().and_then(NonZeroU16::new).ok_or_else(|| {
            self.at(value, field, Problem::OutOfRange { value: number, least: 1, most: u16::MAX.into() })
        })
    }

    fn packet_too_long(&self, error: PacketTooLong, inputs: &Inputs) -> ConfigError {
        let readout = inputs.sources.iter().find(|source| source.id == error.id).map(|source| source.readout);
        match readout.and_then(|readout| self.tables.readout.get(readout.index())) {
            Some(unit) => match &unit.input {
                Some(input) => self.at(input, "readout.input", error),
                None => self.at(&unit.name, "readout", error),
            },
            None => self.about("readout.input", error),
        }
    }

    /// A lost builder unit costs no event, so the run goes on by default. A lost readout unit does, so the run stops.
    fn recovery(&self) -> RecoveryPolicy {
        let Recovery {
            builder_loss,
            readout_loss,
            spare_builders,
            restarts,
            join_timeout_ms,
            standby,
            takeover_timeout_ms,
            source_timeout_ms: _,
        } = &self.tables.recovery;
        let has_standby = standby.as_ref().is_some_and(|standby| *standby.get_ref());
        let takeover = takeover_timeout_ms.as_ref().map_or(DEFAULT_TAKEOVER_TIMEOUT_MS, |ms| *ms.get_ref());
        RecoveryPolicy {
            builder: match builder_loss.as_ref().map(|policy| policy.get_ref().as_str()) {
                Some("stop") => OnBuilderLoss::Stop,
                _ => OnBuilderLoss::Rebuild,
            },
            readout: match readout_loss.as_ref().map(|policy| policy.get_ref().as_str()) {
                Some("deliver") => OnReadoutLoss::Deliver,
                Some("discard") => OnReadoutLoss::Discard,
                _ => OnReadoutLoss::Stop,
            },
            // In range: the number of builder units limits it.
            spare_builders: spare_builders.as_ref().map_or(0, |spares| *spares.get_ref() as u16),
            restarts: restarts.as_ref().map_or(0, |restarts| *restarts.get_ref() as u16),
            join_timeout: Duration::from_millis(
                join_timeout_ms.as_ref().map_or(DEFAULT_JOIN_TIMEOUT_MS, |ms| *ms.get_ref()),
            ),
            takeover_timeout: Duration::from_millis(if has_standby { takeover } else { 0 }),
        }
    }

    fn plan(&self, inputs: &Inputs, batch: NonZeroU16) -> Result<Plan, ConfigError> {
        let run = &self.tables.run;
        let value = |given: &Option<Spanned<u64>>, default| given.as_ref().map_or(default, |v| *v.get_ref());
        let window = value(&run.window, DEFAULT_WINDOW);
        let slots = self.tables.builder.iter().map(|unit| self.nonzero_16(&unit.slots, "builder.slots"));
        let replay = value(&run.replay, 1);
        let slots: Vec<NonZeroU16> = slots.collect::<Result<_, _>>()?;
        let recovery = self.recovery();
        let events = run.events.as_ref().map(|events| *events.get_ref());
        let events = events.unwrap_or_else(|| inputs.events().saturating_mul(replay));
        let plan = Plan {
            first_event: EventNumber(inputs.first()),
            events: NonZeroU64::new(events).ok_or_else(|| self.about("readout.input", Problem::None))?,
            batch,
            batch_timeout: Some(Duration::from_millis(value(
                &run.batch_timeout_ms,
                DEFAULT_BATCH_TIMEOUT_MS,
            ))),
            sources: inputs.counts.clone(),
            slots: slots.repeat(1 + usize::from(recovery.restarts)),
            window: NonZeroU16::new(u16::try_from(window).unwrap_or(u16::MAX)).unwrap_or(NonZeroU16::MIN),
            // Unlimited by default: the windows still apply.
            max_in_flight: u32::try_from(value(&run.max_in_flight, u64::MAX))
                .ok()
                .and_then(NonZeroU32::new)
                .unwrap_or(NonZeroU32::MAX),
            traffic_shaping: match run.traffic_shaping.as_ref().map(|shaping| shaping.get_ref().as_str()) {
                Some("none") => TrafficShaping::Unshaped,
                _ => TrafficShaping::BarrelShifter,
            },
            timeout: Duration::from_millis(value(&run.timeout_ms, DEFAULT_TIMEOUT_MS)),
            drain_timeout: Duration::from_millis(value(&run.drain_timeout_ms, DEFAULT_DRAIN_MS)),
            recovery,
        };
        plan.check().map_err(|error| match &run.replay {
            Some(replay) if error.what == "events" => self.at(replay, "run.replay", error),
            _ => self.about("run", error),
        })?;
        Ok(plan)
    }

    fn card(
        &self,
        card: &Card,
        inputs: &Inputs,
        inspect: &InspectCard<'_>,
    ) -> Result<LandingCard, ConfigError> {
        let kernel = match card.kernel.get_ref().as_str() {
            "cluster7" => self.cluster7(card, inputs)?,
            "verify" => KernelConfig::Verify,
            "wasm" => self.function(card, FunctionLanguage::Wasm)?,
            "ptx" => self.function(card, FunctionLanguage::Ptx)?,
            _ => KernelConfig::None,
        };
        let most = u64::from(MAX_SOURCES);
        let sources = inputs.sources.len() as u64;
        if kernel != KernelConfig::None && sources > most {
            let problem = Problem::Conflict(format!(
                "a kernel supports up to {most} sources, the inputs have {sources}; use kernel = \"none\""
            ));
            return Err(self.at(&card.kernel, "card.kernel", problem));
        }
        let memory = *card.memory.get_ref();
        let kind = card.kind.as_ref().map_or("emulated", |kind| kind.get_ref().as_str()).to_owned();
        let config = LandingCard { name: card.name.get_ref().clone(), memory, kind, kernel };
        inspect(&config).map_err(|refused| {
            let problem = Problem::Conflict(refused.problem);
            match (refused.field, &card.kind, &card.module) {
                (CardField::Kind, Some(kind), _) => self.at(kind, "card.kind", problem),
                (CardField::Module, _, Some(module)) => self.at(module, "card.module", problem),
                (CardField::Memory, ..) => self.at(&card.memory, "card.memory", problem),
                _ => self.at(&card.name, "card", problem),
            }
        })?;
        Ok(config)
    }

    fn function(&self, card: &Card, language: FunctionLanguage) -> Result<KernelConfig, ConfigError> {
        let Some(module) = &card.module else {
            let name = language.name();
            let problem = Problem::Conflict(format!("kernel \"{name}\" needs module = \"FILE.{name}\""));
            return Err(self.at(&card.kernel, "card.kernel", problem));
        };
        let path = self.locate(module.get_ref());
        let found = std::fs::metadata(&path).map_err(|cause| {
            let problem = Problem::Conflict(format!("cannot read {}: {cause}", path.display()));
            self.at(module, "card.module", problem)
        })?;
        if !found.is_file() || found.len() == 0 || found.len() > MAX_IMAGE_BYTES {
            let problem = Problem::Conflict(format!(
                "{} has {} B: a module is a file of 1 to {MAX_IMAGE_BYTES} B",
                path.display(),
                found.len()
            ));
            return Err(self.at(module, "card.module", problem));
        }
        let arguments = card.arguments.as_ref().map_or(&[][..], |arguments| arguments.get_ref());
        Ok(KernelConfig::Function {
            language,
            module: path,
            image: Bytes(found.len()),
            verify: card.verify.as_ref().is_none_or(|verify| *verify.get_ref()),
            arguments: arguments.iter().map(|word| word.cast_unsigned()).collect(),
        })
    }

    fn cluster7(&self, card: &Card, inputs: &Inputs) -> Result<KernelConfig, ConfigError> {
        let traces: Vec<_> = inputs.sources.iter().filter(|source| source.kind == TRIGGER_TRACES).collect();
        let refuse = |what: String| self.at(&card.kernel, "card.kernel", Problem::Conflict(what));
        if traces.len() != CRATES {
            return Err(refuse(format!(
                "kernel \"cluster7\" needs {CRATES} sources of kind {}, the inputs have {}",
                TRIGGER_TRACES.0,
                traces.len()
            )));
        }
        if let Some(odd) = traces.iter().find(|source| source.max_len as usize != TRACE_BYTES) {
            return Err(refuse(format!(
                "kernel \"cluster7\" needs traces of {TRACE_BYTES} B, those of {} have {} B",
                odd.id, odd.max_len
            )));
        }
        let mut ids: Vec<u32> = traces.iter().map(|source| source.id.0).collect();
        ids.sort_unstable();
        let [crate1, crate2, crate3] = ids[..] else {
            return Err(refuse(format!("kernel \"cluster7\" needs {CRATES} crates")));
        };
        let Some(patches) = &card.patches else {
            return Err(refuse("kernel \"cluster7\" needs patches = \"FILE.csv\"".into()));
        };
        let path = self.locate(patches.get_ref());
        TriggerGeometry::load(&path).map_err(|error| self.at(patches, "card.patches", error))?;
        let threshold = card.threshold.as_ref().map_or(TRIGGER_THRESHOLD.into(), |value| *value.get_ref());
        Ok(KernelConfig::Cluster7 {
            threshold: u32::try_from(threshold).unwrap_or(u32::MAX),
            verify: card.verify.as_ref().is_none_or(|verify| *verify.get_ref()),
            traces: [crate1, crate2, crate3],
            patches: path,
        })
    }

    fn builder(
        &self,
        unit: &Builder,
        slots: NonZeroU16,
        cards: &[LandingCard],
        layout: &SlotLayout,
        batch: NonZeroU16,
    ) -> Result<BuilderConfig, ConfigError> {
        let name = unit.name.get_ref().clone();
        let trigger = unit.trigger.as_ref().map(|trigger| self.trigger(trigger)).transpose()?;
        let wanted = unit.card.as_ref().map(|card| card.get_ref());
        let Some(card) = wanted.and_then(|wanted| cards.iter().find(|card| card.name == *wanted)) else {
            return Ok(BuilderConfig { name, landing: LandingTarget::Host, trigger });
        };
        let areas = (card.kernel != KernelConfig::None)
            .then(|| KernelAreas::new(layout, slots.get(), batch.get(), card.kernel.image()));
        let needed = landing_bytes(layout, slots.get(), areas.as_ref()).0;
        if needed > card.memory.0 {
            let table = self.tables.card.iter().find(|table| *table.name.get_ref() == card.name);
            let problem = Problem::MemoryTooSmall {
                memory: card.memory,
                slots: slots.get(),
                slot: layout.slot_bytes.0,
                needed,
            };
            return Err(match table {
                Some(table) => self.at(&table.memory, "card.memory", problem),
                None => self.about("card.memory", problem),
            });
        }
        Ok(BuilderConfig { name, landing: LandingTarget::Card(card.clone()), trigger })
    }

    fn trigger(&self, trigger: &Trigger) -> Result<WorkersConfig, ConfigError> {
        let number = |given: &Option<Spanned<u64>>, default: u64| {
            let value = given.as_ref().map_or(default, |value| *value.get_ref());
            u16::try_from(value).ok().and_then(NonZeroU16::new).unwrap_or(NonZeroU16::MIN)
        };
        let name = trigger.program.get_ref();
        let program = self.locate(name);
        let is_path = name.components().count() > 1 || program.exists();
        let problem = if is_path {
            (!program.is_file()).then(|| format!("{} is not a file", program.display()))
        } else {
            (!is_in_path(name)).then(|| format!("{} is in no directory of PATH", name.display()))
        };
        if let Some(problem) = problem {
            return Err(self.at(&trigger.program, "builder.trigger.program", Problem::Conflict(problem)));
        }
        Ok(WorkersConfig {
            program: if is_path { program } else { name.clone() },
            arguments: trigger.arguments.clone(),
            workers: number(&trigger.workers, 1),
            credits: number(&trigger.credits, 2),
            timeout: Duration::from_millis(
                trigger.timeout_ms.as_ref().map_or(DEFAULT_TIMEOUT_MS, |ms| *ms.get_ref()),
            ),
            cpus: trigger.cpus.as_ref().map_or_else(Vec::new, |cpus| cpus.get_ref().clone()),
            candidates: match trigger.events.as_ref().map(|events| events.get_ref().as_str()) {
                Some("all") => Candidates::All,
                _ => Candidates::Accepted,
            },
        })
    }

    /// Spins only if every process of the run can have a processor.
    fn spin(&self) -> Duration {
        let tables = &self.tables;
        let processes = 1 + tables.readout.len() + tables.builder.len() + tables.card.len();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        if processes <= processors { DEFAULT_SPIN } else { Duration::ZERO }
    }

    /// Binds the address and releases it.
    fn listen(&self) -> Result<String, ConfigError> {
        let given = self.tables.run.listen.as_ref();
        let address = given.map_or("127.0.0.1:0", |listen| listen.get_ref().as_str()).to_owned();
        match self.bound(TcpListener::bind(&address)) {
            Ok(()) => Ok(address),
            Err(cause) => {
                let problem = Problem::Listen { address, cause };
                Err(match given {
                    Some(listen) => self.at(listen, "run.listen", problem),
                    None => self.about("run.listen", problem),
                })
            }
        }
    }

    fn output(&self) -> Result<Option<OutputConfig>, ConfigError> {
        let Some(output) = &self.tables.output else { return Ok(None) };
        let path = self.locate(output.directory.get_ref());
        let refuse = |cause| {
            let problem = Problem::Directory { path: path.clone(), cause };
            self.at(&output.directory, "output.directory", problem)
        };
        match std::fs::metadata(&path) {
            Ok(found) if !found.is_dir() => Err(refuse(std::io::ErrorKind::NotADirectory.into())),
            Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => Err(refuse(cause)),
            _ => writable(&path).map_err(refuse).map(|()| {
                Some(OutputConfig {
                    directory: path.clone(),
                    events: match output.events.as_ref().map(|events| events.get_ref().as_str()) {
                        Some("built") => StoredEvents::Built,
                        Some("all") => StoredEvents::All,
                        _ => StoredEvents::Accepted,
                    },
                    max_events: output.max_events.unwrap_or(DEFAULT_KEEP),
                    rotate_size: output.rotate_size.as_ref().map(|size| *size.get_ref()),
                    rotate_interval: output
                        .rotate_interval_s
                        .as_ref()
                        .map(|seconds| Duration::from_secs(*seconds.get_ref())),
                    sync: match output.sync.as_ref().map(|sync| sync.get_ref().as_str()) {
                        Some("batch") => SyncPolicy::Batch,
                        _ => SyncPolicy::File,
                    },
                    format: match output.format.as_ref().map(|format| format.get_ref().as_str()) {
                        Some("batches") => {
                            let direct = output.direct.as_ref().is_none_or(|direct| *direct.get_ref());
                            OutputFormat::Batches { direct }
                        }
                        _ => OutputFormat::Hdf5,
                    },
                    replace: output.replace.unwrap_or(false),
                })
            }),
        }
    }

    fn checksums(&self) -> ChecksumPolicy {
        let given = self.tables.check.as_ref().and_then(|check| check.checksums.as_ref());
        match given.map(|policy| policy.get_ref().as_str()) {
            Some("none") => ChecksumPolicy::None,
            Some("all") => ChecksumPolicy::All,
            _ => ChecksumPolicy::Sample,
        }
    }

    fn max_corrupt(&self) -> Result<f64, ConfigError> {
        let given = self.tables.check.as_ref().and_then(|check| check.max_corrupt.as_ref());
        let most = self.fraction("check.max_corrupt", given)?;
        Ok(if given.is_some() { most } else { DEFAULT_MAX_CORRUPT })
    }

    fn reference_decisions(
        &self,
        inputs: &Inputs,
        builders: &[BuilderConfig],
    ) -> Result<Option<PathBuf>, ConfigError> {
        let given = self.tables.check.as_ref().and_then(|check| check.reference_decisions.as_ref());
        let Some(reference) = given else { return Ok(None) };
        let refuse = |problem| self.at(reference, "check.reference_decisions", problem);
        let conflict = |what: &str| refuse(Problem::Conflict(what.to_owned()));
        let path = self.locate(reference.get_ref());
        let stream = Stream::open(&path).map_err(|error| refuse(error.into()))?;
        if inputs.is_live() {
            return Err(conflict("live sources have no reference decisions"));
        }
        inputs.check_events(&path, &stream.events()).map_err(refuse)?;
        let mut sources = stream.sources();
        let (Some(source), None) = (sources.next(), sources.next()) else {
            return Err(conflict("the file must have exactly one source, the trigger decisions"));
        };
        let all_there = source.len() as u64 == inputs.events();
        let decisions = source.kind() == TRIGGER_DECISIONS
            && source.fragments().all(|fragment| fragment.payload.len() == DECISION_BYTES);
        if !all_there || !decisions {
            return Err(refuse(Problem::Conflict(format!(
                "the file must have {DECISION_BYTES} B of kind {} for every event; {} of kind {} has {} \
                 of {} events, up to {} B",
                TRIGGER_DECISIONS.0,
                source.id(),
                source.kind().0,
                source.len(),
                inputs.events(),
                source.max_len()
            ))));
        }
        if inputs.sources.iter().any(|input| input.id == source.id()) {
            let id = SourceId(source.id().0);
            let first = self.tables.readout.first().and_then(|unit| unit.input.as_ref());
            let first = first.map_or_else(PathBuf::new, |input| self.locate(input.get_ref()));
            return Err(refuse(Problem::DuplicateSource { id, first, second: path }));
        }
        let decides = |unit: &BuilderConfig| {
            matches!(
                &unit.landing,
                LandingTarget::Card(LandingCard { kernel: KernelConfig::Cluster7 { .. }, .. })
            )
        };
        if !builders.iter().all(decides) {
            return Err(conflict(
                "every builder unit needs a card with kernel \"cluster7\" for the comparison",
            ));
        }
        Ok(Some(path))
    }
}

/// Whether files can be created in the directory, or in the nearest one above it that exists.
fn writable(directory: &Path) -> std::io::Result<()> {
    let existing = directory.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    // Another check may be in progress, also on another host.
    let probe = existing.join(format!(".millstream-check-{:016x}", random_u64()));
    std::fs::OpenOptions::new().write(true).create_new(true).open(&probe)?;
    std::fs::remove_file(&probe)
}

/// Whether a directory of PATH has a program with this name.
fn is_in_path(name: &Path) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(name).is_file())
}
