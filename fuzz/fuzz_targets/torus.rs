//! Frames, credits and orders of liars at a node of a torus, by the interpreter of the crate's tests.

#![no_main]

#[path = "../../crates/torus/tests/common/hostile.rs"]
mod hostile;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hostile::play(bytes));
