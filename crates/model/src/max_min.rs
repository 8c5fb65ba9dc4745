//! Weighted max-min fair rates of paths that share resources.
//!
//! Progressive filling: all rates grow together, each in proportion to its path's weight, until a resource is full; its paths
//! keep their rates, the others go on (Bertsekas and Gallager, Data Networks, 6.5.2). After a change of weights, only the rates
//! of paths that shared resources connect to the changed ones are computed again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A resource of a [`FairShares`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceId(u32);

impl ResourceId {
    /// As an index: resources are numbered from 0 in the order in which they were added.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A path of a [`FairShares`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SharedPathId(u32);

impl SharedPathId {
    /// As an index: paths are numbered from 0 in the order in which they were added.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Rate of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FairRate {
    /// Rate in the unit of the capacities.
    pub rate: f64,
    /// The full resource that limits it; none if all its resources are unlimited.
    pub limit: Option<ResourceId>,
}

#[derive(Debug)]
struct Resource {
    capacity: f64,
    /// Paths with a weight over this resource.
    paths: Vec<u32>,
    /// Last update that reached this resource; `left` and `unfixed_weight` belong to it.
    round: u64,
    left: f64,
    unfixed_weight: f64,
}

#[derive(Debug)]
struct Path {
    resources: Vec<u32>,
    /// Index of this path in each resource's list, while it has a weight.
    positions: Vec<u32>,
    weight: f64,
    /// Rate per weight.
    level: f64,
    limit: Option<ResourceId>,
    round: u64,
    is_fixed: bool,
}

/// Paths over resources, with their rates.
#[derive(Debug, Default)]
pub struct FairShares {
    resources: Vec<Resource>,
    paths: Vec<Path>,
    /// Paths whose weights have changed since the last update.
    dirty: Vec<u32>,
    round: u64,
}

/// Weight below which a resource has no more paths: other paths leave a rounding error of a sum.
const NO_WEIGHT: f64 = 1e-9;

impl Resource {
    /// Rate per weight of the paths without a rate. Positive floats order like their bits.
    fn fair_level(&self) -> u64 {
        (self.left / self.unfixed_weight).max(f64::MIN_POSITIVE).to_bits()
    }
}

impl FairShares {
    /// Without resources and paths.
    #[must_use]
    pub fn new() -> FairShares {
        FairShares::default()
    }

    /// Adds a resource; its capacity may be infinite.
    pub fn add_resource(&mut self, capacity: f64) -> ResourceId {
        self.resources.push(Resource {
            capacity,
            paths: Vec::new(),
            round: 0,
            left: 0.0,
            unfixed_weight: 0.0,
        });
        ResourceId(self.resources.len() as u32 - 1)
    }

    /// Adds a path with weight 0.
    pub fn add_path(&mut self, resources: &[ResourceId]) -> SharedPathId {
        self.paths.push(Path {
            resources: resources.iter().map(|resource| resource.0).collect(),
            positions: vec![0; resources.len()],
            weight: 0.0,
            level: 0.0,
            limit: None,
            round: 0,
            is_fixed: false,
        });
        SharedPathId(self.paths.len() as u32 - 1)
    }

    /// Sets the weight of a path. Rates change at the next [`FairShares::update`].
    pub fn set_weight(&mut self, path: SharedPathId, weight: f64) {
        let index = path.0;
        let before = std::mem::replace(&mut self.paths[path.index()].weight, weight);
        if before == 0.0 && weight > 0.0 {
            let path = &mut self.paths[index as usize];
            for (position, &resource) in path.positions.iter_mut().zip(&path.resources) {
                let paths = &mut self.resources[resource as usize].paths;
                *position = paths.len() as u32;
                paths.push(index);
            }
        } else if before > 0.0 && weight == 0.0 {
            (0..self.paths[index as usize].resources.len()).for_each(|i| self.leave(index, i));
            let path = &mut self.paths[index as usize];
            (path.level, path.limit) = (0.0, None);
        }
        self.dirty.push(index);
    }

