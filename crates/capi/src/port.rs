//! Ports: their attributes, GID table and P_Key table.

use std::{ffi::c_int, mem};

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// The part of `ibv_port_attr` that programs from before `port_cap_flags2` have room for.
const COMPAT_PORT_ATTR: usize = mem::offset_of!(ibv_port_attr, port_cap_flags2);

/// The attributes of a port; writes only the first `port_attr_len` bytes of `port_attr`, the size of the
/// struct that the caller was compiled with. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn query_port(
    _context: *mut ibv_context,
    _port_num: u8,
    _port_attr: *mut ibv_port_attr,
    _port_attr_len: usize,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The attributes of a port for callers compiled without the `ibv_query_port` macro: the struct is
/// shorter. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut _compat_ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's struct has the stated length, the contract of both functions is the same.
    unsafe { query_port(context, port_num, port_attr.cast(), COMPAT_PORT_ATTR) }
}

/// An entry of the GID table. Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    _context: *mut ibv_context,
    _port_num: u8,
    _index: c_int,
    _gid: *mut ibv_gid,
) -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}

/// An entry of the GID table with its type and interface; `entry_size` is the size of the struct that the
/// caller was compiled with. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    _context: *mut ibv_context,
    _port_num: u32,
    _gid_index: u32,
    _entry: *mut ibv_gid_entry,
    _flags: u32,
    _entry_size: usize,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The valid entries of the GID tables of all ports. Returns their number or a negative error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    _context: *mut ibv_context,
    _entries: *mut ibv_gid_entry,
    _max_entries: usize,
    _flags: u32,
    _entry_size: usize,
) -> isize {
    errno::count(Err(Errno::UNSUPPORTED))
}

/// An entry of the P_Key table, in network byte order. Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    _context: *mut ibv_context,
    _port_num: u8,
    _index: c_int,
    _pkey: *mut __be16,
) -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}

/// The index of a P_Key, given in network byte order. Returns it, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(
    _context: *mut ibv_context,
    _port_num: u8,
    _pkey: __be16,
) -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}
