//! Figures of predictions, each with its data.

use crate::benchmarks::apenet;
use crate::benchmarks::event_builder::{self, TrafficShaping};
use crate::benchmarks::perftest::{bandwidth, latency};
use crate::benchmarks::torus::{Torus, all_to_all, small_packet_latency};
use crate::engine::{BytesPerSecond, Picos};
use crate::measure::stencil_rates;
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::path::data_path;
use crate::path::{DataPath, Verb};
use crate::precision::Precision;
use crate::sites::{shipped, shipped_with};
use millstream_report::chart::{Chart, Series};
use millstream_torus_core::DeadSet;

/// File name without extension, and the chart.
pub type Figure = (&'static str, Chart);

fn chart(title: &str, x: &str, y: &str, log2_x: bool, series: Vec<Series>) -> Chart {
    Chart { title: title.to_owned(), x: x.to_owned(), y: y.to_owned(), log2_x, series }
}

/// A series whose points are computed in parallel.
fn series(name: impl Into<String>, xs: &[f64], y: impl Fn(f64) -> f64 + Sync) -> Series {
    let points = parallel_map(xs, |&x| (x, y(x)));
    Series { name: name.into(), points }
}

fn powers(from: u32, to: u32) -> Vec<f64> {
    (from..=to).map(|bit| f64::from(bit).exp2()).collect()
}

/// Name of a shipped site, and a memory clock of its card that differs from the site file.
type ClockedSite = (&'static str, Option<&'static str>);

fn shipped_path(p: &Parameters, (name, clock): ClockedSite, server: &str) -> DataPath {
    let settings: Vec<(&str, &str)> =
        clock.map(|clock| ("host.server.card.u280.memory.clock", clock)).into_iter().collect();
    let site = shipped_with(name, &settings);
    data_path(&site, p, &site.hosts[0].name, server).unwrap_or_else(|error| panic!("site {name}: {error}"))
}

fn verb_bandwidth(p: &Parameters, site: ClockedSite, server: &str, verb: Verb, size: f64) -> f64 {
    bandwidth(&shipped_path(p, site, server), verb, size as u32, 128, false).rate.as_gigabytes()
}

fn paths(p: &Parameters, verb: Verb) -> Chart {
    let sizes = powers(8, 22);
    let line = |name: &str, site: ClockedSite, server: &'static str| {
        series(name, &sizes, move |size| verb_bandwidth(p, site, server, verb, size))
    };
    let title = if verb == Verb::Read { "RDMA READ by path" } else { "RDMA WRITE by path" };
    let lines = vec![
        line("host to host", ("recipe-baseline", None), "server"),
        line("root complex, 450 MHz", ("recipe-baseline", None), "server.u280"),
        line("root complex, 250 MHz", ("recipe-baseline", Some("250 MHz")), "server.u280"),
        line("switch, 450 MHz", ("recipe-backplane", None), "server.u280"),
        line("switch, 250 MHz", ("recipe-backplane", Some("250 MHz")), "server.u280"),
    ];
    chart(title, "message size [B]", "bandwidth [GB/s]", true, lines)
}

fn stencil(p: &Parameters) -> Chart {
    let site = shipped("recipe-baseline");
    let rates = stencil_rates(Precision::Full, &site, p, &site.hosts[0].name, "server.u280");
    let [write, sweep, read] = rates
        .unwrap_or_else(|error| panic!("site recipe-baseline: {error}"))
        .map(BytesPerSecond::as_gigabytes);
    let tiles = [0.25, 0.5, 1.0, 2.0, 4.0];
    let lines = vec![
        series("write to the card", &tiles, |gb| gb / write),
        series("one sweep", &tiles, |gb| gb / sweep),
        series("read back", &tiles, |gb| gb / read),
        series("total", &tiles, |gb| gb / write + gb / sweep + gb / read),
    ];
    chart("Stencil on one card through the root complex", "tile [GB]", "time [s]", false, lines)
}

