//! Completion queues and completion channels.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// A new completion channel; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(_context: *mut ibv_context) -> *mut ibv_comp_channel {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Destroys a completion channel. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(_channel: *mut ibv_comp_channel) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// A new completion queue for at least `cqe` completions; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    _context: *mut ibv_context,
    _cqe: c_int,
    _cq_context: *mut c_void,
    _channel: *mut ibv_comp_channel,
    _comp_vector: c_int,
) -> *mut ibv_cq {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Changes the capacity of a completion queue. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(_cq: *mut ibv_cq, _cqe: c_int) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Destroys a completion queue. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(_cq: *mut ibv_cq) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Takes the next completion event, waiting for one unless the channel's descriptor is non-blocking.
/// Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    _channel: *mut ibv_comp_channel,
    _cq: *mut *mut ibv_cq,
    _cq_context: *mut *mut c_void,
) -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}

/// Acknowledges completion events; none has been handed out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(_cq: *mut ibv_cq, _nevents: c_uint) {}

/// Takes at most `num_entries` completions. Returns their number, negative on failure.
pub(crate) unsafe extern "C" fn poll_cq(_cq: *mut ibv_cq, _num_entries: c_int, _wc: *mut ibv_wc) -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}

/// Asks for one event at the next completion. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn req_notify_cq(_cq: *mut ibv_cq, _solicited_only: c_int) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}
