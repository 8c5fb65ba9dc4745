//! Benchmarks by name on shipped sites: definitions, analytic results, consistency.

use millstream_model::Parameters;
use millstream_model::benchmarks::apenet;
use millstream_model::benchmarks::osu::{self, Mpi, MpiLibrary};
use millstream_model::benchmarks::perftest::{bandwidth, latency};
use millstream_model::explain::{explain, explain_sweep, sweep_table};
use millstream_model::figures;
use millstream_model::measure::{BENCHMARKS, Benchmark, BenchmarkError, measure, measure_with_intervals};
use millstream_model::path::data_path;
use millstream_model::path::{DataPath, Verb};
use millstream_model::result_table::TableValue;
use millstream_model::sites::{SHIPPED, shipped};
use millstream_model::sweep::{apply, combinations, settings};

fn near(a: f64, b: f64, part: f64) -> bool {
    (a / b - 1.0).abs() <= part
}

fn run(benchmark: &str, site: &str, ends: (&str, &str), sizes: &[u64]) -> Vec<Vec<f64>> {
    let benchmark: Benchmark = benchmark.parse().unwrap();
    let rows = measure(&shipped(site), &Parameters::shipped(), benchmark, ends, sizes).unwrap();
    let number = |cell: &TableValue| if let TableValue::Number(value) = cell { *value } else { f64::NAN };
    rows.iter().map(|row| row.iter().map(number).collect()).collect()
}

fn between(site: &str, client: &str, server: &str) -> DataPath {
    data_path(&shipped(site), &Parameters::shipped(), client, server).unwrap()
}

#[test]
fn every_benchmark_runs_by_name() {
    for about in BENCHMARKS {
        assert_eq!(about.name.parse::<Benchmark>().unwrap().info().name, about.name);
        let (site, ends, sizes) = match about.name {
            name if name.starts_with("dma") => {
                ("pcie-bench", ("broadwell.nfp", "broadwell.socket1"), [64, 1024])
            }
            name if name.starts_with("mlc") => ("cxl-memory", ("node0", "node0.expander"), [8, 64]),
            "stencil" => ("recipe-baseline", ("client", "server.u280"), [64, 1024]),
            _ => ("edr-pair", ("node0", "node1"), [64, 1024]),
        };
        for row in run(about.name, site, ends, &sizes) {
            assert_eq!(row.len(), 1 + about.columns.len(), "{}", about.name);
            assert!(row.iter().all(|value| value.is_finite() && *value > 0.0), "{}: {row:?}", about.name);
        }
    }
    assert!("osu_nothing".parse::<Benchmark>().unwrap_err().contains("osu_bibw"));
}

#[test]
fn units_match_the_real_programs() {
    // perftest's MiB/s, Gb/s and message rate are one rate (row B05).
    let row = &run("ib_write_bw", "edr-pair", ("node0", "node1"), &[65536])[0];
    assert!(near(row[1] * f64::from(1 << 20) * 8e-9, row[2], 1e-9));
    assert!(near(row[3] * 1e6 * 65536.0 * 8e-9, row[2], 1e-9));
    // READ latency is a full round trip, the others are half of one (row B06).
    let [write, read] = ["ib_write_lat", "ib_read_lat"]
        .map(|benchmark| run(benchmark, "edr-pair", ("node0", "node1"), &[8])[0][1]);
    assert!(read > 1.3 * write, "{read} against {write}");
    // pcie-bench's read latency and bandwidth match the calibration (rows P42, P23).
    let ends = ("haswell.nfp", "haswell");
    assert!(near(run("dma_read_lat", "pcie-bench", ends, &[512])[0][1], 746.7, 0.05));
    assert!(near(run("dma_read_bw", "pcie-bench", ends, &[512])[0][1], 55.11, 0.05));
    assert!(near(run("dma_write_bw", "pcie-bench", ends, &[1024])[0][1], 54.44, 0.05));
    let [near_socket, far] = ["broadwell", "broadwell.socket1"]
        .map(|memory| run("dma_read_lat", "pcie-bench", ("broadwell.nfp", memory), &[64])[0][1]);
    assert!(far > near_socket + 20.0, "{far} ns over the other socket, {near_socket} ns here");
}

