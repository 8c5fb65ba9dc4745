//! Structs of `verbs.h` that grow with its versions: a caller states the size of the struct that it was compiled with.

use std::mem;

/// Writes `value` to a caller's struct of `size` bytes. A shorter one gets its own fields only. Fields beyond this
/// version become zero: callers read them without a check.
///
/// # Safety
/// The struct at `to` has `size` writable bytes.
pub(crate) unsafe fn write<T>(to: *mut T, size: usize, value: &T) {
    let known = size.min(mem::size_of::<T>());
    // SAFETY: inside the caller's struct.
    unsafe {
        let to = to.cast::<u8>();
        to.copy_from_nonoverlapping(std::ptr::from_ref(value).cast(), known);
        to.add(known).write_bytes(0, size - known);
    }
}
