//! Disks at the ends of a flow between hosts: `write node0 node1.disk`.
//!
//! Payload passes host memory between a disk and the adapter. The flow's message size is the block size of the disk's commands.

use crate::benchmarks::peer::write_ceiling;
use crate::engine::{BytesPerSecond, Picos};
use crate::explain::Flow;
use crate::parameters::Parameters;
use crate::path::{Hop, PathError, Verb};
use crate::ssd::{Access, CommandQueue};
use millstream_site::{DeviceKind, Site};

/// A disk that a flow reads or writes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DiskEnd {
    /// Name, with the commands in flight if the site limits their number.
    pub(crate) name: String,
    /// Largest rate.
    pub(crate) rate: BytesPerSecond,
    /// Time of one command.
    latency: Picos,
    /// Whether payload comes from it.
    pub(crate) is_source: bool,
}

impl DiskEnd {
    pub(crate) fn hop(&self) -> Hop {
        Hop { name: self.name.clone(), rate: self.rate, latency: self.latency }
    }
}

/// The disk that an end of a flow names, if it is one.
fn disk_end(
    site: &Site,
    p: &Parameters,
    place: &str,
    access: Access,
    block: u64,
) -> Result<Option<DiskEnd>, PathError> {
    let Some((host, device)) = site.device(place) else { return Ok(None) };
    let device = &site.hosts[host.0].devices[device.0];
    if device.kind != DeviceKind::Ssd {
        return Ok(None);
    }
    let no_value =
        |value: String| PathError::NoValue { device: place.to_owned(), model: device.model.clone(), value };
    let queue = CommandQueue::new(p, &device.id, access);
    let (name, rate) = match (device.queue_depth, &queue) {
        (Some(depth), Some(queue)) => (
            format!("{place}, {}s, queue depth {depth} at {block} B", access.name()),
            queue.bandwidth(block, depth),
        ),
        (Some(_), None) => return Err(no_value(CommandQueue::value_names(access))),
        (None, _) => {
            let rate = format!("{}.rate", access.name());
            let known = p.device(&device.id, &rate).ok_or_else(|| no_value(rate))?;
            (format!("{place}, {}s", access.name()), BytesPerSecond::gigabytes(known))
        }
    };
    let rate = BytesPerSecond(rate.0.min(write_ceiling(p, device).0));
    let latency = queue.map_or(Picos::ZERO, |queue| queue.latency_of(block));
    Ok(Some(DiskEnd { name, rate, latency, is_source: access == Access::Read }))
}

/// The flow between the hosts of its ends, and the disks among these.
pub(crate) fn disk_ends(site: &Site, p: &Parameters, flow: &Flow) -> Result<(Flow, Vec<DiskEnd>), PathError> {
    let p = &*p.with_devices(&site.devices);
    let (mut between, mut disks) = (flow.clone(), Vec::new());
    for (place, is_client) in [(&mut between.client, true), (&mut between.server, false)] {
        // Payload goes from the client to the server, except that of a READ.
        let access = if is_client == (flow.verb != Verb::Read) { Access::Read } else { Access::Write };
        let Some(disk) = disk_end(site, p, place, access, u64::from(flow.size))? else { continue };
        if let Some(host) = place.split('.').next() {
            *place = host.to_owned();
        }
        disks.push(disk);
    }
    Ok((between, disks))
}
