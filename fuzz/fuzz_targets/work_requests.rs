//! Work requests of any form through the C ABI; `play` interprets the input. `MILLSTREAM_PATH=wire` selects packets.

#![no_main]

#[path = "../../crates/capi/tests/work_requests/play/mod.rs"]
mod play;

use std::sync::{Mutex, OnceLock};

use libfuzzer_sys::fuzz_target;
use play::FuzzSession;

static SESSION: OnceLock<Mutex<FuzzSession>> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let session = SESSION.get_or_init(|| Mutex::new(FuzzSession::new()));
    session.lock().expect("a panic ends the process").run(bytes);
});
