//! Networks of several switches, PCIe uplinks, loss, and concurrent flows, against values computed by hand.

use millstream_model::Parameters;
use millstream_model::benchmarks::perftest::{bandwidth, latency};
use millstream_model::explain::{Flow, explain};
use millstream_model::flows::{
    FlowIntervals, FlowRate, Pattern, Routing, concurrent, concurrent_with_intervals, table,
};
use millstream_model::path::{PathError, Verb, data_path, hops};
use millstream_model::sites::{shipped, shipped_with};
use millstream_model::ssd::{Access, CommandQueue};
use millstream_site::{Site, parse};

fn near(a: f64, b: f64, part: f64) -> bool {
    (a / b - 1.0).abs() <= part
}

fn hosts(count: u32) -> String {
    format!(
        r#"name = "s"
[[host]]
name = "node"
count = {count}
[[host.socket]]
processor = "EPYC 7742"
cores = 64
clock = "2.25 GHz"
[[host.adapter]]
name = "hca"
model = "ConnectX-6"
parent = "socket0"
pcie = {{ generation = 4, lanes = 16 }}
"#
    )
}

fn tree(count: u32, fields: &str) -> Site {
    let text = hosts(count)
        + "[[fat-tree]]\nname = \"ft\"\nadapters = \"node*.hca\"\nlatency = \"130 ns\"\nrate = \"HDR\"\nlength = \"2 m\"\n"
        + fields;
    parse("tree.toml", &text).unwrap()
}

fn pair(fields: &str) -> Site {
    let text = hosts(2)
        + "[[link]]\nfrom = \"node0.hca\"\nto = \"node1.hca\"\nrate = \"HDR\"\nlength = \"2 m\"\n"
        + fields;
    parse("pair.toml", &text).unwrap()
}

/// Payload rate of a link of `gigabits` with a MTU of 4096 and 26 bytes of headers, as ConnectX-6 uses it.
fn payload(p: &Parameters, gigabits: f64) -> f64 {
    gigabits / 8.0 * p.device("connectx-6", "link.efficiency").unwrap() * 4096.0 / 4122.0
}

fn flow(text: &str) -> Flow {
    text.parse().unwrap()
}

fn rates(site: &Site, flows: &[&str], routing: Routing) -> Vec<FlowRate> {
    let flows: Vec<Flow> = flows.iter().map(|flow| flow.parse().unwrap()).collect();
    concurrent(site, &Parameters::shipped(), &flows, routing).unwrap()
}

#[test]
fn every_switch_and_cable_of_a_route_adds_its_latency() {
    let p = Parameters::shipped();
    let one =
        |site: &Site, to: &str| latency(&data_path(site, &p, "node0", to).unwrap(), Verb::Write, 8).nanos();
    let direct = one(&pair(""), "node1");
    let site = tree(32, "ports = 8\n");
    // Hosts 0 to 3 share a leaf; host 31 is three switches and four cables of 10 ns away. Packets cut through.
    let (same_leaf, far) = (one(&site, "node1") - direct, one(&site, "node31") - direct);
    assert!(near(same_leaf, 130.0 + 10.0, 0.01), "{same_leaf}");
    assert!(near(far, 3.0 * 130.0 + 3.0 * 10.0, 0.01), "{far}");
}

#[test]
fn hops_of_a_route_have_names_rates_and_latencies() {
    let p = Parameters::shipped();
    let site = tree(32, "ports = 8\n");
    let all = hops(&site, &p, "node0", "node31").unwrap();
    let names: Vec<&str> = all.iter().map(|hop| hop.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "node0 memory",
            "node0 adapter: PCIe Gen4 x16, MPS 256, MRRS 512",
            "node0.hca to ft-leaf0",
            "ft-leaf0 to ft-spine3",
            "ft-spine3 to ft-leaf7",
            "ft-leaf7 to node31.hca",
            "node31 adapter: PCIe Gen4 x16, MPS 256, MRRS 512",
            "node31 memory",
        ]
    );
    assert!(near(all[2].rate.as_gigabytes(), payload(&p, 200.0), 1e-9), "{:?}", all[2]);
    assert!(near(all[2].latency.nanos(), 140.0, 1e-9) && near(all[5].latency.nanos(), 10.0, 1e-9));
    let report = explain(&site, &p, &"write node0 node31".parse().unwrap(), 0).unwrap().to_string();
    assert!(report.contains("ft-leaf0 to ft-spine3"), "{report}");
}

