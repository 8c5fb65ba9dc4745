//! The provider and its fabric.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use super::{domain, eq, error, fid, give, info, ops, table};
use crate::sys;

/// Version of the interface to libfabric: 1.17.
const API: u32 = 1 << 16 | 17;
const VERSION: u32 = 1;
pub(super) const NAME: &std::ffi::CStr = c"millstream";

#[repr(C)]
struct Fabric {
    fid: sys::fid_fabric,
}

static FABRIC: sys::fi_ops = ops::<Fabric>();
static FABRIC_OPS: sys::fi_ops_fabric = sys::fi_ops_fabric {
    size: size_of::<sys::fi_ops_fabric>(),
    domain: Some(domain::open),
    passive_ep: Some(no_passive_endpoint),
    eq_open: Some(eq::open),
    wait_open: Some(no_wait_set),
    trywait: Some(try_wait),
    domain2: None,
};

/// The provider, as libfabric loads it.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut sys::fi_provider {
    // An address; libfabric writes the context.
    static PROVIDER: OnceLock<usize> = OnceLock::new();
    let address = PROVIDER.get_or_init(|| {
        millstream_log::init();
        let provider = sys::fi_provider {
            version: VERSION,
            fi_version: API,
            name: NAME.as_ptr(),
            getinfo: Some(get_info),
            fabric: Some(open),
            cleanup: Some(cleanup),
            ..sys::fi_provider::default()
        };
        Box::into_raw(Box::new(provider)) as usize
    });
    *address as *mut sys::fi_provider
}

unsafe extern "C" fn get_info(
    version: u32,
    _node: *const c_char,
    _service: *const c_char,
    _flags: u64,
    hints: *const sys::fi_info,
    found: *mut *mut sys::fi_info,
) -> c_int {
    if !millstream_torus::application::environment_names_a_node() {
        return error(sys::FI_ENODATA);
    }
    // SAFETY: libfabric's hints, and its place for the result.
    unsafe {
        match info::matching(version, hints.as_ref()) {
            Some(info) => {
                found.write(info);
                0
            }
            None => error(sys::FI_ENODATA),
        }
    }
}

unsafe extern "C" fn open(
    attributes: *mut sys::fi_fabric_attr,
    fabric: *mut *mut sys::fid_fabric,
    context: *mut c_void,
) -> c_int {
    // SAFETY: libfabric's attributes and place.
    unsafe {
        let api_version = attributes.as_ref().map_or(API, |attributes| attributes.api_version);
        let fid = fid(sys::FI_CLASS_FABRIC, context, &FABRIC);
        give(Fabric { fid: sys::fid_fabric { fid, ops: table(&FABRIC_OPS), api_version } }, fabric)
    }
}

unsafe extern "C" fn cleanup() {}

unsafe extern "C" fn no_passive_endpoint(
    _: *mut sys::fid_fabric,
    _: *mut sys::fi_info,
    _: *mut *mut sys::fid_pep,
    _: *mut c_void,
) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn no_wait_set(
    _: *mut sys::fid_fabric,
    _: *mut sys::fi_wait_attr,
    _: *mut *mut sys::fid_wait,
) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn try_wait(_: *mut sys::fid_fabric, _: *mut *mut sys::fid, _: c_int) -> c_int {
    error(sys::FI_ENOSYS)
}
