//! Buffers of PCIe ports: their credits cover what is in flight, so a latency alone does not lower the rate of a stream.

use millstream_model::Parameters;
use millstream_model::benchmarks::perftest::bandwidth;
use millstream_model::path::{Verb, data_path};
use millstream_model::sites::shipped;

fn rate(site: &millstream_site::Site, p: &Parameters, client: &str, server: &str) -> f64 {
    let path = data_path(site, p, client, server).unwrap();
    bandwidth(&path, Verb::Write, 1 << 20, 128, false).rate.0
}

#[test]
fn a_stream_between_gpus_below_switches_reaches_the_link() {
    let (site, p) = (shipped("ndr-h100"), Parameters::shipped());
    let path = data_path(&site, &p, "node0.gpu", "node1.gpu").unwrap();
    let link = path.rate.0 * f64::from(path.mtu) / f64::from(path.mtu + path.overhead[0]);
    // The GPU's and the adapter's requests in progress cover these latencies.
    for latency in [60.0, 115.0, 200.0] {
        let now = rate(&site, &p.with("pex89144.latency", latency), "node0.gpu", "node1.gpu");
        assert!((0.97..=1.001).contains(&(now / link)), "{latency} ns: {now} of {link}");
    }
    // To host memory, the uplink of the switch is on the way.
    let now = rate(&site, &p, "node0", "node1");
    assert!(now > 0.97 * link, "{now} of {link}");
}

#[test]
fn a_stream_between_root_ports_has_the_rate_of_the_root_complex() {
    // GPUs and adapters below root ports of one socket; the network is faster. At 350 ns the adapter's reads in progress carry
    // less than 18 GB/s.
    let (site, p) = (shipped("hdr-a100"), Parameters::shipped());
    for (reads, latency) in [(18.0, 120.0), (18.0, 200.0), (12.0, 200.0), (12.0, 350.0)] {
        let p = p.with("milan.p2p.read.rate", reads).with("milan.p2p.latency", latency);
        let p = p.with("processor.p2p.latency", latency);
        let now = rate(&site, &p, "node0.root", "node1.root");
        assert!((now / (reads * 1e9) - 1.0).abs() < 0.02, "{latency} ns: {now} of {reads} GB/s");
    }
}