#[test]
fn host_memory_slower_than_the_link_limits_the_path() {
    let p = Parameters::shipped();
    let field = [("host.node.socket.0.memory-bandwidth", "5 GB/s")];
    let slow = explain(&shipped_with("edr-pair", &field), &p, &flow("write node0 node1"), 0).unwrap();
    assert!(near(slow.rate.as_gigabytes(), 5.0, 0.05), "{slow:?}");
    assert!(
        slow.hops.iter().any(|hop| hop.name == "node1 memory" && hop.rate.as_gigabytes() == 5.0),
        "{slow:?}"
    );
}

#[test]
fn a_slower_link_behind_a_switch_limits_the_path() {
    let p = Parameters::shipped();
    let text = hosts(2)
        + "[[switch]]\nname = \"s\"\nports = 4\nlatency = \"130 ns\"\n[[link]]\nfrom = \"node0.hca\"\nto = \"s\"\nrate = \"HDR\"\n\
           [[link]]\nfrom = \"node1.hca\"\nto = \"s\"\nrate = \"EDR\"\n";
    let site = parse("mixed.toml", &text).unwrap();
    for (client, server) in [("node0", "node1"), ("node1", "node0")] {
        let path = data_path(&site, &p, client, server).unwrap();
        let rate = bandwidth(&path, Verb::Write, 1 << 20, 128, false).rate.as_gigabytes();
        assert!(near(rate, payload(&p, 100.0), 0.005), "{client}: {rate}");
    }
}

#[test]
fn a_pcie_uplink_narrower_than_the_adapter_limits_host_memory() {
    let p = Parameters::shipped();
    let below = |uplink: &str| {
        let switch = format!(
            "[[host.pcie-switch]]\nname = \"sw\"\nmodel = \"PEX88096\"\nparent = \"socket0\"\npcie = {uplink}\n[[host.adapter]]"
        );
        let text = hosts(2).replace("[[host.adapter]]", &switch);
        let text = text.replace(
            "model = \"ConnectX-6\"\nparent = \"socket0\"",
            "model = \"ConnectX-6\"\nparent = \"sw\"",
        ) + "[[link]]\nfrom = \"node0.hca\"\nto = \"node1.hca\"\nrate = \"HDR\"\n";
        let site = parse("uplink.toml", &text).unwrap();
        let path = data_path(&site, &p, "node0", "node1").unwrap();
        let rate = bandwidth(&path, Verb::Write, 1 << 20, 128, false).rate.as_gigabytes();
        (rate, latency(&path, Verb::Write, 8).nanos())
    };
    // Gen3 x8: 8 GT/s, 128b/130b, TLPs of 256 + 24 B; writes of the receiver are the limit.
    let (rate, narrow_latency) = below("{ generation = 3, lanes = 8 }");
    let share = p.device("connectx-6", "pcie.efficiency").unwrap_or_else(|| p.get("pcie.efficiency"));
    let expected = 8.0 * 8.0 / 8.0 * 128.0 / 130.0 * 256.0 / 280.0 * share;
    assert!(near(rate, expected, 0.01), "{rate} of {expected}");
    let (rate, wide_latency) = below("{ generation = 4, lanes = 16 }");
    assert!(rate > 2.0 * expected, "{rate}");
    assert!(narrow_latency > wide_latency);
    // The switch of both hosts: 105 ns and a link of 60 ns each, on the doorbell's way to the adapter not counted.
    let direct = latency(&data_path(&pair(""), &p, "node0", "node1").unwrap(), Verb::Write, 8).nanos();
    let added = wide_latency - direct;
    assert!((150.0..=170.0).contains(&added), "{added}");
}

