//! Disks on which a builder unit stores accepted events.
//!
//! A thread of the unit writes one batch after the other, as that of `millstream-evb` does, and a batch keeps its slot until its
//! events are stored. Each disk gets its share of a batch as commands of one size, of which a number is in flight
//! ([`CommandQueue`]). A batch of few commands does not fill the queue, so it takes their latency.

use super::EventBuilderError;
use crate::benchmarks::peer::write_ceiling;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::PathError;
use crate::ssd::{Access, CommandQueue};
use millstream_site::Host;

/// A disk of a node.
#[derive(Clone, Debug, PartialEq)]
struct Disk {
    queue: CommandQueue,
    block: u64,
    /// Payload per second with one command of a block in flight, two, and so on.
    rates: Vec<f64>,
    /// Rate of its PCIe link.
    link: f64,
}

impl Disk {
    /// Payload per second with all its commands in flight.
    fn rate(&self) -> f64 {
        self.rates.last().copied().unwrap_or(0.0).min(self.link)
    }

    /// Time of a write with nothing else in the disk.
    fn time(&self, bytes: f64) -> f64 {
        let block = self.block as f64;
        if bytes <= block {
            return (1.0 / self.queue.commands_per_second(bytes.ceil() as u64, 1)).max(bytes / self.link);
        }
        let in_flight = ((bytes / block).ceil() as usize).min(self.rates.len());
        bytes / self.rates[in_flight - 1].min(self.link)
    }
}

/// The disks on which each builder unit stores its accepted events.
#[derive(Clone, Debug, PartialEq)]
pub struct Storage {
    disks: Vec<Disk>,
    /// What limits it, for readers.
    pub name: String,
    /// Share of the built events that the kernel accepts and the unit stores.
    pub accepted: f64,
}

impl Storage {
    /// The disks of a host with `write-block`; none without such disks.
    pub(super) fn of_host(p: &Parameters, host: &Host) -> Result<Option<Storage>, EventBuilderError> {
        let mut disks = Vec::new();
        let mut names = Vec::new();
        for device in &host.devices {
            let (Some(block), Some(depth)) = (device.write_block, device.queue_depth) else { continue };
            let queue =
                CommandQueue::new(p, &device.id, Access::Write).ok_or_else(|| PathError::NoValue {
                    device: format!("{}.{}", host.name, device.name),
                    model: device.model.clone(),
                    value: CommandQueue::value_names(Access::Write),
                })?;
            let rates = queue.rates(block.0).take(depth as usize).map(|rate| rate * block.0 as f64).collect();
            disks.push(Disk { queue, block: block.0, rates, link: write_ceiling(p, device).0 });
            names.push(format!("{}, queue depth {depth} at {} B", device.name, block.0));
        }
        let name = names.join("; ");
        Ok((!disks.is_empty()).then_some(Storage { disks, name, accepted: 1.0 }))
    }

    /// Rate of long writes.
    #[must_use]
    pub fn rate(&self) -> BytesPerSecond {
        BytesPerSecond(self.disks.iter().map(Disk::rate).sum())
    }

    /// Time of storing the accepted events of a batch of this many bytes.
    #[must_use]
    pub fn time(&self, built: f64) -> Picos {
        let bytes = self.stored(built);
        if bytes == 0.0 {
            return Picos::ZERO;
        }
        let all = self.rate().0;
        let share = |disk: &Disk| disk.time(bytes * disk.rate() / all);
        Picos::from_seconds(self.disks.iter().map(share).fold(0.0, f64::max))
    }

    /// Bytes stored of a batch.
    pub(super) fn stored(&self, built: f64) -> f64 {
        built * self.accepted
    }
}

/// What the disks of the builder units did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StorageUse {
    /// Bytes stored by all builder units.
    pub bytes: f64,
    /// Share of the run in which the disks of the busiest builder unit wrote.
    pub busy: f64,
}

impl StorageUse {
    /// Whether the disks limit the run: the busiest ones hardly ever wait for batches.
    #[must_use]
    pub fn is_limit(&self) -> bool {
        self.busy > LIMIT
    }
}

/// Share of busy time above which disks limit a run; its first and last batches are the rest.
const LIMIT: f64 = 0.9;
