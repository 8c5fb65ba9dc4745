//! Types that may lie in memory which other processes write.

use crate::sync::atomic::{AtomicU32, AtomicU64};

/// A type that can be viewed in shared memory whatever other processes store there.
///
/// # Safety
/// All fields are atomics or padding, every bit pattern is a valid value, and the type has no destructor.
pub unsafe trait Shared {}

// SAFETY: an atomic integer takes every bit pattern.
unsafe impl Shared for AtomicU32 {}
// SAFETY: as above.
unsafe impl Shared for AtomicU64 {}
