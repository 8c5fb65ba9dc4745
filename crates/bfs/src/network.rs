//! A node's messages with all nodes, and the time they take.

use std::time::Duration;

use millstream_fabric::{AllToAll, Collectives, ExchangeStatistics, Fabric, FabricError, Reduction};

use crate::job::BfsError;

/// Bytes that travel at once between two nodes of a ring.
const CAPACITY: usize = 1 << 20;
/// Most bytes of a node in one reduction.
const REDUCED: usize = 256;
/// Counters of [`AllToAll`] begin here.
pub(crate) const FIRST_COUNTER: u16 = 0;

/// A fabric with the buffers of collective operations.
#[derive(Debug)]
pub struct Network<'f, F> {
    /// The fabric.
    pub fabric: &'f mut F,
    all_to_all: AllToAll,
    collectives: Collectives,
}

impl<'f, F: Fabric> Network<'f, F> {
    /// Prepares the operations. All nodes do so together.
    ///
    /// # Errors
    /// [`FabricError`] of the exchange.
    pub fn new(fabric: &'f mut F, timeout: Duration) -> Result<Network<'f, F>, FabricError> {
        let all_to_all = AllToAll::new(fabric, CAPACITY, FIRST_COUNTER, timeout)?;
        let collectives = Collectives::new(fabric, REDUCED, timeout)?;
        Ok(Network { fabric, all_to_all, collectives })
    }

    /// One message to each node, by number, for one of each node.
    ///
    /// # Errors
    /// [`FabricError`].
    pub fn alltoallv(&mut self, messages: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, FabricError> {
        self.all_to_all.alltoallv(self.fabric, messages)
    }

    /// The bytes of all nodes, by number.
    ///
    /// # Errors
    /// [`FabricError`].
    pub fn allgatherv(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, FabricError> {
        self.all_to_all.allgatherv(self.fabric, bytes)
    }

    /// Combines each value over all nodes.
    ///
    /// # Errors
    /// [`FabricError`].
    pub fn allreduce(&mut self, reduction: Reduction, values: &[u64]) -> Result<Vec<u64>, FabricError> {
        self.collectives.allreduce(self.fabric, reduction, values)
    }

    /// An empty list with room for `length` elements. All nodes reserve theirs together, and go on together or not at all.
    ///
    /// # Errors
    /// [`BfsError::Memory`] if a node has too little memory; [`FabricError`].
    pub fn reserve<T>(&mut self, length: usize) -> Result<Vec<T>, BfsError> {
        let mut list = Vec::new();
        let missing = match list.try_reserve_exact(length) {
            Ok(()) => 0,
            Err(_) => length.saturating_mul(size_of::<T>()) as u64,
        };
        match self.allreduce(Reduction::Max, &[missing])?[0] {
            0 => Ok(list),
            bytes => Err(BfsError::Memory { bytes }),
        }
    }

    /// Waits until all nodes are here.
    ///
    /// # Errors
    /// [`FabricError`].
    pub fn barrier(&mut self) -> Result<(), FabricError> {
        self.collectives.barrier(self.fabric)
    }

    /// What all operations took so far.
    #[must_use]
    pub fn statistics(&self) -> ExchangeStatistics {
        let (a, b) = (self.all_to_all.statistics(), self.collectives.statistics());
        ExchangeStatistics {
            communicate: a.communicate + b.communicate,
            wait: a.wait + b.wait,
            messages: a.messages + b.messages,
            bytes: a.bytes + b.bytes,
        }
    }
}
