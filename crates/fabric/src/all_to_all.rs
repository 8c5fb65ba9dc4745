//! Messages of any length from every node to every other, dimension by dimension.
//!
//! ```text
//!   on X: a message for node (x, y, z) goes to the node of this ring that has x, with all others that go there
//!   on Y, on Z: likewise, with what has arrived
//! ```
//! A node sends X + Y + Z − 3 messages in place of X·Y·Z − 1, and each travels along one ring.

use std::time::Duration;

use millstream_torus_core::{Axis, Dimensions, NodeNumber};

use crate::{ExchangeStatistics, Fabric, FabricError, FirstError, Neighbourhood};

/// Head of a message in a bundle: source, target, length.
const HEAD: usize = 2 + 2 + 8;

/// A message on its way.
struct Message {
    source: NodeNumber,
    target: NodeNumber,
    data: Vec<u8>,
}

/// Buffers and counters of one node for messages with all nodes. All nodes call the same operations in the same order. After
/// one that failed, all later ones fail with its error.
#[derive(Debug)]
pub struct AllToAll {
    torus: Dimensions,
    here: NodeNumber,
    rings: [Neighbourhood; 3],
    failure: FirstError,
}

impl AllToAll {
    /// Number of counters that it uses in a torus.
    #[must_use]
    pub fn counters(torus: &Dimensions) -> u16 {
        Axis::ALL.iter().map(|&axis| torus.size(axis)).sum()
    }

    /// Prepares messages; up to `capacity` bytes travel at once between two nodes of a ring. It uses
    /// [`AllToAll::counters`] counters from `first_counter` on. All nodes give the same values.
    ///
    /// # Errors
    /// [`FabricError::NoCounter`] if the counters do not suffice, else those of the exchange.
    pub fn new<F: Fabric>(
        fabric: &mut F,
        capacity: usize,
        first_counter: u16,
        timeout: Duration,
    ) -> Result<AllToAll, FabricError> {
        let (torus, here) = (fabric.dimensions(), fabric.here());
        let mut counter = first_counter;
        let mut ring = |axis: Axis| {
            let nodes = ring_nodes(&torus, here, axis);
            let first = counter;
            counter = counter.saturating_add(torus.size(axis));
            Neighbourhood::with_counters(fabric, &nodes, capacity, first, timeout)
        };
        let rings = [ring(Axis::X)?, ring(Axis::Y)?, ring(Axis::Z)?];
        Ok(AllToAll { torus, here, rings, failure: FirstError::default() })
    }

    /// What all operations took so far.
    #[must_use]
    pub fn statistics(&self) -> ExchangeStatistics {
        let mut total = ExchangeStatistics::default();
        for one in self.rings.iter().map(Neighbourhood::statistics) {
            total.communicate += one.communicate;
            total.wait += one.wait;
            total.messages += one.messages;
            total.bytes += one.bytes;
        }
        total
    }

