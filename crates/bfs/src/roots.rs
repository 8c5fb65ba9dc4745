//! Search keys: distinct vertices with an edge to another vertex, drawn as the reference code does.

use millstream_fabric::{Fabric, Reduction};

use crate::graph::Graph;
use crate::job::BfsError;
use crate::mrg::{Jump, Mrg};
use crate::network::Network;

/// Candidates that are checked at once.
const BATCH: usize = 64;

/// Candidates in the order of drawing; some may be isolated or repeated.
#[derive(Clone, Copy, Debug)]
pub struct Candidates {
    numbers: Mrg,
    vertices: u64,
    left: u64,
}

impl Candidates {
    /// Candidates for a graph with this number of vertices; as many as vertices.
    #[must_use]
    pub fn new(seeds: (u64, u64), vertices: u64) -> Candidates {
        let numbers = Mrg::from_seeds(seeds.0, seeds.1).after(&Jump::steps([0, 0, 2]));
        Candidates { numbers, vertices, left: vertices }
    }
}

impl Iterator for Candidates {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        let sum = self.numbers.draw_unit() + self.numbers.draw_unit();
        Some((sum * self.vertices as f64) as u64 % self.vertices)
    }
}

/// Draws up to `count` roots; fewer if the graph does not have that many.
///
/// # Errors
/// [`BfsError`] of the network.
pub fn draw<F: Fabric, C: crate::column::Column>(
    network: &mut Network<'_, F>,
    graph: &Graph<C>,
    seeds: (u64, u64),
    count: usize,
) -> Result<Vec<u64>, BfsError> {
    let mut candidates = Candidates::new(seeds, graph.distribution.vertices());
    let mut roots = Vec::new();
    loop {
        let batch: Vec<u64> = candidates.by_ref().take(BATCH).collect();
        if batch.is_empty() || roots.len() >= count {
            return Ok(roots);
        }
        let bits = batch.iter().rev().fold(0, |bits, &root| bits << 1 | u64::from(graph.has_row(root)));
        let joined = network.allreduce(Reduction::Or, &[bits])?[0];
        for (i, &root) in batch.iter().enumerate() {
            if joined >> i & 1 == 1 && roots.len() < count && !roots.contains(&root) {
                roots.push(root);
            }
        }
    }
}
