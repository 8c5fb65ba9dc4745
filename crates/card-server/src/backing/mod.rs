//! Kinds of card memory.
//!
//! A card has memory of one [`BackingKind`]: `emulated` (a memfd), `pci` (a BAR of a PCIe device) or `cuda` (GPU
//! memory). Each implements `Backing`. All other parts of a card are the same for all kinds, and so are the tests
//! (`tests/card/memory_kinds.rs`).

mod cuda;
mod emulated;
mod kind;
mod pci;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use millstream_card_abi::{AccessError, MappedMemory, MemoryRange, SyscallError};
use millstream_gpu::CudaMemory;
use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};

pub(crate) use self::emulated::EmulatedMemory;
pub use self::kind::{BackingKind, ParseBackingError, PciAddress, PciBar};

/// Memory of a card.
///
/// [`Memory`](crate::Memory) has checked offsets and lengths.
pub(crate) trait Backing: fmt::Debug + Send + Sync {
    /// Size (bytes).
    fn size(&self) -> u64;

    /// The memory as mapped by this process, if it is. Then the functions that copy are not called.
    fn mapped(&self) -> Option<&MappedMemory>;

    /// Makes earlier stores to the mapping visible to devices.
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
    fn copy_within(&self, from: MemoryRange, to: u64) -> Result<(), AccessError> {
        unreachable!("{self:?} is mapped: {from} to {to:#x}");
    }

    /// Zeros all bytes.
    fn clear(&self) -> Result<(), AccessError>;

    /// Ranges that may have been written; all other bytes are zero.
    fn written_ranges(&self) -> Vec<MemoryRange> {
        vec![MemoryRange::new(0, self.size())]
    }

    /// Registers all of it with a device. Addresses of the region are offsets into the memory.
    fn register(&self, device: &Device, access: Access) -> Result<Region, MemoryError>;

    /// The descriptor by which other processes of this host can map the memory, if it has one.
    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The memory as GPU memory, if it is.
    fn gpu_memory(&self) -> Option<&CudaMemory> {
        None
    }

    /// Allocates zeroed memory of the same size, if this kind allows it: to replace memory that a hung kernel uses.
    fn allocate_another(&self) -> Option<io::Result<Box<dyn Backing>>> {
        None
    }
}

/// Where devices are found; tests replace these paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePaths {
    /// The `sysfs` file system: `/sys`.
    pub sysfs: PathBuf,
    /// The devices: `/dev`.
    pub dev: PathBuf,
    /// NVIDIA's driver: `libcuda.so.1`.
    pub cuda: String,
    /// The Vulkan loader: `libvulkan.so.1`.
    pub vulkan: String,
}

impl Default for DevicePaths {
    fn default() -> DevicePaths {
        DevicePaths {
            sysfs: "/sys".into(),
            dev: "/dev".into(),
            cuda: millstream_gpu::CUDA.to_owned(),
            vulkan: millstream_gpu::vulkan_loader(),
        }
    }
}

/// Why memory of the requested kind is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// Host memory could not be allocated.
    #[error(transparent)]
    Emulated(#[from] SyscallError),
    /// The device does not exist.
    #[error("no PCI device {address}: {} does not exist", .path.display())]
    NoPciDevice {
        /// The requested address.
        address: PciAddress,
        /// The missing folder.
        path: PathBuf,
    },
    /// A file of the device cannot be used.
    #[error("PCI device {address}: cannot {operation} {}: {cause}{}", .path.display(), advice(.cause))]
    Pci {
        /// The device.
        address: PciAddress,
        /// The operation that failed.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        cause: io::Error,
    },
    /// The device has no memory BAR.
    #[error("PCI device {address} has no memory BAR")]
    NoMemoryBar {
        /// The device.
        address: PciAddress,
    },
    /// The requested BAR is not a memory BAR.
    #[error("BAR {bar} of PCI device {address} is {what}")]
    NotMemory {
        /// The device.
        address: PciAddress,
        /// The BAR.
        bar: u8,
        /// The actual kind of the BAR.
        what: &'static str,
    },
    /// The BAR is smaller than the requested card memory.
    #[error(
        "BAR {bar} of PCI device {address} has {size} bytes, card memory of {requested} bytes does not fit"
    )]
    BarTooSmall {
        /// The device.
        address: PciAddress,
        /// The BAR.
        bar: u8,
        /// Its size (bytes).
        size: u64,
        /// Requested size (bytes).
        requested: u64,
    },
    /// Processes of this host cannot map the GPU's memory.
    #[error("cuda:{index}: {cause}")]
    NotMappable {
        /// The GPU.
        index: u32,
        /// The reason.
        cause: millstream_gpu::VulkanError,
    },
    /// A descriptor could not be duplicated.
    #[error("cuda:{index}: cannot duplicate a descriptor: {cause}")]
    Descriptor {
        /// The GPU.
        index: u32,
        /// The system's reason.
        cause: io::Error,
    },
    /// The GPU does not exist or has too little free memory.
    #[error("cuda:{index}: {cause}")]
    Cuda {
        /// The GPU.
        index: u32,
        /// The driver's error.
        cause: millstream_gpu::CudaError,
    },
}

fn advice(cause: &io::Error) -> &'static str {
    match cause.raw_os_error() {
        // EACCES, EPERM
        Some(13 | 1) => "; run as root, or grant access to this file",
        // EBUSY, EINVAL
        Some(16 | 22) => "; check that no driver uses the device",
        _ => "",
    }
}

/// Registers memory behind a descriptor, which the caller keeps.
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

/// Size of card memory, and how it is allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationOptions {
    pub(crate) bytes: u64,
    pub(crate) prefault: bool,
    pub(crate) huge_pages: bool,
    /// Network adapters access it: by a dma-buf, or by its pages, which they pin.
    pub(crate) for_adapter: bool,
}

impl AllocationOptions {
    /// `bytes` bytes of host memory, whose pages are allocated when they are touched.
    pub(crate) fn small(bytes: u64) -> AllocationOptions {
        AllocationOptions { bytes, prefault: false, huge_pages: false, for_adapter: false }
    }
}

/// Allocates or opens memory of a kind.
pub(crate) fn open(
    kind: &BackingKind,
    paths: &DevicePaths,
    options: AllocationOptions,
) -> Result<Box<dyn Backing>, BackingError> {
    Ok(match kind {
        BackingKind::Emulated => Box::new(EmulatedMemory::new("millstream-card-memory", options)?),
        BackingKind::Pci(bar) => Box::new(pci::PciBarMemory::open(bar, paths, options.bytes)?),
        BackingKind::Cuda(index) => Box::new(cuda::GpuMemory::open(*index, paths, options)?),
    })
}

/// Checks that processes of this host can map memory of a kind.
///
/// # Errors
/// [`BackingError`] if they cannot, or the device does not exist.
pub fn check_mappable(kind: &BackingKind, paths: &DevicePaths) -> Result<(), BackingError> {
    match kind {
        BackingKind::Cuda(index) => cuda::check_mappable(*index, paths),
        BackingKind::Emulated | BackingKind::Pci(_) => Ok(()),
    }
}

/// Default size of card memory: the size of a BAR; none for the other kinds.
///
/// # Errors
/// [`BackingError`] if the device does not exist.
pub fn default_size(kind: &BackingKind, paths: &DevicePaths) -> Result<Option<u64>, BackingError> {
    match kind {
        BackingKind::Pci(bar) => pci::size(bar, paths).map(Some),
        BackingKind::Emulated | BackingKind::Cuda(_) => Ok(None),
    }
}
