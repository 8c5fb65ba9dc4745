//! Fat trees, dragonflies, failed links, disks and links between cards in site files.

use millstream_site::schema::Protocol;
use millstream_site::validate::{LinkEnd, link_end_name};
use millstream_site::{Site, draw, parse};

fn hosts(count: u32) -> String {
    format!(
        r#"name = "s"
[[host]]
name = "node"
count = {count}
[[host.socket]]
processor = "Skylake-SP"
cores = 4
clock = "2 GHz"
[[host.adapter]]
name = "hca"
model = "ConnectX-6"
parent = "socket0"
pcie = {{ generation = 4, lanes = 16 }}
"#
    )
}

fn fat_tree(count: u32, fields: &str) -> String {
    hosts(count)
        + "[[fat-tree]]\nname = \"ft\"\nadapters = \"node*.hca\"\nlatency = \"130 ns\"\nrate = \"HDR\"\n"
        + fields
}

fn dragonfly(count: u32, fields: &str) -> String {
    hosts(count)
        + "[[dragonfly]]\nname = \"df\"\nadapters = \"node*.hca\"\nlatency = \"150 ns\"\nrate = \"HDR\"\n"
        + fields
}

/// Links of each switch.
fn degrees(site: &Site) -> Vec<u32> {
    let mut degrees = vec![0; site.switches.len()];
    for end in site.links.iter().flat_map(|link| [link.from, link.to]) {
        if let LinkEnd::Switch(switch) = end {
            degrees[switch] += 1;
        }
    }
    degrees
}

#[test]
fn a_fat_tree_of_two_levels_uses_all_ports() {
    // 32 hosts, switches of 8 ports: 8 leaves of 4 hosts, 4 spines with a link to each leaf.
    let site = parse("t", &fat_tree(32, "ports = 8\n")).unwrap();
    assert_eq!((site.switches.len(), site.links.len()), (12, 32 + 8 * 4));
    assert!(degrees(&site).iter().all(|&degree| degree == 8));
    assert_eq!(site.switches[8].name, "ft-spine0");
    // 12 hosts of 6 per leaf, 2 uplinks of each leaf, both to one spine.
    let site = parse("t", &fat_tree(12, "ports = 8\ndown = 6\nspines = 1\n")).unwrap();
    assert_eq!(degrees(&site), [8, 8, 4]);
    assert!(site.fabrics[0].shape.contains("6:2"), "{:?}", site.fabrics);
    let picture = draw::draw(&site);
    assert!(picture.contains("fat tree, 2 levels"), "one box represents the fabric");
    assert!(!picture.contains("ft-leaf0"));
}

#[test]
fn a_fat_tree_of_three_levels_connects_k_cubed_over_four_hosts() {
    // k = 4: 16 hosts, 8 leaves, 8 aggregation switches, 4 cores, all of 4 ports.
    let site = parse("t", &fat_tree(16, "ports = 4\nlevels = 3\n")).unwrap();
    assert_eq!((site.switches.len(), site.links.len()), (20, 48));
    assert!(degrees(&site).iter().all(|&degree| degree == 4), "{:?}", degrees(&site));
}

#[test]
fn a_dragonfly_connects_every_pair_of_groups() {
    // Kim et al.: p = 2, a = 4, h = 2 gives 9 groups and 72 hosts; every pair of groups has one link.
    let site = parse("t", &dragonfly(72, "routers = 4\nhosts = 2\nglobal = 2\n")).unwrap();
    assert_eq!(site.switches.len(), 36);
    assert!(degrees(&site).iter().all(|&degree| degree == 2 + 3 + 2), "{:?}", degrees(&site));
    let mut pairs = std::collections::BTreeMap::new();
    for link in &site.links {
        if let (LinkEnd::Switch(a), LinkEnd::Switch(b)) = (link.from, link.to)
            && a / 4 != b / 4
        {
            *pairs.entry((a / 4, b / 4)).or_insert(0) += 1;
        }
    }
    assert_eq!(pairs.len(), 9 * 8 / 2);
    assert!(pairs.values().all(|&links| links == 1));
    // Five groups have eight global ports each: two links between every pair.
    let site = parse("t", &dragonfly(40, "routers = 4\nhosts = 2\nglobal = 2\n")).unwrap();
    assert_eq!(site.links.len(), 40 + 5 * 6 + 2 * 10);
}

#[test]
fn failed_links_are_marked() {
    let text = fat_tree(32, "ports = 8\n")
        + "[[failed-link]]\nfrom = \"ft-leaf0\"\nto = \"ft-spine3\"\n[[failed-link]]\nfrom = \"node5.hca\"\nto = \"ft-leaf1\"\n";
    let site = parse("t", &text).unwrap();
    let failed: Vec<String> = (site.links.iter().filter(|link| link.failed))
        .map(|link| format!("{} {}", link_end_name(&site, link.from), link_end_name(&site, link.to)))
        .collect();
    assert_eq!(failed, ["node5.hca ft-leaf1", "ft-leaf0 ft-spine3"]);
}

