//! Heisenberg spin glass by over-relaxation.
//!
//! Unit vectors σ on a periodic lattice of three dimensions, H = −Σ J σ·σ over neighbours, J Gaussian with mean 0 and
//! variance 1. An update reflects a spin at its local field, which keeps the energy. A sweep updates all even sites, then
//! all odd ones.
//!
//! [`Block`] has the sites of one node, and [`Sweeper`] makes several sweeps of it within the cache. Both know no network.
//! [`glass`] runs blocks on the nodes of a [`Fabric`](millstream_fabric::Fabric). The spins do not depend on number and shape of nodes,
//! threads, vectors or sweeps between exchanges: they equal [`Reference`] bit for bit.
//!
//! ```
//! use millstream_spin::{Block, Extent, Lattice, Reference, Sweeper};
//!
//! let lattice = Lattice::new([8, 8, 8], 1).unwrap();
//! let extent = Extent { origin: [0; 3], size: [8; 3] };
//! let mut block = Block::<f32>::new(lattice, extent, 2);
//! Sweeper::new(2).sweep(&mut block, 4);
//! let mut reference = Reference::new(lattice);
//! reference.sweep();
//! reference.sweep();
//! assert_eq!(block.checksum(), reference.checksum());
//! ```

mod block;
mod geometry;
pub mod glass;
pub mod kernel;
mod lattice;
mod measure;
mod random;
mod real;
mod reference;
mod rows;
mod sweeps;
mod vectors;

pub use block::Block;
pub use geometry::{Box3, Extent, Geometry};
pub use lattice::{Lattice, LatticeError};
pub use measure::{Measurement, SUMS_BYTES, Sums};
pub use real::Real;
pub use reference::Reference;
pub use sweeps::Sweeper;
pub use vectors::VectorUnit;
