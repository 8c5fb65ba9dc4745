//! RDMA devices: which exist, and opening one with the port and address to use.

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

/// The device, or the kind of device, to use; what `--device` and `MILLSTREAM_DEVICE` say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DeviceSelector {
    /// Hardware if there is any, else the soft device.
    #[default]
    Auto,
    /// Whatever the system's verbs library offers.
    Hardware,
    /// The soft device.
    Soft,
    /// The device of this name.
    Named(String),
}

impl DeviceSelector {
    /// Reads an environment variable; what is not text can name no device that exists, and is kept to say so
    /// later.
    pub(crate) fn from_os(value: &OsStr) -> DeviceSelector {
        match value.to_string_lossy().as_ref() {
            "" | "auto" => DeviceSelector::Auto,
            "hardware" => DeviceSelector::Hardware,
            "soft" => DeviceSelector::Soft,
            name => DeviceSelector::Named(name.to_owned()),
        }
    }

    /// What the environment asks for: `MILLSTREAM_DEVICE`, or [`DeviceSelector::Auto`].
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

/// Why no device could be listed or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is nothing to open.
    #[error("no RDMA device: {loaded} offers none{hint}")]
    NoDevice {
        /// The verbs library in use.
        loaded: VerbsLibrary,
        /// Why the soft device is not in use, if it is not.
        hint: String,
    },
    /// The chosen device is not among those that exist.
    #[error("no RDMA device {selector:?} with {loaded}; there are: {}{hint}", .existing.join(", "))]
    NotFound {
        /// What was asked for.
        selector: String,
        /// The verbs library in use.
        loaded: VerbsLibrary,
        /// The devices of this library, and adapters that only the system's library reaches.
        existing: Vec<String>,
        /// Why the soft device is not in use, if it is not.
        hint: String,
    },
    /// The devices could not be listed.
    #[error("cannot list the RDMA devices of {loaded}: {cause}")]
    List {
        /// The verbs library in use.
        loaded: VerbsLibrary,
        /// Why.
        cause: io::Error,
    },
    /// A call on one device failed.
    #[error("RDMA device {device}: cannot {what}: {cause}")]
    Call {
        /// The device.
        device: String,
        /// What was tried.
        what: &'static str,
        /// Why.
        cause: io::Error,
    },
    /// The port cannot carry traffic.
    #[error("RDMA device {device}: port {port} is {state:?}, not Active")]
    PortNotActive {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Its state.
        state: PortState,
    },
    /// An Ethernet port without an address of the RoCE v2 kind.
    #[error("RDMA device {device}: port {port} has no RoCE v2 address in its GID table of {entries} entries")]
    NoRoceV2Gid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The number of entries that the table has.
        entries: usize,
    },
}

/// What `millstream devices` prints about one device.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// For example `mlx5_0`.
    pub name: String,
    /// The library that it comes from.
    pub library: PathBuf,
    /// Whether it is the soft device.
    pub soft: bool,
    /// The node's globally unique identifier.
    pub guid: u64,
    /// PCI vendor.
    pub vendor_id: u32,
    /// The vendor's number of the part.
    pub vendor_part_id: u32,
    /// The firmware's version, in the vendor's form.
    pub firmware: String,
    /// What it can do.
    pub limits: DeviceLimits,
    /// Its ports, the first one with number 1.
    pub ports: Vec<PortInfo>,
}

/// One port of a device.
#[derive(Debug, Clone)]
pub struct PortInfo {
    /// Counted from 1.
    pub number: u8,
    /// Whether it can carry traffic.
    pub state: PortState,
    /// InfiniBand or Ethernet.
    pub link_layer: LinkLayer,
    /// The largest payload of a packet in use.
    pub mtu: Mtu,
    /// The local identifier on an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// Its gids.
    pub gids: Vec<PortGid>,
}

/// One entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortGid {
    /// Where in the table.
    pub index: u8,
    /// The address; an IPv4 address is mapped into IPv6.
    pub gid: Ipv6Addr,
    /// The packet format that goes with it.
    pub gid_type: GidType,
}

/// The largest values that a device accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Work requests outstanding on one queue.
    pub queue_depth: u32,
    /// Scatter/gather elements of one work request.
    pub sges: u32,
    /// Completions that one completion queue holds.
    pub completions: u32,
    /// Bytes of one memory region.
    pub region_bytes: u64,
    /// READs outstanding as initiator, per queue pair.
    pub max_qp_init_rd_atom: u8,
    /// READs outstanding as target, per queue pair.
    pub max_qp_rd_atom: u8,
}

/// The devices of the library in use, with their attributes.
///
/// # Errors
/// [`DeviceError`] if there is none, or a device does not answer.
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

/// An open device: its context and protection domain, and the port and address to use. Clones share all of
/// it.
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

/// The port that is used of every device.
const PORT: u8 = 1;

/// Opens a device: its port 1, and of that port's gids the RoCE v2 one that most likely reaches other
/// hosts (IPv4 before global IPv6 before link-local).
///
/// The selector is among the devices of the library in use; call [`loader::ensure`] before to get the right
/// library.
///
/// # Errors
/// [`DeviceError`], which names the devices that exist if the chosen one does not.
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
    /// For example `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Whether it is the soft device.
    pub fn is_soft(&self) -> bool {
        self.0.soft
    }

    /// What it can do.
    pub fn limits(&self) -> &DeviceLimits {
        &self.0.limits
    }

    /// The port in use, counted from 1.
    pub fn port(&self) -> u8 {
        self.0.port
    }

    /// InfiniBand or Ethernet.
    pub fn link_layer(&self) -> LinkLayer {
        self.0.link_layer
    }

    /// The largest packet payload of the port in use.
    pub fn mtu(&self) -> Mtu {
        self.0.mtu
    }

    /// The port's local identifier on an InfiniBand subnet; 0 on Ethernet.
    pub fn lid(&self) -> u16 {
        self.0.lid
    }

    /// The address in use.
    pub fn gid(&self) -> PortGid {
        self.0.gid
    }

    /// The protection domain that all regions and queue pairs of this device share.
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
        // rdma-core says ENOSYS where the kernel has no RDMA support, `sideway` EOPNOTSUPP where no library
        // was loaded.
        Err(cause) if matches!(cause.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP)) => None,
        Err(cause) => return Err(DeviceError::List { loaded: loaded.clone(), cause }),
        Ok(list) => (!list.is_empty()).then_some(list),
    };
    list.ok_or_else(|| DeviceError::NoDevice { loaded: loaded.clone(), hint: hint(loaded) })
}

fn hint(loaded: &VerbsLibrary) -> String {
    match loaded {
        VerbsLibrary::Soft(_) => String::new(),
        VerbsLibrary::System(_) | VerbsLibrary::None => format!("; {}", loader::why_not_soft()),
    }
}

fn open_context(
    device: &sideway::ibverbs::device::Device<'_>,
    name: &str,
) -> Result<Arc<DeviceContext>, DeviceError> {
    device.open().map_err(|error| DeviceError::Call {
        device: name.to_owned(),
        what: "open it",
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
            // An address vector holds an index of 8 bits.
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
    fn a_choice_is_read_back_as_written() {
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
    fn an_infiniband_port_uses_its_first_address() {
        let table =
            [gid_entry(0, "fe80::1", GidType::InfiniBand), gid_entry(1, "2001:db8::1", GidType::InfiniBand)];
        assert_eq!(choose_gid(LinkLayer::InfiniBand, &table), Some(table[0]));
    }
}
