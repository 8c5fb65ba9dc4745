//! The lattice, and its division into blocks.

use millstream_torus_core::{Axis, Coordinates, Dimensions, NodeNumber};

use crate::geometry::Extent;
use crate::random::unit_vector;

/// A periodic lattice with the spins and couplings of a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lattice {
    /// Sites on each axis: even, at least 4.
    pub size: [usize; 3],
    /// The seed.
    pub seed: u64,
}

/// A lattice, or its division, that is not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LatticeError {
    /// An odd or too small number of sites.
    #[error(
        "the lattice has {size} sites in {axis}; it needs an even number, at least 4, so that parities alternate"
    )]
    Size {
        /// The axis.
        axis: char,
        /// The number of sites.
        size: usize,
    },
    /// More sites than numbers.
    #[error("the lattice has more than 2^40 sites")]
    TooLarge,
    /// Blocks that are thinner than their halos.
    #[error(
        "{nodes} nodes cut {size} sites in {axis} into blocks of {block}; \
         {depth} sweeps between exchanges need blocks of at least {needed}: use fewer nodes or a lower --depth"
    )]
    Thin {
        /// The axis.
        axis: char,
        /// Nodes along the axis.
        nodes: u16,
        /// Sites along the axis.
        size: usize,
        /// The smallest block.
        block: usize,
        /// Sweeps between exchanges.
        depth: usize,
        /// The smallest block that is possible.
        needed: usize,
    },
}

const AXES: [char; 3] = ['x', 'y', 'z'];

impl Lattice {
    /// A lattice.
    ///
    /// # Errors
    /// [`LatticeError`].
    pub fn new(size: [usize; 3], seed: u64) -> Result<Lattice, LatticeError> {
        for (axis, &size) in AXES.into_iter().zip(&size) {
            if size < 4 || size % 2 != 0 {
                return Err(LatticeError::Size { axis, size });
            }
        }
        let sites = size.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
        match sites {
            Some(sites) if sites as u64 <= 1 << 40 => Ok(Lattice { size, seed }),
            _ => Err(LatticeError::TooLarge),
        }
    }

    /// Number of sites.
    #[must_use]
    pub fn sites(&self) -> u64 {
        self.size.iter().product::<usize>() as u64
    }

    /// Number of the site at global coordinates.
    #[must_use]
    pub fn number(&self, [x, y, z]: [usize; 3]) -> u64 {
        (x + self.size[0] * (y + self.size[1] * z)) as u64
    }

    /// The initial spin of the site at coordinates local to an extent.
    #[must_use]
    pub fn initial_spin(&self, extent: Extent, at: [isize; 3]) -> [f64; 3] {
        let global = std::array::from_fn(|a| {
            (extent.origin[a] as isize + at[a]).rem_euclid(self.size[a] as isize) as usize
        });
        unit_vector(self.seed, self.number(global))
    }

    /// The extent of a node. Blocks along x begin at even coordinates.
    ///
    /// # Errors
    /// [`LatticeError::Thin`].
    pub fn extent(&self, torus: Dimensions, node: NodeNumber, depth: usize) -> Result<Extent, LatticeError> {
        let at: Coordinates = torus.coordinates(node);
        let mut extent = Extent { origin: [0; 3], size: [0; 3] };
        for axis in Axis::ALL {
            let (a, nodes) = (axis.index(), torus.size(axis));
            // Units that are not divided.
            let unit = if a == 0 { 2 } else { 1 };
            let units = self.size[a] / unit;
            let start = |place: u16| usize::from(place) * units / usize::from(nodes) * unit;
            let place = at.on(axis);
            extent.origin[a] = start(place);
            extent.size[a] = start(place + 1) - start(place);
            let block = units / usize::from(nodes) * unit;
            let needed = if nodes == 1 { 2 } else { 2 * depth };
            if block < needed.max(1) {
                let (axis, size) = (AXES[a], self.size[a]);
                return Err(LatticeError::Thin { axis, nodes, size, block, depth, needed });
            }
        }
        Ok(extent)
    }
}
