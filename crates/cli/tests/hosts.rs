//! Event building across hosts: three network namespaces on this machine, with a lossy network between them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

const MILLSTREAM: &str = env!("CARGO_BIN_EXE_millstream");

fn run(program: &str, words: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new(program).args(words).envs(environment.iter().copied()).output().expect("it starts")
}

/// Hosts 1 to 3 on one switch; gone when dropped.
struct Network(String);

impl Network {
    fn ip(words: &str) {
        let output = run("ip", &words.split(' ').collect::<Vec<_>>(), &[]);
        assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn new() -> Self {
        let network = Self(format!("millstream-{}", std::process::id()));
        let name = &network.0;
        Self::ip(&format!("netns add {name}-0"));
        Self::ip(&format!("-n {name}-0 link add switch type bridge"));
        Self::ip(&format!("-n {name}-0 link set switch up"));
        for host in 1..=3 {
            let there = format!("{name}-{host}");
            Self::ip(&format!("netns add {there}"));
            Self::ip(&format!("-n {name}-0 link add port{host} type veth peer name wire0 netns {there}"));
            Self::ip(&format!("-n {name}-0 link set port{host} master switch up"));
            Self::ip(&format!("-n {there} address add 10.79.0.{host}/24 dev wire0"));
            Self::ip(&format!("-n {there} link set wire0 up"));
            Self::ip(&format!("-n {there} link set lo up"));
        }
        network
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in 0..=3 {
            let _ = run("ip", &["netns", "delete", &format!("{}-{host}", self.0)], &[]);
        }
    }
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn three_hosts_build_the_same_events_while_packets_are_lost() {
    if run("id", &["-u"], &[]).stdout != b"0\n" {
        println!("not run: network namespaces need root");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m");
    let words =
        ["demo", "--replay", "2", "--data", data.to_str().unwrap(), "--out", folder.to_str().unwrap()];
    let local = run(MILLSTREAM, &words, &[]);
    assert!(local.status.success(), "{}", String::from_utf8_lossy(&local.stderr));

    let network = Network::new();
    let configuration = fs::read_to_string(folder.join("camera.toml")).unwrap();
    let spread = configuration
        .replace("replay = 1\n", "replay = 10\nlisten = \"10.79.0.1:0\"\n")
        .replace("directory = \".\"", "directory = \"spread\"");
    assert!(spread.contains("listen") && spread.contains("spread"), "{spread}");
    fs::write(folder.join("spread.toml"), spread).unwrap();
    // The manager and a builder unit with its card on the first host, the other builder unit with its card and a
    // readout unit on the second, two readout units on the third.
    let through = folder.join("through.sh");
    let script = format!(
        "#!/bin/sh\nhost=1\ncase \"$4 $5\" in\n\"readout 0\" | \"builder 1\" | *card1*) host=2 ;;\nreadout*) host=3 ;;\nesac\n\
         echo \"$host $4\" >>{}/places\nexec ip netns exec {}-$host \"$@\"\n",
        folder.display(),
        network.0
    );
    fs::write(&through, script).unwrap();
    fs::set_permissions(&through, fs::Permissions::from_mode(0o755)).unwrap();

    let host = format!("{}-1", network.0);
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
        "--through",
        through.to_str().unwrap(),
    ];
    let ran = run("ip", &words, &[("MILLSTREAM_LINK", "drop=0.001,seed=5")]);
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {said}", ran.status);

    let mut places: Vec<_> =
        fs::read_to_string(folder.join("places")).unwrap().lines().map(str::to_owned).collect();
    places.sort();
    let units =
        ["1 builder", "1 card", "1 manager", "2 builder", "2 card", "2 readout", "3 readout", "3 readout"];
    assert_eq!(places, units);
    // The payload went over the wire: a third of it comes to the second host from the third.
    let links = run("ip", &["-n", &format!("{}-2", network.0), "-s", "-j", "link", "show", "wire0"], &[]);
    let links: serde_json::Value = serde_json::from_slice(&links.stdout).unwrap();
    let bytes = links[0]["stats64"]["rx"]["bytes"].as_u64().unwrap();
    let payload = json(&report)["payload_bytes"].as_u64().unwrap();
    assert!(bytes > payload / 4, "{bytes} bytes of {payload} came over the wire: {said}");
    let (local, spread) = (json(&folder.join("camera.json")), json(&report));
    for what in ["compared", "agreeing", "set"] {
        let once = local["trigger"][what].as_u64().unwrap();
        assert_eq!(spread["trigger"][what].as_u64().unwrap(), 10 * once, "{what}: {said}");
    }
    assert_eq!(local["trigger"]["agreeing"], local["trigger"]["compared"]);
}
