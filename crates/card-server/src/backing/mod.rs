//! What card memory is made of.
//!
//! A card has memory of one [`Kind`], each of which is a `Backing`: `emulated` (a memfd), `pci` (a BAR of a
//! PCIe device), `cuda` (memory of a GPU). Registers, regions, leases and the network are the same for all of
//! them, and so is what the tests ask of them (`tests/card/kinds.rs`).

mod cuda;
mod emulated;
mod kind;
mod pci;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::Mapping;

pub(crate) use self::emulated::Emulated;
pub use self::kind::{BadKind, Kind, PciAddress, PciBar};
use crate::memory::{AccessError, Span};
use crate::os::OsError;

/// Memory of a card.
///
/// Offsets and lengths have been checked when they come here: [`Memory`](crate::Memory) does.
pub(crate) trait Backing: fmt::Debug + Send + Sync {
    /// Size [bytes].
    fn size(&self) -> u64;

    /// Where this process reaches the memory by loads and stores, if it does. Then the functions that copy
    /// are not called.
    fn mapping(&self) -> Option<&Mapping>;

    /// Makes what was stored through the mapping visible to other devices.
    fn flush(&self) {}

    /// Copies out of memory that is not mapped.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        unreachable!("{self:?} is mapped: {} bytes at {offset:#x}", out.len());
    }

    /// Copies into memory that is not mapped.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        unreachable!("{self:?} is mapped: {} bytes at {offset:#x}", bytes.len());
    }

    /// Copies inside memory that is not mapped; the ranges may overlap.
    fn copy_within(&self, from: Span, to: u64) -> Result<(), AccessError> {
        unreachable!("{self:?} is mapped: {from} to {to:#x}");
    }

    /// Makes every byte zero.
    fn clear(&self) -> Result<(), AccessError>;

    /// Ranges outside of which every byte is zero; one of everything where that is not known.
    fn written(&self) -> Vec<Span> {
        vec![Span::new(0, self.size())]
    }

    /// Registers all of it with a device. Addresses are offsets.
    fn register(&self, device: &Device, access: Access) -> Result<Region, MemoryError>;

    /// The descriptor by which other processes of this host map it, if they may.
    fn shared(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Other memory of the same size and kind, zero, if there is any to be had: for a card whose memory is
    /// still used by a kernel that does not end.
    fn another(&self) -> Option<io::Result<Box<dyn Backing>>> {
        None
    }
}

/// Where the memory of the kinds is looked for; tests put other things there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The `sysfs` file system: `/sys`.
    pub sysfs: PathBuf,
    /// The devices: `/dev`.
    pub dev: PathBuf,
    /// NVIDIA's driver: `libcuda.so.1`.
    pub cuda: String,
}

impl Default for Roots {
    fn default() -> Roots {
        Roots { sysfs: "/sys".into(), dev: "/dev".into(), cuda: millstream_shm::cuda::LIBRARY.to_owned() }
    }
}

/// Why there is no memory of the kind asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// The system has no memory of its own for an emulated card.
    #[error(transparent)]
    Emulated(#[from] OsError),
    /// There is no such device.
    #[error("there is no PCI device {address}: {} does not exist", .path.display())]
    NoPciDevice {
        /// The one asked for.
        address: PciAddress,
        /// Where it would be.
        path: PathBuf,
    },
    /// A file of the device cannot be used.
    #[error("PCI device {address}: cannot {doing} {}: {cause}{}", .path.display(), advice(.cause))]
    Pci {
        /// The device.
        address: PciAddress,
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// The system's reason.
        cause: io::Error,
    },
    /// The device has no BAR that could be card memory.
    #[error("PCI device {address} has no memory BAR")]
    NoMemoryBar {
        /// The device.
        address: PciAddress,
    },
    /// The BAR asked for is none, or none of memory.
    #[error("BAR {bar} of PCI device {address} is {what}")]
    NotMemory {
        /// The device.
        address: PciAddress,
        /// The BAR.
        bar: u8,
        /// What it is instead.
        what: &'static str,
    },
    /// The BAR is smaller than the card is to be.
    #[error("BAR {bar} of PCI device {address} has {size} bytes, card memory of {wanted} bytes does not fit")]
    BarTooSmall {
        /// The device.
        address: PciAddress,
        /// The BAR.
        bar: u8,
        /// What it has.
        size: u64,
        /// What was asked for.
        wanted: u64,
    },
    /// There is no such GPU, or no memory of it.
    #[error("cuda:{index}: {cause}")]
    Cuda {
        /// The GPU.
        index: u32,
        /// Why.
        cause: millstream_shm::cuda::CudaError,
    },
}

fn advice(cause: &io::Error) -> &'static str {
    match cause.raw_os_error() {
        // EACCES, EPERM
        Some(13 | 1) => " (it takes root, or the right to this file)",
        // EBUSY, EINVAL
        Some(16 | 22) => " (is a driver using the device?)",
        _ => "",
    }
}

/// Registers memory behind a descriptor, which goes on being the caller's.
fn register_descriptor(
    device: &Device,
    fd: BorrowedFd<'_>,
    offset: u64,
    len: usize,
    access: Access,
) -> Result<Region, MemoryError> {
    let fd = fd.try_clone_to_owned().map_err(|cause| MemoryError::Allocate { len, cause })?;
    Region::dmabuf(device, fd, offset, len, access)
}

/// How large card memory is to be, and how it is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) bytes: u64,
    pub(crate) prefault: bool,
    pub(crate) huge_pages: bool,
}

/// Memory of a kind.
pub(crate) fn open(kind: &Kind, roots: &Roots, wanted: Wanted) -> Result<Box<dyn Backing>, BackingError> {
    Ok(match kind {
        Kind::Emulated => Box::new(Emulated::new("millstream-card-memory", wanted)?),
        Kind::Pci(place) => Box::new(pci::Bar::open(place, roots, wanted.bytes)?),
        Kind::Cuda(index) => Box::new(cuda::Gpu::open(*index, roots, wanted.bytes)?),
    })
}

/// The size of card memory if nobody says how large it is to be: all there is, where that is a number.
///
/// # Errors
/// [`BackingError`] if there is no such device.
pub fn natural_size(kind: &Kind, roots: &Roots) -> Result<Option<u64>, BackingError> {
    match kind {
        Kind::Pci(place) => pci::size(place, roots).map(Some),
        Kind::Emulated | Kind::Cuda(_) => Ok(None),
    }
}
