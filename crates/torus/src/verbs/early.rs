//! Completions that arrive before their connection is in use: the neighbour may send as soon as its end is connected.

use std::collections::VecDeque;

use millstream_torus_core::Direction;
use millstream_torus_core::topology::DIRECTIONS;

/// Most completions that are kept.
const LIMIT: usize = 1024;

/// The connections that are being made, and their completions of type `C`, in order of arrival.
#[derive(Debug)]
pub(super) struct EarlyCompletions<C> {
    /// The newest connection of each direction.
    incarnations: [u8; DIRECTIONS],
    kept: VecDeque<(Direction, u8, C)>,
}

impl<C> Default for EarlyCompletions<C> {
    fn default() -> Self {
        Self { incarnations: [0; DIRECTIONS], kept: VecDeque::new() }
    }
}

impl<C> EarlyCompletions<C> {
    /// Begins a connection. Its completions carry the number that this returns.
    pub(super) fn begin(&mut self, direction: Direction) -> u8 {
        // Those of an attempt that was given up would fill the room of its successors.
        self.kept.retain(|(of, ..)| *of != direction);
        let incarnation = &mut self.incarnations[direction.index()];
        *incarnation = incarnation.wrapping_add(1);
        *incarnation
    }

    /// A completion of a connection that is not in use. Those of connections before the newest one mean nothing.
    pub(super) fn keep(&mut self, direction: Direction, incarnation: u8, completion: C) {
        if incarnation == self.incarnations[direction.index()] && self.kept.len() < LIMIT {
            self.kept.push_back((direction, incarnation, completion));
        }
    }

    /// The next completion of a connection that is in use by now.
    pub(super) fn take(&mut self, is_in_use: impl Fn(Direction, u8) -> bool) -> Option<C> {
        let at =
            self.kept.iter().position(|(direction, incarnation, _)| is_in_use(*direction, *incarnation))?;
        self.kept.remove(at).map(|(.., completion)| completion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(early: &mut EarlyCompletions<u32>, direction: Direction, incarnation: u8) -> Vec<u32> {
        let in_use = |of, number| (of, number) == (direction, incarnation);
        std::iter::from_fn(|| early.take(in_use)).collect()
    }

    #[test]
    fn completions_wait_in_order_until_their_connection_is_in_use() {
        let mut early = EarlyCompletions::default();
        let [one, other] = [0, 3].map(|index| Direction::from_index(index).unwrap());
        let incarnations = [one, other].map(|direction| early.begin(direction));
        assert_eq!(early.take(|_, _| false), None);
        for number in 0..6 {
            let at = number as usize % 2;
            early.keep([one, other][at], incarnations[at], number);
        }
        assert_eq!(taken(&mut early, other, incarnations[1]), [1, 3, 5]);
        assert_eq!(taken(&mut early, one, incarnations[0]), [0, 2, 4]);
        assert_eq!(early.take(|_, _| true), None);
    }

    #[test]
    fn completions_of_an_attempt_that_was_given_up_are_dropped() {
        let mut early = EarlyCompletions::default();
        let [one, other] = [0, 3].map(|index| Direction::from_index(index).unwrap());
        let (former, bystander) = (early.begin(one), early.begin(other));
        early.keep(one, former, 0);
        early.keep(other, bystander, 1);
        let next = early.begin(one);
        assert_ne!(former, next);
        early.keep(one, former, 2);
        early.keep(one, next, 3);
        assert_eq!(early.take(|direction, _| direction == one), Some(3));
        assert_eq!(early.take(|_, _| true), Some(1));
        assert_eq!(early.take(|_, _| true), None);
    }

    #[test]
    fn attempts_that_are_given_up_leave_room() {
        let mut early = EarlyCompletions::default();
        let direction = Direction::from_index(0).unwrap();
        for _ in 0..3 {
            let incarnation = early.begin(direction);
            (0..2 * LIMIT as u32).for_each(|number| early.keep(direction, incarnation, number));
        }
        let kept: Vec<_> = std::iter::from_fn(|| early.take(|_, _| true)).collect();
        assert_eq!(kept, (0..LIMIT as u32).collect::<Vec<_>>());
    }
}