    /// Removes a path from the list of its resource number `i`.
    fn leave(&mut self, index: u32, i: usize) {
        let path = &self.paths[index as usize];
        let (resource, place) = (path.resources[i], path.positions[i]);
        let paths = &mut self.resources[resource as usize].paths;
        paths.swap_remove(place as usize);
        let last = paths.len() as u32;
        if let Some(&moved) = paths.get(place as usize) {
            let moved = &mut self.paths[moved as usize];
            let mut its = moved.resources.iter().zip(&mut moved.positions);
            if let Some((_, position)) = its.find(|(r, position)| **r == resource && **position == last) {
                *position = place;
            }
        }
    }

    /// Whether weights have changed since the last update.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Rate of a path per weight, as of the last update.
    #[must_use]
    pub fn level(&self, path: SharedPathId) -> f64 {
        self.paths[path.index()].level
    }

    /// Rate of a path and what limits it, as of the last update.
    #[must_use]
    pub fn rate(&self, path: SharedPathId) -> FairRate {
        let path = &self.paths[path.index()];
        FairRate { rate: path.level * path.weight, limit: path.limit }
    }

    /// Computes new rates for all paths that the changed weights can affect, and adds these paths to `changed`.
    pub fn update(&mut self, changed: &mut Vec<SharedPathId>) {
        if self.dirty.is_empty() {
            return;
        }
        self.round += 1;
        let first = changed.len();
        let mut reached: Vec<u32> = Vec::new();
        let mut dirty = std::mem::take(&mut self.dirty);
        for index in dirty.drain(..) {
            if self.paths[index as usize].round == self.round {
                continue;
            }
            if self.is_alone(index) {
                self.fill_alone(index);
                changed.push(SharedPathId(index));
                continue;
            }
            for i in 0..self.paths[index as usize].resources.len() {
                let resource = self.paths[index as usize].resources[i];
                if !self.resources[resource as usize].paths.is_empty() {
                    self.reach(resource, &mut reached);
                }
            }
            self.begin(index, changed, &mut reached);
        }
        self.dirty = dirty;
        // All resources and paths that are connected to the changed ones.
        let mut next = 0;
        while next < reached.len() {
            let resource = reached[next] as usize;
            next += 1;
            for k in 0..self.resources[resource].paths.len() {
                self.begin(self.resources[resource].paths[k], changed, &mut reached);
            }
        }
        self.fill(&reached);
        debug_assert!(changed[first..].iter().all(|path| self.paths[path.index()].round == self.round));
    }

    /// Whether no other path uses the path's resources.
    fn is_alone(&self, index: u32) -> bool {
        let path = &self.paths[index as usize];
        path.weight > 0.0 && path.resources.iter().all(|&r| self.resources[r as usize].paths.len() == 1)
    }

    /// The resource with the smallest capacity sets the rate of a path that is alone.
    fn fill_alone(&mut self, index: u32) {
        let path = &mut self.paths[index as usize];
        path.round = self.round;
        (path.level, path.limit) = (f64::INFINITY, None);
        for &resource in &path.resources {
            let level = self.resources[resource as usize].capacity / path.weight;
            if level < path.level {
                (path.level, path.limit) = (level, Some(ResourceId(resource)));
            }
        }
    }

    fn reach(&mut self, resource: u32, reached: &mut Vec<u32>) {
        let state = &mut self.resources[resource as usize];
        if state.round != self.round {
            (state.round, state.left, state.unfixed_weight) = (self.round, state.capacity, 0.0);
            reached.push(resource);
        }
    }

    /// Takes a path with a weight into this update, without a rate.
    fn begin(&mut self, index: u32, changed: &mut Vec<SharedPathId>, reached: &mut Vec<u32>) {
        let path = &mut self.paths[index as usize];
        if path.round == self.round || path.weight == 0.0 {
            return;
        }
        path.round = self.round;
        path.is_fixed = false;
        (path.level, path.limit) = (f64::INFINITY, None);
        changed.push(SharedPathId(index));
        for i in 0..self.paths[index as usize].resources.len() {
            let Path { resources, weight, .. } = &self.paths[index as usize];
            let (resource, weight) = (resources[i], *weight);
            self.reach(resource, reached);
            self.resources[resource as usize].unfixed_weight += weight;
        }
    }

