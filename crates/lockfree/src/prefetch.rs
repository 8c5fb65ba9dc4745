//! Prefetch hints for cache lines that another core wrote last.
//!
//! A locked instruction waits until all stores before it are done. A store to a line that another core holds
//! takes as long as a cache miss. An early prefetch hides that latency.

/// Prefetch distance in ring entries, which is a few cache lines.
pub const DISTANCE: u32 = 4;

/// Requests the line at `at` for a store. The address need not be valid.
#[inline(always)]
pub fn for_store<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it accesses nothing, and processors without it ignore it.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Requests the line at `at` for a load. The address need not be valid.
#[inline(always)]
pub fn for_load<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; it accesses nothing.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast::<i8>());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
