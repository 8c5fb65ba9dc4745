//! Handles and regions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use millstream_fabric::{Collectives, Fabric, FabricError, RegionId};
use millstream_torus::engine::OutsideAccess;
use millstream_torus::{OutsideHost, TorusNode};
use millstream_torus_core::NodeNumber;

use crate::error::{Failure, call};
use crate::sys;

/// What a handle points to.
#[derive(Debug)]
pub(crate) struct Handle {
    state: Mutex<State>,
}

/// Who uses the torus.
#[derive(Debug)]
pub(crate) enum Member {
    /// A program of a node.
    Node(Box<TorusNode>),
    /// A host outside of the torus.
    Outside(Box<OutsideHost>),
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) member: Member,
    /// Made by the first operation of all nodes.
    pub(crate) collectives: Option<Collectives>,
}

impl State {
    /// A node of the torus.
    pub(crate) fn node(&mut self, number: u16) -> Result<NodeNumber, Failure> {
        let dimensions = self.member.fabric().dimensions();
        if usize::from(number) < dimensions.nodes() {
            return Ok(NodeNumber(number));
        }
        Err(Failure::invalid(format!("node {number} is not in a torus of {dimensions}")))
    }
}

impl Member {
    /// The operations that nodes and hosts outside have.
    pub(crate) fn fabric(&mut self) -> &mut dyn Fabric {
        match self {
            Member::Node(node) => &mut **node,
            Member::Outside(host) => &mut **host,
        }
    }

    /// The operations of nodes alone.
    pub(crate) fn node(&mut self) -> Result<&mut TorusNode, FabricError> {
        match self {
            Member::Node(node) => Ok(node),
            Member::Outside(_) => Err(FabricError::NotANode),
        }
    }
}

impl Handle {
    /// The handle of a member, for C.
    pub(crate) fn of(member: Member) -> *mut sys::ms_fabric {
        Box::into_raw(Box::new(Handle { state: Mutex::new(State { member, collectives: None }) })).cast()
    }
}

/// A string of the caller.
///
/// # Safety
/// `text` is null or a string.
pub(crate) unsafe fn string<'s>(text: *const c_char, what: &str) -> Result<&'s str, Failure> {
    if text.is_null() {
        return Err(Failure::invalid(format!("the {what} is null")));
    }
    // SAFETY: the caller gives a string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|error| Failure::invalid(format!("{what}: {error}")))
}

/// Locks what a handle points to.
///
/// # Safety
/// `fabric` is null, or a handle of [`ms_fabric_open`] that is not closed while the guard lives.
pub(crate) unsafe fn state<'h>(fabric: *const sys::ms_fabric) -> Result<MutexGuard<'h, State>, Failure> {
    if fabric.is_null() {
        return Err(Failure::invalid("the handle is null"));
    }
    // SAFETY: handles are boxes of this type, and the caller keeps it open.
    let handle = unsafe { &*fabric.cast::<Handle>() };
    Ok(handle.state.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Stores a result, unless the pointer is null.
///
/// # Safety
/// `to` is null, or points to a place for a value.
pub(crate) unsafe fn give<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the caller's pointer is valid for a value.
        unsafe { to.write(value) }
    }
}

/// Attaches to a node process.
///
/// # Safety
/// `socket` is null or a string; `fabric` points to a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_open(socket: *const c_char, fabric: *mut *mut sys::ms_fabric) -> c_int {
    call(|| {
        if fabric.is_null() {
            return Err(Failure::invalid("there is no place for the handle"));
        }
        millstream_log::init();
        let attached = if socket.is_null() {
            TorusNode::from_environment()
        } else {
            // SAFETY: the caller gives a string.
            TorusNode::attach(unsafe { string(socket, "socket") }?)
        };
        let node = attached.map_err(Failure::system)?;
        // SAFETY: checked above.
        unsafe { give(fabric, Handle::of(Member::Node(Box::new(node)))) };
        Ok(())
    })
}

