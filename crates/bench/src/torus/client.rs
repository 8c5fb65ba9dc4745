//! The application of the benchmark, on every node.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use millstream_fabric::{AllToAll, Collectives, Fabric, Notification, Reduction, RegionId, Span};
use millstream_torus::application::ENV_SOCKET;
use millstream_torus::{DirectNode, TorusNode};
use millstream_torus_core::{Direction, NodeNumber};

use super::{ALL_TO_ALL, ALL_TO_ALL_BYTES, LARGE, SIZES, SUM, TARGETS, bare, outside};
use crate::median;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Time of one measurement, about.
const TIME: Duration = Duration::from_millis(40);
/// Repetitions, of which the median counts.
const REPETITIONS: usize = 5;
/// Operations before the first measurement.
const WARM_UPS: u32 = 4;
const PING: u16 = 0;
/// Counters of [`AllToAll`], behind those above.
const ALL_TO_ALL_COUNTERS: u16 = 8;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Name of a value.
pub(super) fn name(operation: &str, size: usize, hops: u32) -> String {
    format!("{operation} {size} {hops}")
}

/// Runs on the node that the environment names; node 0 writes the values to `results`. With `traffic`, all nodes only put
/// that many messages of 64 KiB to each neighbour. With `serve_outside`, they wait for a host outside of the torus.
///
/// # Errors
/// The error of the fabric or of the file.
pub fn run(results: Option<&Path>, traffic: Option<u32>, serve_outside: bool) -> Outcome<()> {
    if std::env::var_os(ENV_SOCKET).is_some() {
        let mut node = TorusNode::from_environment()?;
        if serve_outside {
            return outside::serve(&mut node);
        }
        return match traffic {
            Some(messages) => send_to_neighbours(&mut node, messages),
            None => measure(&mut node, results, false),
        };
    }
    measure(&mut DirectNode::from_environment()?, results, true)
}

struct Client<'f, F> {
    fabric: &'f mut F,
    /// The same region of every node.
    regions: Vec<RegionId>,
    /// Pings so far.
    pings: u64,
}

fn measure<F: Fabric>(fabric: &mut F, results: Option<&Path>, with_bare: bool) -> Outcome<()> {
    let mut values = BTreeMap::new();
    let regions = exchange_regions(fabric, SIZES[SIZES.len() - 1])?;
    for (name, spin) in bare::BARE.into_iter().filter(|_| with_bare) {
        if let Some(time) = bare::write_with_immediate(fabric, spin)? {
            values.insert(name.to_owned(), time);
        }
    }
    let mut client = Client { fabric, regions, pings: 0 };
    let targets = if with_bare { &TARGETS[..1] } else { &TARGETS[..] };
    // A smaller torus has the nearer targets only.
    let torus = client.fabric.dimensions();
    for &(target, hops) in targets.iter().filter(|&&(target, _)| torus.contains(NodeNumber(target))) {
        for size in SIZES {
            client.put_and_get(NodeNumber(target), size, hops, &mut values)?;
        }
    }
    client.put_to_itself(&mut values)?;
    client.all_nodes(&mut values)?;
    client.fabric.exchange(&[], TIMEOUT)?;
    if let Some(path) = results.filter(|_| client.fabric.here() == NodeNumber(0)) {
        std::fs::write(path, serde_json::to_string(&values)?)?;
    }
    Ok(())
}

fn exchange_regions<F: Fabric>(fabric: &mut F, size: usize) -> Outcome<Vec<RegionId>> {
    let region = fabric.register(size);
    let all = fabric.exchange(&region.0.to_le_bytes(), TIMEOUT)?;
    let word = |bytes: &Vec<u8>| Ok(RegionId(u64::from_le_bytes(bytes[..].try_into()?)));
    all.iter().map(word).collect()
}

/// The median time of one of `count` repetitions of an operation (µs). The first repetitions are not measured.
pub(super) fn timed(count: u64, mut operation: impl FnMut(u64) -> Outcome<()>) -> Outcome<f64> {
    let mut times = Vec::new();
    operation(count)?;
    for _ in 0..REPETITIONS {
        let start = Instant::now();
        operation(count)?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
    }
    Ok(median(&times).unwrap_or(f64::NAN))
}

