//! Polling before a process sleeps.
//!
//! A wake-up costs more than a packet, so a process that has just worked looks again for a short time. Between looks it
//! yields its core: a peer on the same core goes on at once. A yield that takes long means that the core computes for
//! others. Then the process sleeps, and is woken with priority.

use std::time::{Duration, Instant};

/// Looks between two yields.
const LOOKS: u32 = 2;
/// A yield that takes longer went to a process that computes.
const CROWDED: Duration = Duration::from_micros(400);
/// How long a crowded core is not polled on.
const BACK_OFF: Duration = Duration::from_millis(20);

/// How long a process polls by default.
pub const DEFAULT_POLLING: Duration = Duration::from_micros(50);

/// Decides between two looks whether to look again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Polling {
    limit: Duration,
    looks: u32,
    /// When polling ends; `None`: the process does not poll.
    end: Option<Instant>,
    crowded: Option<Instant>,
}

impl Polling {
    /// Polls for `limit` after [`Polling::begin`].
    pub(crate) fn new(limit: Duration) -> Polling {
        Polling { limit, looks: 0, end: None, crowded: None }
    }

    /// There was work: more may come soon.
    pub(crate) fn begin(&mut self) {
        let now = Instant::now();
        self.crowded = self.crowded.filter(|&crowded| now < crowded + BACK_OFF);
        self.looks = 0;
        self.end = (self.crowded.is_none() && !self.limit.is_zero()).then(|| now + self.limit);
    }

    /// Called after a look that found nothing. False if the process should sleep.
    pub(crate) fn pause(&mut self) -> bool {
        let Some(end) = self.end else { return false };
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOKS) {
            std::hint::spin_loop();
            return true;
        }
        let before = Instant::now();
        std::thread::yield_now();
        let now = Instant::now();
        if now - before > CROWDED {
            self.crowded = Some(now);
        }
        if now >= end || self.crowded.is_some() {
            // After a long yield the caller looks once more before it sleeps.
            self.end = None;
            return now - before > CROWDED;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks until polling ends.
    fn looks(polling: &mut Polling) -> u32 {
        let mut looks = 0;
        while polling.pause() {
            looks += 1;
        }
        looks
    }

    #[test]
    fn polling_ends_at_its_limit_and_begins_only_with_work() {
        let mut polling = Polling::new(Duration::from_millis(2));
        assert_eq!(looks(&mut polling), 0);
        let start = Instant::now();
        polling.begin();
        assert!(looks(&mut polling) > 0);
        // Other tests may compute on this core.
        assert!(start.elapsed() >= Duration::from_millis(2) || polling.crowded.is_some());
        assert_eq!(looks(&mut polling), 0);
        let mut off = Polling::new(Duration::ZERO);
        off.begin();
        assert_eq!(looks(&mut off), 0);
    }

    #[test]
    fn a_crowded_core_is_not_polled_on_for_a_while() {
        let mut polling = Polling::new(Duration::from_millis(1));
        polling.crowded = Some(Instant::now());
        polling.begin();
        assert_eq!(looks(&mut polling), 0);
        polling.crowded = Instant::now().checked_sub(2 * BACK_OFF);
        polling.begin();
        assert!(looks(&mut polling) > 0);
    }
}
