//! Traffic shaping: the order in which readout units serve builder units.
//!
//! If all readout units serve builder units in the same order, all send to one builder unit at a time. The
//! links of the other builder units idle. The barrel shifter avoids this: readout unit i starts at builder
//! unit i and continues round-robin. Its s-th transfer goes to builder unit (i + s) mod M. Each step is a
//! permutation. A builder unit without a waiting batch is skipped, so no link waits for the schedule. A
//! builder unit with a waiting batch is served after at most M − 1 others.
//!
//! The steps of readout units stay different only while all have batches for all builder units. If events
//! arrive at a limited rate, all readout units are idle and send each new batch at once. They then stay in
//! step. Therefore the manager assigns batches in rounds of one for each builder unit when
//! [`handle_available`](super::Manager::handle_available) limits the available batches.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The order in which a readout unit serves builder units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrafficShaping {
    /// Round-robin; each readout unit starts at a different builder unit.
    #[default]
    BarrelShifter,
    /// In order of assignment, which is the same for all readout units.
    #[serde(rename = "none")]
    Unshaped,
}

/// The builder unit to serve next, by the plan's [`TrafficShaping`].
#[derive(Clone, Debug)]
pub(crate) struct SendOrder {
    round_robin: RoundRobin,
    /// Without shaping: builder units in the order of assignment.
    order: Option<VecDeque<u16>>,
}

impl SendOrder {
    pub(crate) fn new(traffic_shaping: TrafficShaping, len: usize, start: usize) -> SendOrder {
        let order = (traffic_shaping == TrafficShaping::Unshaped).then(VecDeque::new);
        SendOrder { round_robin: RoundRobin::new(len, start), order }
    }

    /// One more batch waits for `peer`.
    pub(crate) fn add(&mut self, peer: usize) {
        if let Some(order) = &mut self.order {
            order.push_back(peer as u16);
        }
    }

    /// No batch waits for `peer` any more.
    pub(crate) fn remove(&mut self, peer: usize) {
        if let Some(order) = &mut self.order {
            order.retain(|&waiting| usize::from(waiting) != peer);
        }
    }

    pub(crate) fn set_ready(&mut self, peer: usize, ready: bool) {
        self.round_robin.set_ready(peer, ready);
    }

    /// The builder unit to serve; removes one batch from its queue's count.
    pub(crate) fn take(&mut self) -> Option<usize> {
        let Some(order) = &mut self.order else { return self.round_robin.next_ready() };
        let first = order.iter().position(|&peer| self.round_robin.is_ready(peer.into()))?;
        order.remove(first).map(usize::from)
    }
}

/// Round-robin over the ready ones of `len` peers.
///
/// A bit set with a moving start; one query reads at most one word for each 64 peers.
#[derive(Clone, Debug)]
pub struct RoundRobin {
    ready: Vec<u64>,
    len: usize,
    next: usize,
}

impl RoundRobin {
    /// No peer is ready. The first query returns `start` mod `len`, or the next ready peer after it.
    ///
    /// # Panics
    /// If `len` is 0: a [`Plan`](super::Plan) has at least one unit of each kind.
    pub fn new(len: usize, start: usize) -> RoundRobin {
        assert!(len > 0, "a round_robin has at least one peer");
        RoundRobin { ready: vec![0; len.div_ceil(64)], len, next: start % len }
    }

    /// Marks a peer ready or not ready.
    pub fn set_ready(&mut self, peer: usize, ready: bool) {
        let bit = 1 << (peer % 64);
        let word = &mut self.ready[peer / 64];
        *word = if ready { *word | bit } else { *word & !bit };
    }

    /// Whether a peer is ready.
    pub fn has_ready(&self) -> bool {
        self.ready.iter().any(|word| *word != 0)
    }

    fn is_ready(&self, peer: usize) -> bool {
        self.ready[peer / 64] >> (peer % 64) & 1 == 1
    }

    /// The next ready peer. The following query starts behind it.
    pub fn next_ready(&mut self) -> Option<usize> {
        let peer = self.first_in(self.next, self.len).or_else(|| self.first_in(0, self.next))?;
        self.next = (peer + 1) % self.len;
        Some(peer)
    }

    /// The first ready peer in `from..to`.
    fn first_in(&self, from: usize, to: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = self.ready.get(word)? & (u64::MAX << (from % 64));
        loop {
            if bits != 0 {
                let peer = word * 64 + bits.trailing_zeros() as usize;
                return (peer < to).then_some(peer);
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
        let mut units: Vec<_> = (0..m).map(|i| RoundRobin::new(m, i)).collect();
        units.iter_mut().for_each(|unit| (0..m).for_each(|b| unit.set_ready(b, true)));
        for _step in 0..3 * m {
            let mut served: Vec<_> = units.iter_mut().map(|unit| unit.next_ready().unwrap()).collect();
            served.sort_unstable();
            assert_eq!(served, (0..m).collect::<Vec<_>>());
        }
    }

    proptest! {
        /// Compares with a scan of flags, for sizes around the word boundaries.
        #[test]
        fn returns_the_next_ready_peer(
            len in 1usize..200,
            start: usize,
            changes in proptest::collection::vec((any::<usize>(), any::<bool>()), 1..200),
        ) {
            let mut round_robin = RoundRobin::new(len, start);
            let mut flags = vec![false; len];
            let mut next = start % len;
            for (peer, ready) in changes {
                round_robin.set_ready(peer % len, ready);
                flags[peer % len] = ready;
                let expected = (0..len).map(|k| (next + k) % len).find(|&k| flags[k]);
                if let Some(peer) = expected {
                    next = (peer + 1) % len;
                }
                prop_assert_eq!(round_robin.next_ready(), expected);
            }
        }

        #[test]
        fn no_ready_peer_starves(len in 2usize..150, start: usize) {
            let mut round_robin = RoundRobin::new(len, start);
            (0..len).for_each(|peer| round_robin.set_ready(peer, true));
            let mut seen = vec![0; len];
            (0..3 * len).for_each(|_| seen[round_robin.next_ready().unwrap()] += 1);
            prop_assert!(seen.iter().all(|&turns| turns == 3));
        }
    }
}
