//! Valid and invalid site files through the public interface.

use millstream_site::validate::{LinkEnd, Parent};
use millstream_site::{DeviceKind, draw, load, parse};
use proptest::prelude::*;
use std::path::{Path, PathBuf};

fn shipped() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sites");
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn every_shipped_site_is_valid_and_drawn() {
    let files = shipped();
    assert!(files.len() >= 9, "{files:?}");
    for file in files {
        let site = load(&file).unwrap();
        let picture = draw::draw(&site);
        roxmltree::Document::parse(&picture).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert!(picture.contains(&site.name));
    }
}

#[test]
fn names_resolve_to_indices() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sites");
    let site = load(&folder.join("recipe-backplane.toml")).unwrap();
    let (host, card) = site.device("server.u280").unwrap();
    let devices = &site.hosts[host.0].devices;
    let Parent::Switch(switch) = devices[card.0].parent else { panic!("the card is below the switch") };
    assert!(matches!(devices[switch.0].kind, DeviceKind::Switch(Some(_))));
    assert!(switch < card, "parents come first");

    let torus = load(&folder.join("apenet-torus.toml")).unwrap();
    assert_eq!((torus.hosts.len(), torus.links.len()), (64, 3 * 64));
    let degree = |node| {
        torus
            .links
            .iter()
            .flat_map(|w| [w.from, w.to])
            .filter(|e| matches!(e, LinkEnd::Adapter(h, _) if *h == node))
            .count()
    };
    assert!(torus.tori[0].nodes.iter().all(|(host, _)| degree(*host) == 6));
}

const VALID: &str = r#"name = "s"
[[host]]
name = "a"
count = 2
[[host.socket]]
processor = "Skylake-SP"
cores = 4
clock = "2 GHz"
[[host.pcie-switch]]
name = "sw"
model = "PEX88096"
parent = "socket0"
pcie = { generation = 3, lanes = 16 }
[[host.adapter]]
name = "hca"
model = "ConnectX-5"
parent = "sw"
pcie = { generation = 3, lanes = 8 }
[[link]]
from = "a0.hca"
to = "a1.hca"
rate = "FDR"
"#;

fn refused(old: &str, new: &str) -> (usize, String) {
    assert!(VALID.contains(old), "{old}");
    let error = parse("site.toml", &VALID.replace(old, new)).unwrap_err();
    let shown = error.to_string();
    let line = error.line.unwrap_or_else(|| panic!("no line: {shown}"));
    assert!(shown.starts_with(&format!("site.toml:{line}: ")), "{shown}");
    (line, error.message)
}

