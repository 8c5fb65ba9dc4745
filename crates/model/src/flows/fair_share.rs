//! Weighted max-min fair rates of paths that share resources.
//!
//! Progressive filling: all rates grow together until a resource is full; its paths keep their rates, the others go on
//! (Bertsekas and Gallager, Data Networks, 6.5.2).

/// A path over resources.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedPath {
    /// Indices of its resources.
    pub resources: Vec<usize>,
    /// Share relative to other paths.
    pub weight: f64,
}

/// Rate of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FairRate {
    /// Rate in the unit of the capacities.
    pub rate: f64,
    /// The full resource that limits it; none if all its resources are unlimited.
    pub limit: Option<usize>,
}

/// Max-min fair rates. A path without a limited resource has an infinite rate.
#[must_use]
pub fn fair_rates(capacities: &[f64], paths: &[SharedPath]) -> Vec<FairRate> {
    let mut left = capacities.to_vec();
    let mut weights = vec![0.0; capacities.len()];
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); capacities.len()];
    let mut rates = vec![FairRate { rate: f64::INFINITY, limit: None }; paths.len()];
    for (i, path) in paths.iter().enumerate() {
        for &resource in path.resources.iter().filter(|&&resource| capacities[resource].is_finite()) {
            weights[resource] += path.weight;
            users[resource].push(i);
        }
    }
    let share = |left: f64, weight: f64| (left / weight).max(0.0);
    // A sum of weights that other paths have left is not exactly zero.
    let is_used = |weight: f64| weight > 1e-9;
    while let Some(full) = (0..capacities.len())
        .filter(|&resource| is_used(weights[resource]))
        .min_by(|&a, &b| share(left[a], weights[a]).total_cmp(&share(left[b], weights[b])))
    {
        let level = share(left[full], weights[full]);
        for &i in &std::mem::take(&mut users[full]) {
            if rates[i].limit.is_some() {
                continue;
            }
            let rate = level * paths[i].weight;
            rates[i] = FairRate { rate, limit: Some(full) };
            for &resource in &paths[i].resources {
                left[resource] -= rate;
                weights[resource] -= paths[i].weight;
            }
        }
        weights[full] = 0.0;
    }
    rates
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
        assert_eq!(rates[3].limit, Some(2));
    }

    #[test]
    fn weights_share_and_unlimited_resources_do_not_limit() {
        let half = SharedPath { resources: vec![0, 1], weight: 0.5 };
        let rates = fair_rates(&[3.0, f64::INFINITY], &[half, path(&[0]), path(&[1])]);
        assert_eq!([rates[0].rate, rates[1].rate, rates[2].rate], [1.0, 2.0, f64::INFINITY]);
    }

    proptest! {
        #[test]
        fn no_resource_is_overloaded_and_every_path_has_a_full_one(
            capacities in proptest::collection::vec(0.1f64..10.0, 1..8),
            picks in proptest::collection::vec(proptest::collection::btree_set(0usize..8, 1..5), 1..20),
        ) {
            let count = capacities.len();
            let paths: Vec<SharedPath> = picks
                .iter()
                .map(|set| {
                    let mut resources: Vec<usize> = set.iter().map(|r| r % count).collect();
                    resources.sort_unstable();
                    resources.dedup();
                    SharedPath { resources, weight: 1.0 }
                })
                .collect();
            let rates = fair_rates(&capacities, &paths);
            let load = |resource: usize| -> f64 {
                paths.iter().zip(&rates).filter(|(p, _)| p.resources.contains(&resource)).map(|(_, r)| r.rate).sum()
            };
            for (resource, capacity) in capacities.iter().enumerate() {
                prop_assert!(load(resource) <= capacity * (1.0 + 1e-9));
            }
            for rate in &rates {
                let limit = rate.limit.unwrap();
                prop_assert!(load(limit) >= capacities[limit] * (1.0 - 1e-9));
            }
        }
    }
}
