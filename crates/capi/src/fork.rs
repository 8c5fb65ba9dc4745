//! `fork` in a program that has registered memory.
//!
//! An adapter pins physical pages. After `fork` a parent's write moves the parent to a copy that the adapter
//! does not access. The soft device accesses memory through the owning process and pins no pages, so the
//! parent's registrations remain valid, and a child gets copies of registered pages. Copies of pages that the device has moved
//! take time and memory at the fork; `MILLSTREAM_DONTFORK=1` does without them. A child must open the device again, as on
//! hardware.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use millstream_shm::relocate;

use crate::sys::*;

/// Whether children get no moved pages.
static DONTFORK: AtomicBool = AtomicBool::new(false);

/// Keeps moved pages from forked children if the environment asks for it. For the first use of the library.
pub(crate) fn init_from_environment() {
    if std::env::var_os("MILLSTREAM_DONTFORK").is_none_or(|value| value == "0") {
        return;
    }
    match relocate::hide_from_children() {
        Ok(()) => DONTFORK.store(true, Ordering::Relaxed),
        Err(error) => {
            tracing::warn!("moved pages cannot be kept from forked children, which get copies: {error}");
        }
    }
}

/// Always succeeds, as with a kernel that copies pinned pages for a child (Linux 5.12): nothing has to be prepared.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`: a child gets copies; `IBV_FORK_ENABLED` if `MILLSTREAM_DONTFORK` keeps moved pages from it.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    if DONTFORK.load(Ordering::Relaxed) { IBV_FORK_ENABLED } else { IBV_FORK_UNNEEDED }
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
