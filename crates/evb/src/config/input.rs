//! Checks of the readout units' inputs.

use super::error::{ConfigError, Problem};
use super::file::{ConfigFile, Generator, Readout, Ring, Udp};
use super::run_config::{Arrival, GeneratorConfig, InputConfig, RingConfig, SizeDistribution, UdpConfig};
use crate::core::Bytes;
use crate::core::RuIndex;
use crate::layout::SourceInfo;
use crate::source::datagram::MAX_PAYLOAD;
use millstream_fragment::stream::Stream;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use std::net::{ToSocketAddrs, UdpSocket};
use std::num::NonZeroU16;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;

const DEFAULT_BUFFER_EVENTS: u64 = 4096;
const MAX_BUFFER_EVENTS: u64 = 1 << 20;
const DEFAULT_GIVE_UP_MS: u64 = 100;
/// Default size of a ring, and its maximum.
const DEFAULT_RING: Bytes = Bytes(8 << 20);
const MAX_RING: Bytes = Bytes(1 << 30);
/// Default marks of the busy signal.
const DEFAULT_BUSY_ABOVE: f64 = 0.75;
const DEFAULT_BUSY_BELOW: f64 = 0.5;
/// Maximum length of a generated fragment: 16 MiB.
const MAX_GENERATED: u64 = 16 << 20;

/// Properties of the inputs.
#[derive(Default)]
pub(super) struct Inputs {
    /// The events of the files; `None` if all inputs are live.
    file: Option<(PathBuf, Range<u64>)>,
    pub(super) sources: Vec<SourceInfo>,
    /// By readout unit.
    pub(super) counts: Vec<NonZeroU16>,
    pub(super) configs: Vec<InputConfig>,
    /// What each readout unit reads, for messages.
    names: Vec<String>,
}

impl Inputs {
    /// Number of the first event.
    pub(super) fn first(&self) -> u64 {
        self.file.as_ref().map_or(0, |(_, events)| events.start)
    }

    /// Number of events in the files; 0 without files.
    pub(super) fn events(&self) -> u64 {
        self.file.as_ref().map_or(0, |(_, events)| events.end - events.start)
    }

    pub(super) fn is_live(&self) -> bool {
        self.configs.iter().any(|config| config.file().is_none())
    }

    /// Refuses the stream file `second` if its events differ from those of the other files.
    pub(super) fn check_events(&self, second: &Path, events: &Range<u64>) -> Result<(), Problem> {
        let Some((first, expected)) = &self.file else { return Ok(()) };
        if events == expected {
            return Ok(());
        }
        Err(Problem::DifferentEvents {
            first: first.clone(),
            first_events: (expected.start, expected.end - 1),
            second: second.to_owned(),
            second_events: (events.start, events.end - 1),
        })
    }

    fn add_source(&mut self, source: SourceInfo, name: &str) -> Result<(), Problem> {
        if let Some(twice) = self.sources.iter().find(|known| known.id == source.id) {
            let first = self.names.get(twice.readout.index()).map_or(name, String::as_str);
            return Err(Problem::DuplicateSource { id: source.id, first: first.into(), second: name.into() });
        }
        self.sources.push(source);
        Ok(())
    }
}

impl ConfigFile {
    /// Opens and checks the inputs of all readout units.
    pub(super) fn inputs(&self) -> Result<Inputs, ConfigError> {
        let mut inputs = Inputs::default();
        for (index, unit) in self.tables.readout.iter().enumerate() {
            // The number of readout units was checked to fit.
            let readout = RuIndex(index as u16);
            let before = inputs.sources.len();
            let config = match (&unit.input, &unit.generator, &unit.udp, &unit.ring) {
                (Some(input), None, None, None) => self.file_input(&mut inputs, input, readout)?,
                (None, Some(generator), None, None) => {
                    self.generator_input(&mut inputs, unit, generator, readout)?
                }
                (None, None, Some(udp), None) => self.udp_input(&mut inputs, unit, udp, readout)?,
                (None, None, None, Some(ring)) => self.ring_input(&mut inputs, unit, ring, readout)?,
                _ => {
                    let problem = Problem::Conflict(
                        "set exactly one of input = \"FILE\", [readout.generator], [readout.udp] and [readout.ring]"
                            .into(),
                    );
                    return Err(self.at(&unit.name, "readout", problem));
                }
            };
            inputs.configs.push(config);
            let count = (inputs.sources.len() - before) as u64;
            let counted = u16::try_from(count).ok().and_then(NonZeroU16::new);
            let limit = Problem::OutOfRange { value: count, least: 1, most: u16::MAX.into() };
            inputs.counts.push(counted.ok_or_else(|| self.at(&unit.name, "readout", limit))?);
        }
        if inputs.is_live() && self.tables.run.events.is_none() {
            let problem =
                Problem::Conflict("set events = NUMBER: live sources have no end of their own".into());
            return Err(self.at(&self.tables.run.name, "run.events", problem));
        }
        Ok(inputs)
    }

