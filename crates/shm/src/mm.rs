//! `mmap`, `munmap`, `mprotect` and `madvise` as direct system calls.
//!
//! Communication libraries patch these functions of the C library to follow the application's memory. They
//! must neither see our mappings nor be entered with our locks held. rustix cannot be used: it calls the C
//! library's functions if any crate of the program selects that backend.

use std::io;

/// Maps `len` bytes.
///
/// # Safety
/// With `MAP_FIXED`, the range at `address` is replaced: it must be the caller's.
pub(crate) unsafe fn mmap(
    address: usize,
    len: usize,
    protection: libc::c_int,
    flags: libc::c_int,
    fd: libc::c_int,
    offset: usize,
) -> io::Result<usize> {
    // SAFETY: without MAP_FIXED a new mapping touches no existing memory; otherwise the caller vouches.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, address, len, protection, flags, fd, offset) };
    if mapped == -1 { Err(io::Error::last_os_error()) } else { Ok(mapped as usize) }
}

/// Unmaps `len` bytes at `address`.
///
/// # Safety
/// The range is the caller's, and no pointers into it are used later.
pub(crate) unsafe fn munmap(address: usize, len: usize) {
    // SAFETY: the caller vouches for the range.
    unsafe { libc::syscall(libc::SYS_munmap, address, len) };
}

/// Calls `madvise` for `len` bytes.
///
/// # Safety
/// The advice keeps the contents, or the range is the caller's.
pub(crate) unsafe fn madvise(address: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the kernel checks the range; the caller vouches for the contents.
    let done = unsafe { libc::syscall(libc::SYS_madvise, address, len, advice) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the protection of `len` bytes at `address`.
///
/// # Safety
/// The range is the caller's, and nobody makes an access that the protection excludes.
pub(crate) unsafe fn mprotect(address: usize, len: usize, protection: libc::c_int) -> io::Result<()> {
    // SAFETY: the caller vouches for the range.
    let done = unsafe { libc::syscall(libc::SYS_mprotect, address, len, protection) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
