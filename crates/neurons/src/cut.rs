//! The columns of each node.

use millstream_torus_core::{Axis, Dimensions, NodeNumber};

use crate::network::{ColumnId, Network, REACH};

/// The division of the grid of columns among the nodes of a torus.
///
/// X nodes divide the grid's x, Y·Z nodes its y. Parts that follow each other in y are neighbours in the torus: z goes up
/// for even places on the torus' y axis and down for odd ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnCut {
    grid: [u32; 2],
    torus: Dimensions,
}

impl ColumnCut {
    /// The division.
    #[must_use]
    pub fn new(network: &Network, torus: Dimensions) -> ColumnCut {
        ColumnCut { grid: network.grid, torus }
    }

    /// The columns of a node, by number. More nodes than columns along an axis leave some without any.
    #[must_use]
    pub fn columns(&self, node: NodeNumber) -> Vec<ColumnId> {
        let at = self.torus.coordinates(node);
        let [nx, ny, nz] = Axis::ALL.map(|axis| u32::from(self.torus.size(axis)));
        let [x, y, z] = Axis::ALL.map(|axis| u32::from(at.on(axis)));
        let part = y * nz + if y % 2 == 0 { z } else { nz - 1 - z };
        let range = |size: u32, part: u32, parts: u32| {
            let start = |part: u32| (u64::from(part) * u64::from(size) / u64::from(parts)) as u32;
            start(part)..start(part + 1)
        };
        let (xs, ys) = (range(self.grid[0], x, nx), range(self.grid[1], part, ny * nz));
        ys.flat_map(|y| xs.clone().map(move |x| x + self.grid[0] * y)).collect()
    }

    /// The columns of all nodes, by node number.
    #[must_use]
    pub fn all(&self) -> Vec<Vec<ColumnId>> {
        self.torus.all().map(|node| self.columns(node)).collect()
    }
}

/// Whether neurons of a column may have synapses in another one.
#[must_use]
pub fn reaches(network: &Network, from: ColumnId, to: ColumnId) -> bool {
    let (a, b) = (network.place(from), network.place(to));
    (0..2).all(|axis| {
        let distance = a[axis].abs_diff(b[axis]);
        distance.min(network.grid[axis] - distance) as usize <= REACH
    })
}
