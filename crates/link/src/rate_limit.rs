//! A token bucket.

use std::time::{Duration, Instant};

/// Admits a number of events per second, and a burst of them at once.
#[derive(Debug)]
pub(crate) struct RateLimit {
    interval: Duration,
    burst: Duration,
    /// Time at which the bucket is full again.
    full_at: Option<Instant>,
}

impl RateLimit {
    /// `rate` events per second, `burst` events at once.
    pub(crate) fn new(rate: u32, burst: u32) -> Self {
        let interval = Duration::from_secs(1) / rate;
        Self { interval, burst: interval * burst, full_at: None }
    }

    /// Whether an event at this time is within the limit.
    pub(crate) fn admit(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |full_at| full_at.max(now)) + self.interval;
        let admitted = full_at - now <= self.burst;
        if admitted {
            self.full_at = Some(full_at);
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_the_rate_are_admitted() {
        let mut limit = RateLimit::new(1000, 10);
        let start = Instant::now();
        let admitted =
            |limit: &mut RateLimit, at: Duration| (0..100).filter(|_| limit.admit(start + at)).count();
        assert_eq!(admitted(&mut limit, Duration::ZERO), 10);
        assert_eq!(admitted(&mut limit, Duration::from_millis(3)), 3);
        assert_eq!(admitted(&mut limit, Duration::from_secs(5)), 10);
    }
}
