//! A BAR of a PCIe device as card memory.
//!
//! A device that is bound to `vfio-pci` is opened through its character device. Its BAR is exported as a
//! dma-buf if the kernel supports that (Linux 6.19). The BAR of any other device is mapped through the file
//! `resourceN` of sysfs.

mod sysfs;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_card_abi::{AccessError, MappedMemory, MemoryRange};
use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::vfio::VfioDevice;
use millstream_shm::{Mapping, PAGE};

use self::sysfs::Function;
use super::{Backing, BackingError, DevicePaths, PciBar, register_descriptor};

/// A mapped BAR, or the first part of one.
#[derive(Debug)]
pub(crate) struct PciBarMemory {
    mapped: MappedMemory,
    source: BarSource,
}

/// How the BAR was opened. Keeps the device open.
#[derive(Debug)]
enum BarSource {
    Vfio {
        _device: VfioDevice,
        /// None if the kernel does not export it.
        dmabuf: Option<OwnedFd>,
    },
    Resource(File),
}

/// The size of a BAR (bytes).
pub(crate) fn size(bar: &PciBar, paths: &DevicePaths) -> Result<u64, BackingError> {
    let function = Function::find(bar.address, &paths.sysfs)?;
    Ok(function.choose(bar.bar)?.size)
}

impl PciBarMemory {
    /// The first `bytes` bytes of a BAR.
    pub(crate) fn open(bar: &PciBar, paths: &DevicePaths, bytes: u64) -> Result<PciBarMemory, BackingError> {
        let PciBar { address, bar } = *bar;
        let function = Function::find(address, &paths.sysfs)?;
        let bar = function.choose(bar)?;
        if bytes > bar.size {
            return Err(BackingError::BarTooSmall {
                address,
                bar: bar.index,
                size: bar.size,
                requested: bytes,
            });
        }
        let opened = match function.vfio(&paths.dev) {
            Some((cdev, iommu)) => {
                let cdev = &cdev;
                let failed = |operation| {
                    move |cause| BackingError::Pci { address, operation, path: cdev.clone(), cause }
                };
                let device = VfioDevice::open(cdev, &iommu).map_err(failed("open"))?;
                let region = device.region(bar.index.into()).map_err(failed("query the BAR of"))?;
                if !region.mappable || region.size < bytes {
                    return Err(failed("map a BAR of")(io::ErrorKind::Unsupported.into()));
                }
                let mapping = device.map(region, bytes as usize).map_err(failed("map a BAR of"))?;
                // Without the export, the mapping is registered.
                let dmabuf = device.export_dmabuf(region, bytes).ok();
                PciBarMemory {
                    mapped: MappedMemory::new(Arc::new(mapping)),
                    source: BarSource::Vfio { _device: device, dmabuf },
                }
            }
            None => {
                function.enable()?;
                let (path, file) = function.resource(&bar)?;
                let mapping = Mapping::new(file.as_fd(), 0, bytes as usize, true)
                    .map_err(|cause| BackingError::Pci { address, operation: "map", path, cause })?;
                PciBarMemory {
                    mapped: MappedMemory::new(Arc::new(mapping)),
                    source: BarSource::Resource(file),
                }
            }
        };
        // Data of the device's last user must not become visible.
        opened.zero();
        Ok(opened)
    }

    fn zero(&self) {
        self.mapped.zero(MemoryRange::new(0, self.size()));
        self.flush();
    }
}

impl Backing for PciBarMemory {
    fn size(&self) -> u64 {
        debug_assert!(self.mapped.size().is_multiple_of(PAGE as u64));
        self.mapped.size()
    }

    fn mapped(&self) -> Option<&MappedMemory> {
        Some(&self.mapped)
    }

    fn flush(&self) {
        // Stores to a write-combining mapping stay in the processor's buffers until a fence.
        fence(Ordering::SeqCst);
    }

    fn clear(&self) -> Result<(), AccessError> {
        self.zero();
        Ok(())
    }

    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.source {
            // The BAR is not at the start of the device's descriptor.
            BarSource::Vfio { .. } => None,
            BarSource::Resource(file) => Some(file.as_fd()),
        }
    }

    fn register(&self, device: &Device, access: Access) -> Result<Region, MemoryError> {
        let len = self.mapped.size() as usize;
        let by_descriptor = match &self.source {
            BarSource::Vfio { dmabuf, .. } => dmabuf.as_ref().map(AsFd::as_fd),
            // A file of sysfs is not a dma-buf; only the soft device accepts it.
            BarSource::Resource(file) => device.is_soft().then(|| file.as_fd()),
        };
        match by_descriptor {
            None => Region::mapped(device, self.mapped.mapping().clone(), 0, len, access),
            Some(fd) => register_descriptor(device, fd, 0, len, access),
        }
    }
}
