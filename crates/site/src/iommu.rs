//! IOMMU of a host and ATS of its devices.
//!
//! Read: PCI Express Base Specification, chapter 10 (Address Translation Services).

use crate::SiteError;
use crate::schema;
use crate::unit;
use crate::validate::{Device, Socket, Validator};
use millstream_quantity::Bytes;
use serde::Deserialize;
use toml::Spanned;

/// Value of an adapter that has an address translation cache: its entries.
pub const CACHE_ENTRIES: &str = "atc.entries";

/// The IOMMU of a host in a site file: it translates the addresses of all DMA.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuEntry {
    /// Size of the pages that it maps.
    #[serde(deserialize_with = "unit::spanned")]
    pub page: Spanned<Bytes>,
    /// Memory that an adapter's DMA touches, in messages at random places.
    #[serde(deserialize_with = "unit::spanned")]
    pub footprint: Spanned<Bytes>,
}

/// The IOMMU of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Iommu {
    /// Size of a page.
    pub page: Bytes,
    /// Memory that an adapter's DMA touches.
    pub footprint: Bytes,
}

/// Page sizes of x86 and Arm.
const PAGES: [u64; 5] = [4 << 10, 16 << 10, 64 << 10, 2 << 20, 1 << 30];

/// The host's IOMMU, if it has one.
pub(crate) fn iommu(
    validator: &Validator<'_>,
    host: &schema::Host,
    sockets: &[Socket],
) -> Result<Option<Iommu>, SiteError> {
    let Some(entry) = &host.iommu else { return Ok(None) };
    let name = host.name.get_ref();
    let (page, footprint) = (*entry.page.get_ref(), *entry.footprint.get_ref());
    if !PAGES.contains(&page.0) {
        let message = format!(
            "host {name:?}: iommu.page = {}: must be \"4 KiB\", \"16 KiB\", \"64 KiB\", \"2 MiB\" or \"1 GiB\"",
            page.binary()
        );
        return validator.fail(&entry.page.span(), message);
    }
    if footprint < page {
        let message = format!(
            "host {name:?}: iommu.footprint = {}: must be at least one page of {}",
            footprint.binary(),
            page.binary()
        );
        return validator.fail(&entry.footprint.span(), message);
    }
    let memory: Option<u64> = sockets.iter().map(|socket| socket.memory.map(|memory| memory.0)).sum();
    if let Some(memory) = memory.filter(|&memory| memory > 0 && footprint.0 > memory) {
        let message = format!(
            "host {name:?}: iommu.footprint = {}: the host has {} of memory",
            footprint.binary(),
            Bytes(memory).binary()
        );
        return validator.fail(&entry.footprint.span(), message);
    }
    Ok(Some(Iommu { page, footprint }))
}

/// Checks the devices that use ATS: the host needs an IOMMU, the device an address translation cache.
pub(crate) fn check_ats(
    validator: &Validator<'_>,
    host: &schema::Host,
    devices: &[Device],
) -> Result<(), SiteError> {
    let entries = host.pcie_switch.iter().chain(&host.adapter).chain(&host.card).chain(&host.ssd);
    for entry in entries.map(Spanned::get_ref) {
        let Some(ats) = entry.ats.as_ref().filter(|ats| *ats.get_ref()) else { continue };
        let (name, host_name) = (entry.name.get_ref(), host.name.get_ref());
        if host.iommu.is_none() {
            let message = format!(
                "{name:?}: ats = true: host {host_name:?} has no IOMMU; add iommu = {{ page, footprint }}"
            );
            return validator.fail(&ats.span(), message);
        }
        let device = devices.iter().find(|device| device.name == *name);
        if let Some(device) = device.filter(|device| !validator.has_value(&device.id, CACHE_ENTRIES)) {
            let with = validator.names_with(crate::device::Kind::Adapter, CACHE_ENTRIES).join(", ");
            let message = format!(
                "{name:?}: ats = true: a {:?} has no address translation cache; adapters that have: {with}. A [device.ID] has one \
                 with the value {CACHE_ENTRIES:?}",
                device.model
            );
            return validator.fail(&ats.span(), message);
        }
    }
    Ok(())
}
