//! Replays the fuzzer's seeds and some random inputs, with any compiler.

#[path = "common/play.rs"]
mod play;

use std::path::Path;

#[test]
fn fuzzer_seeds_break_no_invariant() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/connection");
    let files: Vec<_> = std::fs::read_dir(seeds).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() > 50, "{} seeds", files.len());
    for file in files {
        println!("{}", file.display());
        play::play(&std::fs::read(file).unwrap());
    }
}
