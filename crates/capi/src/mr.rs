//! Memory regions and device memory.

use std::{
    ffi::{c_int, c_uint, c_void},
    os::fd::BorrowedFd,
    slice,
    sync::Arc,
};

use millstream_device::{
    Dm, Mr,
    mr::{MrAdvice, ReregError, ReregMr},
    types::Sge,
};
use millstream_lockfree::CancelGuard;

use crate::{
    context::Context,
    errno::{self, Errno},
    pd::PdObject,
    sys::*,
};

/// A memory region: the program's struct and the device's object.
#[repr(C)]
pub(crate) struct MrObject {
    verbs: ibv_mr,
    /// None for an imported region, which is changed and deregistered through the original object.
    inner: Option<Mr>,
}

/// Device memory: the program's struct and the device's object.
#[repr(C)]
struct DmObject {
    verbs: ibv_dm,
    inner: Arc<Dm>,
    /// Imported: the original object frees the memory.
    imported: bool,
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
        Box::into_raw(Box::new(MrObject { verbs, inner: Some(inner) })).cast()
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
    let _uncancelled = CancelGuard::new();
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
    let _uncancelled = CancelGuard::new();
    if fd < 0 {
        return errno::pointer(Err(Errno::new(libc::EBADF)));
    }
    // SAFETY: the caller passes an allocated domain, and a descriptor that is open during the call.
    let (domain, fd) = unsafe { (&PdObject::of(pd).inner, BorrowedFd::borrow_raw(fd)) };
    let made = Mr::register_dmabuf(domain, fd, offset, length as u64, iova, access.cast_unsigned());
    // As in rdma-core: there is no address of this process, only an offset.
    publish(pd, std::ptr::without_provenance_mut(offset as usize), length, made)
}

/// Changes a memory region in place; its keys do not change. Returns 0 or an `IBV_REREG_MR_ERR_*`, with
/// errno. After `IBV_REREG_MR_ERR_INPUT` the region is unchanged; after `IBV_REREG_MR_ERR_CMD` it can only be
/// deregistered.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    let flags = flags.cast_unsigned();
    let has = |flag| flags & flag != 0;
    let moves = has(IBV_REREG_MR_CHANGE_TRANSLATION);
    let changes_pd = has(IBV_REREG_MR_CHANGE_PD);
    if flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0
        || (moves && (addr.is_null() || length == 0))
        || (changes_pd && pd.is_null())
        || (access != 0 && !has(IBV_REREG_MR_CHANGE_ACCESS))
    {
        Errno::INVALID.set();
        return IBV_REREG_MR_ERR_INPUT;
    }
    let change = ReregMr {
        memory: moves.then(|| (addr.addr() as u64, length as u64)),
        // SAFETY: the caller passes an allocated domain with this flag.
        pd: changes_pd.then(|| unsafe { PdObject::of(pd) }.inner.clone()),
        access: has(IBV_REREG_MR_CHANGE_ACCESS).then_some(access.cast_unsigned()),
    };
    // SAFETY: the caller passes a registered region and uses it nowhere else now.
    let object = unsafe { &mut *mr.cast::<MrObject>() };
    let Some(inner) = &mut object.inner else {
        Errno::INVALID.set();
        return IBV_REREG_MR_ERR_INPUT;
    };
    match inner.rereg(&change) {
        Ok(()) => {
            if moves {
                (object.verbs.addr, object.verbs.length) = (addr, length);
            }
            if changes_pd {
                object.verbs.pd = pd;
            }
            0
        }
        Err(ReregError::Unchanged(error)) => {
            Errno::from(error).set();
            IBV_REREG_MR_ERR_INPUT
        }
        Err(ReregError::Invalid(error)) => {
            Errno::from(error).set();
            IBV_REREG_MR_ERR_CMD
        }
    }
}

/// A null region: reads as zero, discards writes. Only its local key is valid. NULL
/// and errno on failure.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an allocated domain.
    let mr = publish(pd, std::ptr::null_mut(), usize::MAX, Mr::null(&unsafe { PdObject::of(pd) }.inner));
    if !mr.is_null() {
        // SAFETY: just made.
        unsafe { (*mr).rkey = 0 };
    }
    mr
}

/// Prefetches pages of on-demand regions. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    sg_list: *mut ibv_sge,
    num_sges: u32,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    let advice = match advice {
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH => MrAdvice::Prefetch,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => MrAdvice::PrefetchWrite,
        IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => MrAdvice::PrefetchNoFault,
        _ => return errno::status(Err(Errno::UNSUPPORTED)),
    };
    if flags & !IB_UVERBS_ADVISE_MR_FLAG_FLUSH != 0 || num_sges == 0 || sg_list.is_null() {
        return errno::status(Err(Errno::INVALID));
    }
    // SAFETY: the caller passes an allocated domain and an array of `num_sges` elements.
    let (domain, ranges) =
        unsafe { (&PdObject::of(pd).inner, slice::from_raw_parts(sg_list.cast::<Sge>(), num_sges as usize)) };
    let wait = flags & IB_UVERBS_ADVISE_MR_FLAG_FLUSH != 0;
    errno::status(Mr::advise(domain, advice, wait, ranges).map_err(Errno::from))
}

