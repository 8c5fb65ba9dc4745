//! Regions of a node by number.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millstream_fabric::RegionId;
use millstream_torus_core::NodeNumber;

use crate::memory::{Memory, OutOfRange};

/// Ended regions that are remembered, so that their users learn the reason.
const REMEMBERED: usize = 4096;

/// Why a region refuses an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionError {
    /// No such region, or it was deregistered.
    NoRegion,
    /// Its application, or the lease of its card, ended.
    Gone,
    /// The range exceeds it.
    Bounds(OutOfRange),
}

/// Regions of a node.
#[derive(Debug)]
pub struct Regions {
    here: NodeNumber,
    live: BTreeMap<RegionId, Arc<Memory>>,
    gone: BTreeSet<RegionId>,
}

impl Regions {
    pub(super) fn new(here: NodeNumber) -> Regions {
        Regions { here, live: BTreeMap::new(), gone: BTreeSet::new() }
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
        self.live.remove(&id).is_some()
    }

    /// Ends a region whose memory is gone.
    pub fn end(&mut self, id: RegionId) {
        if self.live.remove(&id).is_some() {
            self.remember(id);
        }
    }

    pub(super) fn end_all(&mut self) {
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

    /// The node.
    #[must_use]
    pub fn node(&self) -> NodeNumber {
        self.here
    }
}
