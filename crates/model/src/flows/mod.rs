//! Concurrent flows of a site: what each gets when all share links, PCIe, memory and disks.
//!
//! Each flow alone is simulated at packet level; its rate is the most that it takes. Flows together share every direction of
//! every link max-min fairly ([`crate::max_min`]), as credit-based and PFC networks with fair arbitration do. Flows end at host
//! memory, cards (`host.card`), CXL memory and disks (`host.ssd`). Disks transfer from and to host memory.

mod pattern;
mod resources;

use crate::benchmarks::mlc::{self, MlcTest};
use crate::benchmarks::perftest::bandwidth_at;
use crate::engine::BytesPerSecond;
use crate::explain::Flow;
use crate::interval::{Interval, Level, factors::factors, leave_out, response};
use crate::max_min::{SharedPath, fair_rates};
use crate::parameters::Parameters;
use crate::path::route::Network;
use crate::path::{DataPath, PathError, Verb, core_access, data_path};
use crate::precision::Precision;
use crate::result_table::{ResultTable, TableValue};
use crate::rows::Category;
use millstream_site::Site;
use resources::{FlowRoutes, Resources};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
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
    /// Ends of the 90 % intervals of both rates, if samples were asked for.
    pub intervals: Option<FlowIntervals>,
}

/// 90 % intervals of a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowIntervals {
    /// Of the rate without other flows.
    pub alone: Interval,
    /// Of the rate beside the others.
    pub together: Interval,
}

/// Simulated rates of paths; most paths of a site differ in their names only.
#[derive(Default)]
struct Simulated(Vec<(DataPath, Verb, u32, f64)>);

impl Simulated {
    fn rate(&mut self, precision: Precision, path: &DataPath, flow: &Flow) -> f64 {
        let path = path.without_names();
        let known =
            self.0.iter().find(|(p, verb, size, _)| (p, *verb, *size) == (&path, flow.verb, flow.size));
        if let Some((.., rate)) = known {
            return *rate;
        }
        let rate = bandwidth_at(precision, &path, flow.verb, flow.size, 128, false).rate.0;
        self.0.push((path, flow.verb, flow.size, rate));
        rate
    }
}

/// The most that a flow within a host takes: what cores reach if they access memory behind a CXL link.
fn within_host_limit(
    precision: Precision,
    site: &Site,
    p: &Parameters,
    flow: &Flow,
) -> Result<f64, PathError> {
    let (reads, writes) = (MlcTest::Reads, MlcTest::Writes);
    let is_read = flow.verb == Verb::Read;
    let (access, test) = match core_access(site, p, &flow.client, &flow.server)? {
        // The same copy, named by its other end.
        None => (core_access(site, p, &flow.server, &flow.client)?, if is_read { writes } else { reads }),
        access => (access, if is_read { reads } else { writes }),
    };
    let rate = access.map(|access| mlc::bandwidth(precision, &access, test, flow.size).rate.0);
    Ok(rate.unwrap_or(f64::INFINITY))
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
    concurrent_at(Precision::Full, site, p, flows, routing)
}

fn concurrent_at(
    precision: Precision,
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
    // The paths of each flow are consecutive.
    let mut of_flow: Vec<Range<usize>> = Vec::with_capacity(flows.len());
    for flow in flows {
        let FlowRoutes { routes, ends } = resources.routes(&network, flow, routing)?;
        let own = match ends {
            Some((client, server)) => simulated.rate(precision, &data_path(site, p, &client, &server)?, flow),
            None => within_host_limit(precision, site, p, flow)?,
        };
        let own = resources.add(format!("its own path: explain \"{flow}\""), own);
        let weight = 1.0 / routes.len() as f64;
        let first = paths.len();
        for mut resources in routes {
            resources.push(own);
            paths.push(SharedPath { resources, weight });
        }
        of_flow.push(first..paths.len());
    }
    let shared = fair_rates(&resources.capacities, &paths);
    let results = flows.iter().zip(of_flow).map(|(flow, range)| {
        let alone = rate_alone(&resources.capacities, &paths[range.clone()]);
        let mine = &shared[range];
        let together = mine.iter().map(|rate| rate.rate).sum();
        let limit = mine.iter().find_map(|rate| rate.limit);
        FlowRate {
            flow: flow.clone(),
            alone: BytesPerSecond(alone),
            together: BytesPerSecond(together),
            limit: limit.map_or("nothing".to_owned(), |limit| resources.names[limit.index()].clone()),
            intervals: None,
        }
    });
    Ok(results.collect())
}

