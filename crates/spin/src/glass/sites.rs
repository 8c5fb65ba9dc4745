//! The sites of a node, in host memory or on its card.

use millstream_application::{ApplicationError, NodeGroup, TimeSplit};
use millstream_fabric::Fabric;

use super::card::CardBlock;
use super::halo::HaloExchange;
use crate::block::Block;
use crate::geometry::{Box3, Geometry};
use crate::measure::Sums;
use crate::real::Real;
use crate::sweeps::Sweeper;

/// The sites of a node.
#[derive(Debug)]
pub(super) enum Sites<E> {
    /// In host memory; threads of this process compute.
    Host { block: Block<E>, halos: HaloExchange, sweeper: Sweeper },
    /// In the memory of the node's card; the card computes.
    Card(CardBlock<E>),
}

impl<E: Real> Sites<E> {
    /// The initial sites of a node; all nodes call this.
    pub(super) fn new<F: Fabric>(
        group: &mut NodeGroup<F>,
        geometry: Geometry,
        depth: usize,
        threads: usize,
        on_card: bool,
    ) -> Result<Sites<E>, ApplicationError> {
        if on_card {
            return Ok(Sites::Card(CardBlock::new(group, geometry, depth, threads)?));
        }
        let block = Block::new(*geometry.lattice(), *geometry.extent(), depth);
        let halos = HaloExchange::new(group, &geometry, E::BYTES)?;
        Ok(Sites::Host { block, halos, sweeper: Sweeper::new(threads) })
    }

    /// The layout.
    pub(super) fn geometry(&self) -> &Geometry {
        match self {
            Sites::Host { block, .. } => block.geometry(),
            Sites::Card(block) => block.geometry(),
        }
    }

    /// Fills the halos.
    pub(super) fn exchange<F: Fabric>(
        &mut self,
        group: &mut NodeGroup<F>,
        times: &mut TimeSplit,
    ) -> Result<(), ApplicationError> {
        match self {
            Sites::Host { block, halos, .. } => {
                halos.start(group, block, times)?;
                halos.finish(group, block, times)
            }
            Sites::Card(block) => block.exchange(&mut group.fabric, times),
        }
    }

    /// Makes half-sweeps, even sites first.
    pub(super) fn sweep<F: Fabric>(
        &mut self,
        group: &mut NodeGroup<F>,
        half_sweeps: usize,
    ) -> Result<(), ApplicationError> {
        match self {
            Sites::Host { block, sweeper, .. } => {
                sweeper.sweep(block, half_sweeps);
            }
            Sites::Card(block) => block.sweep(&mut group.fabric, half_sweeps)?,
        }
        Ok(())
    }

    /// Measures the sites.
    pub(super) fn sums<F: Fabric>(&self, group: &mut NodeGroup<F>) -> Result<Sums, ApplicationError> {
        match self {
            Sites::Host { block, .. } => Ok(Sums::of(block)),
            Sites::Card(block) => Ok(block.sums(&mut group.fabric)?),
        }
    }

    /// The spins in a box, as of [`Block::pack`].
    pub(super) fn pack<F: Fabric>(
        &self,
        group: &mut NodeGroup<F>,
        part: &Box3,
    ) -> Result<Vec<u8>, ApplicationError> {
        match self {
            Sites::Host { block, .. } => {
                let mut bytes = Vec::new();
                block.pack(part, &mut bytes);
                Ok(bytes)
            }
            Sites::Card(block) => block.pack(&mut group.fabric, part),
        }
    }

    /// Sets the spins inside to those of a block of the same extent.
    pub(super) fn set<F: Fabric>(
        &mut self,
        group: &mut NodeGroup<F>,
        from: &Block<E>,
    ) -> Result<(), ApplicationError> {
        let inside = from.inside();
        let mut bytes = Vec::new();
        from.pack(&inside, &mut bytes);
        match self {
            Sites::Host { block, .. } => {
                let length = bytes.len();
                block.unpack(&inside, &bytes).map(drop).ok_or(ApplicationError::Message { bytes: length })
            }
            Sites::Card(block) => block.unpack(&mut group.fabric, &inside, &bytes),
        }
    }
}