#[test]
fn invalid_files_are_refused_with_the_line() {
    parse("site.toml", VALID).unwrap();
    for (old, new, line, why) in [
        ("to = \"a1.hca\"", "to = \"a2.hca\"", 21, "no such adapter"),
        ("to = \"a1.hca\"", "to = \"a1.sw\"", 21, "no such adapter"),
        ("to = \"a1.hca\"", "to = \"core\"", 21, "no such switch"),
        ("to = \"a1.hca\"", "to = \"a0.hca\"", 19, "to itself"),
        ("parent = \"socket0\"", "parent = \"sw\"", 12, "cycle"),
        ("parent = \"sw\"", "parent = \"hca\"", 17, "not a PCIe switch"),
        ("parent = \"sw\"", "parent = \"socket1\"", 17, "no such socket"),
        ("lanes = 8", "lanes = 7", 18, "7 lanes"),
        ("generation = 3, lanes = 8", "generation = 9, lanes = 8", 18, "generation 9"),
        ("lanes = 8 }", "lanes = 8, max-payload = 300 }", 18, "300 B"),
        ("lanes = 8 }", "lanes = 8, max-payload = 1024 }", 15, "less than max-payload"),
        ("\"2 GHz\"", "\"2 furlongs\"", 8, "unknown unit"),
        ("\"2 GHz\"", "\"0 GHz\"", 8, "above zero"),
        ("\"2 GHz\"", "2", 8, "with its unit"),
        (
            "\"2 GHz\"",
            "\"200 GHz\"",
            8,
            "clock: \"200 GHz\": a frequency must be 1 kHz to 20 GHz; check number and unit",
        ),
        ("lanes = 8", "lanes = 32", 15, "\"hca\": pcie.lanes = 32: a slot has at most 16; use 16 or less"),
        (
            "rate = \"FDR\"",
            "rate = \"FDR\"\nlength = \"2000 km\"",
            23,
            "length: \"2000 km\": a length must be 1 mm to 1000 km",
        ),
        ("cores = 4", "cores = 0", 7, "nonzero"),
        ("count = 2", "count = 0", 4, "nonzero"),
        ("rate = \"FDR\"", "rate = \"SDR\"", 22, "QDR, FDR"),
        ("\"Skylake-SP\"", "\"Skylake-XP\"", 6, "nearest: Skylake-SP"),
        ("\"ConnectX-5\"", "\"ConectX-5\"", 16, "ConnectX-5"),
        ("\"PEX88096\"", "\"ConnectX-5\"", 11, "no PCIe switch"),
        ("name = \"hca\"", "name = \"sw\"", 15, "two devices"),
        ("cores = 4", "kernels = 4", 7, "kernels"),
        ("lanes = 8", "lanes = 0", 18, "0 lanes"),
        ("lanes = 8 }", "lanes = 8, max-payload = 0 }", 18, "0 B"),
        ("clock = \"2 GHz\"", "clock = \"2 GHz\"\nmemory = \"0 GB\"", 9, "above zero"),
        ("clock = \"2 GHz\"", "clock = \"2 GHz\"\nmemory = \"4 GX\"", 9, "unknown unit"),
        ("rate = \"FDR\"", "rate = \"0 Gb/s\"", 22, "above zero"),
        ("rate = \"FDR\"", "rate = \"FDR\"\nlength = \"1 mile\"", 23, "unknown unit"),
        ("rate = \"FDR\"", "rate = \"FDR\"\nmtu = 1001", 23, "1001 B"),
        ("rate = \"FDR\"", "rate = \"FDR\"\nlanes = 3", 23, "3 lanes"),
        ("from = \"a0.hca\"", "from = \"b0.hca\"", 20, "b0.hca"),
    ] {
        let (at, message) = refused(old, new);
        assert!(message.contains(why), "{new}: {message}");
        assert_eq!(at, line, "{new}: {message}");
    }
}

