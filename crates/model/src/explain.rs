//! Bottleneck analysis of a flow.

use crate::benchmarks::mlc::{self, MlcTest};
use crate::benchmarks::perftest::{bandwidth_at, latency};
use crate::disk_end::{DiskEnd, disk_ends};
use crate::engine::{BytesPerSecond, Picos};
use crate::interval::{Interval, Level, factors::factors, leave_out, response};
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::path::{
    BandwidthResult, CoreAccess, DataPath, Hop, PathError, Verb, core_access, data_path, path_hops,
    pcie_line_rate,
};
use crate::power::{Watts, power_of_hosts};
use crate::precision::Precision;
use crate::result_table::{ResultTable, TableValue};
use crate::rows::Category;
use crate::sweep::apply;
use millstream_site::Site;
use std::fmt;
use std::str::FromStr;

/// A flow, parsed from `VERB CLIENT SERVER [BYTES]`: `write client server.u280`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The verb.
    pub verb: Verb,
    /// Requester: host, `host.card` or `host.ssd`.
    pub client: String,
    /// Responder: host, `host.card` or `host.ssd`.
    pub server: String,
    /// Bytes of a message.
    pub size: u32,
}

impl FromStr for Flow {
    type Err = String;

    fn from_str(text: &str) -> Result<Flow, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (verb, client, server, size) = match words.as_slice() {
            [verb, client, server] => (verb, client, server, "1048576"),
            [verb, client, server, size] => (verb, client, server, *size),
            _ => {
                return Err(format!(
                    "{text:?}: a flow is VERB CLIENT SERVER [BYTES], for example \"write client server.u280\""
                ));
            }
        };
        let verb = match *verb {
            "write" => Verb::Write,
            "read" => Verb::Read,
            "send" => Verb::Send,
            other => return Err(format!("verb {other:?}: one of write, read, send")),
        };
        let size = size.parse().ok().filter(|size| (1..=1 << 30).contains(size));
        let size = size.ok_or_else(|| format!("{text:?}: the message size must be 1 to 1073741824 bytes"))?;
        Ok(Flow { verb, client: (*client).to_owned(), server: (*server).to_owned(), size })
    }
}

/// Load of one channel on the path.
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelLoad {
    /// Name of the channel.
    pub name: String,
    /// Share of time spent transmitting.
    pub busy: f64,
    /// Share of time spent waiting for credits.
    pub blocked: f64,
    /// Bandwidth of the flow if this channel were the only limit.
    pub ceiling: BytesPerSecond,
}

/// Sensitivity of the bandwidth to one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Sensitivity {
    /// Name of the parameter.
    pub name: String,
    /// Relative bandwidth change if the parameter improves by 10 %.
    pub gain: f64,
}

/// What the translation of DMA addresses by IOMMUs takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TranslationCost {
    /// Share of the bandwidth without translation that is lost.
    pub bandwidth: f64,
    /// Part of the latency of a small message.
    pub latency: Picos,
    /// Latency of a small message, half a round trip; of a READ a full one.
    pub whole_latency: Picos,
}

/// Bottleneck analysis of a flow.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// Bandwidth of the flow.
    pub rate: BytesPerSecond,
    /// Ends of its 90 % interval, if samples were asked for.
    pub interval: Option<[BytesPerSecond; 2]>,
    /// What the translation of DMA addresses takes, if an IOMMU is on.
    pub translation: Option<TranslationCost>,
    /// Power of the hosts at its ends while it runs, if the library has that of all devices.
    pub power: Option<Watts>,
    /// Everything between the two memories, from client to server.
    pub hops: Vec<Hop>,
    /// Channels, busiest first.
    pub channels: Vec<ChannelLoad>,
    /// Parameters with an effect, largest first.
    pub sensitivities: Vec<Sensitivity>,
}

/// What a flow goes over, with the disks at its ends.
#[derive(Clone, Debug, PartialEq)]
struct FlowPath {
    over: Transport,
    disks: Vec<DiskEnd>,
}

impl FlowPath {
    fn new(site: &Site, p: &Parameters, flow: &Flow) -> Result<FlowPath, PathError> {
        let (between, disks) = disk_ends(site, p, flow)?;
        Ok(FlowPath { over: Transport::new(site, p, &between)?, disks })
    }