/// New device memory; NULL and errno on failure.
pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an open context and a readable struct.
    let (device, attr) = unsafe { (Context::device(context), &*attr) };
    if attr.comp_mask != 0 {
        return errno::pointer(Err(Errno::INVALID));
    }
    let made = Dm::new(device, attr.length as u64, attr.log_align_req);
    errno::pointer(made.map_err(Errno::from).map(|inner| name_dm(context, inner, false)))
}

fn name_dm(context: *mut ibv_context, inner: Arc<Dm>, imported: bool) -> *mut ibv_dm {
    let verbs = ibv_dm {
        context,
        memcpy_to_dm: Some(memcpy_to_dm),
        memcpy_from_dm: Some(memcpy_from_dm),
        handle: inner.id(),
        ..ibv_dm::default()
    };
    Box::into_raw(Box::new(DmObject { verbs, inner, imported })).cast()
}

/// Frees device memory. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    let _uncancelled = CancelGuard::new();
    let object = dm.cast::<DmObject>();
    // SAFETY: the caller passes allocated device memory and uses it nowhere else now.
    let result = unsafe {
        if (*object).imported {
            return errno::status(Err(Errno::INVALID));
        }
        (*object).inner.free()
    };
    if result.is_ok() {
        // SAFETY: boxed by `alloc_dm`; the caller gives it up.
        drop(unsafe { Box::from_raw(object) });
    }
    errno::status(result.map_err(Errno::from))
}

/// Copies into device memory. Returns 0 or an error number.
unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> c_int {
    // SAFETY: the caller passes allocated device memory and `length` readable bytes.
    let result = unsafe { (*dm.cast::<DmObject>()).inner.store(offset, from.cast(), length) };
    errno::status(result.map_err(Errno::from))
}

/// Copies out of device memory. Returns 0 or an error number.
unsafe extern "C" fn memcpy_from_dm(to: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    // SAFETY: the caller passes allocated device memory and `length` writable bytes.
    let result = unsafe { (*dm.cast::<DmObject>()).inner.load(offset, to.cast(), length) };
    errno::status(result.map_err(Errno::from))
}

/// Registers a part of device memory, addressed from zero on; NULL and errno on failure.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an allocated domain and allocated device memory.
    let (domain, dm) = unsafe { (&PdObject::of(pd).inner, &(*dm.cast::<DmObject>()).inner) };
    let made = Mr::register_dm(domain, dm, offset, length as u64, access);
    publish(pd, std::ptr::null_mut(), length, made)
}

/// Deregisters a memory region. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let _uncancelled = CancelGuard::new();
    let object = mr.cast::<MrObject>();
    // SAFETY: the caller passes a registered region and uses it nowhere else now.
    let Some(inner) = (unsafe { &mut (*object).inner }) else { return errno::status(Err(Errno::INVALID)) };
    let result = inner.deregister();
    if result.is_ok() {
        // SAFETY: boxed by `publish`; the caller gives it up.
        drop(unsafe { Box::from_raw(object) });
    }
    errno::status(result.map_err(Errno::from))
}

/// Imports a memory region of the domain, without its address; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_mr(pd: *mut ibv_pd, mr_handle: u32) -> *mut ibv_mr {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an allocated domain.
    let (found, context) = unsafe { (Mr::find(&PdObject::of(pd).inner, mr_handle), (*pd).context) };
    errno::pointer(found.ok_or(Errno::new(libc::ENOENT)).map(|len| {
        let verbs = ibv_mr {
            context,
            pd,
            addr: std::ptr::null_mut(),
            length: len as usize,
            handle: mr_handle,
            lkey: mr_handle,
            rkey: mr_handle,
        };
        Box::into_raw(Box::new(MrObject { verbs, inner: None })).cast()
    }))
}

/// Releases an imported memory region without deregistering it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_mr(mr: *mut ibv_mr) {
    let _uncancelled = CancelGuard::new();
    // SAFETY: boxed by `ibv_import_mr`; the caller gives it up.
    drop(unsafe { Box::from_raw(mr.cast::<MrObject>()) });
}

/// Imports device memory of the context's device; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_dm(context: *mut ibv_context, dm_handle: u32) -> *mut ibv_dm {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an open context.
    let found = Dm::find(unsafe { Context::device(context) }, dm_handle);
    errno::pointer(found.ok_or(Errno::new(libc::ENOENT)).map(|inner| name_dm(context, inner, true)))
}

/// Releases imported device memory without freeing it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_dm(dm: *mut ibv_dm) {
    let _uncancelled = CancelGuard::new();
    // SAFETY: boxed by `ibv_import_dm`; the caller gives it up.
    drop(unsafe { Box::from_raw(dm.cast::<DmObject>()) });
}