/// Detaches.
///
/// # Safety
/// `fabric` is null, or a handle that no thread uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_close(fabric: *mut sys::ms_fabric) {
    if !fabric.is_null() {
        call(|| {
            // SAFETY: handles are boxes of this type, and this is the last use.
            drop(unsafe { Box::from_raw(fabric.cast::<Handle>()) });
            Ok(())
        });
    }
}

/// Nodes on each axis.
///
/// # Safety
/// `fabric` is a handle, `dimensions` has three places.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_dimensions(fabric: *const sys::ms_fabric, dimensions: *mut u16) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        if dimensions.is_null() {
            return Err(Failure::invalid("there is no place for the dimensions"));
        }
        let torus = state.member.fabric().dimensions();
        for (at, axis) in millstream_torus_core::Axis::ALL.into_iter().enumerate() {
            // SAFETY: three places, of which this is one.
            unsafe { dimensions.add(at).write(torus.size(axis)) }
        }
        Ok(())
    })
}

/// Number of this node, and number of nodes.
///
/// # Safety
/// `fabric` is a handle; the pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_rank(
    fabric: *const sys::ms_fabric,
    rank: *mut u16,
    nodes: *mut u32,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointers.
        unsafe {
            let mut state = state(fabric)?;
            let fabric = state.member.fabric();
            give(rank, fabric.here().0);
            give(nodes, fabric.dimensions().nodes() as u32);
        }
        Ok(())
    })
}

/// Registers zero bytes.
///
/// # Safety
/// `fabric` is a handle; the pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_register(
    fabric: *mut sys::ms_fabric,
    size: usize,
    region: *mut u64,
    memory: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        let failed =
            |error: &dyn std::fmt::Display| Failure::system(format!("cannot register {size} bytes: {error}"));
        let id = match &mut state.member {
            Member::Node(node) => node.register_memory(size).map_err(|error| failed(&error))?,
            Member::Outside(host) => host.register_memory(size).map_err(|error| failed(&error))?,
        };
        // SAFETY: the caller's pointers.
        unsafe { give_region(&state, id, region, memory) };
        Ok(())
    })
}

/// Registers memory of the node's card.
///
/// # Safety
/// `fabric` is a handle; the pointers are null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_register_card(
    fabric: *mut sys::ms_fabric,
    offset: u64,
    size: usize,
    region: *mut u64,
    memory: *mut *mut c_void,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        let id = state.member.fabric().register_card(offset, size)?;
        // SAFETY: the caller's pointers.
        unsafe { give_region(&state, id, region, memory) };
        Ok(())
    })
}

/// Publishes a region for hosts outside of the torus.
///
/// # Safety
/// `fabric` is a handle, `name` a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_publish(
    fabric: *mut sys::ms_fabric,
    region: u64,
    name: *const c_char,
    writable: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        // SAFETY: the caller gives a string.
        let name = unsafe { string(name, "name") }?;
        let access = if writable == 0 { OutsideAccess::Read } else { OutsideAccess::ReadWrite };
        state.member.node()?.publish(RegionId(region), name, access).map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidInput => Failure::invalid(error.to_string()),
            _ => Failure::system(error),
        })
    })
}

/// # Safety
/// The pointers are null or valid.
unsafe fn give_region(state: &State, id: RegionId, region: *mut u64, memory: *mut *mut c_void) {
    // A region that was just registered has memory.
    let found = match &state.member {
        Member::Node(node) => node.region_memory(id),
        Member::Outside(host) => host.region_memory(id),
    };
    let base = found.map_or(std::ptr::null_mut(), |memory| memory.mapping().base());
    // SAFETY: the caller's pointers.
    unsafe {
        give(region, id.0);
        give(memory, base.cast());
    }
}

/// Ends a region.
///
/// # Safety
/// `fabric` is a handle; nothing uses the region's address any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_deregister(fabric: *mut sys::ms_fabric, region: u64) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        Ok(state.member.fabric().deregister(RegionId(region))?)
    })
}
