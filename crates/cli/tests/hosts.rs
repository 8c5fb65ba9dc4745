//! Event building across hosts: three network namespaces on this machine, with a lossy network between them.

#[path = "common/network.rs"]
mod network;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use network::{Network, is_root, run};

const MILLSTREAM: &str = env!("CARGO_BIN_EXE_millstream");

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn three_hosts_build_the_same_events_while_packets_are_lost() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m");
    let words =
        ["demo", "--replay", "2", "--data", data.to_str().unwrap(), "--out", folder.to_str().unwrap()];
    let local = run(MILLSTREAM, &words, &[]);
    assert!(local.status.success(), "{}", String::from_utf8_lossy(&local.stderr));

    let network = Network::new("events");
    let configuration = fs::read_to_string(folder.join("camera.toml")).unwrap();
    let spread = configuration
        .replace("replay = 1\n", "replay = 10\nlisten = \"10.79.0.1:0\"\n")
        .replace("directory = \".\"", "directory = \"spread\"");
    assert!(spread.contains("listen") && spread.contains("spread"), "{spread}");
    fs::write(folder.join("spread.toml"), spread).unwrap();
    // First host: the manager, and a builder unit with its card. Second host: the other builder unit with its
    // card, and a readout unit. Third host: two readout units.
    let launcher = folder.join("through.sh");
    let script = format!(
        "#!/bin/sh\nhost=1\ncase \"$4 $5\" in\n\"readout 0\" | \"builder 1\" | *card1*) host=2 ;;\nreadout*) host=3 ;;\nesac\n\
         echo \"$host $4\" >>{}/places\nexec ip netns exec {}-$host \"$@\"\n",
        folder.display(),
        network.name()
    );
    fs::write(&launcher, script).unwrap();
    fs::set_permissions(&launcher, fs::Permissions::from_mode(0o755)).unwrap();

    let host = network.host(1);
    let (config, report) = (folder.join("spread.toml"), folder.join("spread.json"));
    let words = [
        "netns",
        "exec",
        &host,
        MILLSTREAM,
        "--device",
        "soft",
        "evb",
        "run",
        config.to_str().unwrap(),
        "--json",
        report.to_str().unwrap(),
        "--launcher",
        launcher.to_str().unwrap(),
    ];
    let ran = run("ip", &words, &[("MILLSTREAM_LINK", "drop=0.001,seed=5")]);
    let output = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {output}", ran.status);

    let mut places: Vec<_> =
        fs::read_to_string(folder.join("places")).unwrap().lines().map(str::to_owned).collect();
    places.sort();
    let units =
        ["1 builder", "1 card", "1 manager", "2 builder", "2 card", "2 readout", "3 readout", "3 readout"];
    assert_eq!(places, units);
    // The payload crossed the network: the second host receives a third of it from the third host.
    let links = run("ip", &["-n", &network.host(2), "-s", "-j", "link", "show", "wire0"], &[]);
    let links: serde_json::Value = serde_json::from_slice(&links.stdout).unwrap();
    let bytes = links[0]["stats64"]["rx"]["bytes"].as_u64().unwrap();
    let payload = json(&report)["payload_bytes"].as_u64().unwrap();
    assert!(bytes > payload / 4, "{bytes} bytes of {payload} came over the wire: {output}");
    let (local, spread) = (json(&folder.join("camera.json")), json(&report));
    for what in ["decisions_compared", "decisions_matching", "decisions_set"] {
        let once = local["trigger"][what].as_u64().unwrap();
        assert_eq!(spread["trigger"][what].as_u64().unwrap(), 10 * once, "{what}: {output}");
    }
    assert_eq!(local["trigger"]["decisions_matching"], local["trigger"]["decisions_compared"]);
}