/// The torus of the shipped APEnet+ site.
#[must_use]
pub fn torus(p: &Parameters) -> Torus {
    let site = shipped("apenet-torus");
    let hop = Picos::from_nanos(p.get("apenet.hop.latency"));
    Torus {
        dimensions: site.tori[0].dimensions.clone(),
        rate: apenet::link_rate(p),
        packet_size: apenet::PACKET,
        buffer: 40_000,
        hop_latency: hop,
        end_latency: Picos::from_nanos(p.get("apenet.latency") * 1e3) - hop,
        cores: None,
        dead: DeadSet::new(),
    }
}

/// Network bandwidth per node of the LHCb event builder with all events available at the start.
fn event_builder(p: &Parameters, nodes: u16, shape: TrafficShaping) -> BytesPerSecond {
    let mut path = event_builder::Scenario::from_site(&shipped("event-builder-500"), p, Some(nodes))
        .unwrap_or_else(|error| panic!("the shipped site builds events: {error}"));
    path.configuration.traffic_shaping = shape;
    // Enough batches per builder unit to use every slot several times.
    let batches = 6 * u64::from(path.configuration.slots) * u64::from(nodes);
    (path.load.rate, path.load.events) = (None, batches * u64::from(path.load.batch));
    let outcome = event_builder::run(&path, event_builder::ModelLevel::Flows)
        .unwrap_or_else(|error| panic!("the shipped site builds events: {error}"));
    BytesPerSecond(outcome.network_rate().0 / f64::from(nodes))
}

fn builder(p: &Parameters) -> Chart {
    let nodes = powers(1, 7);
    let line =
        |name: &str, shape| series(name, &nodes, move |n| event_builder(p, n as u16, shape).as_gigabits());
    let load = event_builder::ReadoutLoad::lhcb(1.0);
    let needed = 40e6 * load.fragment * 8e-9;
    let lines = vec![
        line("barrel shifter", TrafficShaping::BarrelShifter),
        line("unshaped: in the order of assignment", TrafficShaping::Unshaped),
        // A node's transfers to itself do not use the network.
        series("40 MHz of events need", &nodes, |n| needed * (n - 1.0) / n),
    ];
    chart("Event builder by number of nodes", "nodes", "each node receives [Gb/s]", true, lines)
}

/// Two neighbouring nodes of the shipped torus.
fn neighbours(p: &Parameters, client: &str, server: &str) -> DataPath {
    data_path(&shipped("apenet-torus"), p, client, server)
        .unwrap_or_else(|error| panic!("shipped sites carry flows: {error}"))
}

fn translation(p: &Parameters) -> Chart {
    let sizes = powers(9, 22);
    let line = |name: &str, entries: f64| {
        let path = neighbours(&p.with("apenet.translate.entries", entries), "node0", "node1");
        series(name, &sizes, move |size| {
            bandwidth(&path, Verb::Write, size as u32, 128, false).rate.as_gigabytes()
        })
    };
    let lines = vec![
        line("hardware, 512 pages", 512.0),
        line("hardware, 64 pages", 64.0),
        line("software, no table", 0.0),
    ];
    chart(
        "Address translation of RDMA WRITEs into one buffer",
        "message and buffer [B]",
        "bandwidth [GB/s]",
        true,
        lines,
    )
}

fn watchdog(p: &Parameters) -> Chart {
    // Host and adapter each write a register once per period and read the other's. A failure just after a
    // write is detected at the second read after it; its neighbours are notified one hop later.
    let hop = (p.get("apenet.latency") + p.get("apenet.hop.latency") * 1e-3) * 1e-3;
    let periods = [10.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0];
    let lines = vec![
        series("other half, at the latest", &periods, |t| 2.0 * t),
        series("other half, on average", &periods, |t| 1.5 * t),
        series("neighbours, at the latest", &periods, move |t| 3.0 * t + hop),
    ];
    chart("Watchdog: period against detection", "period [ms]", "time to detection [ms]", false, lines)
}

