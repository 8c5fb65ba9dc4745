//! Protection domains.

use std::{ffi::c_int, sync::Arc};

use millstream_device::Pd;

use crate::{
    context::Context,
    errno::{self, Errno},
    sys::*,
};

/// A protection domain as programs see it, and ours behind it.
#[repr(C)]
pub(crate) struct PdObject {
    verbs: ibv_pd,
    pub(crate) inner: Arc<Pd>,
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
    // SAFETY: the caller passes an open context.
    let inner = Pd::new(unsafe { Context::device(context) });
    let verbs = ibv_pd { context, handle: inner.id() };
    Box::into_raw(Box::new(PdObject { verbs, inner })).cast()
}

/// Frees a protection domain. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the caller passes an allocated domain.
    if unsafe { PdObject::of(pd) }.inner.in_use() {
        return errno::status(Err(Errno::BUSY));
    }
    // SAFETY: boxed by `ibv_alloc_pd`; the caller gives it up.
    drop(unsafe { Box::from_raw(pd.cast::<PdObject>()) });
    0
}

/// The protection domain that another process made; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_pd(_context: *mut ibv_context, _pd_handle: u32) -> *mut ibv_pd {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Lets go of an imported protection domain; none has been imported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_unimport_pd(_pd: *mut ibv_pd) {}