    /// Progressive filling: the resource with the smallest fair level first.
    fn fill(&mut self, reached: &[u32]) {
        let is_limit = |r: &Resource| r.unfixed_weight > NO_WEIGHT && r.capacity.is_finite();
        let mut order: BinaryHeap<Reverse<(u64, u32)>> = (reached.iter())
            .filter(|&&resource| is_limit(&self.resources[resource as usize]))
            .map(|&resource| Reverse((self.resources[resource as usize].fair_level(), resource)))
            .collect();
        while let Some(Reverse((before, resource))) = order.pop() {
            let state = &self.resources[resource as usize];
            if state.unfixed_weight <= NO_WEIGHT {
                continue;
            }
            let now = state.fair_level();
            if now > before {
                order.push(Reverse((now, resource)));
                continue;
            }
            let level = f64::from_bits(now);
            for k in 0..self.resources[resource as usize].paths.len() {
                let path = &mut self.paths[self.resources[resource as usize].paths[k] as usize];
                if std::mem::replace(&mut path.is_fixed, true) {
                    continue;
                }
                (path.level, path.limit) = (level, Some(ResourceId(resource)));
                for &other in &path.resources {
                    let other = &mut self.resources[other as usize];
                    other.left = (other.left - level * path.weight).max(0.0);
                    other.unfixed_weight -= path.weight;
                }
            }
            self.resources[resource as usize].unfixed_weight = 0.0;
        }
    }
}

/// A path with a weight, for [`fair_rates`].
#[derive(Clone, Debug, PartialEq)]
pub struct SharedPath {
    /// Indices of its resources.
    pub resources: Vec<usize>,
    /// Share relative to other paths.
    pub weight: f64,
}

/// Max-min fair rates of paths over resources of these capacities. A path without a limited resource has an infinite rate.
///
/// # Panics
/// If a path names a resource that has no capacity.
#[must_use]
pub fn fair_rates(capacities: &[f64], paths: &[SharedPath]) -> Vec<FairRate> {
    let mut shares = FairShares::new();
    let resources: Vec<ResourceId> =
        capacities.iter().map(|&capacity| shares.add_resource(capacity)).collect();
    let all: Vec<SharedPathId> = (paths.iter())
        .map(|path| {
            let of_path: Vec<ResourceId> = path.resources.iter().map(|&i| resources[i]).collect();
            let id = shares.add_path(&of_path);
            shares.set_weight(id, path.weight);
            id
        })
        .collect();
    shares.update(&mut Vec::new());
    all.into_iter().map(|path| shares.rate(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn path(resources: &[usize]) -> SharedPath {
        SharedPath { resources: resources.to_vec(), weight: 1.0 }
    }

    #[test]
    fn the_remaining_share_of_a_limited_path_goes_to_others() {
        // Bertsekas and Gallager, figure 6.15: three paths over two links of 1, one of them over both; a fourth has 1/4 alone.
        let rates = fair_rates(&[1.0, 1.0, 0.25], &[path(&[0, 1]), path(&[0]), path(&[1]), path(&[0, 2])]);
        let values: Vec<f64> = rates.iter().map(|rate| rate.rate).collect();
        assert_eq!(values, [0.375, 0.375, 0.625, 0.25]);
        assert_eq!(rates[3].limit.map(ResourceId::index), Some(2));
    }

    #[test]
    fn weights_share_and_unlimited_resources_do_not_limit() {
        let half = SharedPath { resources: vec![0, 1], weight: 0.5 };
        let rates = fair_rates(&[3.0, f64::INFINITY], &[half, path(&[0]), path(&[1])]);
        assert_eq!([rates[0].rate, rates[1].rate, rates[2].rate], [1.0, 2.0, f64::INFINITY]);
        assert_eq!(rates[2].limit, None);
    }

    #[test]
    fn a_path_that_is_alone_has_its_slowest_resource() {
        let rates = fair_rates(&[3.0, 2.0, 5.0], &[path(&[0, 1, 2])]);
        assert_eq!((rates[0].rate, rates[0].limit.map(ResourceId::index)), (2.0, Some(1)));
    }

    #[test]
    fn a_path_over_a_resource_twice_takes_two_shares_of_it() {
        let rates = fair_rates(&[3.0], &[path(&[0, 0]), path(&[0])]);
        assert_eq!([rates[0].rate, rates[1].rate], [1.0, 1.0]);
    }

    /// Paths with the resources that random numbers pick of `count`.
    fn picked(picks: &[std::collections::BTreeSet<usize>], count: usize) -> Vec<SharedPath> {
        let one = |set: &std::collections::BTreeSet<usize>| {
            let mut resources: Vec<usize> = set.iter().map(|r| r % count).collect();
            resources.sort_unstable();
            resources.dedup();
            SharedPath { resources, weight: 1.0 }
        };
        picks.iter().map(one).collect()
    }

    proptest! {
        #[test]
        fn no_resource_is_overloaded_and_every_path_has_a_full_one(
            capacities in proptest::collection::vec(0.1f64..10.0, 1..8),
            picks in proptest::collection::vec(proptest::collection::btree_set(0usize..8, 1..5), 1..20),
        ) {
            let paths = picked(&picks, capacities.len());
            let rates = fair_rates(&capacities, &paths);
            let load = |resource: usize| -> f64 {
                paths.iter().zip(&rates).filter(|(p, _)| p.resources.contains(&resource)).map(|(_, r)| r.rate).sum()
            };
            for (resource, capacity) in capacities.iter().enumerate() {
                prop_assert!(load(resource) <= capacity * (1.0 + 1e-9));
            }
            for rate in &rates {
                let limit = rate.limit.unwrap().index();
                prop_assert!(load(limit) >= capacities[limit] * (1.0 - 1e-9));
            }
        }

        #[test]
        fn updates_after_changes_are_what_a_new_computation_finds(
            capacities in proptest::collection::vec(0.1f64..10.0, 1..8),
            picks in proptest::collection::vec(proptest::collection::btree_set(0usize..8, 1..5), 1..16),
            changes in proptest::collection::vec((0usize..16, 0u8..4, any::<bool>()), 1..60),
        ) {
            let mut paths = picked(&picks, capacities.len());
            let mut shares = FairShares::new();
            let resources: Vec<ResourceId> = capacities.iter().map(|&c| shares.add_resource(c)).collect();
            let ids: Vec<SharedPathId> = (paths.iter())
                .map(|path| shares.add_path(&path.resources.iter().map(|&i| resources[i]).collect::<Vec<_>>()))
                .collect();
            paths.iter_mut().for_each(|path| path.weight = 0.0);
            let mut before = vec![0.0; paths.len()];
            for (pick, weight, is_last) in changes {
                let i = pick % paths.len();
                paths[i].weight = f64::from(weight);
                shares.set_weight(ids[i], paths[i].weight);
                if !is_last {
                    continue;
                }
                let mut changed = Vec::new();
                shares.update(&mut changed);
                prop_assert!(!shares.is_dirty());
                let expected = fair_rates(&capacities, &paths);
                for (i, expected) in expected.iter().enumerate() {
                    let found = shares.rate(ids[i]).rate;
                    prop_assert!((found - expected.rate).abs() <= 1e-9, "path {i}: {found}, expected {expected:?}");
                    let is_known = changed.contains(&ids[i]) || paths[i].weight == 0.0;
                    prop_assert!(is_known || (found - before[i]).abs() <= 1e-9, "path {i} changed unannounced");
                    before[i] = found;
                }
            }
        }
    }
}
