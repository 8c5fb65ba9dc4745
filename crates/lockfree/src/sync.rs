//! Atomics, threads and cells: those of the standard library, or those of the loom model checker.
//!
//! Under `cfg(loom)` the checker runs a test with all interleavings of its threads, and with all values that
//! weak memory permits (`make loom`).

#[cfg(not(loom))]
pub use std::{
    hint,
    sync::{Arc, atomic},
    thread,
};

#[cfg(loom)]
pub use loom::{
    hint,
    sync::{Arc, atomic},
    thread,
};

/// `std::cell::UnsafeCell` with accessors that the checker can observe.
#[cfg(not(loom))]
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) const fn get(&self) -> *mut T {
        self.0.get()
    }

    #[inline(always)]
    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}

#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;
