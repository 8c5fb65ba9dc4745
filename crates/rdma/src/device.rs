//! RDMA devices: list and open.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use sideway::ibverbs::address::{GidEntry, GidType};
use sideway::ibverbs::device::{DeviceInfo as _, DeviceList, GetDeviceListErrorKind, OpenDeviceErrorKind};
use sideway::ibverbs::device_context::{
    AllocateProtectionDomainErrorKind, DeviceContext, LinkLayer, Mtu, PortState, QueryDeviceErrorKind,
    QueryPortErrorKind,
};
use sideway::ibverbs::protection_domain::ProtectionDomain;

use crate::error::os_error;
use crate::loader::{self, VerbsLibrary};

/// Selects a device, from `--device` or `MILLSTREAM_DEVICE`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DeviceSelector {
    /// Hardware if there is any, else the soft device.
    #[default]
    Auto,
    /// The first device of the system's verbs library.
    Hardware,
    /// The soft device.
    Soft,
    /// The device with this name.
    Named(String),
}

impl DeviceSelector {
    /// Parses an environment variable. Non-UTF-8 text becomes a name that no device has, for a later error message.
    pub(crate) fn from_os(value: &OsStr) -> DeviceSelector {
        match value.to_string_lossy().as_ref() {
            "" | "auto" => DeviceSelector::Auto,
            "hardware" => DeviceSelector::Hardware,
            "soft" => DeviceSelector::Soft,
            name => DeviceSelector::Named(name.to_owned()),
        }
    }

    /// The selection in `MILLSTREAM_DEVICE`, or [`DeviceSelector::Auto`].
    pub fn from_environment() -> DeviceSelector {
        DeviceSelector::from_os(&std::env::var_os(loader::ENV_DEVICE).unwrap_or_default())
    }
}

impl FromStr for DeviceSelector {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<DeviceSelector, Self::Err> {
        Ok(DeviceSelector::from_os(OsStr::new(text)))
    }
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceSelector::Auto => "auto",
            DeviceSelector::Hardware => "hardware",
            DeviceSelector::Soft => "soft",
            DeviceSelector::Named(name) => name,
        })
    }
}

/// Why devices could not be listed or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no device.
    #[error("no RDMA device: {}{hint}", has_none(.loaded))]
    NoDevice {
        /// The verbs library in use.
        loaded: VerbsLibrary,
        /// Why the soft device is not used.
        hint: String,
    },
    /// The selected device does not exist.
    #[error("no RDMA device {selector:?} in {loaded}; available devices: {}{hint}", .existing.join(", "))]
    NotFound {
        /// The selection.
        selector: String,
        /// The verbs library in use.
        loaded: VerbsLibrary,
        /// Devices of this library, and adapters that only the system's library supports.
        existing: Vec<String>,
        /// Why the soft device is not used.
        hint: String,
    },
    /// The devices could not be listed.
    #[error("cannot list the RDMA devices of {loaded}: {cause}")]
    List {
        /// The verbs library in use.
        loaded: VerbsLibrary,
        /// The cause.
        cause: io::Error,
    },
    /// A call on a device failed.
    #[error("RDMA device {device}: cannot {what}: {cause}")]
    Call {
        /// The device.
        device: String,
        /// The operation.
        what: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// The port is not active.
    #[error("RDMA device {device}: port {port} is {state:?}, not Active")]
    PortNotActive {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state.
        state: PortState,
    },
    /// An Ethernet port without a RoCE v2 GID.
    #[error(
        "RDMA device {device}: port {port} has no RoCE v2 GID among {entries} entries; assign it an IP address"
    )]
    NoRoceV2Gid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Number of entries of its GID table.
        entries: usize,
    },
}

/// Attributes of a device.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Its name, for example `mlx5_0`.
    pub name: String,
    /// Its verbs library.
    pub library: PathBuf,
    /// Whether it is the soft device.
    pub soft: bool,
    /// Node GUID.
    pub guid: u64,
    /// PCI vendor id.
    pub vendor_id: u32,
    /// Vendor's part id.
    pub vendor_part_id: u32,
    /// Firmware version.
    pub firmware: String,
    /// Its limits.
    pub limits: DeviceLimits,
    /// Its ports; the first one has number 1.
    pub ports: Vec<PortInfo>,
}

