//! Memory behind CXL links: flits, latency, bandwidth, and what limits it, against values computed by hand.

use millstream_model::Parameters;
use millstream_model::benchmarks::perftest::{bandwidth, latency};
use millstream_model::explain::{Flow, explain};
use millstream_model::flows::{Routing, concurrent};
use millstream_model::measure::{Benchmark, measure, value};
use millstream_model::path::{Verb, core_access, data_path, hops};
use millstream_model::sites::{shipped, shipped_with};
use millstream_site::Site;

fn near(a: f64, b: f64, part: f64) -> bool {
    (a / b - 1.0).abs() <= part
}

fn result(site: &Site, p: &Parameters, benchmark: &str, server: &str, size: u64) -> f64 {
    let benchmark: Benchmark = benchmark.parse().unwrap();
    value(site, p, benchmark, ("node0", server), size).unwrap()
}

/// GB/s of a link after line code and control flits.
fn line_rate(p: &Parameters, gigatransfers: f64, lanes: f64, encoding: f64) -> f64 {
    gigatransfers / 8.0 * lanes * encoding * p.get("cxl.efficiency")
}

#[test]
fn flits_of_68_bytes_limit_reads_and_writes() {
    let p = Parameters::shipped();
    // A memory that never limits.
    let memory = [("host.node.cxl-memory.expander.bandwidth", "1 TB/s")];
    let site = shipped_with("cxl-memory", &memory);
    let link = line_rate(&p, 32.0, 8.0, 128.0 / 130.0);
    // Nine slots for two lines read, five for a line written; a slot is a quarter of a flit.
    let reads = link * 64.0 / (4.5 * 17.0);
    let writes = link * 64.0 / (5.0 * 17.0);
    let found = [
        result(&site, &p, "mlc_read_bw", "node0.expander", 64) * 1e-9,
        result(&site, &p, "mlc_write_bw", "node0.expander", 64) * 1e-9,
        result(&site, &p, "mlc_rw_bw", "node0.expander", 64) * 1e-9,
    ];
    assert!(near(found[0], reads, 0.01), "reads {} of {reads}", found[0]);
    assert!(near(found[1], writes, 0.01), "writes {} of {writes}", found[1]);
    // Of three lines, two load S2M with data (9 slots) and one with a completion (half a slot).
    let both = link * 3.0 * 64.0 / (9.5 * 17.0);
    assert!(near(found[2], both, 0.01), "both {} of {both}", found[2]);
    assert!(found[2] > 1.2 * found[0], "both directions carry data");
    // A write of 8 bytes takes the slots of a line, and one for byte enables.
    let partial = result(&site, &p, "mlc_write_bw", "node0.expander", 8) * 1e-9;
    assert!(near(partial, link * 8.0 / (6.0 * 17.0), 0.01), "{partial}");
}

#[test]
fn flits_of_256_bytes_have_fifteen_slots_and_no_line_code_at_64_gigatransfers() {
    let p = Parameters::shipped()
        .with("sapphirerapids-sp.cxl.lines", 2000.0)
        .with("sapphirerapids-sp.fill.buffers", 48.0);
    let memory = [("host.node.cxl-memory.wide.bandwidth", "1 TB/s")];
    let site = shipped_with("cxl-memory", &memory);
    let link = line_rate(&p, 64.0, 16.0, 1.0);
    let reads = result(&site, &p, "mlc_read_bw", "node0.wide", 64) * 1e-9;
    let writes = result(&site, &p, "mlc_write_bw", "node0.wide", 64) * 1e-9;
    // 14 G slots and an H slot with two headers: 44 headers, or 44/13 lines.
    assert!(near(reads, link * 44.0 / 13.0 * 64.0 / 256.0, 0.01), "{reads}");
    assert!(near(writes, link * 3.0 * 64.0 / 256.0, 0.01), "{writes}");
}

