//! The program's memory as the kernel sees it: a bad address is an error and no signal.

use crate::{Errno, Result};

/// Copies from the program's memory.
///
/// # Errors
/// EFAULT for memory that cannot be read.
///
/// # Safety
/// Where the kernel forbids such copies (a seccomp filter), the address must be valid.
pub(crate) unsafe fn read(from: u64, to: &mut [u8]) -> Result<()> {
    let local = to.as_mut_ptr();
    // SAFETY: the caller vouches for the address if the kernel does not check it.
    unsafe { copy(local, from, to.len(), Direction::Read) }
}

/// Copies to the program's memory.
///
/// # Errors
/// EFAULT for memory that cannot be written.
///
/// # Safety
/// As for [`read`].
pub(crate) unsafe fn write(to: u64, from: &[u8]) -> Result<()> {
    // SAFETY: the local bytes are only read; otherwise as above.
    unsafe { copy(from.as_ptr().cast_mut(), to, from.len(), Direction::Write) }
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

/// # Safety
/// The local range is valid for the direction; the program's as for [`read`].
unsafe fn copy(local: *mut u8, program: u64, len: usize, direction: Direction) -> Result<()> {
    // Miri has no such system call.
    if !cfg!(miri) {
        let ours = libc::iovec { iov_base: local.cast(), iov_len: len };
        let theirs = libc::iovec { iov_base: program as *mut _, iov_len: len };
        // Not the process id: the main thread may have ended (`pthread_exit`).
        let tid = millstream_shm::thread::id().cast_signed();
        // SAFETY: a local range that the caller vouches for; the kernel checks the program's.
        let copied = unsafe {
            match direction {
                Direction::Read => libc::process_vm_readv(tid, &raw const ours, 1, &raw const theirs, 1, 0),
                Direction::Write => libc::process_vm_writev(tid, &raw const ours, 1, &raw const theirs, 1, 0),
            }
        };
        if copied == len as isize {
            return Ok(());
        }
        if copied >= 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) {
            return Err(Errno(libc::EFAULT));
        }
    }
    // SAFETY: the caller vouches for both ranges.
    unsafe {
        match direction {
            Direction::Read => local.copy_from_nonoverlapping(program as *const u8, len),
            Direction::Write => (program as *mut u8).copy_from_nonoverlapping(local, len),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "a system call that Miri lacks")]
    fn bad_addresses_are_errors() {
        let mut bytes = [1u8, 2, 3, 4];
        let mut copy = [0u8; 4];
        // SAFETY: the kernel checks the addresses.
        unsafe {
            assert_eq!(read(bytes.as_ptr() as u64, &mut copy), Ok(()));
            assert_eq!(copy, bytes);
            assert_eq!(write(bytes.as_mut_ptr() as u64, &[9; 4]), Ok(()));
            assert_eq!(bytes, [9; 4]);
            assert_eq!(read(8, &mut copy), Err(Errno(libc::EFAULT)));
            assert_eq!(write(8, &copy), Err(Errno(libc::EFAULT)));
        }
    }
}