#[test]
fn invalid_fabrics_are_refused_with_line_field_value_and_advice() {
    for (text, line, words) in [
        (fat_tree(33, "ports = 8\n"), 16, "33 adapters need 9 leaves; 2 levels of 8 ports have at most 8"),
        (fat_tree(8, "ports = 1\n"), 19, "ports = 1: must be 2 to 4096"),
        (
            fat_tree(8, "ports = 8\ndown = 8\n"),
            20,
            "down = 8: a leaf of 8 ports needs one to a spine; at most 7",
        ),
        (fat_tree(8, "ports = 8\nspines = 3\n"), 20, "spines = 3: must divide the 4 uplinks"),
        (fat_tree(8, "ports = 8\nlevels = 4\n"), 20, "levels = 4: must be 2 or 3"),
        (fat_tree(8, "ports = 8\nlevels = 3\nspines = 2\n"), 21, "`spines` is for two levels"),
        (fat_tree(8, "ports = 8\nmodel = \"Quantun\"\n"), 20, "Quantum"),
        (fat_tree(8, "ports = 8\nloss = 0.5\n"), 20, "loss of 0.5: must be a share of packets, 0 to 0.1"),
        (fat_tree(8, "ports = 8\nspine = 2\n"), 20, "spine"),
        (fat_tree(8, "ports = 8\n").replace("node*.hca", "nodes*.hca"), 16, "no such adapter"),
        (
            dragonfly(80, "routers = 4\nhosts = 2\nglobal = 2\n"),
            16,
            "80 adapters need 10 groups of 4 × 2; 4 routers",
        ),
        (dragonfly(8, "routers = 4000\nhosts = 2\nglobal = 2\n"), 19, "routers = 4000: must be 1 to 1024"),
        (
            fat_tree(8, "ports = 8\n[[failed-link]]\nfrom = \"ft-leaf0\"\nto = \"ft-leaf1\"\n"),
            22,
            "no link connects \"ft-leaf0\" and \"ft-leaf1\"; \"ft-leaf0\" has links to node0.hca",
        ),
    ] {
        let error = parse("site.toml", &text).unwrap_err();
        assert!(error.message.contains(words), "{error}");
        assert_eq!(error.line, Some(line), "{error}");
    }
}

const DEVICES: &str = r#"[[host]]
name = "a"
[[host.socket]]
processor = "Skylake-SP"
cores = 4
clock = "2 GHz"
[[host.card]]
name = "gpu0"
model = "A100"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
[[host.card]]
name = "gpu1"
model = "A100"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
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
"#;

#[test]
fn disks_and_links_between_cards_have_rates() {
    let site = parse("t", DEVICES).unwrap();
    // Twelve links of 25 GB/s per direction; 16 of 17 flits are data.
    let rate = site.hosts[0].card_links[0].rate.0;
    assert!((rate / (300e9 * 16.0 / 17.0) - 1.0).abs() < 1e-12, "{rate}");
    assert!(site.device("a.disk").is_some());
    for (old, new, line, words) in [
        ("to = \"gpu1\"", "to = \"gpu2\"", 24, "card-link.to \"gpu2\": cards of host \"a\": gpu0, gpu1"),
        ("to = \"gpu1\"", "to = \"gpu0\"", 24, "to itself"),
        ("\"NVLink3\"", "\"NVLink9\"", 25, "must be NVLink1, NVLink2"),
        ("links = 12", "links = 400", 26, "links = 400: must be 1 to 72"),
        ("\"PM1753\"", "\"PM1754\"", 19, "nearest: PM1753"),
    ] {
        let error = parse("t", &DEVICES.replace(old, new)).unwrap_err();
        assert!(error.message.contains(words), "{error}");
        assert_eq!(error.line, Some(line), "{error}");
    }
}

/// Two hosts with one link of these fields.
fn pair(fields: &str) -> String {
    hosts(2) + "[[link]]\nfrom = \"node0.hca\"\nto = \"node1.hca\"\n" + fields
}

#[test]
fn ethernet_is_named_by_the_rate_of_the_whole_link_and_carries_roce() {
    for (name, gigabits) in [("10GbE", 10.0), ("100GbE", 100.0), ("400GbE", 400.0), ("800GbE", 800.0)] {
        for lanes in ["", "lanes = 8\n"] {
            let site = parse("t", &pair(&format!("rate = \"{name}\"\n{lanes}"))).unwrap();
            assert_eq!(site.links[0].rate.0, gigabits * 1e9 / 8.0);
            assert_eq!(site.links[0].protocol, Protocol::RoceV2);
        }
    }
    let xdr = parse("t", &pair("rate = \"XDR\"\n")).unwrap();
    assert_eq!((xdr.links[0].rate.0, xdr.links[0].protocol), (100e9, Protocol::InfiniBand));
    let tree = parse("t", &fat_tree(8, "ports = 8\n").replace("\"HDR\"", "\"400GbE\"")).unwrap();
    assert!(tree.links.iter().all(|link| link.protocol == Protocol::RoceV2 && link.rate.0 == 50e9));
}

#[test]
fn invalid_ethernet_is_refused_with_line_field_and_value() {
    for (fields, line, words) in [
        ("rate = \"500GbE\"\n", 17, "rate \"500GbE\": no Ethernet of 500 Gb/s: one of 10, 25"),
        ("rate = \"GbE\"\n", 17, "no Ethernet of  Gb/s"),
        (
            "rate = \"400GbE\"\nprotocol = \"InfiniBand\"\n",
            18,
            "protocol = \"InfiniBand\": a link of 400GbE carries \"RoCEv2\"",
        ),
        (
            "rate = \"400GbE\"\nmtu = 9000\n",
            14,
            "mtu = 9000: RoCEv2 packets carry 256, 512, 1024, 2048 or 4096 B",
        ),
        ("rate = \"25 Gb/s\"\nprotocol = \"RoCEv2\"\nmtu = 1500\n", 18, "mtu = 1500: RoCEv2"),
        ("rate = \"fast\"\n", 17, "or one of QDR, FDR, EDR, HDR, NDR, XDR, 10GbE to 800GbE"),
    ] {
        let error = parse("site.toml", &pair(fields)).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.line, Some(line), "{error}");
    }
}
