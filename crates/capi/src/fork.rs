//! `fork` in a program that has registered memory.
//!
//! An adapter pins physical pages. After `fork` a parent's write moves the parent to a copy that the adapter
//! does not access. The soft device accesses memory through the owning process and pins no pages, so the
//! parent's registrations remain valid. A child must open the device again, as on hardware.

use std::ffi::{c_int, c_void};

use crate::sys::*;

/// Always succeeds: no preparation is needed.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`, whether or not `ibv_fork_init` was called.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// Always succeeds: no range has to be excluded from the child.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// Always succeeds: no range was excluded from the child.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