#[test]
fn loss_costs_a_round_trip_per_lost_packet() {
    let p = Parameters::shipped();
    let rate = |site: &Site| {
        let path = data_path(site, &p, "node0", "node1").unwrap();
        (bandwidth(&path, Verb::Write, 1 << 20, 128, false).rate.0, path)
    };
    let ((without, _), (with, path)) = (rate(&pair("")), rate(&pair("loss = 0.01\n")));
    // Go-back-N: of 100 packets one is lost, and what was sent until the NAK arrives is sent again.
    let packet = 4122.0 / path.rate.0;
    let expected = packet / (packet + path.loss_detection().seconds() * 0.01 / 0.99);
    assert!(expected < 0.97, "{expected}");
    assert!(near(with / without, expected, 0.002), "{} of {expected}", with / without);
}

#[test]
fn failed_links_are_avoided_or_named() {
    let p = Parameters::shipped();
    let names = |site: &Site| -> Vec<String> {
        hops(site, &p, "node0", "node31").unwrap().into_iter().map(|hop| hop.name).collect()
    };
    let failed = |from: &str, to: &str| format!("[[failed-link]]\nfrom = \"{from}\"\nto = \"{to}\"\n");
    let site = tree(32, &("ports = 8\n".to_owned() + &failed("ft-leaf7", "ft-spine3")));
    let around = names(&site);
    assert!(around.len() == 8 && !around.iter().any(|name| name.contains("spine3")), "{around:?}");
    let site = tree(32, &("ports = 8\n".to_owned() + &failed("node31.hca", "ft-leaf7")));
    let error = data_path(&site, &p, "node0", "node31").unwrap_err();
    assert!(matches!(error, PathError::NoLink { failed: 1, .. }), "{error}");
    assert!(error.to_string().contains("1 links of the site have failed"), "{error}");
}

#[test]
fn flows_to_one_host_share_its_link() {
    let p = Parameters::shipped();
    let site = tree(32, "ports = 8\n");
    let all = rates(
        &site,
        &["write node1 node0", "write node8 node0", "read node16 node4"],
        Routing::Deterministic,
    );
    let link = payload(&p, 200.0);
    for rate in &all[..2] {
        assert!(near(rate.together.as_gigabytes(), link / 2.0, 0.001), "{rate:?}");
        assert_eq!(rate.limit, "ft-leaf0 to node0.hca");
    }
    // The READ has its links for itself.
    assert!(near(all[2].together.0, all[2].alone.0, 1e-9), "{:?}", all[2]);
    let incast = Pattern::Incast("node3".to_owned()).flows(&site, 1 << 20).unwrap();
    let all = concurrent(&site, &p, &incast, Routing::Deterministic).unwrap();
    assert_eq!(all.len(), 31);
    let total: f64 = all.iter().map(|rate| rate.together.as_gigabytes()).sum();
    assert!(near(total, link, 0.001), "{total}");
}

#[test]
fn oversubscription_divides_the_uplinks() {
    // Leaves of 6 hosts and 2 uplinks: a shift by one leaf sends 6 flows over 2 links.
    let p = Parameters::shipped();
    let site = tree(12, "ports = 8\ndown = 6\n");
    let shift: Vec<Flow> = "shift:6".parse::<Pattern>().unwrap().flows(&site, 1 << 20).unwrap();
    for routing in [Routing::Deterministic, Routing::Adaptive] {
        for rate in concurrent(&site, &p, &shift, routing).unwrap() {
            assert!(
                near(rate.together.as_gigabytes(), payload(&p, 200.0) / 3.0, 0.001),
                "{routing:?}: {rate:?}"
            );
            assert!(rate.limit.contains("spine"), "{rate:?}");
        }
    }
    // A non-blocking tree carries every shift at full rate with D-mod-k routing.
    for fields in ["ports = 8\n", "ports = 8\nspines = 2\n", "ports = 4\nlevels = 3\n"] {
        let site = tree(16, fields);
        for by in 1..16 {
            let flows = Pattern::Shift(by).flows(&site, 1 << 20).unwrap();
            for rate in concurrent(&site, &p, &flows, Routing::Deterministic).unwrap() {
                assert!(near(rate.together.0, rate.alone.0, 1e-6), "{fields}, shift {by}: {rate:?}");
            }
        }
        // 2⁶⁴ − 1 is 15 more than a multiple of 16.
        let shift = |by| Pattern::Shift(by).flows(&site, 1 << 20);
        assert_eq!(shift(usize::MAX), shift(15));
    }
}

