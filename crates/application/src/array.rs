//! Arrays in memory of their own, with huge pages, or in memory that somebody else allocated, such as a card's.
#![expect(unsafe_code, reason = "values at an address that the caller promises")]

use std::fmt;
use std::ops::{Deref, DerefMut};

/// An array.
pub struct Array<T>(Values<T>);

enum Values<T> {
    /// In memory of their own.
    Own(Vec<T>),
    /// In memory that somebody else allocated.
    Elsewhere {
        /// The first value.
        first: *mut T,
        /// Number of values.
        count: usize,
    },
}

// SAFETY: the values are exclusively the array's, wherever they are.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: a shared array is only read.
unsafe impl<T: Sync> Sync for Array<T> {}

impl<T> Array<T> {
    /// The array of `count` values at `first`.
    ///
    /// # Safety
    /// They are aligned, initialised, and exclusively this array's as long as it lives.
    #[must_use]
    pub unsafe fn over(first: *mut T, count: usize) -> Array<T> {
        Array(Values::Elsewhere { first, count })
    }
}

impl<T> Default for Array<T> {
    fn default() -> Array<T> {
        Vec::new().into()
    }
}

impl<T> From<Vec<T>> for Array<T> {
    /// Long vectors get huge pages, if the system has some.
    fn from(mut values: Vec<T>) -> Array<T> {
        let bytes = values.capacity() * size_of::<T>();
        use_huge_pages(values.as_mut_ptr().addr(), bytes);
        Array(Values::Own(values))
    }
}

/// Asks for huge pages in a range of addresses, now and for pages that are touched later. Kernels walk through long arrays,
/// whose base pages would not fit the TLB.
fn use_huge_pages(first: usize, bytes: usize) {
    const HUGE_PAGE: usize = 2 << 20;
    let (start, end) = (first.next_multiple_of(HUGE_PAGE), (first + bytes) / HUGE_PAGE * HUGE_PAGE);
    if start >= end {
        return;
    }
    for advice in [libc::MADV_HUGEPAGE, libc::MADV_COLLAPSE] {
        // SAFETY: neither advice changes the contents, or anything outside of the range. A system without huge pages, or
        // without free ones, refuses.
        unsafe { libc::madvise(std::ptr::without_provenance_mut(start), end - start, advice) };
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Values::Own(values) => values,
            // SAFETY: the promise of `Array::over`.
            Values::Elsewhere { first, count } => unsafe { std::slice::from_raw_parts(*first, *count) },
        }
    }
}

impl<T> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Values::Own(values) => values,
            // SAFETY: the promise of `Array::over`.
            Values::Elsewhere { first, count } => unsafe { std::slice::from_raw_parts_mut(*first, *count) },
        }
    }
}

impl<T: Clone> Clone for Array<T> {
    /// A copy in memory of its own.
    fn clone(&self) -> Array<T> {
        self.to_vec().into()
    }
}

impl<T: fmt::Debug> fmt::Debug for Array<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
