//! The configuration file, and the checks that need only the file.

use super::RunConfig;
use super::error::{ConfigError, Problem};
use super::security::SecurityTable;
use crate::core::Bytes;
use millstream_card_abi::events::FUNCTION_ARGUMENTS;
use serde::Deserialize;
use serde_path_to_error::{Path as ErrorPath, Segment};
use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use toml::Spanned;

/// Maximum events per batch: the limit of one kernel command.
const MAX_BATCH: u64 = millstream_card_abi::events::MAX_EVENTS as u64;
/// Maximum slots of a builder unit.
const MAX_SLOTS: u64 = 16_384;
/// Maximum restarts of a unit.
const MAX_RESTARTS: u64 = 100;
/// Maximum timeout, in ms.
const MAX_MILLISECONDS: u64 = 600_000;
/// Smallest size at which event files rotate: a file has metadata of some KiB.
const MIN_ROTATE_SIZE: Bytes = Bytes(1 << 20);
/// Maximum interval of rotation, in s: a week.
const MAX_ROTATE_SECONDS: u64 = 604_800;
/// Maximum workers of a software trigger.
const MAX_WORKERS: u64 = 1024;
/// Maximum batches at a worker.
const MAX_CREDITS: u64 = 64;
/// Processors that a process can be pinned to.
const MAX_CPUS: usize = 1024;
/// Maximum spin time, in µs.
const MAX_SPIN: u64 = 1_000_000;

