//! The timers of reliable connections, from their codes in queue pair attributes.

use std::time::Duration;

use crate::errno::{Errno, Result};

/// The delay before the next retry of a pending request that has waited for `waited`, while the application sleeps.
pub(crate) fn retry_delay(waited: Duration) -> Duration {
    (waited / 4).clamp(Duration::from_micros(50), Duration::from_millis(10))
}

/// The timer of an RNR NAK, from its code (IBTA volume 1, table 45).
///
/// # Errors
/// EINVAL for a code of more than five bits.
pub(crate) fn rnr_timer(code: u8) -> Result<Duration> {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    let value = HUNDREDTHS_OF_MS.get(usize::from(code)).ok_or(Errno::INVAL)?;
    Ok(Duration::from_micros(u64::from(*value) * 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_follow_the_specification() {
        assert_eq!(rnr_timer(0).unwrap(), Duration::from_micros(655_360));
        assert_eq!(rnr_timer(12).unwrap(), Duration::from_micros(640));
        assert_eq!(rnr_timer(31).unwrap(), Duration::from_micros(491_520));
        assert!(rnr_timer(32).is_err());
    }
}
