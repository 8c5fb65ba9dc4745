//! `millstream site keys`, and cards that use the keys.

#[path = "common/running.rs"]
mod running;

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use millstream_tls::KeyFiles;
use running::Running;

const SITE: &str = "name = \"lab\"\n[[host]]\nname = \"node\"\ncount = 2\n[[host.socket]]\nprocessor = \"Genoa\"\n\
                    cores = 2\nclock = \"2 GHz\"\nmemory = \"1 GiB\"\nmemory-bandwidth = \"10 GB/s\"\n";

fn millstream(folder: &Path, keys: Option<&str>, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(words).current_dir(folder).env("XDG_STATE_HOME", folder).env_remove("MILLSTREAM_SITE");
    match keys {
        Some(keys) => command.env("MILLSTREAM_KEYS", keys),
        None => command.env_remove("MILLSTREAM_KEYS"),
    };
    command
}

fn texts(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[track_caller]
fn does(folder: &Path, keys: Option<&str>, words: &[&str]) -> String {
    let output = millstream(folder, keys, words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", texts(&output));
    texts(&output)
}

#[track_caller]
fn fails(folder: &Path, keys: Option<&str>, words: &[&str]) -> String {
    let output = millstream(folder, keys, words).output().unwrap();
    assert!(!output.status.success(), "{words:?}: {}", texts(&output));
    texts(&output)
}

#[test]
fn keys_of_a_site_are_made_once_and_renewed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("site.toml"), SITE).unwrap();
    let made = does(path, None, &["site", "keys", "site.toml", "--out", "keys", "--days", "30"]);
    assert!(
        made.contains("node0: keys/node0, valid until 20") && made.contains("authority: keys/"),
        "{made}"
    );
    for file in ["authority/certificate.pem", "authority/key.pem", "node0/key.pem", "node1/certificate.pem"] {
        let mode = std::fs::metadata(path.join("keys").join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    let before = std::fs::read(path.join("keys/node0/key.pem")).unwrap();
    let again = fails(path, None, &["site", "keys", "site.toml", "--out", "keys"]);
    assert!(again.contains("keys/node0 exists") && again.contains("--renew"), "{again}");
    assert_eq!(std::fs::read(path.join("keys/node0/key.pem")).unwrap(), before);
    let authority = std::fs::read(path.join("keys/authority/certificate.pem")).unwrap();
    let name = ["--name", "node1=10.0.0.7"];
    does(path, None, &[&["site", "keys", "site.toml", "--out", "keys", "--renew"], &name[..]].concat());
    assert_ne!(std::fs::read(path.join("keys/node0/key.pem")).unwrap(), before);
    // A further renewal keeps the name.
    does(path, None, &["site", "keys", "site.toml", "--out", "keys", "--renew"]);
    let names = KeyFiles::in_directory(&path.join("keys/node1")).names().unwrap();
    assert!(names.contains(&"10.0.0.7".to_owned()) && names.contains(&"node1".to_owned()), "{names:?}");
    assert_eq!(std::fs::read(path.join("keys/authority/certificate.pem")).unwrap(), authority);
    let nothing = fails(path, None, &["site", "keys", "site.toml", "--out", "other", "--renew"]);
    assert!(nothing.contains("other has no authority"), "{nothing}");
    let unknown = fails(path, None, &["site", "keys", "site.toml", "--out", "o", "--name", "node7=a"]);
    assert!(unknown.contains("--name node7") && unknown.contains("no host of this name"), "{unknown}");
}

#[test]
fn keys_that_are_incomplete_are_completed_or_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let out = path.join("keys");
    let names = || {
        let mut names: Vec<_> = std::fs::read_dir(&out).map_or(Vec::new(), |entries| {
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        });
        names.sort();
        names
    };
    let keys = ["site", "keys", "site.toml", "--out", "keys"];
    let renew = ["site", "keys", "site.toml", "--out", "keys", "--renew"];

    // A host name that is no name of a certificate: nothing is written.
    std::fs::write(path.join("site.toml"), SITE.to_owned() + &SITE.replace("node", "-x")[13..]).unwrap();
    let refused = fails(path, None, &keys);
    assert!(refused.contains("node \"-x0\": its name must be a host name"), "{refused}");
    assert!(names().is_empty(), "{:?}", names());

    std::fs::write(path.join("site.toml"), SITE).unwrap();
    does(path, None, &keys);
    assert_eq!(names(), ["authority", "node0", "node1"]);
    // A run that ended before it had written all nodes, and what it left behind.
    std::fs::remove_dir_all(out.join("node1")).unwrap();
    std::fs::create_dir(out.join(".node1.new")).unwrap();
    std::fs::write(out.join(".node1.new/key.pem"), "").unwrap();
    does(path, None, &renew);
    assert_eq!(names(), ["authority", "node0", "node1"]);
    // A certificate that cannot be read.
    std::fs::write(out.join("node1/certificate.pem"), "").unwrap();
    let warned = does(path, None, &renew);
    assert!(
        warned.contains("keys/node1/certificate.pem: has no certificate in PEM; node1 keeps no names"),
        "{warned}"
    );
    let names = KeyFiles::in_directory(&out.join("node1")).names().unwrap();
    assert!(names.contains(&"node1".to_owned()), "{names:?}");
    // Half an authority, and none: both commands name a way out that is not the other command alone.
    std::fs::remove_file(out.join("authority/certificate.pem")).unwrap();
    let half = fails(path, None, &renew);
    assert!(
        half.contains("authority/certificate.pem is missing; restore it")
            && half.contains("another directory"),
        "{half}"
    );
    std::fs::remove_dir_all(out.join("authority")).unwrap();
    let none = fails(path, None, &renew);
    assert!(
        none.contains("keys has no authority; restore") && none.contains("in a directory that has none"),
        "{none}"
    );
    let again = fails(path, None, &keys);
    assert!(again.contains("keys/node0 exists; choose another directory"), "{again}");
}

#[test]
fn a_card_with_keys_answers_commands_with_keys() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    std::fs::write(path.join("site.toml"), SITE).unwrap();
    does(path, None, &["site", "keys", "site.toml", "--out", "keys"]);
    let name = format!("keys-{}", std::process::id());
    let serve = ["card", "serve", &name, "--listen", "127.0.0.1:0", "--memory", "32MiB", "--banks", "8"];
    let missing = fails(path, None, &[&serve, &["--node", "node1"][..]].concat());
    assert!(missing.contains("keys are required") && missing.contains("MILLSTREAM_KEYS"), "{missing}");
    let every = fails(path, Some("keys/node0"), &[&serve, &["--node", "localhost"][..]].concat());
    assert!(every.contains("node \"localhost\": the certificates of all nodes have this name"), "{every}");
    let broken = fails(path, Some("nowhere"), &serve);
    assert!(broken.contains("certificate nowhere/certificate.pem"), "{broken}");

    let mut process = millstream(path, Some("keys/node0"), &[&serve, &["--node", "node1"][..]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let _card = Running(process);
    let address = line.split_whitespace().nth(4).unwrap_or_else(|| panic!("{line}"));
    let info = does(path, Some("keys/node1"), &["card", "info", address]);
    assert!(info.contains("32"), "{info}");
    let plain = fails(path, None, &["card", "info", address]);
    assert!(plain.contains("uses TLS") && plain.contains("MILLSTREAM_KEYS"), "{plain}");
    let other = fails(path, Some("keys/node0"), &["card", "info", address]);
    assert!(other.contains("\"node0\": its node is not on the peer's list"), "{other}");
}
