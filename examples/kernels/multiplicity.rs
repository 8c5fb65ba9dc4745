//! A multiplicity trigger: accepts an event in which enough sources have a sample above a threshold.
//!
//! Samples are signed 16-bit numbers. Arguments: 0: threshold, 1: number of sources, 2: 1 to decide on events with
//! missing or corrupt fragments as well. Decision bit 0: enough sources; bit 1: and the event is incomplete.
//!
//!     rustc --edition 2024 --target wasm32-unknown-unknown -O -C panic=abort -C strip=debuginfo \
//!         --crate-type cdylib -o multiplicity.wasm multiplicity.rs
#![no_std]

mod millstream;

use millstream::{Fragment, argument, fragments};

fn exceeds(fragment: &Fragment, threshold: i64) -> bool {
    let (samples, _) = fragment.payload().as_chunks::<2>();
    samples.iter().any(|bytes| i64::from(i16::from_le_bytes(*bytes)) > threshold)
}

#[unsafe(no_mangle)]
extern "C" fn event(_number: u64, table: u32, count: u32) -> u32 {
    // SAFETY: the parameters are those of the region.
    let fragments = unsafe { fragments(table, count) };
    let incomplete = fragments.iter().any(|fragment| fragment.status != 0);
    if incomplete && argument(2) != 1 {
        return 0;
    }
    let threshold = argument(0).cast_signed();
    let there = fragments.iter().filter(|fragment| fragment.status == 0);
    let above = there.filter(|fragment| exceeds(fragment, threshold)).count() as u64;
    match (above >= argument(1), incomplete) {
        (false, _) => 0,
        (true, false) => 1,
        (true, true) => 3,
    }
}
