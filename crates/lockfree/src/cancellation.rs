//! Thread cancellation (`pthread_cancel`), which ends a thread at its next cancellation point. Many functions of the C library
//! are cancellation points: `close`, `poll`, `nanosleep`, and those that read and write files. A thread that ends there keeps
//! what it holds, such as locks.

use std::ffi::c_int;
use std::marker::PhantomData;

#[cfg(not(miri))]
unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// Whether a thread could be cancelled before [`disable`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CancelState(#[cfg_attr(miri, expect(dead_code, reason = "Miri has no cancellation"))] c_int);

/// Disables the cancellation of the calling thread, until it calls [`restore`].
#[must_use]
pub fn disable() -> CancelState {
    #[cfg(not(miri))]
    {
        const DISABLE: c_int = 1;
        let mut before = 0;
        // SAFETY: changes a state of this thread.
        unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
        CancelState(before)
    }
    #[cfg(miri)]
    CancelState(0)
}

/// Ends [`disable`]. A cancellation that was requested meanwhile takes effect at the next cancellation point.
pub fn restore(state: CancelState) {
    #[cfg(not(miri))]
    {
        let mut unused = 0;
        // SAFETY: as above; the state is one that `disable` found.
        unsafe { pthread_setcancelstate(state.0, &raw mut unused) };
    }
    #[cfg(miri)]
    let _ = state;
}

/// While it exists, the thread that made it is not cancelled. Guards may be nested.
#[derive(Debug)]
#[must_use]
pub struct CancelGuard {
    before: CancelState,
    _of_this_thread: PhantomData<*mut ()>,
}

impl CancelGuard {
    /// Disables the cancellation of the calling thread.
    #[expect(clippy::new_without_default, reason = "it has an effect")]
    pub fn new() -> Self {
        Self { before: disable(), _of_this_thread: PhantomData }
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        restore(self.before);
    }
}
