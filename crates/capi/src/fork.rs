//! `fork` in a program that has registered memory.
//!
//! An adapter pins physical pages. After `fork` a parent's write moves the parent to a copy that the adapter
//! does not access. The soft device accesses memory through the owning process and pins no pages, so the
//! parent's registrations remain valid, and a child gets copies of registered pages. Copies of pages that the device has moved
//! take time and memory at the fork. A program that calls `ibv_fork_init` does without them. A child must open the device again,
//! as on hardware.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use millstream_shm::relocate;

use crate::sys::*;

static ENABLED: AtomicBool = AtomicBool::new(false);

/// From now on, a child gets none of the registered pages that the device has moved. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    match relocate::hide_from_children() {
        Ok(()) => {
            ENABLED.store(true, Ordering::Relaxed);
            0
        }
        Err(error) => error.raw_os_error().unwrap_or(libc::EIO),
    }
}

/// Calls [`ibv_fork_init`] if the environment asks for it. For the first use of the library.
pub(crate) fn init_from_environment() {
    let is_set = ["RDMAV_FORK_SAFE", "IBV_FORK_SAFE"].iter().any(|name| std::env::var_os(name).is_some());
    if is_set && ibv_fork_init() != 0 {
        tracing::warn!("registered pages cannot be kept from forked children, which get copies");
    }
}

/// `IBV_FORK_ENABLED` after [`ibv_fork_init`], and `IBV_FORK_UNNEEDED` without it.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    if ENABLED.load(Ordering::Relaxed) { IBV_FORK_ENABLED } else { IBV_FORK_UNNEEDED }
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