#[test]
fn a_copy_out_of_cxl_memory_is_limited_by_the_cores_whichever_end_names_it() {
    let site = shipped("cxl-memory");
    let rate = |text: &str| {
        let flow = text.parse().unwrap();
        concurrent(&site, &Parameters::shipped(), &[flow], Routing::Deterministic).unwrap()[0].together.0
    };
    for (one, other) in [
        ("read node0 node0.wide", "write node0.wide node0"),
        ("write node0 node0.wide", "read node0.wide node0"),
    ] {
        assert!(near(rate(one), rate(other), 1e-9), "{one}: {}, {other}: {}", rate(one), rate(other));
    }
}

#[test]
fn the_idle_latency_is_the_sum_of_the_path() {
    let p = Parameters::shipped();
    let site = shipped("cxl-memory");
    let found = result(&site, &p, "mlc_idle_latency", "node0.expander", 64) * 1e9;
    let parts = [
        "sapphirerapids-sp.core.latency",
        "sapphirerapids-sp.cxl.port.latency",
        "cxl-memory.port.latency",
        "cxl-memory.read.latency",
    ];
    let sum: f64 = parts.iter().map(|name| p.get(name)).sum();
    // One slot to the memory and four and a half back.
    let link = line_rate(&p, 32.0, 8.0, 128.0 / 130.0);
    let expected = sum + 5.5 * 17.0 / link;
    assert!(near(found, expected, 0.001), "{found} of {expected}");
}

#[test]
fn lines_in_progress_and_the_memory_limit_cores() {
    let p = Parameters::shipped();
    let one_core = shipped_with("cxl-memory", &[("host.node.socket.0.cores", "1")]);
    let latency = result(&one_core, &p, "mlc_idle_latency", "node0.expander", 64);
    let rate = result(&one_core, &p, "mlc_read_bw", "node0.expander", 64);
    let expected = 16.0 * 64.0 / latency;
    assert!(near(rate, expected, 0.02), "{rate} of {expected}");
    let slow = shipped_with("cxl-memory", &[("host.node.cxl-memory.expander.bandwidth", "10 GB/s")]);
    let rate = result(&slow, &p, "mlc_read_bw", "node0.expander", 64) * 1e-9;
    assert!(near(rate, 10.0 * p.get("cxl-memory.memory.efficiency"), 0.01), "{rate}");
}

#[test]
fn adapters_write_to_and_read_from_cxl_memory_of_another_host() {
    let p = Parameters::shipped();
    let site = shipped("cxl-memory");
    let rate = |server: &str, verb| {
        let path = data_path(&site, &p, "node0", server).unwrap();
        bandwidth(&path, verb, 1 << 20, 128, false).rate.as_gigabytes()
    };
    let link = line_rate(&p, 32.0, 8.0, 128.0 / 130.0);
    let (writes, reads) = (link * 64.0 / 85.0, link * 64.0 / 76.5);
    for (verb, limit) in [(Verb::Write, writes), (Verb::Read, reads)] {
        let (host, expander) = (rate("node1", verb), rate("node1.expander", verb));
        assert!(host > limit, "{verb:?}: NDR is faster than eight lanes: {host}");
        assert!(expander <= 1.001 * limit && expander > 0.9 * limit, "{verb:?}: {expander} of {limit}");
    }
    // The wide link does not limit NDR.
    assert!(near(rate("node1.wide", Verb::Write), rate("node1", Verb::Write), 0.02));
    let late = |server: &str| {
        let path = data_path(&site, &p, "node0", server).unwrap();
        latency(&path, Verb::Read, 64).nanos()
    };
    // The link, both ports and the memory, less the DRAM of the host.
    let added = late("node1.expander") - late("node1");
    let expected = p.get("sapphirerapids-sp.cxl.port.latency")
        + p.get("cxl-memory.port.latency")
        + p.get("cxl-memory.read.latency")
        - p.get("sapphirerapids-sp.dram.latency");
    assert!((added - expected).abs() < 8.0, "{added} of {expected}");
}

