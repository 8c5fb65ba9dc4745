//! Generated fragments: size distribution, rate and faults from a seed.

use super::{Source, SourceStatistics};
use crate::config::{Arrival, GeneratorConfig, SizeDistribution};
use crate::core::plan::Batch;
use crate::layout::PacketArea;
use crate::process::ProcessError;
use millstream_fragment::mfp::{Repr, assemble};
use millstream_fragment::packetize::{FileExtent, PacketLayout};
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use std::time::{Duration, Instant};

/// Exponential sizes are truncated at this multiple of their mean.
pub(crate) const EXPONENTIAL_LIMIT: u32 = 8;
/// Bytes that fragments are cut from.
const PAYLOAD_BLOCK: usize = 1 << 16;

/// Makes the fragments of a readout unit. A fragment depends only on seed, source and event.
pub struct Generator {
    config: GeneratorConfig,
    first_event: u64,
    sources: Vec<SourceId>,
    payload: Vec<u8>,
    clock: Option<EventClock>,
    made: u64,
}

impl Generator {
    pub(super) fn new(config: &GeneratorConfig, areas: &[PacketArea], first_event: u64) -> Generator {
        let len = PAYLOAD_BLOCK + config.max_len() as usize;
        let mut random = Random(config.seed);
        let words = std::iter::repeat_with(|| random.next().to_le_bytes());
        Generator {
            first_event,
            sources: areas.iter().map(|area| SourceId(area.source)).collect(),
            payload: words.flatten().take(len).collect(),
            clock: config.rate_hz.map(|rate| EventClock::new(rate, config.arrival, config.seed)),
            made: 0,
            config: config.clone(),
        }
    }

    /// The fragment of a source and an event; `None` if it is missing on purpose.
    fn fragment(&self, source: SourceId, event: u64) -> Option<Fragment<'_>> {
        let mut random = Random::of(self.config.seed, source, event);
        if random.unit() < self.config.missing {
            return None;
        }
        let len = self.config.len(random.unit());
        let start = random.next() as usize % PAYLOAD_BLOCK;
        let mut fragment = Fragment::new(event, &self.payload[start..start + len as usize]);
        if random.unit() < self.config.corrupt {
            fragment.crc ^= 1;
        }
        Some(fragment)
    }
}

impl Source for Generator {
    fn start_at(&mut self, events: u64) {
        if let Some(clock) = &mut self.clock {
            clock.events = events;
        }
    }

    fn poll_available(&mut self, now: Instant) -> u64 {
        self.clock.as_mut().map_or(u64::MAX, |clock| clock.events(now))
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.clock.as_ref().and_then(EventClock::next)
    }

    fn packet(
        &mut self,
        position: usize,
        batch: &Batch,
        buffer: &mut [u8],
        extents: &mut Vec<FileExtent>,
    ) -> Result<PacketLayout, ProcessError> {
        extents.clear();
        let source = self.sources[position];
        let events = batch.first_event.0..batch.first_event.0 + u64::from(batch.events);
        debug_assert!(events.start >= self.first_event);
        let fragments: Vec<Fragment<'_>> = events.filter_map(|event| self.fragment(source, event)).collect();
        let packet = packet(source, self.config.kind, batch, &fragments, buffer)?;
        self.made += u64::from(packet.n_fragments);
        Ok(packet)
    }

    fn statistics(&self) -> Vec<SourceStatistics> {
        Vec::new()
    }
}

