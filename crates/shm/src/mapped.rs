//! Typed references into mappings.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use millstream_lockfree::Shared;

use crate::Mapping;

impl Mapping {
    /// The value at `offset`; None if it leaves the mapping, is not aligned, or cannot be stored to.
    #[inline]
    #[must_use]
    pub fn get<T: Shared>(&self, offset: usize) -> Option<&T> {
        let inside = self.len().checked_sub(offset).is_some_and(|room| room >= size_of::<T>());
        if !inside || !self.writable() {
            return None;
        }
        let target = self.base().wrapping_add(offset).cast::<T>();
        // SAFETY: inside the mapping and aligned, as just checked; every bit pattern is valid and all fields are atomics,
        // as `Shared` demands.
        target.is_aligned().then(|| unsafe { &*target })
    }
}

/// A reference to a value in shared memory, together with a share of the mapping that it lies in.
///
/// Dereferencing costs as much as a plain reference. The value must be of a [`Shared`] type, because other processes
/// can write it at any time.
#[derive(Debug)]
pub struct MappedRef<T> {
    /// Inside `mapping`, aligned.
    target: NonNull<T>,
    mapping: Arc<Mapping>,
}

// SAFETY: as `&T` and `Arc<Mapping>`.
unsafe impl<T: Sync> Send for MappedRef<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for MappedRef<T> {}

impl<T: Shared> MappedRef<T> {
    /// The value at `offset` of a mapping; None if it leaves the mapping or is not aligned.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize) -> Option<Self> {
        let target = NonNull::from(mapping.get::<T>(offset)?);
        Some(Self { target, mapping: mapping.clone() })
    }

    /// A part of the value.
    #[must_use]
    pub fn project<U: Shared>(&self, field: impl for<'a> FnOnce(&'a T) -> &'a U) -> MappedRef<U> {
        MappedRef { target: NonNull::from(field(self)), mapping: self.mapping.clone() }
    }
}

impl<T> Deref for MappedRef<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: inside the mapping and aligned, as `new` checked; `mapping` keeps it mapped; every bit pattern is valid
        // and all fields are atomics, as `Shared` demands.
        unsafe { self.target.as_ref() }
    }
}

impl<T> Clone for MappedRef<T> {
    fn clone(&self) -> Self {
        Self { target: self.target, mapping: self.mapping.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Memfd, PAGE};
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn a_reference_keeps_its_mapping() {
        let mapping = Arc::new(Memfd::new("test", PAGE).unwrap().map().unwrap());
        let word = MappedRef::<AtomicU64>::new(&mapping, PAGE - 8).unwrap();
        let same = word.project(|word| word);
        drop((mapping, word.clone()));
        word.store(7, Ordering::Relaxed);
        drop(word);
        assert_eq!(same.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn references_stay_inside_and_aligned() {
        let mapping = Arc::new(Memfd::new("test", PAGE).unwrap().map().unwrap());
        for offset in [4, PAGE - 4, PAGE, usize::MAX, usize::MAX - 7] {
            assert!(MappedRef::<AtomicU64>::new(&mapping, offset).is_none(), "{offset}");
        }
    }
}
