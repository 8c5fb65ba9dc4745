//! The lease word: epoch and holder of a card's lease.

use std::time::Duration;

/// Longest time from a heartbeat to the expiry of a lease.
pub const MAX_DURATION: Duration = Duration::from_secs(7 * 24 * 3600);

/// Shortest time from a heartbeat to the expiry of a lease. Shorter leases would expire on a busy host.
pub const MIN_DURATION: Duration = Duration::from_millis(50);

/// The lease word of an epoch and a holder; holder 0 is none.
pub const fn pack(epoch: u32, holder: u32) -> u64 {
    (epoch as u64) << 32 | holder as u64
}

/// Epoch and holder of a lease word.
pub const fn unpack(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}