#[test]
fn a_dragonfly_has_one_minimal_link_between_two_groups() {
    // Groups of 4 hosts; all hosts of group 0 send to group 1: one global link.
    let p = Parameters::shipped();
    let text = hosts(12)
        + "[[dragonfly]]\nname = \"df\"\nadapters = \"node*.hca\"\nrouters = 2\nhosts = 2\nglobal = 1\nlatency = \"150 ns\"\nrate = \"HDR\"\n";
    let site = parse("dragonfly.toml", &text).unwrap();
    let flows = ["write node0 node4", "write node1 node5", "write node2 node6", "write node3 node7"];
    for rate in rates(&site, &flows, Routing::Deterministic) {
        assert!(near(rate.together.as_gigabytes(), payload(&p, 200.0) / 4.0, 0.001), "{rate:?}");
        assert_eq!(rate.limit, "df-group0-router0 to df-group1-router1");
    }
}

const NODE: &str = r#"[[host]]
name = "a"
[[host.socket]]
processor = "EPYC 7742"
cores = 64
clock = "2.25 GHz"
memory = "256 GiB"
memory-bandwidth = "30 GB/s"
[[host.adapter]]
name = "hca"
model = "ConnectX-6"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
[[host.card]]
name = "gpu0"
model = "A100"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
memory = { kind = "HBM2", size = "40 GiB", channels = 40, width = 256, clock = "1215 MHz" }
[[host.card]]
name = "gpu1"
model = "A100"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
memory = { kind = "HBM2", size = "40 GiB", channels = 40, width = 256, clock = "1215 MHz" }
[[host.ssd]]
name = "disk"
model = "PM1753"
parent = "socket0"
pcie = { generation = 5, lanes = 4 }
[[host.card-link]]
from = "gpu0"
to = "gpu1"
kind = "NVLink3"
links = 12
[[host]]
name = "b"
[[host.socket]]
processor = "EPYC 7742"
cores = 64
clock = "2.25 GHz"
[[host.adapter]]
name = "hca"
model = "ConnectX-6"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
[[link]]
from = "a.hca"
to = "b.hca"
rate = "HDR"
"#;

#[test]
fn flows_within_a_host_use_its_links_memory_and_disks() {
    let p = Parameters::shipped();
    let site = parse("node.toml", NODE).unwrap();
    let one = |flow: &str| rates(&site, &[flow], Routing::Deterministic).remove(0);
    let gigabytes = |flow: &str| one(flow).together.as_gigabytes();
    // NVLink3: twelve links of 25 GB/s, 16 of 17 flits are data.
    assert!(near(gigabytes("write a.gpu0 a.gpu1"), 300.0 * 16.0 / 17.0, 1e-9));
    // Without them, the root complex between two ports limits.
    let without =
        parse("node.toml", &NODE.replace("to = \"gpu1\"\nkind", "to = \"gpu0\"\nkind")).unwrap_err();
    assert!(without.message.contains("to itself"));
    let start = NODE.find("[[host.card-link]]").unwrap();
    let end = NODE[start..].find("[[host]]").unwrap() + start;
    let tree = parse("node.toml", &(NODE[..start].to_owned() + &NODE[end..])).unwrap();
    let peer = rates(&tree, &["write a.gpu0 a.gpu1"], Routing::Deterministic).remove(0);
    assert!(peer.limit.starts_with("a root ports"), "{peer:?}");
    // A card writes to host memory over Gen4 x16: 31.5 GB/s less headers and DLLPs.
    let pcie = 16.0 * 16.0 / 8.0 * 128.0 / 130.0 * 256.0 / 280.0 * p.get("pcie.efficiency");
    assert!(near(gigabytes("write a.gpu0 a"), pcie, 1e-9), "{}", gigabytes("write a.gpu0 a"));
    // Disks: the slower of the disk and Gen5 x4.
    let (read, write) = (p.get("pm1753.read.rate"), p.get("pm1753.write.rate"));
    let slot = 32.0 * 4.0 / 8.0 * 128.0 / 130.0 * 256.0 / 280.0 * p.get("pcie.efficiency");
    assert!(near(gigabytes("write a.disk a"), read.min(slot), 1e-9));
    assert!(near(gigabytes("write a a.disk"), write.min(slot), 1e-9));
    assert!(near(gigabytes("write b a.disk"), write.min(slot), 1e-9), "{:?}", one("write b a.disk"));
    assert!(near(gigabytes("read b a.disk"), read.min(slot), 1e-9), "{:?}", one("read b a.disk"));
    // Host memory of 30 GB/s carries two transfers of 15 GB/s.
    let both = rates(&site, &["write a.gpu0 a", "write a.gpu1 a"], Routing::Deterministic);
    for rate in &both {
        assert!(
            near(rate.together.as_gigabytes(), 15.0, 1e-9) && rate.limit == "a.socket0 memory",
            "{rate:?}"
        );
    }
}

