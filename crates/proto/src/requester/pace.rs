//! How much may be under way to a peer that is slow: not more than it answers in half of the ACK timeout. What waits
//! longer than that would be asked for again and again, which makes such a peer slower still.

use core::time::Duration;

use millstream_quantity::{Instant, ack_timeout};

/// Packets that may be under way before it is known how fast the peer answers.
const FIRST: u32 = 128;
/// Never fewer.
const LEAST: u32 = 32;
/// Measurements in half of the ACK timeout.
const SAMPLES: u32 = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Half of the ACK timeout; None if there is none, and then no limit.
    time: Option<Duration>,
    /// How long a measurement takes.
    span: Duration,
    window: u32,
    room: u32,
    /// When the measurement began, and packets that were answered since; None if nothing is under way.
    sample: Option<(Instant, u32)>,
}

impl Pace {
    pub(super) fn new(timeout: u8, window: u32) -> Self {
        let time = ack_timeout(timeout).map(|time| time / 2);
        let room = if time.is_some() { FIRST.min(window) } else { window };
        Self { span: time.unwrap_or_default() / SAMPLES, time, window, room, sample: None }
    }

    /// Packets that may be under way.
    #[inline]
    pub(super) fn room(&self) -> u32 {
        self.room
    }

    /// A packet leaves.
    #[inline]
    pub(super) fn sent(&mut self, now: Instant) {
        self.sample.get_or_insert((now, 0));
    }

    /// So many packets were answered, and perhaps all.
    #[inline]
    pub(super) fn answered(&mut self, packets: u32, all: bool, now: Instant) {
        let (Some(time), Some((began, before))) = (self.time, self.sample) else { return };
        let (packets, took) = (before + packets, now.since(began));
        self.sample = Some((began, packets));
        if took >= self.span {
            let answers = u128::from(packets) * time.as_nanos() / took.as_nanos().max(1);
            let answers = u32::try_from(answers).unwrap_or(u32::MAX);
            // Both ways with time: neither a burst nor a short silence says how fast the peer is.
            let samples = (took.as_nanos() / self.span.as_nanos().max(1)).min(16);
            let fallen = (0..samples).fold(self.room, |room, _| room - room / 4);
            let risen = self.room.saturating_mul(2);
            self.room = answers.clamp(fallen, risen).clamp(LEAST.min(self.window), self.window);
            self.sample = Some((now, 0));
        }
        if all {
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
    fn no_more_is_under_way_than_is_answered_in_half_of_the_timeout() {
        let mut pace = Pace::new(TIMEOUT, 2048);
        assert_eq!(pace.room(), FIRST);
        pace.sent(at(0));
        // One a microsecond.
        (1..=100).for_each(|n| pace.answered(20, false, at(20 * n)));
        assert!((1000..1100).contains(&pace.room()), "{}", pace.room());
        // One in ten microseconds.
        (1..=400).for_each(|n| pace.answered(1, false, at(2000 + 10 * n)));
        assert!((100..120).contains(&pace.room()), "{}", pace.room());
        // One in a while.
        (1..=40).for_each(|n| pace.answered(1, false, at(6000 + 100 * n)));
        assert_eq!(pace.room(), LEAST);
        (1..=6).for_each(|n| pace.answered(1000, false, at(10_000 + 100 * n)));
        assert_eq!(pace.room(), 2048);
        // It did not come to run.
        pace.answered(1, false, at(10_600 + 70));
        assert!((1000..1200).contains(&pace.room()), "{}", pace.room());
        pace.answered(1, false, at(10_600 + 2000));
        assert_eq!(pace.room(), LEAST);
    }

    #[test]
    fn time_with_nothing_under_way_does_not_count() {
        let mut pace = Pace::new(TIMEOUT, 2048);
        for n in 0..100 {
            pace.sent(at(1000 * n));
            pace.answered(1, true, at(1000 * n + 5));
        }
        assert_eq!(pace.room(), FIRST);
    }

    #[test]
    fn without_a_timeout_nothing_is_too_long() {
        let mut pace = Pace::new(0, 500);
        pace.sent(at(0));
        pace.answered(1, false, at(1_000_000));
        assert_eq!(pace.room(), 500);
    }
}