#[test]
fn dma_reads_of_two_engines_are_faster_than_of_one() {
    let p = Parameters::shipped();
    let site = shipped("apenet-torus");
    let benchmark = "dma_read_bw".parse().unwrap();
    let rate = |engines: f64| {
        let p = p.with("apenet.engines", engines);
        let rows = measure(&site, &p, benchmark, ("node0.apenet", "node0"), &[4096]).unwrap();
        if let TableValue::Number(value) = rows[0][1] { value } else { f64::NAN }
    };
    assert!(near(rate(1.0) / rate(2.0), 1.0 - apenet::gain_of_two_engines(&p), 1e-6));
}

#[test]
fn invalid_measurements_are_refused_with_the_reason() {
    let p = Parameters::shipped();
    let fails = |benchmark: &str, site: &str, ends: (&str, &str), size: u64| {
        measure(&shipped(site), &p, benchmark.parse().unwrap(), ends, &[size]).unwrap_err()
    };
    for (error, why) in [
        (fails("ib_write_bw", "edr-pair", ("node0", "node7"), 8), "\"node7\": the site has no host"),
        (fails("ib_write_bw", "edr-pair", ("node0", "node0"), 8), "are on one host"),
        (fails("ib_write_bw", "pcie-bench", ("haswell", "broadwell"), 8), "no network link"),
        (fails("ib_write_bw", "edr-pair", ("node0", "node1"), 0), "size 0 is out of range"),
        (fails("osu_bw", "edr-pair", ("node0", "node1"), 1 << 31), "size 2147483648 is out of range"),
        (fails("dma_read_bw", "pcie-bench", ("haswell", "haswell"), 64), "needs host.adapter as client"),
        (fails("dma_read_bw", "pcie-bench", ("haswell.nfp", "haswell.socket2"), 64), "haswell.socket2"),
        (fails("dma_read_bw", "edr-pair", ("node0.hca", "node0"), 64), "NFP-6000"),
        (fails("stencil", "edr-pair", ("node0", "node1"), 64), "a card with memory"),
    ] {
        assert!(error.to_string().contains(why), "{error}");
    }
    let error = fails("dma_read_bw", "edr-pair", ("node0.hca", "node0"), 64);
    assert!(matches!(error, BenchmarkError::NoDmaEngine { .. }));
}

#[test]
fn mpi_is_slower_than_its_transport() {
    let p = Parameters::shipped();
    let (path, mpi) = (between("edr-pair", "node0", "node1"), Mpi::new(&p, MpiLibrary::Mvapich2));
    for size in [8, 4096, 1 << 16, 1 << 20] {
        let (mpi_latency, below) = (osu::latency(&path, &mpi, size), latency(&path, Verb::Send, size));
        assert!(mpi_latency > below, "{size}: {mpi_latency} over {below}");
        // Above the eager limit, RTS and CTS precede the payload.
        let extra = if size > mpi.eager_limit { 2 } else { 0 };
        let control = latency(&path, Verb::Send, 64);
        assert!(
            mpi_latency.0 > below.0 + extra * control.0,
            "{size}: {mpi_latency} over {below} and {extra} control messages of {control}"
        );
    }
    // The link limits a window of long messages, which reaches most of it.
    let ceiling = bandwidth(&path, Verb::Send, 1 << 20, 64, false).rate.0;
    let window = osu::bandwidth(&path, &mpi, 1 << 20, false).rate.0;
    assert!(window < ceiling && window > 0.9 * ceiling, "{window} of {ceiling}");
    let both = osu::bandwidth(&path, &mpi, 1 << 20, true).rate.0;
    assert!(both > 1.5 * window && both < 2.0 * ceiling, "{both} both ways, {window} one way");
}

#[test]
fn published_latencies_match() {
    let p = Parameters::shipped();
    // osu_latency between two accelerators without hosts (row N01).
    let osu = run("osu_latency", "extoll-booster", ("booster0.mic", "booster1.mic"), &[8])[0][1];
    assert!(near(osu, p.get("extoll.latency"), 0.01), "{osu}");
    // Link, headers and the accelerator's read limit determine osu_bw of long messages.
    let bw = run("osu_bw", "extoll-booster", ("booster0.mic", "booster1.mic"), &[65536])[0][1] * 1e6;
    assert!(near(bw, millstream_model::benchmarks::extoll::bandwidth(&p).0, 0.02), "{bw}");
    // Neighbours of the torus (row A25), and each further hop.
    let at = |node: &str| run("ib_write_lat", "apenet-torus", ("node0", node), &[8])[0][1];
    assert!(near(at("node1"), p.get("apenet.latency"), 0.01), "{}", at("node1"));
    let hop = p.get("apenet.hop.latency") * 1e-3;
    assert!((at("node42") - at("node1") - 5.0 * hop).abs() < 0.1 * hop, "{}", at("node42"));
    // GPU memory at both ends.
    let gpus = run("ib_write_lat", "apenet-torus", ("node0.gpu", "node1.gpu"), &[8])[0][1];
    assert!(near(gpus, apenet::small_latency(&p, true, true), 0.01), "{gpus}");
}