/// One port of a device.
#[derive(Debug, Clone)]
pub struct PortInfo {
    /// Port number, from 1.
    pub number: u8,
    /// Port state.
    pub state: PortState,
    /// Link layer: InfiniBand or Ethernet.
    pub link_layer: LinkLayer,
    /// Active MTU.
    pub mtu: Mtu,
    /// LID on an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// GID table.
    pub gids: Vec<PortGid>,
}

/// One entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortGid {
    /// Index in the table.
    pub index: u8,
    /// The GID; IPv4 addresses are IPv4-mapped.
    pub gid: Ipv6Addr,
    /// Packet format: RoCE v1, RoCE v2 or InfiniBand.
    pub gid_type: GidType,
}

/// Limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Outstanding work requests of a queue.
    pub queue_depth: u32,
    /// Scatter/gather elements of one work request.
    pub sges: u32,
    /// Entries of a completion queue.
    pub completions: u32,
    /// Size of a memory region, in bytes.
    pub region_bytes: u64,
    /// Outstanding READs and atomics as initiator, per queue pair.
    pub max_qp_init_rd_atom: u8,
    /// Outstanding READs and atomics as responder, per queue pair.
    pub max_qp_rd_atom: u8,
}

/// Devices of the verbs library in use, with their attributes.
///
/// # Errors
/// [`DeviceError`] if there is none, or a query fails.
pub fn devices() -> Result<Vec<DeviceInfo>, DeviceError> {
    let loaded = loader::loaded();
    let (soft, library) = match &loaded {
        VerbsLibrary::Soft(path) => (true, path.clone()),
        VerbsLibrary::System(path) => (false, path.clone()),
        VerbsLibrary::None => (false, PathBuf::new()),
    };
    let list = list(&loaded)?;
    list.iter()
        .map(|device| {
            let name = device.name();
            let context = open_context(&device, &name)?;
            let attributes = query_device(&context, &name)?;
            let gids = gid_table(&context, &name)?;
            let ports = (1..=attributes.phys_port_cnt())
                .map(|number| query_port(&context, &name, number, &gids))
                .collect::<Result<_, _>>()?;
            Ok(DeviceInfo {
                library: library.clone(),
                soft,
                guid: u64::from_be(attributes.node_guid().as_u64()),
                vendor_id: attributes.vendor_id(),
                vendor_part_id: attributes.vendor_part_id(),
                firmware: attributes.firmware_version(),
                limits: limits(&attributes),
                ports,
                name,
            })
        })
        .collect()
}

/// An open device: context, protection domain, port and GID. Clones share them.
#[derive(Debug, Clone)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    name: String,
    soft: bool,
    limits: DeviceLimits,
    port: u8,
    link_layer: LinkLayer,
    mtu: Mtu,
    lid: u16,
    gid: PortGid,
    domain: Arc<ProtectionDomain>,
    context: Arc<DeviceContext>,
}

/// The port to use.
const PORT: u8 = 1;

/// Opens a device with port 1 and the RoCE v2 GID that most likely reaches other hosts: IPv4 before global IPv6 before
/// link-local.
///
/// The selector applies to the verbs library in use; call [`loader::ensure`] first to load the right one.
///
/// # Errors
/// [`DeviceError`]. If the selected device does not exist, the error lists the existing ones.
pub fn open(selector: &DeviceSelector) -> Result<Device, DeviceError> {
    let loaded = loader::loaded();
    let soft = matches!(loaded, VerbsLibrary::Soft(_));
    let list = list(&loaded)?;
    let device = list.iter().find(|device| match selector {
        DeviceSelector::Auto => true,
        DeviceSelector::Hardware => !soft,
        DeviceSelector::Soft => soft,
        DeviceSelector::Named(name) => device.name() == *name,
    });
    let Some(device) = device else {
        let mut existing: Vec<String> = list.iter().map(|device| device.name()).collect();
        if soft {
            existing.extend(loader::hardware_devices().into_iter().map(|name| format!("{name} (hardware)")));
        }
        let hint = hint(&loaded);
        return Err(DeviceError::NotFound { selector: selector.to_string(), loaded, existing, hint });
    };
    let name = device.name();
    let context = open_context(&device, &name)?;
    let limits = limits(&query_device(&context, &name)?);
    let gids = gid_table(&context, &name)?;
    let port = query_port(&context, &name, PORT, &gids)?;
    if port.state != PortState::Active {
        return Err(DeviceError::PortNotActive { device: name, port: PORT, state: port.state });
    }
    let gid = choose_gid(port.link_layer, &port.gids).ok_or_else(|| DeviceError::NoRoceV2Gid {
        device: name.clone(),
        port: PORT,
        entries: port.gids.len(),
    })?;
    let domain = context.alloc_pd().map_err(|error| DeviceError::Call {
        device: name.clone(),
        what: "allocate a protection domain",
        cause: os_error!(error.0, AllocateProtectionDomainErrorKind::Ibverbs),
    })?;
    Ok(Device(Arc::new(Inner {
        name,
        soft,
        limits,
        port: PORT,
        link_layer: port.link_layer,
        mtu: port.mtu,
        lid: port.lid,
        gid,
        domain,
        context,
    })))
}

