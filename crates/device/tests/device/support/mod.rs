//! Support code of the tests: ends of a connection, in this process or another one, that execute commands.

mod actor;
mod adapter;
mod end;
mod memory;
mod network;
mod process;
mod random;
mod usage;
pub(crate) mod wire;

pub(crate) use actor::{
    Command, Completion, CqKind, QpConfig, Reply, Request, attributes, connect_queue_pair, mask, readable,
    serve,
};
pub(crate) use adapter::{
    Adapter, POISON, element, event, has_begun, is_empty, next, peek, poison, run_role,
};
pub(crate) use end::{End, Placement, Region, connect, pair, request, statuses};
pub(crate) use memory::{GUARD, Kind, Memory};
pub(crate) use network::own_network;
pub(crate) use process::{Process, recv_from_parent, send_to_parent};
pub(crate) use random::{Random, from_environment};
pub(crate) use usage::Usage;

use std::time::{Duration, Instant};

/// Longest wait for anything expected.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until `done`, and yields the core.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !done() {
        assert!(Instant::now() < deadline, "{what} does not happen");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Bytes that differ by seed and by offset.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 56) as u8
        })
        .collect()
}

/// Runs the test `name` in a process of its own, in which pages move at registration. False in that process: the test goes
/// on there. True in all others, where it has been run, or skipped with a printed reason.
pub(crate) fn runs_with_moved_pages(name: &str) -> bool {
    if millstream_shm::relocate::moves_at_registration() || !pages_move() {
        return !pages_move();
    }
    let mut command = std::process::Command::new(std::env::current_exe().expect("a test program has a path"));
    command.args(["--exact", name, "--nocapture"]).env("MILLSTREAM_MOVE", "register");
    let output = command.output().expect("this program starts again");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{name}: {text}\n{errors}");
    true
}

/// False, with a printed reason, where registered pages do not move, so that peers cannot map them.
pub(crate) fn pages_move() -> bool {
    let moves = millstream_shm::relocate::is_available();
    if !moves {
        println!("skipped: pages do not move here; run as root, or set vm.unprivileged_userfaultfd=1");
    }
    moves
}
