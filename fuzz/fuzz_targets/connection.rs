//! Any packets at any times for a connection with outstanding requests; `play.rs` interprets the input.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/proto/tests/common/play.rs"]
mod play;

fuzz_target!(|bytes: &[u8]| play::play(bytes));
