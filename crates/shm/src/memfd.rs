//! Anonymous shared memory and its mappings.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// Memory without a name: it lives as long as a descriptor or a mapping of it does.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
    len: usize,
}

impl Memfd {
    /// Creates `len` bytes of sparse memory. Its size is sealed, so that no holder of the
    /// descriptor can take pages away from under somebody else's mapping.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate` or `fcntl` report.
    pub fn new(name: &str, len: usize) -> io::Result<Self> {
        let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the name is a C string that lives through the call.
        let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above returned a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let size = libc::off_t::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: plain system calls on a descriptor that we own.
        unsafe {
            if libc::ftruncate(raw, size) != 0 {
                return Err(io::Error::last_os_error());
            }
            if libc::fcntl(raw, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self { fd, len })
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for an object of zero bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps the whole object, readable and writable.
    ///
    /// # Errors
    /// What `mmap` reports.
    pub fn map(&self) -> io::Result<Mapping> {
        Mapping::new(self.fd.as_fd(), 0, self.len, true)
    }

    /// Gives the pages of a range back to the system; they read as zero afterwards.
    pub fn punch(&self, offset: usize, len: usize) {
        // SAFETY: a plain system call. Failure only costs memory, so it is not reported.
        unsafe {
            libc::fallocate(
                self.fd.as_raw_fd(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                offset as libc::off_t,
                len as libc::off_t,
            );
        }
    }

    /// The descriptor, given up.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A shared mapping of part of a file; unmapped when dropped.
///
/// System calls are made directly: communication libraries patch `mmap` and `munmap` to follow the
/// application's memory, and must not see (or lock against) the device's own mappings.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: a mapping is an address range; whoever dereferences into it takes care of races.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset`, which must be a multiple of the page size.
    ///
    /// # Errors
    /// What `mmap` reports; EINVAL for an empty range.
    pub fn new(fd: BorrowedFd<'_>, offset: usize, len: usize, writable: bool) -> io::Result<Self> {
        let prot = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe {
            libc::syscall(libc::SYS_mmap, 0usize, len, prot, libc::MAP_SHARED, fd.as_raw_fd(), offset)
        };
        if address == -1 {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address as *mut u8).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, writable })
    }

    /// Takes charge of a range that was mapped by other means.
    pub(crate) fn from_raw(base: *mut u8, len: usize) -> Self {
        let base = NonNull::new(base).expect("the kernel maps nothing at address zero");
        Self { base, len, writable: true }
    }

    /// First byte of the mapping.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a mapping of zero bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether stores are allowed.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Fills the page tables of the first `len` bytes now instead of by faults later.
    pub fn populate(&self, len: usize) {
        let advice = if self.writable { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        // SAFETY: the range is inside the mapping; the advice changes no contents. A kernel
        // without it answers EINVAL and the pages are filled by faults.
        unsafe { libc::syscall(libc::SYS_madvise, self.base.as_ptr(), len.min(self.len), advice) };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and nothing keeps pointers past our life.
        unsafe { libc::syscall(libc::SYS_munmap, self.base.as_ptr(), self.len) };
    }
}

/// Whether nobody can shrink the file behind `fd`, so that touching a mapping of it cannot fault.
#[must_use]
pub fn cannot_shrink(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: plain system calls on a borrowed descriptor.
    unsafe {
        let seals = libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS);
        seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
    }
}

impl Memfd {
    /// Whether every page has memory behind it, so that touching all of them costs none.
    #[must_use]
    pub fn is_filled(&self) -> bool {
        stat(self.fd.as_fd()).is_ok_and(|stat| stat.st_blocks as u64 * 512 >= self.len as u64)
    }

    /// Wraps a descriptor received from somebody else, taking its size from the system.
    ///
    /// # Errors
    /// What `fstat` reports, and InvalidData where the object may still shrink.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        if !cannot_shrink(fd.as_fd()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "descriptor is not sealed against shrinking",
            ));
        }
        let len = file_len(fd.as_fd())?;
        Ok(Self { fd, len })
    }
}

/// Size of the file behind a descriptor, in bytes.
///
/// # Errors
/// What `fstat` reports.
pub fn file_len(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let stat = stat(fd)?;
    usize::try_from(stat.st_size).map_err(|_| io::ErrorKind::InvalidData.into())
}

pub(crate) fn stat(fd: BorrowedFd<'_>) -> io::Result<libc::stat> {
    // SAFETY: stat is plain data and the call fills it.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &raw mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_see_each_other() {
        let memory = Memfd::new("test", 8192).unwrap();
        let (a, b) = (memory.map().unwrap(), memory.map().unwrap());
        // SAFETY: both mappings are 8192 bytes long.
        unsafe {
            a.base().add(5000).write_volatile(7);
            assert_eq!(b.base().add(5000).read_volatile(), 7);
        }
    }

    #[test]
    fn size_is_sealed() {
        let memory = Memfd::new("test", 8192).unwrap();
        assert!(cannot_shrink(memory.as_fd()));
        // SAFETY: a system call that must fail.
        assert_eq!(unsafe { libc::ftruncate(memory.as_fd().as_raw_fd(), 0) }, -1);
    }

    #[test]
    fn an_unsealed_file_is_refused() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Memfd::from_peer(file.into()).is_err());
    }
}