/// A configuration that was read and is consistent.
#[derive(Debug)]
pub struct ConfigFile {
    pub(super) path: PathBuf,
    /// Byte offset of each line.
    lines: Vec<usize>,
    pub(super) tables: Tables,
    /// Addresses to listen on may be those of another host.
    is_of_several_hosts: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tables {
    pub(super) run: Run,
    #[serde(default)]
    pub(super) readout: Vec<Readout>,
    #[serde(default)]
    pub(super) builder: Vec<Builder>,
    #[serde(default)]
    pub(super) card: Vec<Card>,
    #[serde(default)]
    pub(super) recovery: Recovery,
    pub(super) output: Option<Output>,
    pub(super) check: Option<Check>,
    pub(super) security: Option<SecurityTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Run {
    pub(super) name: Spanned<String>,
    pub(super) replay: Option<Spanned<u64>>,
    pub(super) events: Option<Spanned<u64>>,
    pub(super) batch: Spanned<u64>,
    pub(super) batch_timeout_ms: Option<Spanned<u64>>,
    pub(super) window: Option<Spanned<u64>>,
    pub(super) max_in_flight: Option<Spanned<u64>>,
    pub(super) traffic_shaping: Option<Spanned<String>>,
    pub(super) timeout_ms: Option<Spanned<u64>>,
    pub(super) drain_timeout_ms: Option<Spanned<u64>>,
    pub(super) spin_us: Option<Spanned<u64>>,
    pub(super) listen: Option<Spanned<String>>,
    pub(super) device: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Readout {
    pub(super) name: Spanned<String>,
    pub(super) input: Option<Spanned<PathBuf>>,
    pub(super) generator: Option<Spanned<Generator>>,
    pub(super) udp: Option<Spanned<Udp>>,
    pub(super) ring: Option<Spanned<Ring>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ring {
    pub(super) name: Spanned<String>,
    pub(super) first_source: u32,
    pub(super) sources: Spanned<u64>,
    /// Kind of the sources; 0 is no detector's.
    #[serde(default)]
    pub(super) kind: u32,
    pub(super) max_len: Spanned<Bytes>,
    pub(super) size: Option<Spanned<Bytes>>,
    pub(super) busy_above: Option<Spanned<f64>>,
    pub(super) busy_below: Option<Spanned<f64>>,
    pub(super) buffer_events: Option<Spanned<u64>>,
    pub(super) give_up_ms: Option<Spanned<u64>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Generator {
    pub(super) first_source: u32,
    pub(super) sources: Spanned<u64>,
    /// Kind of the sources; 0 is no detector's.
    #[serde(default)]
    pub(super) kind: u32,
    pub(super) size: Spanned<Bytes>,
    pub(super) size_distribution: Option<Spanned<String>>,
    pub(super) rate_hz: Option<Spanned<f64>>,
    pub(super) arrival: Option<Spanned<String>>,
    #[serde(default)]
    pub(super) seed: u64,
    pub(super) missing: Option<Spanned<f64>>,
    pub(super) corrupt: Option<Spanned<f64>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Udp {
    pub(super) listen: Spanned<String>,
    pub(super) first_source: u32,
    pub(super) sources: Spanned<u64>,
    /// Kind of the sources; 0 is no detector's.
    #[serde(default)]
    pub(super) kind: u32,
    pub(super) max_len: Spanned<Bytes>,
    pub(super) buffer_events: Option<Spanned<u64>>,
    pub(super) give_up_ms: Option<Spanned<u64>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Builder {
    pub(super) name: Spanned<String>,
    pub(super) card: Option<Spanned<String>>,
    pub(super) landing: Option<Spanned<String>>,
    pub(super) slots: Spanned<u64>,
    pub(super) trigger: Option<Trigger>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Trigger {
    pub(super) program: Spanned<PathBuf>,
    #[serde(default)]
    pub(super) arguments: Vec<String>,
    pub(super) workers: Option<Spanned<u64>>,
    pub(super) credits: Option<Spanned<u64>>,
    pub(super) timeout_ms: Option<Spanned<u64>>,
    pub(super) cpus: Option<Spanned<Vec<usize>>>,
    pub(super) events: Option<Spanned<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Card {
    pub(super) name: Spanned<String>,
    pub(super) memory: Spanned<Bytes>,
    pub(super) kernel: Spanned<String>,
    pub(super) threshold: Option<Spanned<u64>>,
    pub(super) verify: Option<Spanned<bool>>,
    pub(super) patches: Option<Spanned<PathBuf>>,
    pub(super) module: Option<Spanned<PathBuf>>,
    pub(super) arguments: Option<Spanned<Vec<i64>>>,
    pub(super) kind: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Recovery {
    pub(super) builder_loss: Option<Spanned<String>>,
    pub(super) readout_loss: Option<Spanned<String>>,
    pub(super) spare_builders: Option<Spanned<u64>>,
    pub(super) restarts: Option<Spanned<u64>>,
    pub(super) join_timeout_ms: Option<Spanned<u64>>,
    pub(super) standby: Option<Spanned<bool>>,
    pub(super) takeover_timeout_ms: Option<Spanned<u64>>,
    pub(super) source_timeout_ms: Option<Spanned<u64>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Output {
    pub(super) directory: Spanned<PathBuf>,
    pub(super) events: Option<Spanned<String>>,
    pub(super) max_events: Option<u64>,
    pub(super) rotate_size: Option<Spanned<Bytes>>,
    pub(super) rotate_interval_s: Option<Spanned<u64>>,
    pub(super) sync: Option<Spanned<String>>,
    pub(super) format: Option<Spanned<String>>,
    pub(super) direct: Option<Spanned<bool>>,
    pub(super) replace: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Check {
    pub(super) reference_decisions: Option<Spanned<PathBuf>>,
    pub(super) checksums: Option<Spanned<String>>,
    pub(super) max_corrupt: Option<Spanned<f64>>,
}

/// The field at a path, for example `run.batch`: without places in arrays, as other errors name it.
fn field_at(path: &ErrorPath) -> String {
    let keys = path.iter().filter_map(|segment| match segment {
        // That of a value with its span.
        Segment::Map { key } if !key.starts_with('$') => Some(key.as_str()),
        _ => None,
    });
    keys.collect::<Vec<_>>().join(".")
}

impl ConfigFile {
    /// Reads a configuration.
    ///
    /// # Errors
    /// The line and the field with the problem.
    pub fn load(path: &Path) -> Result<ConfigFile, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|cause| ConfigError {
            file: path.to_owned(),
            line: None,
            field: String::new(),
            problem: Box::new(Problem::Unreadable(cause)),
        })?;
        ConfigFile::parse(path, &text)
    }

    /// Parses the text of a configuration. `path` names it in errors; relative paths in it start there.
    ///
    /// # Errors
    /// As [`ConfigFile::load`].
    pub fn parse(path: &Path, text: &str) -> Result<ConfigFile, ConfigError> {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1);
        let lines: Vec<usize> = std::iter::once(0).chain(breaks).collect();
        let refused = |field: String, error: &toml::de::Error| ConfigError {
            file: path.to_owned(),
            line: error.span().map(|span| line_at(&lines, span.start)),
            field,
            problem: Box::new(Problem::Syntax(error.message().to_owned())),
        };
        let parsed = toml::Deserializer::parse(text).map_err(|error| refused(String::new(), &error))?;
        let tables = serde_path_to_error::deserialize(parsed)
            .map_err(|error| refused(field_at(error.path()), error.inner()))?;
        let config = ConfigFile { path: path.to_owned(), lines, tables, is_of_several_hosts: false };
        config.check_consistency()?;
        Ok(config)
    }

    /// Overrides `run.replay`.
    ///
    /// # Errors
    /// The value is 0, or the file has `run.events`.
    pub fn set_replay(&mut self, passes: u64) -> Result<(), ConfigError> {
        let span = self.tables.run.replay.as_ref().map_or(0..0, Spanned::span);
        self.tables.run.replay = Some(Spanned::new(span, passes));
        self.check_consistency()
    }

    /// Checks as [`check`](Self::check) does, on one of several hosts with processes of the run: addresses to listen on may be
    /// those of another one.
    ///
    /// # Errors
    /// The first problem.
    pub fn check_on_one_of_several_hosts(mut self) -> Result<RunConfig, ConfigError> {
        self.is_of_several_hosts = true;
        self.check()
    }

    /// Whether a socket was bound, or its address is on another host.
    pub(super) fn bound<T>(&self, socket: std::io::Result<T>) -> std::io::Result<()> {
        match socket {
            Err(cause) if self.is_of_several_hosts && cause.kind() == ErrorKind::AddrNotAvailable => Ok(()),
            other => other.map(drop),
        }
    }

    /// An error in a value of the file.
    pub(super) fn at<T>(&self, value: &Spanned<T>, field: &str, problem: impl Into<Problem>) -> ConfigError {
        let line = Some(line_at(&self.lines, value.span().start));
        ConfigError {
            file: self.path.clone(),
            line,
            field: field.to_owned(),
            problem: Box::new(problem.into()),
        }
    }

    /// An error in the file as a whole, or a missing part.
    pub(super) fn about(&self, field: &str, problem: impl Into<Problem>) -> ConfigError {
        ConfigError {
            file: self.path.clone(),
            line: None,
            field: field.to_owned(),
            problem: Box::new(problem.into()),
        }
    }

    fn check_consistency(&self) -> Result<(), ConfigError> {
        let Tables { run, readout, builder, card, output, .. } = &self.tables;
        self.check_name("run.name", &run.name)?;
        self.check_range("run.batch", Some(&run.batch), 1..=MAX_BATCH)?;
        self.check_range("run.replay", run.replay.as_ref(), 1..=u64::MAX)?;
        self.check_range("run.events", run.events.as_ref(), 1..=u64::MAX)?;
        if let (Some(events), Some(_)) = (&run.events, &run.replay) {
            let problem = Problem::Conflict("set either replay or events, not both".into());
            return Err(self.at(events, "run.events", problem));
        }
        self.check_range("run.window", run.window.as_ref(), 1..=MAX_SLOTS)?;
        self.check_range("run.max_in_flight", run.max_in_flight.as_ref(), 1..=u64::from(u32::MAX))?;
        if let Some(shaping) = &run.traffic_shaping {
            self.check_value("run.traffic_shaping", shaping, &["barrel_shifter", "none"])?;
        }
        self.check_range("run.batch_timeout_ms", run.batch_timeout_ms.as_ref(), 1..=MAX_MILLISECONDS)?;
        self.check_range("run.timeout_ms", run.timeout_ms.as_ref(), 1..=MAX_MILLISECONDS)?;
        self.check_range("run.drain_timeout_ms", run.drain_timeout_ms.as_ref(), 1..=MAX_MILLISECONDS)?;
        self.check_range("run.spin_us", run.spin_us.as_ref(), 0..=MAX_SPIN)?;
        if readout.is_empty() {
            return Err(self.about("readout", Problem::None));
        }
        if builder.is_empty() {
            return Err(self.about("builder", Problem::None));
        }
        self.check_names("readout.name", readout.iter().map(|unit| &unit.name))?;
        self.check_names("builder.name", builder.iter().map(|unit| &unit.name))?;
        self.check_file_names()?;
        self.check_names("card.name", card.iter().map(|card| &card.name))?;
        for unit in builder {
            self.check_range("builder.slots", Some(&unit.slots), 1..=MAX_SLOTS)?;
            unit.trigger.as_ref().map_or(Ok(()), |trigger| self.check_trigger(trigger))?;
        }
        let Recovery {
            builder_loss,
            readout_loss,
            spare_builders,
            restarts,
            join_timeout_ms,
            standby,
            takeover_timeout_ms,
            source_timeout_ms,
        } = &self.tables.recovery;
        if let Some(policy) = builder_loss {
            self.check_value("recovery.builder_loss", policy, &["rebuild", "stop"])?;
        }
        if let Some(policy) = readout_loss {
            self.check_value("recovery.readout_loss", policy, &["deliver", "discard", "stop"])?;
        }
        let most = builder.len() as u64 - 1;
        self.check_range("recovery.spare_builders", spare_builders.as_ref(), 0..=most)?;
        self.check_range("recovery.restarts", restarts.as_ref(), 0..=MAX_RESTARTS)?;
        self.check_range("recovery.join_timeout_ms", join_timeout_ms.as_ref(), 1..=MAX_MILLISECONDS)?;
        self.check_range("recovery.takeover_timeout_ms", takeover_timeout_ms.as_ref(), 1..=MAX_MILLISECONDS)?;
        self.check_range("recovery.source_timeout_ms", source_timeout_ms.as_ref(), 1..=MAX_MILLISECONDS)?;
        let has_standby = standby.as_ref().is_some_and(|standby| *standby.get_ref());
        if let Some(timeout) = takeover_timeout_ms.as_ref().filter(|_| !has_standby) {
            let problem =
                Problem::Conflict("there is no standby manager to wait for; set standby = true".into());
            return Err(self.at(timeout, "recovery.takeover_timeout_ms", problem));
        }
        let is_stop =
            |policy: &Option<Spanned<String>>| policy.as_ref().is_some_and(|p| p.get_ref() == "stop");
        let stops = is_stop(builder_loss) && (readout_loss.is_none() || is_stop(readout_loss));
        if let Some(restarts) = restarts.as_ref().filter(|restarts| stops && *restarts.get_ref() > 0) {
            let problem = Problem::Conflict(
                "no unit joins again, because a run stops at every loss; set builder_loss = \"rebuild\" or readout_loss = \
                 \"deliver\" or \"discard\""
                    .into(),
            );
            return Err(self.at(restarts, "recovery.restarts", problem));
        }
        self.check_landing()?;
        card.iter().try_for_each(|card| self.check_kernel(card))?;
        if let Some(checksums) = self.tables.check.as_ref().and_then(|check| check.checksums.as_ref()) {
            self.check_value("check.checksums", checksums, &["none", "sample", "all"])?;
        }
        output.as_ref().map_or(Ok(()), |output| self.check_output(output))
    }

    fn check_trigger(&self, trigger: &Trigger) -> Result<(), ConfigError> {
        self.check_range("builder.trigger.workers", trigger.workers.as_ref(), 1..=MAX_WORKERS)?;
        self.check_range("builder.trigger.credits", trigger.credits.as_ref(), 1..=MAX_CREDITS)?;
        self.check_range("builder.trigger.timeout_ms", trigger.timeout_ms.as_ref(), 1..=MAX_MILLISECONDS)?;
        if let Some(events) = &trigger.events {
            self.check_value("builder.trigger.events", events, &["accepted", "all"])?;
        }
        let cpus = trigger.cpus.as_ref().map_or(&[][..], |cpus| cpus.get_ref());
        if let (Some(cpus), Some(cpu)) = (&trigger.cpus, cpus.iter().find(|&&cpu| cpu >= MAX_CPUS)) {
            let problem = Problem::OutOfRange { value: *cpu as u64, least: 0, most: MAX_CPUS as u64 - 1 };
            return Err(self.at(cpus, "builder.trigger.cpus", problem));
        }
        let stored = self.tables.output.as_ref().and_then(|output| output.events.as_ref());
        match stored.filter(|events| events.get_ref() != "accepted") {
            Some(events) => {
                let problem = Problem::Conflict(
                    "a builder unit with a software trigger stores the events that it accepts; remove this line".into(),
                );
                Err(self.at(events, "output.events", problem))
            }
            None => Ok(()),
        }
    }

    fn check_output(&self, output: &Output) -> Result<(), ConfigError> {
        if let Some(format) = &output.format {
            self.check_value("output.format", format, &["hdf5", "batches"])?;
        }
        if let Some(direct) = &output.direct
            && output.format.as_ref().is_none_or(|format| format.get_ref() != "batches")
        {
            let problem = Problem::Conflict("only for format = \"batches\"; remove this line".into());
            return Err(self.at(direct, "output.direct", problem));
        }
        if let Some(events) = &output.events {
            self.check_value("output.events", events, &["accepted", "built", "all"])?;
        }
        if let Some(sync) = &output.sync {
            self.check_value("output.sync", sync, &["file", "batch"])?;
        }
        if let Some(size) = output.rotate_size.as_ref().filter(|size| *size.get_ref() < MIN_ROTATE_SIZE) {
            let problem =
                Problem::OutOfRange { value: size.get_ref().0, least: MIN_ROTATE_SIZE.0, most: u64::MAX };
            return Err(self.at(size, "output.rotate_size", problem));
        }
        let interval = output.rotate_interval_s.as_ref();
        self.check_range("output.rotate_interval_s", interval, 1..=MAX_ROTATE_SECONDS)
    }

    pub(super) fn check_range(
        &self,
        field: &str,
        value: Option<&Spanned<u64>>,
        range: RangeInclusive<u64>,
    ) -> Result<(), ConfigError> {
        match value {
            Some(value) if !range.contains(value.get_ref()) => {
                let (least, most) = range.into_inner();
                Err(self.at(value, field, Problem::OutOfRange { value: *value.get_ref(), least, most }))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check_value(
        &self,
        field: &str,
        value: &Spanned<String>,
        known: &'static [&'static str],
    ) -> Result<(), ConfigError> {
        if known.contains(&value.get_ref().as_str()) {
            return Ok(());
        }
        let problem = Problem::UnknownValue { value: value.get_ref().clone(), known };
        Err(self.at(value, field, problem))
    }

    /// Names are used in file names and in socket names of cards.
    pub(super) fn check_name(&self, field: &str, name: &Spanned<String>) -> Result<(), ConfigError> {
        let text = name.get_ref();
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        let starts_well = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        if starts_well && text.len() <= 24 && text.bytes().all(legal) {
            return Ok(());
        }
        Err(self.at(name, field, Problem::BadName(text.clone())))
    }

    fn check_names<'a>(
        &self,
        field: &str,
        names: impl Iterator<Item = &'a Spanned<String>>,
    ) -> Result<(), ConfigError> {
        let mut seen = HashMap::new();
        for name in names {
            self.check_name(field, name)?;
            let line = line_at(&self.lines, name.span().start);
            if let Some(first) = seen.insert(name.get_ref(), line) {
                let problem = Problem::DuplicateName { name: name.get_ref().clone(), first };
                return Err(self.at(name, field, problem));
            }
        }
        Ok(())
    }

    /// Refuses a builder name that looks like another's with the number of a file: `bu0.0001.h5` is also the second file of `bu0`.
    fn check_file_names(&self) -> Result<(), ConfigError> {
        let names: HashSet<&str> =
            self.tables.builder.iter().map(|unit| unit.name.get_ref().as_str()).collect();
        for unit in &self.tables.builder {
            let Some((other, number)) = unit.name.get_ref().rsplit_once('.') else { continue };
            if names.contains(other) && number.len() >= 4 && number.bytes().all(|byte| byte.is_ascii_digit())
            {
                let problem = format!(
                    "{:?} is the name of a file of {other:?}: choose another name",
                    unit.name.get_ref()
                );
                return Err(self.at(&unit.name, "builder.name", Problem::Conflict(problem)));
            }
        }
        Ok(())
    }

    /// Checks that every builder unit has a landing target, and every card a builder unit.
    fn check_landing(&self) -> Result<(), ConfigError> {
        let Tables { builder, card, .. } = &self.tables;
        let mut taken: HashMap<&str, &str> = HashMap::new();
        for unit in builder {
            let name = match (&unit.card, &unit.landing) {
                (Some(name), None) => name,
                (None, Some(landing)) => {
                    self.check_value("builder.landing", landing, &["host"])?;
                    continue;
                }
                (Some(_), Some(landing)) => {
                    let problem = Problem::Conflict("set either card or landing, not both".into());
                    return Err(self.at(landing, "builder.landing", problem));
                }
                (None, None) => {
                    let problem = Problem::Conflict("set card = \"NAME\" or landing = \"host\"".into());
                    return Err(self.at(&unit.name, "builder", problem));
                }
            };
            if !card.iter().any(|card| card.name.get_ref() == name.get_ref()) {
                let known = card.iter().map(|card| card.name.get_ref().clone()).collect();
                let problem = Problem::UnknownCard { name: name.get_ref().clone(), known };
                return Err(self.at(name, "builder.card", problem));
            }
            if let Some(first) = taken.insert(name.get_ref(), unit.name.get_ref()) {
                let problem = Problem::CardTaken { card: name.get_ref().clone(), first: first.to_owned() };
                return Err(self.at(name, "builder.card", problem));
            }
        }
        match card.iter().find(|card| !taken.contains_key(card.name.get_ref().as_str())) {
            Some(idle) => {
                let problem =
                    Problem::Conflict("no builder unit uses this card; remove it or set builder.card".into());
                Err(self.at(&idle.name, "card", problem))
            }
            None => Ok(()),
        }
    }

    fn check_kernel(&self, card: &Card) -> Result<(), ConfigError> {
        self.check_value("card.kernel", &card.kernel, &["none", "verify", "cluster7", "wasm", "ptx"])?;
        self.check_range("card.threshold", card.threshold.as_ref(), 0..=u64::from(u32::MAX))?;
        let kernel = card.kernel.get_ref().as_str();
        let required = match kernel {
            "cluster7" => card.patches.is_none().then_some("patches = \"FILE.csv\""),
            "wasm" => card.module.is_none().then_some("module = \"FILE.wasm\""),
            "ptx" => card.module.is_none().then_some("module = \"FILE.ptx\""),
            _ => None,
        };
        if let Some(required) = required {
            let problem = Problem::Conflict(format!("kernel {kernel:?} needs {required}"));
            return Err(self.at(&card.kernel, "card.kernel", problem));
        }
        let given = [
            ("card.threshold", card.threshold.as_ref().map(Spanned::span), &["cluster7"][..]),
            ("card.verify", card.verify.as_ref().map(Spanned::span), &["cluster7", "wasm", "ptx"]),
            ("card.patches", card.patches.as_ref().map(Spanned::span), &["cluster7"]),
            ("card.module", card.module.as_ref().map(Spanned::span), &["wasm", "ptx"]),
            ("card.arguments", card.arguments.as_ref().map(Spanned::span), &["wasm", "ptx"]),
        ];
        let foreign =
            given.into_iter().find(|(_, span, kernels)| span.is_some() && !kernels.contains(&kernel));
        if let Some((field, Some(span), _)) = foreign {
            let problem = Problem::Conflict(format!("kernel {kernel:?} has no such setting"));
            return Err(self.at(&Spanned::new(span, ()), field, problem));
        }
        match &card.arguments {
            Some(arguments) if arguments.get_ref().len() > FUNCTION_ARGUMENTS => {
                let problem = Problem::Conflict(format!(
                    "{} argument words: must be at most {FUNCTION_ARGUMENTS}",
                    arguments.get_ref().len()
                ));
                Err(self.at(arguments, "card.arguments", problem))
            }
            _ => Ok(()),
        }
    }
}

/// The line, counted from 1, of the byte at `offset`.
fn line_at(lines: &[usize], offset: usize) -> usize {
    lines.partition_point(|&start| start <= offset)
}
