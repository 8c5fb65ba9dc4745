//! How many packets may be under way, and how long their answers take.
//!
//! The responder takes packets in order only, so each packet that is lost takes those under way behind it along
//! (go-back-N, 9.7.5.2.8). In a network that loses packets the window therefore shrinks: by half at each loss, and it
//! grows again by a few packets each time that a whole window was answered. Such a window settles near √(2·4/p)
//! packets at a loss of p, about where the packets that are sent in vain cost as much as the waiting for
//! answers. How many requests are under way is the requester's choice (9.7.1).

use core::time::Duration;

use crate::sequence::Sequence;
use crate::time::Instant;

/// The window never shrinks below this.
const LEAST: u32 = 8;
/// By how many packets it grows.
const STEP: u32 = 4;
/// One packet in this many asks for an acknowledgement in the middle of a message.
const ASK_EVERY: u32 = 64;
/// So many packets must be answered without a loss before losses are not expected any more.
const WARY: u32 = 4096;
/// The last packet is not sent once more earlier than this, however quick answers are.
/// A peer that waits for its processor for longer is asked in vain.
const LEAST_PROBE: Duration = Duration::from_micros(250);

#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    most: u32,
    window: u32,
    /// Packets that were answered since the window grew.
    answered: u32,
    /// A packet that asked for an answer, and when it was sent; nothing was sent again since.
    timed: Option<(Sequence, Instant)>,
    /// How long an answer takes, smoothed.
    trip: Option<Duration>,
    /// Packets that are to be answered before losses are not expected any more.
    wary: u32,
}

impl Flight {
    pub(super) fn new(most: u32) -> Self {
        Self { most, window: most, answered: 0, timed: None, trip: None, wary: 0 }
    }

    /// Packets that may be under way.
    #[inline]
    pub(super) fn window(&self) -> u32 {
        self.window
    }

    /// After so many packets an acknowledgement is asked for. A window that has shrunk is answered by halves, so that
    /// the other half is under way meanwhile.
    #[inline]
    pub(super) fn ask_every(&self) -> u32 {
        if self.window < self.most { ASK_EVERY.min(self.window / 2) } else { ASK_EVERY }
    }

    /// A packet that asks for an answer, the last one before `end`, is sent for the first time.
    #[inline]
    pub(super) fn sent(&mut self, end: Sequence, now: Instant) {
        self.timed.get_or_insert((end, now));
    }

    /// So many packets, all before `una`, were answered.
    pub(super) fn answered(&mut self, packets: u32, una: Sequence, now: Instant) {
        if let Some((_, sent)) = self.timed.take_if(|(end, _)| *end <= una) {
            let trip = now.since(sent);
            self.trip = Some(self.trip.map_or(trip, |smooth| (smooth * 7 + trip) / 8));
        }
        self.wary = self.wary.saturating_sub(packets);
        if self.window < self.most {
            self.answered += packets;
            if self.answered >= self.window {
                self.answered = 0;
                self.window = (self.window + STEP).min(self.most);
            }
        }
    }

    /// A packet was lost: those behind it were sent in vain.
    pub(super) fn lost(&mut self) {
        self.window = (self.window / 2).max(LEAST).min(self.most);
        self.answered = 0;
        self.wary = WARY;
        // Which of the packets the answer is to is not known (Karn's rule).
        self.timed = None;
    }

    /// How long to wait for an answer before asking again: `most`, or a few times what answers take where packets
    /// get lost.
    pub(super) fn patience(&self, most: Duration) -> Duration {
        match self.trip {
            Some(trip) if self.wary > 0 => (trip * 4).max(LEAST_PROBE).min(most),
            _ => most,
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
    fn the_window_shrinks_at_losses_and_recovers() {
        let mut flight = Flight::new(128);
        flight.lost();
        assert_eq!((flight.window(), flight.ask_every()), (64, 32));
        (0..9).for_each(|_| flight.lost());
        assert_eq!((flight.window(), flight.ask_every()), (LEAST, 4));
        let una = Sequence::first(Psn::new(0));
        (0..10_000).for_each(|_| flight.answered(1, una, at(0)));
        assert_eq!((flight.window(), flight.ask_every()), (128, 64));
    }

    #[test]
    fn a_window_that_was_small_stays_so() {
        let mut flight = Flight::new(3);
        flight.lost();
        assert_eq!((flight.window(), flight.ask_every()), (3, ASK_EVERY));
    }

    #[test]
    fn only_where_packets_get_lost_is_asked_again_soon() {
        let most = Duration::from_millis(4);
        let first = Sequence::first(Psn::new(7));
        let mut flight = Flight::new(128);
        flight.sent(first.plus(1), at(0));
        flight.answered(1, first.plus(1), at(80));
        assert_eq!(flight.patience(most), most);
        flight.lost();
        assert_eq!(flight.patience(most), Duration::from_micros(320));
        // What was sent again says nothing about how long answers take.
        flight.sent(first.plus(2), at(100));
        flight.lost();
        flight.answered(1, first.plus(2), at(9000));
        assert_eq!(flight.patience(most), Duration::from_micros(320));
        flight.answered(WARY, first.plus(2), at(9000));
        assert_eq!(flight.patience(most), most);
    }
}
