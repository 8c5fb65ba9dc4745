//! BARs of PCIe devices by `vfio-pci`: mapped, and exported as dma-bufs that network adapters can reach.
//!
//! Read first: `linux/vfio.h`. A device is opened by its own character device (`/dev/vfio/devices/vfioN`, Linux 6.6)
//! and bound to an iommufd; the export of a region is the device feature `DMA_BUF` (Linux 6.19). Both keep the device
//! in use for as long as they are open.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use crate::Mapping;

/// `_IO(';', 100 + n)`: VFIO's requests carry their size in their argument.
const fn request(n: libc::Ioctl) -> libc::Ioctl {
    (b';' as libc::Ioctl) << 8 | (100 + n)
}

const GET_REGION_INFO: libc::Ioctl = request(8);
const FEATURE: libc::Ioctl = request(17);
const BIND_IOMMUFD: libc::Ioctl = request(18);

const FEATURE_GET: u32 = 1 << 16;
const FEATURE_DMA_BUF: u32 = 11;

const REGION_READ: u32 = 1;
const REGION_WRITE: u32 = 2;
const REGION_MMAP: u32 = 4;

/// `struct vfio_device_bind_iommufd`, as far as every kernel knows it.
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

/// `struct vfio_device_feature` with `struct vfio_device_feature_dma_buf` and one range behind it.
#[repr(C)]
struct ExportRegion {
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
const _: () = assert!(size_of::<ExportRegion>() == 40);

/// A device that this process has by `vfio-pci`.
#[derive(Debug)]
pub struct VfioDevice {
    device: File,
    /// What the device is bound to has to stay open.
    _iommu: File,
}

/// One of its regions; regions 0 to 5 are the BARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VfioRegion {
    /// Its number.
    pub index: u32,
    /// Its size [bytes]; zero if the device does not have it.
    pub size: u64,
    /// Whether it can be mapped, read and written.
    pub can_be_mapped: bool,
    offset: u64,
}

impl VfioDevice {
    /// Opens the device behind the character device `cdev` and binds it to `iommu`, usually `/dev/iommu`.
    ///
    /// # Errors
    /// What the system reports: EACCES or EPERM without the right to, EBUSY if somebody else has the device.
    pub fn open(cdev: &Path, iommu: &Path) -> io::Result<Self> {
        let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
        let (device, iommu) = (open(cdev)?, open(iommu)?);
        let mut bind = BindIommufd {
            argsz: size_of::<BindIommufd>() as u32,
            flags: 0,
            iommufd: iommu.as_raw_fd(),
            out_devid: 0,
        };
        // SAFETY: the argument is the structure of this request, with its size in it.
        check(unsafe { libc::ioctl(device.as_raw_fd(), BIND_IOMMUFD, &raw mut bind) })?;
        Ok(Self { device, _iommu: iommu })
    }

    /// Looks at a region.
    ///
    /// # Errors
    /// EINVAL for one that no device has.
    pub fn region(&self, index: u32) -> io::Result<VfioRegion> {
        let argsz = size_of::<RegionInfo>() as u32;
        let mut info = RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
        // SAFETY: as in `open`.
        check(unsafe { libc::ioctl(self.device.as_raw_fd(), GET_REGION_INFO, &raw mut info) })?;
        let wanted = REGION_READ | REGION_WRITE | REGION_MMAP;
        Ok(VfioRegion {
            index,
            size: info.size,
            can_be_mapped: info.flags & wanted == wanted,
            offset: info.offset,
        })
    }

    /// Maps the first `len` bytes of a region, not cached.
    ///
    /// # Errors
    /// What `mmap` reports.
    pub fn map(&self, region: VfioRegion, len: usize) -> io::Result<Mapping> {
        Mapping::new(self.device.as_fd(), region.offset as usize, len, true)
    }

    /// Exports the first `len` bytes of a region as a dma-buf.
    ///
    /// # Errors
    /// ENOTTY from a kernel that cannot (before Linux 6.19), EOPNOTSUPP for a device whose memory other devices
    /// cannot reach, EINVAL for a range that is not whole pages of the region.
    pub fn export(&self, region: VfioRegion, len: u64) -> io::Result<OwnedFd> {
        let mut export = ExportRegion {
            argsz: size_of::<ExportRegion>() as u32,
            flags: FEATURE_GET | FEATURE_DMA_BUF,
            region_index: region.index,
            open_flags: (libc::O_RDWR | libc::O_CLOEXEC).cast_unsigned(),
            export_flags: 0,
            nr_ranges: 1,
            offset: 0,
            length: len,
        };
        // SAFETY: as in `open`; the answer is a new descriptor, or -1.
        let fd = check(unsafe { libc::ioctl(self.device.as_raw_fd(), FEATURE, &raw mut export) })?;
        // SAFETY: the call above returned a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

fn check(returned: libc::c_int) -> io::Result<libc::c_int> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_those_of_the_header() {
        assert_eq!((GET_REGION_INFO, FEATURE, BIND_IOMMUFD), (0x3b6c, 0x3b75, 0x3b76));
    }

    #[test]
    fn what_is_no_vfio_device_is_refused() {
        let null = Path::new("/dev/null");
        let refused = VfioDevice::open(null, null).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTTY));
        let missing = VfioDevice::open(Path::new("/dev/vfio/devices/none"), null).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