#[test]
fn transfers_between_sockets_share_the_links_of_their_generation() {
    let p = Parameters::shipped();
    let socket = |processor: &str| {
        format!("[[host.socket]]\nprocessor = \"{processor}\"\ncores = 16\nclock = \"2 GHz\"\n")
    };
    let card = |name: &str, socket: u32| {
        format!(
            "[[host.card]]\nname = \"{name}\"\nmodel = \"A100\"\nparent = \"socket{socket}\"\n\
             pcie = {{ generation = 4, lanes = 16 }}\n"
        )
    };
    for (processor, id) in [
        ("Xeon E5-2690 v4", "broadwell-ep"),
        ("Skylake-SP", "skylake-sp"),
        ("Xeon Gold 6338", "icelake-sp"),
        ("EPYC 7763", "milan"),
        ("EPYC 9554", "genoa"),
    ] {
        let cards: String = (0..8).map(|i| card(&format!("g{i}"), u32::from(i >= 4))).collect();
        let text = format!("name = \"s\"\n[[host]]\nname = \"a\"\n{0}{0}{cards}", socket(processor));
        let site = parse("two.toml", &text).unwrap();
        let value = |name: &str| p.get(&format!("{id}.{name}"));
        let one = rates(&site, &["write a.g0 a.g4"], Routing::Deterministic).remove(0).together;
        let near_socket = rates(&site, &["write a.g0 a.g1"], Routing::Deterministic).remove(0).together;
        let limit = value("p2p.write.rate").min(value("p2p.remote.write.rate"));
        assert!(one.as_gigabytes() <= limit * (1.0 + 1e-9), "{processor}: {one:?}");
        assert!(one.0 <= near_socket.0, "{processor}: {one:?} {near_socket:?}");
        // All transfers of one direction share the links; the other direction has its own.
        let crossing: Vec<String> = (0..4)
            .flat_map(|i| [format!("write a.g{i} a.g{}", i + 4), format!("write a.g{i} a.g{}", 7 - i)])
            .collect();
        let crossing: Vec<&str> = crossing.iter().map(String::as_str).collect();
        let sum = |flows: &[&str]| -> f64 {
            rates(&site, flows, Routing::Deterministic).iter().map(|rate| rate.together.as_gigabytes()).sum()
        };
        let links = value("socket.rate") * value("socket.links");
        assert!(sum(&crossing) <= links * (1.0 + 1e-9), "{processor}: {}", sum(&crossing));
        let both = sum(&["write a.g0 a.g4", "write a.g4 a.g0"]);
        assert!(near(both, 2.0 * one.as_gigabytes(), 1e-9), "{processor}: {both}");
    }
}