#[test]
fn software_translation_limits_bandwidth_by_its_time_per_packet() {
    let p = Parameters::shipped();
    let rate = |entries: f64, size: u32| {
        let p = p.with("apenet.translate.entries", entries);
        let path = data_path(&shipped("apenet-torus"), &p, "node0", "node1").unwrap();
        bandwidth(&path, Verb::Write, size, 64, false).rate.0
    };
    let per_packet = p.get("apenet.translate.software") / p.get("apenet.processor.utilization");
    let software = rate(0.0, 1 << 16);
    assert!(near(software, 4096.0 / per_packet * 1e9, 0.02), "{software}");
    let hardware = rate(64.0, 1 << 16);
    assert!(hardware > 1.2 * software, "{hardware} against {software}");
    // A buffer with more pages than the table always misses; a smaller one hits after the first round.
    assert!(near(rate(16.0, 1 << 18), rate(0.0, 1 << 18), 0.01));
    assert!(near(rate(64.0, 1 << 18), rate(512.0, 1 << 18), 0.02));
    // The receive path alone is as slow in software, and an upper bound in hardware.
    let alone =
        |nanos: f64| apenet::receive_bandwidth(&p, millstream_model::engine::Picos::from_nanos(nanos)).0;
    assert!(near(software, alone(per_packet), 0.02));
    assert!(hardware <= alone(p.get("apenet.translate.hardware")) * 1.001);
}

#[test]
fn a_flow_over_a_torus_is_explained() {
    let p = Parameters::shipped();
    let site = shipped("apenet-torus");
    let flow = "write node0 node42 65536".parse().unwrap();
    let e = explain(&site, &p, &flow, 20).unwrap();
    let [low, high] = e.interval.unwrap();
    assert!(low.0 < e.rate.0 && e.rate.0 <= high.0, "{e}");
    assert_eq!(e, explain(&site, &p, &flow, 20).unwrap(), "intervals are reproducible");
    // Six hops: the first link and five more, named after their nodes.
    let links = e.channels.iter().filter(|s| s.name.contains("link") && !s.name.contains("pcie")).count();
    assert_eq!(links, 6, "{e}");
    let shown = e.to_string();
    assert!(
        shown.contains("bottleneck: ") && shown.contains("\nnext: ") && shown.contains("link +z"),
        "{shown}"
    );
    // The measured interval is between completions, which vary by less than one packet.
    assert!(e.rate.0 <= apenet::link_rate(&p).0 * 1.001, "{shown}");
    // With fewer lanes, the torus links are the bottleneck.
    let (site, p) = apply("t", text("apenet-torus"), &[("torus.torus.lanes", "1")]).unwrap();
    let slow = explain(&site, &p, &flow, 0).unwrap();
    assert!(slow.bottleneck().contains("link") && !slow.bottleneck().contains("pcie"), "{slow}");
    assert!(slow.rate.0 < 0.5 * e.rate.0, "{slow}");
}

fn text(site: &str) -> &'static str {
    SHIPPED.iter().find(|(name, _)| *name == site).map(|(_, text)| *text).unwrap()
}

#[test]
fn sweeps_cover_parameters_and_site_fields() {
    let words = ["link.0.rate=QDR,FDR,EDR", "connectx-4.message.gap=100..300+100"].map(str::to_owned);
    let settings = settings(&words).unwrap();
    let points = combinations(&settings).unwrap();
    let flow = "write node0 node1 65536".parse().unwrap();
    let explanations = explain_sweep(("edr-pair", text("edr-pair")), &points, &flow, 0).unwrap();
    let table = sweep_table("edr-pair", &flow, &points, &explanations);
    assert_eq!((table.rows.len(), table.columns.len()), (9, 7));
    let rate = |row: usize| if let TableValue::Number(value) = table.rows[row][2] { value } else { f64::NAN };
    assert!(rate(0) < rate(3) && rate(3) < rate(6), "faster links carry more: {table}");
    assert!(table.rows.iter().all(|row| row[3].to_string().contains("link")), "{table}");
    let chart = table.chart(1, 2, &[0]);
    assert_eq!(chart.series.len(), 3);
    assert_eq!(table.csv().lines().count(), 10);
}

