//! `fork` in a program that has registered memory.
//!
//! An adapter pins physical pages, so after `fork` a parent's write moves the parent to a copy that the
//! adapter does not see. The soft device addresses memory through the owning process and pins nothing:
//! the parent's registrations stay right with nothing done. A child must open the device anew, as on
//! hardware.

use std::ffi::{c_int, c_void};

use crate::sys::*;

/// Succeeds: there is nothing to prepare.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`, whether or not `ibv_fork_init` was called.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// Succeeds: no range has to be kept from the child.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// Succeeds: no range was kept from the child.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}
