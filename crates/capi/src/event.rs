//! Asynchronous events of an opened device.

use std::ffi::c_int;

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// Takes the next asynchronous event, waiting for one unless the context's `async_fd` is non-blocking.
/// Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    _context: *mut ibv_context,
    _event: *mut ibv_async_event,
) -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}

/// Acknowledges an asynchronous event; none has been handed out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {}