/// Writes a whole packet with payload.
pub(super) fn packet(
    source: SourceId,
    kind: u32,
    batch: &Batch,
    fragments: &[Fragment<'_>],
    buffer: &mut [u8],
) -> Result<PacketLayout, ProcessError> {
    let repr = Repr {
        source,
        kind: SourceKind(kind),
        first_event: batch.first_event.0,
        n_events: batch.events.into(),
        // At most one per event.
        n_fragments: fragments.len() as u32,
        alignment: Alignment::CACHE_LINE,
    };
    let total_len = assemble(buffer, repr, fragments)
        .map_err(|error| ProcessError::InputChanged { input: source.to_string(), what: error.to_string() })?;
    let payload: usize = fragments.iter().map(|fragment| fragment.payload.len()).sum();
    // A part of the packet, so it fits.
    let payload_len = payload as u32;
    Ok(PacketLayout { header_len: total_len, total_len, n_fragments: repr.n_fragments, payload_len })
}

impl GeneratorConfig {
    /// Length of the longest fragment, in bytes.
    pub(crate) fn max_len(&self) -> u32 {
        match self.size_distribution {
            SizeDistribution::Fixed => self.size,
            SizeDistribution::Uniform => self.size.saturating_mul(2),
            SizeDistribution::Exponential => self.size.saturating_mul(EXPONENTIAL_LIMIT),
        }
    }

    /// Length of a fragment for a random number from 0 to 1.
    fn len(&self, unit: f64) -> u32 {
        let mean = f64::from(self.size);
        let len = match self.size_distribution {
            SizeDistribution::Fixed => return self.size,
            SizeDistribution::Uniform => 2.0 * mean * unit,
            SizeDistribution::Exponential => -mean * (1.0 - unit).ln(),
        };
        (len as u32).min(self.max_len())
    }
}

/// Times of events.
struct EventClock {
    begin: Option<Instant>,
    rate: f64,
    arrival: Arrival,
    random: Random,
    events: u64,
    /// Time of the next event, in seconds from the begin.
    next: f64,
}

impl EventClock {
    fn new(rate: f64, arrival: Arrival, seed: u64) -> EventClock {
        let mut clock = EventClock { begin: None, rate, arrival, random: Random(seed), events: 0, next: 0.0 };
        clock.next = clock.interval();
        clock
    }

    fn interval(&mut self) -> f64 {
        match self.arrival {
            Arrival::Periodic => 1.0 / self.rate,
            Arrival::Poisson => -(1.0 - self.random.unit()).ln() / self.rate,
        }
    }

    /// Number of events up to now. The clock starts with the first call.
    fn events(&mut self, now: Instant) -> u64 {
        let begin = *self.begin.get_or_insert(now);
        let elapsed = now.saturating_duration_since(begin).as_secs_f64();
        while self.next <= elapsed {
            self.events += 1;
            self.next += self.interval();
        }
        self.events
    }

    fn next(&self) -> Option<Instant> {
        self.begin.map(|begin| begin + Duration::from_secs_f64(self.next))
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    /// The numbers of one fragment.
    fn of(seed: u64, source: SourceId, event: u64) -> Random {
        let mut random = Random(seed ^ u64::from(source.0).rotate_left(32));
        let base = random.next();
        Random(base ^ event.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1, without 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> GeneratorConfig {
        GeneratorConfig {
            first_source: 1,
            sources: 1,
            kind: 1,
            size: 1000,
            size_distribution: SizeDistribution::Exponential,
            rate_hz: None,
            arrival: Arrival::Poisson,
            seed: 7,
            missing: 0.1,
            corrupt: 0.01,
        }
    }

    #[test]
    fn fragments_have_the_configured_distribution_and_depend_on_the_seed_only() {
        let areas = [PacketArea {
            source: 1,
            kind: 1,
            readout: crate::core::RuIndex(0),
            offset: 0,
            capacity: 1 << 20,
            header_len: 64,
        }];
        let make = || Generator::new(&config(), &areas, 0);
        let (first, second) = (make(), make());
        let (mut missing, mut corrupt, mut bytes) = (0, 0, 0);
        for event in 0..10_000 {
            let fragment = first.fragment(SourceId(1), event);
            assert_eq!(fragment, second.fragment(SourceId(1), event));
            let Some(fragment) = fragment else {
                missing += 1;
                continue;
            };
            corrupt += u32::from(!fragment.is_intact());
            bytes += fragment.payload.len();
            assert!(fragment.payload.len() <= 8000);
        }
        assert!((900..1100).contains(&missing), "{missing}");
        assert!((50..150).contains(&corrupt), "{corrupt}");
        let mean = bytes as f64 / f64::from(10_000 - missing);
        assert!((950.0..1050.0).contains(&mean), "{mean}");
    }

    #[test]
    fn a_generator_that_joins_a_run_goes_on_with_its_events() {
        let config = GeneratorConfig { rate_hz: Some(10.0), arrival: Arrival::Periodic, ..config() };
        let mut generator = Generator::new(&config, &[], 0);
        generator.start_at(500);
        let begin = Instant::now();
        assert_eq!(generator.poll_available(begin), 500);
        assert_eq!(generator.poll_available(begin + Duration::from_millis(1050)), 510);
    }

    #[test]
    fn events_come_at_the_rate() {
        let begin = Instant::now();
        let hour = begin + Duration::from_secs(3600);
        let mut periodic = EventClock::new(10.0, Arrival::Periodic, 1);
        assert_eq!(periodic.events(begin), 0);
        assert_eq!(periodic.events(begin + Duration::from_millis(1050)), 10);
        assert!(periodic.next().unwrap() > begin + Duration::from_millis(1050));
        assert!((35_999..=36_001).contains(&periodic.events(hour)));
        let mut poisson = EventClock::new(10.0, Arrival::Poisson, 1);
        poisson.events(begin);
        let events = poisson.events(hour);
        // Five standard deviations of 190.
        assert!((35_050..36_950).contains(&events), "{events}");
    }
}
