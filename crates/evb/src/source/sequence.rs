//! Counts the lost datagrams of one source by their sequence numbers.
//!
//! Numbers near the expected one are gaps, or fill them. A number far from it is believed when several datagrams in a row go on
//! from it: the source has started again, or a long gap ends. A single one may be wrong.

/// Numbers around the expected one that are believed at once: of datagrams that others overtook, and of gaps.
const WINDOW: u64 = 1024;

/// Datagrams in a row, with ascending numbers near each other, after which their source is believed to be that far.
const BELIEVED: u32 = 8;

/// The sequence numbers of a source.
#[derive(Debug)]
pub(super) struct SequenceNumbers {
    /// `None` before the first datagram of a source that sent others before.
    expected: Option<u64>,
    /// Which of the [`WINDOW`] numbers before the expected one are lost, by number modulo the window.
    lost: [u64; WINDOW as usize / 64],
    /// Datagrams in a row that are not near the expected number.
    distant: Option<DistantNumbers>,
}

/// Ascending numbers of datagrams in a row.
#[derive(Clone, Copy, Debug)]
struct DistantNumbers {
    first: u64,
    last: u64,
    datagrams: u32,
}

impl SequenceNumbers {
    /// The first datagram has number 0, or any if the source has sent others before.
    pub(super) fn new(first: Option<u64>) -> SequenceNumbers {
        SequenceNumbers { expected: first, lost: [0; WINDOW as usize / 64], distant: None }
    }

    /// A datagram arrived: corrects the number of lost ones.
    pub(super) fn arrived(&mut self, sequence: u64, lost: &mut u64) {
        let expected = *self.expected.get_or_insert(sequence);
        if let Some(gap) = sequence.checked_sub(expected).filter(|gap| *gap < WINDOW) {
            (expected..sequence).for_each(|number| self.mark(number, true));
            self.mark(sequence, false);
            *lost = lost.saturating_add(gap);
            self.expected = Some(sequence.saturating_add(1));
            self.distant = None;
        } else if sequence < expected && expected - sequence <= WINDOW && self.is_lost(sequence) {
            self.mark(sequence, false);
            *lost = lost.saturating_sub(1);
        } else {
            self.arrived_distant(sequence, expected, lost);
        }
    }

    /// A datagram that is not near the expected one, or has a number that has arrived.
    fn arrived_distant(&mut self, sequence: u64, expected: u64, lost: &mut u64) {
        let goes_on = |known: &DistantNumbers| {
            sequence.checked_sub(known.last).is_some_and(|step| (1..WINDOW).contains(&step))
        };
        let known = match self.distant.filter(goes_on) {
            Some(known) => DistantNumbers { last: sequence, datagrams: known.datagrams + 1, ..known },
            None => DistantNumbers { first: sequence, last: sequence, datagrams: 1 },
        };
        self.distant = Some(known);
        if known.datagrams == BELIEVED {
            // A source that has started again counts from 0: what it sent before the first of these is not known.
            let before = known.first.saturating_sub(expected);
            let among = known.last - known.first + 1 - u64::from(known.datagrams);
            *lost = lost.saturating_add(before).saturating_add(among);
            *self = SequenceNumbers::new(Some(sequence.saturating_add(1)));
        }
    }

    fn mark(&mut self, number: u64, is_lost: bool) {
        let at = (number % WINDOW) as usize;
        let bit = 1 << (at % 64);
        if is_lost {
            self.lost[at / 64] |= bit;
        } else {
            self.lost[at / 64] &= !bit;
        }
    }

    fn is_lost(&self, number: u64) -> bool {
        let at = (number % WINDOW) as usize;
        self.lost[at / 64] >> (at % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost_of(numbers: impl IntoIterator<Item = u64>) -> u64 {
        let mut source = SequenceNumbers::new(Some(0));
        let mut lost = 0;
        numbers.into_iter().for_each(|number| source.arrived(number, &mut lost));
        lost
    }

    #[test]
    fn gaps_are_lost_until_they_are_filled() {
        assert_eq!(lost_of([0, 1, 5, 3, 6]), 2);
        // The same datagram fills no second gap.
        assert_eq!(lost_of([0, 1, 5, 3, 3, 3, 1, 6]), 2);
        assert_eq!(lost_of((0..3000).chain([4000]).chain(3000..4000)), 0);
    }

    #[test]
    fn a_source_that_starts_again_is_counted_from_there() {
        let before = (0..1_000_000).filter(|number| number % 1000 != 7);
        let after = (0..5000).filter(|number| number % 100 != 50);
        assert_eq!(lost_of(before.chain(after.clone())), 1000 + 50);
        // Shortly after its first start.
        assert_eq!(lost_of((0..500).filter(|number| number % 100 != 7).chain(after)), 5 + 50);
    }

    #[test]
    fn a_single_wrong_number_counts_nothing() {
        for wrong in [u64::MAX, 1 << 40, 5000] {
            assert_eq!(lost_of((0..100).chain([wrong]).chain(100..200).chain([wrong]).chain(201..300)), 1);
        }
        assert_eq!(lost_of((0..100).chain([u64::MAX; 20]).chain(100..200)), 0);
        assert_eq!(lost_of((0..5000).chain([3]).chain(5000..6000)), 0);
    }

    #[test]
    fn a_long_gap_is_lost() {
        assert_eq!(lost_of((0..100).chain(1_000_000..1_000_100)), 1_000_000 - 100);
        assert_eq!(lost_of((0..100).chain(u64::MAX - 10..=u64::MAX)), u64::MAX - 110);
    }
}