impl Device {
    /// Its name, for example `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether it is the soft device.
    pub fn is_soft(&self) -> bool {
        self.0.soft
    }

    /// Its limits.
    pub fn limits(&self) -> &DeviceLimits {
        &self.0.limits
    }

    /// The port in use, from 1.
    pub fn port(&self) -> u8 {
        self.0.port
    }

    /// Link layer: InfiniBand or Ethernet.
    pub fn link_layer(&self) -> LinkLayer {
        self.0.link_layer
    }

    /// Active MTU of the port.
    pub fn mtu(&self) -> Mtu {
        self.0.mtu
    }

    /// LID of the port on an InfiniBand subnet; 0 on Ethernet.
    pub fn lid(&self) -> u16 {
        self.0.lid
    }

    /// The GID in use.
    pub fn gid(&self) -> PortGid {
        self.0.gid
    }

    /// Where the GID in use is in the port's table at this moment. A table moves its entries when a network interface comes
    /// or goes: the soft device lists the addresses that the host has.
    pub fn gid_index(&self) -> u8 {
        let own = self.gid();
        let table = gid_table(&self.0.context, &self.0.name).unwrap_or_default();
        let same = table.iter().find(|entry| {
            entry.port_num() == u32::from(self.0.port)
                && Ipv6Addr::from(entry.gid()) == own.gid
                && entry.gid_type() == own.gid_type
        });
        same.and_then(|entry| u8::try_from(entry.gid_index()).ok()).unwrap_or(own.index)
    }

    /// The protection domain of all regions and queue pairs of this device.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.0.domain
    }

    /// The device context.
    pub fn context(&self) -> &Arc<DeviceContext> {
        &self.0.context
    }
}

fn list(loaded: &VerbsLibrary) -> Result<DeviceList, DeviceError> {
    let list = match DeviceList::new().map_err(|error| os_error!(error.0, GetDeviceListErrorKind::Ibverbs)) {
        // rdma-core returns ENOSYS if the kernel has no RDMA support, `sideway` EOPNOTSUPP if no library was loaded.
        Err(cause) if matches!(cause.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP)) => None,
        Err(cause) => return Err(DeviceError::List { loaded: loaded.clone(), cause }),
        Ok(list) => (!list.is_empty()).then_some(list),
    };
    list.ok_or_else(|| DeviceError::NoDevice { loaded: loaded.clone(), hint: hint(loaded) })
}

fn has_none(loaded: &VerbsLibrary) -> String {
    match loaded {
        VerbsLibrary::None => "no verbs library could be loaded".to_owned(),
        loaded => format!("{loaded} has none"),
    }
}

fn hint(loaded: &VerbsLibrary) -> String {
    match loaded {
        VerbsLibrary::Soft(_) => String::new(),
        VerbsLibrary::System(_) | VerbsLibrary::None => format!("; {}", loader::soft_device_unused_reason()),
    }
}

fn open_context(
    device: &sideway::ibverbs::device::Device<'_>,
    name: &str,
) -> Result<Arc<DeviceContext>, DeviceError> {
    device.open().map_err(|error| DeviceError::Call {
        device: name.to_owned(),
        what: "open the device",
        cause: os_error!(error.0, OpenDeviceErrorKind::Ibverbs),
    })
}

fn query_device(
    context: &DeviceContext,
    name: &str,
) -> Result<sideway::ibverbs::device_context::DeviceAttr, DeviceError> {
    context.query_device().map_err(|error| DeviceError::Call {
        device: name.to_owned(),
        what: "query its attributes",
        cause: os_error!(error.0, QueryDeviceErrorKind::Ibverbs),
    })
}

fn gid_table(context: &DeviceContext, name: &str) -> Result<Vec<GidEntry>, DeviceError> {
    context.query_gid_table().map_err(|error| DeviceError::Call {
        device: name.to_owned(),
        what: "query its GID table",
        cause: io::Error::other(error.0),
    })
}

