//! Socket options for which rustix has no functions: packet information, multicast from joined groups only, UDP
//! offload, BPF programs and drop counters. All others are set with [`rustix::net::sockopt`].

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::c_int;

/// Sets an option. `T` is the type that the kernel documents for it.
pub(crate) fn set<T>(socket: BorrowedFd<'_>, level: c_int, option: c_int, value: &T) -> io::Result<()> {
    // SAFETY: the value is readable for its size.
    let failed = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as u32,
        )
    };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads an option that is an array of integers. Elements that the kernel does not write stay zero.
pub(crate) fn get<const N: usize>(
    socket: BorrowedFd<'_>,
    level: c_int,
    option: c_int,
) -> io::Result<[u32; N]> {
    let mut value = [0; N];
    let mut len = size_of_val(&value) as u32;
    // SAFETY: the value is writable for its size, and any bytes are integers.
    let failed =
        unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len) };
    if failed == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}
