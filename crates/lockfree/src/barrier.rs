//! An asymmetric memory fence between processes.
//!
//! The data path announces every operation in the target's memory. The target's owner reads announcements
//! only when it withdraws memory. So the rare side pays for the fence: `membarrier(2)` in its global
//! expedited form makes every registered process execute a fence. On the fast side a compiler barrier
//! suffices.
//!
//! Loom and Miri do not model that system call. Under them, and on kernels without the call, both sides are
//! full fences.

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

    /// Registers this process; true where the asymmetric form works. Processes exchange this value, and [`light`] is
    /// asymmetric only between two that registered.
    pub fn register() -> bool {
        if MODE.load(Ordering::Acquire) == UNKNOWN {
            let mode = if membarrier(CMD_REGISTER_GLOBAL_EXPEDITED) { ASYMMETRIC } else { SYMMETRIC };
            MODE.store(mode, Ordering::Release);
        }
        MODE.load(Ordering::Acquire) == ASYMMETRIC
    }

    /// The fast side's fence. `asymmetric`: both processes registered.
    #[inline(always)]
    pub fn light(asymmetric: bool) {
        if asymmetric {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// The rare side's fence. Afterwards either the other process sees this one's earlier stores, or this
    /// process sees the other's stores before its [`light`].
    pub fn heavy() {
        fence(Ordering::SeqCst);
        if MODE.load(Ordering::Acquire) == ASYMMETRIC {
            membarrier(CMD_GLOBAL_EXPEDITED);
        }
    }
}

/// Full fences on both sides, for the checkers.
#[cfg(any(loom, miri))]
mod imp {
    use crate::sync::atomic::{Ordering, fence};

    /// Always true: the checkers have the asymmetric form.
    pub fn register() -> bool {
        true
    }

    /// The fast side's fence.
    pub fn light(_asymmetric: bool) {
        fence(Ordering::SeqCst);
    }

    /// The rare side's fence.
    pub fn heavy() {
        fence(Ordering::SeqCst);
    }
}
