//! Kernel 1: from the edge list to compressed rows of the vertices of each node.
//!
//! Rows have no self-loops and no duplicates. Both ends of an edge are sent to their owners, some edges at a time.

use millstream_application::Array;
use millstream_fabric::{Fabric, FabricError, Reduction};

use crate::column::Column;
use crate::distribution::Distribution;
use crate::job::BfsError;
use crate::kronecker::Edge;
use crate::network::Network;

/// Edges of a node in one exchange.
const CHUNK: usize = 1 << 19;

/// The graph of one node.
#[derive(Clone, Debug)]
pub struct Graph<C> {
    /// Who owns which vertex.
    pub distribution: Distribution,
    /// The rows of this node's vertices.
    pub rows: Rows<C>,
    /// Entries of all nodes' rows.
    entries: u64,
}

/// The rows of one node: for each of its vertices the indices of its neighbours, in the order of the neighbours' numbers.
#[derive(Clone, Debug)]
pub struct Rows<C> {
    /// Start of each row in `columns`, and the end of the last one.
    pub starts: Array<u64>,
    /// All rows, one after the other.
    pub columns: Array<C>,
}

impl<C: Column> Rows<C> {
    /// Number of neighbours of a vertex of this node.
    #[must_use]
    pub fn degree(&self, place: u64) -> u64 {
        self.starts[place as usize + 1] - self.starts[place as usize]
    }

    /// Whether they are rows of the node's vertices, and refer to nothing that does not exist.
    #[must_use]
    pub fn is_consistent(&self, distribution: &Distribution) -> bool {
        let counts: Vec<u64> = (0..distribution.nodes()).map(|node| distribution.count(node)).collect();
        let exists = |column: &C| {
            let count = counts.get(distribution.owner(column.get()));
            count.is_some_and(|&count| distribution.place(column.get()) < count)
        };
        self.starts.len() as u64 == distribution.own_count() + 1
            && self.starts.first() == Some(&0)
            && self.starts.is_sorted()
            && self.starts.last() == Some(&(self.columns.len() as u64))
            && self.columns.iter().all(exists)
    }
}

impl<C: Column> Graph<C> {
    /// Checks that columns of this width have room for each index. All nodes come to the same result.
    ///
    /// # Errors
    /// [`BfsError::Columns`].
    pub fn check_width(distribution: &Distribution) -> Result<(), BfsError> {
        if distribution.indices() - 1 > C::MAX {
            return Err(BfsError::Columns { vertices: distribution.vertices(), bits: 8 * C::BYTES });
        }
        Ok(())
    }

    /// Builds the rows from this node's part of the edge list. All nodes do so together.
    ///
    /// # Errors
    /// [`BfsError`] of the network, if the columns are too narrow, or if a node has too little memory.
    pub fn build<F: Fabric>(
        network: &mut Network<'_, F>,
        distribution: Distribution,
        edges: &[Edge],
    ) -> Result<Graph<C>, BfsError> {
        Graph::<C>::check_width(&distribution)?;
        let own: Vec<(C, C)> = distribute(network, &distribution, edges)?;
        let (starts, columns) = compress(&own, &distribution);
        let entries = network.allreduce(Reduction::Sum, &[columns.len() as u64])?[0];
        let rows = Rows { starts: starts.into(), columns: columns.into() };
        Ok(Graph { distribution, rows, entries })
    }

    /// Entries of all nodes' rows: two for each distinct edge.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Whether this node owns a vertex and it has a neighbour.
    #[must_use]
    pub fn has_row(&self, vertex: u64) -> bool {
        self.distribution.own_place(vertex).is_some_and(|place| self.rows.degree(place) > 0)
    }
}

/// Sends both ends of each edge to their owners. Returns (place, index of the neighbour) of this node.
fn distribute<F: Fabric, C: Column>(
    network: &mut Network<'_, F>,
    distribution: &Distribution,
    edges: &[Edge],
) -> Result<Vec<(C, C)>, BfsError> {
    let (nodes, here) = (distribution.nodes(), distribution.here());
    let rounds = network.allreduce(Reduction::Max, &[edges.len().div_ceil(CHUNK) as u64])?[0];
    let mut own = network.reserve(2 * edges.len())?;
    for round in 0..rounds as usize {
        let mut messages = vec![Vec::new(); nodes];
        let chunk = &edges[(round * CHUNK).min(edges.len())..((round + 1) * CHUNK).min(edges.len())];
        for edge in chunk {
            let (a, b) = edge.ends();
            if a == b {
                continue;
            }
            let (a, b) = (distribution.index(a), distribution.index(b));
            for (from, to) in [(a, b), (b, a)] {
                let (owner, place) = (distribution.owner(from), C::new(distribution.place(from)));
                if owner == here {
                    own.push((place, C::new(to)));
                } else {
                    place.append(&mut messages[owner]);
                    C::new(to).append(&mut messages[owner]);
                }
            }
        }
        for (message, from) in network.alltoallv(messages)?.iter().zip(network.fabric.dimensions().all()) {
            if message.len() % (2 * C::BYTES) != 0 {
                return Err(FabricError::Malformed { node: from }.into());
            }
            for pair in message.chunks_exact(2 * C::BYTES) {
                let (place, to) = (C::read(pair), C::read(&pair[C::BYTES..]));
                if place.get() >= distribution.own_count() || to.get() >= distribution.indices() {
                    return Err(FabricError::Malformed { node: from }.into());
                }
                own.push((place, to));
            }
        }
    }
    Ok(own)
}

/// Sorts pairs by row, each row by the neighbour's number, and removes duplicates.
fn compress<C: Column>(pairs: &[(C, C)], distribution: &Distribution) -> (Vec<u64>, Vec<C>) {
    let rows = distribution.own_count() as usize;
    let mut starts = vec![0; rows + 1];
    for (place, _) in pairs {
        starts[place.get() as usize + 1] += 1;
    }
    for row in 0..rows {
        starts[row + 1] += starts[row];
    }
    let mut columns = vec![C::NONE; pairs.len()];
    let mut next = starts.clone();
    for &(place, to) in pairs {
        let at = &mut next[place.get() as usize];
        columns[*at as usize] = to;
        *at += 1;
    }
    let mut kept = 0;
    let mut start = 0;
    for row in 0..rows {
        let end = starts[row + 1] as usize;
        columns[start..end].sort_unstable_by_key(|column| distribution.vertex(column.get()));
        starts[row] = kept as u64;
        let first = kept;
        for i in start..end {
            if kept == first || columns[kept - 1] != columns[i] {
                columns[kept] = columns[i];
                kept += 1;
            }
        }
        start = end;
    }
    starts[rows] = kept as u64;
    columns.truncate(kept);
    columns.shrink_to_fit();
    (starts, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_the_order_of_vertices_and_without_duplicates() {
        let pairs = [(2, 5), (0, 7), (2, 5), (2, 1), (0, 7), (0, 3)];
        let (starts, columns) = compress::<u32>(&pairs, &Distribution::new(4, 1, 0));
        assert_eq!((starts, columns), (vec![0, 2, 2, 4, 4], vec![3, 7, 1, 5]));
        // The first vertex of node 1 has number 1, the second one of node 0 number 2.
        let distribution = Distribution::new(8, 2, 0);
        let (one, two) = (distribution.index(1) as u32, distribution.index(2) as u32);
        assert!(one > two);
        assert_eq!(compress(&[(0, two), (0, one)], &distribution).1, vec![one, two]);
    }
}
