//! Memory windows. Programs reach them through the context's operations only.

use std::ffi::c_int;

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// A new memory window; NULL and errno on failure.
pub(crate) unsafe extern "C" fn alloc_mw(_pd: *mut ibv_pd, _kind: ibv_mw_type) -> *mut ibv_mw {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Posts the binding of a type-1 window. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn bind_mw(
    _qp: *mut ibv_qp,
    _mw: *mut ibv_mw,
    _mw_bind: *mut ibv_mw_bind,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Frees a memory window. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn dealloc_mw(_mw: *mut ibv_mw) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}