    /// Rate of the flow with its channels; disks are channels, too.
    fn bandwidth(&self, precision: Precision, flow: &Flow) -> (BytesPerSecond, Vec<ChannelLoad>) {
        let result = self.over.bandwidth(precision, flow);
        let free = result.rate;
        let rate = self.disks.iter().fold(free, |rate, disk| BytesPerSecond(rate.0.min(disk.rate.0)));
        // A slower flow uses less of every channel.
        let slower = if free.0 > 0.0 { rate.0 / free.0 } else { 1.0 };
        let mut loads: Vec<ChannelLoad> = (result.channels.into_iter())
            .filter(|channel| channel.packets > 0 && channel.elapsed.0 > 0)
            .map(|channel| {
                let busy = channel.busy.seconds() / channel.elapsed.seconds() * slower;
                let blocked = channel.blocked.seconds() / channel.elapsed.seconds();
                let ceiling =
                    if busy > 0.0 { BytesPerSecond(rate.0 / busy) } else { BytesPerSecond(f64::INFINITY) };
                ChannelLoad { name: channel.name, busy, blocked, ceiling }
            })
            .collect();
        let disk = |disk: &DiskEnd| ChannelLoad {
            name: disk.name.clone(),
            busy: rate.0 / disk.rate.0,
            blocked: 0.0,
            ceiling: disk.rate,
        };
        loads.extend(self.disks.iter().map(disk));
        (rate, loads)
    }

    fn hops(&self, flow: &Flow) -> Vec<Hop> {
        let at = |is_client: bool| {
            let is_source = is_client == (flow.verb != Verb::Read);
            self.disks.iter().filter(move |disk| disk.is_source == is_source).map(DiskEnd::hop)
        };
        at(true).chain(self.over.hops(flow)).chain(at(false)).collect()
    }
}

/// What a flow between two hosts or memories goes over.
#[derive(Clone, Debug, PartialEq)]
enum Transport {
    /// Adapters of two hosts.
    Adapters(Box<DataPath>),
    /// Cores of a host, to memory behind a CXL link.
    Cores(CoreAccess),
}

impl Transport {
    fn new(site: &Site, p: &Parameters, flow: &Flow) -> Result<Transport, PathError> {
        if flow.verb != Verb::Send
            && let Some(access) = core_access(site, p, &flow.client, &flow.server)?
        {
            return Ok(Transport::Cores(access));
        }
        data_path(site, p, &flow.client, &flow.server).map(|path| Transport::Adapters(Box::new(path)))
    }

    fn bandwidth(&self, precision: Precision, flow: &Flow) -> BandwidthResult {
        match self {
            Transport::Adapters(path) => bandwidth_at(precision, path, flow.verb, flow.size, 128, false),
            Transport::Cores(access) => {
                let test = if flow.verb == Verb::Read { MlcTest::Reads } else { MlcTest::Writes };
                mlc::bandwidth(precision, access, test, flow.size)
            }
        }
    }

    fn hops(&self, flow: &Flow) -> Vec<Hop> {
        match self {
            Transport::Adapters(path) => path_hops(path, flow.verb, &flow.client, &flow.server),
            Transport::Cores(access) => access.hops(),
        }
    }

    /// Rate that no interval exceeds: that of the slowest link.
    fn limit(&self, flow: &Flow) -> f64 {
        match self {
            Transport::Adapters(path) => slowest_link(path).0,
            Transport::Cores(access) => access.timing.payload_rate(1.0, flow.verb != Verb::Read).0,
        }
    }

    /// Kind of published rows whose errors widen its interval.
    fn category(&self, flow: &Flow) -> Category {
        match self {
            Transport::Adapters(path) => Category::of_bandwidth(path.is_to_peer(), flow.size),
            // No published row is about cores: the category with the largest errors of bandwidths.
            Transport::Cores(_) => Category::PeerToPeer,
        }
    }
}

fn measure(path: &FlowPath, flow: &Flow) -> (BytesPerSecond, Vec<ChannelLoad>) {
    let (rate, mut channels) = path.bandwidth(Precision::Full, flow);
    // Channels without service time carry no information.
    channels.retain(|channel| channel.busy > 0.001 || channel.blocked > 0.001);
    channels.sort_by(|a, b| b.busy.total_cmp(&a.busy));
    (rate, channels)
}

/// Analyses a flow. `samples` samples of the parameters give the interval; 0 gives none.
///
/// # Errors
/// [`PathError`] if the site has no path for it.
pub fn explain(site: &Site, p: &Parameters, flow: &Flow, samples: u64) -> Result<Explanation, PathError> {
    let p = &*p.with_devices(&site.devices);
    let path_with = |p: &Parameters| FlowPath::new(site, p, flow);
    let path = path_with(p)?;
    let (rate, channels) = measure(&path, flow);
    // Parameters of benchmarks and of the event builder do not affect a path; most others leave it unchanged, too.
    let names: Vec<&str> = p.iter().map(|(name, _)| name).collect();
    let mut sensitivities: Vec<Sensitivity> = parallel_map(&names, |name| {
        let gain = |factor: f64| match path_with(&p.with(name, p.get(name) * factor)) {
            // An unchanged path needs no simulation.
            Ok(changed) if changed != path => measure(&changed, flow).0.0 / rate.0 - 1.0,
            _ => 0.0,
        };
        Sensitivity { name: (*name).to_owned(), gain: gain(1.1).max(gain(1.0 / 1.1)) }
    });
    sensitivities.retain(|sensitivity| sensitivity.gain > 0.002);
    sensitivities.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    let interval = (samples > 0).then(|| interval(site, p, flow, &path, rate, samples));
    let interval = interval.map(|interval| [interval.low, interval.high].map(BytesPerSecond));
    let translation = translation_cost(&path.over, rate, flow);
    let power = power(site, p, flow, &path.over, rate);
    Ok(Explanation { rate, interval, translation, power, hops: path.hops(flow), channels, sensitivities })
}

