//! Operations of all nodes, written once over put: ring by ring, so only neighbours talk.
//!
//! ```text
//!   allgather: X rings gather blocks of 1 node, Y rings blocks of X nodes, Z rings blocks of X·Y nodes
//!   buffer of an axis:  place of each node of the ring: number of the put 8 B │ block
//! ```
//! The number shows if the counter was raised by a later put, because the one before was lost and its node did not know it yet.
//! The result is in the order of node numbers. Reductions add in that order, so all nodes get the same bits.

use std::time::{Duration, Instant};

use millstream_torus_core::{Axis, Dimensions, Direction, NodeNumber, Sign};

use crate::{
    ExchangeStatistics, FIRST_COLLECTIVE_COUNTER, Fabric, FabricError, FirstError, LossWatch, Notification,
    RegionId,
};

/// A buffer per axis, because the neighbour on one axis may be ahead of that on another; and two of each in turn, because a
/// neighbour writes the next result while this node reads the last one. It cannot be two operations ahead, as each needs
/// a block of every node.
const BUFFERS: usize = 2 * 3;
/// Bytes before a block.
const HEADER: usize = 8;

/// Buffers and counters of one node for collective operations. All nodes call the same operations in the same order.
///
/// After an operation that timed out or lost a node, all later ones fail with its error: the nodes may have come to different
/// points.
#[derive(Debug)]
pub struct Collectives {
    region: RegionId,
    /// Regions of the next node in each ring.
    next: [(NodeNumber, RegionId); 3],
    previous: [NodeNumber; 3],
    /// Largest number of bytes per node.
    capacity: usize,
    operations: u64,
    /// Puts so far on each axis, as many as the previous node's.
    puts: [u64; 3],
    /// The counters' values before the first put.
    counted: [u64; 3],
    timeout: Duration,
    statistics: ExchangeStatistics,
    losses: LossWatch,
    failure: FirstError,
}

/// How [`Collectives::allreduce`] combines the values of two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, modulo 2⁶⁴.
    Sum,
    /// The smaller one.
    Min,
    /// The larger one.
    Max,
    /// The bits that are set in one of them.
    Or,
}

impl Reduction {
    fn apply(self, a: u64, b: u64) -> u64 {
        match self {
            Reduction::Sum => a.wrapping_add(b),
            Reduction::Min => a.min(b),
            Reduction::Max => a.max(b),
            Reduction::Or => a | b,
        }
    }
}

impl Collectives {
    /// Prepares operations with up to `bytes` per node. Waits end after `timeout`.
    ///
    /// # Errors
    /// [`FabricError`] of the exchange.
    pub fn new<F: Fabric>(
        fabric: &mut F,
        bytes: usize,
        timeout: Duration,
    ) -> Result<Collectives, FabricError> {
        let (torus, here) = (fabric.dimensions(), fabric.here());
        let capacity = bytes.max(1);
        let region = fabric.register(BUFFERS * buffer_bytes(capacity, &torus));
        // From the exchange on, neighbours put. Earlier operations have raised the counters, too.
        let mut counted = [0; 3];
        for (i, counted) in counted.iter_mut().enumerate() {
            *counted = fabric.counter(FIRST_COLLECTIVE_COUNTER + i as u16)?;
        }
        let along = |axis: Axis, sign: Sign| {
            let mut at = torus.coordinates(here);
            at.0[axis.index()] = torus.step(at.on(axis), Direction::new(axis, sign));
            // `step` stays within the ring.
            torus.node(at).unwrap_or(here)
        };
        let losses = LossWatch::new(fabric, Axis::ALL.map(|axis| along(axis, Sign::Plus)));
        let all = fabric.exchange(&region.0.to_le_bytes(), timeout)?;
        let region_of = |node: NodeNumber| {
            let mut id = [0; 8];
            id.copy_from_slice(&all[node.index()]);
            RegionId(u64::from_le_bytes(id))
        };
        let next = Axis::ALL.map(|axis| {
            let node = along(axis, Sign::Plus);
            (node, region_of(node))
        });
        let previous = Axis::ALL.map(|axis| along(axis, Sign::Minus));
        let statistics = ExchangeStatistics::default();
        let failure = FirstError::default();
        Ok(Collectives {
            region,
            next,
            previous,
            capacity,
            operations: 0,
            puts: [0; 3],
            counted,
            timeout,
            statistics,
            losses,
            failure,
        })
    }

    /// Changes the longest wait of later operations.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The bytes of all nodes, in the order of node numbers. All nodes give the same number of bytes.
    ///
    /// # Errors
    /// [`FabricError::Bounds`] if that exceeds the size of [`Collectives::new`]; [`FabricError::NodeLost`] or
    /// [`FabricError::TimedOut`] of this operation, or of an earlier one.
    pub fn allgather<F: Fabric>(&mut self, fabric: &mut F, bytes: &[u8]) -> Result<Vec<u8>, FabricError> {
        self.failure.check()?;
        if bytes.len() > self.capacity {
            let (length, size) = (bytes.len() as u64, self.capacity as u64);
            return Err(FabricError::Bounds { offset: 0, length, size });
        }
        let gathered = self.gather(fabric, bytes);
        self.failure.keep(gathered)
    }

