//! A minimal kernel: adds a number to each 32-bit word of a range of card memory.
//!
//! Arguments: 0: offset of the range, 1: number of words, 2: the number. Result: 0: words changed.
//!
//!     rustc --edition 2024 --target wasm32-unknown-unknown -O -C panic=abort -C strip=debuginfo \
//!         --crate-type cdylib -o template.wasm template.rs
#![no_std]

mod millstream;

use millstream::{argument, memory, refuse, result};

#[unsafe(no_mangle)]
extern "C" fn run() {
    let (offset, count) = (argument(0), argument(1));
    let Ok(number) = u32::try_from(argument(2)) else { refuse(2) };
    // SAFETY: the only slice; every bit pattern is a number.
    let words: &mut [u32] = unsafe { memory(offset, count) };
    for word in words.iter_mut() {
        *word = word.wrapping_add(number);
    }
    result(0, count);
}
