//! Hints about cache lines that another core used last.
//!
//! A locked instruction waits until all stores before it are done, and a store to a line that another
//! core holds takes as long as a miss. Asking for the line early hides that.

/// How many entries of a ring ahead the hints are of use: a few lines.
pub const AHEAD: u32 = 4;

/// The line at `at` will be stored to soon. The address need not be valid.
#[inline(always)]
pub fn expect_store<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it accesses nothing, and processors without it ignore it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The line at `at` will be read soon. The address need not be valid.
#[inline(always)]
pub fn expect_load<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it accesses nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast::<i8>());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
