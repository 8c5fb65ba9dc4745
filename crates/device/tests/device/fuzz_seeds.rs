//! Sequences of operations against the device (`operations`), and packets of a forged peer (`forged_peer`): the fuzzer's
//! corpus, and random ones.
//! `MILLSTREAM_PLAYS` sets the number of random ones, `MILLSTREAM_SEED` the random seed.

use std::path::Path;

use crate::forged_peer;
use crate::operations::FuzzSession;
use crate::support::{Process, Random, from_environment, own_network};

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

#[test]
fn packets_of_a_forged_peer_reach_no_other_memory() {
    let mut process = Process::start_with("forged_peer", |command| command.env("MILLSTREAM_PATH", "wire"));
    assert!(process.finish().success(), "see the messages of the other process");
}

/// In another process.
pub(crate) fn forged_peer() {
    if !own_network("packets_of_a_forged_peer_reach_no_other_memory") {
        return;
    }
    let mut session = forged_peer::FuzzSession::new();
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/forged_peer");
    let mut count = 0;
    for entry in std::fs::read_dir(&seeds).expect("the seeds are there") {
        let file = entry.expect("readable").path();
        println!("{}", file.display());
        session.run(&std::fs::read(file).expect("a file"));
        count += 1;
    }
    assert!(count >= 10, "{count} seeds");
    let seed = from_environment("MILLSTREAM_SEED", 1);
    let mut random = Random::new(seed);
    let plays = from_environment("MILLSTREAM_PLAYS", 60);
    for play in 0..plays {
        let len = random.below(400) as usize;
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        println!("seed {seed}, play {play}");
        session.run(&bytes);
    }
    let totals = session.totals;
    println!("{totals:?}");
    assert!(totals.sent > plays * 4 && totals.answers > plays && totals.received > plays / 8, "{totals:?}");
}
