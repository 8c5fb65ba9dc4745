//! Event queues. Reliable datagrams have no events, so they are always empty.

use std::ffi::{c_char, c_int, c_void};

use super::{error, error_size, fid, give, ops, table};
use crate::sys;

#[repr(C)]
struct EventQueue {
    fid: sys::fid_eq,
}

static EQ: sys::fi_ops = ops::<EventQueue>();
static EQ_OPS: sys::fi_ops_eq = sys::fi_ops_eq {
    size: size_of::<sys::fi_ops_eq>(),
    read: Some(read),
    readerr: Some(read_error),
    write: Some(write),
    sread: Some(wait),
    strerror: Some(describe),
};

pub(super) unsafe extern "C" fn open(
    _: *mut sys::fid_fabric,
    _: *mut sys::fi_eq_attr,
    eq: *mut *mut sys::fid_eq,
    context: *mut c_void,
) -> c_int {
    if eq.is_null() {
        return error(sys::FI_EINVAL);
    }
    let fid = fid(sys::FI_CLASS_EQ, context, &EQ);
    // SAFETY: checked above.
    unsafe { give(EventQueue { fid: sys::fid_eq { fid, ops: table(&EQ_OPS) } }, eq) }
}

unsafe extern "C" fn read(_: *mut sys::fid_eq, _: *mut u32, _: *mut c_void, _: usize, _: u64) -> isize {
    error_size(sys::FI_EAGAIN)
}

unsafe extern "C" fn read_error(_: *mut sys::fid_eq, _: *mut sys::fi_eq_err_entry, _: u64) -> isize {
    error_size(sys::FI_EAGAIN)
}

unsafe extern "C" fn write(_: *mut sys::fid_eq, _: u32, _: *const c_void, _: usize, _: u64) -> isize {
    error_size(sys::FI_ENOSYS)
}

unsafe extern "C" fn wait(
    _: *mut sys::fid_eq,
    _: *mut u32,
    _: *mut c_void,
    _: usize,
    _: c_int,
    _: u64,
) -> isize {
    error_size(sys::FI_EAGAIN)
}

unsafe extern "C" fn describe(
    _: *mut sys::fid_eq,
    _: c_int,
    _: *const c_void,
    _: *mut c_char,
    _: usize,
) -> *const c_char {
    c"no event".as_ptr()
}
