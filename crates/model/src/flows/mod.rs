//! Concurrent flows of a site: what each gets when all share links, PCIe, memory and disks.
//!
//! Each flow alone is simulated at packet level; its rate is the most that it takes. Flows together share every direction of
//! every link max-min fairly ([`fair_share`]), as credit-based and PFC networks with fair arbitration do. Flows end at host
//! memory, cards (`host.card`) and disks (`host.ssd`). Disks transfer from and to host memory.

pub mod fair_share;
mod pattern;
mod resources;

use crate::benchmarks::perftest::bandwidth_at;
use crate::engine::BytesPerSecond;
use crate::explain::Flow;
use crate::parameters::Parameters;
use crate::path::route::Network;
use crate::path::{DataPath, PathError, Verb, data_path};
use crate::precision::Precision;
use crate::result_table::{ResultTable, TableValue};
use fair_share::{SharedPath, fair_rates};
use millstream_site::Site;
use resources::{FlowRoutes, Resources};
use std::collections::BTreeMap;
use std::str::FromStr;

pub use pattern::Pattern;

/// Which of several shortest routes packets take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// The one that the destination selects (D-mod-k).
    #[default]
    Deterministic,
    /// All of them equally.
    Adaptive,
}

impl FromStr for Routing {
    type Err = String;

    fn from_str(text: &str) -> Result<Routing, String> {
        match text {
            "deterministic" => Ok(Routing::Deterministic),
            "adaptive" => Ok(Routing::Adaptive),
            other => Err(format!("routing {other:?}: one of deterministic, adaptive")),
        }
    }
}

/// Rate of a flow.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowRate {
    /// The flow.
    pub flow: Flow,
    /// Rate without other flows.
    pub alone: BytesPerSecond,
    /// Rate beside the others.
    pub together: BytesPerSecond,
    /// What limits it beside the others.
    pub limit: String,
}

/// Simulated rates of paths; most paths of a site differ in their names only.
#[derive(Default)]
struct Simulated(Vec<(DataPath, Verb, u32, f64)>);

impl Simulated {
    fn rate(&mut self, path: &DataPath, flow: &Flow) -> f64 {
        let path = path.without_names();
        let known =
            self.0.iter().find(|(p, verb, size, _)| (p, *verb, *size) == (&path, flow.verb, flow.size));
        if let Some((.., rate)) = known {
            return *rate;
        }
        let rate = bandwidth_at(Precision::Full, &path, flow.verb, flow.size, 128, false).rate.0;
        self.0.push((path, flow.verb, flow.size, rate));
        rate
    }
}

/// Rates of flows that run at the same time, in their order.
///
/// # Errors
/// [`PathError`] if the site has no path for one of them.
pub fn concurrent(
    site: &Site,
    p: &Parameters,
    flows: &[Flow],
    routing: Routing,
) -> Result<Vec<FlowRate>, PathError> {
    let p = &*p.with_devices(&site.devices);
    let network = Network::new(site);
    let mut resources = Resources::new(site, p);
    let mut simulated = Simulated::default();
    let mut paths: Vec<SharedPath> = Vec::new();
    let mut owners: Vec<usize> = Vec::new();
    for (i, flow) in flows.iter().enumerate() {
        let FlowRoutes { routes, ends } = resources.routes(&network, flow, routing)?;
        let own = match ends {
            Some((client, server)) => simulated.rate(&data_path(site, p, &client, &server)?, flow),
            None => f64::INFINITY,
        };
        let own = resources.add(format!("its own path: explain \"{flow}\""), own);
        let weight = 1.0 / routes.len() as f64;
        for mut resources in routes {
            resources.push(own);
            owners.push(i);
            paths.push(SharedPath { resources, weight });
        }
    }
    let shared = fair_rates(&resources.capacities, &paths);
    let results = flows.iter().enumerate().map(|(i, flow)| {
        let mine = || (0..paths.len()).filter(|&k| owners[k] == i);
        let alone: Vec<SharedPath> = mine().map(|k| paths[k].clone()).collect();
        let alone = fair_rates(&resources.capacities, &alone).iter().map(|rate| rate.rate).sum();
        let together = mine().map(|k| shared[k].rate).sum();
        let limit = mine().find_map(|k| shared[k].limit);
        FlowRate {
            flow: flow.clone(),
            alone: BytesPerSecond(alone),
            together: BytesPerSecond(together),
            limit: limit.map_or("nothing".to_owned(), |limit| resources.names[limit].clone()),
        }
    });
    Ok(results.collect())
}

/// A row for each flow.
#[must_use]
pub fn table(site: &str, rates: &[FlowRate]) -> ResultTable {
    let columns = ["flow", "alone [GB/s]", "together [GB/s]", "limit"].map(str::to_owned).to_vec();
    let row = |rate: &FlowRate| {
        vec![
            TableValue::Text(rate.flow.to_string()),
            TableValue::Number(rate.alone.as_gigabytes()),
            TableValue::Number(rate.together.as_gigabytes()),
            TableValue::Text(rate.limit.clone()),
        ]
    };
    ResultTable {
        title: format!("concurrent flows on {site}"),
        columns,
        rows: rates.iter().map(row).collect(),
    }
}

/// A row for each limit with the number of flows that it has, and a row for all flows.
#[must_use]
pub fn summary(site: &str, rates: &[FlowRate]) -> ResultTable {
    let columns = ["limit", "flows", "slowest [GB/s]", "fastest [GB/s]", "total [GB/s]"].map(str::to_owned);
    let mut by_limit: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for rate in rates {
        let limit =
            if rate.limit.starts_with("its own path") { "their own paths" } else { rate.limit.as_str() };
        by_limit.entry(limit).or_default().push(rate.together.as_gigabytes());
    }
    let row = |limit: &str, values: &[f64]| {
        let ends = [
            values.iter().copied().fold(f64::INFINITY, f64::min),
            values.iter().copied().fold(0.0, f64::max),
            values.iter().sum(),
        ];
        let first = [TableValue::Text(limit.to_owned()), TableValue::Number(values.len() as f64)];
        first.into_iter().chain(ends.map(TableValue::Number)).collect::<Vec<_>>()
    };
    let mut rows: Vec<Vec<TableValue>> = by_limit.iter().map(|(limit, values)| row(limit, values)).collect();
    // The limit with the most flows first.
    rows.sort_by_key(|row| match row[1] {
        TableValue::Number(flows) => -(flows as i64),
        TableValue::Text(_) => 0,
    });
    rows.truncate(20);
    let all: Vec<f64> = rates.iter().map(|rate| rate.together.as_gigabytes()).collect();
    rows.push(row("all flows", &all));
    ResultTable { title: format!("concurrent flows on {site}"), columns: columns.to_vec(), rows }
}
