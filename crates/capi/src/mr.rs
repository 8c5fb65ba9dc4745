//! Memory regions and device memory.

use std::ffi::{c_int, c_uint, c_void};

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// Registers `length` bytes at `addr`, addressed by their own addresses; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the contract of both functions is the same.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, addr.addr() as u64, access.cast_unsigned()) }
}

/// Registers `length` bytes at `addr`, addressed from `iova` on; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the contract of both functions is the same.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access.cast_unsigned()) }
}

/// Registers `length` bytes at `addr`, addressed from `iova` on; flags in `IBV_ACCESS_OPTIONAL_RANGE` that
/// the device does not know are ignored. NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    _pd: *mut ibv_pd,
    _addr: *mut c_void,
    _length: usize,
    _iova: u64,
    _access: c_uint,
) -> *mut ibv_mr {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Registers `length` bytes from `offset` of the memory behind `fd`, addressed from `iova` on; NULL and
/// errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    _pd: *mut ibv_pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut ibv_mr {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Changes a memory region in place. Returns 0 or an `IBV_REREG_MR_ERR_*`, with errno;
/// `IBV_REREG_MR_ERR_INPUT` says that the region is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_rereg_mr(
    _mr: *mut ibv_mr,
    _flags: c_int,
    _pd: *mut ibv_pd,
    _addr: *mut c_void,
    _length: usize,
    _access: c_int,
) -> c_int {
    Errno::UNSUPPORTED.set();
    IBV_REREG_MR_ERR_INPUT
}

/// Deregisters a memory region. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(_mr: *mut ibv_mr) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The memory region that another process made; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_mr(_pd: *mut ibv_pd, _mr_handle: u32) -> *mut ibv_mr {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Lets go of an imported memory region; none has been imported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_mr(_mr: *mut ibv_mr) {}

/// The device memory that another process made; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_dm(_context: *mut ibv_context, _dm_handle: u32) -> *mut ibv_dm {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Lets go of imported device memory; none has been imported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_dm(_dm: *mut ibv_dm) {}
