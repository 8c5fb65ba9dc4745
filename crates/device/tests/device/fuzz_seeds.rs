//! Sequences of operations against the device (`operations`): the fuzzer's corpus, and random ones.
//! `MILLSTREAM_PLAYS` sets the number of random ones, `MILLSTREAM_SEED` the random seed.

use std::path::Path;

use crate::operations::FuzzSession;
use crate::support::{Process, Random, from_environment};

fn session() -> FuzzSession<impl FnMut(&str) -> String> {
    let mut peer = Process::start("peer");
    FuzzSession::new(move |line: &str| {
        peer.send_line(line);
        peer.recv_line()
    })
}

#[test]
fn fuzzer_seeds_are_tolerated() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/device");
    let mut session = session();
    let mut count = 0;
    for entry in std::fs::read_dir(&seeds).expect("the seeds are there") {
        session.run(&std::fs::read(entry.expect("readable").path()).expect("a file"));
        count += 1;
    }
    assert!(count >= 10, "{count} seeds");
}

#[test]
fn random_operation_sequences_are_tolerated() {
    let seed = from_environment("MILLSTREAM_SEED", 1);
    let mut random = Random::new(seed);
    let mut session = session();
    for play in 0..from_environment("MILLSTREAM_PLAYS", 60) {
        let len = random.below(400) as usize;
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        println!("seed {seed}, play {play}");
        session.run(&bytes);
    }
}
