//! PCIe device regions by `vfio-pci`: mappings, and dma-bufs that network adapters can access.
//!
//! Read first: `linux/vfio.h`. A device is opened through its character device (`/dev/vfio/devices/vfioN`, Linux 6.6)
//! and bound to an iommufd. Regions are exported with the device feature `DMA_BUF` (Linux 6.19). Open files and
//! dma-bufs keep the device in use.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};

use crate::Mapping;

/// `VFIO_TYPE` and `VFIO_BASE`: `_IO(';', 100 + n)`. The argument has its size as the first field.
const fn vfio_opcode(n: u8) -> Opcode {
    opcode::none(b';', 100 + n)
}

const GET_REGION_INFO: Opcode = vfio_opcode(8);
const FEATURE: Opcode = vfio_opcode(17);
const BIND_IOMMUFD: Opcode = vfio_opcode(18);

const FEATURE_GET: u32 = 1 << 16;
const FEATURE_DMA_BUF: u32 = 11;

const REGION_READ: u32 = 1;
const REGION_WRITE: u32 = 2;
const REGION_MMAP: u32 = 4;

/// `struct vfio_device_bind_iommufd`, the fields of its first version.
#[repr(C)]
struct BindIommufd {
    argsz: u32,
    flags: u32,
    iommufd: i32,
    out_devid: u32,
}

/// `struct vfio_region_info`.
#[repr(C)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

/// `struct vfio_device_feature`, followed by `struct vfio_device_feature_dma_buf` with one range.
#[repr(C)]
struct DmaBufFeature {
    argsz: u32,
    flags: u32,
    region_index: u32,
    open_flags: u32,
    export_flags: u32,
    nr_ranges: u32,
    offset: u64,
    length: u64,
}

const _: () = assert!(size_of::<BindIommufd>() == 16);
const _: () = assert!(size_of::<RegionInfo>() == 32);
const _: () = assert!(size_of::<DmaBufFeature>() == 40);

/// A VFIO request; returns the result of `ioctl`.
///
/// # Safety
/// `T` is the structure of the request and starts with its own size.
struct VfioIoctl<'a, T> {
    opcode: Opcode,
    argument: &'a mut T,
}

// SAFETY: the argument is the structure of the request, which the kernel may write.
unsafe impl<T> Ioctl for VfioIoctl<'_, T> {
    type Output = RawFd;

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.opcode
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(self.argument).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<RawFd> {
        Ok(out)
    }
}

/// A device bound to `vfio-pci`.
#[derive(Debug)]
pub struct VfioDevice {
    device: File,
    /// Keeps the iommufd open while the device is bound to it.
    _iommu: File,
}

/// A region of a device; regions 0 to 5 are the BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VfioRegion {
    /// Region number.
    pub index: u32,
    /// Size \[bytes\]; zero if the device lacks the region.
    pub size: u64,
    /// Whether it can be mapped for reading and writing.
    pub mappable: bool,
    offset: u64,
}

impl VfioDevice {
    /// Opens the device behind the character device `cdev` and binds it to `iommu`, usually `/dev/iommu`.
    ///
    /// # Errors
    /// EACCES or EPERM without permission, EBUSY if another process uses the device.
    pub fn open(cdev: &Path, iommu: &Path) -> io::Result<Self> {
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
        let (device, iommu) = (open(cdev)?, open(iommu)?);
        let mut bind = BindIommufd {
            argsz: size_of::<BindIommufd>() as u32,
            flags: 0,
            iommufd: iommu.as_raw_fd(),
            out_devid: 0,
        };
        // SAFETY: the argument is the structure of this request.
        unsafe { rustix::ioctl::ioctl(&device, VfioIoctl { opcode: BIND_IOMMUFD, argument: &mut bind })? };
        Ok(Self { device, _iommu: iommu })
    }

    /// Queries a region.
    ///
    /// # Errors
    /// EINVAL for a region number that no device has.
    pub fn region(&self, index: u32) -> io::Result<VfioRegion> {
        let argsz = size_of::<RegionInfo>() as u32;
        let mut info = RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
        // SAFETY: the argument is the structure of this request.
        unsafe {
            rustix::ioctl::ioctl(&self.device, VfioIoctl { opcode: GET_REGION_INFO, argument: &mut info })?;
        }
        let wanted = REGION_READ | REGION_WRITE | REGION_MMAP;
        Ok(VfioRegion {
            index,
            size: info.size,
            mappable: info.flags & wanted == wanted,
            offset: info.offset,
        })
    }

    /// Maps the first `len` bytes of a region, uncached.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn map(&self, region: VfioRegion, len: usize) -> io::Result<Mapping> {
        Mapping::new(self.device.as_fd(), region.offset as usize, len, true)
    }

    /// Exports the first `len` bytes of a region as a dma-buf.
    ///
    /// # Errors
    /// ENOTTY before Linux 6.19, EOPNOTSUPP for a device without peer-to-peer access, EINVAL for a range that is
    /// not whole pages of the region.
    pub fn export_dmabuf(&self, region: VfioRegion, len: u64) -> io::Result<OwnedFd> {
        let mut export = DmaBufFeature {
            argsz: size_of::<DmaBufFeature>() as u32,
            flags: FEATURE_GET | FEATURE_DMA_BUF,
            region_index: region.index,
            open_flags: (libc::O_RDWR | libc::O_CLOEXEC).cast_unsigned(),
            export_flags: 0,
            nr_ranges: 1,
            offset: 0,
            length: len,
        };
        // SAFETY: the argument is the structure of this request.
        let fd = unsafe {
            rustix::ioctl::ioctl(&self.device, VfioIoctl { opcode: FEATURE, argument: &mut export })?
        };
        // SAFETY: the call above returned a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_are_those_of_the_header() {
        assert_eq!((GET_REGION_INFO, FEATURE, BIND_IOMMUFD), (0x3b6c, 0x3b75, 0x3b76));
    }

    #[test]
    fn other_devices_are_refused() {
        let null = Path::new("/dev/null");
        let refused = VfioDevice::open(null, null).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTTY));
        let missing = VfioDevice::open(Path::new("/dev/vfio/devices/none"), null).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
