//! A BAR of a PCIe device as card memory.
//!
//! A device that `vfio-pci` has is opened through its character device; its BAR is exported as a dma-buf where the
//! kernel can (Linux 6.19). Any other device's BAR is the file `resourceN` of sysfs, mapped.

mod sysfs;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::vfio::VfioDevice;
use millstream_shm::{Mapping, PAGE};

use self::sysfs::Function;
use super::{Backing, BackingError, PciBar, Roots, register_descriptor};
use crate::memory::{AccessError, Span, zero};

/// A mapped BAR, or the first part of one.
#[derive(Debug)]
pub(crate) struct Bar {
    mapping: Arc<Mapping>,
    way: Way,
}

/// How the BAR was come by; what is in it keeps it.
#[derive(Debug)]
enum Way {
    Vfio {
        _device: VfioDevice,
        /// Nothing where the kernel exports none.
        dmabuf: Option<OwnedFd>,
    },
    Resource(File),
}

/// The size of a BAR [bytes].
pub(crate) fn size(place: &PciBar, roots: &Roots) -> Result<u64, BackingError> {
    let function = Function::find(place.address, &roots.sysfs)?;
    Ok(function.choose(place.bar)?.size)
}

impl Bar {
    /// The first `bytes` bytes of a BAR.
    pub(crate) fn open(place: &PciBar, roots: &Roots, bytes: u64) -> Result<Bar, BackingError> {
        let address = place.address;
        let function = Function::find(address, &roots.sysfs)?;
        let bar = function.choose(place.bar)?;
        if bytes > bar.size {
            return Err(BackingError::BarTooSmall { address, bar: bar.index, size: bar.size, wanted: bytes });
        }
        let opened = match function.vfio(&roots.dev) {
            Some((cdev, iommu)) => {
                let cdev = &cdev;
                let failed =
                    |doing| move |cause| BackingError::Pci { address, doing, path: cdev.clone(), cause };
                let device = VfioDevice::open(cdev, &iommu).map_err(failed("open"))?;
                let region = device.region(bar.index.into()).map_err(failed("look at the BAR of"))?;
                if !region.mappable || region.size < bytes {
                    return Err(failed("map a BAR of")(io::ErrorKind::Unsupported.into()));
                }
                let mapping = device.map(region, bytes as usize).map_err(failed("map a BAR of"))?;
                // What a kernel without the export leaves is the mapping.
                let dmabuf = device.export_dmabuf(region, bytes).ok();
                Bar { mapping: Arc::new(mapping), way: Way::Vfio { _device: device, dmabuf } }
            }
            None => {
                function.enable()?;
                let (path, file) = function.resource(&bar)?;
                let mapping = Mapping::new(file.as_fd(), 0, bytes as usize, true)
                    .map_err(|cause| BackingError::Pci { address, doing: "map", path, cause })?;
                Bar { mapping: Arc::new(mapping), way: Way::Resource(file) }
            }
        };
        // What the device's last user left there is nobody's business.
        opened.zero();
        Ok(opened)
    }

    fn zero(&self) {
        zero(&self.mapping, Span::new(0, self.size()));
        self.flush();
    }
}

impl Backing for Bar {
    fn size(&self) -> u64 {
        debug_assert!(self.mapping.len().is_multiple_of(PAGE));
        self.mapping.len() as u64
    }

    fn mapping(&self) -> Option<&Mapping> {
        Some(&self.mapping)
    }

    fn flush(&self) {
        // Stores to a write-combining mapping wait in the processor's buffers until something orders them.
        fence(Ordering::SeqCst);
    }

    fn clear(&self) -> Result<(), AccessError> {
        self.zero();
        Ok(())
    }

    fn register(&self, device: &Device, access: Access) -> Result<Region, MemoryError> {
        let len = self.mapping.len();
        let by_descriptor = match &self.way {
            Way::Vfio { dmabuf, .. } => dmabuf.as_ref().map(AsFd::as_fd),
            // A file of sysfs is no dma-buf: only the soft device takes it for one.
            Way::Resource(file) => device.is_soft().then(|| file.as_fd()),
        };
        match by_descriptor {
            None => Region::mapped(device, self.mapping.clone(), 0, len, access),
            Some(fd) => register_descriptor(device, fd, 0, len, access),
        }
    }
}
