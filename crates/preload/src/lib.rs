//! `libmillstream_preload.so`: what programs look at outside verbs, for the soft device.
//!
//! Programs find an adapter's facts under `/sys/class/infiniband`, and the system's `librdmacm.so.1` opens
//! `/dev/infiniband/rdma_cm`. This library, named in `LD_PRELOAD`, stands before the C library's functions that take
//! paths, and answers for those paths only ([`place`]):
//!
//! - sysfs paths lead to a folder of real files ([`view`]), so that everything that can be done with files and
//!   directories can be done with them;
//! - `/dev/infiniband/rdma_cm` opens a channel of the connection manager (`millstream-cm`), and a `write` to a
//!   channel is a command;
//! - `/dev/infiniband/uverbs0` can be looked at, as a character device.
//!
//! Every other call goes on to the next definition of the function, found once ([`next`]), with its arguments as
//! they are. Nothing is allocated and no thread is started before one of these paths is used.
//!
//! A program may cancel a thread inside these functions, which unwinds their frames: they are all "C-unwind", and
//! own nothing while they wait.

#![allow(
    clippy::missing_safety_doc,
    reason = "the contract of every exported function is that of the C library's function of the same name"
)]

mod data;
pub mod files;
mod next;
mod place;
pub mod stat;
mod view;

use std::ffi::c_int;

/// What a success leaves as it was: programs report the first error that they saw after cleaning up.
fn errno() -> c_int {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() }
}

fn set_errno(errno: c_int) {
    // SAFETY: the thread's own errno.
    unsafe { *libc::__errno_location() = errno };
}

/// -1 with errno.
fn failed(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}
