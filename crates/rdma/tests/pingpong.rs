//! Runs example 2 between two threads and between two processes.

#[path = "../../../examples/2-verbs-rust/pingpong.rs"]
#[allow(dead_code, reason = "its main is not used")]
mod example;

use std::process::{Command, Stdio};

use example::{Plan, Role, play, two_threads};
use millstream_rdma::{Deadline, DeviceSelector, connect};

const ADDRESS: &str = "MILLSTREAM_TEST_DIAL";

fn plan(bytes: u32) -> Plan {
    Plan { device: DeviceSelector::from_environment(), rounds: 500, bytes }
}

#[test]
fn two_threads_play() {
    for bytes in [8, 4096, 1 << 20] {
        two_threads(&plan(bytes)).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn two_processes_play() {
    let listener = connect::listen("127.0.0.1:0").unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "plays_first", "--ignored", "--nocapture"])
        .env(ADDRESS, listener.address().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept(Deadline::after(std::time::Duration::from_secs(10))).unwrap();
    let played = play(Role::Pong, &plan(4096), stream);
    let status = other.wait().unwrap();
    played.unwrap_or_else(|error| panic!("{error}"));
    assert!(status.success(), "the other process: {status}");
}

#[test]
#[ignore = "the other process of two_processes_play"]
fn plays_first() {
    let address = std::env::var(ADDRESS).unwrap();
    let stream = connect::dial(&address, Deadline::after(std::time::Duration::from_secs(10))).unwrap();
    play(Role::Ping, &plan(4096), stream).unwrap_or_else(|error| panic!("{error}"));
}
