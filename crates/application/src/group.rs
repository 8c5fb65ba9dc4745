//! A node with operations of all nodes.

use std::time::Duration;

use millstream_fabric::{Collectives, Fabric, FabricError, LocalNode};
use millstream_torus_core::{Dimensions, NodeNumber};

/// Bytes that a node gives at once.
const CAPACITY: usize = 4096;

/// A node and its collective operations. All nodes call the same operations in the same order.
#[derive(Debug)]
pub struct NodeGroup<F> {
    /// The node.
    pub fabric: F,
    collectives: Collectives,
    timeout: Duration,
}

impl<F: Fabric> NodeGroup<F> {
    /// Prepares the operations. Waits end after `timeout`.
    ///
    /// # Errors
    /// [`FabricError`] of the exchange.
    pub fn new(mut fabric: F, timeout: Duration) -> Result<NodeGroup<F>, FabricError> {
        let collectives = Collectives::new(&mut fabric, CAPACITY, timeout)?;
        Ok(NodeGroup { fabric, collectives, timeout })
    }

    /// How long waits last at most.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Shape of the torus.
    #[must_use]
    pub fn dimensions(&self) -> Dimensions {
        self.fabric.dimensions()
    }

    /// This node.
    #[must_use]
    pub fn here(&self) -> NodeNumber {
        self.fabric.here()
    }

    /// Whether this node reports for all.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.here() == NodeNumber(0)
    }

    /// Waits until all nodes are here.
    ///
    /// # Errors
    /// [`FabricError::NodeLost`] or [`FabricError::TimedOut`].
    pub fn barrier(&mut self) -> Result<(), FabricError> {
        self.collectives.barrier(&mut self.fabric)
    }

    /// A block of equal size of every node, by number.
    ///
    /// # Errors
    /// As [`NodeGroup::barrier`].
    pub fn all_blocks<const N: usize>(&mut self, block: &[u8; N]) -> Result<Vec<[u8; N]>, FabricError> {
        let all = self.collectives.allgather(&mut self.fabric, block)?;
        Ok(all.as_chunks().0.to_vec())
    }

    /// Bytes of any number of every node, by number.
    ///
    /// # Errors
    /// As [`NodeGroup::barrier`].
    pub fn gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, FabricError> {
        let lengths = self.all_blocks(&(bytes.len() as u64).to_le_bytes())?;
        let lengths: Vec<usize> =
            lengths.into_iter().map(|length| u64::from_le_bytes(length) as usize).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|_| Vec::new()).collect();
        for from in (0..longest).step_by(CAPACITY) {
            let block = (longest - from).min(CAPACITY);
            let mut own = bytes[from.min(bytes.len())..bytes.len().min(from + block)].to_vec();
            own.resize(block, 0);
            let gathered = self.collectives.allgather(&mut self.fabric, &own)?;
            for ((node, part), length) in all.iter_mut().zip(gathered.chunks_exact(block)).zip(&lengths) {
                let wanted = length.saturating_sub(from).min(block);
                node.extend_from_slice(&part[..wanted]);
            }
        }
        Ok(all)
    }
}

/// Runs an application on every node of a torus of threads. Returns the results by node number.
pub fn run_on_threads<R: Send>(torus: Dimensions, application: impl Fn(LocalNode) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let application = &application;
        let threads: Vec<_> =
            LocalNode::all(torus).into_iter().map(|node| scope.spawn(move || application(node))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, R>| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_gather_bytes_of_any_number() {
        let torus: Dimensions = "3x2x1".parse().unwrap();
        let results = run_on_threads(torus, |node| {
            let mut group = NodeGroup::new(node, Duration::from_secs(60)).unwrap();
            let here = usize::from(group.here().0);
            let own: Vec<u8> = (0..here * 3000).map(|i| (i * 7 + here) as u8).collect();
            let all = group.gather(&own).unwrap();
            group.barrier().unwrap();
            all
        });
        for all in results {
            assert_eq!(all.len(), 6);
            for (node, bytes) in all.iter().enumerate() {
                assert_eq!(bytes.len(), node * 3000);
                assert!(bytes.iter().enumerate().all(|(i, &byte)| byte == (i * 7 + node) as u8));
            }
        }
    }
}
