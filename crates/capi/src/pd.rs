//! Protection domains, thread domains and parent domains.

use std::{ffi::c_int, sync::Arc};

use millstream_device::{Pd, Td};
use millstream_lockfree::CancelGuard;

use crate::{
    context::Context,
    errno::{self, Errno},
    sys::*,
};

/// A protection domain: the program's struct and the device's object.
#[repr(C)]
pub(crate) struct PdObject {
    verbs: ibv_pd,
    pub(crate) inner: Arc<Pd>,
    /// Imported: the original object deallocates the domain.
    imported: bool,
}

impl PdObject {
    /// # Safety
    /// `pd` comes from [`ibv_alloc_pd`] and is allocated.
    pub(crate) unsafe fn of<'a>(pd: *mut ibv_pd) -> &'a Self {
        // SAFETY: `verbs` is the first field; the caller vouches for the pointer.
        unsafe { &*pd.cast() }
    }
}

/// A new protection domain; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an open context.
    let inner = Pd::new(unsafe { Context::device(context) });
    let verbs = ibv_pd { context, handle: inner.id() };
    Box::into_raw(Box::new(PdObject { verbs, inner, imported: false })).cast()
}

/// Frees a protection domain. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an allocated domain.
    let object = unsafe { PdObject::of(pd) };
    if object.imported {
        return errno::status(Err(Errno::INVALID));
    }
    let result = object.inner.deallocate();
    if result.is_ok() {
        // SAFETY: boxed when it was allocated; the caller gives it up.
        drop(unsafe { Box::from_raw(pd.cast::<PdObject>()) });
    }
    errno::status(result.map_err(Errno::from))
}

/// A thread domain: the program's struct and the device's object.
#[repr(C)]
struct TdObject {
    verbs: ibv_td,
    inner: Arc<Td>,
}

/// A new thread domain; NULL and errno on failure.
pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    init: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a readable struct.
    if unsafe { (*init).comp_mask } != 0 {
        return errno::pointer(Err(Errno::INVALID));
    }
    Box::into_raw(Box::new(TdObject { verbs: ibv_td { context }, inner: Td::new() })).cast()
}

/// Frees a thread domain. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    let _uncancelled = CancelGuard::new();
    let object = td.cast::<TdObject>();
    // SAFETY: the caller passes an allocated domain.
    if unsafe { (*object).inner.in_use() } {
        return errno::status(Err(Errno::BUSY));
    }
    // SAFETY: boxed by `alloc_td`; the caller gives it up.
    drop(unsafe { Box::from_raw(object) });
    0
}

/// A parent domain: a protection domain, optionally with a thread domain; NULL and errno on
/// failure. Allocators are accepted and not called: the queues lie in memory that is shared with peers, which
/// programs do not have.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    let _uncancelled = CancelGuard::new();
    const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    // SAFETY: the caller passes a readable struct with live objects.
    errno::pointer(unsafe {
        let attr = &*attr;
        let half = attr.comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS != 0
            && (attr.alloc.is_none() || attr.free.is_none());
        let td = attr.td.cast::<TdObject>().as_ref();
        if attr.comp_mask & !KNOWN != 0
            || half
            || attr.pd.is_null()
            || (*attr.pd).context != context
            || td.is_some_and(|td| td.verbs.context != context)
        {
            Err(Errno::INVALID)
        } else {
            let inner = Pd::parent(&PdObject::of(attr.pd).inner, td.map(|td| &td.inner));
            let verbs = ibv_pd { context, handle: inner.id() };
            Ok(Box::into_raw(Box::new(PdObject { verbs, inner, imported: false })).cast())
        }
    })
}

/// Imports a protection domain of the context's device; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_pd(context: *mut ibv_context, pd_handle: u32) -> *mut ibv_pd {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an open context.
    let found = Pd::find(unsafe { Context::device(context) }, pd_handle);
    errno::pointer(found.ok_or(Errno::new(libc::ENOENT)).map(|inner| {
        let verbs = ibv_pd { context, handle: pd_handle };
        Box::into_raw(Box::new(PdObject { verbs, inner, imported: true })).cast()
    }))
}

/// Releases an imported protection domain without deallocating it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_pd(pd: *mut ibv_pd) {
    let _uncancelled = CancelGuard::new();
    // SAFETY: boxed by `ibv_import_pd`; the caller gives it up.
    drop(unsafe { Box::from_raw(pd.cast::<PdObject>()) });
}