#[test]
fn concurrent_flows_of_different_adapters_do_not_depend_on_their_order() {
    let link = |from: &str| {
        format!("[[link]]\nfrom = \"{from}.hca\"\nto = \"sw\"\nrate = \"HDR\"\nlength = \"2 m\"\n")
    };
    let host = hosts(2).replacen("name = \"s\"", "", 1);
    let slow = host.replace("\"node\"\ncount = 2", "\"a\"").replace("ConnectX-6", "slow");
    let text = format!("name = \"s\"{host}{slow}")
        + "[[switch]]\nname = \"sw\"\nmodel = \"QM8700\"\nports = 40\nlatency = \"130 ns\"\n"
        + &["a", "node0", "node1"].map(link).concat()
        + "[device.slow]\nnames = [\"slow\"]\nkind = \"adapter\"\nlike = \"connectx-6\"\n\
           values.\"link.efficiency\" = { value = 0.5, low = 0.5, high = 0.5, unit = \"1\", source = \"own\" }\n";
    let site = parse("mixed.toml", &text).unwrap();
    let flows = ["write a node1", "write node0 node1"];
    let forward = rates(&site, &flows, Routing::Deterministic);
    let backward = rates(&site, &[flows[1], flows[0]], Routing::Deterministic);
    for (one, other) in forward.iter().zip(backward.iter().rev()) {
        assert!(near(one.together.0, other.together.0, 1e-9), "{one:?} {other:?}");
        assert!(near(one.alone.0, other.alone.0, 1e-9), "{one:?} {other:?}");
    }
    // The switch port carries what the better adapter sends.
    assert!(near(forward[1].alone.0, 2.0 * forward[0].alone.0, 0.02), "{forward:?}");
}

#[test]
fn reads_from_a_card_are_limited_by_completions_and_writes_to_it_by_writes() {
    let site = shipped("recipe-baseline");
    let p =
        Parameters::shipped().with("skylake-sp.p2p.read.rate", 0.5).with("skylake-sp.p2p.write.rate", 0.25);
    for (text, limit) in [("read client server.u280", 0.5), ("write client server.u280", 0.25)] {
        let flow = flow(text);
        let hops = explain(&site, &p, &flow, 0).unwrap().hops;
        let root = hops.iter().find(|hop| hop.name.contains("root complex, peer to peer")).unwrap();
        assert_eq!(root.rate.as_gigabytes(), limit, "{text}");
        let together = concurrent(&site, &p, &[flow], Routing::Deterministic).unwrap()[0].together;
        assert!(near(together.as_gigabytes(), limit, 0.05), "{text}: {together:?}");
    }
}

#[test]
fn a_queue_depth_limits_a_disk_below_its_rates() {
    let with = |depth: u32| {
        let text = NODE.replacen("name = \"disk\"", &format!("name = \"disk\"\nqueue-depth = {depth}"), 1);
        parse("node.toml", &text)
    };
    let rate =
        |depth: u32, flow: &str| rates(&with(depth).unwrap(), &[flow], Routing::Deterministic).remove(0);
    let p = Parameters::shipped();
    let reads = CommandQueue::new(&p, "pm1753", Access::Read).unwrap();
    // Little's law: one command at a time.
    let one = rate(1, "write a.disk a 4096");
    assert!(near(one.together.0, 4096.0 / reads.latency_of(4096).seconds(), 1e-6), "{one:?}");
    assert!(one.limit.contains("queue depth 1 at 4096 B"), "{one:?}");
    let deep = rate(1024, "write a.disk a 4096").together.0;
    assert!(near(deep, 4096e3 * p.get("pm1753.read.iops"), 0.02), "{deep}");
    // Over the network the disk is the limit, too, and other flows are not.
    let both = rates(&with(1).unwrap(), &["read b a.disk 4096", "write b a 4096"], Routing::Deterministic);
    assert!(near(both[0].together.0, one.together.0, 1e-6), "{both:?}");
    assert!(both[1].together.0 > both[0].together.0, "{both:?}");
    // Large blocks reach the sequential rate with few commands.
    let large = rate(8, "write a.disk a 1048576").together.0;
    let free = rates(&parse("node.toml", NODE).unwrap(), &["write a.disk a"], Routing::Deterministic);
    assert!(near(large, free[0].together.0, 0.1), "{large}");
    for (depth, words) in [(0, "must be 1 to 65536"), (70_000, "must be 1 to 65536")] {
        let error = with(depth).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("queue-depth"), "{error}");
    }
    let on_card = NODE.replacen("name = \"gpu0\"", "name = \"gpu0\"\nqueue-depth = 4", 1);
    assert!(parse("node.toml", &on_card).unwrap_err().to_string().contains("for disks only"));
}