    fn file_input(
        &self,
        inputs: &mut Inputs,
        input: &Spanned<PathBuf>,
        readout: RuIndex,
    ) -> Result<InputConfig, ConfigError> {
        let refuse = |problem| self.at(input, "readout.input", problem);
        let path = self.locate(input.get_ref());
        let stream = Stream::open(&path).map_err(|error| refuse(error.into()))?;
        inputs.check_events(&path, &stream.events()).map_err(refuse)?;
        inputs.file.get_or_insert_with(|| (path.clone(), stream.events()));
        let name = path.display().to_string();
        for source in stream.sources() {
            let source = SourceInfo {
                id: source.id(),
                kind: source.kind(),
                readout,
                max_len: source.max_len(),
                alignment: source.alignment(),
            };
            inputs.add_source(source, &name).map_err(refuse)?;
        }
        inputs.names.push(name);
        Ok(InputConfig::File(path))
    }

    fn generator_input(
        &self,
        inputs: &mut Inputs,
        unit: &Readout,
        generator: &Spanned<Generator>,
        readout: RuIndex,
    ) -> Result<InputConfig, ConfigError> {
        let table = generator.get_ref();
        if let Some(size_distribution) = &table.size_distribution {
            let known = &["fixed", "uniform", "exponential"];
            self.check_value("readout.generator.size_distribution", size_distribution, known)?;
        }
        if let Some(arrival) = &table.arrival {
            self.check_value("readout.generator.arrival", arrival, &["periodic", "poisson"])?;
        }
        if let Some(rate) = table.rate_hz.as_ref().filter(|rate| !(1e-3..=1e9).contains(rate.get_ref())) {
            let problem =
                Problem::Conflict(format!("{} is out of range: must be 0.001 to 1e9", rate.get_ref()));
            return Err(self.at(rate, "readout.generator.rate_hz", problem));
        }
        let config = GeneratorConfig {
            first_source: table.first_source,
            sources: self.sources("readout.generator.sources", table.first_source, &table.sources)?,
            kind: table.kind,
            size: self.length("readout.generator.size", &table.size, MAX_GENERATED)?,
            size_distribution: match table.size_distribution.as_ref().map(|text| text.get_ref().as_str()) {
                Some("uniform") => SizeDistribution::Uniform,
                Some("exponential") => SizeDistribution::Exponential,
                _ => SizeDistribution::Fixed,
            },
            rate_hz: table.rate_hz.as_ref().map(|rate| *rate.get_ref()),
            arrival: match table.arrival.as_ref().map(|text| text.get_ref().as_str()) {
                Some("poisson") => Arrival::Poisson,
                _ => Arrival::Periodic,
            },
            seed: table.seed,
            missing: self.fraction("readout.generator.missing", table.missing.as_ref())?,
            corrupt: self.fraction("readout.generator.corrupt", table.corrupt.as_ref())?,
        };
        let sources = (config.first_source, config.sources);
        self.add_live(inputs, unit, readout, (sources, config.kind, config.max_len()))?;
        Ok(InputConfig::Generator(config))
    }

    fn udp_input(
        &self,
        inputs: &mut Inputs,
        unit: &Readout,
        udp: &Spanned<Udp>,
        readout: RuIndex,
    ) -> Result<InputConfig, ConfigError> {
        let table = udp.get_ref();
        let listen = table.listen.get_ref();
        let bound = listen
            .to_socket_addrs()
            .and_then(|addresses| UdpSocket::bind(addresses.collect::<Vec<_>>().as_slice()));
        if let Err(cause) = self.bound(bound) {
            let problem = Problem::Listen { address: listen.clone(), cause };
            return Err(self.at(&table.listen, "readout.udp.listen", problem));
        }
        let (buffer, give_up) = (table.buffer_events.as_ref(), table.give_up_ms.as_ref());
        self.check_range("readout.udp.buffer_events", buffer, 1..=MAX_BUFFER_EVENTS)?;
        self.check_range("readout.udp.give_up_ms", give_up, 1..=600_000)?;
        let config = UdpConfig {
            listen: listen.clone(),
            first_source: table.first_source,
            sources: self.sources("readout.udp.sources", table.first_source, &table.sources)?,
            kind: table.kind,
            max_len: self.length("readout.udp.max_len", &table.max_len, MAX_PAYLOAD as u64)?,
            buffer_events: buffer.map_or(DEFAULT_BUFFER_EVENTS, |events| *events.get_ref()),
            give_up: Duration::from_millis(give_up.map_or(DEFAULT_GIVE_UP_MS, |ms| *ms.get_ref())),
        };
        self.check_buffer("readout.udp.buffer_events", buffer, config.buffer_events)?;
        let sources = (config.first_source, config.sources);
        self.add_live(inputs, unit, readout, (sources, config.kind, config.max_len))?;
        Ok(InputConfig::Udp(config))
    }

