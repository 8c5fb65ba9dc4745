//! Window for slow peers: at most what the peer acknowledges in half of the ACK timeout. Packets that wait
//! longer at the peer would be retransmitted, which slows it down further.

use core::time::Duration;

use millstream_quantity::{Instant, ack_timeout};

/// Initial window in packets, before the peer's rate is measured.
const INITIAL_WINDOW: u32 = 128;
/// Smallest window in packets.
const MIN_WINDOW: u32 = 32;
/// Rate samples in half of the ACK timeout.
const SAMPLES: u32 = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct SendWindow {
    /// Half of the ACK timeout; `None` for an infinite timeout, and then there is no limit.
    time: Option<Duration>,
    /// Duration of a sample.
    span: Duration,
    limit: u32,
    packets: u32,
    /// Start of the current sample and packets acknowledged since; `None` if nothing is in flight.
    sample: Option<(Instant, u32)>,
}

impl SendWindow {
    pub(super) fn new(timeout: u8, window: u32) -> Self {
        let time = ack_timeout(timeout).map(|time| time / 2);
        let initial = if time.is_some() { INITIAL_WINDOW.min(window) } else { window };
        Self { span: time.unwrap_or_default() / SAMPLES, time, limit: window, packets: initial, sample: None }
    }

    /// Packets that may be in flight.
    #[inline]
    pub(super) fn packets(&self) -> u32 {
        self.packets
    }

    /// A packet is sent.
    #[inline]
    pub(super) fn sent(&mut self, now: Instant) {
        self.sample.get_or_insert((now, 0));
    }

    /// `packets` packets were acknowledged; `all` if nothing is in flight any more.
    #[inline]
    pub(super) fn acknowledged(&mut self, packets: u32, all: bool, now: Instant) {
        let (Some(time), Some((began, before))) = (self.time, self.sample) else { return };
        let (packets, took) = (before + packets, now.since(began));
        self.sample = Some((began, packets));
        if took >= self.span {
            let rate = u128::from(packets) * time.as_nanos() / took.as_nanos().max(1);
            let rate = u32::try_from(rate).unwrap_or(u32::MAX);
            // Samples are weighted with their duration: neither a burst nor a short silence is the peer's
            // rate.
            let samples = (took.as_nanos() / self.span.as_nanos().max(1)).min(16);
            let fallen = (0..samples).fold(self.packets, |window, _| window - window / 4);
            let risen = self.packets.saturating_mul(2);
            self.packets = rate.clamp(fallen, risen).clamp(MIN_WINDOW.min(self.limit), self.limit);
            self.sample = Some((now, 0));
        }
        if all {
            // It waits for requests, so it may be faster: a full window acknowledged in time only raises the limit.
            if 2 * packets >= self.packets && took <= time {
                self.packets = self.packets.saturating_mul(2).min(self.limit);
            }
            self.sample = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2 ms.
    const TIMEOUT: u8 = 9;

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    #[test]
    fn window_is_what_the_peer_acknowledges_in_half_of_the_timeout() {
        let mut peer = SendWindow::new(TIMEOUT, 2048);
        assert_eq!(peer.packets(), INITIAL_WINDOW);
        peer.sent(at(0));
        // One packet per microsecond.
        (1..=100).for_each(|n| peer.acknowledged(20, false, at(20 * n)));
        assert!((1000..1100).contains(&peer.packets()), "{}", peer.packets());
        // One packet in ten microseconds.
        (1..=400).for_each(|n| peer.acknowledged(1, false, at(2000 + 10 * n)));
        assert!((100..120).contains(&peer.packets()), "{}", peer.packets());
        // One packet in 100 µs.
        (1..=40).for_each(|n| peer.acknowledged(1, false, at(6000 + 100 * n)));
        assert_eq!(peer.packets(), MIN_WINDOW);
        (1..=6).for_each(|n| peer.acknowledged(1000, false, at(10_000 + 100 * n)));
        assert_eq!(peer.packets(), 2048);
        // The peer was not scheduled for a while.
        peer.acknowledged(1, false, at(10_600 + 70));
        assert!((1000..1200).contains(&peer.packets()), "{}", peer.packets());
        peer.acknowledged(1, false, at(10_600 + 2000));
        assert_eq!(peer.packets(), MIN_WINDOW);
    }

    #[test]
    fn idle_time_is_not_sampled() {
        let mut peer = SendWindow::new(TIMEOUT, 2048);
        for n in 0..100 {
            peer.sent(at(1000 * n));
            peer.acknowledged(1, true, at(1000 * n + 5));
        }
        assert_eq!(peer.packets(), INITIAL_WINDOW);
    }

    #[test]
    fn a_full_window_acknowledged_at_once_raises_the_limit() {
        let mut peer = SendWindow::new(TIMEOUT, 500);
        // READs, one request of the whole window after the other.
        for (n, packets) in [128, 256, 500, 500].into_iter().enumerate() {
            assert_eq!(peer.packets(), packets);
            peer.sent(at(100 * n as u64));
            peer.acknowledged(packets, true, at(100 * n as u64 + 20));
        }
        // Too late.
        let mut peer = SendWindow::new(TIMEOUT, 500);
        peer.sent(at(0));
        peer.acknowledged(INITIAL_WINDOW, true, at(1100));
        assert!(peer.packets() < INITIAL_WINDOW, "{}", peer.packets());
    }

    #[test]
    fn infinite_timeout_has_no_limit() {
        let mut peer = SendWindow::new(0, 500);
        peer.sent(at(0));
        peer.acknowledged(1, false, at(1_000_000));
        assert_eq!(peer.packets(), 500);
    }
}
