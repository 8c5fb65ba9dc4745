//! CXL memory in site files: what is valid, and what is refused by line, field and value.

use millstream_site::cxl::Flit;
use millstream_site::validate::Parent;
use millstream_site::{DeviceId, DeviceKind, draw, parse};

fn site(processor: &str, fields: &str) -> String {
    format!(
        r#"name = "s"
[[host]]
name = "a"
[[host.socket]]
processor = "{processor}"
cores = 56
clock = "2 GHz"
[[host.adapter]]
name = "hca"
model = "ConnectX-7"
parent = "socket0"
pcie = {{ generation = 5, lanes = 16 }}
[[host.cxl-memory]]
{fields}"#
    )
}

const MEMORY: &str = "name = \"m\"\nmodel = \"CXL memory\"\nparent = \"socket0\"\ncxl = { version = \"2.0\", generation = 5, lanes = 8 }\nsize = \"256 GiB\"\n";

fn flit_of(link: &str) -> Flit {
    let text = MEMORY.replace("{ version = \"2.0\", generation = 5, lanes = 8 }", link);
    let site = parse("t", &site("Xeon Platinum 8480", &text)).unwrap();
    let (host, device) = site.device("a.m").unwrap();
    let DeviceKind::CxlMemory(memory) = &site.hosts[host.0].devices[device.0].kind else {
        panic!("{:?}", site.hosts[0].devices)
    };
    memory.link.flit
}

#[test]
fn the_version_sets_the_flit_unless_the_file_does() {
    assert_eq!(flit_of("{ version = \"1.1\", generation = 5, lanes = 16 }"), Flit::Bytes68);
    assert_eq!(flit_of("{ version = \"2.0\", generation = 4, lanes = 8 }"), Flit::Bytes68);
    assert_eq!(flit_of("{ version = \"3.0\", generation = 5, lanes = 8 }"), Flit::Bytes256);
    assert_eq!(flit_of("{ version = \"3.1\", generation = 5, lanes = 8, flit = 68 }"), Flit::Bytes68);
    assert_eq!(flit_of("{ version = \"3.2\", generation = 6, lanes = 4 }"), Flit::Bytes256);
}

#[test]
fn a_site_with_cxl_memory_is_drawn() {
    let site = parse("t", &site("EPYC 9654", MEMORY)).unwrap();
    let picture = draw::draw(&site);
    assert!(picture.contains("m, 256 GiB CXL 2.0"), "{picture}");
}

