//! Memory below CXL switches: latency, rates and shared upstream ports, against values computed by hand.

use millstream_model::Parameters;
use millstream_model::benchmarks::perftest::{bandwidth, latency};
use millstream_model::explain::{Flow, explain};
use millstream_model::flows::{Routing, concurrent};
use millstream_model::measure::{Benchmark, value};
use millstream_model::path::{Verb, data_path, hops};
use millstream_model::power::Inventory;
use millstream_model::sites::{SHIPPED, shipped, shipped_with};
use millstream_site::Site;

fn near(a: f64, b: f64, part: f64) -> bool {
    (a / b - 1.0).abs() <= part
}

fn result(site: &Site, p: &Parameters, benchmark: &str, server: &str) -> f64 {
    let benchmark: Benchmark = benchmark.parse().unwrap();
    value(site, p, benchmark, ("node0", server), 64).unwrap()
}

/// The site with memory directly at the socket, or below a second switch.
fn rewired(below: &str) -> Site {
    let text = SHIPPED.iter().find(|(name, _)| *name == "cxl-switch").unwrap().1;
    let text = match below {
        "socket0" => text.replace("parent = \"switch\"", "parent = \"socket0\""),
        second => {
            let entry = format!(
                "[[host.cxl-switch]]\nname = \"{second}\"\nmodel = \"CXL switch\"\nparent = \"switch\"\nlatency = \"100 ns\"\n\
                 cxl = {{ version = \"3.1\", generation = 5, lanes = 4 }}\n\n[[host.cxl-memory]]"
            );
            text.replace("parent = \"switch\"", &format!("parent = \"{second}\"")).replacen(
                "[[host.cxl-memory]]",
                &entry,
                1,
            )
        }
    };
    millstream_site::parse("rewired", &text).unwrap()
}

#[test]
fn a_switch_adds_its_latency_twice_and_one_more_serialisation() {
    let p = Parameters::shipped();
    let latency = |site: &Site| result(site, &p, "mlc_idle_latency", "node0.expander0") * 1e9;
    let direct = latency(&rewired("socket0"));
    let below = latency(&shipped("cxl-switch"));
    let of_switch = p.get("xconn-xc50256.latency");
    // One slot to the memory and four and a half back, over sixteen lanes.
    let link = 32.0 / 8.0 * 16.0 * 128.0 / 130.0 * p.get("cxl.efficiency");
    let expected = 2.0 * of_switch + 5.5 * 17.0 / link;
    assert!((below - direct - expected).abs() < 0.01, "{below} - {direct}: {expected}");
    // The site file's latency takes precedence.
    let given = shipped_with("cxl-switch", &[("host.node.cxl-switch.switch.latency", "50 ns")]);
    assert!((below - latency(&given) - 2.0 * (of_switch - 50.0)).abs() < 0.01);
    // A second switch of four lanes, with flits of 256 B.
    let two = latency(&rewired("second"));
    assert!(two - below > 200.0 && two - below < 240.0, "{two} - {below}");
}

#[test]
fn memory_below_a_switch_shares_the_upstream_port() {
    let p = Parameters::shipped();
    let site = shipped("cxl-switch");
    let rates = |flows: &[&str]| {
        let flows: Vec<Flow> = flows.iter().map(|flow| flow.parse().unwrap()).collect();
        concurrent(&site, &p, &flows, Routing::Deterministic).unwrap()
    };
    let link = 32.0 / 8.0 * 16.0 * 128.0 / 130.0 * p.get("cxl.efficiency");
    let all: Vec<String> = (0..4).map(|i| format!("read node0 node0.expander{i}")).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let shared = rates(&all);
    let total: f64 = shared.iter().map(|rate| rate.together.as_gigabytes()).sum();
    assert!(near(total, link * 64.0 / 76.5, 0.01), "{total}");
    assert!(shared.iter().all(|rate| rate.limit.contains("node0.switch uplink, CXL reads")), "{shared:?}");
    // Two memories of eight lanes do not fill sixteen; reads and writes have a direction each.
    let two = rates(&all[..2]);
    assert!(two.iter().all(|rate| near(rate.together.0, rate.alone.0, 1e-6)), "{two:?}");
    let opposed = rates(&[all[0], "write node0 node0.expander1"]);
    assert!(opposed.iter().all(|rate| near(rate.together.0, rate.alone.0, 1e-6)), "{opposed:?}");
    // Other hosts' adapters take part in it.
    let remote = rates(&["write node1 node0.expander0", "write node0 node0.expander0"]);
    assert!(remote.iter().any(|rate| rate.together.0 < 0.99 * rate.alone.0), "{remote:?}");
}

#[test]
fn the_narrowest_link_limits_cores_and_adapters() {
    let p = Parameters::shipped();
    let narrow = [
        ("host.node.cxl-switch.switch.cxl.lanes", "4"),
        ("host.node.cxl-memory.expander0.bandwidth", "1 TB/s"),
    ];
    let site = shipped_with("cxl-switch", &narrow);
    let link = 32.0 / 8.0 * 4.0 * 128.0 / 130.0 * p.get("cxl.efficiency");
    let cores = result(&site, &p, "mlc_write_bw", "node0.expander0") * 1e-9;
    assert!(near(cores, link * 64.0 / 85.0, 0.01), "{cores}");
    let path = data_path(&site, &p, "node0", "node1.expander0").unwrap();
    let adapters = bandwidth(&path, Verb::Write, 1 << 20, 128, false).rate.as_gigabytes();
    assert!(adapters <= 1.001 * link * 64.0 / 85.0 && adapters > 0.9 * link * 64.0 / 85.0, "{adapters}");
    let late = |site: &Site| {
        latency(&data_path(site, &p, "node0", "node1.expander0").unwrap(), Verb::Read, 64).nanos()
    };
    let added = late(&shipped("cxl-switch")) - late(&rewired("socket0"));
    assert!((added - 2.0 * p.get("xconn-xc50256.latency")).abs() < 8.0, "{added}");
}

#[test]
fn an_explanation_names_the_switch_and_its_power_counts() {
    let p = Parameters::shipped();
    let site = shipped("cxl-switch");
    let names = |client: &str, server: &str| -> Vec<String> {
        hops(&site, &p, client, server).unwrap().into_iter().map(|hop| hop.name).collect()
    };
    let of_adapters = names("node0", "node1.expander2");
    let at = |word: &str| of_adapters.iter().position(|name| name.contains(word)).unwrap();
    assert!(at("root complex, to CXL") < at("node1.switch uplink: CXL 2.0, Gen5 x16"), "{of_adapters:?}");
    assert!(at("switch uplink") < at("node1.expander2: CXL 2.0, Gen5 x8"), "{of_adapters:?}");
    let flow: Flow = "read node0 node0.expander0".parse().unwrap();
    let text = explain(&site, &p, &flow, 20).unwrap().to_string();
    assert!(text.contains("node0.switch uplink") && text.contains("uplink of switch S2M"), "{text}");
    let of_site = |site: &Site| Inventory::new(site, &p).active.0;
    let without = SHIPPED.iter().find(|(name, _)| *name == "cxl-switch").unwrap().1;
    let begin = without.find("[[host.cxl-switch]]").unwrap();
    let end = without.find("[[host.cxl-memory]]").unwrap();
    let without = (without[..begin].to_owned() + &without[end..])
        .replace("parent = \"switch\"", "parent = \"socket0\"");
    let without = millstream_site::parse("without", &without).unwrap();
    let expected = 2.0 * p.get("xconn-xc50256.power.active");
    assert!((of_site(&site) - of_site(&without) - expected).abs() < 1e-9);
}