#[test]
fn flows_without_a_path_are_errors() {
    let p = Parameters::shipped();
    let site = parse("node.toml", NODE).unwrap();
    for (flow, words) in
        [("write a a", "two different ends"), ("write a c", "\"c\""), ("write a.hca b", "\"a.hca\"")]
    {
        let error = concurrent(&site, &p, &[flow.parse().unwrap()], Routing::Deterministic).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    for (pattern, words) in [("shift:0", "N from 1"), ("ring", "all-to-all"), ("incast:", "incast:HOST")] {
        assert!(pattern.parse::<Pattern>().unwrap_err().contains(words));
    }
    assert!(Pattern::Shift(2).flows(&site, 64).unwrap_err().contains("sends to itself"));
    assert!(Pattern::Incast("x".to_owned()).flows(&site, 64).unwrap_err().contains("hosts: a, b"));
}

#[test]
fn a_torus_shares_its_links() {
    let p = Parameters::shipped();
    let site = millstream_model::sites::shipped("apenet-torus");
    // Both flows leave node 0 in direction +x.
    let both = rates(&site, &["write node0 node1", "write node0 node2"], Routing::Deterministic);
    let link = 28.0 / 8.0 * 0.8 * p.get("apenet.payload.efficiency") * p.get("apenet.protocol.efficiency");
    let total: f64 = both.iter().map(|rate| rate.together.as_gigabytes()).sum();
    assert!(total <= link * 1.001, "{total} of {link}: {both:?}");
    assert!(both[0].together.0 < both[0].alone.0 && both[0].together.0 > 0.4 * both[0].alone.0, "{both:?}");
}

#[test]
fn rates_of_flows_have_intervals() {
    let p = Parameters::shipped();
    let site = tree(16, "ports = 8\n");
    let flows =
        ["write node0 node4", "write node1 node4", "read node2 node5 64"].map(|flow| flow.parse().unwrap());
    let run = |p: &Parameters, samples| {
        concurrent_with_intervals(&site, p, &flows, Routing::Deterministic, samples).unwrap()
    };
    let rates = run(&p, 1000);
    for rate in &rates {
        let intervals = rate.intervals.unwrap();
        for (value, interval) in [(rate.alone, intervals.alone), (rate.together, intervals.together)] {
            assert!(interval.low < value.0 && value.0 <= interval.high, "{rate:?}");
            assert!(interval.width() > 0.02 && interval.width() < 1.5, "{rate:?}");
        }
    }
    // No end is above the payload rate of HDR without any loss.
    let most = 200e9 / 8.0 * 4096.0 / 4122.0;
    assert!(rates.iter().all(|rate| rate.intervals.unwrap().alone.high <= most * (1.0 + 1e-9)), "{rates:?}");
    // The same samples again; a range of nothing that the flows depend on changes nothing.
    assert_eq!(run(&p, 1000), rates);
    assert_eq!(run(&p.with("u280.reads", 1.7), 1000), rates);
    assert!(run(&p, 0).iter().all(|rate| rate.intervals.is_none()));
    let names = table("t", &rates).columns;
    assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), 8, "{names:?}");
    assert_eq!(table("t", &run(&p, 0)).columns.len(), 4);
}

#[test]
fn no_interval_ends_above_the_slowest_link() {
    let p = Parameters::shipped();
    let site = tree(12, "ports = 8\n");
    // One adapter of 200 Gb/s, several routes.
    let flow = [flow("write node0 node11")];
    for rate in concurrent_with_intervals(&site, &p, &flow, Routing::Adaptive, 100).unwrap() {
        let FlowIntervals { alone, together } = rate.intervals.unwrap();
        assert!(alone.high <= 25e9 && together.high <= 25e9, "{rate:?}");
    }
}

#[test]
fn a_path_over_one_switch_has_two_cables() {
    let p = Parameters::shipped();
    let over = |length: &str| {
        let text = hosts(2)
            + &format!(
                "[[switch]]\nname = \"s\"\nports = 4\nlatency = \"130 ns\"\n\
                 [[link]]\nfrom = \"node*.hca\"\nto = \"s\"\nrate = \"HDR\"\nlength = \"{length}\"\n"
            );
        let site = parse("switch.toml", &text).unwrap();
        latency(&data_path(&site, &p, "node0", "node1").unwrap(), Verb::Write, 8).nanos()
    };
    // 5 ns for a metre of each cable.
    let added = over("100 m") - over("1 m");
    assert!(near(added, 2.0 * 99.0 * 5.0, 1e-3), "{added}");
}

