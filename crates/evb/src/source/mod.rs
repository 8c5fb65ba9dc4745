//! Sources of a readout unit: where its fragments come from.
//!
//! - [`mod@file`]: replays a stream file; its payload is sent from the mapping, without a copy.
//! - [`generator`]: makes fragments by rate and size, for tests of a system without a detector.
//! - [`ring`]: takes fragments from front-end processes of the same host, through shared memory.
//! - [`udp`]: receives fragments as datagrams, whose format is in [`datagram`]; [`assembly`] sorts them by event.
//!
//! A live source (all but files) says which events it has; the manager assigns only batches that all readout units have.

pub mod assembly;
pub mod datagram;
pub mod file;
pub mod generator;
pub mod ring;
mod sequence;
pub mod udp;

use crate::config::{InputConfig, RunConfig};
use crate::core::RuIndex;
use crate::core::plan::Batch;
use crate::process::ProcessError;
use millstream_fragment::packetize::{FileExtent, PacketLayout};
use serde::{Deserialize, Serialize};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// The input of a readout unit.
///
/// Sources are addressed by their position among the unit's packet areas.
pub trait Source {
    /// Memory that the extents of packets refer to, to be registered; `None` if packets have no extents.
    fn mapping(&self) -> Option<&'static [u8]> {
        None
    }

    /// Maximum number of extents of a packet with `events` events.
    fn max_extents(&self, _events: u32) -> u64 {
        0
    }

    /// The unit joins the run after its first `events` events: those were of an earlier unit with the same sources. Called
    /// before all other calls.
    fn start_at(&mut self, _events: u64) {}

    /// Takes what has arrived, and returns how many of the run's events are there, counted from the first. An event is
    /// there if each source has its fragment, or will not have it.
    fn poll_available(&mut self, now: Instant) -> u64;

    /// When [`poll_available`](Self::poll_available) has to be called next, if nothing arrives.
    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    /// Readable when something has arrived.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Makes the packet of one source and a batch whose events are there.
    ///
    /// Writes the start of the packet to `buffer`; the rest is in `extents` of the mapping. In the result, `header_len` is
    /// the number of bytes written.
    ///
    /// # Errors
    /// The input changed or cannot be read.
    fn packet(
        &mut self,
        position: usize,
        batch: &Batch,
        buffer: &mut [u8],
        extents: &mut Vec<FileExtent>,
    ) -> Result<PacketLayout, ProcessError>;

    /// The batch is built: its packets will not be asked for again. Before, they may be asked for more than once.
    fn release(&mut self, _batch: &Batch) {}

    /// Why the input cannot be used any more, although no call has failed.
    fn failure(&self) -> Option<ProcessError> {
        None
    }

    /// What was received and lost, by source; empty for files.
    fn statistics(&self) -> Vec<SourceStatistics> {
        Vec::new()
    }
}

/// What one live source delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceStatistics {
    /// Id of the source.
    pub source: u32,
    /// Fragments received.
    pub received: u64,
    /// Datagrams lost on the way: gaps in the sequence numbers.
    pub lost: u64,
    /// Fragments of events that had been sent without them.
    pub late: u64,
    /// Fragments received twice.
    pub duplicate: u64,
    /// Fragments that were dropped because the buffer was full: back-pressure.
    pub overflow: u64,
    /// Datagrams or fragments that are invalid, such as longer than configured.
    pub invalid: u64,
    /// Attempts of the front end that were refused because the unit was busy: back-pressure.
    #[serde(default)]
    pub refused: u64,
    /// Time from a refused fragment to the next accepted one.
    #[serde(default)]
    pub dead_time: Duration,
}

/// Opens the input of a readout unit.
///
/// # Errors
/// The input cannot be opened, or differs from the checked configuration.
pub(crate) fn open(config: &RunConfig, ru: RuIndex) -> Result<Box<dyn Source>, ProcessError> {
    let areas = config.layout.of_readout(ru);
    let first_event = config.plan.first_event.0;
    Ok(match &config.readouts[ru.index()].input {
        InputConfig::File(path) => Box::new(file::FileReplay::open(config, areas, path)?),
        InputConfig::Generator(generator) => {
            Box::new(generator::Generator::new(generator, areas, first_event))
        }
        InputConfig::Ring(ring) => Box::new(ring::RingReceiver::bind(
            ring,
            areas,
            first_event,
            config.plan.events.get(),
            kept(config),
        )?),
        InputConfig::Udp(udp) => {
            Box::new(udp::UdpReceiver::bind(udp, areas, first_event, config.plan.events.get(), kept(config))?)
        }
    })
}

/// Events in batches that may be asked for again: one batch in each slot, one for each builder unit in the manager's round,
/// and the next one.
fn kept(config: &RunConfig) -> u64 {
    let plan = &config.plan;
    let batches = plan.total_slots() + plan.builders() + 1;
    batches as u64 * u64::from(plan.batch.get())
}