#[test]
fn node_and_port_counts_are_checked() {
    let torus = format!(
        "{VALID}[[torus]]\nname = \"t\"\nadapters = \"a*.hca\"\ndimensions = [2, 2]\nrate = \"7 Gb/s\"\nbuffer = \"40 KB\"\n"
    );
    let error = parse("t", &torus).unwrap_err();
    assert!(error.message.contains("need 4 adapters") && error.line == Some(26), "{error}");
    let two = torus.replace("[2, 2]", "[2]");
    let table = &two[VALID.len()..];
    let error = parse("t", &format!("{two}{table}")).unwrap_err();
    assert!(error.message.contains("two tori are named \"t\"") && error.line == Some(30), "{error}");
    let error = parse("t", &two.replace("\"t\"", "\"../t\"")).unwrap_err();
    assert!(error.message.contains("torus.name \"../t\": only letters") && error.line == Some(24), "{error}");
    let addressed = two + "addresses = ";
    let site = parse("t", &(addressed.clone() + r#"["node0:7500", "[::1]:7500"]"#)).unwrap();
    assert_eq!(site.tori[0].addresses, ["node0:7500", "[::1]:7500"]);
    for (addresses, why) in [
        (r#"["node0:7500"]"#, "has 2 nodes, but 1 addresses"),
        (r#"["node0:7500", "node1"]"#, "\"node1\" is not an address"),
        (r#"["node0:7500", "node1:0"]"#, "\"node1:0\" is not an address"),
        (r#"["node0:7500", "node0:7500"]"#, "two nodes have the address"),
    ] {
        let error = parse("t", &(addressed.clone() + addresses)).unwrap_err();
        assert!(error.message.contains(why), "{addresses}: {error}");
    }
    let torus = torus.replace("[2, 2]", "[2]").replace("40 KB", "4 KB");
    let error = parse("t", &torus).unwrap_err();
    assert!(error.message.contains("two packets"), "{error}");

    let fabric = VALID.replace("to = \"a1.hca\"", "to = \"core\"").replace("a0.hca", "a*.hca")
        + "[[switch]]\nname = \"core\"\nports = 1\nlatency = \"200 ns\"\n";
    let error = parse("t", &fabric).unwrap_err();
    assert!(error.message.contains("has 1 ports") && error.line == Some(19), "{error}");
}

proptest! {
    #[test]
    fn no_text_panics(text: String) {
        let _ = parse("any", &text);
    }

    #[test]
    fn corrupted_text_does_not_panic(at in 0..VALID.len(), byte in any::<u8>()) {
        let mut bytes = VALID.as_bytes().to_vec();
        bytes[at] = byte;
        let _ = parse("any", &String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn network_cards_have_names_and_addresses() {
    let parse = |text: &str| parse("site.toml", text);
    let site = parse("[[card]]\nname = \"a\"\naddress = \"node3:7480\"\n").unwrap();
    assert_eq!(site.card("a").unwrap().address, "node3:7480");
    assert_eq!(site.card("b").unwrap_err().to_string(), "no card \"b\"; known cards: a");
    let two = "[[card]]\nname = \"a\"\naddress = \"h:1\"\n[[card]]\nname = \"a\"\naddress = \"h:2\"\n";
    for (text, line, words) in [
        ("[[card]]\nname = \"a\"\naddress = \"node3\"\n", 3, "address \"node3\": expected host:port"),
        ("[[card]]\nname = \"a\"\naddress = \"node3:0\"\n", 3, "host:port"),
        ("[[card]]\nname = \"a:b\"\naddress = \"h:1\"\n", 2, "card.name \"a:b\""),
        (two, 5, "two cards are named \"a\""),
        ("\n[[card]]\nname = \"a\"\n", 2, "address"),
        ("[[card]]\nname = \"a\"\naddress = \"h:1\"\nbank = 3\n", 4, "bank"),
        ("nonsense", 1, "="),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.line == Some(line) && error.message.contains(words), "{error}");
    }
}

#[test]
fn links_have_at_most_the_lanes_of_their_device_and_switch() {
    let site = |model: &str, adapters: usize, lanes: u32| {
        let adapters: String = (0..adapters)
            .map(|i| {
                format!(
                    "[[host.adapter]]\nname = \"a{i}\"\nmodel = \"{model}\"\nparent = \"sw\"\npcie = {{ generation = 4, lanes = {lanes} }}\n"
                )
            })
            .collect();
        format!(
            "[[host]]\nname = \"h\"\n[[host.socket]]\nprocessor = \"Rome\"\ncores = 4\nclock = \"2 GHz\"\n\
             [[host.pcie-switch]]\nname = \"sw\"\nmodel = \"PEX88096\"\nparent = \"socket0\"\npcie = {{ generation = 4, lanes = 16 }}\n{adapters}"
        )
    };
    parse("t", &site("ConnectX-6", 5, 16)).unwrap();
    let error = parse("t", &site("ConnectX-6", 6, 16)).unwrap_err();
    assert_eq!(error.line, Some(8), "{error}");
    assert!(error.message.contains("\"sw\": its links have 112 lanes, a PEX88096 has 98"), "{error}");
    // An adapter with an auxiliary card has two slots.
    parse("t", &site("ConnectX-7", 2, 32)).unwrap();
    let error = parse("t", &site("ConnectX-6", 1, 32)).unwrap_err();
    assert!(error.message.contains("\"a0\": pcie.lanes = 32: a slot has at most 16"), "{error}");
    let own =
        "\n[device.narrow]\nkind = \"adapter\"\nnames = [\"Narrow\"]\nlike = \"connectx-6\"\nlanes = 8\n";
    let error = parse("t", &(site("Narrow", 1, 16) + own)).unwrap_err();
    assert!(error.message.contains("pcie.lanes = 16: a Narrow has 8; use 8 or less"), "{error}");
}

#[test]
fn a_device_of_the_file_has_values_of_its_kind_within_their_range() {
    let device = |value: &str| {
        format!(
            "{VALID}[device.my-nic]\nkind = \"adapter\"\nnames = [\"My NIC\"]\nlike = \"connectx-6\"\n[device.my-nic.values]\n{value}\n"
        )
    };
    let value = "{ value = 90.0, low = 80.0, high = 110.0, unit = \"ns\", source = \"own\" }";
    let first = VALID.lines().count() + 1;
    parse("t", &device(&format!("\"message.gap\" = {value}\nprice = {value}"))).unwrap();
    for (text, line, why) in [
        (
            device(&format!("\"mesage.gap\" = {value}")),
            first + 5,
            "device \"my-nic\": no value \"mesage.gap\" for devices of kind adapter; nearest: message.gap",
        ),
        (
            device(&format!("\"message.gap\" = {}", value.replace("low = 80.0", "low = 95.0"))),
            first + 5,
            "90: not within its range 95 to 110",
        ),
        (
            device("\"link.efficiency\" = { value = 0, low = 0, high = 1, unit = \"1\", source = \"own\" }"),
            first + 5,
            "device \"my-nic\": \"link.efficiency\" = 0 with low = 0: both must be above 0",
        ),
        (
            device(&format!("\"message.gap\" = {}", value.replace("low", "lowest"))),
            first + 5,
            "unknown field `lowest`",
        ),
        (device("").replace("names = ", "name = "), first + 2, "unknown field `name`"),
        (
            device("").replace("like = \"connectx-6\"", "like = \"connectx-60\""),
            first + 3,
            "field `like`: no device \"connectx-60\"",
        ),
    ] {
        let error = parse("t", &text).unwrap_err();
        assert!(error.message.contains(why), "{error}");
        assert_eq!(error.line, Some(line), "{error}");
    }
}

/// A card and an adapter without a processor, linked to a host.
const STANDALONE: &str = r#"name = "standalone"
[[host]]
name = "a"
[[host.card]]
name = "u280"
model = "Alveo U280"
parent = "none"
standalone = true
pcie = { generation = 3, lanes = 16 }
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
fn devices_of_a_host_without_sockets_are_drawn_with_their_cables() {
    let picture = draw::draw(&parse("site.toml", STANDALONE).unwrap());
    let picture = roxmltree::Document::parse(&picture).unwrap();
    let at = |text: &str| {
        let found = picture.descendants().find(|node| node.text() == Some(text));
        found.unwrap_or_else(|| panic!("no {text:?}")).attribute("x").unwrap().parse::<f64>().unwrap()
    };
    let [card, port, hca] = ["Alveo U280", "ConnectX-4", "ConnectX-5"].map(at);
    assert!(card == port && port < hca, "{card} {port} {hca}");
    // A cable leaves the right edge of both adapters.
    let cables = picture.descendants().filter(|node| node.attribute("stroke") == Some("#0969da"));
    let starts: Vec<f64> = cables.map(|line| line.attribute("x1").unwrap().parse().unwrap()).collect();
    for adapter in [port, hca] {
        assert!(starts.iter().any(|&x| x > adapter && x < adapter + 190.0), "{adapter}: {starts:?}");
    }
}

#[test]
fn a_device_of_the_file_comes_before_shipped_ones() {
    // Ids before and after that of the shipped device, and names that are longer and shorter than its own.
    for id in ["a-nic", "z-nic", "connectx-5"] {
        for name in ["ConnectX-5", "Connect*", "*"] {
            let own =
                format!("[device.{id}]\nkind = \"adapter\"\nnames = [\"{name}\"]\nlike = \"connectx-6\"\n");
            let site = parse("site.toml", &format!("{VALID}{own}")).unwrap();
            let adapter = &site.hosts[0].devices[1];
            assert_eq!((adapter.name.as_str(), adapter.id.as_str()), ("hca", id), "{name}");
        }
    }
}
