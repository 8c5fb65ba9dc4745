//! Shared receive queues.

use std::ffi::c_int;

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// A new shared receive queue; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(
    _pd: *mut ibv_pd,
    _srq_init_attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Changes the attributes that `srq_attr_mask` selects. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(
    _srq: *mut ibv_srq,
    _srq_attr: *mut ibv_srq_attr,
    _srq_attr_mask: c_int,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The attributes of a shared receive queue. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(_srq: *mut ibv_srq, _srq_attr: *mut ibv_srq_attr) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Destroys a shared receive queue. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(_srq: *mut ibv_srq) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Posts a list of receive requests. Returns 0, or an error number with the first refused request in
/// `bad_wr`.
pub(crate) unsafe extern "C" fn post_srq_recv(
    _srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller passes a writable `bad_wr`.
    unsafe { bad_wr.write(wr) };
    errno::status(Err(Errno::UNSUPPORTED))
}
