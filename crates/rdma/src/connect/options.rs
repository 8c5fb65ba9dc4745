//! Options of reliable connections.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::memory::Access;

/// Local ACK timeout: 4.096 µs · 2^exponent; exponent 0 means infinite (IBTA volume 1, 9.9.2.1.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckTimeout(u8);

impl AckTimeout {
    /// The shortest timeout of at least `time`; at most 2.4 h.
    pub fn at_least(time: Duration) -> AckTimeout {
        let exponent = (1..31).find(|exponent| AckTimeout(*exponent).time() >= time).unwrap_or(31);
        AckTimeout(exponent)
    }

    /// The timeout.
    pub fn time(self) -> Duration {
        Duration::from_nanos(4096 << self.0)
    }

    pub(super) fn exponent(self) -> u8 {
        self.0
    }
}

/// RNR NAK timer: how long the peer waits when no receive is posted (IBTA volume 1, table 45).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// Times of the codes 1 to 31, in units of 10 µs; code 0 is the longest.
    const TENS_OF_MICROS: [u32; 31] = [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];

    /// The shortest time of at least `time`; at most 655.36 ms.
    pub fn at_least(time: Duration) -> RnrTimer {
        let code = (1..=31).find(|code| RnrTimer(*code).time() >= time).unwrap_or(0);
        RnrTimer(code)
    }

    /// The time.
    pub fn time(self) -> Duration {
        let tens = match self.0 {
            0 => 65536,
            code => Self::TENS_OF_MICROS[usize::from(code - 1)],
        };
        Duration::from_micros(u64::from(tens) * 10)
    }

    pub(super) fn code(self) -> u8 {
        self.0
    }
}

/// Options of a reliable connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RcOptions {
    /// Maximum outstanding send work requests.
    pub send_depth: u32,
    /// Maximum outstanding receives.
    pub recv_depth: u32,
    /// Maximum scatter/gather elements of a send work request.
    pub send_sges: u32,
    /// Maximum scatter/gather elements of a receive.
    pub recv_sges: u32,
    /// Maximum inline data of a work request, in bytes.
    pub max_inline: u32,
    /// Access of the peer to this side's regions; the region must allow it, too.
    pub access: Access,
    /// Local ACK timeout.
    pub ack_timeout: AckTimeout,
    /// Transport retries before the peer counts as lost, at most 7.
    pub retries: u8,
    /// RNR retries, at most 7; 7 means infinite.
    pub rnr_retries: u8,
    /// RNR NAK timer for the peer.
    pub rnr_timer: RnrTimer,
    /// Outstanding READs and atomics in each direction. The device's and the peer's limits also apply.
    pub max_rd_atomic: u8,
}

impl Default for RcOptions {
    /// A peer counts as lost after 7 retries of 67 ms each, half a second.
    fn default() -> RcOptions {
        RcOptions {
            send_depth: 256,
            recv_depth: 256,
            send_sges: 4,
            recv_sges: 1,
            max_inline: 64,
            access: Access::REMOTE,
            ack_timeout: AckTimeout(14),
            retries: 7,
            rnr_retries: 7,
            rnr_timer: RnrTimer(12),
            max_rd_atomic: 16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_values_of_the_specification() {
        assert_eq!(AckTimeout(14).time(), Duration::from_nanos(67_108_864));
        assert_eq!(RnrTimer(0).time(), Duration::from_micros(655_360));
        assert_eq!(RnrTimer(1).time(), Duration::from_micros(10));
        assert_eq!(RnrTimer(12).time(), Duration::from_micros(640));
        assert_eq!(RnrTimer(31).time(), Duration::from_micros(491_520));
        assert_eq!(AckTimeout::at_least(Duration::MAX).exponent(), 31);
        assert_eq!(RnrTimer::at_least(Duration::MAX).code(), 0);
    }

    proptest! {
        #[test]
        fn the_time_chosen_is_the_shortest_that_suffices(micros in 0u64..600_000) {
            let wanted = Duration::from_micros(micros);
            let ack = AckTimeout::at_least(wanted);
            prop_assert!(ack.time() >= wanted);
            prop_assert!(ack.exponent() == 1 || AckTimeout(ack.exponent() - 1).time() < wanted);
            let rnr = RnrTimer::at_least(wanted);
            prop_assert!(rnr.time() >= wanted);
            prop_assert!(rnr.code() <= 1 || RnrTimer(rnr.code() - 1).time() < wanted);
        }
    }
}