fn query_port(
    context: &DeviceContext,
    name: &str,
    number: u8,
    gids: &[GidEntry],
) -> Result<PortInfo, DeviceError> {
    let port = context.query_port(number).map_err(|error| DeviceError::Call {
        device: name.to_owned(),
        what: "query its port",
        cause: os_error!(error.source, QueryPortErrorKind::Ibverbs),
    })?;
    let gids = gids
        .iter()
        .filter(|entry| entry.port_num() == u32::from(number))
        .filter_map(|entry| {
            // An address vector has an 8-bit index.
            let index = u8::try_from(entry.gid_index()).ok()?;
            Some(PortGid { index, gid: entry.gid().into(), gid_type: entry.gid_type() })
        })
        .collect();
    Ok(PortInfo {
        number,
        state: port.port_state(),
        link_layer: port.link_layer(),
        mtu: port.active_mtu(),
        lid: port.lid(),
        gids,
    })
}

fn limits(attributes: &sideway::ibverbs::device_context::DeviceAttr) -> DeviceLimits {
    let count = |value: i32| u32::try_from(value).unwrap_or(0);
    let small = |value: i32| u8::try_from(value.max(0)).unwrap_or(u8::MAX);
    DeviceLimits {
        queue_pairs: count(attributes.max_qp()),
        queue_depth: count(attributes.max_qp_wr()),
        sges: count(attributes.max_sge()),
        completions: count(attributes.max_cqe()),
        region_bytes: attributes.max_mr_size(),
        max_qp_init_rd_atom: small(attributes.max_qp_init_rd_atom()),
        max_qp_rd_atom: small(attributes.max_qp_rd_atom()),
    }
}

fn choose_gid(link_layer: LinkLayer, gids: &[PortGid]) -> Option<PortGid> {
    if link_layer != LinkLayer::Ethernet {
        return gids.first().copied();
    }
    let reach = |gid: &Ipv6Addr| match gid.to_ipv4_mapped() {
        Some(address) if !address.is_loopback() => 0,
        None if !gid.is_loopback() && !gid.is_unicast_link_local() => 1,
        None if gid.is_unicast_link_local() => 2,
        _ => 3,
    };
    gids.iter()
        .filter(|entry| entry.gid_type == GidType::RoceV2)
        .min_by_key(|entry| reach(&entry.gid))
        .copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid_entry(index: u8, gid: &str, gid_type: GidType) -> PortGid {
        PortGid { index, gid: gid.parse().unwrap(), gid_type }
    }

    #[test]
    fn selectors_parse_and_print() {
        for text in ["auto", "hardware", "soft", "mlx5_0"] {
            assert_eq!(text.parse::<DeviceSelector>().unwrap().to_string(), text);
        }
        assert_eq!("".parse::<DeviceSelector>().unwrap(), DeviceSelector::Auto);
        assert_eq!("Soft".parse::<DeviceSelector>().unwrap(), DeviceSelector::Named("Soft".to_owned()));
    }

    #[test]
    fn an_ipv4_roce_v2_address_is_preferred() {
        let table = [
            gid_entry(0, "fe80::1", GidType::RoceV1),
            gid_entry(1, "fe80::1", GidType::RoceV2),
            gid_entry(2, "::ffff:127.0.0.1", GidType::RoceV2),
            gid_entry(3, "2001:db8::1", GidType::RoceV2),
            gid_entry(4, "::ffff:10.0.0.1", GidType::RoceV1),
            gid_entry(5, "::ffff:10.0.0.1", GidType::RoceV2),
            gid_entry(6, "::ffff:10.0.0.2", GidType::RoceV2),
        ];
        let chosen = |table: &[PortGid]| choose_gid(LinkLayer::Ethernet, table).map(|gid| gid.index);
        assert_eq!(chosen(&table), Some(5));
        assert_eq!(chosen(&table[..5]), Some(3));
        assert_eq!(chosen(&table[..3]), Some(1));
        assert_eq!(chosen(&table[2..3]), Some(2));
        assert_eq!(chosen(&table[..1]), None);
    }

    #[test]
    fn an_infiniband_port_uses_its_first_gid() {
        let table =
            [gid_entry(0, "fe80::1", GidType::InfiniBand), gid_entry(1, "2001:db8::1", GidType::InfiniBand)];
        assert_eq!(choose_gid(LinkLayer::InfiniBand, &table), Some(table[0]));
    }
}