#[test]
fn ethernet_of_400_and_800_gigabits_loses_the_headers_of_roce() {
    let p = Parameters::shipped();
    let site = millstream_model::sites::shipped("roce800-cx8");
    let rate = |name: &str, size| {
        let site = millstream_model::sites::shipped_with("roce800-cx8", &[("link.0.rate", name)]);
        let path = data_path(&site, &p, "node0", "node1").unwrap();
        bandwidth(&path, Verb::Write, size, 128, false).rate.as_gigabytes()
    };
    // Preamble and gap 20, Ethernet 18, IPv4 20, UDP 8, BTH 12, ICRC 4 bytes for 4096 of payload.
    let share = p.get("connectx-8.link.efficiency") * 4096.0 / 4178.0;
    for (name, gigabits) in [("200GbE", 200.0), ("400GbE", 400.0), ("800GbE", 800.0)] {
        let (found, expected) = (rate(name, 1 << 20), gigabits / 8.0 * share);
        assert!(near(found, expected, 0.01), "{name}: {found} of {expected}");
    }
    // Gen5 does not carry 800 Gb/s.
    let slow = millstream_model::sites::shipped_with(
        "roce800-cx8",
        &[("host.node.adapter.hca.pcie.generation", "5")],
    );
    let report = explain(&slow, &p, &"write node0 node1".parse().unwrap(), 0).unwrap();
    assert!(report.bottleneck().contains("pcie"), "{report}");
    let report = explain(&site, &p, &"write node0 node1".parse().unwrap(), 0).unwrap();
    assert!(!report.bottleneck().contains("pcie"), "{report}");
}

/// A card and an adapter without a processor on `a`, linked to `b`.
const STANDALONE: &str = r#"name = "standalone"
[[host]]
name = "a"
[[host.card]]
name = "u280"
model = "Alveo U280"
parent = "none"
standalone = true
pcie = { generation = 3, lanes = 16 }
memory = { kind = "HBM2", size = "8 GiB", channels = 32, width = 256, clock = "450 MHz" }
[[host.adapter]]
name = "port"
model = "ConnectX-4"
parent = "none"
standalone = true
pcie = { generation = 3, lanes = 16 }
[[host]]
name = "b"
[[host.socket]]
processor = "Skylake-SP"
cores = 4
clock = "2 GHz"
[[host.adapter]]
name = "hca"
model = "ConnectX-5"
parent = "socket0"
pcie = { generation = 3, lanes = 16 }
[[link]]
from = "a.port"
to = "b.hca"
rate = "EDR"
"#;

#[test]
fn a_host_without_sockets_has_the_memory_of_its_cards_only() {
    let p = Parameters::shipped();
    let errors = |text: &str, ends: &str| {
        let site = millstream_site::parse("standalone", text).unwrap();
        let flow: Flow = format!("write {ends}").parse().unwrap();
        let explained = explain(&site, &p, &flow, 0).map(drop).map_err(|error| error.to_string());
        let shared = concurrent(&site, &p, &[flow], Routing::default());
        [explained, shared.map(drop).map_err(|error| error.to_string())]
    };
    for ends in ["b a", "a b"] {
        for error in errors(STANDALONE, ends) {
            let error = error.unwrap_err();
            assert!(error.contains("\"a\" has no socket, so no host memory; its cards: a.u280"), "{error}");
        }
    }
    assert_eq!(errors(STANDALONE, "b a.u280"), [Ok(()), Ok(())]);
    let memory = STANDALONE.lines().find(|line| line.starts_with("memory")).unwrap();
    for error in errors(&STANDALONE.replace(memory, ""), "b a.u280") {
        let error = error.unwrap_err();
        assert!(error.contains("\"a.u280\" has no memory: add `memory` to this card"), "{error}");
    }
    let site = millstream_site::parse("standalone", STANDALONE).unwrap();
    let error = data_path(&site, &p, "a.port", "b").unwrap_err().to_string();
    assert!(error.contains("no host or host.card"), "{error}");
}
