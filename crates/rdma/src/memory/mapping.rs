//! A memfd, mapped shared: memory that another process can map as well.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A shared mapping of a memfd of its own; unmapped when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping is plain memory without thread affinity; all access goes through raw pointers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zero-filled memory of `len` bytes; `name` appears in `/proc/<pid>/maps`.
    pub(super) fn new(name: &CStr, len: usize) -> io::Result<Mapping> {
        // SAFETY: `name` is a C string; a non-negative result is a new descriptor that nothing else owns.
        let fd = unsafe {
            let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let size = libc::off_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        // SAFETY: the descriptor is ours, and the mapping is placed by the kernel where nothing else is.
        let start = unsafe {
            if libc::ftruncate(fd.as_raw_fd(), size) != 0 {
                return Err(io::Error::last_os_error());
            }
            // Whoever else maps it must be able to rely on its size.
            let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
            if libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // mmap without MAP_FIXED never returns address 0.
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Mapping { start, len, fd })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Allocates every page now, so that no transfer pays for a first touch.
    pub(super) fn populate(&self) -> io::Result<()> {
        // SAFETY: the range is exactly this mapping; populating changes no contents.
        let done = unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_POPULATE_WRITE) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl AsFd for Mapping {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is exactly this mapping, and its owner is going away.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_zero_filled_and_shared_with_its_descriptor() {
        let mapping = Mapping::new(c"millstream-test", 10_000).unwrap();
        mapping.populate().unwrap();
        let mut back = [0xffu8; 3];
        // SAFETY: the last byte written and the bytes read lie within the mapping and the array.
        unsafe {
            *mapping.start().as_ptr().add(9_999) = 0x5a;
            let read = libc::pread(mapping.as_fd().as_raw_fd(), back.as_mut_ptr().cast(), 3, 9_998);
            assert_eq!(read, 2);
        }
        assert_eq!(back, [0, 0x5a, 0xff]);
    }

    #[test]
    fn nobody_can_change_the_size() {
        let mapping = Mapping::new(c"millstream-test", 4096).unwrap();
        for size in [0, 8192] {
            // SAFETY: the descriptor is live; the call fails or the assertion does.
            let changed = unsafe { libc::ftruncate(mapping.as_fd().as_raw_fd(), size) };
            assert_eq!(changed, -1);
        }
    }

    #[test]
    fn a_size_that_no_file_can_have_is_an_error() {
        assert!(Mapping::new(c"millstream-test", usize::MAX).is_err());
        assert!(Mapping::new(c"millstream-test", 0).is_err());
    }
}
