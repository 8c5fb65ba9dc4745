//! The seeds of the fuzzer that plays against a connection, and some random bytes: with any compiler, in `make test`.

#[path = "common/play.rs"]
mod play;

use std::path::Path;

#[test]
fn what_fuzzers_found_breaks_no_rule() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/connection");
    let files: Vec<_> = std::fs::read_dir(seeds).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() > 50, "{} seeds", files.len());
    for file in files {
        println!("{}", file.display());
        play::play(&std::fs::read(file).unwrap());
    }
}
