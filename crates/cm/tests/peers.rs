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
/// A REQ is repeated after 250 ms and after 750 ms.
const STOPPED: Duration = Duration::from_millis(1200);
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

#[test]
fn stopped_listener_gets_one_request_of_a_connection() {
    succeeds("listener is stopped");
}

/// Entry point of the child processes.
#[test]
#[ignore = "started by the tests that need another process"]
fn other_process() {
    match env::var(ROLE).as_deref() {
        Ok("peer exits") => peer_exits(),
        Ok("peer is killed") => peer_is_killed(),
        Ok("listener is stopped") => listener_is_stopped(),
        Ok("connects") => connects(Duration::ZERO),
        Ok("connects to a stopped listener") => connects(STOPPED),
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
    let exit = || {
        let (server, id, mut peer) = connected();
        peer.stdin.take().expect("piped").write_all(b"\n").expect("it reads");
        assert_eq!(server.event(event::DISCONNECTED).uid, 3);
        server.disconnect(id);
        let began = Instant::now();
        assert!(peer.wait().expect("our own child").success());
        began.elapsed()
    };
    // It would wait for a second each time if it were not answered. A busy machine may delay one exit.
    assert!((0..5).any(|_| exit() < Duration::from_millis(900)), "it waited though it was answered");
}

fn peer_is_killed() {
    let (server, id, mut peer) = connected();
    peer.kill().expect("our own child");
    peer.wait().expect("our own child");
    server.disconnect(id);
    assert_eq!(server.event(event::DISCONNECTED).uid, 3);
}

/// The listener reads a REQ together with its repetitions.
fn listener_is_stopped() {
    // SAFETY: a plain system call. It ends a process that waits for an event that does not come.
    unsafe { libc::alarm(ALARM_SECONDS as u32) };
    let server = Channel::open();
    let (_, port) = server.listen(1);
    let mut peer = start("connects to a stopped listener", port);
    let asked = server.event(event::CONNECT_REQUEST);
    server.accept(asked.id, 3, 1);
    assert_eq!(server.event(event::ESTABLISHED).uid, 3);
    peer.stdin.take().expect("piped").write_all(b"\n").expect("it reads");
    assert_eq!(server.event(event::DISCONNECTED).uid, 3);
    server.disconnect(asked.id);
    assert!(peer.wait().expect("our own child").success());
}

/// Stops its parent for this time while it connects. Ends at the end of its input, or exits after a line.
fn connects(parent_is_stopped: Duration) {
    let port = env::var(PORT).expect("a port").parse().expect("a number");
    let client = Channel::open();
    let signal_parent = |signal| {
        if !parent_is_stopped.is_zero() {
            // SAFETY: plain system calls. The parent waits for this process, so its id is not another one's.
            unsafe { libc::kill(libc::getppid(), signal) };
        }
    };
    if !parent_is_stopped.is_zero() {
        // A process that joins the port learns the services of those that run.
        client.listen(9);
    }
    signal_parent(libc::SIGSTOP);
    let id = client.connect(2, port);
    std::thread::sleep(parent_is_stopped);
    signal_parent(libc::SIGCONT);
    client.event(event::CONNECT_RESPONSE);
    client.accept(id, 0, 0);
    let mut byte = 0u8;
    // SAFETY: one byte on the stack.
    let n = unsafe { libc::read(std::io::stdin().as_raw_fd(), (&raw mut byte).cast(), 1) };
    assert_eq!(n, 1);
    std::process::exit(0);
}
