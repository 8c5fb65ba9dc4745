//! Address handles and the resolution of addresses.

use std::ffi::c_int;

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// A new address handle; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(_pd: *mut ibv_pd, _attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// The address of the sender of a received datagram; `grh` counts only if `wc` says that it is there.
/// Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    _context: *mut ibv_context,
    _port_num: u8,
    _wc: *mut ibv_wc,
    _grh: *mut ibv_grh,
    _ah_attr: *mut ibv_ah_attr,
) -> c_int {
    errno::index(Err(Errno::UNSUPPORTED))
}

/// A new address handle for the sender of a received datagram; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port_num: u8,
) -> *mut ibv_ah {
    let mut attr = ibv_ah_attr::default();
    // SAFETY: the caller passes a protection domain of this library, and what the callee requires.
    let answer = unsafe { ibv_init_ah_from_wc((*pd).context, port_num, wc, grh, &mut attr) };
    if answer != 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's domain and a complete attribute.
    unsafe { ibv_create_ah(pd, &mut attr) }
}

/// Destroys an address handle. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(_ah: *mut ibv_ah) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The Ethernet address and VLAN by which `attr` is reached. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    _context: *mut ibv_context,
    _attr: *mut ibv_ah_attr,
    _eth_mac: *mut [u8; ETHERNET_LL_SIZE as usize],
    _vid: *mut u16,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}
