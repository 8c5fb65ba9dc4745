//! Memory windows. Programs call their functions through the context's operations.

use std::{ffi::c_int, sync::Arc};

use millstream_device::{
    self as device, Mw,
    mr::window::{MwBind, MwType},
};
use millstream_lockfree::CancelGuard;

use crate::{
    errno::{self, Errno},
    pd::PdObject,
    qp::QpObject,
    sys::*,
};

/// A memory window: the program's struct and the device's object.
#[repr(C)]
pub(crate) struct MwObject {
    verbs: ibv_mw,
    inner: Arc<Mw>,
}

/// A new memory window; NULL and errno on failure.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let _uncancelled = CancelGuard::new();
    let made = MwType::from_raw(kind).ok_or(Errno::INVALID).and_then(|kind| {
        // SAFETY: the caller passes an allocated domain.
        Ok(Mw::new(&unsafe { PdObject::of(pd) }.inner, kind)?)
    });
    errno::pointer(made.map(|inner| {
        let key = inner.key();
        // SAFETY: as above.
        let context = unsafe { (*pd).context };
        let verbs = ibv_mw { context, pd, rkey: key, handle: key, type_: kind };
        Box::into_raw(Box::new(MwObject { verbs, inner })).cast()
    }))
}

/// The binding of a type-2 window that `info` describes; EINVAL for another type of window.
///
/// # Safety
/// `mw` is NULL or allocated, and `info.mr` is NULL or registered.
pub(crate) unsafe fn bind_type_2(
    mw: *mut ibv_mw,
    info: &ibv_mw_bind_info,
    key: u32,
) -> Result<MwBind, device::Errno> {
    // SAFETY: the caller vouches for both pointers.
    unsafe {
        match mw.cast::<MwObject>().as_ref() {
            Some(window) if window.inner.kind() == MwType::Type2 => Ok(bind(mw, info, key)),
            _ => Err(device::Errno::INVAL),
        }
    }
}

/// The binding that `info` describes, with the new key `key`.
///
/// # Safety
/// `mw` is allocated, and `info.mr` is NULL or registered.
unsafe fn bind(mw: *mut ibv_mw, info: &ibv_mw_bind_info, key: u32) -> MwBind {
    // SAFETY: the caller vouches for both pointers.
    unsafe {
        MwBind {
            mw: (*mw.cast::<MwObject>()).inner.clone(),
            key,
            // No region has key 0. An unbind needs no region.
            region: info.mr.as_ref().map_or(0, |mr| mr.lkey),
            addr: info.addr,
            len: info.length,
            access: info.mw_access_flags,
        }
    }
}

/// Posts the binding of a type-1 window, whose new key is in the window afterwards. Returns 0 or an error
/// number.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    mw_bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: the caller passes a live queue pair, an allocated window and a complete request.
    let (queue_pair, window, request) =
        unsafe { (&QpObject::of(qp).inner, &(*mw.cast::<MwObject>()).inner, &*mw_bind) };
    if window.kind() != MwType::Type1 {
        return errno::status(Err(Errno::INVALID));
    }
    // SAFETY: as above; a region that is named is registered.
    let bind = unsafe { bind(mw, &request.bind_info, window.next_key()) };
    let result = queue_pair.post_bind(request.wr_id, request.send_flags, &bind);
    if result.is_ok() {
        // SAFETY: as above.
        unsafe { (*mw).rkey = bind.key };
    }
    errno::status(result.map_err(Errno::from))
}

/// The binding of a type-2 window that a send request asks for.
///
/// # Safety
/// The request is a complete IBV_WR_BIND_MW, and its window and region are alive.
#[cold]
pub(crate) unsafe fn requested_bind(request: &ibv_send_wr) -> Result<MwBind, device::Errno> {
    // SAFETY: the caller vouches for a complete request.
    unsafe {
        let asked = request.__bindgen_anon_2.bind_mw;
        bind_type_2(asked.mw, &asked.bind_info, asked.rkey)
    }
}

/// Writes the key of an accepted binding into the program's window.
///
/// # Safety
/// As [`requested_bind`], whose result was posted.
#[cold]
pub(crate) unsafe fn show_bound_key(request: &ibv_send_wr) {
    // SAFETY: the caller vouches for a complete request with a window.
    unsafe {
        let asked = request.__bindgen_anon_2.bind_mw;
        (*asked.mw).rkey = asked.rkey;
    }
}

/// Frees a memory window, bound or not. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let _uncancelled = CancelGuard::new();
    let object = mw.cast::<MwObject>();
    // SAFETY: the caller passes an allocated window and uses it nowhere else now.
    let result = unsafe { (*object).inner.deallocate() };
    if result.is_ok() {
        // SAFETY: boxed by `alloc_mw`; the caller gives it up.
        drop(unsafe { Box::from_raw(object) });
    }
    errno::status(result.map_err(Errno::from))
}
