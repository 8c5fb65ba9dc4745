//! The fit of a site to measurements: known parameters are found again, and unseen sizes predicted.

use millstream_model::fit_site::{DeviceFile, SiteFitReport, fit_site};
use millstream_model::measure::{Benchmark, value};
use millstream_model::measurements;
use millstream_model::sites::{SHIPPED, shipped};
use millstream_model::{Parameters, path::Verb};

const BETWEEN: (&str, &str) = ("node0", "node1");
const WRITE: Benchmark = Benchmark::Bandwidth(Verb::Write);
const LATENCY: Benchmark = Benchmark::Latency(Verb::Write);

/// Output of perftest on a machine whose adapter differs from the library's.
fn perftest_output(truth: &Parameters) -> String {
    let site = shipped("edr-pair");
    let run = |benchmark, size| value(&site, truth, benchmark, BETWEEN, size).unwrap();
    let mut text =
        "RDMA_Write BW Test\n#bytes #iterations BW peak[MB/sec] BW average[MB/sec] MsgRate[Mpps]\n"
            .to_owned();
    for size in [64u64, 512, 2048, 65536] {
        let rate = run(WRITE, size) / 1_048_576.0;
        text += &format!("{size} 5000 {rate:.3} {rate:.3} 0.1\n");
    }
    text +=
        "RDMA_Write Latency Test\n#bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec]\n";
    for size in [2u64, 256, 4096, 65536] {
        let time = run(LATENCY, size) * 1e6;
        text += &format!("{size} 1000 {time:.4} 9.0 {time:.4} {time:.4}\n");
    }
    text
}

#[test]
fn known_parameters_are_found_again_and_unseen_sizes_predicted() {
    let p = Parameters::shipped();
    let truth = p
        .with("connectx-4.message.gap", 185.0)
        .with("connectx-4.long.message.gap", 230.0)
        .with("connectx-4.gather.latency", 60.0);
    let text = perftest_output(&truth);
    let site = shipped("edr-pair");
    let fit = fit_site(&site, &p, &measurements::parse("perftest.txt", &text).unwrap(), BETWEEN).unwrap();
    let report = SiteFitReport(&fit).to_string();

    let found = |name: &str| {
        fit.parameters.iter().find(|q| q.name == name).unwrap_or_else(|| panic!("{name}: {report}"))
    };
    for name in ["connectx-4.message.gap", "connectx-4.long.message.gap"] {
        let q = found(name);
        assert!(q.is_determined && (q.after / truth.get(name) - 1.0).abs() < 0.04, "{name}: {report}");
        assert!(q.range[0] <= truth.get(name) && truth.get(name) <= q.range[1], "{name}: {report}");
    }
    // WRITEs say nothing about READs, and one end of a latency is not told from the other.
    assert!(fit.without_effect.iter().any(|name| name == "connectx-4.read.gap"), "{report}");
    assert!(!found("connectx-4.rx.latency").is_determined, "{report}");
    for (benchmark, size) in [(WRITE, 1024), (LATENCY, 64), (LATENCY, 1024), (LATENCY, 32768)] {
        let run = |p: &Parameters| value(&site, p, benchmark, BETWEEN, size).unwrap();
        let off = (run(&fit.fitted) / run(&truth) - 1.0).abs();
        assert!(off < 0.04, "{benchmark:?} {size}: off by {off}; before {}\n{report}", run(&p) / run(&truth));
    }

    // The device file has the same effect as the fit.
    let file = DeviceFile { fit: &fit, site: &site, source: "perftest.txt" }.to_string();
    let edr = SHIPPED.iter().find(|(name, _)| *name == "edr-pair").unwrap().1;
    let own = millstream_site::parse("own.toml", &format!("{edr}\n{file}"))
        .unwrap_or_else(|error| panic!("{error}\n{file}"));
    for (benchmark, size) in [(WRITE, 512), (LATENCY, 4096)] {
        let (fitted, filed) =
            (value(&site, &fit.fitted, benchmark, BETWEEN, size), value(&own, &p, benchmark, BETWEEN, size));
        let off = (fitted.unwrap() / filed.unwrap() - 1.0).abs();
        assert!(off < 0.02, "{benchmark:?} {size}: {off}\n{file}");
    }
}

#[test]
fn a_benchmark_that_the_site_cannot_run_is_an_error() {
    let p = Parameters::shipped();
    let rows = measurements::parse("m", "benchmark,bytes,value,unit\ndma_read_bw,64,20,Gb/s\n").unwrap();
    let error = fit_site(&shipped("edr-pair"), &p, &rows, BETWEEN).unwrap_err().to_string();
    assert!(error.contains("host.adapter"), "{error}");
    let error = fit_site(&shipped("edr-pair"), &p, &rows, ("node0", "nobody")).unwrap_err().to_string();
    assert!(error.contains("node0") || error.contains("nobody"), "{error}");
}