/// Computes all figures; calls `progress` with each name first.
#[must_use]
pub fn all(p: &Parameters, mut progress: impl FnMut(&str)) -> Vec<Figure> {
    selected(p, |name| {
        progress(name);
        true
    })
}

/// Computes the figures whose names `wanted` accepts; it is called once per name.
#[must_use]
pub fn selected(p: &Parameters, mut wanted: impl FnMut(&str) -> bool) -> Vec<Figure> {
    let sizes = powers(9, 12);
    let ends = [
        ("host to host", "node0", "node1"),
        ("host to GPU", "node0", "node1.gpu"),
        ("GPU to host", "node0.gpu", "node1"),
        ("GPU to GPU", "node0.gpu", "node1.gpu"),
    ];
    let mut figures = Vec::new();
    let mut draw = |name: &'static str, make: &dyn Fn() -> Chart| {
        if wanted(name) {
            figures.push((name, make()));
        }
    };
    draw("paths-write", &|| paths(p, Verb::Write));
    draw("paths-read", &|| paths(p, Verb::Read));
    draw("stencil", &|| stencil(p));
    draw("dma-engines", &|| {
        let line = |n: u32| {
            series(format!("{n} engine{}", if n > 1 { "s" } else { "" }), &sizes, move |size| {
                apenet::dma_read_bandwidth(p, n, size as u32).as_gigabytes()
            })
        };
        chart(
            "DMA engines, reads of host memory",
            "packet of a long message [B]",
            "bandwidth [GB/s]",
            true,
            vec![line(1), line(2)],
        )
    });
    draw("translation", &|| translation(p));
    draw("round-trip", &|| {
        let lines = (ends.iter())
            .map(|&(name, client, server)| {
                let path = neighbours(p, client, server);
                // perftest reports half a round trip.
                series(name, &powers(5, 12), move |size| {
                    2.0 * latency(&path, Verb::Write, size as u32).nanos() * 1e-3
                })
            })
            .collect();
        chart("Round trip between neighbours of the torus", "message [B]", "time [µs]", true, lines)
    });
    draw("torus-hops", &|| {
        let torus = torus(p);
        // Nodes 0 and 42 are six hops apart; the other nodes are nearer.
        let far = [1usize, 2, 6, 10, 26, 42];
        let line = Series {
            name: "small message".to_owned(),
            points: (far.iter())
                .filter_map(|&to| {
                    let latency = small_packet_latency(&torus, 0, to)?;
                    Some((torus.hops(0, to)?.len() as f64, latency.nanos() * 1e-3))
                })
                .collect(),
        };
        chart("Torus: latency by hops", "hops", "one way [µs]", false, vec![line])
    });
    draw("torus-all-to-all", &|| {
        let torus = torus(p);
        let sizes = powers(12, 17);
        let ceiling = torus.bisection().as_gigabytes() * 63.0 / 32.0;
        let lines = vec![
            series("all-to-all, 64 nodes", &sizes, |size| {
                all_to_all(&torus, size as u64).rate.as_gigabytes()
            }),
            series("bisection allows", &sizes, |_| ceiling),
        ];
        chart("Torus 4 × 4 × 4: all-to-all", "message [B]", "all nodes [GB/s]", true, lines)
    });
    draw("ib-write-bw", &|| {
        let line = |name: &str, site: &'static str| {
            series(name, &powers(6, 20), move |size| {
                verb_bandwidth(p, (site, None), "node1", Verb::Write, size) * 8.0
            })
        };
        let lines = vec![
            line("FDR, E5-2683 v3", "lhcb-pair-fdr-e5"),
            line("QDR, E5-2683 v3", "lhcb-pair-qdr-e5"),
            line("EDR", "edr-pair"),
        ];
        chart("ib_write_bw by buffer size", "buffer [B]", "bandwidth [Gb/s]", true, lines)
    });
    draw("event-builder", &|| builder(p));
    draw("watchdog", &|| watchdog(p));
    figures
}
