//! Memory regions. Keys are the application's, addresses are offsets.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use super::domain::Domain;
use super::{error, fid, give, lock, no_bind, no_control, object};
use crate::memory::Regions;
use crate::sys;

#[repr(C)]
struct MemoryRegion {
    fid: sys::fid_mr,
    regions: Arc<Mutex<Regions>>,
}

static MR: sys::fi_ops = sys::fi_ops {
    size: size_of::<sys::fi_ops>(),
    close: Some(close),
    bind: Some(no_bind),
    control: Some(no_control),
    ops_open: None,
    tostr: None,
    ops_set: None,
};
pub(super) static OPS: sys::fi_ops_mr = sys::fi_ops_mr {
    size: size_of::<sys::fi_ops_mr>(),
    reg: Some(register),
    regv: Some(register_parts),
    regattr: Some(register_attributes),
};

unsafe extern "C" fn close(fid: *mut sys::fid) -> c_int {
    // SAFETY: an open region, which ends here.
    unsafe {
        let region = object::<MemoryRegion, _>(fid);
        lock(&region.regions).remove(region.fid.key);
        super::close::<MemoryRegion>(fid)
    }
}

unsafe extern "C" fn register(
    domain: *mut sys::fid,
    buffer: *const c_void,
    length: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    region: *mut *mut sys::fid_mr,
    context: *mut c_void,
) -> c_int {
    if offset != 0 || flags & !sys::MS_FI_RMA_EVENT != 0 {
        return error(sys::FI_EINVAL);
    }
    // SAFETY: an open domain, and memory that lives until the region is closed.
    unsafe {
        let regions = Domain::regions(domain);
        let (readable, writable) =
            (access & sys::MS_FI_REMOTE_READ != 0, access & sys::MS_FI_REMOTE_WRITE != 0);
        // Regions for local use need no key of their own.
        let mut table = lock(regions);
        let key = if readable || writable { key } else { table.free_key() };
        if !table.add(key, buffer.cast_mut().cast(), length as u64, readable, writable) {
            return error(sys::FI_ENOKEY);
        }
        let fid =
            sys::fid_mr { fid: fid(sys::FI_CLASS_MR, context, &MR), mem_desc: std::ptr::null_mut(), key };
        give(MemoryRegion { fid, regions: Arc::clone(regions) }, region)
    }
}

unsafe extern "C" fn register_parts(
    domain: *mut sys::fid,
    parts: *const sys::iovec,
    count: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    region: *mut *mut sys::fid_mr,
    context: *mut c_void,
) -> c_int {
    if count != 1 || parts.is_null() {
        return error(sys::FI_EINVAL);
    }
    // SAFETY: one part.
    unsafe {
        let part = *parts;
        register(domain, part.iov_base, part.iov_len, access, offset, key, flags, region, context)
    }
}

unsafe extern "C" fn register_attributes(
    domain: *mut sys::fid,
    attributes: *const sys::fi_mr_attr,
    flags: u64,
    region: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: the caller's attributes.
    unsafe {
        let Some(given) = attributes.as_ref() else { return error(sys::FI_EINVAL) };
        if given.iface != sys::FI_HMEM_SYSTEM {
            return error(sys::FI_ENOSYS);
        }
        let (parts, count, key) = (given.mr_iov, given.iov_count, given.requested_key);
        register_parts(domain, parts, count, given.access, given.offset, key, flags, region, given.context)
    }
}
