//! The seventh port: a host outside of the torus beside a node that does the same.

use std::time::Duration;

use millstream_fabric::{Fabric, Notification, RegionId};
use millstream_rdma::device::DeviceSelector;
use millstream_torus::engine::OutsideAccess;
use millstream_torus::node::SeventhOptions;
use millstream_torus::seventh::GatewayOptions;
use millstream_torus::{OutsideHost, TorusNode};
use millstream_torus_core::{Dimensions, NodeNumber};

use super::client::{self, timed};
use super::{Options, Outcome, Values, client_command, launcher, size_name, value};
use crate::{Figure, Table, median};

/// Name of the region that every node publishes.
const REGION: &str = "bench";
/// The counter that ends a node's program.
const DONE: u16 = 0;
/// Sizes of puts and gets (bytes).
const SIZES: [usize; 3] = [8, 65_536, 1 << 20];
/// How long a node's program waits for the host.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of one measurement, about, and the most operations.
const BYTES: usize = 32 << 20;
const OPERATIONS: usize = 500;

/// The program of a node: publishes a region and waits for the host.
pub(super) fn serve(node: &mut TorusNode) -> Outcome<()> {
    let region = node.register(SIZES[SIZES.len() - 1]);
    node.publish(region, REGION, OutsideAccess::ReadWrite)?;
    // The notification's source is the gateway.
    Ok(node.wait_counter(DONE, 1, NodeNumber(0), TIMEOUT)?)
}

/// Measures a host that reaches the torus through node 0. Node 0 itself and the farthest node are its targets.
pub(super) fn measure(table: &mut Table, options: &Options, routed: &Values) -> Outcome<()> {
    let torus: Dimensions = "2x2x2".parse()?;
    let targets = [(NodeNumber(0), 0), (NodeNumber(7), 3)];
    let mut values = Values::new();
    for _ in 0..options.rounds {
        let seventh = SeventhOptions { listen: "127.0.0.1:0".to_owned(), key: 7 };
        let mut launched =
            millstream_torus::launch::Launcher { seventh: Some(seventh), ..launcher(options, torus, 0) }
                .launch()?;
        let (address, key) = launched.gateway(NodeNumber(0)).ok_or("node 0 has no seventh port")?;
        let gateway =
            GatewayOptions { address: address.to_owned(), key, device: DeviceSelector::from_environment() };
        let mut command = client_command(&options.program, &options.folder.join("torus-client.json"));
        command.push("--serve-outside".into());
        let measured = std::thread::scope(|scope| {
            // Errors of the host have no type that may change threads.
            let host = scope.spawn(|| as_host(&gateway, torus, &targets).map_err(|error| error.to_string()));
            let ran = launched.run(&command);
            let measured = host.join().map_err(|_| "the host outside panicked".to_owned())?;
            ran.map_err(|error| error.to_string())?;
            measured
        })?;
        launched.finish()?;
        measured.into_iter().for_each(|(name, value)| values.entry(name).or_default().push(value));
    }
    let of = |name: &str| values.get(name).and_then(|values| median(values)).unwrap_or(0.0);
    for (_, hops) in targets {
        for size in SIZES {
            let unit = if size >= super::LARGE { "GB/s" } else { "µs" };
            for operation in ["put", "get"] {
                let measured = of(&client::name(operation, size, hops));
                let hops_of_node = hops.max(1);
                // A small put of the host waits for its acknowledgement, as a get does.
                let compared = if size < super::LARGE { "get" } else { operation };
                let label = format!(
                    "host outside: {operation} of {} by gateway + {hops} hops; baseline a node's {compared} over {hops_of_node}",
                    size_name(size),
                );
                let baseline = value(routed, &client::name(compared, size, hops_of_node))?;
                table.push(Figure::with_baseline(label, measured, unit, baseline));
            }
        }
        let label = format!("host outside: atomic addition by gateway + {hops} hops");
        table.push(Figure::without_baseline(label, of(&client::name("add", 8, hops)), "µs"));
    }
    Ok(())
}

/// The measurements of a host, by name.
fn as_host(
    gateway: &GatewayOptions,
    torus: Dimensions,
    targets: &[(NodeNumber, u32)],
) -> Outcome<Vec<(String, f64)>> {
    let mut host = OutsideHost::connect(gateway)?;
    let mut regions = Vec::new();
    for node in torus.all() {
        regions.push(published(&mut host, node)?);
    }
    let mut values = Vec::new();
    for &(target, hops) in targets {
        let region = regions[target.index()];
        for size in SIZES {
            let count = (BYTES / size).min(OPERATIONS) as u64;
            let rate = |time: f64| if size >= super::LARGE { size as f64 / time * 1e-3 } else { time };
            let mut bytes = vec![1; size];
            let put = timed(count, |count| {
                for _ in 0..count {
                    host.put(target, region, 0, &bytes, Notification::None)?;
                    if size < super::LARGE {
                        host.flush(target)?;
                    }
                }
                Ok(host.flush(target)?)
            })?;
            values.push((client::name("put", size, hops), rate(put)));
            let get = timed(count, |count| {
                (0..count).try_for_each(|_| Ok(host.get(target, region, 0, &mut bytes)?))
            })?;
            values.push((client::name("get", size, hops), rate(get)));
        }
        let add = timed(OPERATIONS as u64, |count| {
            (0..count).try_for_each(|_| Ok(host.fetch_add(target, region, 0, 1).map(drop)?))
        })?;
        values.push((client::name("add", 8, hops), add));
    }
    for (node, &region) in torus.all().zip(&regions) {
        host.put(node, region, 0, &[], Notification::Counter { index: DONE, add: 1 })?;
        host.flush(node)?;
    }
    Ok(values)
}

/// The region of a node, once its program has published it.
fn published(host: &mut OutsideHost, node: NodeNumber) -> Outcome<RegionId> {
    let start = std::time::Instant::now();
    loop {
        if let Some(found) = host.find(node, REGION)? {
            return Ok(found.region);
        }
        if start.elapsed() > TIMEOUT {
            return Err(format!("{node} publishes no region {REGION:?}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
