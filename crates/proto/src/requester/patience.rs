//! How long to wait for an answer before asking for one: long where nothing gets lost, so that a peer that is slow is not
//! asked in vain; a few round trips where packets do.

use core::time::Duration;

use crate::sequence::Sequence;
use millstream_quantity::Instant;

/// So many packets must be answered without a loss before losses are not expected any more.
const WARY: u32 = 4096;
/// Never shorter: a peer that waits for its processor is asked in vain.
const LEAST: Duration = Duration::from_micros(100);
/// Round trips that are waited for.
const TRIPS: u32 = 4;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Patience {
    /// The end of a packet whose answer is waited for, and when it was sent.
    timed: Option<(Sequence, Instant)>,
    /// How long an answer takes, smoothed.
    trip: Option<Duration>,
    /// Packets that are to be answered before losses are not expected any more.
    wary: u32,
}

impl Patience {
    /// A packet that ends at `end` leaves: one that asks for an answer, or the oldest that is under way.
    #[inline]
    pub(super) fn sent(&mut self, end: Sequence, now: Instant) {
        self.timed.get_or_insert((end, now));
    }

    /// So many packets, all before `una`, were answered.
    #[inline]
    pub(super) fn answered(&mut self, packets: u32, una: Sequence, now: Instant) {
        if let Some((_, sent)) = self.timed.take_if(|(end, _)| *end <= una) {
            let trip = now.since(sent);
            self.trip = Some(self.trip.map_or(trip, |smooth| (smooth * 7 + trip) / 8));
        }
        self.wary = self.wary.saturating_sub(packets);
    }

    /// A packet was lost. Which of the times that it was sent an answer is to is not known (Karn's rule).
    pub(super) fn lost(&mut self) {
        self.wary = WARY;
        self.timed = None;
    }

    /// How long to wait: `most`, or less where packets get lost; longer if answers take that long.
    pub(super) fn time(&self, most: Duration) -> Duration {
        match self.trip {
            Some(trip) if self.wary > 0 => (trip * TRIPS).max(LEAST).min(most),
            Some(trip) => most.max(trip * 2),
            None => most,
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
    fn only_where_packets_get_lost_is_asked_again_soon() {
        let most = Duration::from_millis(4);
        let first = Sequence::first(Psn::new(7));
        let mut patience = Patience::default();
        patience.sent(first.plus(1), at(0));
        patience.answered(1, first.plus(1), at(80));
        assert_eq!(patience.time(most), most);
        patience.lost();
        assert_eq!(patience.time(most), Duration::from_micros(320));
        patience.answered(WARY, first.plus(2), at(9000));
        assert_eq!(patience.time(most), most);
    }

    #[test]
    fn what_was_lost_is_not_timed() {
        let most = Duration::from_millis(4);
        let first = Sequence::first(Psn::new(7));
        let mut patience = Patience::default();
        patience.sent(first.plus(1), at(0));
        patience.lost();
        patience.answered(1, first.plus(1), at(500));
        assert_eq!(patience.time(most), most, "nothing is known");
        patience.sent(first.plus(2), at(600));
        patience.answered(1, first.plus(2), at(610));
        assert_eq!(patience.time(most), LEAST);
    }
}