#[test]
fn invalid_memory_is_refused_with_line_field_and_value() {
    let with = |old: &str, new: &str| {
        assert!(MEMORY.contains(old));
        site("Xeon Platinum 8480", &MEMORY.replace(old, new))
    };
    let link = |new: &str| with("{ version = \"2.0\", generation = 5, lanes = 8 }", new);
    for (text, line, words) in [
        (
            link("{ version = \"2.1\", generation = 5, lanes = 8 }"),
            17,
            "CXL version \"2.1\": must be \"1.1\", \"2.0\"",
        ),
        (link("{ version = \"2.0\", generation = 7, lanes = 8 }"), 17, "PCIe generation 7"),
        (link("{ version = \"2.0\", generation = 2, lanes = 8 }"), 17, "cxl.generation = 2: must be 3 to 6"),
        (link("{ version = \"2.0\", generation = 6, lanes = 8 }"), 17, "CXL 2.0 has no 64 GT/s"),
        (
            link("{ version = \"2.0\", generation = 5, lanes = 12 }"),
            17,
            "cxl.lanes = 12: must be 1, 2, 4, 8 or 16",
        ),
        (
            link("{ version = \"2.0\", generation = 5, lanes = 8, flit = 256 }"),
            17,
            "CXL 2.0 has flits of 68 B only",
        ),
        (
            link("{ version = \"3.0\", generation = 6, lanes = 8, flit = 68 }"),
            17,
            "generation 6 has flits of 256 B only",
        ),
        (
            link("{ version = \"3.0\", generation = 5, lanes = 8, flit = 64 }"),
            17,
            "flit of 64 B: must be 68 or 256",
        ),
        (link("{ version = \"3.0\", generation = 5, lanes = 8, flits = 68 }"), 17, "flits"),
        (with("256 GiB", "0 B"), 18, "above zero"),
        (with("256 GiB", "256"), 18, "unknown unit"),
        (
            with("socket0", "socket1"),
            16,
            "parent \"socket1\": must be a socket or CXL switch of the host: socket0",
        ),
        (with("socket0", "hca"), 16, "parent \"hca\": must be a socket or CXL switch"),
        (
            with("CXL memory", "CXL memroy"),
            15,
            "no CXL memory \"CXL memroy\" in the device library; nearest: CXL memory",
        ),
        (with("name = \"m\"", "name = \"hca\""), 14, "two devices of the host are named \"hca\""),
        (with("name = \"m\"", "name = \"m m\""), 14, "only letters, digits"),
        (
            site("Skylake-SP", MEMORY),
            16,
            "the processor \"Skylake-SP\" of socket0 has no CXL ports; processors that have: ",
        ),
    ] {
        let error = parse("site.toml", &text).unwrap_err();
        assert_eq!(error.line, Some(line), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

const SWITCH: &str = "\n[[host.cxl-switch]]\nname = \"s\"\nmodel = \"XC50256\"\nparent = \"socket0\"\ncxl = { version = \"2.0\", generation = 5, lanes = 16 }\nlatency = \"80 ns\"\n";

#[test]
fn switches_are_parents_of_memory_and_of_switches() {
    let below = MEMORY.replace("socket0", "t");
    let second = SWITCH.replace("\"s\"", "\"t\"").replace("socket0", "s");
    // A child may stand before its parent.
    let site = parse("t", &site("EPYC 9654", &(below + &second + SWITCH))).unwrap();
    let host = &site.hosts[0];
    let find = |name: &str| host.devices.iter().position(|device| device.name == name).unwrap();
    assert_eq!(host.devices[find("m")].parent, Parent::Switch(DeviceId(find("t"))));
    assert_eq!(host.devices[find("t")].parent, Parent::Switch(DeviceId(find("s"))));
    let DeviceKind::CxlSwitch(switch) = &host.devices[find("s")].kind else { panic!("{:?}", host.devices) };
    assert_eq!((switch.link.lanes.0, switch.link.flit), (16, Flit::Bytes68));
    assert!((switch.latency.unwrap().0 - 80e-9).abs() < 1e-15);
    let picture = draw::draw(&site);
    assert!(picture.contains("s, CXL 2.0") && picture.contains("XC50256"), "{picture}");
}

#[test]
fn invalid_switches_are_refused_with_line_field_and_value() {
    let with = |old: &str, new: &str| {
        assert!(SWITCH.contains(old));
        site("EPYC 9654", &(MEMORY.replace("socket0", "s") + &SWITCH.replace(old, new)))
    };
    for (text, line, words) in [
        (with("XC50256", "XC50265"), 22, "no CXL switch \"XC50265\" in the device library; nearest: "),
        (with("socket0", "s"), 23, "CXL switches of the host are below each other in a cycle: s"),
        (with("socket0", "hca"), 23, "cxl-switch \"s\": parent \"hca\": must be a socket or CXL switch"),
        (with("lanes = 16", "lanes = 32"), 24, "cxl-switch \"s\": cxl.lanes = 32: must be 1, 2, 4, 8 or 16"),
        (with("generation = 5", "generation = 6"), 24, "CXL 2.0 has no 64 GT/s"),
        (with("\"s\"", "\"hca\""), 21, "two devices of the host are named \"hca\""),
        (with("80 ns", "-80 ns"), 25, "-80 ns"),
        (with("latency", "latancy"), 25, "latancy"),
        (
            with("\"s\"", "\"other\""),
            16,
            "parent \"s\": must be a socket or CXL switch of the host: socket0, other",
        ),
    ] {
        let error = parse("site.toml", &text).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.line, Some(line), "{error}");
    }
    let old = site("Skylake-SP", &(MEMORY.replace("socket0", "s") + SWITCH));
    assert!(parse("site.toml", &old).unwrap_err().to_string().contains("no CXL ports"));
    // PCIe devices have PCIe switches above them.
    let adapter = with("80 ns", "80 ns").replacen("parent = \"socket0\"", "parent = \"s\"", 1);
    assert!(parse("site.toml", &adapter).unwrap_err().to_string().contains("no such socket or PCIe switch"));
}