/// Power of the two hosts of a flow between adapters.
fn power(site: &Site, p: &Parameters, flow: &Flow, path: &Transport, rate: BytesPerSecond) -> Option<Watts> {
    let Transport::Adapters(path) = path else { return None };
    let host = |end: &str| site.hosts.iter().find(|host| Some(host.name.as_str()) == end.split('.').next());
    let hosts = [host(&flow.client)?, host(&flow.server)?];
    power_of_hosts(p, &hosts, 1, (rate.0 / slowest_link(path).0).min(1.0))
}

/// Bytes of a small message.
const SMALL: u32 = 8;

/// Compares a path with the same path without translation.
fn translation_cost(path: &Transport, rate: BytesPerSecond, flow: &Flow) -> Option<TranslationCost> {
    let Transport::Adapters(path) = path else { return None };
    if path.ends.iter().all(|end| end.translation.is_none()) {
        return None;
    }
    let mut without = path.clone();
    without.ends.iter_mut().for_each(|end| end.translation = None);
    let [whole, rest] = [path, &without].map(|path| latency(path, flow.verb, SMALL));
    let free = bandwidth_at(Precision::Full, &without, flow.verb, flow.size, 128, false).rate;
    Some(TranslationCost {
        bandwidth: (1.0 - rate.0 / free.0).max(0.0),
        latency: Picos(whole.0.saturating_sub(rest.0)),
        whole_latency: whole,
    })
}

/// The interval of a flow's bandwidth.
fn interval(
    site: &Site,
    p: &Parameters,
    flow: &Flow,
    path: &FlowPath,
    rate: BytesPerSecond,
    samples: u64,
) -> Interval {
    let spreads = response::spreads(p, samples, |p| {
        Some(vec![FlowPath::new(site, p, flow).ok()?.bandwidth(Precision::Sample, flow).0.0])
    });
    let spread = spreads.first().copied().unwrap_or_default();
    let factors = factors(leave_out::shipped(), Level::System, path.over.category(flow));
    Interval::new(rate.0, spread, factors).below(path.over.limit(flow))
}

/// Rate of the slowest link of a path.
pub(crate) fn slowest_link(path: &DataPath) -> BytesPerSecond {
    let pcie = [0, 1].map(|end| pcie_line_rate(path, end).0);
    BytesPerSecond(pcie.into_iter().fold(path.link_rate.0, f64::min))
}

impl Explanation {
    /// The bottleneck: the busiest channel if it is saturated, else the most effective parameter.
    #[must_use]
    pub fn bottleneck(&self) -> String {
        match self.channels.first() {
            Some(first) if first.busy > SATURATED => first.name.clone(),
            _ => {
                let what =
                    self.sensitivities.first().map_or("latency", |sensitivity| sensitivity.name.as_str());
                format!("in-flight limit or latency: {what}")
            }
        }
    }

    /// Next limits when the bottleneck is removed. Without a saturated channel, the busiest is the first of them.
    pub fn next_limits(&self) -> impl Iterator<Item = &ChannelLoad> {
        let full = self.channels.first().is_some_and(|first| first.busy > SATURATED);
        // A nearly idle channel limits nothing.
        self.channels.iter().skip(usize::from(full)).filter(|channel| channel.busy > 0.05)
    }
}

