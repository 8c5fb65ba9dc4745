//! Protection domains.

use std::ffi::c_int;

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// A new protection domain; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(_context: *mut ibv_context) -> *mut ibv_pd {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Frees a protection domain. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(_pd: *mut ibv_pd) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The protection domain that another process made; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_pd(_context: *mut ibv_context, _pd_handle: u32) -> *mut ibv_pd {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Lets go of an imported protection domain; none has been imported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_pd(_pd: *mut ibv_pd) {}
