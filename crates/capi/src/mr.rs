//! Memory regions and device memory.

use std::{
    ffi::{c_int, c_uint, c_void},
    os::fd::BorrowedFd,
};

use millstream_device::Mr;

use crate::{
    errno::{self, Errno},
    pd::PdObject,
    sys::*,
};

/// A memory region as programs see it, and ours behind it.
#[repr(C)]
struct MrObject {
    verbs: ibv_mr,
    inner: Mr,
}

fn publish(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    made: millstream_device::Result<Mr>,
) -> *mut ibv_mr {
    errno::pointer(made.map_err(Errno::from).map(|inner| {
        let key = inner.key();
        // SAFETY: the caller of the verb passes an allocated domain.
        let context = unsafe { (*pd).context };
        let verbs = ibv_mr { context, pd, addr, length, handle: key, lkey: key, rkey: key };
        Box::into_raw(Box::new(MrObject { verbs, inner })).cast()
    }))
}

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
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the caller passes an allocated domain.
    let domain = &unsafe { PdObject::of(pd) }.inner;
    publish(pd, addr, length, Mr::register(domain, addr.addr() as u64, length as u64, iova, access))
}

/// Registers `length` bytes from `offset` of the memory behind `fd`, addressed from `iova` on; NULL and
/// errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    if fd < 0 {
        return errno::pointer(Err(Errno::new(libc::EBADF)));
    }
    // SAFETY: the caller passes an allocated domain, and a descriptor that is open during the call.
    let (domain, fd) = unsafe { (&PdObject::of(pd).inner, BorrowedFd::borrow_raw(fd)) };
    let made = Mr::register_dmabuf(domain, fd, offset, length as u64, iova, access.cast_unsigned());
    publish(pd, std::ptr::null_mut(), length, made)
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
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let object = mr.cast::<MrObject>();
    // SAFETY: the caller passes a registered region and uses it nowhere else now.
    let result = unsafe { (*object).inner.deregister() };
    if result.is_ok() {
        // SAFETY: boxed by `publish`; the caller gives it up.
        drop(unsafe { Box::from_raw(object) });
    }
    errno::status(result.map_err(Errno::from))
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
