//! The steps of a search in host memory.

use millstream_fabric::{Fabric, FabricError};

use crate::column::Column;
use crate::graph::Graph;
use crate::job::BfsError;
use crate::network::Network;
use crate::search::SearchSteps;
use crate::traversal::{Found, Traversal};
use crate::validate::Claim;

/// A search in the memory of this program.
#[derive(Debug)]
pub struct HostSearch<C>(Traversal<C>);

impl<C: Column> HostSearch<C> {
    /// Allocates the memory of searches.
    #[must_use]
    pub fn new(graph: Graph<C>) -> HostSearch<C> {
        HostSearch(Traversal::new(graph.distribution, graph.rows))
    }
}

impl<F: Fabric, C: Column> SearchSteps<F> for HostSearch<C> {
    fn start(&mut self, _: &mut Network<'_, F>, root: u64) -> Result<u64, BfsError> {
        Ok(self.0.start(root))
    }

    fn top_down(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError> {
        let nodes = self.0.distribution.nodes();
        let mut messages = vec![Vec::new(); nodes];
        self.0.scan(level, usize::MAX, &mut messages);
        if nodes > 1 {
            let received = network.alltoallv(messages)?;
            for (message, node) in received.iter().zip(network.fabric.dimensions().all()) {
                self.0.receive(message, level).ok_or(FabricError::Malformed { node })?;
            }
        }
        Ok(self.0.end_top_down())
    }

    fn bottom_up(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError> {
        let message = self.0.share_frontier();
        let here = self.0.distribution.here();
        if self.0.distribution.nodes() > 1 {
            let frontiers = network.allgatherv(&message)?;
            for (frontier, node) in frontiers.iter().zip(network.fabric.dimensions().all()) {
                if node.index() != here && !self.0.add_frontier(node.index(), frontier) {
                    return Err(FabricError::Malformed { node }.into());
                }
            }
        }
        Ok(self.0.bottom_up(level))
    }

    fn claim(&mut self, _: &mut Network<'_, F>) -> Result<Claim, BfsError> {
        Ok(Claim::of(&self.0.parents, &self.0.levels))
    }
}
