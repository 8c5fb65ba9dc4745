//! Traffic shaping: whose turn it is.
//!
//! If all readout units served builder units in the same order, each builder unit in turn would receive
//! from all of them at once while the others' links are idle. A [`Rotation`] gives turns in cyclic
//! order, and readout unit i starts at builder unit i: as long as all have work for all, the s-th
//! transfer of readout unit i goes to builder unit (i + s) mod M, a permutation at every step. Who has
//! nothing to do is skipped, so no link waits for the shape, and everyone with work has a turn after at
//! most M − 1 others.
//!
//! Turns stay apart only as long as readout units have work for all. If events come one batch after the other
//! and all readout units were idle, all would send the next batch at once, and then, all at the same turn, the
//! next. So the manager gives batches out in whole rounds when it is told [what has been taken](
//! super::Manager::handle_taken).

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The order in which a readout unit serves builder units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Shaped: in rotation, each readout unit from another start.
    #[default]
    Rotation,
    /// Not shaped: in the order of assignment, which is the same for all readout units.
    Assignment,
}

/// Whose turn it is, by a plan's [`Shape`].
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    rotation: Rotation,
    /// Parties in the order in which work for them came, if that decides.
    order: Option<VecDeque<u16>>,
}

impl Turns {
    pub(crate) fn new(shape: Shape, len: usize, start: usize) -> Turns {
        let order = (shape == Shape::Assignment).then(VecDeque::new);
        Turns { rotation: Rotation::new(len, start), order }
    }

    /// There is one more piece of work for the party.
    pub(crate) fn add(&mut self, party: usize) {
        if let Some(order) = &mut self.order {
            order.push_back(party as u16);
        }
    }

    pub(crate) fn set_ready(&mut self, party: usize, ready: bool) {
        self.rotation.set_ready(party, ready);
    }

    /// The party whose turn it is; one piece of work for it is taken.
    pub(crate) fn take(&mut self) -> Option<usize> {
        let Some(order) = &mut self.order else { return self.rotation.take_turn() };
        let first = order.iter().position(|&party| self.rotation.is_ready(party.into()))?;
        order.remove(first).map(usize::from)
    }
}

/// Cyclic turns among `len` parties, some of which are ready.
///
/// A bit set with a moving start: taking a turn costs at most one look at each 64 parties.
#[derive(Clone, Debug)]
pub struct Rotation {
    ready: Vec<u64>,
    len: usize,
    next: usize,
}

impl Rotation {
    /// Nobody ready; the first turn goes to party `start` mod `len`, or the next one ready after it.
    ///
    /// # Panics
    /// If `len` is 0: a [`Plan`](super::Plan) has at least one unit of each kind.
    pub fn new(len: usize, start: usize) -> Rotation {
        assert!(len > 0, "a rotation has at least one party");
        Rotation { ready: vec![0; len.div_ceil(64)], len, next: start % len }
    }

    /// Says whether the party can take a turn.
    pub fn set_ready(&mut self, party: usize, ready: bool) {
        let bit = 1 << (party % 64);
        let word = &mut self.ready[party / 64];
        *word = if ready { *word | bit } else { *word & !bit };
    }

    fn is_ready(&self, party: usize) -> bool {
        self.ready[party / 64] >> (party % 64) & 1 == 1
    }

    /// The party whose turn it is; the next turn goes to someone after it if anyone else is ready.
    pub fn take_turn(&mut self) -> Option<usize> {
        let party = self.first_in(self.next, self.len).or_else(|| self.first_in(0, self.next))?;
        self.next = (party + 1) % self.len;
        Some(party)
    }

    /// The first ready party in `from..to`.
    fn first_in(&self, from: usize, to: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = self.ready.get(word)? & (u64::MAX << (from % 64));
        loop {
            if bits != 0 {
                let party = word * 64 + bits.trailing_zeros() as usize;
                return (party < to).then_some(party);
            }
            word += 1;
            if word * 64 >= to {
                return None;
            }
            bits = self.ready[word];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_ready_makes_a_permutation_at_every_step() {
        let m = 5;
        let mut units: Vec<_> = (0..m).map(|i| Rotation::new(m, i)).collect();
        units.iter_mut().for_each(|unit| (0..m).for_each(|b| unit.set_ready(b, true)));
        for _step in 0..3 * m {
            let mut served: Vec<_> = units.iter_mut().map(|unit| unit.take_turn().unwrap()).collect();
            served.sort_unstable();
            assert_eq!(served, (0..m).collect::<Vec<_>>());
        }
    }

    proptest! {
        /// Against a scan of flags, over sizes around the word boundaries.
        #[test]
        fn takes_the_next_ready_party(
            len in 1usize..200,
            start: usize,
            changes in proptest::collection::vec((any::<usize>(), any::<bool>()), 1..200),
        ) {
            let mut rotation = Rotation::new(len, start);
            let mut flags = vec![false; len];
            let mut next = start % len;
            for (party, ready) in changes {
                rotation.set_ready(party % len, ready);
                flags[party % len] = ready;
                let expected = (0..len).map(|k| (next + k) % len).find(|&k| flags[k]);
                if let Some(party) = expected {
                    next = (party + 1) % len;
                }
                prop_assert_eq!(rotation.take_turn(), expected);
            }
        }

        #[test]
        fn nobody_ready_starves(len in 2usize..150, start: usize) {
            let mut rotation = Rotation::new(len, start);
            (0..len).for_each(|party| rotation.set_ready(party, true));
            let mut seen = vec![0; len];
            (0..3 * len).for_each(|_| seen[rotation.take_turn().unwrap()] += 1);
            prop_assert!(seen.iter().all(|&turns| turns == 3));
        }
    }
}
