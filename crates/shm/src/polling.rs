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
/// How long a crowded core is not polled on at first. The time doubles until polling has ended at its limit.
const FIRST_BACK_OFF: Duration = Duration::from_millis(20);
/// How long at most.
const LONGEST_BACK_OFF: Duration = Duration::from_millis(320);

/// The longest limit, which no clock overflows.
const LONGEST: Duration = Duration::from_secs(86_400);

/// How long a process polls by default.
pub const DEFAULT_POLLING: Duration = Duration::from_micros(50);

/// Decides between two looks whether to look again.
#[derive(Clone, Copy, Debug)]
pub struct Polling {
    limit: Duration,
    looks: u32,
    /// When polling ends; `None`: the process does not poll.
    end: Option<Instant>,
    /// When there was work.
    worked: Option<Instant>,
    /// The core is crowded: it is not polled on before this time.
    crowded: Option<Instant>,
    /// How long it is not polled on when it is crowded again.
    back_off: Duration,
}

impl Polling {
    /// Polls for `limit` after [`Polling::begin`].
    #[must_use]
    pub fn new(limit: Duration) -> Polling {
        let limit = limit.min(LONGEST);
        Polling { limit, looks: 0, end: None, worked: None, crowded: None, back_off: FIRST_BACK_OFF }
    }

    /// There was work: more may come soon.
    pub fn begin(&mut self) {
        self.begin_at(Instant::now());
    }

    /// There was work: if there was some within the limit before, too, more may come soon.
    pub fn begin_if_frequent(&mut self) {
        let now = Instant::now();
        let last = self.worked.replace(now);
        if last.is_some_and(|last| now - last < self.limit) {
            self.begin_at(now);
        }
    }

    fn begin_at(&mut self, now: Instant) {
        self.crowded = self.crowded.filter(|&end| now < end);
        self.looks = 0;
        self.end = (self.crowded.is_none() && !self.limit.is_zero()).then(|| now + self.limit);
    }

    /// Called after a look that found nothing. False if the process should sleep.
    pub fn pause(&mut self) -> bool {
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
            self.crowded = Some(now + self.back_off);
            self.back_off = (2 * self.back_off).min(LONGEST_BACK_OFF);
            self.end = None;
            // The caller looks once more before it sleeps.
            return true;
        }
        if now >= end {
            self.end = None;
            self.back_off = FIRST_BACK_OFF;
        }
        self.end.is_some()
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
        let mut longest = Polling::new(Duration::MAX);
        longest.begin();
        assert!(longest.pause());
    }

    #[test]
    fn a_crowded_core_is_not_polled_on_for_a_while() {
        let mut polling = Polling::new(Duration::from_millis(1));
        polling.crowded = Some(Instant::now() + Duration::from_secs(60));
        polling.begin();
        assert_eq!(looks(&mut polling), 0);
        polling.crowded = Some(Instant::now());
        polling.begin();
        assert!(looks(&mut polling) > 0);
    }

    #[test]
    fn rare_work_does_not_begin_polling() {
        let mut polling = Polling::new(Duration::from_millis(2));
        polling.begin_if_frequent();
        assert_eq!(looks(&mut polling), 0);
        std::thread::sleep(Duration::from_millis(3));
        polling.begin_if_frequent();
        assert_eq!(looks(&mut polling), 0);
        polling.worked = Some(Instant::now() + Duration::from_secs(60));
        polling.begin_if_frequent();
        assert!(looks(&mut polling) > 0);
    }
}
