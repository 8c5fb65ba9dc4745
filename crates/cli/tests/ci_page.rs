//! The script of docs/ci.md, as it stands there, in a network namespace of its own: its programs listen on their default ports.

#[allow(dead_code, reason = "the script starts its programs itself")]
mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::finish;

const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/ci.md"));

#[test]
fn the_job_of_the_page_runs() {
    let own_network = ["--user", "--map-root-user", "--net"];
    let allowed = Command::new("unshare").args(own_network).arg("true").stderr(Stdio::null()).status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("skipped: this user may not make a network namespace (unshare --user --net)");
        return;
    }
    let (_, script) = PAGE.split_once("```sh\n").expect("the page has a script");
    let (script, _) = script.split_once("```").expect("the script ends");
    let folder = tempfile::tempdir().expect("a folder");
    let program = Path::new(env!("CARGO_BIN_EXE_millstream")).parent().expect("a folder").to_owned();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").expect("PATH"));
    let job = Command::new("unshare")
        .args(own_network)
        .args(["sh", "-c", "ip link set lo up && exec sh -c \"$1\"", "sh", script])
        .env("PATH", path)
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("unshare starts");
    let shown = finish(job).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(shown.matches("#bytes").count(), 4, "{shown}");
    assert!(shown.contains("Final:"), "{shown}");
    let is_capture = |name: &str| name.starts_with("packets-") && name.ends_with(".pcap");
    let files = folder.path().read_dir().expect("own folder");
    let names = files.map(|file| file.expect("own folder").file_name().into_string().expect("ASCII"));
    assert!(names.filter(|name| is_capture(name)).count() >= 2, "a capture of each side");
}