    fn ring_input(
        &self,
        inputs: &mut Inputs,
        unit: &Readout,
        ring: &Spanned<Ring>,
        readout: RuIndex,
    ) -> Result<InputConfig, ConfigError> {
        let table = ring.get_ref();
        self.check_name("readout.ring.name", &table.name)?;
        let (buffer, give_up) = (table.buffer_events.as_ref(), table.give_up_ms.as_ref());
        self.check_range("readout.ring.buffer_events", buffer, 1..=MAX_BUFFER_EVENTS)?;
        self.check_range("readout.ring.give_up_ms", give_up, 1..=600_000)?;
        let fraction = |field, given: Option<&Spanned<f64>>, default| {
            let value = self.fraction(field, given)?;
            Ok(if given.is_some() { value } else { default })
        };
        let config = RingConfig {
            name: table.name.get_ref().clone(),
            first_source: table.first_source,
            sources: self.sources("readout.ring.sources", table.first_source, &table.sources)?,
            kind: table.kind,
            max_len: self.length("readout.ring.max_len", &table.max_len, MAX_GENERATED)?,
            size: match &table.size {
                Some(size) => Bytes(self.length("readout.ring.size", size, MAX_RING.0)?.into()),
                None => DEFAULT_RING,
            },
            busy_above: fraction("readout.ring.busy_above", table.busy_above.as_ref(), DEFAULT_BUSY_ABOVE)?,
            busy_below: fraction("readout.ring.busy_below", table.busy_below.as_ref(), DEFAULT_BUSY_BELOW)?,
            buffer_events: buffer.map_or(DEFAULT_BUFFER_EVENTS, |events| *events.get_ref()),
            give_up: Duration::from_millis(give_up.map_or(DEFAULT_GIVE_UP_MS, |ms| *ms.get_ref())),
        };
        if config.busy_below >= config.busy_above {
            let problem = Problem::Conflict(format!(
                "busy_below = {} must be less than busy_above = {}",
                config.busy_below, config.busy_above
            ));
            return Err(self.at(ring, "readout.ring.busy_below", problem));
        }
        self.check_buffer("readout.ring.buffer_events", buffer, config.buffer_events)?;
        let sources = (config.first_source, config.sources);
        self.add_live(inputs, unit, readout, (sources, config.kind, config.max_len))?;
        Ok(InputConfig::Ring(config))
    }

    /// A batch whose events do not fit into the buffer would never be there.
    fn check_buffer(
        &self,
        field: &str,
        given: Option<&Spanned<u64>>,
        events: u64,
    ) -> Result<(), ConfigError> {
        let batch = *self.tables.run.batch.get_ref();
        if events >= 2 * batch {
            return Ok(());
        }
        let problem = Problem::Conflict(format!(
            "{events} events are too few: at least two batches of {batch} are needed"
        ));
        let place = given.map_or_else(|| self.tables.run.batch.span(), Spanned::span);
        Err(self.at(&Spanned::new(place, ()), field, problem))
    }

    /// Adds the sources of a live input.
    fn add_live(
        &self,
        inputs: &mut Inputs,
        unit: &Readout,
        readout: RuIndex,
        ((first, count), kind, max_len): ((u32, u16), u32, u32),
    ) -> Result<(), ConfigError> {
        let name = unit.name.get_ref();
        for id in (first..).take(count.into()) {
            let (id, kind) = (SourceId(id), SourceKind(kind));
            let source = SourceInfo { id, kind, readout, max_len, alignment: Alignment::CACHE_LINE };
            inputs.add_source(source, name).map_err(|problem| self.at(&unit.name, "readout", problem))?;
        }
        inputs.names.push(name.clone());
        Ok(())
    }

    /// The number of sources, whose ids must fit.
    fn sources(&self, field: &str, first: u32, count: &Spanned<u64>) -> Result<u16, ConfigError> {
        let most = u64::from(u16::MAX).min(u64::from(u32::MAX - first));
        self.check_range(field, Some(count), 1..=most)?;
        // Checked to fit.
        Ok(*count.get_ref() as u16)
    }

    fn length(&self, field: &str, len: &Spanned<Bytes>, most: u64) -> Result<u32, ConfigError> {
        let value = len.get_ref().0;
        match u32::try_from(value) {
            Ok(len) if value <= most => Ok(len),
            _ => Err(self.at(len, field, Problem::OutOfRange { value, least: 0, most })),
        }
    }

    pub(super) fn fraction(&self, field: &str, value: Option<&Spanned<f64>>) -> Result<f64, ConfigError> {
        match value {
            Some(value) if !(0.0..=1.0).contains(value.get_ref()) => {
                let problem = format!("{} is out of range: must be 0 to 1", value.get_ref());
                Err(self.at(value, field, Problem::Conflict(problem)))
            }
            value => Ok(value.map_or(0.0, |value| *value.get_ref())),
        }
    }
}
