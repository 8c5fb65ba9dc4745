//! Hosts outside of the torus: connecting to a node's seventh port, and finding regions.

use std::ffi::{c_char, c_int};

use millstream_rdma::device::DeviceSelector;
use millstream_torus::OutsideHost;
use millstream_torus::engine::OutsideAccess;
use millstream_torus::seventh::{GatewayOptions, directory};

use crate::error::{Failure, call};
use crate::handle::{Handle, Member, give, state, string};
use crate::sys;

/// Connects to a node's seventh port.
///
/// # Safety
/// `gateway` is null or a string; `fabric` points to a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_open_outside(
    gateway: *const c_char,
    key: u64,
    fabric: *mut *mut sys::ms_fabric,
) -> c_int {
    call(|| {
        if fabric.is_null() {
            return Err(Failure::invalid("there is no place for the handle"));
        }
        millstream_log::init();
        let device = DeviceSelector::from_environment();
        let connected = if gateway.is_null() {
            OutsideHost::from_environment(device)
        } else {
            // SAFETY: the caller gives a string.
            let address = unsafe { string(gateway, "gateway") }?.to_owned();
            OutsideHost::connect(&GatewayOptions { address, key, device })
        };
        let host = connected.map_err(Failure::system)?;
        // SAFETY: checked above.
        unsafe { give(fabric, Handle::of(Member::Outside(Box::new(host)))) };
        Ok(())
    })
}

/// Finds a published region.
///
/// # Safety
/// `fabric` is a handle, `name` a string; the other pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_find(
    fabric: *mut sys::ms_fabric,
    node: u16,
    name: *const c_char,
    region: *mut u64,
    size: *mut u64,
    writable: *mut c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and string.
        let (mut state, name) = unsafe { (state(fabric)?, string(name, "name")?) };
        let node = state.node(node)?;
        let found = match &mut state.member {
            Member::Node(own) => directory::find(&mut **own, node, name)?,
            Member::Outside(host) => host.find(node, name)?,
        };
        let found =
            found.ok_or_else(|| Failure::no_region(format!("{node} publishes no region {name:?}")))?;
        // SAFETY: the caller's pointers.
        unsafe {
            give(region, found.region.0);
            give(size, found.size);
            give(writable, c_int::from(found.access == OutsideAccess::ReadWrite));
        }
        Ok(())
    })
}
