//! Which node owns a vertex.
//!
//! Vertex v belongs to node v mod P, where it has place v div P. Inside the graph a vertex has an *index*: owner in the high
//! bits, place in the low ones. So the search needs no division, and bitmaps of the nodes lie side by side.

/// The vertices of a graph on P nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Distribution {
    vertices: u64,
    nodes: u64,
    here: u64,
    /// Bits of a place.
    shift: u32,
}

impl Distribution {
    /// Distributes vertices onto nodes, of which this is number `here`.
    #[must_use]
    pub fn new(vertices: u64, nodes: usize, here: usize) -> Distribution {
        let nodes = nodes as u64;
        // At least 64 places, so that each node's part of a bitmap begins with a word.
        let shift = vertices.div_ceil(nodes).next_power_of_two().trailing_zeros().max(6);
        Distribution { vertices, nodes, here: here as u64, shift }
    }

    /// Number of vertices.
    #[must_use]
    pub fn vertices(&self) -> u64 {
        self.vertices
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes as usize
    }

    /// This node's number.
    #[must_use]
    pub fn here(&self) -> usize {
        self.here as usize
    }

    /// Number of vertices of a node.
    #[must_use]
    pub fn count(&self, node: usize) -> u64 {
        (self.vertices + self.nodes - 1 - node as u64) / self.nodes
    }

    /// Number of vertices of this node.
    #[must_use]
    pub fn own_count(&self) -> u64 {
        self.count(self.here())
    }

    /// Limit of indices.
    #[must_use]
    pub fn indices(&self) -> u64 {
        self.nodes << self.shift
    }

    /// Index of a vertex.
    #[must_use]
    pub fn index(&self, vertex: u64) -> u64 {
        (vertex % self.nodes) << self.shift | (vertex / self.nodes)
    }

    /// Owner of an index.
    #[must_use]
    pub fn owner(&self, index: u64) -> usize {
        (index >> self.shift) as usize
    }

    /// Place of an index at its owner.
    #[must_use]
    pub fn place(&self, index: u64) -> u64 {
        index & ((1 << self.shift) - 1)
    }

    /// Index of a place at a node.
    #[must_use]
    pub fn index_at(&self, node: usize, place: u64) -> u64 {
        (node as u64) << self.shift | place
    }

    /// Vertex of an index.
    #[must_use]
    pub fn vertex(&self, index: u64) -> u64 {
        self.place(index) * self.nodes + (index >> self.shift)
    }

    /// Place of a vertex here, if this node owns it.
    #[must_use]
    pub fn own_place(&self, vertex: u64) -> Option<u64> {
        (vertex % self.nodes == self.here).then_some(vertex / self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_vertex_has_one_owner(vertices in 1_u64..5000, nodes in 1_usize..30) {
            let here = Distribution::new(vertices, nodes, 0);
            prop_assert_eq!((0..nodes).map(|node| here.count(node)).sum::<u64>(), vertices);
            for vertex in 0..vertices {
                let index = here.index(vertex);
                prop_assert!(index < here.indices());
                prop_assert!(here.place(index) < here.count(here.owner(index)));
                prop_assert_eq!(here.vertex(index), vertex);
                prop_assert_eq!(here.index_at(here.owner(index), here.place(index)), index);
            }
        }
    }
}
