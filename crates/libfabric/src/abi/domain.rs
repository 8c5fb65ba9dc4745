//! Domains: what opens all other objects.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use super::{atomic, av, cntr, cq, ep, error, fid, give, mr, object, ops, table};
use crate::memory::Regions;
use crate::sys;

#[repr(C)]
pub(super) struct Domain {
    fid: sys::fid_domain,
    regions: Arc<Mutex<Regions>>,
}

impl Domain {
    /// # Safety
    /// An open domain.
    pub(super) unsafe fn regions<'d, F>(domain: *const F) -> &'d Arc<Mutex<Regions>> {
        // SAFETY: the caller's.
        unsafe { &object::<Domain, _>(domain).regions }
    }
}

static DOMAIN: sys::fi_ops = ops::<Domain>();
static DOMAIN_OPS: sys::fi_ops_domain = sys::fi_ops_domain {
    size: size_of::<sys::fi_ops_domain>(),
    av_open: Some(av::open),
    cq_open: Some(cq::open),
    endpoint: Some(ep::open),
    scalable_ep: Some(no_scalable_endpoint),
    cntr_open: Some(cntr::open),
    poll_open: Some(no_poll_set),
    stx_ctx: Some(no_shared_transmit),
    srx_ctx: Some(no_shared_receive),
    query_atomic: Some(atomic::query),
    query_collective: None,
    endpoint2: None,
};

pub(super) unsafe extern "C" fn open(
    _: *mut sys::fid_fabric,
    _: *mut sys::fi_info,
    domain: *mut *mut sys::fid_domain,
    context: *mut c_void,
) -> c_int {
    let fid = fid(sys::FI_CLASS_DOMAIN, context, &DOMAIN);
    let fid = sys::fid_domain { fid, ops: table(&DOMAIN_OPS), mr: table(&mr::OPS) };
    // SAFETY: libfabric's place.
    unsafe { give(Domain { fid, regions: Arc::default() }, domain) }
}

unsafe extern "C" fn no_scalable_endpoint(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_info,
    _: *mut *mut sys::fid_ep,
    _: *mut c_void,
) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn no_poll_set(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_poll_attr,
    _: *mut *mut sys::fid_poll,
) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn no_shared_transmit(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_tx_attr,
    _: *mut *mut sys::fid_stx,
    _: *mut c_void,
) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn no_shared_receive(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_rx_attr,
    _: *mut *mut sys::fid_ep,
    _: *mut c_void,
) -> c_int {
    error(sys::FI_ENOSYS)
}
