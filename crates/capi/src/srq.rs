//! Shared receive queues.

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use millstream_device::Srq;
use millstream_lockfree::CancelGuard;

use crate::{
    cq::CqObject,
    errno::{self, Errno},
    pd::PdObject,
    qp::elements,
    sys::*,
    xrc::XrcdObject,
};

/// A shared receive queue: the program's struct and the device's object.
#[repr(C)]
pub(crate) struct SrqObject {
    verbs: ibv_srq,
    pub(crate) inner: Arc<Srq>,
}

impl SrqObject {
    /// # Safety
    /// `srq` comes from [`ibv_create_srq`] and is alive.
    #[inline]
    pub(crate) unsafe fn of<'a>(srq: *mut ibv_srq) -> &'a Self {
        // SAFETY: `verbs` is the first field; the caller vouches for the pointer.
        unsafe { &*srq.cast() }
    }
}

/// A new shared receive queue; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    srq_init_attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an allocated domain and a filled, writable struct.
    let (domain, init) = unsafe { (&PdObject::of(pd).inner, &mut *srq_init_attr) };
    errno::pointer(
        Srq::new(domain, init.attr.max_wr, init.attr.max_sge)
            .map_err(Errno::from)
            .map(|inner| publish(pd, init.srq_context, &mut init.attr, inner)),
    )
}

/// Makes the program's object of a shared receive queue.
fn publish(
    pd: *mut ibv_pd,
    srq_context: *mut c_void,
    attr: &mut ibv_srq_attr,
    inner: Arc<Srq>,
) -> *mut ibv_srq {
    attr.max_wr = inner.max_wr();
    attr.max_sge = inner.max_sge();
    // SAFETY: the caller's allocated domain.
    let context = unsafe { (*pd).context };
    let verbs = ibv_srq { context, srq_context, pd, handle: inner.number(), ..ibv_srq::default() };
    let object = Box::leak(Box::new(SrqObject { verbs, inner }));
    let address = std::ptr::from_mut(object).addr() as u64;
    object.inner.handle().set_pointer(address);
    std::ptr::from_mut(object).cast()
}

/// A new shared receive queue of a type that the program names; NULL and errno on failure.
pub(crate) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a writable struct, filled as far as its mask says, with live objects.
    errno::pointer(unsafe { create_extended(&mut *init) })
}

/// # Safety
/// `init` is filled as far as its mask says, with live objects.
unsafe fn create_extended(init: &mut ibv_srq_init_attr_ex) -> Result<*mut ibv_srq, Errno> {
    let names = |bits| init.comp_mask & bits == bits;
    if init.comp_mask & !(IBV_SRQ_INIT_ATTR_RESERVED - 1) != 0
        || !names(IBV_SRQ_INIT_ATTR_PD)
        || init.pd.is_null()
    {
        return Err(Errno::INVALID);
    }
    let kind = if names(IBV_SRQ_INIT_ATTR_TYPE) { init.srq_type } else { IBV_SRQT_BASIC };
    let (max_wr, max_sge) = (init.attr.max_wr, init.attr.max_sge);
    // SAFETY: the caller vouches for the objects that the mask names.
    let inner = unsafe {
        let pd = &PdObject::of(init.pd).inner;
        match kind {
            IBV_SRQT_BASIC => Srq::new(pd, max_wr, max_sge)?,
            IBV_SRQT_XRC => {
                let complete = names(IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ);
                if !complete || init.xrcd.is_null() || init.cq.is_null() {
                    return Err(Errno::INVALID);
                }
                let domain = &XrcdObject::of(init.xrcd).inner;
                Srq::for_domain(pd, domain, &CqObject::of(init.cq).inner, max_wr, max_sge)?
            }
            // Tag matching.
            _ => return Err(Errno::UNSUPPORTED),
        }
    };
    Ok(publish(init.pd, init.srq_context, &mut init.attr, inner))
}

/// The number by which senders of an XRC domain name a queue. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the caller passes a live queue and a writable number.
    unsafe { number.write(SrqObject::of(srq).inner.number()) };
    0
}

/// Changes the attributes that `srq_attr_mask` selects. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    srq_attr: *mut ibv_srq_attr,
    srq_attr_mask: c_int,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    let mask = srq_attr_mask.cast_unsigned();
    if mask & IBV_SRQ_MAX_WR != 0 {
        // As devices without IBV_DEVICE_SRQ_RESIZE answer.
        return errno::status(Err(Errno::UNSUPPORTED));
    }
    if mask & IBV_SRQ_LIMIT == 0 {
        return 0;
    }
    // SAFETY: the caller passes a live queue and a readable struct.
    let result = unsafe { SrqObject::of(srq).inner.set_limit((*srq_attr).srq_limit) };
    errno::status(result.map_err(Errno::from))
}

/// The attributes of a shared receive queue. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, srq_attr: *mut ibv_srq_attr) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue and a writable struct.
    unsafe {
        let inner = &SrqObject::of(srq).inner;
        srq_attr.write(ibv_srq_attr {
            max_wr: inner.max_wr(),
            max_sge: inner.max_sge(),
            srq_limit: inner.limit(),
        });
    }
    0
}

/// Destroys a shared receive queue. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue.
    let result = unsafe { SrqObject::of(srq) }.inner.destroy();
    if result.is_ok() {
        // SAFETY: boxed by `ibv_create_srq`; the caller gives it up.
        drop(unsafe { Box::from_raw(srq.cast::<SrqObject>()) });
    }
    errno::status(result.map_err(Errno::from))
}

/// Posts a list of receive requests. Returns 0, or an error number with the first refused request in
/// `bad_wr`.
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller passes a live queue, a list of complete requests and a writable `bad_wr`.
    unsafe {
        let queue = &SrqObject::of(srq).inner;
        while let Some(request) = wr.as_ref() {
            let sges = elements(request.sg_list, request.num_sge);
            if let Err(error) = queue.post(request.wr_id, sges) {
                bad_wr.write(wr);
                return errno::status(Err(error.into()));
            }
            wr = request.next;
        }
    }
    0
}
