//! Queue pairs: creation, state, posting, multicast membership.

use std::{ffi::c_int, ptr};

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// A new queue pair in state RESET; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(
    _pd: *mut ibv_pd,
    _qp_init_attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// The `ibv_wr_*` interface of a queue pair: NULL, since none is created with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(_qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    ptr::null_mut()
}

/// Changes the attributes that `attr_mask` selects. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(
    _qp: *mut ibv_qp,
    _attr: *mut ibv_qp_attr,
    _attr_mask: c_int,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The attributes of a queue pair. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    _qp: *mut ibv_qp,
    _attr: *mut ibv_qp_attr,
    _attr_mask: c_int,
    _init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Whether the data of operation `op` lands in memory in order: 0, not promised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// Destroys a queue pair. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(_qp: *mut ibv_qp) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Accepts a peer's enhanced-connection options. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The enhanced-connection options to offer a peer. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Joins a datagram queue pair to a multicast group. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_attach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Takes a datagram queue pair out of a multicast group. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_detach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Posts a list of send requests. Returns 0, or an error number with the first refused request in
/// `bad_wr`.
pub(crate) unsafe extern "C" fn post_send(
    _qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller passes a writable `bad_wr`.
    unsafe { bad_wr.write(wr) };
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Posts a list of receive requests. Returns 0, or an error number with the first refused request in
/// `bad_wr`.
pub(crate) unsafe extern "C" fn post_recv(
    _qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller passes a writable `bad_wr`.
    unsafe { bad_wr.write(wr) };
    errno::status(Err(Errno::UNSUPPORTED))
}