/// Rate of a flow on its paths without other flows.
fn rate_alone(capacities: &[f64], paths: &[SharedPath]) -> f64 {
    // Only the resources of these paths, numbered anew: a site has many.
    let used: Vec<usize> =
        paths.iter().flat_map(|path| &path.resources).copied().collect::<BTreeSet<_>>().into_iter().collect();
    let of_paths: Vec<f64> = used.iter().map(|&i| capacities[i]).collect();
    let renumbered = |path: &SharedPath| {
        let resources = path.resources.iter().filter_map(|i| used.binary_search(i).ok()).collect();
        SharedPath { resources, weight: path.weight }
    };
    let paths: Vec<SharedPath> = paths.iter().map(renumbered).collect();
    fair_rates(&of_paths, &paths).iter().map(|rate| rate.rate).sum()
}

/// [`concurrent`] with 90 % intervals from this many samples of the parameters; 0: none.
///
/// # Errors
/// As of [`concurrent`].
pub fn concurrent_with_intervals(
    site: &Site,
    p: &Parameters,
    flows: &[Flow],
    routing: Routing,
    samples: u64,
) -> Result<Vec<FlowRate>, PathError> {
    let mut rates = concurrent(site, p, flows, routing)?;
    if samples == 0 {
        return Ok(rates);
    }
    let spreads = response::spreads(&p.with_devices(&site.devices), samples, |p| {
        let rates = concurrent_at(Precision::Sample, site, p, flows, routing).ok()?;
        Some(rates.iter().flat_map(|rate| [rate.alone.0, rate.together.0]).collect())
    });
    let spread = |i: usize| spreads.get(i).copied().unwrap_or_default();
    let with_devices = p.with_devices(&site.devices);
    let (network, mut resources) = (Network::new(site), Resources::new(site, &with_devices));
    for (i, rate) in rates.iter_mut().enumerate() {
        let is_host = |name: &str| site.hosts.iter().any(|host| host.name == name);
        let is_peer = !is_host(&rate.flow.client) || !is_host(&rate.flow.server);
        let category = Category::of_bandwidth(is_peer, rate.flow.size);
        let factors = factors(leave_out::shipped(), Level::System, category);
        let interval = |value: BytesPerSecond, spread| Interval::new(value.0, spread, factors);
        let routes = resources.routes(&network, &rate.flow, routing)?.routes;
        let most = resources.line_rate_of_all(&routes);
        rate.intervals = Some(FlowIntervals {
            alone: interval(rate.alone, spread(2 * i)).below(most),
            together: interval(rate.together, spread(2 * i + 1)).below(most),
        });
    }
    Ok(rates)
}

/// A row for each flow.
#[must_use]
pub fn table(site: &str, rates: &[FlowRate]) -> ResultTable {
    let mut columns = vec!["flow", "alone [GB/s]", "together [GB/s]", "limit"];
    if rates.iter().any(|rate| rate.intervals.is_some()) {
        columns = vec![
            "flow",
            "alone [GB/s]",
            "alone, low",
            "alone, high",
            "together [GB/s]",
            "together, low",
            "together, high",
            "limit",
        ];
    }
    let columns = columns.into_iter().map(str::to_owned).collect();
    let ends = |interval: Option<Interval>| {
        let ends = interval.map(|interval| [interval.low, interval.high]);
        ends.into_iter().flatten().map(|end| TableValue::Number(BytesPerSecond(end).as_gigabytes()))
    };
    let row = |rate: &FlowRate| {
        let mut row = vec![TableValue::Text(rate.flow.to_string())];
        row.push(TableValue::Number(rate.alone.as_gigabytes()));
        row.extend(ends(rate.intervals.map(|intervals| intervals.alone)));
        row.push(TableValue::Number(rate.together.as_gigabytes()));
        row.extend(ends(rate.intervals.map(|intervals| intervals.together)));
        row.push(TableValue::Text(rate.limit.clone()));
        row
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
