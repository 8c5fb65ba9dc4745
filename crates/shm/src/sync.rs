//! What lock-free code is made of: the standard library's atomics, or those of the model checker.
//!
//! Under `cfg(loom)` only the parts of this crate and of the device that take their atomics from here are compiled,
//! and the checker tries all orders in which their threads can run, and all values that weak memory lets them read
//! (`make loom`, docs/faults.md).

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

/// A value that its owner guards, as `std::cell::UnsafeCell`; the checker sees the accesses.
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
    pub(crate) fn with<R>(&self, look: impl FnOnce(*const T) -> R) -> R {
        look(self.0.get())
    }

    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
        change(self.0.get())
    }
}

#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;