#[test]
fn every_byte_of_an_adapter_arrives_whatever_the_size() {
    let p = Parameters::shipped();
    let site = shipped("cxl-memory");
    let path = data_path(&site, &p, "node0.expander", "node1.wide").unwrap();
    let mut before = 0.0;
    for size in [1, 63, 64, 65, 255, 256, 257, 4095, 4097, 100_000] {
        for verb in [Verb::Write, Verb::Read, Verb::Send] {
            let rate = bandwidth(&path, verb, size, 16, false).rate.as_gigabytes();
            assert!(rate > 0.0 && rate < 50.0, "{verb:?} {size}: {rate}");
        }
        let now = latency(&path, Verb::Write, size).nanos();
        assert!(now + 1.0 >= before, "{size}: {now} after {before}");
        before = now;
    }
}

#[test]
fn an_explanation_names_the_link_the_memory_and_the_cores() {
    let p = Parameters::shipped();
    let site = shipped("cxl-memory");
    let of_cores = explain(&site, &p, &"read node0 node0.expander".parse().unwrap(), 50).unwrap();
    let text = of_cores.to_string();
    assert!(text.contains("CXL 2.0, Gen5 x8, flits of 68 B") && text.contains("lines in progress"), "{text}");
    assert!(of_cores.bottleneck().contains("S2M"), "{text}");
    let [low, high] = of_cores.interval.unwrap();
    assert!(low.0 < of_cores.rate.0 && of_cores.rate.0 <= high.0, "{text}");
    let of_adapters =
        explain(&site, &p, &"write node0 node1.expander".parse().unwrap(), 0).unwrap().to_string();
    assert!(of_adapters.contains("server CXL M2S"), "{of_adapters}");
    let names: Vec<String> =
        hops(&site, &p, "node0", "node1.wide").unwrap().into_iter().map(|hop| hop.name).collect();
    assert!(names.iter().any(|name| name.contains("CXL 3.1, Gen6 x16, flits of 256 B")), "{names:?}");
    // Cores have no SENDs.
    let send: Flow = "send node0 node0.expander".parse().unwrap();
    assert!(explain(&site, &p, &send, 0).unwrap_err().to_string().contains("one host"));
}

#[test]
fn flows_share_a_cxl_link_by_direction() {
    let p = Parameters::shipped();
    let site = shipped_with("cxl-memory", &[("host.node.cxl-memory.expander.bandwidth", "1 TB/s")]);
    let rates = |flows: &[&str]| {
        let flows: Vec<Flow> = flows.iter().map(|flow| flow.parse().unwrap()).collect();
        concurrent(&site, &p, &flows, Routing::Deterministic).unwrap()
    };
    let link = line_rate(&p, 32.0, 8.0, 128.0 / 130.0);
    let both = rates(&["write node0 node0.expander", "write node1 node0.expander"]);
    let total: f64 = both.iter().map(|rate| rate.together.as_gigabytes()).sum();
    assert!(
        near(total, link * 64.0 / 85.0, 0.01) && both[0].limit.contains("node0.expander, CXL writes"),
        "{both:?}"
    );
    // Reads and writes have a direction each.
    let opposed = rates(&["write node1 node0.expander", "read node0 node0.expander"]);
    for rate in &opposed {
        assert!(near(rate.together.0, rate.alone.0, 1e-6), "{opposed:?}");
    }
    // From one device to the other, as cores or a DMA engine copy.
    let copy = rates(&["write node0.expander node0.wide"]);
    assert!(copy[0].limit.contains("node0.expander, CXL reads"), "{copy:?}");
}

#[test]
fn benchmarks_of_other_places_are_refused_with_both_names() {
    let p = Parameters::shipped();
    let site = shipped("cxl-memory");
    let run = |client: &str, server: &str| {
        measure(&site, &p, "mlc_read_bw".parse().unwrap(), (client, server), &[64]).unwrap_err().to_string()
    };
    for (client, server) in
        [("node0", "node1"), ("node0", "node1.expander"), ("node0", "node0.hca"), ("node0", "nobody.x")]
    {
        let error = run(client, server);
        assert!(error.contains(client) && error.contains(server) && error.contains("CXL memory"), "{error}");
    }
    let error =
        measure(&site, &p, "mlc_read_bw".parse().unwrap(), ("node0", "node0.expander"), &[128]).unwrap_err();
    assert!(error.to_string().contains("out of range, 1 to 64"), "{error}");
    assert!(core_access(&site, &p, "node1", "node0.expander").unwrap().is_none());
}
