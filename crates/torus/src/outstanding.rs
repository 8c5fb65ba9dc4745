//! Operations that an initiator has posted: their places in staging memory, their results, and what flushes report.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use millstream_fabric::{FabricError, LostPuts, RegionId};
use millstream_torus_core::NodeNumber;

use crate::control::Completion;
use crate::engine::Failure;
use crate::staging::Staging;

/// An operation under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) target: NodeNumber,
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// Staging memory to free at the end.
    pub(crate) staged: Option<u64>,
    /// Whether a caller takes the result; else a flush reports a failure.
    pub(crate) awaited: bool,
}

/// Operations of one initiator.
#[derive(Debug)]
pub(crate) struct Outstanding {
    staging: Staging,
    pending: HashMap<u32, Pending>,
    results: HashMap<u32, Result<u64, FabricError>>,
    by_target: BTreeMap<NodeNumber, usize>,
    failures: BTreeMap<NodeNumber, FabricError>,
    lost_puts: BTreeMap<NodeNumber, LostPuts>,
    /// The last region of each node of which a put found that it has ended.
    ended_regions: BTreeMap<NodeNumber, RegionId>,
    /// Targets of puts since the last flush.
    unflushed: BTreeSet<NodeNumber>,
    next_cookie: u32,
}

impl Outstanding {
    pub(crate) fn new() -> Outstanding {
        Outstanding {
            staging: Staging::new(),
            pending: HashMap::new(),
            results: HashMap::new(),
            by_target: BTreeMap::new(),
            failures: BTreeMap::new(),
            lost_puts: BTreeMap::new(),
            ended_regions: BTreeMap::new(),
            unflushed: BTreeSet::new(),
            next_cookie: 0,
        }
    }

    /// Operations under way.
    pub(crate) fn count(&self) -> usize {
        self.pending.len()
    }

    /// Staging memory; `None` until earlier operations have freed some.
    pub(crate) fn stage(&mut self, length: usize) -> Option<u64> {
        self.staging.allocate(length as u64)
    }

    pub(crate) fn free(&mut self, staged: u64) {
        self.staging.free(staged);
    }

    /// Begins an operation. Returns its number.
    pub(crate) fn begin(&mut self, pending: Pending) -> u32 {
        let cookie = self.next_cookie;
        self.next_cookie = self.next_cookie.wrapping_add(1);
        self.pending.insert(cookie, pending);
        if !pending.awaited {
            self.unflushed.insert(pending.target);
        }
        *self.by_target.entry(pending.target).or_default() += 1;
        cookie
    }

    /// An operation has ended. One that does not exist is ignored.
    pub(crate) fn finish(&mut self, done: Completion) {
        let Some(pending) = self.pending.remove(&done.cookie) else { return };
        if let Some(staged) = pending.staged {
            self.staging.free(staged);
        }
        if let Some(count) = self.by_target.get_mut(&pending.target) {
            *count -= 1;
        }
        let result = match done.failure {
            None => Ok(done.value),
            Some(failure) => Err(error_of(failure, &pending)),
        };
        if pending.awaited {
            self.results.insert(done.cookie, result);
        } else if let Err(error) = result {
            self.failures.entry(pending.target).or_insert(error);
            match error {
                FabricError::NodeLost { .. } | FabricError::NoRoute { .. } => {
                    let before = self.lost_puts(pending.target).map_or(0, |lost| lost.count);
                    self.lost_puts.insert(pending.target, LostPuts { count: before + 1, cause: error });
                }
                FabricError::Gone { .. } | FabricError::NoRegion { .. } => {
                    self.ended_regions.insert(pending.target, pending.region);
                }
                _ => {}
            }
        }
    }

    /// Puts to a node that failed because it could not be reached.
    pub(crate) fn lost_puts(&self, target: NodeNumber) -> Option<LostPuts> {
        self.lost_puts.get(&target).copied()
    }

    /// The last region of a node of which a put found that it has ended.
    pub(crate) fn ended_region(&self, target: NodeNumber) -> Option<RegionId> {
        self.ended_regions.get(&target).copied()
    }

    /// The result of an operation that a caller awaits, once.
    pub(crate) fn take_result(&mut self, cookie: u32) -> Option<Result<u64, FabricError>> {
        self.results.remove(&cookie)
    }

    /// Operations under way to a node.
    pub(crate) fn under_way(&self, target: NodeNumber) -> usize {
        self.by_target.get(&target).copied().unwrap_or_default()
    }

    /// Whether nothing is under way to a node.
    pub(crate) fn is_idle(&self, target: NodeNumber) -> bool {
        self.under_way(target) == 0
    }

    /// Ends a flush: whether there were puts since the last one, or the first failure.
    pub(crate) fn flushed(&mut self, target: NodeNumber) -> Result<bool, FabricError> {
        let flushed = self.unflushed.remove(&target);
        self.failures.remove(&target).map_or(Ok(flushed), Err)
    }
}

fn error_of(failure: Failure, pending: &Pending) -> FabricError {
    let (node, region) = (pending.target, pending.region.0);
    let (offset, length) = (pending.offset, pending.length);
    match failure {
        Failure::NoRegion => FabricError::NoRegion { node, region },
        Failure::Bounds(size) => FabricError::Bounds { offset, length, size },
        Failure::Unaligned => FabricError::Unaligned { offset },
        Failure::Access => FabricError::Access { node, region },
        Failure::Gone => FabricError::Gone { node, region },
        Failure::NodeLost => FabricError::NodeLost { node },
        Failure::NoRoute => FabricError::NoRoute { node },
    }
}
