//! Copies between address spaces by the kernel (`process_vm_readv(2)`), for memory that cannot be mapped.

use std::io;

/// A range of memory in some process, with the layout of `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoVec {
    /// Address in the process that owns the memory.
    pub base: u64,
    /// Length \[bytes\].
    pub len: u64,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From this process into the other.
    Write,
    /// From the other process into this one.
    Read,
}

/// Copies between `local` ranges and one `remote` range of the process with the thread `tid`.
///
/// # Errors
/// EFAULT if either side has no such memory or the copy stops early; ESRCH if the process has exited; EPERM
/// if the kernel forbids the access.
///
/// # Safety
/// The local ranges must be valid for the access that `direction` makes.
pub unsafe fn copy(tid: u32, local: &[IoVec], remote: IoVec, direction: Direction) -> io::Result<()> {
    // The kernel moves at most MAX_RW_COUNT (2 GiB less a page) per call.
    const CHUNK: u64 = 1 << 30;
    let mut remote_address = remote.base;
    for range in local {
        let mut done = 0;
        while done < range.len {
            let len = (range.len - done).min(CHUNK);
            let ours = libc::iovec { iov_base: (range.base + done) as *mut _, iov_len: len as usize };
            let theirs = libc::iovec { iov_base: remote_address as *mut _, iov_len: len as usize };
            // rustix has no such call.
            // SAFETY: the caller vouches for the local range; the kernel checks the remote one.
            let n = unsafe {
                match direction {
                    Direction::Write => {
                        libc::process_vm_writev(tid as i32, &raw const ours, 1, &raw const theirs, 1, 0)
                    }
                    Direction::Read => {
                        libc::process_vm_readv(tid as i32, &raw const ours, 1, &raw const theirs, 1, 0)
                    }
                }
            };
            if n < 0 {
                return Err(io::Error::last_os_error());
            }
            if n == 0 {
                return Err(io::Error::from_raw_os_error(libc::EFAULT));
            }
            done += n as u64;
            remote_address += n as u64;
        }
    }
    Ok(())
}
