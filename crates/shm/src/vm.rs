//! Copies between address spaces by the kernel, for memory that cannot be mapped.

use std::io;

/// A piece of memory in some process.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Address in its own process.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

/// Which way bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From this process into the other.
    Write,
    /// From the other process into this one.
    Read,
}

/// Copies between `local` pieces and one `remote` piece of the process `pid`.
///
/// # Errors
/// EFAULT where either side has no such memory, ESRCH where the process is gone, EPERM where the
/// kernel forbids it. A copy that stops in the middle is reported as EFAULT.
///
/// # Safety
/// The local pieces must be valid for the access that `direction` makes.
pub unsafe fn copy(pid: u32, local: &[Piece], remote: Piece, direction: Direction) -> io::Result<()> {
    // The kernel moves at most MAX_RW_COUNT (2 GiB less a page) a call.
    const CHUNK: u64 = 1 << 30;
    let mut remote_at = remote.base;
    for piece in local {
        let mut done = 0;
        while done < piece.len {
            let len = (piece.len - done).min(CHUNK);
            let here = libc::iovec { iov_base: (piece.base + done) as *mut _, iov_len: len as usize };
            let there = libc::iovec { iov_base: remote_at as *mut _, iov_len: len as usize };
            // SAFETY: the caller vouches for the local piece; the remote one is checked by the kernel.
            let n = unsafe {
                match direction {
                    Direction::Write => {
                        libc::process_vm_writev(pid as i32, &raw const here, 1, &raw const there, 1, 0)
                    }
                    Direction::Read => {
                        libc::process_vm_readv(pid as i32, &raw const here, 1, &raw const there, 1, 0)
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
            remote_at += n as u64;
        }
    }
    Ok(())
}