    fn gather<F: Fabric>(&mut self, fabric: &mut F, bytes: &[u8]) -> Result<Vec<u8>, FabricError> {
        let torus = fabric.dimensions();
        let turn = self.operations % 2;
        self.operations += 1;
        let at = torus.coordinates(fabric.here());
        let (start, waited) = (Instant::now(), self.statistics.wait);
        let mut gathered = bytes.to_vec();
        for axis in Axis::ALL {
            let (size, place, block) = (torus.size(axis), at.on(axis), gathered.len());
            let buffer = (turn * 3 + axis.index() as u64) * buffer_bytes(self.capacity, &torus) as u64;
            let offset = |place: u16| buffer + u64::from(place) * (HEADER + block) as u64;
            let (next, region) = self.next[axis.index()];
            let counter = FIRST_COLLECTIVE_COUNTER + axis.index() as u16;
            // By place in the ring.
            let mut blocks = vec![Vec::new(); usize::from(size)];
            blocks[usize::from(place)] = gathered;
            for step in 0..size - 1 {
                let sent = (place + size - step) % size;
                let one = Notification::Counter { index: counter, add: 1 };
                self.losses.check(fabric, next)?;
                self.puts[axis.index()] += 1;
                let number = self.puts[axis.index()];
                let data = [&number.to_le_bytes()[..], &blocks[usize::from(sent)]].concat();
                fabric.put(next, region, offset(sent), &data, one)?;
                self.statistics.messages += 1;
                self.statistics.bytes += data.len() as u64;
                let (value, previous) = (self.counted[axis.index()] + number, self.previous[axis.index()]);
                let sent_at = Instant::now();
                self.losses.wait_counter(fabric, counter, value, previous, self.timeout)?;
                self.statistics.wait += sent_at.elapsed();
                let arrived = (sent + size - 1) % size;
                let (mut header, mut data) = ([0; HEADER], vec![0; block]);
                fabric.load(self.region, offset(arrived), &mut header)?;
                fabric.load(self.region, offset(arrived) + HEADER as u64, &mut data)?;
                if u64::from_le_bytes(header) != number {
                    return Err(FabricError::NodeLost { node: previous });
                }
                blocks[usize::from(arrived)] = data;
            }
            gathered = blocks.concat();
        }
        self.statistics.communicate += start.elapsed().saturating_sub(self.statistics.wait - waited);
        Ok(gathered)
    }

    /// What all operations took so far.
    #[must_use]
    pub fn statistics(&self) -> ExchangeStatistics {
        self.statistics
    }

    /// Waits until all nodes are here.
    ///
    /// # Errors
    /// As [`Collectives::allgather`].
    pub fn barrier<F: Fabric>(&mut self, fabric: &mut F) -> Result<(), FabricError> {
        self.allgather(fabric, &[0]).map(drop)
    }

    /// The sum of each value over all nodes, added in the order of node numbers.
    ///
    /// # Errors
    /// As [`Collectives::allgather`].
    pub fn sum<F: Fabric>(&mut self, fabric: &mut F, values: &[f64]) -> Result<Vec<f64>, FabricError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let all = self.allgather(fabric, &bytes)?;
        let mut sums = vec![0.0; values.len()];
        for (i, word) in all.chunks_exact(8).enumerate() {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            sums[i % values.len()] += f64::from_le_bytes(bytes);
        }
        Ok(sums)
    }

    /// Combines each value over all nodes.
    ///
    /// # Errors
    /// As [`Collectives::allgather`].
    pub fn allreduce<F: Fabric>(
        &mut self,
        fabric: &mut F,
        reduction: Reduction,
        values: &[u64],
    ) -> Result<Vec<u64>, FabricError> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let all = self.allgather(fabric, &bytes)?;
        let mut words = all.chunks_exact(8).map(|word| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            u64::from_le_bytes(bytes)
        });
        let mut results: Vec<u64> = words.by_ref().take(values.len()).collect();
        for (i, word) in words.enumerate() {
            let result = &mut results[i % values.len()];
            *result = reduction.apply(*result, word);
        }
        Ok(results)
    }
}

/// Size of one buffer: the blocks on X have the most headers.
fn buffer_bytes(capacity: usize, torus: &Dimensions) -> usize {
    (HEADER + capacity) * torus.nodes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LocalNode;
    use crate::unreliable::UnreliableNode;

    const LONG: Duration = Duration::from_secs(30);

    /// The next node is away for a moment, and does not know that it was.
    #[test]
    fn a_lost_block_ends_the_operation() {
        let nodes = LocalNode::all("2x1x1".parse().unwrap());
        std::thread::scope(|scope| {
            for node in nodes {
                scope.spawn(move || {
                    let mut node = UnreliableNode::new(node);
                    let other = NodeNumber(1 - node.here().0);
                    let mut collectives = Collectives::new(&mut node, 8, LONG).unwrap();
                    node.lose_next(other);
                    let lost = Err(FabricError::NodeLost { node: other });
                    assert_eq!(collectives.barrier(&mut node), lost);
                    assert_eq!(collectives.barrier(&mut node), lost);
                });
            }
        });
    }

    /// The first node is an operation ahead when its block of the first operation is lost, and does not know it yet.
    #[test]
    fn a_later_block_is_not_taken_for_a_lost_one() {
        let nodes = LocalNode::all("2x1x1".parse().unwrap());
        let [first, mut second] = nodes.try_into().expect("two nodes");
        std::thread::scope(|scope| {
            let received = scope.spawn(move || {
                let mut collectives = Collectives::new(&mut second, 8, LONG).unwrap();
                collectives.allgather(&mut second, &[2])
            });
            let mut node = UnreliableNode::new(first);
            let mut collectives = Collectives::new(&mut node, 8, LONG).unwrap();
            assert_eq!(collectives.allgather(&mut node, &[1]), Ok(vec![1, 2]));
            collectives.set_timeout(Duration::ZERO);
            assert!(collectives.allgather(&mut node, &[3]).is_err());
            node.lose_first(NodeNumber(1));
            node.execute(NodeNumber(1), 1);
            let lost = Err(FabricError::NodeLost { node: NodeNumber(0) });
            assert_eq!(received.join().expect("no panic"), lost);
        });
    }
}
