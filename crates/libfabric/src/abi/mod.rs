//! What libfabric calls: one file for each kind of object. Objects are boxes that begin with libfabric's struct.

mod atomic;
mod av;
mod cntr;
mod cq;
mod domain;
mod ep;
mod eq;
mod info;
mod mr;
mod msg;
mod provider;
mod rma;

pub use provider::fi_prov_ini;

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sys;

/// Locks. A panic of another thread leaves nothing half done that later calls cannot see.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A negated error of libfabric.
const fn error(code: u32) -> c_int {
    -(code as c_int)
}

/// As [`error`], for functions that return a size.
const fn error_size(code: u32) -> isize {
    -(code as isize)
}

/// A table of functions, as libfabric points to it.
const fn table<T>(table: &'static T) -> *mut T {
    std::ptr::from_ref(table).cast_mut()
}

const fn fid(class: u32, context: *mut c_void, ops: &'static sys::fi_ops) -> sys::fid {
    sys::fid { fclass: class as usize, context, ops: table(ops) }
}

/// Makes an object, and gives its first member to the caller.
///
/// # Safety
/// `T` begins with an `F`, and `to` points to a place for a pointer.
unsafe fn give<T, F>(object: T, to: *mut *mut F) -> c_int {
    // SAFETY: the caller's place.
    unsafe { to.write(Box::into_raw(Box::new(object)).cast()) };
    0
}

/// The object that begins with a struct of libfabric.
///
/// # Safety
/// The pointer came from [`give`] with this `T`, and the object is open.
unsafe fn object<'o, T, F>(fid: *const F) -> &'o T {
    // SAFETY: a box of this type.
    unsafe { &*fid.cast::<T>() }
}

/// Closes an object.
///
/// # Safety
/// As for [`object`], and nothing uses it afterwards.
unsafe extern "C" fn close<T>(fid: *mut sys::fid) -> c_int {
    // SAFETY: a box of this type.
    drop(unsafe { Box::from_raw(fid.cast::<T>()) });
    0
}

unsafe extern "C" fn no_bind(_: *mut sys::fid, _: *mut sys::fid, _: u64) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn no_control(_: *mut sys::fid, _: c_int, _: *mut c_void) -> c_int {
    error(sys::FI_ENOSYS)
}

/// Functions of an object that can only be closed.
const fn ops<T>() -> sys::fi_ops {
    sys::fi_ops {
        size: size_of::<sys::fi_ops>(),
        close: Some(close::<T>),
        bind: Some(no_bind),
        control: Some(no_control),
        ops_open: None,
        tostr: None,
        ops_set: None,
    }
}

/// An array of libfabric, which is null if it is empty.
///
/// # Safety
/// `first` points to `count` elements, or is null.
unsafe fn array<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if first.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's array.
    unsafe { std::slice::from_raw_parts(first, count) }
}

/// One buffer, as [`iovecs`] gives several.
fn iovec(buffer: *const c_void, length: usize) -> impl Iterator<Item = (*mut u8, usize)> {
    std::iter::once((buffer.cast_mut().cast(), length))
}

/// The buffers of an array of `iovec`.
///
/// # Safety
/// As for [`array`].
unsafe fn iovecs<'p>(parts: *const sys::iovec, count: usize) -> impl Iterator<Item = (*mut u8, usize)> + 'p {
    // SAFETY: the caller's.
    unsafe { array(parts, count) }.iter().map(|part| (part.iov_base.cast(), part.iov_len))
}
