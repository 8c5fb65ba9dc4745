//! `libmillstream_preload.so`: the device's sysfs files and character devices for unmodified programs.
//!
//! Programs read `/sys/class/infiniband`, and the system's `librdmacm.so.1` opens `/dev/infiniband/rdma_cm`.
//! This library, loaded by `LD_PRELOAD`, intercepts the C library's functions on these paths only (`path`):
//!
//! - sysfs paths are redirected to a directory of real files (`sysfs_dir`), so that all file functions work
//!   on them;
//! - `/dev/infiniband/rdma_cm` opens an event channel of the connection manager ([`engine`](crate::engine)),
//!   and a `write` to a channel is a command;
//! - `/dev/infiniband/uverbs0` is shown as a character device, which cannot be opened.
//!
//! All other calls are passed on unchanged to the next definition of the function (`forward`). Nothing is
//! allocated and no thread starts before one of these paths is used. Later uses of sysfs paths allocate nothing either.
//!
//! A program may cancel a thread inside these functions, which unwinds their frames. So all of them are
//! "C-unwind", and own no resource while they block.

#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of every exported function is that of the C library's function of the same name"
)]

mod c_string;
mod forward;
mod open;
mod path;
pub mod path_calls;
pub mod stat;
mod sysfs_dir;
mod sysfs_files;

use std::ffi::c_int;

/// Reads errno, which successful calls must preserve.
fn errno() -> c_int {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() }
}

fn set_errno(errno: c_int) {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() = errno };
}

/// Returns -1 with errno.
fn fail_with(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}
