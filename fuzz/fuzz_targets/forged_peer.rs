//! Packets of any form from the peer of queue pairs on the wire; `forged_peer` interprets the input.

#![no_main]

#[path = "../../crates/device/tests/device/forged_peer/mod.rs"]
mod forged_peer;
#[path = "../../crates/device/tests/device/support/network.rs"]
mod network;

use std::sync::{Mutex, OnceLock};

use forged_peer::FuzzSession;
use libfuzzer_sys::fuzz_target;

static SESSION: OnceLock<Mutex<FuzzSession>> = OnceLock::new();

fn new_session() -> Mutex<FuzzSession> {
    let apart = network::own_network("forged_peer");
    assert!(apart, "forged packets need a network namespace of their own: run as root, or below `unshare -rn`");
    // SAFETY: the device has started no thread yet that reads the environment.
    unsafe { std::env::set_var("MILLSTREAM_PATH", "wire") };
    Mutex::new(FuzzSession::new())
}

fuzz_target!(|bytes: &[u8]| {
    let session = SESSION.get_or_init(new_session);
    session.lock().expect("a panic ends the process").run(bytes);
});