    /// Sends one message to each node, by number, and returns the messages of all nodes, by number.
    ///
    /// # Errors
    /// [`FabricError::NodeLost`], [`FabricError::TimedOut`], [`FabricError::Malformed`] of this operation, or of an earlier one.
    pub fn alltoallv<F: Fabric>(
        &mut self,
        fabric: &mut F,
        messages: Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>, FabricError> {
        debug_assert_eq!(messages.len(), self.torus.nodes(), "one message a node");
        self.failure.check()?;
        let received = self.pass_all(fabric, messages);
        self.failure.keep(received)
    }

    fn pass_all<F: Fabric>(
        &mut self,
        fabric: &mut F,
        messages: Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>, FabricError> {
        if let Some(axis) = self.only_axis() {
            return self.rings[axis.index()].exchange(fabric, messages);
        }
        let mut held: Vec<Message> = (messages.into_iter().zip(self.torus.all()))
            .map(|(data, target)| Message { source: self.here, target, data })
            .collect();
        for axis in self.long_axes() {
            let mut bundles = vec![Vec::new(); usize::from(self.torus.size(axis))];
            for message in held.drain(..).filter(|message| !message.data.is_empty()) {
                let place = self.torus.coordinates(message.target).on(axis);
                append(&mut bundles[usize::from(place)], &message);
            }
            held = self.pass_on(fabric, axis, bundles)?;
        }
        let mut received = vec![Vec::new(); self.torus.nodes()];
        for message in held {
            if message.target != self.here {
                return Err(FabricError::Malformed { node: message.source });
            }
            received[message.source.index()] = message.data;
        }
        Ok(received)
    }

    /// The bytes of all nodes, by number. The lengths may differ.
    ///
    /// # Errors
    /// As [`AllToAll::alltoallv`].
    pub fn allgatherv<F: Fabric>(
        &mut self,
        fabric: &mut F,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, FabricError> {
        self.failure.check()?;
        let gathered = self.gather(fabric, bytes);
        self.failure.keep(gathered)
    }

    fn gather<F: Fabric>(&mut self, fabric: &mut F, bytes: &[u8]) -> Result<Vec<Vec<u8>>, FabricError> {
        if let Some(axis) = self.only_axis() {
            let copies = vec![bytes.to_vec(); self.torus.nodes()];
            return self.rings[axis.index()].exchange(fabric, copies);
        }
        let mut held = vec![Message { source: self.here, target: self.here, data: bytes.to_vec() }];
        for axis in self.long_axes() {
            let mut bundle = Vec::new();
            held.iter().for_each(|message| append(&mut bundle, message));
            held = self.pass_on(fabric, axis, vec![bundle; usize::from(self.torus.size(axis))])?;
        }
        let mut gathered = vec![Vec::new(); self.torus.nodes()];
        for message in held {
            gathered[message.source.index()] = message.data;
        }
        Ok(gathered)
    }

    /// Axes of more than one node.
    fn long_axes(&self) -> impl Iterator<Item = Axis> + use<> {
        let torus = self.torus;
        Axis::ALL.into_iter().filter(move |&axis| torus.size(axis) > 1)
    }

    /// The axis of a torus that is one ring.
    fn only_axis(&self) -> Option<Axis> {
        Axis::ALL.into_iter().find(|&axis| usize::from(self.torus.size(axis)) == self.torus.nodes())
    }

    /// Exchanges bundles within a ring, by place.
    fn pass_on<F: Fabric>(
        &mut self,
        fabric: &mut F,
        axis: Axis,
        bundles: Vec<Vec<u8>>,
    ) -> Result<Vec<Message>, FabricError> {
        let ring = &mut self.rings[axis.index()];
        let received = ring.exchange(fabric, bundles)?;
        let mut messages = Vec::new();
        for (bundle, from) in received.iter().zip(ring.peers()) {
            split(bundle, &self.torus, &mut messages).ok_or(FabricError::Malformed { node: from })?;
        }
        Ok(messages)
    }
}

/// The nodes of a ring through `here`, by place.
fn ring_nodes(torus: &Dimensions, here: NodeNumber, axis: Axis) -> Vec<NodeNumber> {
    let place = |place: u16| {
        let mut at = torus.coordinates(here);
        at.0[axis.index()] = place;
        // The place is below the size of the axis.
        torus.node(at).unwrap_or(here)
    };
    (0..torus.size(axis)).map(place).collect()
}

fn append(bundle: &mut Vec<u8>, message: &Message) {
    bundle.reserve(HEAD + message.data.len());
    bundle.extend(message.source.0.to_le_bytes());
    bundle.extend(message.target.0.to_le_bytes());
    bundle.extend((message.data.len() as u64).to_le_bytes());
    bundle.extend(&message.data);
}

/// Splits a bundle; `None` if it is malformed.
fn split(mut bundle: &[u8], torus: &Dimensions, messages: &mut Vec<Message>) -> Option<()> {
    let node = |bytes: &[u8; 2]| {
        let node = NodeNumber(u16::from_le_bytes(*bytes));
        torus.contains(node).then_some(node)
    };
    while !bundle.is_empty() {
        let (source, rest) = bundle.split_first_chunk()?;
        let (target, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (data, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        messages.push(Message { source: node(source)?, target: node(target)?, data: data.to_vec() });
        bundle = rest;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_bundles_are_refused() {
        let torus: Dimensions = "2x2x1".parse().unwrap();
        let mut bundle = Vec::new();
        append(&mut bundle, &Message { source: NodeNumber(1), target: NodeNumber(3), data: vec![7; 5] });
        let mut messages = Vec::new();
        assert_eq!(split(&bundle, &torus, &mut messages), Some(()));
        assert_eq!((messages.len(), &messages[0].data[..]), (1, &[7; 5][..]));
        for length in 1..bundle.len() {
            assert_eq!(split(&bundle[..length], &torus, &mut Vec::new()), None, "{length}");
        }
        bundle[0] = 4;
        assert_eq!(split(&bundle, &torus, &mut Vec::new()), None, "no node 4");
    }
}
