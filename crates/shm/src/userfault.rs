//! Page faults that wait (`userfaultfd(2)`): accesses of other threads to a range block while its pages are replaced.
//!
//! No thread reads the events. A faulting thread sleeps in the kernel until [`Userfault::wake`], or until the
//! descriptor is closed, and then repeats its access.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A descriptor for the faults of this process.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

/// The faults that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Faults {
    /// Accesses to pages that do not exist.
    Missing = 1,
    /// Stores to pages that [`Userfault::write_protect`] protects.
    WriteProtected = 2,
    /// Both.
    All = 3,
}

// `linux/userfaultfd.h`; not all in libc.
const UFFD_API: u64 = 0xaa;
const UFFD_USER_MODE_ONLY: i32 = 1;
/// Write protection of shared memory, also of pages that do not exist yet; UFFDIO_MOVE (Linux 6.8).
const FEATURES: u64 = 1 << 12 | 1 << 13 | 1 << 16;
const MOVE_ALLOW_SRC_HOLES: u64 = 1 << 1;
const WRITEPROTECT_WP: u64 = 1 << 0;
const WRITEPROTECT_DONTWAKE: u64 = 1 << 1;

const fn request(direction: u64, number: u64, size: usize) -> libc::c_ulong {
    direction << 30 | (size as u64) << 16 | UFFD_API << 8 | number
}
const READ: u64 = 2;
const READ_WRITE: u64 = 3;
const UFFDIO_API: libc::c_ulong = request(READ_WRITE, 0x3f, 24);
const UFFDIO_REGISTER: libc::c_ulong = request(READ_WRITE, 0x00, 32);
const UFFDIO_UNREGISTER: libc::c_ulong = request(READ, 0x01, 16);
const UFFDIO_WAKE: libc::c_ulong = request(READ, 0x02, 16);
const UFFDIO_MOVE: libc::c_ulong = request(READ_WRITE, 0x05, 40);
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(READ_WRITE, 0x06, 24);
/// Of `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa << 8;

impl Userfault {
    /// Opens a descriptor for faults of programs and of the kernel in system calls, of this process and of others. It
    /// needs CAP_SYS_PTRACE, access to `/dev/userfaultfd`, or the setting `vm.unprivileged_userfaultfd=1`.
    ///
    /// # Errors
    /// EPERM without these; EINVAL before Linux 6.8; ENOSYS in a kernel without userfaultfd.
    pub(crate) fn for_all_accesses() -> io::Result<Self> {
        let fd = open(0).or_else(|error| {
            let device = std::fs::File::open("/dev/userfaultfd").map_err(|_| error)?;
            // SAFETY: makes a new descriptor.
            descriptor(i64::from(unsafe {
                libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC)
            }))
        })?;
        Self::new(fd)
    }

    /// Opens a descriptor for faults in user mode, which needs no privilege. A system call that accesses such a page fails
    /// with EFAULT.
    ///
    /// # Errors
    /// As [`for_all_accesses`](Self::for_all_accesses); EPERM where a seccomp filter forbids it.
    pub(crate) fn for_user_mode() -> io::Result<Self> {
        Self::new(open(UFFD_USER_MODE_ONLY)?)
    }

    fn new(fd: OwnedFd) -> io::Result<Self> {
        let opened = Self(fd);
        opened.control(UFFDIO_API, &mut [UFFD_API, FEATURES, 0])?;
        Ok(opened)
    }

    /// Lets `faults` of `range` wait.
    pub(crate) fn register(&self, range: &Range<usize>, faults: Faults) -> io::Result<()> {
        self.control(UFFDIO_REGISTER, &mut [range.start as u64, range.len() as u64, faults as u64, 0])
    }

    /// Lets faults of `range` go on.
    pub(crate) fn unregister(&self, range: &Range<usize>) -> io::Result<()> {
        self.control(UFFDIO_UNREGISTER, &mut [range.start as u64, range.len() as u64])
    }

    /// Protects the pages of a range that was registered for [`Faults::WriteProtected`].
    pub(crate) fn write_protect(&self, range: &Range<usize>) -> io::Result<()> {
        self.control(UFFDIO_WRITEPROTECT, &mut [range.start as u64, range.len() as u64, WRITEPROTECT_WP])
    }

    /// Checks that everything that is mapped in `range` is still what was registered, for stores at least.
    ///
    /// # Errors
    /// ENOENT if another thread has mapped something else there.
    pub(crate) fn check_registered(&self, range: &Range<usize>, faults: Faults) -> io::Result<()> {
        // The protection stays as it is. Without the flag, the request would wake the threads that wait.
        let mode = if faults == Faults::WriteProtected { WRITEPROTECT_WP } else { WRITEPROTECT_DONTWAKE };
        self.control(UFFDIO_WRITEPROTECT, &mut [range.start as u64, range.len() as u64, mode])
    }

    /// Moves the pages of `from` to `to`, anonymous memory of the same length that is registered. Returns the bytes up
    /// to the first page that could not be moved, with the cause: EBUSY for a page that the kernel uses (pinned for
    /// direct or fixed-buffer I/O), EAGAIN for a lock that was taken.
    pub(crate) fn move_pages(&self, from: &Range<usize>, to: usize) -> (usize, io::Result<()>) {
        let mut arguments = [to as u64, from.start as u64, from.len() as u64, MOVE_ALLOW_SRC_HOLES, 0];
        let result = self.control(UFFDIO_MOVE, &mut arguments);
        let moved = match &result {
            Ok(()) => from.len(),
            Err(_) => usize::try_from(arguments[4].cast_signed()).unwrap_or(0),
        };
        (moved, result)
    }

    /// Wakes the threads that wait at pages of `range`, whatever is mapped there now.
    pub(crate) fn wake(&self, range: &Range<usize>) {
        // The close of the descriptor wakes them as well.
        let _ = self.control(UFFDIO_WAKE, &mut [range.start as u64, range.len() as u64]);
    }

    fn control<const N: usize>(&self, request: libc::c_ulong, arguments: &mut [u64; N]) -> io::Result<()> {
        // SAFETY: the structure of this request consists of N words.
        let done =
            unsafe { libc::syscall(libc::SYS_ioctl, self.0.as_raw_fd(), request, arguments.as_mut_ptr()) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

fn open(flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: makes a new descriptor.
    descriptor(unsafe { libc::syscall(libc::SYS_userfaultfd, flags | libc::O_CLOEXEC | libc::O_NONBLOCK) })
}

fn descriptor(result: i64) -> io::Result<OwnedFd> {
    match i32::try_from(result) {
        // SAFETY: a new descriptor, owned by nobody else.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