impl<F: Fabric> Client<'_, F> {
    fn put_and_get(
        &mut self,
        target: NodeNumber,
        size: usize,
        hops: u32,
        values: &mut BTreeMap<String, f64>,
    ) -> Outcome<()> {
        let here = self.fabric.here();
        let count = self.count(target, size)?;
        if size < LARGE {
            let half = match here {
                NodeNumber(0) => timed(count, |count| self.ping(target, size, count, true))?,
                here if here == target => timed(count, |count| self.ping(NodeNumber(0), size, count, false))?,
                _ => 0.0,
            } / 2.0;
            values.insert(name("put", size, hops), half);
        } else if here == NodeNumber(0) {
            let time = timed(count, |count| self.stream(target, size, count))?;
            values.insert(name("put", size, hops), size as f64 / time * 1e-3);
        }
        self.fabric.exchange(&[], TIMEOUT)?;
        if here == NodeNumber(0) {
            let mut bytes = vec![0; size];
            let region = self.regions[target.index()];
            let time = timed(count, |count| {
                (0..count).try_for_each(|_| Ok(self.fabric.get(target, region, 0, &mut bytes)?))
            })?;
            let value = if size >= LARGE { size as f64 / time * 1e-3 } else { time };
            values.insert(name("get", size, hops), value);
        }
        Ok(())
    }

    /// A put that takes no hop, at node 0.
    fn put_to_itself(&mut self, values: &mut BTreeMap<String, f64>) -> Outcome<()> {
        let here = self.fabric.here();
        if here == NodeNumber(0) {
            let time = timed(1000, |count| self.ping(here, 8, count, true))?;
            values.insert(name("put", 8, 0), time);
        }
        self.fabric.exchange(&[], TIMEOUT)?;
        Ok(())
    }

    /// How many operations take about [`TIME`], by node 0, so that both ends use the same number.
    fn count(&mut self, target: NodeNumber, size: usize) -> Outcome<u64> {
        let (mut count, here) = (0, self.fabric.here());
        if here == NodeNumber(0) {
            let mut bytes = vec![0; size];
            let start = Instant::now();
            for _ in 0..WARM_UPS {
                self.fabric.get(target, self.regions[target.index()], 0, &mut bytes)?;
            }
            let one = start.elapsed().as_nanos() as u64 / u64::from(WARM_UPS);
            count = (TIME.as_nanos() as u64 / one.max(1)).clamp(4, 4000);
        }
        let all = self.fabric.exchange(&u64::to_le_bytes(count), TIMEOUT)?;
        Ok(u64::from_le_bytes(all[0][..].try_into()?))
    }

    /// Puts and answers in turn.
    fn ping(&mut self, other: NodeNumber, size: usize, count: u64, first: bool) -> Outcome<()> {
        let (data, region) = (vec![1; size], self.regions[other.index()]);
        for _ in 0..count {
            let one = Notification::Counter { index: PING, add: 1 };
            if first {
                self.fabric.put(other, region, 0, &data, one)?;
            }
            self.pings += 1;
            self.fabric.wait_counter(PING, self.pings, other, TIMEOUT)?;
            if !first {
                self.fabric.put(other, region, 0, &data, one)?;
            }
        }
        Ok(())
    }

    /// Puts from a region, one after the other without a wait, until all are visible.
    fn stream(&mut self, target: NodeNumber, size: usize, count: u64) -> Outcome<()> {
        let here = self.fabric.here();
        let source = Span { region: self.regions[here.index()], offset: 0, length: size };
        for _ in 0..count {
            self.fabric.put_region(target, self.regions[target.index()], 0, source, Notification::None)?;
        }
        Ok(self.fabric.flush(target)?)
    }

    fn all_nodes(&mut self, values: &mut BTreeMap<String, f64>) -> Outcome<()> {
        let nodes = self.fabric.dimensions().nodes();
        let mut collectives = Collectives::new(self.fabric, 8, TIMEOUT)?;
        let mut all_to_all = AllToAll::new(self.fabric, 64 << 10, ALL_TO_ALL_COUNTERS, TIMEOUT)?;
        let fabric = &mut *self.fabric;
        let sum = timed(50, |count| {
            for _ in 0..count {
                collectives.allreduce(fabric, Reduction::Sum, &[1])?;
            }
            Ok(())
        })?;
        values.insert(SUM.to_owned(), sum);
        let messages = timed(20, |count| {
            for _ in 0..count {
                all_to_all.alltoallv(fabric, vec![vec![1; ALL_TO_ALL_BYTES]; nodes])?;
            }
            Ok(())
        })?;
        values.insert(ALL_TO_ALL.to_owned(), messages);
        Ok(())
    }
}

/// Puts messages to all neighbours without a pause.
fn send_to_neighbours<F: Fabric>(fabric: &mut F, messages: u32) -> Outcome<()> {
    const SIZE: usize = 64 << 10;
    let regions = exchange_regions(fabric, SIZE)?;
    let (torus, here) = (fabric.dimensions(), fabric.here());
    let source = Span { region: regions[here.index()], offset: 0, length: SIZE };
    let neighbours: Vec<_> =
        Direction::ALL.into_iter().filter_map(|direction| torus.neighbour(here, direction)).collect();
    for _ in 0..messages {
        for &to in &neighbours {
            fabric.put_region(to, regions[to.index()], 0, source, Notification::None)?;
        }
    }
    neighbours.iter().try_for_each(|&to| fabric.flush(to))?;
    // No node ends while another one writes to it.
    fabric.exchange(&[], TIMEOUT)?;
    Ok(())
}
