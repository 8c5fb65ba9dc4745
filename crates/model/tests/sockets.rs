//! The table of links between sockets in docs/model.md is that of the device library.

use millstream_model::Parameters;

const DOCUMENT: &str = include_str!("../../../docs/model.md");

#[test]
fn the_documented_links_between_sockets_are_those_of_the_library() {
    let p = Parameters::shipped();
    let mut checked = 0;
    for (generation, ids) in [
        ("Sandy Bridge, Ivy Bridge", ["sandybridge-ep", "ivybridge-ep"].as_slice()),
        ("Haswell, Broadwell", &["haswell-ep", "broadwell-ep"]),
        ("Skylake, Cascade Lake", &["skylake-sp", "cascadelake-sp"]),
        ("Ice Lake", &["icelake-sp"]),
        ("Sapphire Rapids", &["sapphirerapids-sp"]),
        ("Emerald Rapids", &["emeraldrapids-sp"]),
        ("Granite Rapids", &["graniterapids-sp"]),
        ("Naples", &["naples"]),
        ("Rome", &["rome"]),
        ("Milan", &["milan"]),
        ("Genoa, Turin", &["genoa", "turin"]),
    ] {
        let line = DOCUMENT.lines().find(|line| line.starts_with(&format!("| {generation} |")));
        let line = line.unwrap_or_else(|| panic!("docs/model.md has no {generation}"));
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        for id in ids {
            for (i, name) in [(3, "socket.rate"), (4, "socket.links"), (5, "p2p.remote.write.rate")] {
                let value = p.device(id, name).unwrap_or_else(|| panic!("{id} has no {name}"));
                assert_eq!(fields[i].parse().ok(), Some(value), "{id} {name}: {line}");
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 45);
    // A processor of an unknown generation has the values of the first row.
    for name in ["socket.rate", "socket.links", "p2p.remote.write.rate"] {
        assert_eq!(p.device("processor", name), p.device("sandybridge-ep", name), "{name}");
    }
}
