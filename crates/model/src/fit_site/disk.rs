//! The disk that measurements are about.

use crate::measurements::{Measured, Measurement};
use crate::parameters::Parameters;
use crate::ssd::{Access, CommandQueue};
use millstream_site::{DeviceKind, Site};
use std::collections::BTreeMap;

/// Measurements of a disk that the site does not have, or not only.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The site has no disk.
    #[error(
        "the measurement in line {0} is a rate of a disk, and the site has no [[host.ssd]]: add the disk, of a model of devices/ssds.toml or of a \
         [device.ID] of the site file"
    )]
    None(usize),
    /// The site has disks of several models.
    #[error("the measurement in line {line} is a rate of a disk, of which the site has several models: name one of {}", .names.join(", "))]
    Several {
        /// Line of the measurement.
        line: usize,
        /// A disk of each model.
        names: Vec<String>,
    },
    /// The named place is no disk.
    #[error("disk {0:?}: the site has no host.ssd of this name")]
    Unknown(String),
    /// The library has no queues of the disk.
    #[error(
        "{disk} is a {model:?}, of which the queues are not known: add {values} to a [device.ID] of the site file"
    )]
    NoQueues {
        /// Host and name of the disk.
        disk: String,
        /// Its model.
        model: String,
        /// Values that a queue needs.
        values: String,
    },
}

/// Name of a disk's measurement.
pub(super) fn name(access: Access) -> &'static str {
    match access {
        Access::Read => "disk_read",
        Access::Write => "disk_write",
    }
}

/// A disk of a site.
struct Disk<'a> {
    place: String,
    id: &'a str,
    model: &'a str,
}

fn disks(site: &Site) -> impl Iterator<Item = Disk<'_>> {
    site.hosts.iter().flat_map(|host| {
        let disks = host.devices.iter().filter(|device| device.kind == DeviceKind::Ssd);
        disks.map(|device| Disk {
            place: format!("{}.{}", host.name, device.name),
            id: &device.id,
            model: &device.model,
        })
    })
}

/// Library id of the disk that the measurements are about; none if they are about none.
pub(super) fn measured(
    site: &Site,
    p: &Parameters,
    cases: &[Measurement],
    named: Option<&str>,
) -> Result<Option<String>, DiskError> {
    let rates = || {
        cases.iter().filter_map(|case| match case.what {
            Measured::Disk { access, .. } => Some((case.line, access)),
            Measured::Benchmark(_) => None,
        })
    };
    let Some((line, _)) = rates().next() else { return Ok(None) };
    let disk = match named {
        Some(name) => {
            disks(site).find(|disk| disk.place == name).ok_or(DiskError::Unknown(name.to_owned()))?
        }
        None => {
            let models: BTreeMap<&str, Disk<'_>> = disks(site).map(|disk| (disk.id, disk)).collect();
            if models.len() > 1 {
                let names = models.into_values().map(|disk| disk.place).collect();
                return Err(DiskError::Several { line, names });
            }
            models.into_values().next().ok_or(DiskError::None(line))?
        }
    };
    for (_, access) in rates() {
        if CommandQueue::new(p, disk.id, access).is_none() {
            let values = CommandQueue::value_names(access);
            return Err(DiskError::NoQueues { disk: disk.place, model: disk.model.to_owned(), values });
        }
    }
    Ok(Some(disk.id.to_owned()))
}