#[test]
fn invalid_site_settings_are_refused() {
    for (path, value, why) in [
        ("host.node.adapter.hca.pcie.lanes", "7", "7 lanes"),
        ("host.nowhere.adapter.hca.pcie.lanes", "8", "no \"nowhere\""),
        ("link.0.rate", "SDR", "QDR, FDR"),
        ("connectx-4.nothing", "1", "no parameter"),
        ("connectx-4.message.gap", "fast", "must be a number"),
    ] {
        let error = apply("edr.toml", text("edr-pair"), &[(path, value)]).unwrap_err().to_string();
        assert!(error.contains(why), "{path}={value}: {error}");
    }
}

#[test]
fn figures_have_the_expected_shapes() {
    let p = Parameters::shipped();
    let mut names = Vec::new();
    let cheap = ["stencil", "dma-engines", "translation", "round-trip", "torus-hops", "watchdog"];
    let drawn = figures::selected(&p, |name| {
        names.push(name.to_owned());
        cheap.contains(&name)
    });
    for name in
        ["paths-write", "paths-read", "torus-all-to-all", "ib-write-bw", "event-builder"].iter().chain(&cheap)
    {
        assert!(names.iter().any(|known| known == name), "{name} is not in {names:?}");
    }
    assert_eq!(drawn.len(), cheap.len());
    for (name, chart) in &drawn {
        let points: usize = chart.series.iter().map(|series| series.points.len()).sum();
        assert_eq!(chart.csv().lines().count(), points + 1, "{name}");
        assert!(chart.x.contains('[') || chart.x == "hops", "{name}: an axis has a unit: {}", chart.x);
        assert!(chart.y.contains('['), "{name}: {}", chart.y);
        for series in &chart.series {
            let ys: Vec<f64> = series.points.iter().map(|point| point.1).collect();
            assert!(ys.iter().all(|y| y.is_finite() && *y > 0.0), "{name}: {ys:?}");
            // All series but those of the translation figure grow along the axis.
            let grows = ys.windows(2).all(|pair| pair[1] >= pair[0] * 0.999);
            assert!(grows || *name == "translation", "{name}, {}: {ys:?}", series.name);
        }
    }
    let (_, translation) = drawn.iter().find(|(name, _)| *name == "translation").unwrap();
    let last = |i: usize| translation.series[i].points.last().unwrap().1;
    // At 4 MiB no translation table covers the buffer, so all are equally slow.
    assert!(near(last(0), last(2), 0.02) && near(last(1), last(2), 0.02));
    let at_256k = |i: usize| translation.series[i].points.iter().find(|p| p.0 == 262_144.0).unwrap().1;
    assert!(at_256k(0) > 1.2 * at_256k(2));
}

#[test]
fn every_benchmark_of_adapters_has_intervals_around_its_values() {
    for (name, site, ends, sizes) in [
        ("ib_write_bw", "edr-pair", ("node0", "node1"), &[256, 65536][..]),
        ("ib_read_lat", "edr-pair", ("node0", "node1"), &[8]),
        ("osu_latency", "edr-pair", ("node0", "node1"), &[8]),
        ("mlc_read_bw", "cxl-memory", ("node0", "node0.expander"), &[64]),
    ] {
        let benchmark: Benchmark = name.parse().unwrap();
        let (site, p) = (shipped(site), Parameters::shipped());
        let rows = measure_with_intervals(&site, &p, benchmark, ends, sizes, 200).unwrap();
        assert_eq!(rows.len(), sizes.len(), "{name}");
        for row in rows {
            let number =
                |cell: &TableValue| if let TableValue::Number(value) = cell { *value } else { f64::NAN };
            let numbers: Vec<f64> = row.iter().map(number).collect();
            assert_eq!(numbers.len(), 1 + benchmark.info().columns.len() + 2, "{name}");
            let [.., low, high] = numbers[..] else { unreachable!("two ends") };
            let value = numbers[1 + benchmark.main_column()];
            assert!(low < value && value <= high && high < 3.0 * low, "{name}: {low} {value} {high}");
        }
    }
}
