//! `millstream torus run` with a site file.

use std::process::{Command, Output};

fn millstream(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millstream")).args(words).output().expect("it starts")
}

/// The first torus of APEnet+, cut down to two nodes.
fn site(addresses: &str) -> tempfile::NamedTempFile {
    let text = include_str!("../../../sites/apenet-torus.toml")
        .replace("count = 64", "count = 2")
        .replace("dimensions = [4, 4, 4]", "dimensions = [2]");
    let file = tempfile::Builder::new().suffix(".toml").tempfile().expect("a file");
    std::fs::write(file.path(), text + addresses).expect("written");
    file
}

#[test]
fn a_site_file_names_shape_and_addresses() {
    let ports =
        [millstream_shm::ports::unused(), millstream_shm::ports::unused()].map(|port| port.expect("a port"));
    let file = site(&format!("addresses = [\"127.0.0.1:{}\", \"localhost:{}\"]\n", ports[0], ports[1]));
    let path = file.path().to_str().expect("a name");
    let script = r#"test "$MILLSTREAM_TORUS_DIMENSIONS $MILLSTREAM_TORUS_SIZE" = "2x1x1 2""#;
    let run =
        millstream(&["--device", "soft", "torus", "run", "--site", path, "--json", "--", "sh", "-c", script]);
    let error = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success(), "{error}");
    let report: serde_json::Value = serde_json::from_slice(&run.stdout).expect("JSON");
    assert_eq!((&report["dimensions"], &report["total"]["idle"]), (&"2x1x1".into(), &true.into()));
}

#[test]
fn a_site_without_addresses_is_refused_by_name() {
    let file = site("");
    let path = file.path().to_str().expect("a name");
    let run = millstream(&["torus", "run", "--site", path, "--", "true"]);
    let error = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!run.status.success() && error.contains("torus \"torus\" has no addresses"), "{error}");
    let run = millstream(&["torus", "run", "--", "true"]);
    let error = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!run.status.success() && error.contains("--dimensions"), "{error}");
}