/// Utilization above which a channel counts as saturated; gaps between messages are the rest.
const SATURATED: f64 = 0.9;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} GB/s ({:.2} Gb/s)", self.rate.as_gigabytes(), self.rate.as_gigabits())?;
        match self.interval.map(|ends| ends.map(BytesPerSecond::as_gigabytes)) {
            Some([low, high]) => writeln!(f, ", 90 % interval {low:.3} to {high:.3} GB/s")?,
            None => writeln!(f)?,
        }
        match self.channels.first() {
            Some(first) if first.busy > SATURATED => {
                writeln!(f, "bottleneck: {}, busy {:.0} % of the time", first.name, first.busy * 100.0)?;
            }
            _ => writeln!(f, "bottleneck: no channel is saturated; {}", self.bottleneck())?,
        }
        let next: Vec<String> = (self.next_limits().take(3))
            .map(|s| format!("{} ({:.2} GB/s)", s.name, s.ceiling.as_gigabytes()))
            .collect();
        writeln!(f, "next: {}", if next.is_empty() { "none".to_owned() } else { next.join(", ") })?;
        if let Some(cost) = &self.translation {
            writeln!(
                f,
                "address translation: {:.1} % of the bandwidth, {:.0} of {:.0} ns of a message of {SMALL} bytes",
                cost.bandwidth * 100.0,
                cost.latency.nanos(),
                cost.whole_latency.nanos()
            )?;
        }
        if let Some(Watts(power)) = self.power {
            let energy = power / self.rate.as_gigabytes();
            writeln!(f, "power of both hosts: {power:.0} W with one polling core each, {energy:.1} J/GB")?;
        }
        writeln!(f, "\n  {:<56}  largest rate    latency", "hop")?;
        for hop in &self.hops {
            let rate = match hop.rate.as_gigabytes() {
                rate if rate.is_finite() => format!("{rate:.2} GB/s"),
                _ => "-".to_owned(),
            };
            writeln!(f, "  {:<56}  {rate:>12}  {:>6.0} ns", hop.name, hop.latency.nanos())?;
        }
        writeln!(f, "\n  {:<36}   busy   blocked   limit", "channel")?;
        for s in &self.channels {
            let ceiling = match s.ceiling.as_gigabytes() {
                ceiling if ceiling.is_finite() => format!("{ceiling:.2} GB/s"),
                _ => "no limit".to_owned(),
            };
            writeln!(
                f,
                "  {:<36}  {:>4.0} %    {:>4.0} %   {ceiling:>12}",
                s.name,
                s.busy * 100.0,
                s.blocked * 100.0
            )?;
        }
        writeln!(f, "\n  {:<36}  bandwidth", "parameter improved by 10 %")?;
        for e in self.sensitivities.iter().take(8) {
            writeln!(f, "  {:<36}  {:>+6.1} %", e.name, e.gain * 100.0)?;
        }
        Ok(())
    }
}

/// Analyses a flow for all combinations of settings. `samples` samples of the parameters give the intervals; 0 gives none.
///
/// # Errors
/// [`SweepError`](crate::sweep::SweepError) if a setting is invalid, [`PathError`] if a site has no path for the flow.
pub fn explain_sweep(
    (name, text): (&str, &str),
    points: &[Vec<(&str, &str)>],
    flow: &Flow,
    samples: u64,
) -> Result<Vec<Explanation>, Box<dyn std::error::Error>> {
    let analyse = |point: &Vec<(&str, &str)>| {
        let (site, p) = apply(name, text, point)?;
        Ok(explain(&site, &p, flow, samples)?)
    };
    points.iter().map(analyse).collect()
}

/// The analyses of a flow for these settings: one row each.
#[must_use]
pub fn sweep_table(
    site: &str,
    flow: &Flow,
    points: &[Vec<(&str, &str)>],
    explanations: &[Explanation],
) -> ResultTable {
    let mut columns: Vec<String> =
        points.first().into_iter().flatten().map(|(name, _)| (*name).to_owned()).collect();
    let has_intervals = explanations.iter().any(|e| e.interval.is_some());
    let ends: &[&str] = if has_intervals { &["low [GB/s]", "high [GB/s]"] } else { &[] };
    let names =
        [&["bandwidth [GB/s]"], ends, &["bottleneck", "utilization", "next limit", "next limit [GB/s]"]];
    columns.extend(names.concat().into_iter().map(str::to_owned));
    let row = |(point, e): (&Vec<(&str, &str)>, &Explanation)| {
        let mut row: Vec<TableValue> =
            point.iter().map(|(_, value)| TableValue::Text((*value).to_owned())).collect();
        let busy = e.channels.first().map_or(0.0, |channel| channel.busy);
        row.push(TableValue::Number(e.rate.as_gigabytes()));
        row.extend(e.interval.into_iter().flatten().map(|end| TableValue::Number(end.as_gigabytes())));
        row.push(TableValue::Text(e.bottleneck()));
        row.push(TableValue::Number((busy * 100.0).round() / 100.0));
        let next = e.next_limits().next();
        row.push(TableValue::Text(next.map_or("none".to_owned(), |channel| channel.name.clone())));
        row.push(next.map_or(TableValue::Text("-".to_owned()), |channel| {
            TableValue::Number(channel.ceiling.as_gigabytes())
        }));
        row
    };
    let rows = points.iter().zip(explanations).map(row).collect();
    ResultTable { title: format!("{flow} on {site}"), columns, rows }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.verb {
            Verb::Write => "write",
            Verb::Read => "read",
            Verb::Send => "send",
        };
        write!(f, "{verb} {} {} {}", self.client, self.server, self.size)
    }
}
