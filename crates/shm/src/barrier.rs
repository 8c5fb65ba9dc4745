//! An asymmetric memory fence between processes.
//!
//! The data path announces itself ("I am inside your memory") on every operation; the owner looks
//! at those announcements only when it takes memory away. So the fence belongs on the rare side:
//! with `membarrier(2)` in its global expedited form the owner makes every registered process
//! execute a fence, and the fast side needs only to keep the compiler from reordering.

//!
//! Loom and Miri know no such system call. For them both sides are full fences: that is what
//! `membarrier(2)` says that a compiler barrier and the call are for each other, and it is what is done where
//! there is no such call.

pub use imp::{heavy, light, register};

#[cfg(not(any(loom, miri)))]
mod imp {
    use std::sync::atomic::{AtomicU8, Ordering, compiler_fence, fence};

    const CMD_GLOBAL_EXPEDITED: i32 = 1 << 1;
    const CMD_REGISTER_GLOBAL_EXPEDITED: i32 = 1 << 2;

    const UNKNOWN: u8 = 0;
    const ASYMMETRIC: u8 = 1;
    const SYMMETRIC: u8 = 2;

    static MODE: AtomicU8 = AtomicU8::new(UNKNOWN);

    fn membarrier(command: i32) -> bool {
        // SAFETY: a plain system call without pointers.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    /// Registers this process; true where the cheap form works. Every process says so to its peers,
    /// and [`light`] is only used towards peers that said yes.
    pub fn register() -> bool {
        if MODE.load(Ordering::Acquire) == UNKNOWN {
            let mode = if membarrier(CMD_REGISTER_GLOBAL_EXPEDITED) { ASYMMETRIC } else { SYMMETRIC };
            MODE.store(mode, Ordering::Release);
        }
        MODE.load(Ordering::Acquire) == ASYMMETRIC
    }

    /// The fast side's half. `asymmetric` says whether both processes registered.
    #[inline(always)]
    pub fn light(asymmetric: bool) {
        if asymmetric {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// The rare side's half: afterwards, either the other process sees what was stored before, or this
    /// one sees what the other had stored before its [`light`].
    pub fn heavy() {
        fence(Ordering::SeqCst);
        if MODE.load(Ordering::Acquire) == ASYMMETRIC {
            membarrier(CMD_GLOBAL_EXPEDITED);
        }
    }
}

/// As checkers see it.
#[cfg(any(loom, miri))]
mod imp {
    use crate::sync::atomic::{Ordering, fence};

    /// The cheap form works.
    pub fn register() -> bool {
        true
    }

    /// The fast side's half.
    pub fn light(_asymmetric: bool) {
        fence(Ordering::SeqCst);
    }

    /// The rare side's half.
    pub fn heavy() {
        fence(Ordering::SeqCst);
    }
}
