//! Sequences of operations against the device (`operations`): the fuzzer's corpus, and random ones.
//! `MILLSTREAM_PLAYS` sets the number of random ones, `MILLSTREAM_SEED` the random seed.

use std::path::Path;

use crate::operations::Stage;
use crate::support::{Process, Random, from_environment};

fn stage() -> Stage<impl FnMut(&str) -> String> {
    let mut partner = Process::start("partner");
    Stage::new(move |line: &str| {
        partner.say(line);
        partner.hear()
    })
}

#[test]
fn fuzzer_seeds_are_tolerated() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/device");
    let mut stage = stage();
    let mut count = 0;
    for entry in std::fs::read_dir(&seeds).expect("the seeds are there") {
        stage.play(&std::fs::read(entry.expect("readable").path()).expect("a file"));
        count += 1;
    }
    assert!(count >= 10, "{count} seeds");
}

#[test]
fn random_operation_sequences_are_tolerated() {
    let seed = from_environment("MILLSTREAM_SEED", 1);
    let mut random = Random::new(seed);
    let mut stage = stage();
    for play in 0..from_environment("MILLSTREAM_PLAYS", 60) {
        let len = random.below(400) as usize;
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        println!("seed {seed}, play {play}");
        stage.play(&bytes);
    }
}
