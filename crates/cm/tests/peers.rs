//! Connections by management datagrams between processes, of which one exits or is killed.
//!
//! The environment selects the path between processes. So this program starts itself again: once as the
//! listener, and that once more for each process that connects.

mod common;

use std::env;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::Channel;
use millstream_cm::abi::event;

/// Shorter than any timeout, longer than any delay of a loaded machine.
const ALARM_SECONDS: u64 = 20;
const ROLE: &str = "MILLSTREAM_TEST_ROLE";
const PORT: &str = "MILLSTREAM_TEST_PORT";

fn start(role: &str, port: u16) -> Child {
    let mut command = Command::new(env::current_exe().expect("a test program has a path"));
    command.args(["--ignored", "--exact", "other_process", "--nocapture"]);
    command.env(ROLE, role).env(PORT, port.to_string()).env("MILLSTREAM_PATH", "wire");
    command.stdin(Stdio::piped()).spawn().expect("this program starts again")
}

fn succeeds(role: &str) {
    assert!(start(role, 0).wait().expect("our own child").success(), "{role}");
}

#[test]
fn exiting_process_disconnects() {
    succeeds("peer exits");
}

#[test]
fn killed_process_gets_a_drep_from_its_host() {
    succeeds("peer is killed");
}

/// Entry point of the child processes.
#[test]
#[ignore = "started by the tests that need another process"]
fn other_process() {
    match env::var(ROLE).as_deref() {
        Ok("peer exits") => peer_exits(),
        Ok("peer is killed") => peer_is_killed(),
        Ok("connects") => connects(),
        role => panic!("{role:?} is no role"),
    }
}

/// A listener with a connection from another process, and the identifier of the connection.
fn connected() -> (Channel, u32, Child) {
    // SAFETY: a plain system call. It ends a process that waits for an event that does not come.
    unsafe { libc::alarm(ALARM_SECONDS as u32) };
    let server = Channel::open();
    let (_, port) = server.listen(1);
    let peer = start("connects", port);
    let asked = server.event(event::CONNECT_REQUEST);
    server.accept(asked.id, 3, 1);
    assert_eq!(server.event(event::ESTABLISHED).uid, 3);
    (server, asked.id, peer)
}

fn peer_exits() {
    let (server, id, mut peer) = connected();
    peer.stdin.take().expect("piped").write_all(b"\n").expect("it reads");
    assert_eq!(server.event(event::DISCONNECTED).uid, 3);
    server.disconnect(id);
    let began = Instant::now();
    assert!(peer.wait().expect("our own child").success());
    assert!(began.elapsed() < Duration::from_millis(900), "it waited though it was answered");
}

fn peer_is_killed() {
    let (server, id, mut peer) = connected();
    peer.kill().expect("our own child");
    peer.wait().expect("our own child");
    server.disconnect(id);
    assert_eq!(server.event(event::DISCONNECTED).uid, 3);
}

/// Ends at the end of its input, or exits after a line.
fn connects() {
    let port = env::var(PORT).expect("a port").parse().expect("a number");
    let client = Channel::open();
    let id = client.connect(2, port);
    client.event(event::CONNECT_RESPONSE);
    client.accept(id, 0, 0);
    let mut byte = 0u8;
    // SAFETY: one byte on the stack.
    let n = unsafe { libc::read(std::io::stdin().as_raw_fd(), (&raw mut byte).cast(), 1) };
    assert_eq!(n, 1);
    std::process::exit(0);
}
