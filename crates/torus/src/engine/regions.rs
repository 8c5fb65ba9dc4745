//! Regions of a node by number.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millstream_fabric::RegionId;
use millstream_torus_core::{NodeNumber, Port};

use crate::memory::{Memory, OutOfRange};

/// Ended regions that are remembered, so that their users learn the reason.
const REMEMBERED: usize = 4096;

/// What hosts outside of the torus may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutsideAccess {
    /// Gets.
    Read,
    /// Gets, puts and atomic operations.
    ReadWrite,
}

/// Why a region refuses an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionError {
    /// No such region, or it was deregistered.
    NoRegion,
    /// Its application, or the lease of its card, ended.
    Gone,
    /// It is not published for hosts outside of the torus, or not for writing.
    NotPublished,
    /// The range exceeds it.
    Bounds(OutOfRange),
}

/// Regions of a node.
#[derive(Debug)]
pub struct Regions {
    here: NodeNumber,
    live: BTreeMap<RegionId, Arc<Memory>>,
    gone: BTreeSet<RegionId>,
    published: BTreeMap<RegionId, OutsideAccess>,
}

impl Regions {
    pub(super) fn new(here: NodeNumber) -> Regions {
        Regions { here, live: BTreeMap::new(), gone: BTreeSet::new(), published: BTreeMap::new() }
    }

    /// Adds memory under an unguessable number.
    pub fn add(&mut self, memory: Arc<Memory>) -> RegionId {
        let id = RegionId(millstream_shm::random_u64());
        self.live.insert(id, memory);
        id
    }

    /// Adds memory under a number that all nodes of the run know.
    pub fn add_known(&mut self, id: RegionId, memory: Arc<Memory>) {
        self.gone.remove(&id);
        self.live.insert(id, memory);
    }

    /// Ends a region. Packets under way keep its memory. Returns whether it was there.
    pub fn remove(&mut self, id: RegionId) -> bool {
        self.published.remove(&id);
        self.live.remove(&id).is_some()
    }

    /// Lets hosts outside of the torus use a region. Returns whether it is live.
    pub fn publish(&mut self, id: RegionId, access: OutsideAccess) -> bool {
        let is_live = self.live.contains_key(&id);
        if is_live {
            self.published.insert(id, access);
        }
        is_live
    }

    /// Ends a region whose memory is gone.
    pub fn end(&mut self, id: RegionId) {
        self.published.remove(&id);
        if self.live.remove(&id).is_some() {
            self.remember(id);
        }
    }

    pub(super) fn end_all(&mut self) {
        self.published.clear();
        for id in std::mem::take(&mut self.live).into_keys() {
            self.remember(id);
        }
    }

    /// Ends regions of cards whose lease has ended.
    pub(super) fn end_dead(&mut self) {
        let dead: Vec<_> =
            self.live.iter().filter(|(_, memory)| !memory.is_live()).map(|(&id, _)| id).collect();
        dead.into_iter().for_each(|id| self.end(id));
    }

    fn remember(&mut self, id: RegionId) {
        if self.gone.len() >= REMEMBERED {
            self.gone.pop_first();
        }
        self.gone.insert(id);
    }

    /// Number of live regions.
    #[must_use]
    pub fn count(&self) -> usize {
        self.live.len()
    }

    /// The memory of a range.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn range(&self, id: RegionId, offset: u64, length: u64) -> Result<&Arc<Memory>, RegionError> {
        let Some(memory) = self.live.get(&id) else {
            return Err(if self.gone.contains(&id) { RegionError::Gone } else { RegionError::NoRegion });
        };
        if !memory.is_live() {
            return Err(RegionError::Gone);
        }
        memory.check(offset, length).map_err(RegionError::Bounds)?;
        Ok(memory)
    }

    /// The memory of a range that an operation of a port writes.
    ///
    /// # Errors
    /// [`RegionError`].
    pub(super) fn written(
        &self,
        port: Port,
        id: RegionId,
        offset: u64,
        length: u64,
    ) -> Result<&Arc<Memory>, RegionError> {
        self.permitted(port, id, |access| access == OutsideAccess::ReadWrite)?;
        self.range(id, offset, length)
    }

    /// The memory of a range that an operation of a port reads.
    ///
    /// # Errors
    /// [`RegionError`].
    pub(super) fn read(
        &self,
        port: Port,
        id: RegionId,
        offset: u64,
        length: u64,
    ) -> Result<&Arc<Memory>, RegionError> {
        self.permitted(port, id, |_| true)?;
        self.range(id, offset, length)
    }

    fn permitted(
        &self,
        port: Port,
        id: RegionId,
        suffices: impl Fn(OutsideAccess) -> bool,
    ) -> Result<(), RegionError> {
        let published = || self.published.get(&id).is_some_and(|&access| suffices(access));
        if port == Port::Local || !self.live.contains_key(&id) || published() {
            return Ok(());
        }
        Err(RegionError::NotPublished)
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> NodeNumber {
        self.here
    }
}
