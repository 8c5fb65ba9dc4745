//! Round-trip time estimate for retransmission: a few round trips after recent losses, otherwise the whole
//! ACK timeout, so that slow peers see no spurious retransmissions.

use core::time::Duration;

use crate::extended_psn::ExtendedPsn;
use millstream_quantity::Instant;

/// Packets without a loss after which losses are no longer expected.
const LOSS_FREE_PACKETS: u32 = 4096;
/// Smallest timeout, so that a descheduled peer sees no spurious retransmission.
const MIN_TIMEOUT: Duration = Duration::from_micros(100);
/// Smallest timeout for the retransmission of a gap.
const MIN_GAP_TIMEOUT: Duration = Duration::from_micros(20);
/// Timeout in round trips.
const RTT_MULTIPLIER: u32 = 4;

/// Smoothed round-trip time, used for the retransmission timeout after recent losses.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RttEstimator {
    /// End and send time of the packet whose acknowledgement is timed.
    timed: Option<(ExtendedPsn, Instant)>,
    /// Smoothed round-trip time.
    srtt: Option<Duration>,
    /// Packets to be acknowledged until losses are no longer expected.
    loss_free_left: u32,
}

impl RttEstimator {
    /// A packet that ends at `end` is sent: one with the AckReq bit, or the oldest in flight.
    #[inline]
    pub(super) fn sent(&mut self, end: ExtendedPsn, now: Instant) {
        self.timed.get_or_insert((end, now));
    }

    /// `packets` packets, all before `una`, were acknowledged.
    #[inline]
    pub(super) fn acknowledged(&mut self, packets: u32, una: ExtendedPsn, now: Instant) {
        if let Some((_, sent)) = self.timed.take_if(|(end, _)| *end <= una) {
            let srtt = now.since(sent);
            self.srtt = Some(self.srtt.map_or(srtt, |smooth| (smooth * 7 + srtt) / 8));
        }
        self.loss_free_left = self.loss_free_left.saturating_sub(packets);
    }

    /// A packet was lost. The round trip of a retransmitted packet is ambiguous (Karn's algorithm).
    pub(super) fn lost(&mut self) {
        self.loss_free_left = LOSS_FREE_PACKETS;
        self.timed = None;
    }

    /// Time after which the retransmission of a gap was probably lost, at most `max`. A needless one costs a packet.
    pub(super) fn gap_timeout(&self, max: Duration) -> Duration {
        self.srtt.map_or(max, |srtt| (srtt * 2).max(MIN_GAP_TIMEOUT).min(max))
    }

    /// The retransmission timeout: `max` without recent losses, otherwise a multiple of the round-trip time.
    pub(super) fn timeout(&self, max: Duration) -> Duration {
        match self.srtt {
            Some(srtt) if self.loss_free_left > 0 => (srtt * RTT_MULTIPLIER).max(MIN_TIMEOUT).min(max),
            Some(srtt) => max.max(srtt * 2),
            None => max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_wire::Psn;

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    #[test]
    fn timeout_is_short_after_a_loss_only() {
        let max = Duration::from_millis(4);
        let first = ExtendedPsn::first(Psn::new(7));
        let mut rtt = RttEstimator::default();
        rtt.sent(first.plus(1), at(0));
        rtt.acknowledged(1, first.plus(1), at(80));
        assert_eq!(rtt.timeout(max), max);
        rtt.lost();
        assert_eq!(rtt.timeout(max), Duration::from_micros(320));
        rtt.acknowledged(LOSS_FREE_PACKETS, first.plus(2), at(9000));
        assert_eq!(rtt.timeout(max), max);
    }

    #[test]
    fn lost_packets_are_not_timed() {
        let max = Duration::from_millis(4);
        let first = ExtendedPsn::first(Psn::new(7));
        let mut rtt = RttEstimator::default();
        rtt.sent(first.plus(1), at(0));
        rtt.lost();
        rtt.acknowledged(1, first.plus(1), at(500));
        assert_eq!(rtt.timeout(max), max, "no sample");
        rtt.sent(first.plus(2), at(600));
        rtt.acknowledged(1, first.plus(2), at(610));
        assert_eq!(rtt.timeout(max), MIN_TIMEOUT);
    }
}
