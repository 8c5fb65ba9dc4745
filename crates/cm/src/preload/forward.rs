//! The definitions that the program would call without this library.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function in the next library that defines it.
pub(crate) struct NextFn {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl NextFn {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The address of the function; null if there is none.
    #[inline]
    pub(crate) fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if found.is_null() { self.find() } else { found }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // SAFETY: a C string; the search starts after this library, so it cannot find ourselves.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Calls the next definition of the function with these arguments. If there is none, the enclosing function
/// returns `$missing` with ENOSYS.
macro_rules! forward {
    ($name:ident($($arg:ident: $type:ty),*) -> $ret:ty, missing $missing:expr) => {{
        static NEXT: $crate::preload::forward::NextFn = $crate::preload::forward::NextFn::new(
            // SAFETY: ends in the one NUL that `concat` adds.
            unsafe { std::ffi::CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
        );
        let next = NEXT.get();
        if next.is_null() {
            $crate::preload::set_errno(libc::ENOSYS);
            return $missing;
        }
        // SAFETY: the C library's function of this name has this signature.
        let next: unsafe extern "C-unwind" fn($($type),*) -> $ret = unsafe { std::mem::transmute(next) };
        // SAFETY: the caller's arguments, or the redirected path.
        unsafe { next($($arg),*) }
    }};
}
pub(crate) use forward;
